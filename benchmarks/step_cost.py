"""The cost of a local step of each algorithm, relative to FedAvg.

    python benchmarks/step_cost.py --models cnn,mlp --turns 10                        # engine fused, one thread
    python benchmarks/step_cost.py --device cuda --turns 5 --out step-cost.json       # engines stacked and streams
    python benchmarks/step_cost.py --algorithms neighbours --models cnn               # with MOON and FedCurv
    python benchmarks/step_cost.py --algorithms optimisers --models mlp,resnet18      # clipped, with AdamW, twice

Algorithms take turns round by round, in a new order each turn, and the ratio to FedAvg is computed within a turn, so
that other load on the machine affects all of them. A step includes its share of the round: reading batches, `begin` and
`finish`. The first rounds, in which steps are captured and FedGG has no direction yet, are not counted. All clients
have the same number of random images, and so of steps. `workers` is not measured: it is `fused` in several processes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

from fedgg.engines import Engine, Fused, Loop, Stacked, Streams
from fedgg.engines.base import Precision
from fedgg.errors import UserError
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.one_round import State, begin, close, next_job, train

BATCH = 64
PAPER = 390  # steps of a client in a round of the paper: 5 epochs of 5,000 images


@dataclass(frozen=True)
class Case:
    """A model, the shape of its inputs, and the length of its rounds on a CPU and on a GPU."""

    model: dict[str, Any]
    shape: tuple[int, ...]
    classes: int
    engines: dict[str, tuple[str, ...]]  # by device
    clients: dict[str, int]
    steps: dict[str, int]  # of a client in a round


SMALL_ENGINES = {"cpu": ("fused",), "cuda": ("stacked", "streams")}
MODELS = {
    "cnn": Case({"name": "cnn"}, (3, 32, 32), 10, SMALL_ENGINES, {"cpu": 1, "cuda": 10}, {"cpu": 50, "cuda": PAPER}),
    "mlp": Case({"name": "mlp"}, (3, 32, 32), 10, SMALL_ENGINES, {"cpu": 1, "cuda": 10}, {"cpu": 50, "cuda": PAPER}),
    "small": Case(
        {"name": "mlp", "hidden": 64}, (1, 8, 8), 10, SMALL_ENGINES, {"cpu": 1, "cuda": 10}, {"cpu": 300, "cuda": PAPER}
    ),
    "vgg16": Case(
        {"name": "vgg16"},
        (3, 32, 32),
        100,
        {"cpu": (), "cuda": ("streams",)},
        {"cpu": 1, "cuda": 6},
        {"cpu": 3, "cuda": PAPER},
    ),
    "resnet18": Case(
        {"name": "resnet18"},
        (3, 32, 32),
        10,
        {"cpu": (), "cuda": ()},
        {"cpu": 1, "cuda": 10},
        {"cpu": 2, "cuda": PAPER},
    ),
}
REFERENCE = "FedAvg"
# Settings of the algorithm; `optimiser` is the table of the client optimiser.
ALGORITHMS: dict[str, dict[str, dict[str, Any]]] = {
    "guided": {
        REFERENCE: {"name": "fedavg"},
        "FedProx": {"name": "fedprox"},
        "SCAFFOLD": {"name": "scaffold"},
        "FedGG, adaptive": {"name": "fedgg"},
        "FedGG, fixed, epsilon": {"name": "fedgg", "weight": "fixed", "first_step": "epsilon"},
        "FedGG, per layer": {"name": "fedgg", "scope": "layer"},
    },
    "fedgg": {
        REFERENCE: {"name": "fedavg"},
        "FedGG, adaptive": {"name": "fedgg"},
    },
    "neighbours": {
        REFERENCE: {"name": "fedavg"},
        "FedGG, adaptive": {"name": "fedgg"},
        "FedCurv": {"name": "fedcurv"},
        "MOON": {"name": "moon"},
    },
    "optimisers": {
        REFERENCE: {"name": "fedavg"},
        "clipped": {"name": "fedavg", "optimiser": {"clip_norm": 10.0}},
        "AdamW": {"name": "fedavg", "optimiser": {"name": "adamw"}},
        "FedCM": {"name": "fedcm"},
        "FedSAM": {"name": "fedsam"},
    },
}
ENGINES = ("loop", "fused", "stacked", "streams")


class Runner:
    """The runs of one algorithm; `stacked` trains all of them together."""

    def __init__(self, federations: Sequence[Federation], engine: Engine):
        self._federations = federations
        self._states: list[State] = [begin(federation) for federation in federations]
        self._engine = engine

    @property
    def client_steps(self) -> int:
        return sum(f.work.steps(examples) for f in self._federations for examples in f.examples)

    @property
    def parameters(self) -> int:
        return self._federations[0].net.layout.total

    def round(self) -> float:
        """Trains and aggregates one round; returns the seconds of training."""
        jobs = [next_job(f, state) for f, state in zip(self._federations, self._states, strict=True)]
        results: list[Any] = []

        def work() -> None:
            if isinstance(self._engine, Stacked):
                results.extend(self._engine.train_together(jobs))
            else:
                results.extend(train(job, self._engine) for job in jobs)

        duration = seconds(work)
        for number, (job, ends) in enumerate(zip(jobs, results, strict=True)):
            examples = self._federations[number].examples
            self._states[number], _ = close(self._states[number], job, examples, ends)
        return duration


def measure(
    name: str, engine: str, precision: Precision, device: torch.device, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All algorithms on one model and engine."""
    case = MODELS[name]
    clients, steps = case.clients[device.type], options.steps or case.steps[device.type]
    runs = options.runs if engine == "stacked" else 1
    data = random_images(clients * steps * BATCH, case.shape, case.classes, device)

    def federations(algorithm: dict[str, Any]) -> list[Federation]:
        return [
            build(experiment_of(case, algorithm, seed, clients, engine, precision, device), data=data)
            for seed in range(runs)
        ]

    makers: dict[str, Callable[[], Engine]] = {
        "loop": Loop,
        "fused": Fused,
        "stacked": lambda: Stacked(precision),
        "streams": Streams,
    }
    reference = experiment_of(case, ALGORITHMS[options.algorithms][REFERENCE], 0, clients, engine, precision, device)
    with arithmetic(reference):
        runners = {
            label: Runner(federations(settings), makers[engine]())
            for label, settings in ALGORITHMS[options.algorithms].items()
        }
        for _ in range(options.warm_up):
            for runner in runners.values():
                runner.round()
        durations = take_turns({label: runner.round for label, runner in runners.items()}, options.turns)
    first = runners[REFERENCE]
    workload = {
        "model": name,
        "parameters": first.parameters,
        "engine": engine,
        "precision": precision,
        "clients": clients * runs,
        "client_steps": first.client_steps,
    }
    settings = ALGORITHMS[options.algorithms]
    lines = compared(durations, first.client_steps)
    return [{**workload, **line, "settings": settings[line["algorithm"]]} for line in lines]


