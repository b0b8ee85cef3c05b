"""Accuracy in tf32, bf16 and fp32: curves of runs archived under results/, and the table in docs/engines.md.

python benchmarks/precision.py docs/figures/precision.png
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure

from fedgg.report.figure_style import COLOURS, blank, styled
from fedgg.runfolder.archive_file import read_archive
from fedgg.runfolder.record_types import RunRecord

RESULTS = Path(__file__).parent.parent / "results"
FILES = {
    "cifar10": {"fp32": "cifar10-fp32-half", "tf32": "cifar10-tf32-half", "bf16": "paper/cifar10"},
    "svhn": {"fp32": "svhn-fp32-fedavg", "tf32": "svhn-tf32-fedavg", "bf16": "paper/svhn"},
}
SEEDS = (0, 1, 2)
LAST = 10  # rounds


@dataclass(frozen=True)
class Case:
    data: str
    algorithm: str
    beta: float

    def of(self, record: RunRecord) -> bool:
        config = record.config
        return (config["algorithm"]["name"], config["split"]["beta"]) == (self.algorithm, self.beta)


CASES = {
    "CNN on CIFAR-10, FedAvg, beta 0.5": Case("cifar10", "fedavg", 0.5),
    "CNN on CIFAR-10, FedGG, beta 0.5": Case("cifar10", "fedgg", 0.5),
    "CNN on CIFAR-10, FedAvg, beta 0.1": Case("cifar10", "fedavg", 0.1),
    "CNN on CIFAR-10, FedGG, beta 0.1": Case("cifar10", "fedgg", 0.1),
    "MLP on SVHN, FedAvg, beta 0.5": Case("svhn", "fedavg", 0.5),
    "MLP on SVHN, FedAvg, beta 0.1": Case("svhn", "fedavg", 0.1),
}


@cache
def runs(file: str) -> list[RunRecord]:
    return read_archive(RESULTS / f"{file}.json")


def curves(precision: str, case: Case) -> list[list[float]]:
    """Test accuracy in per cent, one curve per seed."""
    by_seed = {record.config["seed"]: record for record in runs(FILES[case.data][precision]) if case.of(record)}
    return [[100 * float(value) for value in by_seed[seed].accuracy()[1]] for seed in SEEDS]


def row(case: Case) -> list[str]:
    """Mean of the last rounds and its deviation over seeds, in each precision."""
    cells = []
    for precision in FILES[case.data]:
        ends = [statistics.mean(curve[-LAST:]) for curve in curves(precision, case)]
        cells.append(f"{statistics.mean(ends):.1f} ± {statistics.stdev(ends):.1f}")
    return cells


@styled
def draw() -> Figure:
    figure = blank(9.5, 5.2)
    panels = figure.subplots(2, 3).flatten()
    for panel, (label, case) in zip(panels, CASES.items(), strict=True):
        for colour, precision in zip(COLOURS, FILES[case.data], strict=False):
            for number, curve in enumerate(curves(precision, case)):
                name = precision if number == 0 else None
                panel.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=0.8, alpha=0.8, label=name)
        panel.set_title(label, loc="left")
    for panel in panels[3:]:
        panel.set_xlabel("round")
    for panel in panels[::3]:
        panel.set_ylabel("test accuracy, %")
    panels[2].legend(loc="lower right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the PNG file to be written")
    picture = parser.parse_args().picture
    for label, case in CASES.items():
        print(f"| {label} | {' | '.join(row(case))} |")
    draw().savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
