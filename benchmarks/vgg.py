"""Seconds per round for VGG-16 on data of CIFAR-100's size: an eager PyTorch loop and fedgg's engine streams.

    python benchmarks/vgg.py --device cuda --out vgg.json
    python benchmarks/vgg.py --tiny                           # a trial on a CPU, with fused instead of streams

FedAvg, 10 clients, Dirichlet 0.5, batch 64, crop and flip, dropout, data on the device. The eager loop is an ordinary
nn.Module with torch.optim.SGD, a deep copy for every client and an average of state dicts. A few hundred of its steps
are measured, before and after the other contenders, and scaled to a round; its copies and its average are measured
separately and added. fedgg runs whole rounds, of which the first, in which steps are captured, is not counted.
Evaluation is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
from eager import EagerLoop

from fedgg.data.dataset import Dataset, load
from fedgg.engines import Engine, Fused, Streams
from fedgg.errors import UserError
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.one_round import begin, close, next_job, train

IMAGES, CLASSES, SHAPE = 50_000, 100, (3, 32, 32)
EAGER = ("default", "bf16")
DETERMINISTIC = {"both": (True, False), "yes": (True,), "no": (False,)}


@dataclass(frozen=True)
class Size:
    """The size of the measurement."""

    images: int = IMAGES
    clients: int = 10
    batch: int = 64
    epochs: int = 5
    rounds: int = 2  # measured rounds of fedgg
    eager_steps: int = 150
    eager_warm_up: int = 20


def experiment_of(size: Size, device: str, precision: str, deterministic: bool) -> Experiment:
    engine = "streams" if device == "cuda" else "fused"
    return Experiment(
        data={"augment": "crop_flip"},
        split={"clients": size.clients, "beta": 0.5},
        model={"name": "vgg16"},
        algorithm={"name": "fedavg"},
        local={"epochs": size.epochs, "batch": size.batch},
        engine={"name": engine, "device": device, "precision": precision, "deterministic": deterministic},
    )


def fedgg_rounds(experiment: Experiment, data: Dataset, rounds: int) -> dict[str, Any]:
    """Whole rounds, aggregation included."""
    with arithmetic(experiment):
        federation = build(experiment, data=data)
        engine: Engine = Streams() if federation.engine == "streams" else Fused()
        state = begin(federation)

        def run_round() -> None:
            nonlocal state
            job = next_job(federation, state)
            state, _ = close(state, job, federation.examples, train(job, engine))

        first, *counted = [seconds(run_round) for _ in range(1 + rounds)]
    return {
        "who": f"fedgg {federation.engine}",
        "precision": experiment.engine.precision,
        "deterministic": experiment.engine.deterministic,
        "first_round_seconds": first,
        "round_seconds": counted,
        "round": statistics.median(counted),
        "step_ms": 1000 * statistics.median(counted) / steps_of(federation),
    }


def steps_of(federation: Federation) -> int:
    return sum(federation.work.steps(examples) for examples in federation.examples)


class EagerTiming:
    """Timing of the eager loop in one precision."""

    def __init__(self, federation: Federation, precision: str, size: Size):
        self._loop = EagerLoop(federation, autocast=precision == "bf16")
        self._precision, self._size, self._steps = precision, size, steps_of(federation)
        self._step_seconds: list[float] = []
        self._overhead_seconds: list[float] = []

    def measure(self) -> None:
        """One measurement of a step, and of copies and average."""
        self._loop.steps(self._size.eager_warm_up)
        counted = self._size.eager_steps
        self._step_seconds.append(seconds(lambda: self._loop.steps(counted)) / counted)
        self._overhead_seconds.append(seconds(self._loop.copy_and_average))

    def result(self) -> dict[str, Any]:
        step, overhead = statistics.median(self._step_seconds), statistics.median(self._overhead_seconds)
        label = "fp32, cuDNN's TF32 default" if self._precision == "default" else "bf16 autocast, channels_last"
        measured = len(self._step_seconds) * self._size.eager_steps
        return {
            "who": "eager loop",
            "precision": label,
            "deterministic": False,
            "steps_measured": measured,
            "each_step_ms": [1000 * measurement for measurement in self._step_seconds],
            "copies_and_average_seconds": overhead,
            "round": self._steps * step + overhead,
            "scaled": f"{self._steps} steps as long as the {measured} that were measured, copies and average added",
            "step_ms": 1000 * step,
        }


def measure(options: argparse.Namespace, size: Size, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields the results so far after each contender, so that an interrupted run leaves them."""
    data = _data(options, size, device)
    plain = build(experiment_of(size, device.type, "fp32", True), data=data)
    header = {
        "conditions": conditions(device.type, options.commit),
        "work": {
            "data": data.name,
            "client_examples": plain.examples,
            "steps": steps_of(plain),
            "epochs": size.epochs,
            "batch": size.batch,
            "parameters": plain.net.layout.total,
        },
    }
    eager = [EagerTiming(plain, precision, size) for precision in options.eager_precision]
    fedgg_results: list[dict[str, Any]] = []

    def results() -> dict[str, Any]:
        measured = [timing.result() for timing in eager] + fedgg_results
        first = measured[0]["round"]
        return {**header, "measured": [{**line, "eager_to_this": first / line["round"]} for line in measured]}

    for timing in eager:
        timing.measure()
    for precision in options.precisions:
        for deterministic in DETERMINISTIC[options.deterministic]:
            experiment = experiment_of(size, device.type, precision, deterministic)
            fedgg_results.append(fedgg_rounds(experiment, data, size.rounds))
            free_memory()
            name = fedgg_results[-1]["who"]
            print(f"{name}, {precision}, deterministic {deterministic}: done", file=sys.stderr, flush=True)
            yield results()
    for timing in eager:
        timing.measure()
    yield results()


