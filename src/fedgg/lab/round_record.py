"""The record of a round (scores, losses, diagnostics, bytes, seconds, dropped clients) and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedgg.aggregation import Budget
from fedgg.core.client_rows import Rows, message_bytes
from fedgg.core.evaluation import Score
from fedgg.core.local import LocalEnd
from fedgg.core.server import Lost, ServerState
from fedgg.engines import RoundJob
from fedgg.engines.base import Look
from fedgg.lab.build import Federation


def client_name(entry: Mapping[str, Any]) -> str:
    """The client of an entry in the history: by the name that the data give it, else by its number."""
    return str(entry.get("name", entry["client"]))


def by_reason(lost: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Each reason with everybody it concerns."""
    reasons: dict[str, list[str]] = {}
    for entry in lost:
        reasons.setdefault(entry["why"], []).append(client_name(entry))
    return reasons


@dataclass(frozen=True)
class NamedOnce:
    """Says of a round's lost clients what has not been said yet."""

    said: set[tuple[int, str]] = field(default_factory=set)

    def sentences(self, round_: int, lost: Iterable[Mapping[str, Any]]) -> list[str]:
        """`lost` as the history has it."""
        new = [entry for entry in lost if (entry["client"], entry["why"]) not in self.said]
        self.said.update((entry["client"], entry["why"]) for entry in new)
        return [
            f"round {round_}: client{'s' if len(clients) > 1 else ''} {', '.join(clients)} dropped ({why}); "
            "further rounds are only counted"
            for why, clients in by_reason(new).items()
        ]


@dataclass(frozen=True)
class Played:
    """What came of a round: who is in it, with what share, and who was lost."""

    kept: dict[int, LocalEnd]
    share: dict[int, float]
    lost: list[Lost]
    train_seconds: float
    aggregate_seconds: float


def round_record(
    federation: Federation,
    job: RoundJob,
    played: Played,
    rounds_done: int,
    scores: Mapping[int | None, Score],
    evaluate_seconds: float,
) -> dict[str, Any]:
    """What the round was, and how good the new model is where that was due."""
    kept, share = played.kept, played.share
    return {
        "round": rounds_done,
        **_shown_scores(scores),
        **spent(federation.aggregation.budget, rounds_done),
        "train_loss": _finite(sum(share[c] * float(end.loss) for c, end in kept.items())),
        "readings": _mean_readings(kept, share),
        "bytes_down": sum(bytes_down(job, client) for client in job.cohort),
        "bytes_up": sum(_bytes_up(job, client, end) for client, end in kept.items()),
        "clients": [_client_line(federation, job, client, end) for client, end in kept.items()],
        "lost": [{**federation.named(gone.client), "why": gone.why} for gone in played.lost],
        **_notes(federation, kept),
        **_attackers(federation, job),
        "seconds": {
            "train": round(played.train_seconds, 6),
            "aggregate": round(played.aggregate_seconds, 6),
            "evaluate": round(evaluate_seconds, 6),
        },
    }


def spent(budget: Budget | None, rounds_done: int) -> dict[str, Any]:
    """The privacy spent so far, where there is any to spend; None stands for an infinite epsilon."""
    if budget is None:
        return {}
    accountant = budget.accountant(rounds_done)
    by = {} if accountant is None else {"accountant": accountant}
    return {"epsilon": _finite(budget.epsilon(rounds_done)), "delta": budget.delta, **by}


def is_finite(record: dict[str, Any]) -> bool:
    """Whether the test loss, where there is one, is a number."""
    return "test_loss" not in record or record["test_loss"] is not None


def looks_due(
    federation: Federation, rounds_done: int, server: ServerState, kept_buffers: Mapping[int, Rows]
) -> tuple[Look, ...]:
    """How the new model is to be looked at, in rounds in which that is due: on the test set, and by the clients."""
    experiment, net, feed = federation.experiment, federation.net, federation.feed
    if rounds_done % experiment.server.evaluate_every and rounds_done != federation.last_round:
        return ()
    by_clients = [
        Look(net, feed, server.w, kept_buffers.get(client, server.buffers), client) for client in federation.tested
    ]
    return (Look(net, feed, server.w, server.buffers, None), *by_clients)


