"""The data that the page shows, as plain JSON: an object for each group of runs, and for each run an object in it.

A group also has the command that repeats its runs; the command contains all settings, so it needs none of the folders.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tomli_w

from fedgg.analysis.chart_data import run_columns, six_digits, split_data, sweep_grid
from fedgg.analysis.collect import CONTENT_ERRORS, Group, Problem
from fedgg.analysis.compare import WINDOW, Comparison, ComparisonRow, compare, shown_seeds
from fedgg.analysis.labels import FROM_PYTHON, short_name, shortened
from fedgg.analysis.run_environment import conditions
from fedgg.analysis.verdict import conclude, listed, quoted
from fedgg.registry import NAMED_PARTS, names_code
from fedgg.report.tables import deviation_rule, difference_rule, privacy_notes, shown_epsilon
from fedgg.runfolder.measure import Measure
from fedgg.runfolder.record_types import (
    BYTES_PER_MEGABYTE,
    PER_RUN,
    RunRecord,
    StudyRecord,
    common,
    flat,
    nested,
    split_words,
)

Data = dict[str, Any]
# Keys of versions.json under the names that the page shows.
VERSION_NAMES = {
    "data": "data hash",
    "keeper": "client state",
    "structure": "model structure hash",
    "code": "code hashes",
    "changed": "uncommitted changes",
}
KEEPERS = {"here": "kept by the server", "nodes": "kept by the clients"}
DIAGNOSTIC_TEXTS = "diagnostics"  # key of versions.json
RERUN_FILE = "again.toml"


@dataclass(frozen=True)
class PageGroup:
    """A group with its comparison, and its data for the page without those of its runs."""

    group: Group
    comparison: Comparison
    data: Data


def page_groups(groups: Sequence[Group], make: Callable[[Group], PageGroup]) -> tuple[list[PageGroup], list[Problem]]:
    """The groups that can be shown, and a problem for each that holds something no run writes."""
    shown, problems = [], []
    for group in groups:
        try:
            shown.append(make(group))
        except CONTENT_ERRORS as error:
            why = f"it holds something no run writes ({type(error).__name__}: {error}); restore it or run again"
            problems.append(Problem(str(group.study.path), " ".join(why.split())))
    return shown, problems


def page_group(group: Group, metric: str | None = None) -> PageGroup:
    """`metric` names the measure that is shown first, instead of the primary metric."""
    comparison = compare(group.study, group.measure(metric))
    return PageGroup(group, comparison, group_data(group, comparison, metric))


def group_data(group: Group, comparison: Comparison, metric: str | None = None) -> Data:
    """A group without its runs; its results by each measure, the key of the first one shown under `measure`."""
    study, shown = group.study, comparison.measure
    others = [measure for measure in study.measures.values() if measure.key != shown.key]
    results = {shown.key: _results(study, comparison)}
    results |= {measure.key: _results(study, compare(study, measure)) for measure in others}
    if metric is not None and metric != shown.key:
        note = f"None of these runs has recorded {metric}; shown is the {shown.title}."
        results[shown.key]["notes"].append(note)
    records = study.records
    grid = sweep_grid(study)
    return {
        "id": identity(str(study.path), group.grouped_by or ""),
        "title": title(group),
        "about": about(study),
        "place": place(study),
        "path": str(study.path),
        "measure": shown.key,
        "measures": [_measure(measure) for measure in (study.measures | {shown.key: shown}).values()],
        "results": results,
        "labels": list(study.labels),
        "seeds": list(study.seeds),
        "reference": study.reference,
        "window": WINDOW,
        "size": study.size,
        "missing": [[label, seed] for label, seed in study.missing],
        "waiting": [[label, seed, study.waiting.get((label, seed), "")] for label, seed in study.missing],
        "places": [[where, count] for where, count in Counter(record.where for record in records).items() if where],
        "private": bool(comparison.deltas),
        "conditions": list(conditions(records)),
        "axes": None if grid is None else {"values": _values(grid.values), "places": _listed(grid.places)},
        "splits": _splits(study),
        "settings": _settings(study),
        "diagnostic_texts": _diagnostic_texts(study),
        "versions": _versions(records),
        "again": command_again(study),
    }


def _measure(measure: Measure) -> Data:
    """What the page has to know of a measure; `by_client` is the key under which runs have it for single clients."""
    return {
        "key": measure.key,
        "title": measure.title,
        "name": measure.metric_title,
        "short": measure.short,
        "place": measure.place,
        "brief": measure.brief,
        "where": measure.where_word,
        "caption": measure.client_caption,
        "percent": measure.percent,
        "higher": measure.higher_is_better,
        "over_clients": measure.over is not None,
        "by_client": measure.recorded,
    }


def _results(study: StudyRecord, comparison: Comparison) -> Data:
    """What the runs of a group show by one measure."""
    worst = _worst_client(study, comparison.measure)
    return {
        "answer": asdict(conclude(study, comparison)),
        "best": comparison.best,
        "rows": [_row(row, study, worst) for row in comparison.rows],
        "worst_client": None if worst is None else worst.key,
        "deviation_rule": deviation_rule(comparison.measure),
        "difference_rule": difference_rule(comparison),
        "notes": [*privacy_notes(comparison), *comparison.notes],
    }


# Runs -----------------------------------------------------------------------------------------------------------------


def runs_data(group: Group) -> list[Data]:
    """The runs of a group."""
    return [run_data(group.study, label, seed) for label, by_seed in group.study.runs.items() for seed in by_seed]


def run_data(study: StudyRecord, label: str, seed: int) -> Data:
    """A run under an id that it keeps while the page is updated."""
    record = study.runs[label][seed]
    name = identity(str(record.path), label, str(seed))
    # Where other runs have personal models, a run with a global one has the measures of clients' models too.
    of_clients = [one for key, one in study.measures.items() if one.where == "client" and key not in record.measures]
    curves = {one.key: [six_digits(one.at(line)) for line in record.rounds] for one in of_clients}
    return {"id": name, "label": label, "seed": seed, **run_columns(record), **curves}


def identity(*words: str) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]


# Head of the page -----------------------------------------------------------------------------------------------------


def title(group: Group) -> str:
    """The rows, or the settings of a sweep, and the data set."""
    study = group.study
    sources = {run.config.get("data", {}).get("source") for run in study.records}
    on = f" on {short_name(str(sources.pop()))}" if len(sources) == 1 and None not in sources else ""
    grid = sweep_grid(study)
    if grid is not None:
        last = [key.rpartition(".")[2] for key in grid.values]
        unclear = len(set(last)) < len(last) or "name" in last
        return f"Sweep over {listed(list(grid.values) if unclear else last)}{on}"
    if len(study.labels) > 6:
        return f"{len(study.labels)} algorithms and settings{on}"
    return listed([quoted(label) for label in study.labels]) + on


def about(study: StudyRecord) -> str:
    """Data set, split, model, rounds and local training, as far as all runs share them."""
    records = study.records
    shared = _shared(records)
    words = [
        ("{}", "data.source"),
        ("{} clients", "split.clients"),
        (_split_of(records), "split.scheme"),
        ("{}", "model.name"),
        ("{} rounds", "rounds"),
        ("{} local steps", "local.steps") if shared.get("local.steps") else ("{} local epochs", "local.epochs"),
        ("batch {}", "local.batch"),
        ("lr {}", "local.lr"),
    ]
    facts = [
        _one(pattern.format(short_name(str(shared[key])))) for pattern, key in words if shared.get(key) is not None
    ]
    seeds = shown_seeds(study.seeds)
    return "; ".join([", ".join(facts), seeds]) if facts else seeds


def place(study: StudyRecord) -> str:
    """Data set and split, by which the groups of a page are chosen."""
    records = study.records
    shared = _shared(records)
    split = _split_of(records) if "split.scheme" in shared else ""
    return ", ".join(filter(None, [str(shared.get("data.source", "")), split])) or str(study.path)


def _split_of(records: list[RunRecord]) -> str:
    """The split that runs share, as `dirichlet 0.1`; with several values if runs differ in its main setting."""
    splits = [record.config["split"] for record in records if "split" in record.config]
    scheme = str(splits[0].get("scheme", "")) if splits else ""
    values = dict.fromkeys(split_words(split).removeprefix(scheme).strip() for split in splits)
    return f"{scheme} {listed(list(values))}".strip() if splits else ""


def _one(words: str) -> str:
    return words.removesuffix("s") if words.startswith("1 ") else words


def _shared(records: list[RunRecord]) -> dict[str, Any]:
    return common([flat(record.config) for record in records])


# Rows and splits ------------------------------------------------------------------------------------------------------


def _worst_client(study: StudyRecord, measure: Measure) -> Measure | None:
    """The worst client by the same metric, where it was measured or else on the clients' hold-out examples."""
    if measure.over is not None:
        return None
    keys = (f"{where}_{measure.metric}_worst_client" for where in (measure.where, "holdout", "personal"))
    return next((study.measures[key] for key in keys if key in study.measures), None)


