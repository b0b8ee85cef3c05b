"""A round's line in the history: scores, losses, readings, bytes, seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgg.core.buffers import travels
from fedgg.core.evaluate import evaluate, rights
from fedgg.core.local import LocalEnd
from fedgg.core.rows import Rows, payload
from fedgg.core.server import Lost, ServerState
from fedgg.engines import RoundJob
from fedgg.lab.build import Federation


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
    server: ServerState,
    kept_buffers: Mapping[int, Rows],
) -> dict[str, Any]:
    """Looks at the new model where it is due, and writes down what the round was."""
    started = time.perf_counter()
    experiment, kept, share = federation.experiment, played.kept, played.share
    due = rounds_done % experiment.server.evaluate_every == 0 or rounds_done == experiment.rounds
    return {
        "round": rounds_done,
        **(_scores(federation, server, kept_buffers) if due else {}),
        "train_loss": _finite(sum(share[c] * float(end.loss) for c, end in kept.items())),
        "readings": _mean_readings(kept, share),
        "bytes_down": len(job.cohort) * _bytes_down(job),
        "bytes_up": sum(_bytes_up(job, end) for end in kept.values()),
        "clients": [_client_line(federation, job, client, end) for client, end in kept.items()],
        "lost": [{"client": gone.client, "why": gone.why} for gone in played.lost],
        "seconds": {
            "train": round(played.train_seconds, 6),
            "aggregate": round(played.aggregate_seconds, 6),
            "evaluate": round(time.perf_counter() - started, 6),
        },
    }


def is_finite(record: dict[str, Any]) -> bool:
    """Whether the test loss, where there is one, is a number."""
    return "test_loss" not in record or record["test_loss"] is not None


def _scores(federation: Federation, server: ServerState, kept_buffers: Mapping[int, Rows]) -> dict[str, Any]:
    """Accuracies say in their name where they were measured: `test` on the server's set, `holdout` on the clients'."""
    net, feed = federation.net, federation.feed
    test = evaluate(net, server.w, server.buffers, feed.test_chunks())
    scores: dict[str, Any] = {"test_accuracy": test.accuracy, "test_loss": _finite(test.loss)}
    if federation.tested:
        right = _right_by_client(federation, server, kept_buffers)
        counts = {client: len(feed.held_out[client]) for client in right}
        accuracy = {client: right[client] / counts[client] for client in right}
        scores["holdout_accuracy"] = sum(accuracy[c] * counts[c] for c in counts) / sum(counts.values())
        scores["holdout_accuracy_by_client"] = {str(client): value for client, value in accuracy.items()}
    return scores


def _right_by_client(federation: Federation, server: ServerState, kept_buffers: Mapping[int, Rows]) -> dict[int, int]:
    """How many of the examples it keeps back the model gets right, for each client.

    All clients that share the server's statistics are looked at in one go: one by one, most of the time would go into
    asking, and a large population would cost more to test than to train.
    """
    net, feed = federation.net, federation.feed
    right: dict[int, int] = {}
    alike = [client for client in federation.tested if client not in kept_buffers]
    for client in federation.tested:
        if client in kept_buffers:
            right[client] = int(rights(net, server.w, kept_buffers[client], feed.held_out_chunks([client])).sum())
    if alike:
        each = rights(net, server.w, server.buffers, feed.held_out_chunks(alike)).cpu().numpy()
        starts = np.cumsum([0, *(len(feed.held_out[client]) for client in alike[:-1])])
        right |= {c: int(n) for c, n in zip(alike, np.add.reduceat(each, starts, dtype=np.int64), strict=True)}
    return {client: right[client] for client in federation.tested}


def _client_line(federation: Federation, job: RoundJob, client: int, end: LocalEnd) -> dict[str, Any]:
    examples = federation.examples[client]
    return {
        "client": client,
        "examples": examples,
        "steps": job.work.steps(examples),
        "loss": _finite(float(end.loss)),
        **{name: _finite(float(value)) for name, value in end.readings.items()},
    }


def _mean_readings(kept: dict[int, LocalEnd], share: dict[int, float]) -> dict[str, float | None]:
    names = next(iter(kept.values())).readings
    return {name: _finite(sum(share[c] * float(end.readings[name]) for c, end in kept.items())) for name in names}


def _bytes_down(job: RoundJob) -> int:
    down, _ = travels(job.policy)
    return payload([job.w, *job.down.values(), *(job.buffers.values() if down else ())])


def _bytes_up(job: RoundJob, end: LocalEnd) -> int:
    _, up = travels(job.policy)
    return payload([*end.up.values(), *(end.buffers.values() if up else ())])


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
