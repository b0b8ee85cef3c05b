"""Steps captured once as CUDA graphs and replayed on several streams, with prefetched batch schedules.

A counter on the device selects the page of the schedule, so that a round runs without synchronising with Python. Rows
are sorted by their number of steps, longest first, and graphs of fewer rows are replayed as rows finish; a finished row
in a larger graph is masked. If batches must not be padded (batch statistics), each batch size has a graph.

A schedule is a function of (seed, round, client), so that those of the next round's clients are computed ahead.
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
from fedgg.core.local import LocalEnd, LocalStart, LocalState, end_round, local_step, open_round
from fedgg.core.model import Net
from fedgg.core.optimisers import SGD, Optimiser
from fedgg.core.random_choices import Work
from fedgg.core.tensor_rows import each_row
from fedgg.engines.base import ClientData, RoundJob
from fedgg.engines.fused.gpu_step import FusedPlans, FusedStep
from fedgg.engines.layers.program import Program, padded_rows


class CudaStreams:
    """CUDA streams, created as needed and reused in later rounds; on a CPU there are none."""

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []

    def run(self, works: Sequence[Iterator[None]], device: torch.device) -> None:
        """Runs all iterators to their ends, each on its own stream, advancing them in turn."""
        if device.type != "cuda":
            _round_robin([(work, None) for work in works])
            return
        while len(self._streams) < len(works):
            self._streams.append(torch.cuda.Stream(device, priority=-1))  # before work that no layer waits for
        streams, here = self._streams[: len(works)], torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(here)
        try:
            _round_robin(list(zip(works, streams, strict=True)))
        finally:
            torch.cuda.set_stream(here)
        for stream in streams:
            here.wait_stream(stream)


def _round_robin(active: Sequence[tuple[Iterator[None], torch.cuda.Stream | None]]) -> None:
    while active:
        unfinished = []
        for work, stream in active:
            if stream is not None:
                torch.cuda.set_stream(stream)  # cheaper than torch.cuda.stream(), which queries the current stream
            with suppress(StopIteration):
                next(work)
                unfinished.append((work, stream))
        active = unfinished


JobClient = tuple[RoundJob, int]  # a job and one of its clients
Key = tuple[int, Work, int, int, int]


class Prefetch:
    """Computes the batch schedules (agendas) of the next round in background threads."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._prefetched: dict[Key, tuple[ClientData, Future[Any]]] = {}  # references to the data keep their ids unique

    def agendas(self, job_clients: Sequence[JobClient]) -> list[Any]:
        """The agenda of each of these clients, prefetched or computed now."""
        return [self._agenda(job, client) for job, client in job_clients]

    def prepare(self, jobs: Sequence[RoundJob]) -> None:
        """Starts to compute the agendas of the next round's clients."""
        self._threads = self._threads or ThreadPoolExecutor(2, "fedgg-schedules")
        oldest = min(job.round for job in jobs)
        self._prefetched = {key: entry for key, entry in self._prefetched.items() if key[3] >= oldest}  # drop unused
        for job in jobs:
            for client in job.upcoming:
                future = self._threads.submit(job.data.agenda, job.seed, job.round + 1, client, job.work)
                self._prefetched[_key(job, client, 1)] = (job.data, future)

    def _agenda(self, job: RoundJob, client: int) -> Any:
        entry = self._prefetched.pop(_key(job, client, 0), None)
        return job.data.agenda(job.seed, job.round, client, job.work) if entry is None else entry[1].result()


def _key(job: RoundJob, client: int, rounds_ahead: int) -> Key:
    return id(job.data), job.work, job.seed, job.round + rounds_ahead, client


SIZES = 12  # graphs per stack: more graphs waste less arithmetic but take longer to capture
WARM_UP = 2
WIDE = 1024  # rows with at least this many elements get aligned addresses


@dataclass(frozen=True)
class Form:
    """Memory layout and type of the batches the model reads, see `kernels.images`."""

    lanes: int = 0
    dtype: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class StaticTensors:
    """All tensors that a captured step reads or writes, at fixed addresses."""

    algorithm: Algorithm
    optimiser: Optimiser
    running: LocalState
    client: Client
    pages: Any  # [steps, K, batch]
    counter: Tensor  # [1] index of the next page
    fused: FusedStep | None


