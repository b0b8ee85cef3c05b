"""A model as a round sees it: a function of rows, with that round's statistics and dropout masks, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedgg.core.client_rows import Rows
from fedgg.core.dropout import CountedMasks
from fedgg.core.layout import Layout

if TYPE_CHECKING:
    from fedgg.core.net import Net


Criterion = Callable[[Tensor, Tensor], Tensor]  # outputs [N, ...], targets [N] -> loss of each example [N]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def mean_loss(criterion: Criterion, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    each = criterion(outputs.flatten(0, 1), y.flatten(0, 1)).view_as(mask)
    return (each * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)


class RowsForward(Protocol):
    """All rows at once, by an engine's own means."""

    def __call__(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: Tensor | int = 0) -> Tensor:
        """Rows `[K, P]`, inputs, keys `[K, 1]` and step of the dropout masks: outputs, differentiable in the rows."""

    def seen(self, w: Tensor, x: Tensor, keys: Tensor | None = None, step: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """The outputs, and what went into the last layer; differentiable in the rows by both ways."""

    def offers(self, head: str) -> bool:
        """Whether that can be had of the layer of this name."""

    def mean_loss(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor | None:
        """Mean cross entropy over the examples that count, `[K, 1]`; None: nothing quicker than torch's."""


@dataclass
class Forward:
    """What algorithms see of a model: a function of rows, its layout and its loss. Buffers stay hidden in here."""

    _net: Net
    _buffers: Rows
    _train: bool
    _keys: Tensor | None = None
    _step: Tensor | int = 0
    _many: RowsForward | None = None
    _per_row: Rows = field(default_factory=dict)  # frozen tensors in which rows differ; they override buffers
    _seen: bool = False

    @property
    def layout(self) -> Layout:
        return self._net.layout

    @property
    def buffers(self) -> Rows:
        """The rows' statistics, as training has left them."""
        return self._buffers

    def at_step(self, step: Tensor | int) -> None:
        """Dropout masks are a function of (seed, round, client, step): say which step comes next, `[K, 1]` or one."""
        self._step = step

    def __call__(self, w: Tensor, x: Tensor) -> Tensor:
        self._net.set_mode(self._train)
        if self._many is not None:
            return self._many(w, x, self._keys, self._step)
        return self._forward(w, x)

    def quiet(self, w: Tensor, x: Tensor) -> Tensor:
        """A look in evaluation mode: no dropout, statistics read but not moved."""
        self._net.set_mode(False)
        return self._forward(w, x)

    def seen(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and representation (what goes into the last layer) of one pass, `[K, B, ...]` each."""
        if self._many is not None and self._many.offers(self._net.head):
            self._net.set_mode(self._train)
            return self._many.seen(w, x, self._keys, self._step)
        return self._apart(replace(self, _many=None, _seen=True)(w, x))

    def representation(self, w: Tensor, x: Tensor) -> Tensor:
        """What goes into the last layer, in evaluation mode."""
        if self._many is not None and self._many.offers(self._net.head):
            return self._many.seen(w, x)[1]
        return self._apart(replace(self, _seen=True).quiet(w, x))[1]

    def loss(self, w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Mean supervised loss over the examples that count, `[K, 1]`."""
        return self.judged(self(w, x), y, mask)

    def judged(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """The same of outputs that are there."""
        if self._many is not None and self._net.criterion is cross_entropy:
            quick = self._many.mean_loss(outputs, y, mask)
            if quick is not None:
                return quick
        return mean_loss(self._net.criterion, outputs, y, mask)

    def _alone(self, parameters: Mapping[str, Tensor], x: Tensor, k: int) -> Tensor:
        """Row k by itself, with its own buffers and masks."""
        net = self._net
        buffers = {name: rows[k] for name, rows in (self._buffers | self._per_row).items()}
        if self._keys is None or not net.module.training:
            return self._call(parameters, buffers, x)
        step = self._step[k] if isinstance(self._step, Tensor) else self._step
        if net.draws_random_numbers:  # anything random but dropout: torch's generators, set for every step
            torch.manual_seed(int(self._keys[k] + int(step)) % 2**63)
        if not net.drops:
            return self._call(parameters, buffers, x)
        with CountedMasks(self._keys[k], step):
            return self._call(parameters, buffers, x)

    def _call(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The module with one row's tensors."""
        return self._net.call(parameters, buffers, x, seen=self._seen)

    def _forward(self, w: Tensor, x: Tensor) -> Tensor:
        net = self._net
        if w.shape[0] > 1 and not (net.draws_random_numbers or net.keeps_statistics):
            shared = {name: rows[0] for name, rows in self._buffers.items() if name not in self._per_row}
            if not self._masks_count:
                return vmap(partial(self._row, shared))(w, x, self._per_row)
            steps = torch.as_tensor(self._step, device=w.device).expand(len(w), 1)
            return vmap(partial(self._masked, shared))(w, x, self._per_row, self._keys, steps)
        outputs = [self._alone(net.layout.unflatten(w[k]), x[k], k) for k in range(len(w))]
        return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)

    @property
    def _masks_count(self) -> bool:
        return self._keys is not None and self._net.drops and self._net.module.training

    def _row(self, shared: Rows, row: Tensor, x: Tensor, per_row: Rows) -> Tensor:
        return self._net.call(self._net.layout.unflatten(row), shared | per_row, x, seen=self._seen)

    def _masked(self, shared: Rows, row: Tensor, x: Tensor, per_row: Rows, key: Tensor, step: Tensor) -> Tensor:
        with CountedMasks(key, step):
            return self._row(shared, row, x, per_row)

    def _apart(self, both: Tensor) -> tuple[Tensor, Tensor]:
        classes = self._net.module.get_submodule(self._net.head).out_features
        assert isinstance(classes, int)
        return both[..., :classes], both[..., classes:]
