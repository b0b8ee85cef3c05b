"""The reference engine: one client after another, on a CPU or a GPU. To be read; the others must equal it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fedgg.core.buffers import open_buffers, starting_buffers
from fedgg.core.evaluate import Score
from fedgg.core.local import LocalEnd, LocalStart, local_round
from fedgg.core.probe import Probe
from fedgg.core.sgd import SGD
from fedgg.engines.job import Look, RoundJob, score_here


class Loop:
    """Trains the clients of a round one by one."""

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        cards = [job.w.device] if job.w.is_cuda else []
        with torch.random.fork_rng(devices=cards, enabled=job.net.draws_random_numbers):
            for client in job.cohort:
                yield client, train_one(job, client)

    def score(self, looks: Sequence[Look]) -> list[Score]:
        return score_here(looks)


def train_one(job: RoundJob, client: int) -> LocalEnd:
    """One client's round, wherever it runs. Modules that draw random numbers move torch's generator."""
    start, sgd = open_client(job, client)
    todo = job.data.batches(job.seed, job.round, client, job.work)
    return local_round(job.algorithm, job.net, sgd, start, todo)


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
