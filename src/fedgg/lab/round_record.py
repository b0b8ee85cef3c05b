"""The record of a round (scores, losses, diagnostics, bytes, seconds, dropped clients) and the summary of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedgg.aggregation import Budget
from fedgg.core.evaluation import Score
from fedgg.core.tensor_rows import message_bytes
from fedgg.lab.build import Federation
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import SCORES
from fedgg.lab.one_round import Closed, Diverged


def client_name(entry: Mapping[str, Any]) -> str:
    """The client of an entry in the history: by the name that the data give it, else by its number."""
    return str(entry.get("name", entry["client"]))


def by_reason(lost: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Each reason with the names of its clients."""
    reasons: dict[str, list[str]] = {}
    for entry in lost:
        reasons.setdefault(entry["why"], []).append(client_name(entry))
    return reasons


@dataclass(frozen=True)
class NamedOnce:
    """Sentences on dropped clients, one for each client and reason in a run."""

    reported: set[tuple[int, str]] = field(default_factory=set)

    def sentences(self, round_: int, lost: Iterable[Mapping[str, Any]]) -> list[str]:
        """`lost` as the history has it."""
        new = [entry for entry in lost if (entry["client"], entry["why"]) not in self.reported]
        self.reported.update((entry["client"], entry["why"]) for entry in new)
        return [
            f"round {round_}: client{'s' if len(clients) > 1 else ''} {', '.join(clients)} dropped ({why}); "
            "further rounds are only counted"
            for why, clients in by_reason(new).items()
        ]


def record_of(
    federation: Federation, closed: Closed, scores: list[Score], evaluate_seconds: float | None = None
) -> dict[str, Any]:
    """The line of a round in rounds.jsonl, with the scores of the new model where they were due.

    Diverged if the test loss is not finite. `evaluate_seconds`: by default the time since the round was aggregated.
    """
    evaluate_seconds = time.perf_counter() - closed.at if evaluate_seconds is None else evaluate_seconds
    job, played, rounds_done = closed.job, closed.played, closed.state.rounds_done
    kept, share, parameters = played.kept, played.share, job.w.shape[1]
    budget, attack = federation.aggregation.budget, federation.aggregation.attack
    record: dict[str, Any] = {"round": rounds_done}
    if closed.looks:
        # Accuracies say in their name where they were measured: `test` on the server's set, `holdout` on the clients'.
        by_client = {look.client: score for look, score in zip(closed.looks, scores, strict=True)}
        test = by_client.pop(None)
        if not math.isfinite(test.loss):
            raise Diverged(f"the test loss is not finite after round {rounds_done}", played.lost)
        record |= {"test_accuracy": test.accuracy, "test_loss": test.loss}
        held_out = {client: score for client, score in by_client.items() if score.examples}
        if held_out:
            count = sum(score.examples for score in held_out.values())
            record["holdout_accuracy"] = sum(s.accuracy * s.examples for s in held_out.values()) / count
            record["holdout_accuracy_by_client"] = {str(c): score.accuracy for c, score in held_out.items()}
    if budget is not None:
        record |= spent(budget, rounds_done)
    record["train_loss"] = _finite(sum(share[c] * float(end.loss) for c, end in kept.items()))
    record["readings"] = {
        name: _finite(sum(share[c] * float(end.diagnostics[name]) for c, end in kept.items()))
        for name in next(iter(kept.values())).diagnostics
    }
    sparse_down, sparse_up = job.algorithm.sparse_down(parameters), job.algorithm.sparse_up(parameters)
    record["bytes_down"] = len(job.cohort) * (message_bytes(job.down, sparse_down) + job.w.nbytes)
    record["bytes_up"] = sum(message_bytes(end.up, sparse_up) for end in kept.values())
    if job.buffers:
        sent_down = [rows for client in job.cohort for rows in job.buffers_down(client).values()]
        sent_up = [rows for client, end in kept.items() for rows in job.buffers_up(client, end).values()]
        record["bytes_down"] += sum(rows.nbytes for rows in sent_down)
        record["bytes_up"] += sum(rows.nbytes for rows in sent_up)
    record["clients"] = [
        {
            "client": client,
            "examples": federation.examples[client],
            "steps": job.work.steps(federation.examples[client]),
            "loss": _finite(float(end.loss)),
            **{name: _finite(float(value)) for name, value in end.diagnostics.items()},
        }
        for client, end in kept.items()
    ]
    record["lost"] = [{**federation.named(gone.client), "why": gone.why} for gone in played.lost]
    if notes := [{**federation.named(client), "what": end.note} for client, end in kept.items() if end.note]:
        record["notes"] = notes
    if attack is not None:
        record["attackers"] = [client for client in job.cohort if client in attack.clients]
    seconds = {"train": played.train_seconds, "aggregate": played.aggregate_seconds, "evaluate": evaluate_seconds}
    record["seconds"] = {phase: round(value, 6) for phase, value in seconds.items()}
    return record


