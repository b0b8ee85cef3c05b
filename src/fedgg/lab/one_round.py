"""Everything that changes from round to round, and how one round turns it into the next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgg.core import random_choices
from fedgg.core.algorithm import Server
from fedgg.core.evaluation import Probe, Score
from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.core.server import (
    Lost,
    ServerState,
    close_round,
    healthy,
    in_proportion,
    is_ordinary,
    largest,
    spoilt,
)
from fedgg.core.tensor_rows import Rows, check, check_sparse, identity
from fedgg.engines import Engine, RoundJob
from fedgg.engines.base import ClientData, Look, Scorer, personal_job, with_personal_models
from fedgg.errors import UserError
from fedgg.lab.aggregation import PLAIN_AGGREGATION, Aggregation
from fedgg.lab.build import Federation, Population
from fedgg.lab.client_state import FILES, ClientRows, Places, RowsOnDisk, Shelf
from fedgg.lab.config_sections import ServerConfig
from fedgg.lab.local_optimiser import optimiser_of
from fedgg.lab.personal_parts import personal_looks

MEGABYTE = 1_000_000
SMALL = 4 * MEGABYTE  # a checkpoint of this size costs nothing worth saving
FAR_MORE = 4  # times as much as the rounds since the last checkpoint have changed
TrainedOne = Callable[[int, int], None]  # clients done, clients of this round
Ends = Mapping[int, LocalEnd | Lost]
TRIED = 8  # clients, one after the other, where a round is closed without one of them


@dataclass(frozen=True)
class State:
    """What a checkpoint holds. No generator state: everything random is a function of (seed, round, client)."""

    rounds_done: int
    server: ServerState
    memory: ClientRows  # clients met so far
    kept_buffers: ClientRows  # under the policy `local`


class Diverged(Exception):
    """Training has left the finite numbers; the history up to here is valid."""

    def __init__(self, why: str, lost: list[Lost]):
        super().__init__(why)
        self.lost = lost


@dataclass(frozen=True)
class Played:
    """The clients of an aggregated round: those in it, with their shares, and those dropped."""

    included: dict[int, LocalEnd]
    share: dict[int, float]
    lost: list[Lost]
    train_seconds: float
    aggregate_seconds: float


def begin(federation: Federation) -> State:
    net = federation.net
    memory = check(federation.algorithm.server_memory(net.start), 1, "server_memory()")
    return State(0, ServerState(net.start, net.start_buffers, memory), {}, {})


def next_job(federation: Federation, state: State) -> RoundJob:
    """What the engine is asked to do in the next round."""
    experiment, number = federation.experiment, state.rounds_done
    filled, size = federation.filled, federation.cohort_size
    if size < len(filled):
        cohort, upcoming = (
            filled[random_choices.cohort(experiment.seed, n, len(filled), size)].tolist() for n in (number, number + 1)
        )
    else:
        cohort = upcoming = filled.tolist()
    examples, population = federation.examples, federation.population
    server = server_of(state, federation.net, federation.feed, examples, cohort, population, federation.aggregation)
    algorithm = federation.algorithm
    down = check(algorithm.send_down(state.server.w, server), 1, "send_down()")
    if sparse := algorithm.sparse_down(state.server.w.shape[1]):
        check_sparse(down, sparse, f"{type(algorithm).__name__}.sparse_down()")
    return RoundJob(
        algorithm=algorithm,
        net=federation.net,
        data=federation.feed,
        work=federation.work,
        optimiser=optimiser_of(experiment, number),
        policy=experiment.model.statistics,
        seed=experiment.seed,
        round=number,
        cohort=cohort,
        w=algorithm.broadcast(state.server.w, server),
        buffers=state.server.buffers,
        down=down,
        memory=state.memory,
        kept_buffers=state.kept_buffers,
        upcoming=upcoming,
        **federation.personal_settings,
    )


def train(job: RoundJob, engine: Engine, trained_one: TrainedOne | None = None) -> Ends:
    """Every client of the cohort, trained, in the cohort's order; the engine may return them in another one."""
    ends: dict[int, LocalEnd | Lost] = {}
    for client, end in engine.train(job):
        ends[client] = end
        if trained_one is not None:
            trained_one(len(ends), len(job.cohort))
    if job.personal_model is not None:
        ends = with_personal_models(job, ends, dict(engine.train(personal_job(job))))
    if job.w.is_cuda:
        synchronise(job.w)
    return {client: ends[client] for client in job.cohort}


