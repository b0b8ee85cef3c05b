"""The record of a round (scores, losses, diagnostics, bytes, seconds, dropped clients) and the summary of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedgg.aggregation import Budget
from fedgg.core.evaluation import Score
from fedgg.core.metrics import Metric
from fedgg.core.tensor_rows import message_bytes
from fedgg.lab.build import Federation
from fedgg.lab.config import Experiment
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
            "not repeated here for later rounds"
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
    included, share, parameters = played.included, played.share, job.w.shape[1]
    budget, attack = federation.aggregation.budget, federation.aggregation.attack
    record: dict[str, Any] = {"round": rounds_done}
    if closed.looks:
        # Accuracies say in their name where they were measured: `test` on the server's set, `holdout` on the clients'.
        looks = list(zip(closed.looks, scores, strict=True))
        by_client = {look.client: score for look, score in looks if look.model == "global"}
        test = by_client.pop(None, None)
        if test is not None:
            if not math.isfinite(test.loss):
                raise Diverged(f"the test loss is not finite after round {rounds_done}", played.lost)
            record |= {f"test_{name}": _finite(value) for name, value in test.values.items()} | {"test_loss": test.loss}
            for name, values in test.by_class.items():
                classes = federation.origin.classes
                record[f"test_{name}_by_class"] = dict(zip(classes, map(_finite, values), strict=True))
        if by_client:
            record |= over_clients("holdout", by_client)
        if federation.scores_clients_models:
            for model in ("personal", "unseen"):
                record |= over_clients(model, {look.client: score for look, score in looks if look.model == model})
    if budget is not None:
        record |= spent(budget, rounds_done)
    if rates := federation.aggregation.server_rates:
        record["server_lr"] = rates[rounds_done - 1]
    record["train_loss"] = _finite(sum(share[c] * float(end.loss) for c, end in included.items()))
    record["readings"] = {
        name: _finite(sum(share[c] * float(end.diagnostics[name]) for c, end in included.items()))
        for name in next(iter(included.values())).diagnostics
    }
    sparse_down, sparse_up = job.algorithm.sparse_down(parameters), job.algorithm.sparse_up(parameters)
    record["bytes_down"] = len(job.cohort) * (message_bytes(job.down, sparse_down) + job.w.nbytes)
    record["bytes_up"] = sum(message_bytes(end.up, sparse_up) for end in included.values())
    if job.buffers:
        sent_down = [rows for client in job.cohort for rows in job.buffers_down(client).values()]
        sent_up = [rows for client, end in included.items() for rows in job.buffers_up(client, end).values()]
        record["bytes_down"] += sum(rows.nbytes for rows in sent_down)
        record["bytes_up"] += sum(rows.nbytes for rows in sent_up)
    record["clients"] = [
        {
            "client": client,
            "examples": federation.examples[client],
            "steps": job.work.steps(federation.examples[client], job.seed, job.round, client),
            "loss": _finite(float(end.loss)),
            **{name: _finite(float(value)) for name, value in end.diagnostics.items()},
        }
        for client, end in included.items()
    ]
    record["lost"] = [{**federation.named(gone.client), "why": gone.why} for gone in played.lost]
    if notes := [{**federation.named(client), "what": end.note} for client, end in included.items() if end.note]:
        record["notes"] = notes
    if attack is not None:
        record["attackers"] = [client for client in job.cohort if client in attack.clients]
    seconds = {"train": played.train_seconds, "aggregate": played.aggregate_seconds, "evaluate": evaluate_seconds}
    record["seconds"] = {phase: round(value, 6) for phase, value in seconds.items()}
    return record


def over_clients(where: str, all_scores: Mapping[int | None, Score]) -> dict[str, Any]:
    """Of every metric the values of the clients, and their mean by numbers of examples, over those that have one."""
    record: dict[str, Any] = {}
    scores = {client: score for client, score in all_scores.items() if score.examples}
    for name in next(iter(scores.values())).values if scores else ():
        values = {c: score.values[name] for c, score in scores.items() if math.isfinite(score.values[name])}
        count = sum(scores[client].examples for client in values)
        mean = sum(value * scores[client].examples for client, value in values.items()) / count if count else None
        record[f"{where}_{name}"] = mean
        record[f"{where}_{name}_by_client"] = {str(client): value for client, value in values.items()}
    return record


def spent(budget: Budget, rounds_done: int) -> dict[str, Any]:
    """The privacy spent so far; None stands for an infinite epsilon."""
    accountant = budget.accountant(rounds_done)
    by = {} if accountant is None else {"accountant": accountant}
    return {"epsilon": _finite(budget.epsilon(rounds_done)), "delta": budget.delta, **by}


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _final_scores_of_clients(metric: str, rounds: list[dict[str, Any]]) -> dict[str, float]:
    """The last `personal_<metric>` and `unseen_<metric>`, of runs that have them."""
    return {
        f"final_{name}": [record[name] for record in rounds if name in record][-1]
        for name in (f"personal_{metric}", f"unseen_{metric}")
        if any(name in record for record in rounds)
    }


def early_stop(experiment: Experiment, metrics: Iterable[Metric], rounds: list[dict[str, Any]]) -> str | None:
    """Why the run ends after these rounds, by its section [stop]; None if it does not.

    A function of the recorded rounds, so that a resumed run ends after the same round. An evaluation that took place
    because a run of fewer rounds ended there does not count.
    """
    stop = experiment.stop
    if stop is None:
        return None
    every = experiment.server.evaluate_every
    name = stop.metric.partition("_")[2]
    sign = 1.0 if any(metric.name == name and metric.higher_is_better for metric in metrics) else -1.0
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
    primary = federation.net.metrics[0]
    key, best_is = f"test_{primary.name}", "highest" if primary.higher_is_better else "lowest"
    scored = [record for record in rounds if record.get(key) is not None]
    best = (max if primary.higher_is_better else min)(scored, key=lambda record: record[key], default=None)
    budget, rounds_done = federation.aggregation.budget, len(rounds)
    status = "finished" if why is None else "diverged"
    if why is None and stopped is not None and rounds_done < federation.last_round:
        status, why = "stopped_early", stopped
    elif why is None and budget is not None and budget.limit is not None and rounds_done < federation.experiment.rounds:
        status, why = (
            "spent",
            f"round {rounds_done + 1} would raise epsilon to {budget.epsilon(rounds_done + 1):.2f}, over "
            f"privacy.epsilon_limit = {budget.limit:g}; a larger limit lets the run go on",
        )
    return {
        "status": status,
        "why": why,
        "rounds_done": rounds_done,
        f"final_{key}": scored[-1][key] if scored else None,
        f"{best_is}_{key}": best[key] if best else None,
        f"{best_is}_at_round": best["round"] if best else None,
        **(_final_scores_of_clients(primary.name, rounds) if federation.scores_clients_models else {}),
        "parameters": federation.net.layout.total,
        "bytes": sum(record["bytes_up"] + record["bytes_down"] for record in rounds),
        "seconds": round(sum(sum(record["seconds"].values()) for record in rounds), 3),
        "clients_lost": sum(len(record["lost"]) for record in rounds),
        **({} if budget is None else spent(budget, rounds_done)),
    }
