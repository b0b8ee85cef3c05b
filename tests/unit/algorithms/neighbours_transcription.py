"""Independent transcriptions of FedCurv, MOON and FedCL from their papers, in plain PyTorch: slow and obvious.

They share no code with the library; `paper_transcription.py` has what every algorithm is given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from paper_transcription import Federated, Settings, Weights, average, model_with, weights_of
from torch import Tensor, nn

Penalty = Callable[[nn.Module, Tensor], Tensor]  # of the model in training and the batch's inputs


def train_with(penalty: Penalty, start: Weights, client: int, round_: int, problem: Federated) -> nn.Module:
    """A client's round on its supervised loss and a penalty."""
    model = model_with(start, problem.module)
    optimiser = problem.optimiser(model, round_)
    for batch in problem.batches(round_, client):
        optimiser.zero_grad()
        loss = problem.loss(model, client, batch) + penalty(model, problem.clients[client][0][batch])
        torch.autograd.backward(loss)
        optimiser.step()
    return model


def fisher(model: nn.Module, x: Tensor, y: Tensor) -> Weights:
    """Mean, over the examples, of the squared gradient of each one's loss: one example after another."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one, label in zip(x, y, strict=True):
        model.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(one[None]), label[None]))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] = total[name] + parameter.grad.detach() ** 2
    return {name: value / len(x) for name, value in total.items()}


def fedcurv(settings: Settings, problem: Federated) -> list[Weights]:
    """Every other client of the last round is a penalty of its own: nothing is summed up or subtracted."""
    w, history = weights_of(problem.module), []
    last: dict[int, tuple[Weights, Weights]] = {}  # model and Fisher information of each client of the last round
    for round_, cohort in enumerate(problem.cohorts):
        local, now = {}, {}
        for client in cohort:
            others = [both for other, both in last.items() if other != client]

            def penalty(model: nn.Module, x: Tensor, others: list[tuple[Weights, Weights]] = others) -> Tensor:
                parts = [
                    (curvature[name] * (p - theirs[name]) ** 2).sum()
                    for theirs, curvature in others
                    for name, p in model.named_parameters()
                ]
                return float(settings["lam"]) * torch.stack([torch.zeros((), dtype=torch.float64), *parts]).sum()

            model = train_with(penalty, w, client, round_, problem)
            local[client] = weights_of(model)
            now[client] = (local[client], fisher(model, *problem.clients[client]))
        last, w = now, average(local, problem)
        history.append(w)
    return history


def moon(settings: Settings, problem: Federated) -> list[Weights]:
    """With a cosine and a logarithm as the paper writes them; the representation is all of a sequence but its end."""
    w, history = weights_of(problem.module), []
    previous: dict[int, Weights] = {}
    for round_, cohort in enumerate(problem.cohorts):
        local = {}
        for client in cohort:
            received = model_with(w, problem.module)
            before = model_with(previous.get(client, w), problem.module)

            def contrast(
                model: nn.Module, x: Tensor, received: nn.Module = received, before: nn.Module = before
            ) -> Tensor:
                z, z_glob, z_prev = (representation(which, x) for which in (model, received, before))
                near = torch.exp(F.cosine_similarity(z, z_glob.detach()) / settings["temperature"])
                far = torch.exp(F.cosine_similarity(z, z_prev.detach()) / settings["temperature"])
                return float(settings["mu"]) * -torch.log(near / (near + far)).mean()

            local[client] = weights_of(train_with(contrast, w, client, round_, problem))
        previous.update(local)
        w = average(local, problem)
        history.append(w)
    return history


def representation(model: nn.Module, x: Tensor) -> Tensor:
    for part in list(model.children())[:-1]:
        x = part(x)
    return x


def fedcl(settings: Settings, problem: Federated, proxy: tuple[Tensor, Tensor]) -> list[Weights]:
    """The server measures the model it sends on examples of its own."""
    w, history = weights_of(problem.module), []
    for round_, cohort in enumerate(problem.cohorts):
        importance = fisher(model_with(w, problem.module), *proxy)
        local = {}
        for client in cohort:

            def penalty(model: nn.Module, x: Tensor, w: Weights = w, importance: Weights = importance) -> Tensor:
                parts = [(importance[name] * (p - w[name]) ** 2).sum() for name, p in model.named_parameters()]
                return float(settings["lam"]) / 2 * torch.stack(parts).sum()

            local[client] = weights_of(train_with(penalty, w, client, round_, problem))
        w = average(local, problem)
        history.append(w)
    return history
