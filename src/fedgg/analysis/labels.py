"""Names as people read them: the class instead of FILE:CLASS, and labels for runs that no study has labelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from fedgg.files import as_unicode
from fedgg.runfolder.dotted_settings import differing, flat
from fedgg.runfolder.records import RunRecord, StudyRecord

REFERENCES = ("fedavg", "fedsgd")  # what others are measured against, if it is there
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
    """The short name of each; classes of the same name in different files are told apart by as much of the path as
    that takes: `FedNew (one/algos.py)` and `FedNew (other/algos.py)`."""
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
    """The runs as a comparison: one row for those that differ in nothing but the seed."""
    labels = _labels(records)
    runs: dict[str, dict[int, RunRecord]] = {label: {} for label in labels}
    for label, record in zip(labels, records, strict=True):
        runs[label][_seed(record)] = record
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    reference = _reference(runs)
    runs = {reference: runs[reference]} | runs  # first, whatever order they were found in
    return StudyRecord(path, tuple(runs), tuple(seeds), reference, runs)


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """The given names, as long as every run of a seed has one of its own; then settings; in the end the folder."""
    shown = short_names(_algorithm(record) for record in records)
    names = [str(record.config.get("name") or shown[_algorithm(record)]) for record in records]
    names = _without_shared_end(names)
    for more in (_settings_of, _folder_of):
        if _unique(names, records):
            break
        names = more(names, records)
    return names


def _unique(names: Sequence[str], records: Sequence[RunRecord]) -> bool:
    pairs = Counter((name, _seed(record)) for name, record in zip(names, records, strict=True))
    return max(pairs.values(), default=1) == 1


def _settings_of(names: Sequence[str], records: Sequence[RunRecord]) -> list[str]:
    """Each name with the settings in which those of that name differ."""
    settings = [flat(record.config) for record in records]
    keys = {name: differing(own for other, own in zip(names, settings, strict=True) if other == name) for name in names}
    return [
        " ".join([name, *(f"{key.rpartition('.')[2]}={own[key]}" for key in keys[name] if key in own)])
        for name, own in zip(names, settings, strict=True)
    ]


def _folder_of(names: Sequence[str], records: Sequence[RunRecord]) -> list[str]:
    taken = Counter(zip(names, map(_seed, records), strict=True))
    return [
        f"{name} ({as_unicode(str(record.path))})" if taken[name, _seed(record)] > 1 else name
        for name, record in zip(names, records, strict=True)
    ]


def _without_shared_end(names: Sequence[str]) -> list[str]:
    """`FedAvg, beta 0.1` and `FedProx, beta 0.1` are FedAvg and FedProx where all are of beta 0.1."""
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


def short(text: object, width: int) -> str:
    """A name cut to fit, wherever that falls: a single long word keeps its beginning."""
    words = " ".join(str(text).split())
    return words if len(words) <= width else words[: width - 1].rstrip() + "…"
