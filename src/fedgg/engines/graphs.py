"""The same step, captured once as a CUDA graph for several sizes of the stack and replayed without the host.

A device-side counter picks the page of the schedule, so that a whole round runs without waiting for Python. Rows stand
longest first: as they finish, smaller graphs take over. Between two sizes, rows that are done stand still.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Site
from fedgg.core.local import LocalEnd, LocalStart, Running, end_round, local_step, open_round
from fedgg.core.net import Net
from fedgg.core.rows import each_row
from fedgg.core.sgd import SGD
from fedgg.engines.job import ClientData

SIZES = 12  # graphs for each stack: more waste less arithmetic and take longer to capture
WARM_UP = 3


@dataclass(frozen=True, eq=False)
class Desk:
    """Everything a step reads or writes, at addresses that never change."""

    algorithm: Algorithm
    sgd: SGD
    running: Running
    site: Site
    pages: Any  # [steps, K, batch]
    counter: Tensor  # [1] which page comes next


class GraphCache:
    """Desks and their graphs, kept from round to round."""

    def __init__(self) -> None:
        self._stacks: dict[Any, _Stack] = {}

    def train(
        self, algorithm: Algorithm, net: Net, sgd: SGD, start: LocalStart, data: ClientData, agendas: list[Any]
    ) -> LocalEnd:
        """`local_round`, replayed."""
        running, site = open_round(algorithm, net, sgd, start)
        lengths = [len(agenda.where) for agenda in agendas]
        rule = (type(algorithm), _shapes(algorithm), _shapes(site.notes), sgd.has_momentum, sgd.has_decay)
        key = (rule, str(net.module), start.w.shape, id(data))
        stack = self._stacks.get(key)
        pages = data.lay_out(agendas)
        fresh = Desk(algorithm, sgd, running, site, pages, torch.zeros(1, dtype=torch.int64, device=start.w.device))
        if stack is None or not stack.takes(fresh):
            stack = self._stacks[key] = _Stack(fresh, data)
        sizes = prefix_sizes(tuple(lengths), SIZES)
        stack.capture(sizes)  # before loading: warming up moves the desk
        stack.load(fresh)
        stack.replay(lengths, sizes)
        return end_round(algorithm, start, _copied(stack.desk.running), site)


class _Stack:
    def __init__(self, desk: Desk, data: ClientData):
        self.desk = _copied(desk)
        self._data = data
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, sizes: tuple[int, ...]) -> None:
        """The graphs of these sizes that are not there yet."""
        for rows in sizes:
            if rows not in self._graphs:
                self._graphs[rows] = self._captured(rows)

    def takes(self, fresh: Desk) -> bool:
        """Whether the schedule fits on the desk."""
        mine, theirs = self.desk.pages.where.shape, fresh.pages.where.shape
        return bool(theirs[0] <= mine[0] and theirs[1:] == mine[1:])

    def load(self, fresh: Desk) -> None:
        _copy_into(self.desk, fresh)

    def replay(self, lengths: list[int], sizes: tuple[int, ...]) -> None:
        """All steps of a round; each takes the smallest of these sizes that holds all rows still at work.

        The sizes are a function of this round alone, whatever graphs earlier rounds left here: a stack of another size
        rounds differently, and a resumed run would not repeat the bits.
        """
        at_work = np.searchsorted(-np.asarray(lengths), -np.arange(lengths[0]), side="left")
        for rows in np.asarray(sizes)[np.searchsorted(sizes, at_work)]:
            self._graphs[int(rows)].replay()

    def _captured(self, rows: int) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step(rows)
                self.desk.counter.zero_()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(rows)
        self.desk.counter.zero_()
        return graph

    def _step(self, rows: int) -> None:
        """Read the page, take the step, write it back, turn the page."""
        desk = self.desk
        page = each_row(desk.pages, desk.counter)
        where = page.where[0, :rows]
        batch = self._data.read(where, page.moves and page.moves[0, :rows])
        batch = type(batch)(batch.x, batch.y, batch.mask, where[:, :1] >= 0)
        algorithm, sgd, running, site = each_row((desk.algorithm, desk.sgd, desk.running, desk.site), slice(rows))
        _copy_into(running, local_step(algorithm, sgd, running, site, batch))
        desk.counter.add_(1)


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
    """The same structure with tensors of its own."""
    if isinstance(thing, Tensor):
        return thing.detach().clone()
    if isinstance(thing, dict):
        return {key: _copied(value) for key, value in thing.items()}
    if is_dataclass(thing) and not isinstance(thing, type):
        return type(thing)(**{f.name: _copied(getattr(thing, f.name)) for f in fields(thing)})
    return thing


def _copy_into(desk: Any, fresh: Any) -> None:
    """Overwrite the tensors of one structure with those of another; a schedule may be shorter than its desk."""
    if isinstance(desk, Tensor):
        desk[: len(fresh)].copy_(fresh)
    elif isinstance(desk, dict):
        for key, value in desk.items():
            _copy_into(value, fresh[key])
    elif is_dataclass(desk):
        for field in fields(desk):
            _copy_into(getattr(desk, field.name), getattr(fresh, field.name))


def _shapes(thing: Any) -> Any:
    """What of an algorithm is captured into a graph: its switches and numbers, and the shapes of its columns."""
    if isinstance(thing, Tensor):
        return tuple(thing.shape)
    if isinstance(thing, dict):
        return tuple((key, _shapes(value)) for key, value in thing.items())
    return tuple((f.name, _shapes(v) if isinstance(v := getattr(thing, f.name), Tensor) else v) for f in fields(thing))
