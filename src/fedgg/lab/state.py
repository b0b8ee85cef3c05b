"""Everything that changes from round to round, and how one round turns it into the next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgg.core import plan
from fedgg.core.algorithm import Hub
from fedgg.core.buffers import travels
from fedgg.core.evaluate import evaluate
from fedgg.core.local import LocalEnd
from fedgg.core.rows import Rows, payload
from fedgg.core.server import Lost, ServerState, close_round, first_state, healthy
from fedgg.engines import Loop, RoundJob
from fedgg.engines.job import Optimiser
from fedgg.lab.build import Federation

TrainedOne = Callable[[int, int], None]  # clients done, clients of this round


@dataclass(frozen=True)
class State:
    """What a checkpoint holds. No generator state: everything random is a function of (seed, round, client)."""

    rounds_done: int
    server: ServerState
    memory: dict[int, Rows]  # clients met so far
    kept_buffers: dict[int, Rows]  # under the policy `local`


class Diverged(Exception):
    """Training has left the finite numbers; the history up to here stands."""

    def __init__(self, why: str, lost: list[Lost]):
        super().__init__(why)
        self.lost = lost


def begin(federation: Federation) -> State:
    net = federation.net
    return State(0, first_state(federation.algorithm, net.start, net.start_buffers), {}, {})


@dataclass(frozen=True)
class Played:
    """What came of a round: who is in it, with what share, and who was lost."""

    kept: dict[int, LocalEnd]
    share: dict[int, float]
    lost: list[Lost]
    train_seconds: float
    aggregate_seconds: float


def next_state(
    state: State, job: RoundJob, examples: list[int], engine: Loop, trained_one: TrainedOne = lambda done, of: None
) -> tuple[State, Played]:
    """Train the cohort, leave out what is not finite, aggregate."""
    started = time.perf_counter()
    ends: dict[int, LocalEnd] = {}
    for client, end in engine.train(job):
        ends[client] = end
        trained_one(len(ends), len(job.cohort))
    kept, lost = healthy(ends)
    _synchronise(state.server.w)
    trained = time.perf_counter()
    number = state.rounds_done + 1
    if not kept:
        raise Diverged(f"no client of round {number} sent a finite update", lost)
    hub = _hub(state, examples, list(kept))
    server, share = close_round(job.algorithm, state.server, hub, kept, dict(enumerate(examples)), job.policy)
    if not bool(torch.isfinite(server.w).all()):
        raise Diverged(f"the global model is not finite after round {number}", lost)
    new = State(
        rounds_done=number,
        server=server,
        memory=state.memory | {client: end.memory for client, end in kept.items() if end.memory},
        kept_buffers=state.kept_buffers | ({c: e.buffers for c, e in kept.items()} if job.policy == "local" else {}),
    )
    return new, Played(kept, share, lost, trained - started, time.perf_counter() - trained)


def play_round(
    federation: Federation, state: State, engine: Loop, trained_one: TrainedOne = lambda done, of: None
) -> tuple[State, dict[str, Any]]:
    """The next state and the round's line in the history."""
    job = _job(federation, state)
    new, played = next_state(state, job, federation.examples, engine, trained_one)
    started = time.perf_counter()
    scores = _scores(federation, new)
    kept, share = played.kept, played.share
    record = {
        "round": new.rounds_done,
        **scores,
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
    if scores and scores["test_loss"] is None:
        raise Diverged(f"the test loss is not finite after round {new.rounds_done}", played.lost)
    return new, record


def _job(federation: Federation, state: State) -> RoundJob:
    experiment, number = federation.experiment, state.rounds_done
    local = experiment.local
    cohort = plan.cohort(experiment.seed, number, experiment.split.clients, federation.cohort_size)
    cohort = [client for client in cohort if federation.examples[client]]
    return RoundJob(
        algorithm=federation.algorithm,
        net=federation.net,
        data=federation.feed,
        work=federation.work,
        optimiser=Optimiser(local.lr * local.lr_decay**number, local.momentum, local.weight_decay),
        policy=experiment.model.statistics,
        seed=experiment.seed,
        round=number,
        cohort=cohort,
        w=state.server.w,
        buffers=state.server.buffers,
        down=federation.algorithm.send_down(state.server.w, _hub(state, federation.examples, cohort)),
        memory=state.memory,
        kept_buffers=state.kept_buffers,
    )


def _hub(state: State, examples: list[int], cohort: list[int]) -> Hub:
    coverage = sum(examples[client] for client in cohort) / sum(examples)
    return Hub(state.server.memory, len(examples), coverage, state.rounds_done)


def _scores(federation: Federation, state: State) -> dict[str, Any]:
    """Accuracies say in their name where they were measured: `test` on the server's set, `holdout` on the clients'."""
    experiment = federation.experiment
    last = state.rounds_done == experiment.rounds
    if state.rounds_done % experiment.server.evaluate_every and not last:
        return {}
    net, feed, server = federation.net, federation.feed, state.server
    test = evaluate(net, server.w, server.buffers, feed.test_chunks())
    scores: dict[str, Any] = {"test_accuracy": test.accuracy, "test_loss": _finite(test.loss)}
    if experiment.data.holdout:
        own = {
            client: evaluate(
                net, server.w, state.kept_buffers.get(client, server.buffers), feed.held_out_chunks(client)
            )
            for client, kept in enumerate(feed.held_out)
            if len(kept)
        }
        count = sum(score.examples for score in own.values())
        scores["holdout_accuracy"] = sum(s.accuracy * s.examples for s in own.values()) / count
        scores["holdout_accuracy_by_client"] = {str(client): score.accuracy for client, score in own.items()}
    return scores


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


def _synchronise(w: Tensor) -> None:
    if w.is_cuda:
        torch.cuda.synchronize(w.device)
