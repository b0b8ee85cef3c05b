"""From a client's positions to batches a model can take: gather, augment training images, normalise.

Normalisation:

none      as the source has them;
unit      divided by a fully bright pixel, so that images lie in 0..1 (what fits the paper's SVHN numbers);
standard  each channel (or feature) with mean 0 and deviation 1 over the training set;
auto      the default: standard for the data sets with a name, none for a user's own arrays. An experiment replaces it
          by the one it stands for.

Augmentation:

none       images as they are;
flip       each image mirrored left to right with probability one half;
crop       four black pixels around, then a random window of the original size;
crop_flip  both (what fits the paper's CIFAR-10 numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg import kernels
from fedgg.core import random_choices
from fedgg.core.algorithm import Batch
from fedgg.data.dataset import Dataset

Normalisation = Literal["auto", "none", "unit", "standard"]


@dataclass(frozen=True)
class Scaling:
    """x -> (x - shift) * scale, with one value for each channel or for all."""

    shift: Tensor
    scale: Tensor

    @cached_property
    def numbers(self) -> tuple[object, ...]:
        """Equal for equal scalings on any device; read from a GPU once, not in every round."""
        return self.shift.dtype, tuple(self.shift.shape), self.shift.tolist(), self.scale.tolist()

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.int64:  # token ids and the like
            return x
        return (x.to(self.shift.dtype) - self.shift).mul_(self.scale)  # in place: the difference is a new tensor

    def to(self, device: torch.device) -> Scaling:
        return Scaling(self.shift.to(device), self.scale.to(device))


def scaling(kind: Normalisation, dataset: Dataset, dtype: torch.dtype, device: torch.device | None = None) -> Scaling:
    """The normalisation of this kind, from the training set."""
    if kind == "none":
        return Scaling(torch.zeros(1, dtype=dtype, device=device), torch.ones(1, dtype=dtype, device=device))
    if kind == "unit":
        factor = torch.full((1,), 1 / dataset.peak, dtype=dtype, device=device)
        return Scaling(torch.zeros_like(factor), factor)
    assert kind == "standard", "an experiment knows what auto stands for"
    mean, deviation = dataset.moments
    spatial = [1] * (dataset.x_train.ndim - 2)
    steady = torch.where(deviation > 0, deviation, 1)  # a constant feature stays constant
    shift, scale = mean.view(-1, *spatial), (1 / steady).view(-1, *spatial)
    return Scaling(shift.to(device, dtype), scale.to(device, dtype))


Augmentation = Literal["none", "flip", "crop", "crop_flip"]

MARGIN = 4  # pixels of black on each side before a crop


@dataclass(frozen=True)
class Draws:
    """Where each image is cut and whether it is mirrored: three tensors of one shape."""

    top: Tensor  # 0 .. 2 * MARGIN
    left: Tensor
    mirror: Tensor  # 0 or 1

    def __getitem__(self, which: Any) -> Draws:
        return Draws(self.top[which], self.left[which], self.mirror[which])


def draw(kind: Augmentation, seed: int, round_: int, client: int, count: int) -> Draws:
    """The draws of a client's whole round, one for each example in the order in which it sees them."""
    numbers = random_choices.stream(seed, "augment", round_, client)
    corner = numbers.integers(0, 2 * MARGIN + 1, size=(2, count)) if "crop" in kind else np.full((2, count), MARGIN)
    mirror = numbers.random(count) < 0.5 if "flip" in kind else np.zeros(count, bool)
    top, left, mirrored = (torch.from_numpy(part.astype(np.int8)) for part in (*corner, mirror))
    return Draws(top, left, mirrored)


def augment(images: Tensor, draws: Draws) -> Tensor:
    """`[B, C, H, W]` of any type, moved by one gather; black is 0, so this comes before normalisation."""
    height, width = images.shape[-2:]
    device = images.device
    rows = torch.arange(height, device=device) + draws.top.to(device)[:, None] - MARGIN  # [B, H]
    columns = torch.arange(width, device=device).expand(len(images), width)
    columns = torch.where(draws.mirror.to(device)[:, None] == 1, width - 1 - columns, columns)
    columns = columns + draws.left.to(device)[:, None] - MARGIN  # [B, W]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    flat = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]  # [B, H, W]
    source = images.flatten(2)
    moved = source.gather(2, flat.flatten(1)[:, None].expand(-1, images.shape[1], -1)).view_as(images)
    return moved * inside[:, None].to(images.dtype)


CHUNK = 1000  # examples in one batch of an evaluation


