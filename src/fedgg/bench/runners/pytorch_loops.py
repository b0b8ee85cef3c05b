"""Two plain PyTorch loops as contenders: `plain`, as research code is usually written, and `tight`, without overhead.

plain: a DataLoader per client, a deep copy of the model, an average of state dicts;
tight: an nn.Module, torch.optim.SGD, tensors on the device, and nothing else.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedgg.bench.bench_kit import DriverConnection, Workload, device, load, shuffled

Loader = DataLoader[Any]


def main(kind: str) -> None:
    driver, workload = DriverConnection(), load()
    torch.manual_seed(0)
    loaders = []
    if kind == "plain":  # images in host memory; batches are copied to the device one by one
        for x, y in workload.clients:
            loaders.append(DataLoader(TensorDataset(x.cpu(), y.cpu()), workload.settings.batch, shuffle=True))
    model = workload.model()
    if kind == "tight":
        torch.manual_seed(0)
    driver.ready()
    while driver.round_wanted(lambda: workload.accuracy(model)):
        if kind == "plain":
            plain_round(model, loaders, workload)
        else:
            tight_round(model, workload)
        driver.done()


def plain_round(model: nn.Module, loaders: list[Loader], workload: Workload) -> None:
    trained = []
    for loader in loaders:
        client_model = copy.deepcopy(model)
        optimiser = optimiser_of(client_model, workload)
        for _ in range(workload.settings.epochs):
            train(client_model, ((x.to(device()), y.to(device())) for x, y in loader), optimiser)
        trained.append(client_model.state_dict())
    sizes = [len(y) for _, y in workload.clients]
    mean = {
        name: sum(state[name] * (size / sum(sizes)) for state, size in zip(trained, sizes, strict=True))
        for name in trained[0]
    }
    model.load_state_dict(mean)


def tight_round(model: nn.Module, workload: Workload) -> None:
    """FedAvg weighted by examples; the model is updated in place."""
    examples = sum(len(y) for _, y in workload.clients)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mean = {name: torch.zeros_like(value) for name, value in before.items()}
    for x, y in workload.clients:
        model.load_state_dict(before)
        optimiser = optimiser_of(model, workload)
        for _ in range(workload.settings.epochs):
            train(model, shuffled(x, y, workload.settings.batch), optimiser)
        for name, value in model.state_dict().items():
            mean[name].add_(value, alpha=len(y) / examples)
    model.load_state_dict(mean)


def optimiser_of(model: nn.Module, workload: Workload) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=workload.settings.lr, momentum=workload.settings.momentum)


def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], optimiser: torch.optim.SGD) -> None:
    for x, y in batches:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()


if __name__ == "__main__":
    main(sys.argv[1])
