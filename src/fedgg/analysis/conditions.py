"""The conditions under which runs were made, in a few sentences; where runs differ in them, that is noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fedgg.runfolder.records import RunRecord

UNKNOWN = "not recorded"


def conditions(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Commit, device, precision, versions and time of the runs behind a table; a sentence more where they differ."""
    if not records:
        return ()
    told, mixed = [], []
    for name, of in _FACTS.items():
        values = Counter(of(record) for record in records)
        told.append(f"{name} {', '.join(values)}")
        if len(values) > 1:
            counts = ", ".join(f"{value} ({_runs(count)})" for value, count in values.most_common())
            mixed.append(f"The runs differ in {name}: {counts}.")
    told += _engines(records)
    seconds = sum(record.seconds for record in records)
    runs = f"{_runs(len(records))}, {shown_seconds(seconds)} of rounds in total"
    return (f"Conditions: {'; '.join([*told, runs])}.", *mixed)


def _runs(count: int) -> str:
    return f"{count} run{'s' if count > 1 else ''}"


def shown_seconds(seconds: float) -> str:
    """A length of time as people say it."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


def shown_megabytes(megabytes: float) -> str:
    """One digit behind the point, and two that count where that would be nothing."""
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
    """Engines have the same numbers, so that different ones may be mixed; older folders do not tell theirs."""
    engines = [(record.versions or {}).get("engine") for record in records]
    names = dict.fromkeys(str(engine["name"]) for engine in engines if isinstance(engine, dict) and "name" in engine)
    return [f"engine {', '.join(names)}"] if names else []


def _precision(record: RunRecord) -> str:
    return str(record.config.get("engine", {}).get("precision", UNKNOWN))


_FACTS: dict[str, Callable[[RunRecord], str]] = {
    "commit": _commit,
    "device": _version("device"),
    "precision": _precision,
    "torch": _version("torch"),
    "Python": _version("python"),
}
