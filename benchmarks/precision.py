"""Do tf32 and bf16 train what fp32 trains? The curves of results/cifar10-*.json, and the table in docs/engines.md.

python benchmarks/precision.py docs/figures/precision-cifar10.png
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

from fedgg.report.style import COLOURS, blank, styled

RESULTS = Path(__file__).parent.parent / "results"
FILES = {"fp32": "cifar10-fp32-half.json", "tf32": "cifar10-tf32-half.json", "bf16": "cifar10-bf16.json"}
CASES = {
    "FedAvg, beta 0.5": "fedavg-beta-0.5",
    "FedGG, beta 0.5": "fedgg-beta-0.5",
    "FedAvg, beta 0.1": "fedavg-beta-0.1",
    "FedGG, beta 0.1": "fedgg-beta-0.1",
}
SEEDS = (0, 1, 2)
LAST = 10  # rounds


def curves(precision: str, case: str) -> list[list[float]]:
    runs = json.loads((RESULTS / FILES[precision]).read_text(encoding="utf-8"))["runs"]
    return [[100 * value for value in runs[f"{case}/seed-{seed}"]["test_accuracy"]] for seed in SEEDS]


def row(case: str) -> list[str]:
    """Mean of the last rounds and its deviation over seeds, in each precision."""
    cells = []
    for precision in FILES:
        ends = [statistics.mean(curve[-LAST:]) for curve in curves(precision, case)]
        cells.append(f"{statistics.mean(ends):.1f} ± {statistics.stdev(ends):.1f}")
    return cells


@styled
def draw() -> Figure:
    figure = blank(11, 2.8)
    panels = figure.subplots(1, len(CASES), sharey=True)
    for panel, (label, case) in zip(panels, CASES.items(), strict=True):
        for colour, precision in zip(COLOURS, FILES, strict=False):
            for number, curve in enumerate(curves(precision, case)):
                name = precision if number == 0 else None
                panel.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=0.8, alpha=0.8, label=name)
        panel.set_title(label)
        panel.set_xlabel("round")
    panels[0].set_ylabel("test accuracy, %")
    panels[-1].legend(loc="lower right")
    return figure


if __name__ == "__main__":
    for label, case in CASES.items():
        print(f"| {label} | {' | '.join(row(case))} |")
    draw().savefig(sys.argv[1], dpi=150)
