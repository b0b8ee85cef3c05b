"""Short names of algorithms, models and data files (`FedNew` for `algos.py:FedNew`), and labels for single runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from fedgg.files import as_unicode
from fedgg.runfolder.record_types import RunRecord, StudyRecord, differing, flat

REFERENCES = ("fedavg", "fedsgd")  # the first of these that was run is the reference
FROM_PYTHON = "python:"


def short_name(name: str) -> str:
    """`FedNew` for `algos.py:FedNew`, `package.module:FedNew` or `python:main.<locals>.FedNew`; `mine.npz` for
    `npz:data/mine.npz`."""
    if name.startswith(FROM_PYTHON):
        return name.removeprefix(FROM_PYTHON).rpartition(".")[2]
    if name.startswith("npz:"):
        return PurePath(name.removeprefix("npz:")).name
    kind = name.rpartition(":")[2]
    return kind if kind.isidentifier() else name


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The short name of each. Classes of the same name in different files also have as much of the path as is needed
    to distinguish them: `FedNew (one/algos.py)` and `FedNew (other/algos.py)`."""
    distinct = list(dict.fromkeys(names))
    alike = Counter(map(short_name, distinct))
    shown = {}
    for name in distinct:
        short = short_name(name)
        others = [other for other in distinct if other != name and short_name(other) == short]
        shown[name] = short if alike[short] == 1 or short == name else f"{short} ({_origin(name, others)})"
    return shown


def _origin(name: str, others: Sequence[str]) -> str:
    """The end of the path that no other name has; "Python" for a class that was passed from Python."""
    if name.startswith(FROM_PYTHON):
        return "Python"
    parts, theirs = (PurePath(name.rpartition(":")[0]).parts, [PurePath(o.rpartition(":")[0]).parts for o in others])
    for count in range(1, len(parts) + 1):
        if all(parts[-count:] != other[-count:] for other in theirs):
            return str(PurePath(*parts[-count:]))
    return str(PurePath(*parts))


def labelled(records: Sequence[RunRecord], path: Path) -> StudyRecord:
    """Single runs as a comparison; runs that differ in the seed alone share a row."""
    labels = _labels(records)
    runs: dict[str, dict[int, RunRecord]] = {label: {} for label in labels}
    for label, record in zip(labels, records, strict=True):
        runs[label][_seed(record)] = record
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    reference = _reference(runs)
    runs = {reference: runs[reference]} | runs  # the reference first
    return StudyRecord(path, tuple(runs), tuple(seeds), reference, runs)


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """Their names; if two runs of a seed share one, with the settings that differ, or else with the folder."""
    shown = short_names(_algorithm(record) for record in records)
    names = [str(record.config.get("name") or shown[_algorithm(record)]) for record in records]
    names = _without_shared_end(names)
    for extend in (_with_settings, _with_folder):
        if _unique(names, records):
            break
        names = extend(names, records)
    return names


def _unique(names: Sequence[str], records: Sequence[RunRecord]) -> bool:
    pairs = Counter((name, _seed(record)) for name, record in zip(names, records, strict=True))
    return max(pairs.values(), default=1) == 1


def _with_settings(names: Sequence[str], records: Sequence[RunRecord]) -> list[str]:
    """Each name with the settings in which runs of that name differ."""
    settings = [flat(record.config) for record in records]
    pairs = list(zip(names, settings, strict=True))
    keys = {name: differing(of_run for other, of_run in pairs if other == name) for name in names}
    return [
        " ".join([name, *(f"{key.rpartition('.')[2]}={of_run[key]}" for key in keys[name] if key in of_run)])
        for name, of_run in pairs
    ]


def _with_folder(names: Sequence[str], records: Sequence[RunRecord]) -> list[str]:
    taken = Counter(zip(names, map(_seed, records), strict=True))
    return [
        f"{name} ({as_unicode(str(record.path))})" if taken[name, _seed(record)] > 1 else name
        for name, record in zip(names, records, strict=True)
    ]


def _without_shared_end(names: Sequence[str]) -> list[str]:
    """`FedAvg, beta 0.1` and `FedProx, beta 0.1` become FedAvg and FedProx if all names end in `beta 0.1`."""
    ends = {name.rpartition(", ")[2] if ", " in name else None for name in names}
    if len(ends) != 1 or None in ends or len(set(names)) < 2:
        return list(names)
    return [name.rpartition(", ")[0] for name in names]


def _reference(runs: dict[str, dict[int, RunRecord]]) -> str:
    algorithms = {label: {_algorithm(record) for record in by_seed.values()} for label, by_seed in runs.items()}
    plain = [label for name in REFERENCES for label in runs if name in algorithms[label]]
    return plain[0] if plain else next(iter(runs))


def _algorithm(record: RunRecord) -> str:
    chosen: Any = record.config.get("algorithm")
    return str(chosen.get("name", "run")) if isinstance(chosen, dict) else "run"


def _seed(record: RunRecord) -> int:
    seed = record.config.get("seed", 0)
    return seed if type(seed) is int else 0


def shortened(text: object, width: int) -> str:
    """A name cut to `width` characters, also within a word."""
    words = " ".join(str(text).split())
    return words if len(words) <= width else words[: width - 1].rstrip() + "…"
