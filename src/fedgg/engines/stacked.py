"""All clients of all experiments as one program over rows `[K, P]`: for small models, where launching is the cost.

Experiments go into one stack when they share the model, the data and the algorithm with its switches; seeds, splits and
numbers (mu, lr, ...) may differ, since numbers become columns. What cannot be stacked (batch statistics, dropout,
modules without a rule for many rows) is handed to the reference loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm
from fedgg.core.local import LocalEnd, LocalStart, local_round
from fedgg.core.rows import each_row, stack
from fedgg.core.sgd import SGD
from fedgg.engines.graphs import GraphCache
from fedgg.engines.job import RoundJob
from fedgg.engines.loop import Loop


@dataclass(frozen=True)
class Row:
    """One client of one job, and how long it will take."""

    job: int
    client: int
    steps: int


class Stacked:
    """Trains the clients of one round, or of one round of each of several experiments, together."""

    def __init__(self) -> None:
        self._graphs = GraphCache()

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        yield from self.train_together([job])[0].items()

    def train_together(self, jobs: Sequence[RoundJob]) -> list[dict[int, LocalEnd]]:
        ends: list[dict[int, LocalEnd]] = [{} for _ in jobs]
        for group in _groups(jobs):
            if jobs[group[0]].net.stackable:
                for row, end in self._train_stack(jobs, group):
                    ends[row.job][row.client] = end
            else:
                for number in group:
                    ends[number] = dict(Loop().train(jobs[number]))
        return [{client: ends[n][client] for client in job.cohort} for n, job in enumerate(jobs)]

    def _train_stack(self, jobs: Sequence[RoundJob], group: list[int]) -> Iterator[tuple[Row, LocalEnd]]:
        rows = [
            Row(number, client, jobs[number].work.steps(jobs[number].data.examples(client)))
            for number in group
            for client in jobs[number].cohort
        ]
        rows.sort(key=lambda row: -row.steps)  # stable: equal rows keep their order, so that results do too
        first = jobs[group[0]]
        start = LocalStart(
            w=torch.cat([jobs[row.job].w for row in rows]),
            down=stack([jobs[row.job].down for row in rows]),
            memory=stack([_memory(jobs[row.job], row.client) for row in rows]),
            buffers=stack([first.buffers for _ in rows]),
            examples=_column([jobs[row.job].data.examples(row.client) for row in rows], first.w),
            steps=_column([row.steps for row in rows], first.w),
            dropout=[],
        )
        settings = [jobs[row.job].optimiser for row in rows]
        sgd = SGD(
            lr=_column([s.lr for s in settings], first.w),
            momentum=_column([s.momentum for s in settings], first.w),
            weight_decay=_column([s.weight_decay for s in settings], first.w),
            has_momentum=any(s.momentum for s in settings),
            has_decay=any(s.weight_decay for s in settings),
        )
        agendas = [
            jobs[row.job].data.agenda(jobs[row.job].seed, jobs[row.job].round, row.client, first.work) for row in rows
        ]
        algorithm = _with_columns([jobs[row.job].algorithm for row in rows], first.w)
        if first.w.is_cuda:
            end = self._graphs.train(algorithm, first.net, sgd, start, first.data, agendas)
        else:
            end = local_round(algorithm, first.net, sgd, start, first.data.gather(agendas))
        for position, row in enumerate(rows):
            yield row, each_row(end, slice(position, position + 1))


def _groups(jobs: Sequence[RoundJob]) -> list[list[int]]:
    """Numbers of the jobs that can train as one."""
    groups: list[list[int]] = []
    for number, job in enumerate(jobs):
        for group in groups:
            if _alike(jobs[group[0]], job):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def _alike(a: RoundJob, b: RoundJob) -> bool:
    return (
        type(a.algorithm) is type(b.algorithm)
        and _switches(a.algorithm) == _switches(b.algorithm)
        and a.work == b.work
        and str(a.net.module) == str(b.net.module)
        and a.net.layout == b.net.layout
        and a.data.shares_examples_with(b.data)
    )


def _switches(algorithm: Algorithm) -> dict[str, object]:
    values = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return {name: value for name, value in values.items() if not isinstance(value, float)}


def _memory(job: RoundJob, client: int) -> dict[str, Tensor]:
    kept = job.memory.get(client)
    return job.algorithm.client_memory(job.w) if kept is None else kept


def _with_columns(algorithms: list[Algorithm], like: Tensor) -> Algorithm:
    """One algorithm whose numbers are columns where the rows differ in them."""
    first = algorithms[0]
    columns = {}
    for field in fields(first):
        values = [getattr(algorithm, field.name) for algorithm in algorithms]
        if isinstance(values[0], float) and any(value != values[0] for value in values):
            columns[field.name] = _column(values, like)
    return replace(first, **columns) if columns else first


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
