"""Steps captured once as CUDA graphs and replayed without the host, on several streams, with prefetched schedules.

A device-side counter picks the page of the schedule, so that a whole round runs without waiting for Python. Rows stand
longest first: as they finish, graphs of fewer rows take over. Between two sizes, rows that are done stand still. Where
batches must not be padded (batch statistics), there is a graph for every width of a batch.

Which clients train in the next round is not known yet, but schedules are a function of (seed, round, client): those of
the same clients are prefetched, and used if these clients train again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client
from fedgg.core.client_rows import each_row
from fedgg.core.local import SGD, LocalEnd, LocalStart, LocalState, end_round, local_step, open_round
from fedgg.core.model import Net
from fedgg.core.sampling import Work
from fedgg.engines.base import ClientData, RoundJob
from fedgg.engines.fused.gpu_step import FusedPlans, FusedStep
from fedgg.engines.layers.program import Program, padded_rows


class CudaStreams:
    """As many streams as are needed, kept from round to round; on a CPU there are none, and work is done in turns."""

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []

    def run(self, works: Sequence[Iterator[None]], device: torch.device) -> None:
        """All to their ends, each on its own stream, one launch after another in turn."""
        if device.type != "cuda":
            _in_turn([(work, None) for work in works])
            return
        while len(self._streams) < len(works):
            self._streams.append(torch.cuda.Stream(device))
        streams, here = self._streams[: len(works)], torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(here)
        try:
            _in_turn(list(zip(works, streams, strict=True)))
        finally:
            torch.cuda.set_stream(here)
        for stream in streams:
            here.wait_stream(stream)


def _in_turn(waiting: Sequence[tuple[Iterator[None], torch.cuda.Stream | None]]) -> None:
    while waiting:
        still = []
        for work, stream in waiting:
            if stream is not None:
                torch.cuda.set_stream(stream)  # a context would ask which one it was each time, and small steps wait
            with suppress(StopIteration):
                next(work)
                still.append((work, stream))
        waiting = still


JobClient = tuple[RoundJob, int]  # a job and one of its clients
Key = tuple[int, Work, int, int, int]


class Prefetch:
    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._made: dict[Key, tuple[ClientData, Future[Any]]] = {}  # data are held, so that their ids stay unique

    def agendas(self, job_clients: Sequence[JobClient]) -> list[Any]:
        """One for each of these clients, made before or made now."""
        return [self._agenda(job, client) for job, client in job_clients]

    def prepare(self, job_clients: Sequence[JobClient]) -> None:
        """Begin with the agendas of the same clients' next round."""
        self._threads = self._threads or ThreadPoolExecutor(2, "fedgg-schedules")
        oldest = min(job.round for job, _ in job_clients)
        self._made = {key: made for key, made in self._made.items() if key[3] >= oldest}  # drop what was not used
        for job, client in job_clients:
            future = self._threads.submit(job.data.agenda, job.seed, job.round + 1, client, job.work)
            self._made[_key(job, client, 1)] = (job.data, future)

    def _agenda(self, job: RoundJob, client: int) -> Any:
        made = self._made.pop(_key(job, client, 0), None)
        return job.data.agenda(job.seed, job.round, client, job.work) if made is None else made[1].result()


def _key(job: RoundJob, client: int, later: int) -> Key:
    return id(job.data), job.work, job.seed, job.round + later, client


SIZES = 12  # graphs for each stack: more waste less arithmetic and take longer to capture
WARM_UP = 2
WIDE = 1024  # rows of so many numbers or more get aligned addresses


@dataclass(frozen=True)
class Form:
    """How batches are read for the model: see `kernels.images`."""

    lanes: int = 0
    dtype: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class StaticTensors:
    """Everything a step reads or writes, at addresses that never change."""

    algorithm: Algorithm
    sgd: SGD
    running: LocalState
    client: Client
    pages: Any  # [steps, K, batch]
    counter: Tensor  # [1] which page comes next
    fused: FusedStep | None


@dataclass(frozen=True)
class Step:
    """One replay: of the first so many rows, with so many examples each."""

    rows: int
    width: int


