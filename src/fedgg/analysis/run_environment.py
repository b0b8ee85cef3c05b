"""The conditions of runs (commit, device, precision, versions, time) in a few sentences, and their differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fedgg.runfolder.record_types import RunRecord

UNKNOWN = "not recorded"
CHANGES_BITS = ("device", "precision", "torch")  # conditions under which the same experiment has other last bits


def conditions(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """One sentence for all runs of a table, and one more for each condition in which they differ."""
    if not records:
        return ()
    facts, mixed = [], []
    for name, of in _FACTS.items():
        values = Counter(of(record) for record in records)
        facts.append(f"{name} {', '.join(values)}")
        if len(values) > 1:
            counts = ", ".join(f"{value} ({_runs(count)})" for value, count in values.most_common())
            within_pairs = _within_pairs(records, of) if name in CHANGES_BITS else ""
            mixed.append(f"The runs differ in {name}: {counts}.{within_pairs}")
    facts += _engines(records)
    seconds = sum(record.seconds for record in records)
    runs = f"{_runs(len(records))}, {shown_seconds(seconds)} of rounds in total"
    return (f"Conditions: {'; '.join([*facts, runs])}.", *mixed)


def _within_pairs(records: Sequence[RunRecord], of: Callable[[RunRecord], str]) -> str:
    """A sentence if runs of the same seed and split, which are compared with each other, differ in a condition."""
    compared: dict[tuple[str, str], set[str]] = {}
    for record in records:
        split = repr((record.config.get("data"), record.config.get("split")))
        compared.setdefault((str(record.config.get("seed")), split), set()).add(of(record))
    seeds = list(dict.fromkeys(seed for (seed, _), values in compared.items() if len(values) > 1))
    if not seeds:
        return ""
    return f" With seed {', '.join(seeds)} rows differ in it, so differences between rows include its effect."


def _runs(count: int) -> str:
    return f"{count} run{'s' if count > 1 else ''}"


def shown_seconds(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


def shown_megabytes(megabytes: float) -> str:
    """One decimal; below 1 MB, two significant digits."""
    return f"{megabytes:.1f}" if megabytes >= 1 or not megabytes else f"{megabytes:.2g}"


def _commit(record: RunRecord) -> str:
    versions = record.versions or {}
    commit = versions.get("commit")
    if not commit:
        return f"{UNKNOWN} (fedgg {versions['fedgg']})" if "fedgg" in versions else UNKNOWN
    return f"{str(commit)[:7]}{' with changes' if versions.get('changed') else ''}"


def _version(key: str) -> Callable[[RunRecord], str]:
    return lambda record: str((record.versions or {}).get(key, UNKNOWN))


def _engines(records: Sequence[RunRecord]) -> list[str]:
    """Runs of different engines may be compared, so mixing them is not noted; older run folders do not name theirs."""
    engines = [(record.versions or {}).get("engine") for record in records]
    recorded = [str(engine["name"]) for engine in engines if isinstance(engine, dict) and "name" in engine]
    if not recorded:
        return []
    share = "" if len(recorded) == len(records) else f" (recorded by {len(recorded)} of {_runs(len(records))})"
    return [f"engine {', '.join(dict.fromkeys(recorded))}{share}"]


def _precision(record: RunRecord) -> str:
    return str(record.config.get("engine", {}).get("precision", UNKNOWN))


_FACTS: dict[str, Callable[[RunRecord], str]] = {
    "commit": _commit,
    "device": _version("device"),
    "precision": _precision,
    "torch": _version("torch"),
    "Python": _version("python"),
}
