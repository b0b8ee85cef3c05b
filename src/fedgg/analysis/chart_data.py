"""Data of charts: a run, its clients and its split as columns no longer than a chart can show; the grid of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fedgg.analysis.labels import short_names, shortened
from fedgg.runfolder.measure import Measure
from fedgg.runfolder.record_types import RunRecord, StudyRecord, differing, flat, names_in
from fedgg.runfolder.validation import BY_CLASS, BY_CLIENT, is_number

CHOICES = (".name", ".rule", ".kind")  # settings on which other settings of their section depend
SWITCHES = ("robust.rule", "attack.kind", "personal.method")  # their section is absent if they are off
FILLED = 0.5  # share of the grid's cells that must have a row; otherwise it is not shown as a sweep


@dataclass(frozen=True)
class SweepGrid:
    """The values of each axis in order, and the position of each label on the axes."""

    values: dict[str, tuple[Any, ...]]
    places: dict[str, tuple[int, ...]]


def sweep_grid(study: StudyRecord) -> SweepGrid | None:
    """None if the rows do not form a grid: they differ in the algorithm alone, or in settings that only some have."""
    recorded = {label: flat(next(iter(by_seed.values())).config) for label, by_seed in study.runs.items() if by_seed}
    off = {key: "none" for key in SWITCHES if any(key in row for row in recorded.values())}
    settings = {label: {**off, **row} for label, row in recorded.items()}
    keys = _independent(differing(settings.values()), settings)
    if len(settings) < 2 or not keys or keys == ["algorithm.name"]:
        return None
    if not all(key in row for row in settings.values() for key in keys):
        return None
    values = {key: _ordered(settings, key) for key in keys}
    places = {label: tuple(values[key].index(_hashable(row[key])) for key in keys) for label, row in settings.items()}
    cells = math.prod(map(len, values.values()))
    # Two settings that always change together fill a small part of their grid: that is not a sweep over both.
    if len(set(places.values())) < len(places) or len(places) < FILLED * cells:
        return None
    if len(keys) > 1 and len(places) == max(map(len, values.values())):
        return None  # every row has another value of one of them, as methods with learning rates of their own
    return SweepGrid({key: _shown(these) for key, these in values.items()}, places)


def _independent(keys: list[str], settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Without the settings that only one value of an axis has: `robust.trim` is not an axis beside `robust.rule`."""
    whole = [key for key in keys if all(key in row for row in settings.values())]
    choices = {key.rpartition(".")[0] for key in whole if key.endswith(CHOICES)}
    return [key for key in keys if key in whole or key.rpartition(".")[0] not in choices]


def _ordered(settings: Mapping[str, Mapping[str, Any]], key: str) -> tuple[Any, ...]:
    """Numbers by size, other values in the order of the rows."""
    values = tuple(dict.fromkeys(_hashable(row[key]) for row in settings.values()))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return tuple(sorted(values))
    return values