def _row(row: ComparisonRow, study: StudyRecord, worst: Measure | None) -> Data:
    ended = [run for run in study.runs[row.label].values() if run.complete]
    curves = [] if worst is None else [run.scores(worst)[1] for run in ended]
    lasts = [float(curve[-1]) for curve in curves if len(curve)]
    return {
        **{key: value for key, value in asdict(row).items() if key != "against_best"},
        "epsilon": None if row.epsilon is None else shown_epsilon(row.epsilon),
        "worst_client": six_digits(sum(lasts) / len(lasts)) if lasts else None,
        "megabytes": _mean([sum(_traffic(line) for line in run.rounds) / BYTES_PER_MEGABYTE for run in ended]),
        "seconds": _mean([run.seconds for run in ended]),
    }


def _traffic(line: dict[str, Any]) -> int:
    return int(line.get("bytes_up") or 0) + int(line.get("bytes_down") or 0)


def _mean(values: list[float]) -> float | None:
    return six_digits(sum(values) / len(values)) if values and any(values) else None


def _splits(study: StudyRecord) -> Data:
    """By hash; if rows have different splits with the same seed, with the label of the first row that has it."""
    splits: Data = {}
    for label, by_seed in study.runs.items():
        for record in by_seed.values():
            name = str((record.partition or {}).get("hash"))
            if record.partition is not None and name not in splits:
                split = split_data(record.partition)
                if split is not None:
                    splits[name] = split | {"seed": record.config.get("seed"), "label": label}
    seeds = Counter(str(split["seed"]) for split in splits.values())
    for split in splits.values():
        if seeds[str(split["seed"])] == 1:
            del split["label"]
    return splits


