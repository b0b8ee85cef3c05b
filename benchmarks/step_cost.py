"""What a local step of each algorithm costs beside FedAvg's.

    python benchmarks/step_cost.py --models cnn,mlp --turns 10                        # engine fused, one thread
    python benchmarks/step_cost.py --device cuda --turns 5 --out step-cost.json       # engines stacked and streams
    python benchmarks/step_cost.py --algorithms neighbours --models cnn               # those that do more than a step

Algorithms take turns round by round, in another order each turn, and the ratio to FedAvg is taken within a turn, so
that a busy moment of the machine hits all of them alike. A step includes its share of the round: reading batches,
`begin` and `finish`. The first rounds, in which steps are captured and FedGG has no direction yet, are not counted.
Clients hold equally many random images: all do the same number of steps. `workers` is `fused` in several processes.
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
    seconds,
    table,
    write_down,
)

from fedgg.engines import Engine, Fused, Loop, Stacked, Streams
from fedgg.engines.base import Precision
from fedgg.errors import UserError
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.run_state import State, begin, close, next_job, train

BATCH = 64
PAPER = 390  # steps of a client in a round of the paper: 5 epochs of 5,000 images


@dataclass(frozen=True)
class Case:
    """A model, what it reads, and how long its rounds are on a CPU and on a GPU."""

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
}
REFERENCE = "FedAvg"
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
}
ENGINES = ("loop", "fused", "stacked", "streams")


class Runner:
    """The runs of one algorithm; the engine trains all of them together where it can."""

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
        """Seconds of training; aggregation comes after, so that the next round is another one."""
        jobs = [next_job(f, state) for f, state in zip(self._federations, self._states, strict=True)]
        answers: list[Any] = []

        def work() -> None:
            if isinstance(self._engine, Stacked):
                answers.extend(self._engine.train_together(jobs))
            else:
                answers.extend(train(job, self._engine) for job in jobs)

        taken = seconds(work)
        for number, (job, ends) in enumerate(zip(jobs, answers, strict=True)):
            examples = self._federations[number].examples
            self._states[number], _ = close(self._states[number], job, examples, ends)
        return taken


def measure(
    name: str, engine: str, precision: Precision, device: torch.device, chosen: argparse.Namespace
) -> list[dict[str, Any]]:
    """All algorithms on one model and engine."""
    case = MODELS[name]
    clients, steps = case.clients[device.type], chosen.steps or case.steps[device.type]
    runs = chosen.runs if engine == "stacked" else 1
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
    some = experiment_of(case, ALGORITHMS[chosen.algorithms][REFERENCE], 0, clients, engine, precision, device)
    with arithmetic(some):
        runners = {
            label: Runner(federations(settings), makers[engine]())
            for label, settings in ALGORITHMS[chosen.algorithms].items()
        }
        for _ in range(chosen.warm_up):
            for runner in runners.values():
                runner.round()
        taken = take_turns({label: runner.round for label, runner in runners.items()}, chosen.turns)
    first = runners[REFERENCE]
    about = {
        "model": name,
        "parameters": first.parameters,
        "engine": engine,
        "precision": precision,
        "clients": clients * runs,
        "client_steps": first.client_steps,
    }
    settings = ALGORITHMS[chosen.algorithms]
    return [{**about, **line, "settings": settings[line["algorithm"]]} for line in compared(taken, first.client_steps)]


def take_turns(rounds: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Seconds of all algorithms in each turn; their order changes from turn to turn."""
    taken: dict[str, list[float]] = {label: [] for label in rounds}
    order, dice = list(rounds), random.Random(0)
    for _ in range(turns):
        dice.shuffle(order)
        for label in order:
            taken[label].append(rounds[label]())
    return taken


def compared(taken: dict[str, list[float]], client_steps: int) -> list[dict[str, Any]]:
    """Milliseconds per step of a client, and the median over turns of the ratio to the reference."""
    lines = []
    for label, own in taken.items():
        ratios = [mine / reference for mine, reference in zip(own, taken[REFERENCE], strict=True)]
        lines.append(
            {
                "algorithm": label,
                "step_ms": 1000 * statistics.median(own) / client_steps,
                "to_fedavg": statistics.median(ratios),
                "to_fedavg_range": [min(ratios), max(ratios)],
                "round_seconds": own,
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
        algorithm=algorithm,
        local={"epochs": 1, "batch": BATCH},
        engine={"name": engine, "device": device.type, "precision": precision},
    )


def shown(found: list[dict[str, Any]]) -> str:
    head = ["model", "engine", "precision", "rows", "algorithm", "ms a client's step", "to FedAvg", "least", "most"]
    return table(
        head,
        [
            [
                f"{line['model']} ({line['parameters']:,})",
                *(line["engine"], line["precision"], str(line["clients"]), line["algorithm"]),
                f"{line['step_ms']:.4f}",
                *(f"{ratio:.3f}" for ratio in (line["to_fedavg"], *line["to_fedavg_range"])),
            ]
            for line in found
        ],
    )


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--models", default=None, help=f"of {','.join(MODELS)} (default: all that run on the device)")
    parser.add_argument("--algorithms", choices=ALGORITHMS, default="guided", help="which of them (default: guided)")
    parser.add_argument("--engines", default=None, help=f"of {','.join(ENGINES)} (default: the device's own)")
    parser.add_argument("--precisions", default=None, help="of fp32,tf32,bf16 (default: fp32 on a CPU, bf16 on a GPU)")
    parser.add_argument("--turns", type=int, default=10, help="rounds of each algorithm that count (default: 10)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds of each before them (default: 2)")
    parser.add_argument("--steps", type=int, default=None, help="of a client in a round (default: by model and device)")
    parser.add_argument("--runs", type=int, default=6, help="runs in a stack, of 10 clients on a GPU (default: 6)")
    chosen = parser.parse_args(words)
    for option in ("turns", "warm_up", "runs"):
        if getattr(chosen, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} {getattr(chosen, option)}: at least 1")
    chosen.models = named(chosen.models or ",".join(_models_on(chosen.device)), MODELS, "--models")
    chosen.engines = named(chosen.engines, ENGINES, "--engines") if chosen.engines else None
    default = "bf16" if chosen.device == "cuda" else "fp32"
    chosen.precisions = named(chosen.precisions or default, ("fp32", "tf32", "bf16"), "--precisions")
    return chosen


def _models_on(device: str) -> list[str]:
    return [name for name, case in MODELS.items() if case.engines[device]]


def main(words: Sequence[str] | None = None) -> None:
    chosen = parsed(words)
    device = present_device(chosen.device)
    told = {"conditions": conditions(device.type, chosen.commit), "turns": chosen.turns, "batch": BATCH}
    found: list[dict[str, Any]] = []
    for name in chosen.models:
        for engine in chosen.engines or MODELS[name].engines[device.type] or ("fused",):
            for precision in chosen.precisions:
                found += measure(name, engine, precision, device, chosen)
                free_memory()
                write_down({**told, "measured": found}, chosen.out)
                print(f"{name}, {engine}, {precision}: done", file=sys.stderr, flush=True)
    print(shown(found))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
