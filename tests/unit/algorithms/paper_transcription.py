"""An independent transcription of the algorithms, to check the library against. It shares no code with it.

Written from the paper's text (Algorithm 1, Eq. 3 to 11) and the named readings, with plain PyTorch: copies of the
module, `torch.optim.SGD`, autograd wherever the text says "gradient of", one client after the other. Slow and obvious.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Settings = dict[str, Any]
Weights = dict[str, Tensor]  # by parameter name


@dataclass(frozen=True)
class Federated:
    """What every algorithm is given: a starting model, the clients' examples, who trains when on what, and how."""

    module: nn.Module
    clients: Sequence[tuple[Tensor, Tensor]]
    cohorts: Sequence[Sequence[int]]  # one list of clients for each round
    batches: Callable[[int, int], Sequence[Tensor]]  # (round, client) -> positions of each batch
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0

    def lr_at(self, round_: int) -> float:
        return self.lr * self.lr_decay**round_

    def optimiser(self, model: nn.Module, round_: int) -> torch.optim.SGD:
        """A fresh one for each client and round: no momentum is carried over."""
        return torch.optim.SGD(
            model.parameters(), lr=self.lr_at(round_), momentum=self.momentum, weight_decay=self.weight_decay
        )

    def loss(self, model: nn.Module, client: int, batch: Tensor) -> Tensor:
        x, y = self.clients[client]
        return F.cross_entropy(model(x[batch]), y[batch])

    def examples(self, client: int) -> int:
        return len(self.clients[client][1])


def train(name: str, settings: Settings, problem: Federated) -> list[Weights]:
    """The global model's weights after each round."""
    algorithms: dict[str, Callable[[Settings, Federated], list[Weights]]] = {
        "fedavg": fedavg,
        "fedprox": fedprox,
        "fedavgm": fedavgm,
        "fedsgd": fedsgd,
        "scaffold": scaffold,
        "fedgg": fedgg,
    }
    return algorithms[name](settings, problem)


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def model_with(weights: Weights, like: nn.Module) -> nn.Module:
    model = copy.deepcopy(like)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def average(models: dict[int, Weights], problem: Federated) -> Weights:
    """Eq. 3: the participants' models, each by its share of the participants' examples."""
    total = sum(problem.examples(client) for client in models)
    names = next(iter(models.values())).keys()
    return {
        name: torch.stack([w[name] * (problem.examples(client) / total) for client, w in models.items()]).sum(0)
        for name in names
    }


# ---------------------------------------------------------------------------------------------------------------------
# FedAvg and its relatives


def fedavg(settings: Settings, problem: Federated) -> list[Weights]:
    w, history = weights_of(problem.module), []
    for round_, cohort in enumerate(problem.cohorts):
        local = {}
        for client in cohort:
            model = model_with(w, problem.module)
            optimiser = problem.optimiser(model, round_)
            for batch in problem.batches(round_, client):
                optimiser.zero_grad()
                torch.autograd.backward(problem.loss(model, client, batch))
                optimiser.step()
            local[client] = weights_of(model)
        w = average(local, problem)
        history.append(w)
    return history


def fedprox(settings: Settings, problem: Federated) -> list[Weights]:
    w, history = weights_of(problem.module), []
    for round_, cohort in enumerate(problem.cohorts):
        local = {}
        for client in cohort:
            model = model_with(w, problem.module)
            optimiser = problem.optimiser(model, round_)
            for batch in problem.batches(round_, client):
                optimiser.zero_grad()
                distance = torch.stack([(p - w[name]).pow(2).sum() for name, p in model.named_parameters()]).sum()
                torch.autograd.backward(problem.loss(model, client, batch) + settings["mu"] / 2 * distance)
                optimiser.step()
            local[client] = weights_of(model)
        w = average(local, problem)
        history.append(w)
    return history


def fedavgm(settings: Settings, problem: Federated) -> list[Weights]:
    w, history = weights_of(problem.module), []
    velocity = {name: torch.zeros_like(value) for name, value in w.items()}
    for round_, cohort in enumerate(problem.cohorts):
        local = {}
        for client in cohort:
            model = model_with(w, problem.module)
            optimiser = problem.optimiser(model, round_)
            for batch in problem.batches(round_, client):
                optimiser.zero_grad()
                torch.autograd.backward(problem.loss(model, client, batch))
                optimiser.step()
            local[client] = weights_of(model)
        mean = average(local, problem)
        velocity = {name: settings["momentum"] * velocity[name] + (mean[name] - w[name]) for name in w}
        w = {name: w[name] + settings["server_lr"] * velocity[name] for name in w}
        history.append(w)
    return history