class Stack:
    """A static and its graphs, kept from round to round."""

    def __init__(self, static: StaticTensors, data: ClientData, net: Net, form: Form):
        self.static = _copied(static)
        self.net = net  # held, so that its id stays unique
        self._data = data
        self._form = form
        self._graphs: dict[Step, Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if static.counter.is_cuda else None

    def takes(self, fresh: StaticTensors) -> bool:
        """Whether the schedule fits on the static."""
        mine, theirs = self.static.pages.where.shape, fresh.pages.where.shape
        return bool(theirs[0] <= mine[0] and theirs[1:] == mine[1:])

    def load(self, fresh: StaticTensors, steps: Sequence[Step]) -> None:
        """Capture what is missing, then lay everything out: warming up moves the static."""
        for step in dict.fromkeys(steps):
            if step not in self._graphs:
                self._graphs[step] = self._captured(step)
        _copy_into(self.static, fresh)

    def replay(self, steps: Sequence[Step]) -> Iterator[None]:
        """All steps of a round, with a pause after each in which others may launch theirs."""
        for step in steps:
            self._graphs[step]()
            yield

    def end(self, algorithm: Algorithm, start: LocalStart, client: Client) -> LocalEnd:
        """What the rows have to show, in tensors of their own."""
        static = self.static
        sums = _copied(static.fused.sums()) if static.fused else None
        buffers = _copied(static.client.net.buffers)
        return end_round(algorithm, replace(start, buffers=buffers), _copied(static.running), client, sums)

    def _captured(self, step: Step) -> Callable[[], None]:
        """Warmed up and captured on its lane's own stream; `torch.cuda.graph` would collect garbage every time."""
        if self._pool is None:
            return partial(self._step, step)  # without a GPU, for tests: the same steps, nothing captured
        torch.cuda.synchronize()
        for _ in range(WARM_UP):
            self.static.counter.zero_()  # it may stand behind the last page
            self._step(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with own_workspaces():
            graph.capture_begin(pool=self._pool)
            self._step(step)
            graph.capture_end()
        self.static.counter.zero_()
        torch.cuda.synchronize()
        return graph.replay

    def _step(self, step: Step) -> None:
        """Read the page, take the step, write it back, turn the page."""
        static = self.static
        page = each_row(static.pages, static.counter)
        place = (0, slice(step.rows), slice(step.width))
        where = page.where[place]
        batch = self._data.read(where, page.moves and page.moves[place], self._form.lanes, self._form.dtype)
        if len(static.running.w) > 1:
            batch = replace(batch, at_work=where[:, :1] >= 0)
        parts = (static.algorithm, static.sgd, static.running, static.client, static.fused)
        algorithm, sgd, running, client, fused = each_row(parts, slice(step.rows))
        client.net.step = running.step
        if fused is not None:
            fused.step(algorithm, sgd, running, client, batch)
        else:
            _copy_into(running, local_step(algorithm, sgd, running, client, batch))
        static.counter.add_(1)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """What is captured in here takes cuBLAS's scratch memory from the graph's own pool, and leaves none to others.

    PyTorch keeps one scratch memory for each stream, hands streams out in turn from a pool of 32, and a captured
    product remembers the address. Two graphs captured on what is the same stream would then write into the same scratch
    memory when they are replayed side by side, and products of a single row, which are summed in parts there, came out
    wrong.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class GraphCache:
    """Stacks by what is captured in them."""

    def __init__(self) -> None:
        self._stacks: dict[Any, Stack] = {}
        self._plans: FusedPlans = {}

    def open(
        self,
        place: int,
        algorithm: Algorithm,
        net: Net,
        sgd: SGD,
        start: LocalStart,
        data: ClientData,
        pages: Any,
        owners: list[int],
        steps: Sequence[Step],
        form: Form,
    ) -> tuple[Stack, Client]:
        """A stack with this round laid out on it; `place` tells stacks apart that are at work at the same time."""
        running, client = open_round(algorithm, net, sgd, start)
        program, width = start.many, pages.where.shape[2]
        wide = program if isinstance(program, Program) and program.withholds(width) else None
        rule = (type(algorithm), _shapes(algorithm), _shapes(client.notes), sgd.has_momentum, sgd.has_decay)
        fused = FusedStep.of(
            algorithm, client, owners, wide, self._plans, (rule, _shapes(start.down), _shapes(start.memory))
        )
        if fused is not None:
            running = replace(running, last_step=None)
        per_row = tuple(sorted(start.per_row))
        key = (place, rule, id(net), id(data), start.w.shape, fused and fused.captured, form, per_row)
        counter = torch.zeros(1, dtype=torch.int64, device=start.w.device)
        fresh = StaticTensors(algorithm, sgd, running, replace(client, probe=None), pages, counter, fused)
        stack = self._stacks.get(key)
        if stack is None or not stack.takes(fresh):
            stack = self._stacks[key] = Stack(fresh, data, net, form)
        stack.load(fresh, steps)
        return stack, client


def steps_of_stack(lengths: Sequence[int], width: int) -> list[Step]:
    """Each step with the smallest of some prefix sizes that holds all rows still at work.

    The sizes are a function of this round alone, whatever graphs earlier rounds left: a stack of another size rounds
    differently, and a resumed run would not repeat the bits.
    """
    sizes = prefix_sizes(tuple(lengths), SIZES)
    at_work = np.searchsorted(-np.asarray(lengths), -np.arange(lengths[0]), side="left")
    return [Step(int(rows), width) for rows in np.asarray(sizes)[np.searchsorted(sizes, at_work)]]


@lru_cache(maxsize=256)
def prefix_sizes(lengths: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most `most` stack sizes, ascending, under which the fewest row-steps are wasted on rows that are done.

    With the rows longest first, step t has n(t) rows at work, and a graph of size s >= n(t) costs s. Dynamic
    programming over the distinct n finds the cheapest choice.
    """
    at_work, steps = np.unique(
        np.searchsorted(-np.asarray(lengths), -np.arange(lengths[0]), side="left"), return_counts=True
    )
    before = np.concatenate([[0], np.cumsum(steps)])
    best = [(float(at_work[i] * before[i + 1]), [int(at_work[i])]) for i in range(len(at_work))]
    for _ in range(most - 1):
        best = [
            min(
                [best[i]]
                + [
                    (best[j][0] + float(at_work[i] * (before[i + 1] - before[j + 1])), [*best[j][1], int(at_work[i])])
                    for j in range(i)
                ],
                key=lambda choice: choice[0],
            )
            for i in range(len(at_work))
        ]
    return tuple(best[-1][1])


def _copied(thing: Any) -> Any:
    """The same structure with tensors of its own, wide rows at aligned addresses."""
    if isinstance(thing, Tensor):
        if thing.ndim == 2 and thing.shape[1] >= WIDE and thing.is_floating_point():
            return padded_rows(thing).copy_(thing)
        return thing.detach().clone()
    if isinstance(thing, dict):
        return {key: _copied(value) for key, value in thing.items()}
    if is_dataclass(thing) and not isinstance(thing, type):
        return type(thing)(**{f.name: _copied(getattr(thing, f.name)) for f in fields(thing)})
    return thing


def _copy_into(static: Any, fresh: Any) -> None:
    """Overwrite the tensors of one structure with those of another; a schedule may be shorter than its static."""
    if isinstance(static, Tensor):
        (static[: len(fresh)] if static.ndim else static).copy_(fresh)
    elif isinstance(static, dict):
        for key, value in static.items():
            _copy_into(value, fresh[key])
    elif is_dataclass(static):
        for field in fields(static):
            _copy_into(getattr(static, field.name), getattr(fresh, field.name))


def _shapes(thing: Any) -> Any:
    """What of an algorithm is captured into a graph: its switches and numbers, and the shapes of its columns."""
    if isinstance(thing, Tensor):
        return tuple(thing.shape)
    if isinstance(thing, dict):
        return tuple((key, _shapes(value)) for key, value in thing.items())
    return tuple((f.name, _shapes(v) if isinstance(v := getattr(thing, f.name), Tensor) else v) for f in fields(thing))
