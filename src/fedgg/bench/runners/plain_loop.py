"""The usual loop of research code: a DataLoader per client, a deep copy of the model, an average of state dicts."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedgg.bench.kit.bench_kit import DriverConnection, Workload, device, load

Loader = DataLoader[Any]


def main() -> None:
    driver, workload = DriverConnection(), load()
    torch.manual_seed(0)
    loaders = [loader_of(x.cpu(), y.cpu(), workload.settings.batch) for x, y in workload.clients]
    model = workload.model()
    driver.ready()
    while driver.round_wanted(lambda: workload.accuracy(model)):
        play_round(model, loaders, workload)
        driver.done()


def play_round(model: nn.Module, loaders: list[Loader], workload: Workload) -> None:
    trained = [train(copy.deepcopy(model), loader, workload).state_dict() for loader in loaders]
    sizes = [len(y) for _, y in workload.clients]
    mean = {
        name: sum(state[name] * (size / sum(sizes)) for state, size in zip(trained, sizes, strict=True))
        for name in trained[0]
    }
    model.load_state_dict(mean)


def loader_of(x: Tensor, y: Tensor, batch: int) -> Loader:
    """Images in host memory; batches are copied to the device one by one."""
    return DataLoader(TensorDataset(x, y), batch, shuffle=True)


def train(model: nn.Module, loader: Loader, workload: Workload) -> nn.Module:
    settings = workload.settings
    optimiser = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    for _ in range(settings.epochs):
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(model(x.to(device())), y.to(device())).backward()
            optimiser.step()
    return model


if __name__ == "__main__":
    main()
