"""The reference engine: one client after another, on a CPU or a GPU, every step `core.local.local_step`.

To be read; the other engines are tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedgg.core.evaluation import Probe
from fedgg.core.local import LocalEnd, LocalStart, local_round
from fedgg.core.optimisers import Optimiser
from fedgg.core.personal import open_personal, tensors_of
from fedgg.core.tensor_rows import Rows
from fedgg.engines.base import RoundJob, score_here


class Loop:
    """The reference: one client after another."""

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        # Modules that draw random numbers seed torch's generators; afterwards these are as they were.
        devices = [job.w.device] if job.w.is_cuda else []
        with torch.random.fork_rng(devices=devices, enabled=job.net.draws_random_numbers):
            for client in job.cohort:
                start, optimiser = open_client(job, client)
                batches = job.data.batches(job.seed, job.round, client, job.work)
                yield client, local_round(job.algorithm, job.net, optimiser, start, batches)

    score = staticmethod(score_here)


def open_client(job: RoundJob, client: int) -> tuple[LocalStart, Optimiser]:
    """What a client starts its round from, and its optimiser."""
    examples, buffers = job.data.examples(client), job.buffers_before(client) if job.buffers else {}
    memory = job.memory_before(client)
    start = LocalStart(
        w=memory["w"] if job.from_memory else job.w,
        down=job.down,
        memory=memory,
        buffers={name: rows.clone() for name, rows in buffers.items()},
        examples=job.w.new_full((1, 1), examples),
        steps=job.w.new_full((1, 1), job.work.steps(examples, job.seed, job.round, client)),
        round=job.w.new_full((1, 1), job.round),
        dropout=[(job.seed, job.round, client)],
        probe=Probe(job.net, buffers, lambda row: job.data.client_chunks(client)),
        keeps_optimiser_state=job.optimiser.kept,
    )
    optimiser = job.optimiser.kind.on_rows([job.optimiser.values], job.w)
    if job.net.personal is not None:
        alone = job.personal_steps(client)
        column = None if alone is None else job.w.new_full((1, 1), alone)
        start = open_personal(start, job.net.personal, optimiser, column)
    return start, optimiser


def trained_personal_tensors(job: RoundJob, client: int) -> Rows:
    """A client's personal tensors after the job, by their names in the module."""
    start, optimiser = open_client(job, client)
    batches = job.data.batches(job.seed, job.round, client, job.work)
    return tensors_of(job.net, local_round(job.algorithm, job.net, optimiser, start, batches).memory)
