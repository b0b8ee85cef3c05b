"""Everything the page shows, as plain JSON: one object for each group of runs, one for each run in it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import tomli_w

from fedgg.analysis.collect import ODD, Group, Problem
from fedgg.analysis.compare import WINDOW, Comparison, Row, compare
from fedgg.analysis.conditions import conditions
from fedgg.analysis.grid import axes_of
from fedgg.analysis.labels import short_name
from fedgg.analysis.run_columns import KEPT, run_data, short, split_data
from fedgg.analysis.verdict import answer, listed, quoted
from fedgg.report.rerun_command import command_again, settings_by_label
from fedgg.report.tables import difference_rule, privacy_notes, shown_epsilon
from fedgg.runfolder.dotted_settings import common, flat, nested
from fedgg.runfolder.records import BYTES_PER_MEGABYTE, RunRecord, StudyRecord

Data = dict[str, Any]
# Keys of versions.json under the names that the page shows.
FACTS = {
    "data": "data hash",
    "keeper": "client state",
    "structure": "model structure hash",
    "code": "code hashes",
    "changed": "uncommitted changes",
}
KEEPERS = {"here": "kept by the server", "nodes": "kept by the clients"}


def group_data(group: Group, comparison: Comparison | None = None) -> Data:
    """A group without its runs."""
    study = group.study
    comparison = comparison or compare(study)
    records = [record for by_seed in study.runs.values() for record in by_seed.values()]
    axes = axes_of(study)
    return {
        "id": identity(str(study.path), group.loose or ""),
        "title": title(group),
        "about": about(study),
        "place": place(study),
        "path": str(study.path),
        "answer": asdict(answer(study, comparison)),
        "labels": list(study.labels),
        "seeds": list(study.seeds),
        "reference": study.reference,
        "best": comparison.best,
        "rows": [_row(row, study) for row in comparison.rows],
        "window": WINDOW,
        "difference_rule": difference_rule(comparison),
        "size": study.size,
        "missing": [[label, seed] for label, seed in study.missing],
        "private": bool(comparison.deltas),
        "notes": [*privacy_notes(comparison), *comparison.notes],
        "conditions": list(conditions(records)),
        "axes": None if axes is None else {"values": _values(axes.values), "places": _listed(axes.places)},
        "splits": _splits(study),
        "settings": _settings(study),
        "versions": _versions(records),
        "again": command_again(study),
    }


def shown(groups: Sequence[Group], fill: Callable[[Group], Data]) -> tuple[list[Group], list[Data], list[Problem]]:
    """The groups with their data, and a problem for each that turns out to hold what no run writes: the rest stands."""
    fine, data, problems = [], [], []
    for group in groups:
        try:
            data.append(fill(group))
            fine.append(group)
        except ODD as error:
            why = f"it holds something no run writes ({type(error).__name__}: {error}); restore it or run again"
            problems.append(Problem(str(group.study.path), " ".join(why.split())))
    return fine, data, problems


def runs_data(group: Group) -> list[Data]:
    """The runs of a group, under names that stay theirs."""
    return [
        {"id": identity(str(record.path), label, str(seed)), **run_data(record, label, seed)}
        for label, by_seed in group.study.runs.items()
        for seed, record in by_seed.items()
    ]


def identity(*words: str) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]


def title(group: Group) -> str:
    """What kind of thing was run."""
    study = group.study
    sources = {run.config.get("data", {}).get("source") for by in study.runs.values() for run in by.values()}
    on = f" on {short_name(str(sources.pop()))}" if len(sources) == 1 and None not in sources else ""
    axes = axes_of(study)
    if axes is not None:
        last = [key.rpartition(".")[2] for key in axes.values]
        unclear = len(set(last)) < len(last) or "name" in last
        return f"Sweep over {listed(list(axes.values) if unclear else last)}{on}"
    if len(study.labels) > 6:
        return f"{len(study.labels)} algorithms and settings{on}"
    return listed([quoted(label) for label in study.labels]) + on


def about(study: StudyRecord) -> str:
    """Data, split, model and length of the runs, in the words of their settings."""
    records = [record for by_seed in study.runs.values() for record in by_seed.values()]
    shared = _shared(records)
    words = [
        ("{}", "data.source"),
        ("{} clients", "split.clients"),
        ("{}" + _betas(records), "split.scheme"),
        ("{}", "model.name"),
        ("{} rounds", "rounds"),
        ("{} local epochs", "local.epochs"),
        ("batch {}", "local.batch"),
        ("lr {}", "local.lr"),
    ]
    told = [_one(pattern.format(short_name(str(shared[key])))) for pattern, key in words if shared.get(key) is not None]
    seeds = f"seed{'s' if len(study.seeds) > 1 else ''} {', '.join(map(str, study.seeds))}"
    return "; ".join([", ".join(told), seeds]) if told else seeds


def place(study: StudyRecord) -> str:
    """Data and split alone: what tells the groups of a page apart."""
    records = [record for by_seed in study.runs.values() for record in by_seed.values()]
    shared = _shared(records)
    split = f"{shared['split.scheme']}{_betas(records)}" if "split.scheme" in shared else ""
    return ", ".join(filter(None, [str(shared.get("data.source", "")), split])) or str(study.path)


def _betas(records: list[RunRecord]) -> str:
    """Of a Dirichlet split; several where runs differ in it."""
    splits = [record.config.get("split", {}) for record in records]
    drawn = [split["beta"] for split in splits if "beta" in split and str(split.get("scheme")).startswith("dirichlet")]
    return f" {listed([str(beta) for beta in dict.fromkeys(drawn)])}" if drawn else ""


def _one(words: str) -> str:
    return words.removesuffix("s") if words.startswith("1 ") else words


def _shared(records: list[RunRecord]) -> dict[str, Any]:
    return common([flat(record.config) for record in records])


def _row(row: Row, study: StudyRecord) -> Data:
    ended = [run for run in study.runs[row.label].values() if run.complete]
    worst = [min(own.values()) for run in ended if (own := _last_kept(run))]
    return {
        **asdict(row),
        "epsilon": None if row.epsilon is None else shown_epsilon(row.epsilon),
        "worst_client": short(sum(worst) / len(worst)) if worst else None,
        "megabytes": _mean([sum(_traffic(line) for line in run.rounds) / BYTES_PER_MEGABYTE for run in ended]),
        "seconds": _mean([run.seconds for run in ended]),
    }


def _last_kept(run: RunRecord) -> dict[str, float]:
    return next((line[KEPT] for line in reversed(run.rounds) if line.get(KEPT)), {})


def _traffic(line: dict[str, Any]) -> int:
    return int(line.get("bytes_up") or 0) + int(line.get("bytes_down") or 0)


def _mean(values: list[float]) -> float | None:
    return short(sum(values) / len(values)) if values and any(values) else None


def _splits(study: StudyRecord) -> Data:
    """By their hash, each once; where rows of a seed have different ones, with the first row that has it."""
    found: Data = {}
    for label, by_seed in study.runs.items():
        for record in by_seed.values():
            name = str((record.partition or {}).get("hash"))
            if record.partition is not None and name not in found:
                split = split_data(record.partition)
                if split is not None:
                    found[name] = split | {"seed": record.config.get("seed"), "label": label}
    seeds = Counter(str(split["seed"]) for split in found.values())
    for split in found.values():
        if seeds[str(split["seed"])] == 1:
            del split["label"]
    return found


def _settings(study: StudyRecord) -> Data:
    """The settings that all rows share as TOML, and what each row has of its own."""
    settings = settings_by_label(study)
    base = common(list(settings.values()))
    own = {label: {k: v for k, v in these.items() if k not in base} for label, these in settings.items()}
    return {
        "shared": tomli_w.dumps(nested(base)),
        "own": {label: tomli_w.dumps(nested(these)) for label, these in own.items() if these},
    }


def _versions(records: list[RunRecord]) -> list[Data]:
    """Each distinct set of versions, with the number of runs that have it."""
    found: dict[str, Data] = {}
    for record in records:
        told = {k: v for k, v in (record.versions or {}).items() if k not in ("format", "experiment", "model")}
        worded = {FACTS.get(k, k): _in_words(v) for k, v in told.items()}
        own = {k: v for k, v in worded.items() if v != ""}
        entry = found.setdefault(json.dumps(own, sort_keys=True, default=str), {"runs": 0, "facts": own})
        entry["runs"] += 1
    return list(found.values())


def _in_words(fact: Any) -> Any:
    """The code hashes of a user's algorithm and model as text: empty for the library's own."""
    if isinstance(fact, dict):
        return ", ".join(f"{key} {value}" for key, value in fact.items() if value is not None)
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return KEEPERS.get(fact, fact) if isinstance(fact, str) else fact


def _values(content: dict[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """JSON has no infinite number: here it is a word."""
    infinite = (math.inf, -math.inf)
    return {key: [str(value) if value in infinite else value for value in values] for key, values in content.items()}


def _listed(content: dict[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {key: list(values) for key, values in content.items()}
