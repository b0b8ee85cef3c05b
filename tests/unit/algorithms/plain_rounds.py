"""What transcriptions of other papers share: one client's training in plain PyTorch, and the comparison itself."""

from __future__ import annotations

from collections.abc import Callable

import paper_transcription as paper
import torch
from paper_transcription import Federated, Weights
from test_against_transcription import TOLERANCE, Case, Frozen, by_library, by_paper, distance, flat, problem
from torch import nn

Change = Callable[[nn.Module], None]  # changes the gradients that autograd left


def nothing(model: nn.Module) -> None:
    """FedAvg's change."""


def trained(given: Federated, round_: int, client: int, start: Weights, change: Change = nothing) -> Weights:
    model = paper.model_with(start, given.module)
    optimiser = given.optimiser(model, round_)
    for batch in given.batches(round_, client):
        optimiser.zero_grad()
        torch.autograd.backward(given.loss(model, client, batch))
        change(model)
        optimiser.step()
    return paper.weights_of(model)


def zeros(like: Weights) -> Weights:
    return {name: torch.zeros_like(value) for name, value in like.items()}


def minus(a: Weights, b: Weights) -> Weights:
    return {name: a[name] - b[name] for name in a}


def weighted(parts: dict[int, Weights], weights: dict[int, float]) -> Weights:
    names = next(iter(parts.values()))
    return {name: torch.stack([weights[c] * part[name] for c, part in parts.items()]).sum(0) for name in names}


def shares(given: Federated, cohort: list[int]) -> dict[int, float]:
    total = sum(given.examples(client) for client in cohort)
    return {client: given.examples(client) / total for client in cohort}


def add(name: str, parameter: nn.Parameter, what: torch.Tensor) -> None:
    assert parameter.grad is not None, name
    parameter.grad += what


def compare(name: str, settings: Frozen, case: Case, transcribed: Callable[[Federated], list[Weights]]) -> None:
    """They agree after each round, on something that is not just FedAvg."""
    expected = [flat(weights) for weights in transcribed(problem(case))]
    assert max(distance(by_library(name, settings, case), expected)) < TOLERANCE
    assert distance(expected, by_paper("fedavg", (), case))[-1] > 1e-4
