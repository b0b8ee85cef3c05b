"""Write a study of the best setting of each algorithm in a tuning study.

    fedgg compare experiments/tuning.toml --device cuda --set engine.precision=bf16 --out runs/tuning
    python benchmarks/fold.py runs/tuning results/tuning.json
    python benchmarks/tuned.py results/tuning.json experiments/tuned.toml

A variant's label is `FAMILY: SETTING, beta BETA`. For each family and beta the setting with the highest accuracy on the
clients' held-out examples is chosen (`holdout_accuracy`, mean of the last rounds); the test set is not used. Diverged
settings are not chosen, and a family in which all settings diverged is left out, with a comment.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedgg.errors import UserError
from fedgg.runfolder.archive_file import read_archive
from fedgg.runfolder.record_types import RunRecord

LAST = 10  # rounds
ROUNDS = 100  # of the comparison; the tuning runs are shorter
SEEDS = [0, 1, 2]
REFERENCE_OF = "FedAvg, beta {}"

HEADING = (
    "Every algorithm with the setting of its grid (experiments/tuning.toml) that did\n"
    "# best on examples clients kept back; above each, the accuracy of all settings there.\n"
    "#   fedgg compare experiments/tuned.toml --device cuda --set engine.precision=bf16"
)


@dataclass(frozen=True)
class Point:
    """A setting of a family at one beta, with its run."""

    family: str
    setting: str
    beta: str
    record: RunRecord

    @classmethod
    def of(cls, record: RunRecord) -> Point:
        label, _, beta = str(record.config["name"]).rpartition(", beta ")
        family, _, setting = label.partition(": ")
        return cls(family, setting, beta, record)

    @property
    def place(self) -> str:
        return f"{self.family}, beta {self.beta}"

    @property
    def accuracy(self) -> float | None:
        """On the held-out examples; None if the run diverged."""
        if self.record.status != "finished":
            return None
        rounds, accuracies = self.record.numbers("holdout_accuracy")
        if not len(rounds):
            raise UserError(
                f"{self.place}: the clients have no held-out examples; set data.holdout in the tuning study"
            )
        return statistics.mean(float(a) for r, a in zip(rounds, accuracies, strict=True) if r > rounds[-1] - LAST)


def chosen(points: Iterable[Point]) -> dict[str, tuple[Point | None, list[Point]]]:
    """For each family and beta the best point and all points: large betas first, the reference before the others."""
    grids: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda p: (-float(p.beta), p.place != REFERENCE_OF.format(p.beta), p.family)):
        grids.setdefault(point.place, []).append(point)
    best: dict[str, tuple[Point | None, list[Point]]] = {}
    for place, grid in grids.items():
        converged = [point for point in grid if point.accuracy is not None]
        best[place] = (max(converged, key=lambda point: point.accuracy or 0.0, default=None), grid)
    return best


def study(best: dict[str, tuple[Point | None, list[Point]]]) -> str:
    """The study of the chosen settings, as TOML, with the accuracies of all settings in comments."""
    first = next(point for point, _ in best.values() if point is not None).record.config
    base = {key: first[key] for key in ("rounds", "data", "split", "model", "local")} | {"rounds": ROUNDS}
    base["data"] = {key: value for key, value in base["data"].items() if key not in ("holdout", "proxy")}
    base["split"] = {key: value for key, value in base["split"].items() if key != "beta"}
    head: dict[str, Any] = {
        "seeds": SEEDS,
        "reference": REFERENCE_OF.format(first["split"]["beta"]),
        "experiment": base,
    }
    head["experiment"]["server"] = {"checkpoint_every": 50}
    parts = [f"# Made by benchmarks/tuned.py. {HEADING}\n", tomli_w.dumps(head)]
    for place, (point, grid) in best.items():
        accuracies = ", ".join(f"{p.setting or 'no setting'} {_shown(p.accuracy)}" for p in grid)
        if point is None:
            parts.append(f"\n# {place}: left out, all settings diverged ({accuracies})\n")
            continue
        config = point.record.config
        variant: dict[str, Any] = {"algorithm": config["algorithm"], "split": {"beta": config["split"]["beta"]}}
        if config["data"].get("proxy"):
            variant["data"] = {"proxy": config["data"]["proxy"]}
        parts.append(f"\n# {accuracies}\n" + tomli_w.dumps({"variants": {place: variant}}))
    return "".join(parts)


def _shown(accuracy: float | None) -> str:
    return "diverged" if accuracy is None else f"{100 * accuracy:.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="one or more archives of the runs of a tuning study")
    parser.add_argument("study", type=Path, help="the TOML file to be written")
    options = parser.parse_args()
    best = chosen(Point.of(record) for file in options.results for record in read_archive(file))
    options.study.write_text(study(best), encoding="utf-8")
    for place, (point, grid) in best.items():
        choice = "all diverged" if point is None else f"{point.setting or 'no setting'} ({_shown(point.accuracy)})"
        print(f"{place}: {choice} of {len(grid)}")


if __name__ == "__main__":
    main()