def _shown(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Classes by their names rather than by their files."""
    names = short_names(value for value in values if isinstance(value, str))
    return tuple(names[value] if isinstance(value, str) else value for value in values)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else repr(value)


SPLIT_ROWS = 300  # clients in the heat map of a split
CLIENTS = 1000  # with their last values
HISTORIES = 60  # clients up to which each has its history; with more, the distribution over clients is shown
HISTORY_ROUNDS = 40
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
EVENTS = 200  # of a kind and run
NAME_LENGTH = 24  # of a client


def run_columns(record: RunRecord) -> dict[str, Any]:
    """All of a run except its settings, split and conditions, which runs share; computed once for a record."""
    if record not in _COMPUTED:
        _COMPUTED[record] = _run_columns(record)
    return _COMPUTED[record]


_COMPUTED: WeakKeyDictionary[RunRecord, dict[str, Any]] = WeakKeyDictionary()


def _run_columns(record: RunRecord) -> dict[str, Any]:
    rounds = record.rounds
    summary = record.summary or {}
    return {
        "path": str(record.path),
        "status": record.status,
        "why": summary.get("why"),
        "where": record.where,
        "faults": [fault.why for fault in record.faults],
        "planned_rounds": record.config.get("rounds"),
        "round": [line["round"] for line in rounds],
        **{key: [six_digits(one.at(line)) for line in rounds] for key, one in record.measures.items()},
        "up": _whole(rounds, "bytes_up"),
        "down": _whole(rounds, "bytes_down"),
        "seconds": _seconds(rounds),
        "readings": _diagnostics(rounds),
        "clients": _named(client_columns(record), record.client_names),
        "classes": class_columns(record),
        "dropped": _events(rounds, "lost", "why"),
        "dropped_count": sum(len(line.get("lost") or []) for line in rounds),
        "notes": _events(rounds, "notes", "what"),
        "resumes": [dict(event) for event in record.resumes],
        "processes": [dict(event) for event in record.processes[:EVENTS]],
        "split": (record.partition or {}).get("hash"),
    }


def split_data(partition: dict[str, Any]) -> dict[str, Any] | None:
    """Examples by client and class; of very many clients, some, evenly spaced when sorted by size."""
    counts = partition.get("counts")
    if not isinstance(counts, list) or not counts or not all(isinstance(row, list) for row in counts):
        return None
    chosen = _even(sorted(range(len(counts)), key=lambda client: -sum(counts[client])), SPLIT_ROWS)
    chosen = sorted(chosen) if len(chosen) == len(counts) else chosen
    classes = partition.get("classes") or [str(at) for at in range(len(counts[0]))]
    return {
        "hash": partition.get("hash"),
        "scheme": partition.get("scheme"),
        "classes": [str(name) for name in classes],
        "of": len(counts),
        "clients": shown_clients(chosen, names_in(partition)),
        "counts": [counts[client] for client in chosen],
    }


def shown_clients(clients: Sequence[int], names: Sequence[str] | None) -> list[int | str]:
    """Clients by shortened name, if they have names; with the number if two shortened names are equal."""
    if names is None:
        return list(clients)
    cut = [shortened(names[client], NAME_LENGTH) if client < len(names) else str(client) for client in clients]
    return [f"{name} ({client})" if cut.count(name) > 1 else name for name, client in zip(cut, clients, strict=True)]


def _named(clients: dict[str, Any] | None, names: Sequence[str] | None) -> dict[str, Any] | None:
    return clients and clients | {"client": shown_clients(clients["client"], names)}


def client_measures(record: RunRecord) -> list[Measure]:
    """The measures of which a run has recorded the values of single clients, without a summary over clients."""
    over_clients = [one for one in record.measures.values() if one.over == "worst_client" and one.where != "client"]
    return [replace(one, over=None) for one in over_clients]


def class_columns(record: RunRecord) -> dict[str, Any]:
    """The last values of single classes, by the key of the measure that they belong to."""
    columns: dict[str, Any] = {}
    for line in record.rounds:
        for key, values in line.items():
            if key.endswith(BY_CLASS) and values:
                numbers = {shortened(name, NAME_LENGTH): six_digits(value) for name, value in values.items()}
                columns[key.removesuffix(BY_CLASS)] = {"round": line["round"], "values": numbers}
    return columns


def client_columns(record: RunRecord) -> dict[str, Any] | None:
    """The last recorded loss and scores of each client, and their history over the rounds.

    Scores are by the keys of `client_measures`; clients are ranked by the first of them, or else by their loss. Up to
    `HISTORIES` clients have their own history; of more, there are the quantiles over all of them.
    """
    last: dict[int, dict[str, Any]] = {}
    rounds_trained: dict[int, int] = {}
    for line in record.rounds:
        for entry in line.get("clients") or []:
            client = int(entry["client"])
            last[client] = entry
            rounds_trained[client] = rounds_trained.get(client, 0) + 1
    measures = client_measures(record)
    scored = {one.key: [line for line in record.rounds if line.get(one.key + BY_CLIENT)] for one in measures}
    scores: dict[str, dict[str, Any]] = {key: lines[-1][key + BY_CLIENT] for key, lines in scored.items()}
    known = sorted({*last, *(int(client) for by_client in scores.values() for client in by_client)})
    if not known:
        return None
    ranking = scores[measures[0].key] if measures else {}
    sign = 1 if not measures or measures[0].higher_is_better else -1
    worst_first = sorted(
        known, key=lambda client: _rank(ranking.get(str(client)), sign, last.get(client, {}).get("loss"))
    )
    chosen = sorted(_even(worst_first, CLIENTS))
    return {
        "of": len(known),
        "client": chosen,
        "examples": [last.get(client, {}).get("examples") for client in chosen],
        "rounds": [rounds_trained.get(client, 0) for client in chosen],
        "loss": [six_digits(last.get(client, {}).get("loss")) for client in chosen],
        "scores": {key: [six_digits(values.get(str(c))) for c in chosen] for key, values in scores.items()},
        "evaluated": {key: lines[-1]["round"] for key, lines in scored.items()},
        "history": _history(record.rounds, chosen, scored) if len(known) <= HISTORIES else None,
        "quantiles": _quantiles(record.rounds, scored) if len(known) > HISTORIES else None,
    }


def _rank(score: Any, sign: int, loss: Any) -> tuple[float, float]:
    return (math.inf if score is None else sign * score, -(loss or 0.0))


Scored = Mapping[str, Sequence[dict[str, Any]]]  # by measure: the rounds that have it for single clients


def _history(rounds: Sequence[dict[str, Any]], clients: Sequence[int], scored: Scored) -> dict[str, Any]:
    """Values by client (rows) and round (columns)."""
    trained = _even(rounds, HISTORY_ROUNDS)
    evaluated = {key: _even(lines, HISTORY_ROUNDS) for key, lines in scored.items()}
    losses = [{int(entry["client"]): entry.get("loss") for entry in line.get("clients") or []} for line in trained]
    return {
        "round": [line["round"] for line in trained],
        "loss": [[six_digits(by_client.get(client)) for by_client in losses] for client in clients],
        "evaluated": {key: [line["round"] for line in lines] for key, lines in evaluated.items()},
        "scores": {
            key: [[six_digits(line[key + BY_CLIENT].get(str(client))) for line in lines] for client in clients]
            for key, lines in evaluated.items()
        },
    }


def _quantiles(rounds: Sequence[dict[str, Any]], scored: Scored) -> dict[str, Any]:
    """Quantiles (columns) by round (rows), over the clients that trained or were evaluated in that round."""
    trained = _even([line for line in rounds if line.get("clients")], HISTORY_ROUNDS)
    evaluated = {key: _even(lines, HISTORY_ROUNDS) for key, lines in scored.items()}
    return {
        "round": [line["round"] for line in trained],
        "loss": [_quantiles_of([entry.get("loss") for entry in line["clients"]]) for line in trained],
        "evaluated": {key: [line["round"] for line in lines] for key, lines in evaluated.items()},
        "scores": {
            key: [_quantiles_of(list(line[key + BY_CLIENT].values())) for line in lines]
            for key, lines in evaluated.items()
        },
    }


def _quantiles_of(values: Sequence[Any]) -> list[float | None]:
    numbers = [value for value in map(six_digits, values) if value is not None]
    return [six_digits(float(q)) for q in np.quantile(numbers, QUANTILES)] if numbers else [None] * len(QUANTILES)


def _even(things: Sequence[Any], most: int) -> list[Any]:
    """All of them, or `most` evenly spaced ones including the first and the last."""
    if len(things) <= most:
        return list(things)
    return [things[int(at)] for at in np.linspace(0, len(things) - 1, most).round()]


def _whole(rounds: Sequence[dict[str, Any]], key: str) -> list[int]:
    return [int(line.get(key) or 0) for line in rounds]


def _seconds(rounds: Sequence[dict[str, Any]]) -> list[float] | None:
    by_round = [line.get("seconds") for line in rounds]
    if not any(isinstance(parts, dict) for parts in by_round):
        return None
    return [round(sum(parts.values()), 3) if isinstance(parts, dict) else 0.0 for parts in by_round]


def _diagnostics(rounds: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for line in rounds for name in line.get("readings") or {})
    return {name: [six_digits((line.get("readings") or {}).get(name)) for line in rounds] for name in names}


def _events(rounds: Sequence[dict[str, Any]], key: str, text: str) -> list[dict[str, Any]]:
    """Dropped clients ("lost" in rounds.jsonl) with the reason, or notes on other clients; the first `EVENTS`."""
    events = [
        {"round": line["round"], "client": _shown_client(entry), text: str(entry.get(text))}
        for line in rounds
        for entry in line.get(key) or []
    ]
    return events[:EVENTS]


def _shown_client(entry: dict[str, Any]) -> Any:
    return shortened(entry["name"], NAME_LENGTH) if entry.get("name") else entry.get("client")


def six_digits(value: Any) -> float | None:
    """Rounded to six significant digits, more than the page shows; None for anything but a finite number."""
    return float(f"{value:.6g}") if is_number(value) else None