@dataclass(frozen=True, eq=False)
class Agenda:
    """The batches of one client's round: positions `[steps, batch]` with -1 for none, and how images are moved."""

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
    clients: tuple[random_choices.Positions, ...]  # training examples of each client
    held_out: tuple[random_choices.Positions, ...]  # examples each holds out for testing; empty without data.holdout
    scaling: Scaling
    augmentation: Augmentation
    proxy: random_choices.Positions = field(default_factory=lambda: np.empty(0, np.int64))  # the server's examples
    weights: Callable[[Tensor], Tensor] | None = None  # how much examples count by their targets, if they differ

    @property
    def examples_of_all(self) -> tuple[Tensor, ...]:
        """The large tensors, which experiments on the same data share."""
        return self.x, self.y, self.x_test, self.y_test

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

    def batches(self, seed: int, round_: int, client: int, work: random_choices.Work) -> Iterator[Batch]:
        """One client's batches of one round, `[1, B, ...]` each, the short ones short."""
        examples, draws, start = self.clients[client], None, 0
        if self.augmentation != "none":
            draws = draw(self.augmentation, seed, round_, client, work.passes(len(examples)) * len(examples))
        for row in random_choices.schedule(seed, round_, client, len(examples), work):
            part = row[row >= 0]  # without padding
            where = torch.from_numpy(examples[part]).to(self.x.device)
            # The same copy as x[where], made with memcpy: on a CPU indexing takes ten times as long.
            images = self.x.index_select(0, where)
            if draws is not None:
                images = augment(images, draws[start : start + len(part)])
            x, y = self.scaling(images)[None], self.y.index_select(0, where)[None]
            start += len(part)
            mask = torch.ones(1, len(where), dtype=self.scaling.shift.dtype, device=x.device)
            yield Batch(x, y, mask if self.weights is None else self._weighted(mask, y))

    def agenda(self, seed: int, round_: int, client: int, work: random_choices.Work) -> Agenda:
        """The same batches as positions to be gathered later, together with those of other clients."""
        examples = self.clients[client]
        positions = random_choices.schedule(seed, round_, client, len(examples), work)
        where = np.where(positions >= 0, examples[positions], -1).astype(np.int32)
        if self.augmentation == "none":
            return Agenda(where, None)
        draws = draw(self.augmentation, seed, round_, client, work.passes(len(examples)) * len(examples))
        # The draws lie in the order in which examples are seen, which is the order of the places that are not padding.
        moves, taken = np.zeros((3, *where.shape), np.int8), where >= 0
        moves[:, taken] = torch.stack([draws.top, draws.left, draws.mirror]).numpy()[:, : taken.sum()]
        return Agenda(where, moves)

    def gather(self, agendas: Sequence[Agenda]) -> Iterator[Batch]:
        """Batches `[K, B, ...]` of several clients, longest agenda first; those without steps left drop out."""
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
        """Pinned where the device is a GPU: a copy from pageable memory waits for all work of the stream."""
        return torch.full(shape, value, dtype=dtype, pin_memory=self.x.is_cuda)

    def read(self, where: Tensor, moves: Draws | None, lanes: int = 0, dtype: torch.dtype | None = None) -> Batch:
        """The batch behind one step of some rows, `[K, B]`; on a GPU also packed (see `kernels.images`)."""
        rows, width = where.shape
        flat = where.clamp_min(0).flatten()
        draws = moves and Draws(moves.top.flatten(), moves.left.flatten(), moves.mirror.flatten())
        if where.is_cuda and kernels.available() and self.x.dtype != torch.int64:
            x = self._gathered(where.flatten(), draws, lanes, dtype)
        else:
            x = self.scaling(self.x[flat] if draws is None else augment(self.x[flat], draws))
        mask, y = (where >= 0).to(self.scaling.shift.dtype), self.y[flat].unflatten(0, (rows, width))
        return Batch(x.unflatten(0, (rows, width)), y, mask if self.weights is None else self._weighted(mask, y))

    def _weighted(self, mask: Tensor, y: Tensor) -> Tensor:
        """The weights of the examples that count, `[K, B]`."""
        assert self.weights is not None
        return mask * self.weights(y.flatten(0, 1)).view_as(mask).to(mask.dtype)

    def _gathered(self, where: Tensor, draws: Draws | None, lanes: int, dtype: torch.dtype | None) -> Tensor:
        from fedgg.kernels.images import gather

        moves = None if draws is None else (draws.top, draws.left, draws.mirror)
        return gather(self.x, where, moves, self.scaling.shift, self.scaling.scale, MARGIN, lanes, dtype)

    def client_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's training examples in order, unaugmented: for probes."""
        return self._chunks(self.clients[client])

    def proxy_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The server's examples, likewise; none without `data.proxy`."""
        return self._chunks(self.proxy)

    def held_out_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.unseen(client, number) for number in range(self.unseen_chunks(client)))

    def test_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.unseen(None, number) for number in range(self.unseen_chunks(None)))

    def unseen_chunks(self, client: int | None) -> int:
        """The number of chunks of examples that are not trained on: the server's test set, or a client's hold-out."""
        return -(-(len(self.x_test) if client is None else len(self.held_out[client])) // CHUNK)

    def unseen(self, client: int | None, number: int) -> tuple[Tensor, Tensor]:
        """One of these chunks."""
        part = slice(number * CHUNK, (number + 1) * CHUNK)
        if client is None:
            return self.scaling(self.x_test[part]), self.y_test[part]
        return self._chunk(self.held_out[client][part])

    def _chunks(self, where: random_choices.Positions) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(where), CHUNK):
            yield self._chunk(where[start : start + CHUNK])

    def _chunk(self, where: random_choices.Positions) -> tuple[Tensor, Tensor]:
        part = torch.from_numpy(where).to(self.x.device)
        return self.scaling(self.x.index_select(0, part)), self.y.index_select(0, part)
