"""The reference engine: one client after another, on a CPU or a GPU, every step `core.local.local_step`.

To be read; the other engines are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from fedgg.core.algorithm import Algorithm, Batch
from fedgg.core.buffers import open_buffers, starting_buffers
from fedgg.core.evaluation import Probe, Score
from fedgg.core.local import SGD, LocalEnd, LocalStart, local_round
from fedgg.core.model import Net
from fedgg.engines.base import Look, RoundJob, score_here

LocalRound = Callable[[Algorithm, Net, SGD, LocalStart, Iterable[Batch]], LocalEnd]


class Loop:
    """The reference: one client after another."""

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        with forked_generators(job):
            for client in job.cohort:
                yield client, train_client(job, client)

    def score(self, looks: Sequence[Look]) -> list[Score]:
        return score_here(looks)


def forked_generators(job: RoundJob) -> AbstractContextManager[None]:
    """Within, modules that draw random numbers may seed torch's generators; afterwards these are as they were."""
    cards = [job.w.device] if job.w.is_cuda else []
    return torch.random.fork_rng(devices=cards, enabled=job.net.draws_random_numbers)


def train_client(job: RoundJob, client: int, round_: LocalRound = local_round) -> LocalEnd:
    """One client's round: the reference, or another way to take its steps that an engine hands in."""
    start, sgd = open_client(job, client)
    batches = job.data.batches(job.seed, job.round, client, job.work)
    return round_(job.algorithm, job.net, sgd, start, batches)


def open_client(job: RoundJob, client: int) -> tuple[LocalStart, SGD]:
    """What a client brings to its round, and its optimiser."""
    examples = job.data.examples(client)
    memory, kept_buffers = job.memory.get(client), job.kept_buffers.get(client)
    seen_with = starting_buffers(job.policy, job.buffers, kept_buffers)
    start = LocalStart(
        w=job.w,
        down=job.down,
        memory=job.algorithm.client_memory(job.w) if memory is None else memory,
        buffers=open_buffers(job.policy, job.buffers, kept_buffers),
        examples=torch.full_like(job.w[:, :1], examples),
        steps=torch.full_like(job.w[:, :1], job.work.steps(examples)),
        round=torch.full_like(job.w[:, :1], job.round),
        dropout=[(job.seed, job.round, client)],
        probe=Probe(job.net, seen_with, lambda row: job.data.client_chunks(client)),
    )
    optimiser = job.optimiser
    return start, SGD.of(optimiser.lr, optimiser.momentum, optimiser.weight_decay, job.w)
