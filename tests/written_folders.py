"""Run folders and comparison folders written by hand, for the tests of this room."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_run(
    folder: Path,
    accuracies: Sequence[float | None],
    *,
    status: str | None = "finished",
    bytes_each_way: int = 500_000,
    split_hash: str = "same",
    name: str = "demo",
    epsilons: Sequence[float | None] | None = None,
    accountant: str | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
    scores: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """A run with one accuracy a round (None: not evaluated) and 2 * bytes_each_way of traffic a round.

    With `metrics`, as versions.json lists them, it is the first of them instead; `scores` are more of each round.
    A private one has an epsilon a round too, None standing for infinite; an old one names no accountant.
    """
    folder.mkdir(parents=True)
    config = f"name = {json.dumps(name)}\nseed = 0\nrounds = {len(accuracies)}\n[split]\nscheme = 'iid'\n"
    (folder / "config.toml").write_text(config)
    lines: list[dict[str, Any]] = [
        {
            "round": number,
            f"test_{metrics[0]['name'] if metrics else 'accuracy'}": accuracy,
            "test_loss": None if accuracy is None else 1.0 - accuracy,
            "train_loss": 1.0 / number,
            "bytes_up": bytes_each_way,
            "bytes_down": bytes_each_way,
        }
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    for line, more in zip(lines, scores, strict=False):
        line |= more
    if metrics:
        (folder / "versions.json").write_text(json.dumps({"format": 1, "metrics": list(metrics)}))
    end: dict[str, Any] = {"status": status, "rounds_done": len(lines)}
    for line, epsilon in zip(lines, epsilons or (), strict=False):
        spent = {"epsilon": epsilon, "delta": 1e-5} | ({"accountant": accountant} if accountant else {})
        line |= spent
        end |= spent
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "partition.json").write_text(json.dumps({"scheme": "iid", "hash": split_hash, "counts": [[1, 2]]}))
    if status is not None:
        (folder / "summary.json").write_text(json.dumps(end))
    return folder


def write_study(
    folder: Path,
    curves: Mapping[str, Sequence[Sequence[float | None] | None]],
    *,
    reference: str,
    statuses: Mapping[tuple[str, int], str | None] | None = None,
    metrics: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]] = (),
) -> Path:
    """A comparison with one curve a label and seed; None leaves that run folder out. `metrics`: of all, or by label."""
    seeds = range(max(map(len, curves.values())))
    runs = {label: {str(seed): f"run-{at}/seed-{seed}" for seed in seeds} for at, label in enumerate(curves)}
    for label, by_seed in curves.items():
        for seed, accuracies in enumerate(by_seed):
            if accuracies is not None:
                status = (statuses or {}).get((label, seed), "finished")
                listed = metrics.get(label, ()) if isinstance(metrics, Mapping) else metrics
                write_run(folder / runs[label][str(seed)], accuracies, status=status, metrics=listed)
    study = {"format": 1, "labels": [*curves], "seeds": [*seeds], "reference": reference, "runs": runs}
    folder.mkdir(exist_ok=True)
    (folder / "study.json").write_text(json.dumps(study))
    return folder


def metric(name: str, *, higher_is_better: bool = True, percent: bool = True) -> dict[str, Any]:
    """A metric as versions.json lists it."""
    return {"name": name, "higher_is_better": higher_is_better, "percent": percent}


RMSE = metric("rmse", higher_is_better=False, percent=False)
