"""One run as the page needs it: columns instead of lines, no more clients or rounds than a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedgg.analysis.labels import short as shortened
from fedgg.runfolder.records import RunRecord, names_in
from fedgg.runfolder.schema import is_number

ROWS = 300  # of a heat map that can be told apart
CLIENTS = 1000  # shown with their own values
FOLLOWED = 60  # clients whose own history is shown; of more, the distribution over clients
MOMENTS = 40  # rounds of that history
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
EVENTS = 200
NAME = 24  # letters of a client's name


def run_data(record: RunRecord, label: str, seed: int) -> dict[str, Any]:
    """Everything about a run but its settings, its split and its surroundings, which runs share."""
    rounds = record.rounds
    summary = record.summary or {}
    return {
        "label": label,
        "seed": seed,
        "path": str(record.path),
        "status": record.status,
        "why": summary.get("why"),
        "faults": [fault.why for fault in record.faults],
        "asked": record.config.get("rounds"),
        "round": [line["round"] for line in rounds],
        **{key: _column(rounds, key) for key in ("test_accuracy", "holdout_accuracy", "test_loss", "train_loss")},
        "up": _whole(rounds, "bytes_up"),
        "down": _whole(rounds, "bytes_down"),
        "seconds": _seconds(rounds),
        "readings": _readings(rounds),
        "clients": _named(clients_data(record), record.client_names),
        "lost": _lost(rounds),
        "notes": _notes(rounds),
        "lost_of": sum(len(line.get("lost") or []) for line in rounds),
        "resumes": [dict(told) for told in record.resumes],
        "processes": [dict(told) for told in record.processes[:EVENTS]],
        "split": (record.partition or {}).get("hash"),
    }


def split_data(partition: dict[str, Any]) -> dict[str, Any] | None:
    """Clients by classes; of very many clients, some at even distances when ordered by size."""
    counts = partition.get("counts")
    if not isinstance(counts, list) or not counts or not all(isinstance(row, list) for row in counts):
        return None
    chosen = _even(sorted(range(len(counts)), key=lambda client: -sum(counts[client])), ROWS)
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
    """Clients by their names where they have some, cut to fit; those that then read alike keep their numbers."""
    if names is None:
        return list(clients)
    cut = [shortened(names[client], NAME) if client < len(names) else str(client) for client in clients]
    return [f"{name} ({client})" if cut.count(name) > 1 else name for name, client in zip(cut, clients, strict=True)]


def _named(clients: dict[str, Any] | None, names: Sequence[str] | None) -> dict[str, Any] | None:
    return clients and clients | {"client": shown_clients(clients["client"], names)}


def clients_data(record: RunRecord) -> dict[str, Any] | None:
    """The last recorded loss and hold-out accuracy of each client, and their history over the rounds.

    Of up to `FOLLOWED` clients the history is client by client, of more the quantiles over all of them.
    """
    last: dict[int, dict[str, Any]] = {}
    taken: dict[int, int] = {}
    for line in record.rounds:
        for told in line.get("clients") or []:
            client = int(told["client"])
            last[client] = told
            taken[client] = taken.get(client, 0) + 1
    evaluation: dict[str, Any] = next((line for line in reversed(record.rounds) if line.get(KEPT)), {})
    own: dict[str, Any] = evaluation.get(KEPT, {})
    known = sorted({*last, *map(int, own)})
    if not known:
        return None
    worst_first = sorted(known, key=lambda client: _rank(own.get(str(client)), last.get(client, {}).get("loss")))
    chosen = sorted(_even(worst_first, CLIENTS))
    return {
        "of": len(known),
        "client": chosen,
        "examples": [last.get(client, {}).get("examples") for client in chosen],
        "rounds": [taken.get(client, 0) for client in chosen],
        "loss": [short(last.get(client, {}).get("loss")) for client in chosen],
        "holdout": [short(own.get(str(client))) for client in chosen] if own else None,
        "evaluated": evaluation.get("round"),
        "history": _history(record.rounds, chosen) if len(known) <= FOLLOWED else None,
        "quantiles": _quantiles(record.rounds) if len(known) > FOLLOWED else None,
    }


KEPT = "holdout_accuracy_by_client"


def _rank(accuracy: Any, loss: Any) -> tuple[float, float]:
    return (math.inf if accuracy is None else accuracy, -(loss or 0.0))


def _history(rounds: Sequence[dict[str, Any]], clients: Sequence[int]) -> dict[str, Any]:
    """Client by client (rows), round by round (columns)."""
    moments = _even(rounds, MOMENTS)
    looked = _even([line for line in rounds if line.get(KEPT)], MOMENTS)
    losses = [{int(told["client"]): told.get("loss") for told in line.get("clients") or []} for line in moments]
    return {
        "round": [line["round"] for line in moments],
        "loss": [[short(of.get(client)) for of in losses] for client in clients],
        "looked": [line["round"] for line in looked],
        "holdout": [[short(line[KEPT].get(str(client))) for line in looked] for client in clients],
    }


def _quantiles(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Quantiles over clients (columns), round by round (rows): of those that trained in it, or were evaluated."""
    trained, evaluated = ([line for line in rounds if line.get(key)] for key in ("clients", KEPT))
    moments, looked = _even(trained, MOMENTS), _even(evaluated, MOMENTS)
    return {
        "round": [line["round"] for line in moments],
        "loss": [_quantiles_of([told.get("loss") for told in line["clients"]]) for line in moments],
        "looked": [line["round"] for line in looked],
        "holdout": [_quantiles_of(list(line[KEPT].values())) for line in looked],
    }