def close(
    state: State,
    job: RoundJob,
    examples: Sequence[int],
    ends: Ends,
    train_seconds: float = 0.0,
    population: Population | None = None,
    aggregation: Aggregation = PLAIN_AGGREGATION,
) -> tuple[State, Played]:
    """Leave out what is not finite or out of all proportion, aggregate the rest.

    `population` saves counting all clients.
    """
    started = time.perf_counter()
    if aggregation.attack is not None:
        ends = aggregation.attack.act(ends, job.round)
    included, lost = healthy(ends, job.buffers_before)
    number = state.rounds_done + 1
    if aggregation.budget is not None:
        _refuse_changed_buffers(job, included)
    if not included:
        raise Diverged(f"no client of round {number} sent a finite update", lost)
    if sparse := job.algorithm.sparse_up(job.w.shape[1]):
        _check_sparse_updates(job, included, sparse, aggregation)
    # Where clients are private, whether one is in the sum must not depend on the others: each is clipped instead.
    private = aggregation.budget is not None
    if not private:
        included, too_large = in_proportion(included, job.w)
        lost += too_large

    def aggregated(part: dict[int, LocalEnd]) -> tuple[ServerState, dict[int, float]]:
        # Which clients were dropped is private where the clients are: the server then reads the whole cohort.
        clients = job.cohort if private else list(part)
        server_view = server_of(state, job.net, job.data, examples, clients, population, aggregation)
        counts, collector = {client: examples[client] for client in part}, aggregation.collector
        return close_round(
            job.algorithm, state.server, server_view, part, counts, job.policy, collector, len(job.cohort)
        )

    server, share = aggregated(included)
    wrong = spoilt(state.server, server)
    if wrong is not None:
        offender = None
        if not private and is_ordinary(state.server):
            offender = _only_offender(included, lambda part: spoilt(state.server, aggregated(part)[0]) is None)
        if offender is None:
            raise Diverged(f"{wrong} after round {number}", lost)
        included = {client: end for client, end in included.items() if client != offender}
        lost = [*lost, Lost(offender, f"{wrong} with its update")]
        server, share = aggregated(included)
    new = State(
        rounds_done=number,
        server=server,
        memory=state.memory | {client: end.memory for client, end in included.items() if end.memory},
        kept_buffers=state.kept_buffers
        | ({c: e.buffers for c, e in included.items()} if job.policy == "local" else {}),
    )
    return new, Played(included, share, lost, train_seconds, time.perf_counter() - started)


def _refuse_changed_buffers(job: RoundJob, ends: Mapping[int, LocalEnd]) -> None:
    """Statistics that were seen before the first round are refused there; some change only later."""
    for client, end in ends.items():
        for name in job.buffers_up(client, end):
            raise UserError(
                f"privacy: training changed the buffer {name} of client {client}, which would reach the server without "
                f"noise: set model.statistics = 'frozen', or take a model without it"
            )


def _check_sparse_updates(
    job: RoundJob, included: Mapping[int, LocalEnd], sparse: Mapping[str, int], aggregation: Aggregation
) -> None:
    """Clients send what the algorithm declares, those that attack excepted."""
    who = f"{type(job.algorithm).__name__}.sparse_up()"
    for client, end in included.items():
        if aggregation.attack is None or client not in aggregation.attack.clients:
            check_sparse(end.up, sparse, who, f" from client {client}")


def _only_offender(included: Mapping[int, LocalEnd], is_usable: Callable[[dict[int, LocalEnd]], bool]) -> int | None:
    """The one client without which the round is usable; None if there are several such, or none.

    Those with the largest values are tried first, and no more than TRIED.
    """
    offenders: list[int] = []
    sizes = {client: max(largest(end.up).values(), default=0.0) for client, end in included.items()}
    for client in sorted(included, key=lambda client: -sizes[client])[:TRIED] if len(included) > 1 else []:
        if is_usable({other: end for other, end in included.items() if other != client}):
            offenders.append(client)
        if len(offenders) > 1:
            return None
    return offenders[0] if offenders else None


@dataclass(frozen=True)
class Closed:
    """An aggregated round whose model has not been evaluated."""

    job: RoundJob
    played: Played
    state: State
    looks: tuple[Look, ...]
    at: float  # when it was aggregated
    ends: Ends  # as the engine gave them


def close_before_looking(
    federation: Federation, state: State, job: RoundJob, ends: Ends, train_seconds: float
) -> Closed:
    """Aggregate; in rounds in which that is due, the new model is to be evaluated on the test set and by clients."""
    net, feed, aggregation = federation.net, federation.feed, federation.aggregation
    new, played = close(state, job, federation.examples, ends, train_seconds, federation.population, aggregation)
    server, looks = new.server, list[Look]()
    if new.rounds_done % federation.experiment.server.evaluate_every == 0 or new.rounds_done == federation.last_round:
        if net.personal is None:  # else there is no whole global model
            looks.append(Look(net, feed, server.w, server.buffers, None))
            for client in federation.tested:
                looks.append(Look(net, feed, server.w, new.kept_buffers.get(client, server.buffers), client))
        if federation.scores_clients_models:
            looks += personal_looks(federation, job, new)
    return Closed(job, played, new, tuple(looks), time.perf_counter(), ends)


