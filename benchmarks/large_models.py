"""Seconds per round for networks of others' benchmarks: the engines `stacked` and `streams`, in turns.

    python benchmarks/large_models.py --device cuda --out large-models.json
    python benchmarks/large_models.py --device cuda --workloads resnet18 --algorithm fedlesam --clip
    python benchmarks/large_models.py --tiny                          # a trial on a CPU, with stacked alone

Random images of CIFAR's size on the device, FedAvg (or `--algorithm`), whole rounds with their aggregation, without
evaluation. The first round, in which kernels are compiled and steps captured, is not counted.

- vgg16: as in experiments/cifar100.toml, 10 clients, Dirichlet 0.5, 5 epochs, batch 64, momentum 0.9, crop and flip;
- resnet18: as FL-Simulator's comparison, 10 of 100 clients with 500 images each, ResNet-18 with GroupNorm and
  ImageNet's stem, 5 epochs, batch 50, no momentum, weight decay 0.001, crop and flip; with `--clip` gradients are
  clipped at 10, as there;
- pfl: as pfl-research's CIFAR-10 benchmark, 50 of 1,000 clients with 50 images each, two convolutions of 32 and 64
  channels, dropout, 128 hidden units, one epoch, batch 10.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from conditions import (
    add_common_options,
    conditions,
    free_memory,
    named,
    present_device,
    random_images,
    save_results,
    seconds,
    table,
)
from torch import nn

from fedgg.engines import Engine, Stacked, Streams
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.one_round import begin, close, next_job, train

SHAPE = (3, 32, 32)
SETTINGS: dict[str, dict[str, Any]] = {
    "vgg16": {
        "data": {"augment": "crop_flip"},
        "split": {"clients": 10, "beta": 0.5},
        "model": {"name": "vgg16"},
        "local": {"epochs": 5, "batch": 64},
    },
    "resnet18": {
        "data": {"augment": "crop_flip"},
        "split": {"clients": 100, "scheme": "iid"},
        "model": {"name": "resnet18", "stem": "imagenet"},
        "server": {"cohort": 10},
        "local": {"epochs": 5, "batch": 50, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.001},
    },
    "pfl": {
        "split": {"clients": 1000, "scheme": "iid"},
        "server": {"cohort": 50},
        "local": {"epochs": 1, "batch": 10, "lr": 0.1, "momentum": 0.0},
    },
}
CLIPPED = {"resnet18": {"optimiser": {"clip_norm": 10.0}}}  # with --clip
CLASSES = {"vgg16": 100, "resnet18": 10, "pfl": 10}


def pfl_network() -> nn.Module:
    """The network of pfl-research's CIFAR-10 benchmark."""
    features = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    classifier = [nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*features, nn.Flatten(), *classifier)


def rounds_of(workload: str, engine: str, options: argparse.Namespace) -> Callable[[], float]:
    """A function that runs one round and returns its seconds."""
    clipped = CLIPPED.get(workload, {}) if options.clip else {}
    settings = {**SETTINGS[workload], **clipped, "algorithm": {"name": options.algorithm}}
    section = {"name": engine, "device": options.device, "precision": options.precision}
    experiment = Experiment(**settings, engine=section)
    images, changes = 50_000, {}
    if options.tiny:
        images, changes = 1200, {"split.clients": 3, "split.min_examples": 1, "server.cohort": None, "local.epochs": 1}
    experiment = experiment.changed(changes)
    model = {"model": pfl_network} if workload == "pfl" else {}
    with arithmetic(experiment):
        data = random_images(images, SHAPE, CLASSES[workload], present_device(options.device))
        federation = build(experiment, data=data, **model)
        state = begin(federation)
    engine_in_use: Engine = Stacked(experiment.engine.precision) if engine == "stacked" else Streams()

    def one_round() -> None:
        nonlocal state
        job = next_job(federation, state)
        state, _ = close(state, job, federation.examples, train(job, engine_in_use))

    def timed() -> float:
        with arithmetic(experiment):
            return seconds(one_round)

    return timed


def measure(workload: str, options: argparse.Namespace) -> dict[str, Any]:
    engines = ["stacked"] if options.device == "cpu" else ["stacked", "streams"]
    rounds = {engine: rounds_of(workload, engine, options) for engine in engines}
    first = {engine: one_round() for engine, one_round in rounds.items()}
    measured: dict[str, list[float]] = {engine: [] for engine in engines}
    for _ in range(options.rounds):
        for engine, one_round in rounds.items():
            measured[engine].append(one_round())
    return {
        "first_round_seconds": first,
        "round_seconds": measured,
        "round": {engine: statistics.median(times) for engine, times in measured.items()},
    }


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--workloads", default=",".join(SETTINGS), help="some of them, with commas")
    parser.add_argument("--precision", default=None, help="fp32, tf32 or bf16 (default: bf16; on a CPU fp32)")
    parser.add_argument("--algorithm", default="fedavg", help="by name, with its default settings")
    parser.add_argument("--clip", action="store_true", help="clip gradients where the workload's protocol does")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each engine")
    parser.add_argument("--tiny", action="store_true", help="a few steps, as a test")
    options = parser.parse_args(words)
    options.workloads = named(options.workloads, SETTINGS, "--workloads")
    options.precision = options.precision or ("fp32" if options.device == "cpu" else "bf16")
    options.rounds = 1 if options.tiny else options.rounds
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parsed(words)
    present_device(options.device)
    content: dict[str, Any] = {"conditions": conditions(options.device, options.commit), "workloads": {}}
    content |= {"precision": options.precision, "algorithm": options.algorithm, "clip": options.clip}
    for workload in options.workloads:
        content["workloads"][workload] = measure(workload, options)
        save_results(content, options.out)
        free_memory()
    rows = [
        [workload, engine, f"{result['first_round_seconds'][engine]:.2f}", f"{seconds_:.4f}"]
        for workload, result in content["workloads"].items()
        for engine, seconds_ in result["round"].items()
    ]
    print(table(["workload", "engine", "first round", "seconds per round, median"], rows))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
