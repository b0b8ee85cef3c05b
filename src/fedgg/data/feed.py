"""From a client's positions to batches a model can take: gather, augment, normalise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgg.core import plan
from fedgg.core.algorithm import Batch
from fedgg.data.augment import Augmentation, Draws, augment, draw
from fedgg.data.dataset import Dataset
from fedgg.data.normalise import Scaling

CHUNK = 1000  # examples looked at together when nothing is trained


@dataclass(frozen=True, eq=False)
class Feed:
    """The data of one experiment, on one device; clients are positions in the training set."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    clients: tuple[Tensor, ...]  # training examples of each client
    held_out: tuple[Tensor, ...]  # what each keeps back to test on; empty tensors without a hold-out
    scaling: Scaling
    augmentation: Augmentation

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        clients: Sequence[np.ndarray],
        held_out: Sequence[np.ndarray],
        scaling: Scaling,
        augmentation: Augmentation,
        device: torch.device,
    ) -> Feed:
        return cls(
            x=dataset.x_train.to(device),
            y=dataset.y_train.to(device),
            x_test=dataset.x_test.to(device),
            y_test=dataset.y_test.to(device),
            clients=tuple(torch.from_numpy(own).to(device) for own in clients),
            held_out=tuple(torch.from_numpy(own).to(device) for own in held_out),
            scaling=scaling.to(device),
            augmentation=augmentation,
        )

    def examples(self, client: int) -> int:
        return len(self.clients[client])

    def batches(self, seed: int, round_: int, client: int, work: plan.Work) -> Iterator[Batch]:
        """One client's batches of one round, `[1, B, ...]` each."""
        own = self.clients[client]
        positions = plan.batches(seed, round_, client, len(own), work)
        draws = draw(self.augmentation, seed, round_, client, [len(part) for part in positions])
        for step, part in enumerate(positions):
            where = own[torch.from_numpy(part).to(own.device)]
            x = self._inputs(self.x[where], draws[step] if draws else None)[None]
            yield Batch(x, self.y[where][None], torch.ones(1, len(where), dtype=x.dtype, device=x.device))

    def client_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's training examples in order, unaugmented: for probes."""
        yield from self._chunks(self.x, self.y, self.clients[client])

    def held_out_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._chunks(self.x, self.y, self.held_out[client])

    def test_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._chunks(self.x_test, self.y_test, torch.arange(len(self.x_test), device=self.x_test.device))

    def _chunks(self, x: Tensor, y: Tensor, where: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part in where.split(CHUNK):
            yield self._inputs(x[part], None), y[part]

    def _inputs(self, x: Tensor, draws: Draws | None) -> Tensor:
        return self.scaling(augment(x, draws) if draws is not None else x)
