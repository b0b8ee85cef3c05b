"""What the transcriptions of sharpness-aware methods share, in plain PyTorch: gradients taken on a moved copy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from paper_transcription import Federated, Weights, model_with, weights_of
from torch import Tensor, nn

Place = Callable[[Weights, int], Weights]  # from the client's weights and the step's number: where to go
Change = Callable[[nn.Module], None]  # changes the gradients of a model


def norm(weights: Weights) -> float:
    return float(torch.cat([value.reshape(-1) for value in weights.values()]).norm())


def gradient_at(weights: Weights, given: Federated, client: int, batch: Tensor) -> Weights:
    copy = model_with(weights, given.module)
    torch.autograd.backward(given.loss(copy, client, batch))
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in copy.named_parameters()}


def along(weights: Weights, direction: Weights, distance: float) -> Weights:
    """Moved by so much in this direction; where there is no direction, not at all."""
    size = norm(direction)
    if size == 0:
        return weights
    return {name: weights[name] + distance / size * direction[name] for name in weights}


def trained_elsewhere(
    given: Federated,
    round_: int,
    client: int,
    start: Weights,
    gradient: Callable[[Weights, int, Tensor], Weights],
    change: Change | None = None,
) -> Weights:
    """A client's round by torch's SGD on gradients that `gradient` finds for its weights, the step and the batch."""
    model = model_with(start, given.module)
    optimiser = given.optimiser(model, round_)
    for number, batch in enumerate(given.batches(round_, client)):
        found = gradient(weights_of(model), number, batch)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name].clone()
        if change is not None:
            change(model)
        optimiser.step()
    return weights_of(model)


def sharp_gradient(given: Federated, client: int, rho: float) -> Callable[[Weights, int, Tensor], Weights]:
    """Of sharpness-aware minimisation: at the weights, then uphill of them."""

    def gradient(weights: Weights, number: int, batch: Tensor) -> Weights:
        first = gradient_at(weights, given, client, batch)
        return gradient_at(along(weights, first, rho), given, client, batch)

    return gradient