def _shown_scores(scores: Mapping[int | None, Score]) -> dict[str, Any]:
    """Accuracies say in their name where they were measured: `test` on the server's set, `holdout` on the clients'."""
    if not scores:
        return {}
    test = scores[None]
    own = {client: score for client, score in scores.items() if client is not None and score.examples}
    shown: dict[str, Any] = {"test_accuracy": test.accuracy, "test_loss": _finite(test.loss)}
    if own:
        count = sum(score.examples for score in own.values())
        shown["holdout_accuracy"] = sum(s.accuracy * s.examples for s in own.values()) / count
        shown["holdout_accuracy_by_client"] = {str(client): score.accuracy for client, score in own.items()}
    return shown


def _notes(federation: Federation, kept: dict[int, LocalEnd]) -> dict[str, Any]:
    """What is to be known of clients that took part, where there is anything."""
    notes = [{**federation.named(client), "what": end.note} for client, end in kept.items() if end.note]
    return {"notes": notes} if notes else {}


def _attackers(federation: Federation, job: RoundJob) -> dict[str, Any]:
    attack = federation.aggregation.attack
    return {} if attack is None else {"attackers": [client for client in job.cohort if client in attack.clients]}


def _client_line(federation: Federation, job: RoundJob, client: int, end: LocalEnd) -> dict[str, Any]:
    examples = federation.examples[client]
    return {
        "client": client,
        "examples": examples,
        "steps": job.work.steps(examples),
        "loss": _finite(float(end.loss)),
        **{name: _finite(float(value)) for name, value in end.diagnostics.items()},
    }


def _mean_readings(kept: dict[int, LocalEnd], share: dict[int, float]) -> dict[str, float | None]:
    names = next(iter(kept.values())).diagnostics
    return {name: _finite(sum(share[c] * float(end.diagnostics[name]) for c, end in kept.items())) for name in names}


def bytes_down(job: RoundJob, client: int) -> int:
    """What a client receives."""
    sparse = job.algorithm.sparse_down(job.w.shape[1])
    buffers = job.buffers_down(client) if job.buffers else {}
    return message_bytes(job.down, sparse) + job.w.nbytes + sum(rows.nbytes for rows in buffers.values())


def _bytes_up(job: RoundJob, client: int, end: LocalEnd) -> int:
    sparse = job.algorithm.sparse_up(job.w.shape[1])
    buffers = job.buffers_up(client, end) if job.buffers else {}
    return message_bytes(end.up, sparse) + sum(rows.nbytes for rows in buffers.values())


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def summary_of(federation: Federation, rounds: list[dict[str, Any]], why: str | None) -> dict[str, Any]:
    """What summary.json says; `why` is the reason of a run that diverged."""
    scored = [record for record in rounds if "test_accuracy" in record]
    best = max(scored, key=lambda record: record["test_accuracy"], default=None)
    spent_all = _out_of_budget(federation, len(rounds)) if why is None else None
    return {
        "status": "diverged" if why is not None else "finished" if spent_all is None else "spent",
        "why": why or spent_all,
        "rounds_done": len(rounds),
        "final_test_accuracy": scored[-1]["test_accuracy"] if scored else None,
        "highest_test_accuracy": best["test_accuracy"] if best else None,
        "highest_at_round": best["round"] if best else None,
        "parameters": federation.net.layout.total,
        "bytes": sum(record["bytes_up"] + record["bytes_down"] for record in rounds),
        "seconds": round(sum(sum(record["seconds"].values()) for record in rounds), 3),
        "clients_lost": sum(len(record["lost"]) for record in rounds),
        **spent(federation.aggregation.budget, len(rounds)),
    }


def _out_of_budget(federation: Federation, rounds_done: int) -> str | None:
    """Why a run that was asked for more rounds is over."""
    budget = federation.aggregation.budget
    if budget is None or budget.limit is None or rounds_done >= federation.experiment.rounds:
        return None
    return (
        f"round {rounds_done + 1} would raise epsilon to {budget.epsilon(rounds_done + 1):.2f}, over "
        f"privacy.epsilon_limit = {budget.limit:g}; a larger limit lets the run go on"
    )