def close_without_offender(
    federation: Federation, state: State, closed: Closed, score: Scorer
) -> tuple[Closed, list[Score]] | None:
    """The round without the one client with which the test loss is not finite, and its scores, if there is such."""
    if federation.aggregation.budget is not None or not closed.looks or not is_ordinary(state.server):
        return None
    everybody, why = closed.played.included, "the test loss is not finite with its update"

    def closed_with(part: Mapping[int, LocalEnd]) -> Closed:
        ends = {**closed.ends, **{client: Lost(client, why) for client in everybody if client not in part}}
        return close_before_looking(federation, state, closed.job, ends, closed.played.train_seconds)

    def is_usable(part: dict[int, LocalEnd]) -> bool:
        try:
            return math.isfinite(score(closed_with(part).looks[:1])[0].loss)
        except Diverged:
            return False

    offender = _only_offender(everybody, is_usable)
    if offender is None:
        return None
    again = closed_with({client: end for client, end in everybody.items() if client != offender})
    return again, score(again.looks)


def synchronise(w: Tensor) -> None:
    """Wait for the device, so that seconds are charged to the phase that spent them."""
    if w.is_cuda:
        torch.cuda.synchronize(w.device)


def server_of(
    state: State,
    net: Net,
    data: ClientData,
    examples: Sequence[int],
    cohort: list[int],
    population: Population | None = None,
    aggregation: Aggregation = PLAIN_AGGREGATION,
) -> Server:
    """What the server may read: nothing is measured until an algorithm asks for it."""
    population = population or Population(sum(count > 0 for count in examples), sum(examples))
    if aggregation.collector.counts_equally:
        coverage = len(cohort) / population.clients
    else:
        coverage = sum(examples[client] for client in cohort) / population.examples
    probe = Probe(net, state.server.buffers, lambda row: data.proxy_chunks()) if len(data.proxy) else None
    lr = aggregation.server_rates[state.rounds_done] if aggregation.server_rates else 1.0
    return Server(state.server.memory, population.clients, coverage, state.rounds_done, probe, lr)


# When client state moves from memory into a file: once, for two reasons. It would take more memory than
# `server.memory_limit_mb`; or a checkpoint, which writes all rows that are in memory, would write far more than its
# rounds have changed. Both are judged by the size that the rows of all clients will have in the end, so that the state
# of a large population moves to the file in its first round, instead of growing until it has to.


def moved(state: State, cohort: Iterable[int], population: int, settings: ServerConfig, folder: Path | None) -> State:
    """The same state, its rows in a file if they belong there. `folder`: that of the checkpoints, if there is one."""
    kinds = {name: rows for name in FILES if isinstance(rows := getattr(state, name), dict) and any(rows.values())}
    sizes = [all_in_all({c: rows[c] for c in cohort if c in rows}, population) for rows in kinds.values()]
    changed, total = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    too_large = total > settings.memory_limit_mb * MEGABYTE
    too_slow = folder is not None and total > max(SMALL, FAR_MORE * changed * (settings.checkpoint_every or 1))
    if not too_large and not too_slow:
        return state
    shelved: dict[str, Any] = {name: _on_disk(rows, population, folder, name) for name, rows in kinds.items()}
    return replace(state, **shelved)


def all_in_all(of_round: Mapping[int, Rows], population: int) -> tuple[float, float]:
    """Bytes a round changes, and bytes that the rows of the whole population will take once all have been met.

    Rows that K clients of a round share stay until the last of the K is called again: the longest of K waits, which is
    some 1 + ln K times the mean one.
    """
    distinct = {identity(rows): sum(row.nbytes for row in rows.values()) for rows in of_round.values()}
    changed, called = float(sum(distinct.values())), len(of_round)
    if called in (0, population):
        return changed, changed
    return changed, changed * population / called * (1 + math.log(called / len(distinct)))


def _on_disk(rows: ClientRows, population: int, folder: Path | None, name: str) -> RowsOnDisk:
    first = next(iter(rows.values()))
    device = next(iter(first.values())).device
    shelf = Shelf.new(folder / FILES[name] if folder else None, first, device)
    return RowsOnDisk(shelf, Places.none(population)) | rows