def _quantiles_of(values: Sequence[Any]) -> list[float | None]:
    numbers = [value for value in map(short, values) if value is not None]
    return [short(float(q)) for q in np.quantile(numbers, QUANTILES)] if numbers else [None] * len(QUANTILES)


def _even(things: Sequence[Any], most: int) -> list[Any]:
    """All of them, or so many at even distances with the first and the last among them."""
    if len(things) <= most:
        return list(things)
    return [things[int(at)] for at in np.linspace(0, len(things) - 1, most).round()]


def _column(rounds: Sequence[dict[str, Any]], key: str) -> list[float | None] | None:
    """None where no round has it."""
    values = [short(line.get(key)) for line in rounds]
    return values if any(value is not None for value in values) else None


def _whole(rounds: Sequence[dict[str, Any]], key: str) -> list[int]:
    return [int(line.get(key) or 0) for line in rounds]


def _seconds(rounds: Sequence[dict[str, Any]]) -> list[float] | None:
    told = [line.get("seconds") for line in rounds]
    if not any(isinstance(one, dict) for one in told):
        return None
    return [round(sum(one.values()), 3) if isinstance(one, dict) else 0.0 for one in told]


def _readings(rounds: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for line in rounds for name in line.get("readings") or {})
    return {name: [short((line.get("readings") or {}).get(name)) for line in rounds] for name in names}


def _lost(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    gone = [
        {"round": line["round"], "client": _shown_client(one), "why": str(one.get("why"))}
        for line in rounds
        for one in line.get("lost") or []
    ]
    return gone[:EVENTS]


def _notes(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be known of clients that took part: memory that was gone, answers that came late."""
    told = [
        {"round": line["round"], "client": _shown_client(one), "what": str(one.get("what"))}
        for line in rounds
        for one in line.get("notes") or []
    ]
    return told[:EVENTS]


def _shown_client(entry: dict[str, Any]) -> Any:
    return shortened(entry["name"], NAME) if entry.get("name") else entry.get("client")


def short(value: Any) -> float | None:
    """Six digits, which no screen shows all of; None for what is no number."""
    return float(f"{value:.6g}") if is_number(value) else None