def _values(content: dict[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Infinite values as text, since JSON has none."""
    infinite = (math.inf, -math.inf)
    return {key: [str(value) if value in infinite else value for value in values] for key, values in content.items()}


def _listed(content: dict[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {key: list(values) for key, values in content.items()}


# Settings and versions ------------------------------------------------------------------------------------------------


def _settings(study: StudyRecord) -> Data:
    """The settings that all rows share, and those of each row alone, as TOML."""
    settings = settings_by_label(study)
    base = common(list(settings.values()))
    by_row = {label: {k: v for k, v in row.items() if k not in base} for label, row in settings.items()}
    return {
        "shared": tomli_w.dumps(nested(base)),
        "by_row": {label: tomli_w.dumps(nested(row)) for label, row in by_row.items() if row},
    }


def settings_by_label(study: StudyRecord) -> dict[str, dict[str, Any]]:
    """The settings of each row under dotted keys, without name and seed; those of its first seed that has started."""
    started = {label: next(iter(by_seed.values())) for label, by_seed in study.runs.items() if by_seed}
    return {
        label: {key: value for key, value in flat(run.config).items() if key not in PER_RUN}
        for label, run in started.items()
    }


def _diagnostic_texts(study: StudyRecord) -> dict[str, dict[str, str]]:
    """By label, the sentences with which an algorithm explains its diagnostics, where its runs have recorded any."""
    texts: dict[str, dict[str, str]] = {}
    for label, by_seed in study.runs.items():
        for run in by_seed.values():
            recorded = (run.versions or {}).get(DIAGNOSTIC_TEXTS)
            if isinstance(recorded, dict):  # of any content: versions.json may come from elsewhere
                sentences = {name: shortened(text, 1000) for name, text in recorded.items() if isinstance(text, str)}
                texts[label] = texts.get(label, {}) | sentences
    return {label: sentences for label, sentences in texts.items() if sentences}


def _versions(records: list[RunRecord]) -> list[Data]:
    """Each distinct set of versions, with the number of runs that have it."""
    distinct: dict[str, Data] = {}
    for record in records:
        left_out = ("format", "experiment", "model", "metrics", "where", DIAGNOSTIC_TEXTS)
        recorded = {k: v for k, v in (record.versions or {}).items() if k not in left_out}
        named = {VERSION_NAMES.get(k, k): _in_words(v) for k, v in recorded.items()}
        facts = {k: v for k, v in named.items() if v != ""}
        entry = distinct.setdefault(json.dumps(facts, sort_keys=True, default=str), {"runs": 0, "facts": facts})
        entry["runs"] += 1
    return list(distinct.values())


def _in_words(fact: Any) -> Any:
    """A value of versions.json as text; empty for the code hashes of algorithms and models that fedgg contains."""
    if isinstance(fact, dict):
        return ", ".join(f"{key} {value}" for key, value in fact.items() if value is not None)
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return KEEPERS.get(fact, fact) if isinstance(fact, str) else fact


# The command that repeats the runs ------------------------------------------------------------------------------------


def command_again(study: StudyRecord) -> str | None:
    """For a POSIX shell: it writes a study file and calls `fedgg compare`. None if parts were passed from Python."""
    settings = settings_by_label(study)
    if not settings or any(str(v).startswith(FROM_PYTHON) for row in settings.values() for v in row.values()):
        return None
    # ascii() so that no name can end the comment.
    names = {str(row.get(key)) for row in settings.values() for key in NAMED_PARTS}
    code = sorted(name for name in names if names_code(name))
    advice = "Read it first; fedgg asks before it runs it, unless --trust names it."
    warning = f"# It runs code from outside fedgg: {', '.join(map(ascii, code))}. {advice}\n" if code else ""
    shared = tuple(seed for seed in study.seeds if all(seed in study.seeds_of(label) for label in settings))
    rest = {label: tuple(seed for seed in study.seeds_of(label) if seed not in shared) for label in settings}
    if not any(rest.values()):
        return f"{warning}{_written(RERUN_FILE, study_toml(study, settings, shared))}fedgg compare {RERUN_FILE}"
    # Rows have different seeds: several calls into one folder. The first of them sets the reference.
    calls = [study_toml(study, settings, shared)] if shared else []
    for label in sorted(rest, key=lambda label: label != study.reference):
        if rest[label]:
            calls.append(study_toml(study, {label: settings[label]}, rest[label]))
    files = [f"again-{number}.toml" for number in range(1, len(calls) + 1)]
    parts = [f"{_written(file, call)}fedgg compare {file} --out again" for file, call in zip(files, calls, strict=True)]
    return warning + "\n".join(parts)


def _written(file: str, content: str) -> str:
    """TOML escapes line breaks within a name, so no name can end the document early."""
    return f"cat > {file} <<'END'\n{content}END\n"


def study_toml(study: StudyRecord, settings: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...]) -> str:
    """A study file of these rows."""
    base = common(list(settings.values()))
    variants = {label: {key: value for key, value in row.items() if key not in base} for label, row in settings.items()}
    reference = study.reference if study.reference in variants else next(iter(variants))
    content: dict[str, Any] = {"seeds": list(seeds), "reference": reference, "experiment": nested(base)}
    return tomli_w.dumps(content | {"variants": {label: nested(row) for label, row in variants.items()}})