def take_turns(rounds: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Seconds of all algorithms in each turn; their order changes from turn to turn."""
    durations: dict[str, list[float]] = {label: [] for label in rounds}
    order, generator = list(rounds), random.Random(0)
    for _ in range(turns):
        generator.shuffle(order)
        for label in order:
            durations[label].append(rounds[label]())
    return durations


def compared(durations: dict[str, list[float]], client_steps: int) -> list[dict[str, Any]]:
    """Milliseconds per step of a client, and the median over turns of the ratio to the reference."""
    lines = []
    for label, rounds in durations.items():
        ratios = [taken / reference for taken, reference in zip(rounds, durations[REFERENCE], strict=True)]
        lines.append(
            {
                "algorithm": label,
                "step_ms": 1000 * statistics.median(rounds) / client_steps,
                "to_fedavg": statistics.median(ratios),
                "to_fedavg_range": [min(ratios), max(ratios)],
                "round_seconds": rounds,
            }
        )
    return lines


def experiment_of(
    case: Case,
    algorithm: dict[str, Any],
    seed: int,
    clients: int,
    engine: str,
    precision: str,
    device: torch.device,
) -> Experiment:
    return Experiment(
        seed=seed,
        data={"normalise": "standard"},
        split={"scheme": "iid", "clients": clients},
        model=case.model,
        algorithm={key: value for key, value in algorithm.items() if key != "optimiser"},
        optimiser=algorithm.get("optimiser", {}),
        local={"epochs": 1, "batch": BATCH},
        engine={"name": engine, "device": device.type, "precision": precision},
    )


def shown(results: list[dict[str, Any]]) -> str:
    head = ["model", "engine", "precision", "rows", "algorithm", "ms per client step", "to FedAvg", "least", "most"]
    return table(
        head,
        [
            [
                f"{line['model']} ({line['parameters']:,})",
                *(line["engine"], line["precision"], str(line["clients"]), line["algorithm"]),
                f"{line['step_ms']:.4f}",
                *(f"{ratio:.3f}" for ratio in (line["to_fedavg"], *line["to_fedavg_range"])),
            ]
            for line in results
        ],
    )


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--models", default=None, help=f"from {','.join(MODELS)} (default: all for the device)")
    parser.add_argument(
        "--algorithms", choices=ALGORITHMS, default="guided", help="set of algorithms (default: guided)"
    )
    parser.add_argument("--engines", default=None, help=f"from {','.join(ENGINES)} (default: those for the device)")
    parser.add_argument(
        "--precisions", default=None, help="from fp32,tf32,bf16 (default: fp32 on a CPU, bf16 on a GPU)"
    )
    parser.add_argument("--turns", type=int, default=10, help="measured rounds of each algorithm (default: 10)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds of each before them (default: 2)")
    parser.add_argument("--steps", type=int, default=None, help="of a client in a round (default: by model and device)")
    parser.add_argument("--runs", type=int, default=6, help="runs in a stack, of 10 clients on a GPU (default: 6)")
    options = parser.parse_args(words)
    for option in ("turns", "warm_up", "runs"):
        if getattr(options, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} {getattr(options, option)}: at least 1")
    options.models = named(options.models or ",".join(_models_on(options.device)), MODELS, "--models")
    options.engines = named(options.engines, ENGINES, "--engines") if options.engines else None
    default = "bf16" if options.device == "cuda" else "fp32"
    options.precisions = named(options.precisions or default, ("fp32", "tf32", "bf16"), "--precisions")
    return options


def _models_on(device: str) -> list[str]:
    return [name for name, case in MODELS.items() if case.engines[device]]


def main(words: Sequence[str] | None = None) -> None:
    options = parsed(words)
    device = present_device(options.device)
    settings = {"conditions": conditions(device.type, options.commit), "turns": options.turns, "batch": BATCH}
    results: list[dict[str, Any]] = []
    for name in options.models:
        for engine in options.engines or MODELS[name].engines[device.type] or ("fused",):
            for precision in options.precisions:
                results += measure(name, engine, precision, device, options)
                free_memory()
                save_results({**settings, "measured": results}, options.out)
                print(f"{name}, {engine}, {precision}: done", file=sys.stderr, flush=True)
    print(shown(results))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
