"""The engine `fused`: one client after another in this process, with the fused step.

On a GPU, clients take the reference step: the fused one is part of the captured graphs of `stacked` and `streams`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedgg.core.evaluation import Score
from fedgg.core.local import LocalEnd
from fedgg.engines.base import Look, RoundJob, score_here
from fedgg.engines.fused.cpu_step import fused_round
from fedgg.engines.fused.net import fused_net
from fedgg.engines.loop import open_client


class Fused:
    """One client after another, with a faster step."""

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        devices = [job.w.device] if job.w.is_cuda else []
        with torch.random.fork_rng(devices=devices, enabled=job.net.draws_random_numbers):  # as in `Loop.train`
            for client in job.cohort:
                yield client, train_fused(job, client)

    def score(self, looks: Sequence[Look]) -> list[Score]:
        return score_here([with_fused_net(look) for look in looks])


def train_fused(job: RoundJob, client: int) -> LocalEnd:
    """One client's round with the fused step, in this process or a worker."""
    job = replace(job, net=fused_net(job.net))
    start, optimiser = open_client(job, client)
    batches = job.data.batches(job.seed, job.round, client, job.work)
    return fused_round(job.algorithm, job.net, optimiser, start, batches)


def with_fused_net(look: Look) -> Look:
    return replace(look, net=fused_net(look.net))
