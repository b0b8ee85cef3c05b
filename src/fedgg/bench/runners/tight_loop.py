"""The tight loop: an nn.Module, torch.optim.SGD, tensors on the device, and nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.bench.kit.bench_kit import DriverConnection, Workload, load, shuffled


def main() -> None:
    driver, workload = DriverConnection(), load()
    model = workload.model()
    torch.manual_seed(0)
    driver.ready()
    while driver.round_wanted(lambda: workload.accuracy(model)):
        play_round(model, workload)
        driver.done()


def play_round(model: nn.Module, workload: Workload) -> None:
    """FedAvg weighted by examples; the model is updated in place."""
    examples = sum(len(y) for _, y in workload.clients)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mean = {name: torch.zeros_like(value) for name, value in before.items()}
    for x, y in workload.clients:
        model.load_state_dict(before)
        train(model, x, y, workload)
        for name, value in model.state_dict().items():
            mean[name].add_(value, alpha=len(y) / examples)
    model.load_state_dict(mean)


def train(model: nn.Module, x: Tensor, y: Tensor, workload: Workload) -> None:
    settings = workload.settings
    optimiser = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    for _ in range(settings.epochs):
        for images, labels in shuffled(x, y, settings.batch):
            optimiser.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimiser.step()


if __name__ == "__main__":
    main()