def shown(content: dict[str, Any]) -> str:
    work = content["work"]
    rows = [
        [
            *(line["who"], line["precision"], "yes" if line["deterministic"] else "no"),
            *(f"{line['round']:.2f}", f"{line['step_ms']:.3f}", f"{line['eager_to_this']:.2f}"),
        ]
        for line in content["measured"]
    ]
    head = ["contender", "precision", "deterministic", "seconds per round", "ms per client step", "times as fast"]
    return (
        f"VGG-16 ({work['parameters']:,} parameters), {work['data']}, clients of {min(work['client_examples']):,} to "
        f"{max(work['client_examples']):,}, {work['epochs']} epochs, batch {work['batch']}: {work['steps']} steps\n"
        f"{table(head, rows)}\nThe eager loop's rounds are scaled from a few hundred of its steps."
    )


def _data(options: argparse.Namespace, size: Size, device: torch.device) -> Dataset:
    if options.data == "random":
        return random_images(size.images, SHAPE, CLASSES, device)
    return load("cifar100", options.data_folder).to(device)


def parsed(words: Sequence[str] | None) -> tuple[argparse.Namespace, Size]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument(
        "--data", choices=["random", "cifar100"], default="random", help="random: images of the same shape"
    )
    parser.add_argument("--data-folder", type=Path, help="folder with CIFAR-100")
    parser.add_argument("--epochs", type=int, help="local epochs of a client in a round (default: 5)")
    parser.add_argument("--rounds", type=int, help="measured rounds of fedgg (default: 2)")
    parser.add_argument("--precisions", help="of fedgg, from fp32,tf32,bf16 (default: bf16,tf32; on a CPU fp32)")
    parser.add_argument("--eager-precision", default="default", help="from default,bf16; ratios are to the first")
    parser.add_argument("--eager-steps", type=int, help="measured steps of the eager loop (default: 150)")
    parser.add_argument("--deterministic", choices=DETERMINISTIC, default=None, help="default: both; on a CPU yes")
    parser.add_argument("--tiny", action="store_true", help="a few steps, as a test")
    options = parser.parse_args(words)
    on_cpu = options.device == "cpu"
    precisions = ("fp32",) if on_cpu else ("fp32", "tf32", "bf16")
    options.precisions = named(options.precisions or ("fp32" if on_cpu else "bf16,tf32"), precisions, "--precisions")
    options.eager_precision = named(options.eager_precision, EAGER, "--eager-precision")
    options.deterministic = options.deterministic or ("yes" if on_cpu else "both")
    size = Size(images=150, clients=3, batch=32, epochs=1, rounds=1, eager_steps=2, eager_warm_up=1)
    size = size if options.tiny else Size()
    changes = {name: getattr(options, name) for name in ("epochs", "rounds", "eager_steps")}
    changes = {name: value for name, value in changes.items() if value is not None}
    for name, value in changes.items():
        if value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: at least 1")
    return options, Size(**{**vars(size), **changes})


def main(words: Sequence[str] | None = None) -> None:
    options, size = parsed(words)
    device = present_device(options.device)
    if device.type == "cpu":
        print("engine streams needs a GPU: fused is measured instead", file=sys.stderr)
    content: dict[str, Any] = {}
    for content in measure(options, size, device):
        save_results(content, options.out)
    print(shown(content))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
