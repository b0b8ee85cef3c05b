"""The reference engine: one client after another, on a CPU or a GPU, every step `core.local.local_step`.

To be read; the other engines are tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedgg.core.evaluation import Probe
from fedgg.core.local import LocalEnd, LocalStart, local_round
from fedgg.core.optimisers import Optimiser
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
    start = LocalStart(
        w=job.w,
        down=job.down,
        memory=job.memory_before(client),
        buffers={name: rows.clone() for name, rows in buffers.items()},
        examples=torch.full_like(job.w[:, :1], examples),
        steps=torch.full_like(job.w[:, :1], job.work.steps(examples, job.seed, job.round, client)),
        round=torch.full_like(job.w[:, :1], job.round),
        dropout=[(job.seed, job.round, client)],
        probe=Probe(job.net, buffers, lambda row: job.data.client_chunks(client)),
        keeps_optimiser_state=job.optimiser.kept,
    )
    return start, job.optimiser.kind.on_rows([job.optimiser.values], job.w)
