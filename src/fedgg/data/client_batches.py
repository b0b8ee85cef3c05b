"""From a client's positions to batches a model can take: gather, augment, normalise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg import kernels
from fedgg.core import sampling
from fedgg.core.algorithm import Batch
from fedgg.data.dataset import Dataset
from fedgg.data.transforms import MARGIN, Augmentation, Draws, Scaling, augment, draw

CHUNK = 1000  # examples looked at together when nothing is trained


@dataclass(frozen=True, eq=False)
class Agenda:
    """One client's round on one page: which examples, `[steps, batch]` with -1 for none, and how they are moved."""

    where: NDArray[np.int32]
    moves: NDArray[np.int8] | None  # [3, steps, batch]: top, left, mirror


@dataclass(frozen=True, eq=False)
class Pages:
    """The agendas of a whole stack on the device, `[steps, K, batch]`."""

    where: Tensor
    moves: Draws | None


@dataclass(frozen=True, eq=False)
class Feed:
    """The data of one experiment, on one device; clients are positions in the training set."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    clients: tuple[sampling.Positions, ...]  # training examples of each client
    held_out: tuple[sampling.Positions, ...]  # what each keeps back to test on; empty without a hold-out
    scaling: Scaling
    augmentation: Augmentation
    proxy: sampling.Positions = field(default_factory=lambda: np.empty(0, np.int64))  # what the server has of its own

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        clients: Sequence[sampling.Positions],
        held_out: Sequence[sampling.Positions],
        scaling: Scaling,
        augmentation: Augmentation,
        device: torch.device,
        proxy: sampling.Positions | None = None,
    ) -> Feed:
        return cls(
            x=dataset.x_train.to(device),
            y=dataset.y_train.to(device),
            x_test=dataset.x_test.to(device),
            y_test=dataset.y_test.to(device),
            clients=tuple(clients),
            held_out=tuple(held_out),
            scaling=scaling.to(device),
            augmentation=augmentation,
            proxy=np.empty(0, np.int64) if proxy is None else proxy,
        )

    def examples(self, client: int) -> int:
        return len(self.clients[client])

    def shares_examples_with(self, other: object) -> bool:
        """Whether another experiment's rows can be gathered from the same tensors in the same way."""
        return (
            isinstance(other, Feed)
            and other.x is self.x
            and other.x_test is self.x_test
            and other.augmentation == self.augmentation
            and other.scaling.numbers == self.scaling.numbers
        )

    def batches(self, seed: int, round_: int, client: int, work: sampling.Work) -> Iterator[Batch]:
        """One client's batches of one round, `[1, B, ...]` each, the short ones short."""
        own = self.clients[client]
        positions = sampling.schedule(seed, round_, client, len(own), work)
        draws = draw(self.augmentation, seed, round_, client, work.epochs * len(own))
        start = 0
        for row in positions:
            part = row[row >= 0]  # without padding
            where = torch.from_numpy(own[part]).to(self.x.device)
            # The same copy as x[where], made with memcpy: on a CPU indexing takes ten times as long.
            x = self._inputs(self.x.index_select(0, where), draws and draws[start : start + len(part)])[None]
            y = self.y.index_select(0, where)[None]
            start += len(part)
            yield Batch(x, y, torch.ones(1, len(where), dtype=x.dtype, device=x.device))

    def agenda(self, seed: int, round_: int, client: int, work: sampling.Work) -> Agenda:
        """The same batches as positions to be gathered later, together with those of other clients."""
        own = self.clients[client]
        positions = sampling.schedule(seed, round_, client, len(own), work)
        where = np.where(positions >= 0, own[positions], -1).astype(np.int32)
        draws = draw(self.augmentation, seed, round_, client, work.epochs * len(own))
        if draws is None:
            return Agenda(where, None)
        # The draws lie in the order in which examples are seen, which is the order of the places that are not padding.
        moves = np.zeros((3, *where.shape), np.int8)
        moves[:, where >= 0] = torch.stack([draws.top, draws.left, draws.mirror]).numpy()
        return Agenda(where, moves)

    def gather(self, agendas: Sequence[Agenda]) -> Iterator[Batch]:
        """Batches `[K, B, ...]` of several clients, longest agenda first; each batch has the rows still at work."""
        pages = self.lay_out(agendas)
        at_work = len(agendas)
        for step in range(len(agendas[0].where)):
            while len(agendas[at_work - 1].where) <= step:
                at_work -= 1
            yield self.read(pages.where[step, :at_work], pages.moves and pages.moves[step, :at_work])

    def lay_out(self, agendas: Sequence[Agenda], steps: int | None = None) -> Pages:
        """The agendas side by side on the device; with room for so many steps, if more may come."""
        width = max(agenda.where.shape[1] for agenda in agendas)
        shape = (steps or len(agendas[0].where), len(agendas), width)
        where = self._sheet(shape, -1, torch.int32)
        moves = None if agendas[0].moves is None else self._sheet((3, *shape), 0, torch.int8)
        for row, agenda in enumerate(agendas):
            taken, size = agenda.where.shape
            where.numpy()[:taken, row, :size] = agenda.where
            if moves is not None:
                moves.numpy()[:, :taken, row, :size] = agenda.moves
        device = self.x.device
        draws = None if moves is None else Draws(*moves.to(device, non_blocking=True))
        return Pages(where.to(device, non_blocking=True), draws)

    def _sheet(self, shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Tensor:
        """In memory a GPU reads by itself: a copy from any other waits for all the work its stream still has."""
        return torch.full(shape, value, dtype=dtype, pin_memory=self.x.is_cuda)

    def read(self, where: Tensor, moves: Draws | None, lanes: int = 0, dtype: torch.dtype | None = None) -> Batch:
        """The batch behind one step of some rows, `[K, B]`; on a GPU also packed (see `kernels.images`)."""
        rows, width = where.shape
        flat = where.clamp_min(0).flatten()
        draws = moves and Draws(moves.top.flatten(), moves.left.flatten(), moves.mirror.flatten())
        if where.is_cuda and kernels.available():
            x = self._gathered(where.flatten(), draws, lanes, dtype)
        else:
            x = self._inputs(self.x[flat], draws)
        mask = (where >= 0).to(self.scaling.shift.dtype)
        return Batch(x.unflatten(0, (rows, width)), self.y[flat].view(rows, width), mask)

    def _gathered(self, where: Tensor, draws: Draws | None, lanes: int, dtype: torch.dtype | None) -> Tensor:
        from fedgg.kernels.images import gather

        moves = None if draws is None else (draws.top, draws.left, draws.mirror)
        return gather(self.x, where, moves, self.scaling.shift, self.scaling.scale, MARGIN, lanes, dtype)

    def client_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's training examples in order, unaugmented: for probes."""
        return self._chunks(self.clients[client])

    def proxy_examples(self) -> int:
        """How many the server has of its own."""
        return len(self.proxy)

    def proxy_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The server's own examples, likewise; none without `data.proxy`."""
        return self._chunks(self.proxy)

    def held_out_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.unseen(client, number) for number in range(self.unseen_chunks(client)))

    def test_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.unseen(None, number) for number in range(self.unseen_chunks(None)))

    def unseen_chunks(self, client: int | None) -> int:
        """How many chunks of examples nobody trains on: the server's test set, or what a client keeps back."""
        return -(-(len(self.x_test) if client is None else len(self.held_out[client])) // CHUNK)

    def unseen(self, client: int | None, number: int) -> tuple[Tensor, Tensor]:
        """One of these chunks."""
        part = slice(number * CHUNK, (number + 1) * CHUNK)
        if client is None:
            return self._inputs(self.x_test[part], None), self.y_test[part]
        return self._chunk(self.x, self.y, self.held_out[client][part])

    def _chunks(self, where: sampling.Positions) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(where), CHUNK):
            yield self._chunk(self.x, self.y, where[start : start + CHUNK])

    def _chunk(self, x: Tensor, y: Tensor, where: sampling.Positions) -> tuple[Tensor, Tensor]:
        part = torch.from_numpy(where).to(x.device)
        return self._inputs(x.index_select(0, part), None), y.index_select(0, part)

    def _inputs(self, x: Tensor, draws: Draws | None) -> Tensor:
        return self.scaling(augment(x, draws) if draws is not None else x)