def spent(budget: Budget, rounds_done: int) -> dict[str, Any]:
    """The privacy spent so far; None stands for an infinite epsilon."""
    accountant = budget.accountant(rounds_done)
    by = {} if accountant is None else {"accountant": accountant}
    return {"epsilon": _finite(budget.epsilon(rounds_done)), "delta": budget.delta, **by}


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def early_stop(experiment: Experiment, rounds: list[dict[str, Any]]) -> str | None:
    """Why the run ends after these rounds, by its section [stop]; None if it does not.

    A function of the recorded rounds, so that a resumed run ends after the same round. An evaluation that took place
    because a run of fewer rounds ended there does not count.
    """
    stop = experiment.stop
    if stop is None:
        return None
    every = experiment.server.evaluate_every
    sign = 1.0 if SCORES[stop.metric] else -1.0
    best, best_round, waited = -math.inf, 0, 0
    for record in rounds:
        if record["round"] % every:
            continue
        score = record.get(stop.metric)
        value = -math.inf if score is None else sign * score
        if stop.target is not None and score is not None and value >= sign * stop.target:
            return f"{stop.metric} {score:.6g} after round {record['round']} has reached stop.target = {stop.target:g}"
        waited += 1
        if value > best + stop.min_delta or (best_round == 0 and score is not None):
            best, best_round, waited = value, record["round"], 0
        if stop.patience is not None and waited >= stop.patience:
            by = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
            since = f"since round {best_round} ({sign * best:.6g})" if best_round else "since the start"
            return f"{stop.metric} has not improved{by} {since}, for stop.patience = {stop.patience} evaluations"
    return None


def summary_of(
    federation: Federation, rounds: list[dict[str, Any]], why: str | None, stopped: str | None = None
) -> dict[str, Any]:
    """The content of summary.json; `why` is the reason of a run that diverged, `stopped` of one that stopped early."""
    scored = [record for record in rounds if "test_accuracy" in record]
    best = max(scored, key=lambda record: record["test_accuracy"], default=None)
    budget, done = federation.aggregation.budget, len(rounds)
    status = "finished" if why is None else "diverged"
    if why is None and stopped is not None and done < federation.last_round:
        status, why = "stopped_early", stopped
    elif why is None and budget is not None and budget.limit is not None and done < federation.experiment.rounds:
        status, why = (
            "spent",
            f"round {done + 1} would raise epsilon to {budget.epsilon(done + 1):.2f}, over privacy.epsilon_limit = "
            f"{budget.limit:g}; a larger limit lets the run go on",
        )
    return {
        "status": status,
        "why": why,
        "rounds_done": done,
        "final_test_accuracy": scored[-1]["test_accuracy"] if scored else None,
        "highest_test_accuracy": best["test_accuracy"] if best else None,
        "highest_at_round": best["round"] if best else None,
        "parameters": federation.net.layout.total,
        "bytes": sum(record["bytes_up"] + record["bytes_down"] for record in rounds),
        "seconds": round(sum(sum(record["seconds"].values()) for record in rounds), 3),
        "clients_lost": sum(len(record["lost"]) for record in rounds),
        **({} if budget is None else spent(budget, done)),
    }
