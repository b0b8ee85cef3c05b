"""What a contender needs: the workload, and its connection to the driver. Imports NumPy and torch, not fedgg.

A contender is a process that prints `ready`, then reads commands from standard input, one per line:

    round   trains one round, prints `done`
    score   prints `accuracy 0.4321`, on the test set
    quit    ends, as does the end of standard input

Between commands it waits and should use no processor time. The driver measures the time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[Any]

CHUNK = 1000  # test images in a batch


@dataclass(frozen=True)
class Settings:
    """Local training of every client, and the model."""

    epochs: int
    batch: int
    lr: float
    momentum: float
    model: str = "cnn"


@dataclass(frozen=True, eq=False)
class Workload:
    """The images of each client, normalised, as float tensors, and the initial weights."""

    settings: Settings
    clients: tuple[tuple[Tensor, Tensor], ...]  # x [n, 3, 32, 32], y [n]
    start: dict[str, Tensor]
    x_test: Tensor  # bytes
    y_test: Tensor
    shift: Tensor
    scale: Tensor

    def model(self) -> nn.Module:
        """The model with the initial weights."""
        module = MODELS[self.settings.model]()
        module.load_state_dict(self.start)
        return module.to(self.shift.device)

    def accuracy(self, model: nn.Module) -> float:
        """On the test set; its time is not measured."""
        model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in zip(self.x_test.split(CHUNK), self.y_test.split(CHUNK), strict=True):
                outputs = model((x.to(self.shift.device) - self.shift) * self.scale)
                correct += int((outputs.argmax(1).cpu() == y).sum())
        model.train()
        return correct / len(self.y_test)


def cnn() -> nn.Module:
    """The same model as fedgg's `cnn` for images of 3 x 32 x 32 in 10 classes, without fedgg."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet20() -> nn.Module:
    """ResNet-20 for such images with GroupNorm, as one would write it in PyTorch, without fedgg."""
    blocks = [
        BasicBlock(16 * 2 ** (stage - (place == 0 and stage > 0)), 16 * 2**stage, 1 + (place == 0 and stage > 0))
        for stage in range(3)
        for place in range(3)
    ]
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(2, 16), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": cnn, "resnet20": resnet20}


def raw() -> dict[str, Array]:
    """The arrays of the workload as the driver wrote them."""
    with np.load(Path(os.environ["FEDGG_BENCH_WORKLOAD"]), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def settings_of(arrays: dict[str, Array]) -> Settings:
    return Settings(**json.loads(str(arrays["settings"])))


def members_of(arrays: dict[str, Array]) -> list[Array]:
    """The example numbers of every client."""
    return np.split(arrays["members"], np.cumsum(arrays["sizes"])[:-1])


def start_of(arrays: dict[str, Array]) -> dict[str, Tensor]:
    return {name.removeprefix("start/"): torch.from_numpy(a) for name, a in arrays.items() if name.startswith("start/")}


def load() -> Workload:
    """The workload on the device and with the number of torch threads that the driver chose."""
    torch.set_num_threads(threads())
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32, as it does in fedgg
    arrays, target = raw(), device()
    shift, scale = (torch.from_numpy(arrays[name]).to(target) for name in ("shift", "scale"))
    x, y = torch.from_numpy(arrays["x_train"]), torch.from_numpy(arrays["y_train"])
    clients = []
    for members in members_of(arrays):
        positions = torch.from_numpy(members)
        clients.append((((x[positions].to(target) - shift) * scale), y[positions].to(target)))
    x_test, y_test = torch.from_numpy(arrays["x_test"]), torch.from_numpy(arrays["y_test"])
    return Workload(settings_of(arrays), tuple(clients), start_of(arrays), x_test, y_test, shift, scale)


def shuffled(x: Tensor, y: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches, for frameworks that leave this to the user."""
    for positions in torch.randperm(len(y), device=y.device).split(batch):
        yield x[positions], y[positions]


def threads() -> int:
    return int(os.environ["FEDGG_BENCH_THREADS"])


def device() -> torch.device:
    return torch.device(os.environ["FEDGG_BENCH_DEVICE"])


class DriverConnection:
    """Commands from and replies to the driver. Once it exists, output of libraries goes to the log (standard error)."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ready(self, *packages: str) -> None:
        """Everything is loaded; `packages` are those whose versions are reported."""
        self._reply("ready", json.dumps({name: _version(name) for name in ("torch", "numpy", *packages)}))

    def round_wanted(self, score: Callable[[], float]) -> bool:
        """Wait for the next command, replying to `score`; False when there is no further round."""
        while (command := sys.stdin.readline().strip()) == "score":
            self._reply("accuracy", f"{score():.6f}")
        return command == "round"

    def done(self) -> None:
        """The round is finished, on the GPU too."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._reply("done")

    def _reply(self, *words: str) -> None:
        self._replies.write(" ".join(words) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
