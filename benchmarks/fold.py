"""Fold a study's runs into one small file, to be kept under results/.

    python benchmarks/fold.py runs/STUDY results/NAME.json --note "what else a reader should know"

Accuracies and losses of every round, the mean of each reading, and the seconds; commit, device, versions and settings
as the runs wrote them down.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def folded(folder: Path) -> dict[str, Any]:
    """One entry for each run, by its place in the study."""
    runs = {}
    for file in sorted(folder.glob("*/seed-*/rounds.jsonl")):
        rounds = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        runs[f"{file.parent.parent.name}/{file.parent.name}"] = {
            "test_accuracy": [_rounded(r.get("test_accuracy"), 4) for r in rounds],
            "test_loss": [_rounded(r.get("test_loss"), 5) for r in rounds],
            "train_loss": [_rounded(r["train_loss"], 5) for r in rounds],
            "readings": {name: [_rounded(r["readings"][name], 6) for r in rounds] for name in rounds[0]["readings"]},
            "seconds": round(sum(sum(r["seconds"].values()) for r in rounds), 2),
        }
    return runs


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--note", default="")
    chosen = parser.parse_args()
    first = next(iter(sorted(chosen.study.glob("*/seed-*"))))
    conditions = json.loads((first / "versions.json").read_text(encoding="utf-8"))
    content = {"note": chosen.note, "conditions": conditions, "runs": folded(chosen.study)}
    chosen.result.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