def fedsgd(settings: Settings, problem: Federated) -> list[Weights]:
    """One step on all of a client's examples; the batches handed in are not looked at."""
    w, history = weights_of(problem.module), []
    for round_, cohort in enumerate(problem.cohorts):
        local = {}
        for client in cohort:
            model = model_with(w, problem.module)
            optimiser = problem.optimiser(model, round_)
            torch.autograd.backward(problem.loss(model, client, torch.arange(problem.examples(client))))
            optimiser.step()
            local[client] = weights_of(model)
        w = average(local, problem)
        history.append(w)
    return history


# ---------------------------------------------------------------------------------------------------------------------
# SCAFFOLD, Option II


def scaffold(settings: Settings, problem: Federated) -> list[Weights]:
    """`correction`: plain, exact (both in the gradient) or after (the step); `variate_mean`: share or uniform."""
    w, history = weights_of(problem.module), []
    zero = {name: torch.zeros_like(value) for name, value in w.items()}
    server_variate = dict(zero)
    client_variates = {client: dict(zero) for client in range(len(problem.clients))}
    for round_, cohort in enumerate(problem.cohorts):
        lr, local, new_variates = problem.lr_at(round_), {}, {}
        for client in cohort:
            own = client_variates[client]
            correction = {name: server_variate[name] - own[name] for name in w}
            model = model_with(w, problem.module)
            optimiser = problem.optimiser(model, round_)
            batches = problem.batches(round_, client)
            for batch in batches:
                optimiser.zero_grad()
                torch.autograd.backward(problem.loss(model, client, batch))
                if settings["correction"] in ("plain", "exact"):
                    for name, parameter in model.named_parameters():
                        assert parameter.grad is not None
                        parameter.grad += correction[name]
                optimiser.step()
                if settings["correction"] == "after":
                    with torch.no_grad():
                        for name, parameter in model.named_parameters():
                            parameter.sub_(lr * correction[name])
            local[client] = weights_of(model)
            steps = float(len(batches))
            if settings["correction"] == "exact":
                steps = total_push(len(batches), problem.momentum)
            new_variates[client] = {
                name: own[name] - server_variate[name] + (w[name] - local[client][name]) / (steps * lr) for name in w
            }
        w = average(local, problem)
        everyone = sum(problem.examples(client) for client in range(len(problem.clients)))
        for client in cohort:
            by_share = settings["variate_mean"] == "share"
            weight = problem.examples(client) / everyone if by_share else 1 / len(problem.clients)
            for name in w:
                change = new_variates[client][name] - client_variates[client][name]
                server_variate[name] = server_variate[name] + weight * change
        client_variates.update(new_variates)
        history.append(w)
    return history


def total_push(steps: int, momentum: float) -> float:
    """a_K, by playing it through: how many times a constant gradient has been stepped along after K steps."""
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        moved += velocity
    return moved


# ---------------------------------------------------------------------------------------------------------------------
# FedGG


def fedgg(settings: Settings, problem: Federated) -> list[Weights]:
    """Algorithm 1, with `settings` naming the reading: weight, gradient, first_step, scope, direction."""
    w, history = weights_of(problem.module), []
    before: Weights | None = None  # w^{r-1}
    received: dict[int, Weights] = {}  # the last global model each client has had
    round_of: dict[int, int] = {}  # the round it had it in
    for round_, cohort in enumerate(problem.cohorts):
        local = {}
        for client in cohort:
            earlier = received.get(client) if settings["direction"] == "received" else before
            update = None if earlier is None else {name: w[name] - earlier[name] for name in w}
            covered = round_ - round_of.get(client, round_ - 1) if settings["direction"] == "received" else 1
            local[client] = _local_training(settings, problem, round_, client, w, update, covered)
            received[client], round_of[client] = w, round_
        before, w = w, average(local, problem)
        history.append(w)
    return history