@dataclass(frozen=True)
class Step:
    """One replay: of the first `rows` rows, with batches of `width` examples."""

    rows: int
    width: int


class Stack:
    """Static tensors and the graphs captured on them, reused in later rounds."""

    def __init__(self, static: StaticTensors, data: ClientData, net: Net, form: Form):
        self.static = _copied(static)
        self.net = net  # a reference keeps its id unique
        self._data = data
        self._form = form
        self._graphs: dict[Step, Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if static.counter.is_cuda else None

    def fits(self, fresh: StaticTensors) -> bool:
        """Whether the schedule fits into the static tensors."""
        available, needed = self.static.pages.where.shape, fresh.pages.where.shape
        return bool(needed[0] <= available[0] and needed[1:] == available[1:])

    def load(self, fresh: StaticTensors, steps: Sequence[Step]) -> None:
        """Captures missing graphs, then copies the round's tensors in: warm-up steps overwrite the static tensors."""
        for step in dict.fromkeys(steps):
            if step not in self._graphs:
                self._graphs[step] = self._captured(step)
        _copy_into(self.static, fresh)

    def replay(self, steps: Sequence[Step]) -> Iterator[None]:
        """Launches the steps of a round, yielding after each so that other stacks can launch theirs."""
        for step in steps:
            self._graphs[step]()
            yield

    def end(self, algorithm: Algorithm, start: LocalStart, client: Client) -> LocalEnd:
        """The results of the rows, copied out of the static tensors."""
        static = self.static
        sums = _copied(static.fused.sums()) if static.fused else None
        buffers, running = _copied(static.client.net.buffers), static.running
        if not start.keeps_optimiser_state:
            running = replace(running, optimiser_state={})
        return end_round(algorithm, replace(start, buffers=buffers), _copied(running), client, sums)

    def _captured(self, step: Step) -> Callable[[], None]:
        """Captured on the current stream after a warm-up; `torch.cuda.graph` would run the garbage collector."""
        if self._pool is None:
            return partial(self._step, step)  # without a GPU, for tests: the same steps without a graph
        torch.cuda.synchronize()
        for _ in range(WARM_UP):
            self.static.counter.zero_()  # it may be beyond the last page
            self._step(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with private_workspaces():
            graph.capture_begin(pool=self._pool)
            self._step(step)
            graph.capture_end()
        self.static.counter.zero_()
        torch.cuda.synchronize()
        return graph.replay

    def _step(self, step: Step) -> None:
        """Reads the current page, takes the step in place and advances the counter."""
        static = self.static
        page = each_row(static.pages, static.counter)
        part = (0, slice(step.rows), slice(step.width))
        where = page.where[part]
        batch = self._data.read(where, page.moves and page.moves[part], self._form.lanes, self._form.dtype)
        if len(static.running.w) > 1:
            batch = replace(batch, at_work=where[:, :1] >= 0)
        parts = (static.algorithm, static.optimiser, static.running, static.client, static.fused)
        algorithm, optimiser, running, client, fused = each_row(parts, slice(step.rows))
        client.net.step = running.step
        if fused is not None:
            assert isinstance(optimiser, SGD)
            fused.step(algorithm, optimiser, running, client, batch)
        else:
            _copy_into(running, local_step(algorithm, optimiser, running, client, batch))
        static.counter.add_(1)


@contextmanager
def private_workspaces() -> Iterator[None]:
    """Graphs captured within allocate their cuBLAS workspace from the graph's own memory pool and share it with none.

    PyTorch keeps one workspace per stream and takes streams in turn from a pool of 32; a captured product contains the
    workspace's address. Two graphs captured on the same stream would write into the same workspace when replayed
    concurrently, which gave wrong results for products of a single row, whose partial sums are stored there.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class GraphCache:
    """Stacks, by all that their graphs contain as constants."""

    def __init__(self) -> None:
        self._stacks: dict[Any, Stack] = {}
        self._plans: FusedPlans = {}

    def open(
        self,
        place: int,
        algorithm: Algorithm,
        net: Net,
        optimiser: Optimiser,
        start: LocalStart,
        data: ClientData,
        pages: Any,
        owners: list[int],
        steps: Sequence[Step],
        form: Form,
    ) -> tuple[Stack, Client]:
        """A stack loaded with this round; `place` distinguishes stacks that run at the same time."""
        running, client = open_round(algorithm, net, optimiser, start)
        program, width = start.many, pages.where.shape[2]
        rule = (type(algorithm), _shapes(algorithm), _shapes(client.notes), type(optimiser), optimiser.used)
        fused = None
        if type(optimiser) is SGD and not start.keeps_optimiser_state and not start.personal:
            program = program if isinstance(program, Program) else None
            plan_key = (rule, _shapes(start.down), _shapes(start.memory))
            fused = FusedStep.of(algorithm, client, optimiser, owners, program, width, self._plans, plan_key)
        if fused is not None:
            running = replace(running, last_step=None)
        per_row = tuple(sorted(start.per_row))
        key = (place, rule, id(net), id(data), start.w.shape, fused and fused.captured, form, per_row)
        counter = torch.zeros(1, dtype=torch.int64, device=start.w.device)
        # Steps set these three themselves: none of them needs a tensor at a fixed address.
        static_client = replace(client, probe=None, w=running.step, last_step=None)
        fresh = StaticTensors(algorithm, optimiser, running, static_client, pages, counter, fused)
        stack = self._stacks.get(key)
        if stack is None or not stack.fits(fresh):
            stack = self._stacks[key] = Stack(fresh, data, net, form)
        stack.load(fresh, steps)
        return stack, client


def steps_of_stack(lengths: Sequence[int], width: int) -> list[Step]:
    """The steps of a round, each with the smallest graph size that holds all unfinished rows.

    The sizes depend on this round only, not on graphs captured in earlier rounds: a stack of another size rounds
    differently, and a resumed run would not give the same bits.
    """
    sizes = prefix_sizes(tuple(lengths), SIZES)
    unfinished = np.searchsorted(-np.asarray(lengths), -np.arange(lengths[0]), side="left")
    return [Step(int(rows), width) for rows in np.asarray(sizes)[np.searchsorted(sizes, unfinished)]]


@lru_cache(maxsize=256)
def prefix_sizes(lengths: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most `most` graph sizes, ascending, that waste the fewest row-steps on finished rows.

    With the rows longest first, step t has n(t) unfinished rows, and a graph of size s >= n(t) costs s. Dynamic
    programming over the distinct n finds the cheapest sizes.
    """
    unfinished, steps = np.unique(
        np.searchsorted(-np.asarray(lengths), -np.arange(lengths[0]), side="left"), return_counts=True
    )
    before = np.concatenate([[0], np.cumsum(steps)])
    best = [(float(unfinished[i] * before[i + 1]), [int(unfinished[i])]) for i in range(len(unfinished))]
    for _ in range(most - 1):
        best = [
            min(
                [best[i]]
                + [
                    (
                        best[j][0] + float(unfinished[i] * (before[i + 1] - before[j + 1])),
                        [*best[j][1], int(unfinished[i])],
                    )
                    for j in range(i)
                ],
                key=lambda choice: choice[0],
            )
            for i in range(len(unfinished))
        ]
    return tuple(best[-1][1])


def _copied(value: Any) -> Any:
    """The same structure with copied tensors, wide rows at aligned addresses."""
    if isinstance(value, Tensor):
        if value.ndim == 2 and value.shape[1] >= WIDE and value.is_floating_point():
            return padded_rows(value).copy_(value)
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _copied(getattr(value, f.name)) for f in fields(value)})
    return value


def _copy_into(static: Any, fresh: Any) -> None:
    """Overwrites the tensors of `static` with those of `fresh`, whose schedule may be shorter."""
    if isinstance(static, Tensor):
        (static[: len(fresh)] if static.ndim else static).copy_(fresh)
    elif isinstance(static, dict):
        for key, value in static.items():
            _copy_into(value, fresh[key])
    elif is_dataclass(static):
        for field in fields(static):
            _copy_into(getattr(static, field.name), getattr(fresh, field.name))


def _shapes(value: Any) -> Any:
    """The part of a structure that a graph contains as constants: its settings, and the shapes of its tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((key, _shapes(entry)) for key, entry in value.items())
    return tuple((f.name, _shapes(v) if isinstance(v := getattr(value, f.name), Tensor) else v) for f in fields(value))
