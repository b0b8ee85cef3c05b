"""The workload of all contenders in one file: images, their clients, initial weights, settings of local training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedgg.bench.kit.bench_kit import Settings, cnn
from fedgg.core.sampling import stream, torch_stream
from fedgg.data.arrays import from_arrays
from fedgg.data.catalog import CIFAR10, data_folder
from fedgg.data.client_batches import scaling
from fedgg.data.dataset import Dataset, load
from fedgg.data.readers import find_copies
from fedgg.files import replacing

Source = Literal["auto", "cifar10", "stand-in"]

# Images per client: drawn once, uniformly from 2,000 to 7,000, and one changed so that the sum is 50,000.
SIZES = (6725, 5126, 5819, 6486, 4892, 5879, 6169, 3126, 2277, 3501)
TEST = 10_000
CLASSES = 10
SETTINGS = Settings(epochs=1, batch=64, lr=0.01, momentum=0.9)
QUICK = 20  # --quick uses one image in QUICK, and smaller batches, for enough steps to learn
QUICK_SETTINGS = Settings(epochs=1, batch=8, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class WorkloadDescription:
    """The workload, for the table and for `bench.json`."""

    source: str  # cifar10 or stand-in
    stand_in: bool
    quick: bool
    sizes: tuple[int, ...]
    steps: int  # of all clients, in a round
    classes: int
    settings: dict[str, Any]

    @property
    def title(self) -> str:
        images = "generated images (a stand-in: not CIFAR-10)" if self.stand_in else "CIFAR-10"
        return f"{images}{', a quick look: figures mean little' if self.quick else ''}"

    @property
    def sentence(self) -> str:
        s = self.settings
        return (
            f"FedAvg, {len(self.sizes)} clients of {min(self.sizes):,} to {max(self.sizes):,} images, small CNN, "
            f"{s['epochs']} local epoch, batch {s['batch']}, SGD lr {s['lr']} momentum {s['momentum']}: "
            f"{self.steps} steps a round"
        )


def write_workload(
    file: Path, source: Source = "auto", folder: Path | None = None, quick: bool = False
) -> WorkloadDescription:
    """Write the file; `auto` is CIFAR-10 if it is on this machine, otherwise generated images."""
    root = data_folder(folder)
    real = source == "cifar10" or (source == "auto" and bool(find_copies(root, CIFAR10)))
    share = QUICK if quick else 1
    sizes = tuple(size // share for size in SIZES)
    settings = QUICK_SETTINGS if quick else SETTINGS
    dataset = load("cifar10", root) if real else stand_in(sum(sizes), TEST // share)
    members = stream(0, "bench split").permutation(len(dataset.x_train))[: sum(sizes)]
    standard = scaling("standard", dataset, torch.float32)
    with torch_stream(0, "bench model"):
        start = cnn().state_dict()
    with replacing(file) as sink:
        np.savez(
            sink,
            x_train=dataset.x_train.numpy(),
            y_train=dataset.y_train.numpy(),
            x_test=dataset.x_test[: TEST // share].numpy(),
            y_test=dataset.y_test[: TEST // share].numpy(),
            shift=standard.shift.numpy(),
            scale=standard.scale.numpy(),
            sizes=np.array(sizes),
            members=members,
            settings=np.array(json.dumps(asdict(settings))),
            **{f"start/{name}": value.numpy() for name, value in start.items()},
        )
    steps = settings.epochs * sum(-(-size // settings.batch) for size in sizes)
    name = "cifar10" if real else "stand-in"
    return WorkloadDescription(name, not real, quick, sizes, steps, CLASSES, asdict(settings))


def stand_in(train: int, test: int) -> Dataset:
    """Images of CIFAR-10's shape that can be learned: a coarse pattern for each class, shifted, with noise."""
    draw = stream(0, "bench stand-in")
    patterns = draw.normal(size=(CLASSES, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)

    def images(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        labels = draw.integers(0, CLASSES, count)
        x = np.empty((count, 3, 32, 32), np.uint8)
        for part in np.array_split(np.arange(count), max(count // 1000, 1)):  # in parts, to limit memory
            noise = draw.normal(size=(len(part), 3, 32, 32))
            moved = np.stack([np.roll(patterns[labels[i]], draw.integers(-3, 4, 2), (1, 2)) for i in part])
            x[part] = np.clip(128 + 24 * moved + 40 * noise, 0, 255).astype(np.uint8)
        return x, labels

    (x_train, y_train), (x_test, y_test) = images(train), images(test)
    return from_arrays(x_train, y_train, x_test, y_test, name="stand-in", classes=CLASSES)