def _local_training(
    settings: Settings,
    problem: Federated,
    round_: int,
    client: int,
    w: Weights,
    update: Weights | None,
    covered: int,
) -> Weights:
    """`covered`: the rounds in which the global model moved by `update`."""
    model = model_with(w, problem.module)
    optimiser = problem.optimiser(model, round_)
    groups = _groups(settings, model)
    previous = w  # w_i(m-2), once there is one
    for m, batch in enumerate(problem.batches(round_, client), start=1):
        current = weights_of(model)  # w_i(m-1)
        optimiser.zero_grad()
        loss = problem.loss(model, client, batch)
        additions: list[tuple[dict[str, nn.Parameter], Tensor]] = []  # what the text gives as a vector, not as a loss
        if update is not None:
            for group in groups:
                u = torch.cat([(p - w[name]).flatten() for name, p in group.items()])
                g = torch.cat([update[name].flatten() for name in group])
                s = torch.cat([(current[name] - previous[name]).flatten() for name in group])
                if settings["first_step"] in ("push", "relative_push") and m == 1:
                    additions.append((group, _push(settings, problem, round_, g, covered)))
                elif settings["first_step"] == "epsilon" or m > 1:
                    weight = _weight(settings, u, s)
                    if settings["gradient"] == "exact":
                        loss = loss + weight * _model_cosine_loss(settings, u, g)
                    else:
                        additions.append((group, weight * _printed_gradient(settings, u.detach(), g)))
        torch.autograd.backward(loss)
        for group, addition in additions:
            _add_to_gradient(group, addition)
        optimiser.step()
        previous = current
    return weights_of(model)


def _groups(settings: Settings, model: nn.Module) -> list[dict[str, nn.Parameter]]:
    """The parameters that share a cosine: all of them, or those of one submodule."""
    if settings["scope"] == "model":
        return [dict(model.named_parameters())]
    layers = [dict(layer.named_parameters(prefix=name, recurse=False)) for name, layer in model.named_modules()]
    return [layer for layer in layers if layer]


def _weight(settings: Settings, u: Tensor, s: Tensor) -> float:
    """Eq. 10; a plain number, so that nothing is differentiated through it."""
    if settings["weight"] == "fixed":
        return float(settings["lam"])
    return float(settings["mu"] * torch.linalg.vector_norm(u.detach()) * torch.linalg.vector_norm(s))


def _model_cosine_loss(settings: Settings, u: Tensor, g: Tensor) -> Tensor:
    """Eq. 6. Without a direction on either side there is no cosine, unless epsilon stands in."""
    if settings["first_step"] == "epsilon":
        return 1 - F.cosine_similarity(u, g, dim=0)
    lengths: Tensor = torch.linalg.vector_norm(g) * torch.linalg.vector_norm(u)
    if float(lengths.detach()) == 0:
        return torch.zeros((), dtype=u.dtype)
    return 1 - torch.dot(g, u) / lengths


def _printed_gradient(settings: Settings, u: Tensor, g: Tensor) -> Tensor:
    """Eq. 9 as printed, without its weight: -(g^ + c u^) / |u|."""
    length: Tensor = torch.linalg.vector_norm(u)
    reach: Tensor = torch.linalg.vector_norm(g)
    if settings["first_step"] == "epsilon":
        length, reach = length.clamp_min(1e-8), reach.clamp_min(1e-8)
    if float(length) == 0 or float(reach) == 0:
        return torch.zeros_like(u)
    cosine = torch.dot(g, u) / (reach * length)
    return -(g / reach + cosine * u / length) / length


def _push(settings: Settings, problem: Federated, round_: int, g: Tensor, covered: int) -> Tensor:
    """A gradient that the optimiser turns into a way of `push` (or `push |g|`, for one of the rounds) along g^."""
    length: Tensor = torch.linalg.vector_norm(g)
    if float(length) == 0:
        return torch.zeros_like(g)
    way: Tensor | float = settings["push"] * (length / covered if settings["first_step"] == "relative_push" else 1)
    way = way * settings.get("push_decay", 1.0) ** round_
    return -(way * (1 - problem.momentum) / problem.lr_at(round_)) * g / length


def _add_to_gradient(group: dict[str, nn.Parameter], addition: Tensor) -> None:
    parts = torch.split(addition, [parameter.numel() for parameter in group.values()])
    for parameter, part in zip(group.values(), parts, strict=True):
        assert parameter.grad is not None
        parameter.grad += part.view_as(parameter)
