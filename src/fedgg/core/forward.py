"""The forward pass of a round: a model as a function of rows, with its buffers and dropout masks, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedgg.core.layout import Layout
from fedgg.core.random_choices import torch_seed
from fedgg.core.tasks import cross_entropy
from fedgg.core.tensor_rows import Rows
from fedgg.older_python import Self

if TYPE_CHECKING:
    from fedgg.core.model import Net
    from fedgg.core.personal import PersonalPart


class RowsForward(Protocol):
    """All rows at once, as an engine computes them."""

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
    _keys: Tensor | None = None  # [K, 1]
    step: Tensor | int = 0  # the local step that comes next, `[K, 1]` or one number: dropout masks depend on it
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

    @property
    def personal(self) -> PersonalPart:
        """What stays with the client; only for nets that have a personal part."""
        assert self._net.personal is not None
        return self._net.personal

    def with_personal(self, parameters: Tensor) -> Forward:
        """The same function with these personal parameters, `[K, Q]`."""
        return replace(self, _per_row=self._per_row | self.personal.layout.unflatten(parameters))

    def with_copied_buffers(self) -> Self:
        """The same function with buffers of its own: passes through it do not change this one's statistics."""
        return replace(self, _buffers={name: rows.clone() for name, rows in self._buffers.items()})

    def __call__(self, w: Tensor, x: Tensor) -> Tensor:
        """Outputs `[K, B, ...]`."""
        net = self._net
        net.set_mode(self._train)
        if self._many is not None:
            return self._many(w, x, self._keys, self.step)
        if len(w) == 1 or net.draws_random_numbers or net.keeps_statistics:
            outputs = [self._alone(net.layout.unflatten(w[k]), x[k], k) for k in range(len(w))]
            return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)
        shared = {name: rows[0] for name, rows in self._buffers.items() if name not in self._per_row}
        if self._keys is None or not (net.drops and net.module.training):
            return vmap(partial(self._row, shared))(w, x, self._per_row)
        steps = torch.as_tensor(self.step, device=w.device).expand(len(w), 1)
        return vmap(partial(self._masked, shared))(w, x, self._per_row, self._keys, steps)

    def quiet(self, w: Tensor, x: Tensor) -> Tensor:
        """Outputs in evaluation mode: no dropout, statistics read and not changed."""
        return replace(self, _train=False, _many=None)(w, x)

    def seen(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and representation (what goes into the last layer) of one pass, `[K, B, ...]` each."""
        if self._many is not None and self._many.offers(self._net.head):
            self._net.set_mode(self._train)
            return self._many.seen(w, x, self._keys, self.step)
        return self._apart(replace(self, _many=None, _seen=True)(w, x))

    def representation(self, w: Tensor, x: Tensor) -> Tensor:
        """What goes into the last layer, in evaluation mode."""
        if self._many is not None and self._many.offers(self._net.head):
            return self._many.seen(w, x)[1]
        return self._apart(replace(self, _seen=True).quiet(w, x))[1]

    def loss(self, w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Mean supervised loss over the examples that count, `[K, 1]`."""
        return self.mean_loss(self(w, x), y, mask)

    def mean_loss(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """The same of outputs that have been computed."""
        if self._many is not None and self._net.criterion is cross_entropy:
            mean = self._many.mean_loss(outputs, y, mask)
            if mean is not None:
                return mean
        each = self._net.criterion(outputs.flatten(0, 1), y.flatten(0, 1)).view_as(mask)
        return (each * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)

    def _alone(self, parameters: Mapping[str, Tensor], x: Tensor, k: int) -> Tensor:
        """Row k by itself, with its own buffers and masks."""
        net = self._net
        buffers = {name: rows[k] for name, rows in (self._buffers | self._per_row).items()}
        masks: AbstractContextManager[object] = nullcontext()
        if self._keys is not None and net.module.training:
            step = self.step[k] if isinstance(self.step, Tensor) else self.step
            if net.draws_random_numbers:  # anything random but dropout: torch's generators, set for every step
                seed = int(self._keys[k] + int(step)) % 2**63
                # Without a GPU, torch.manual_seed records where it was called, which takes longer than a small step.
                (torch.manual_seed if x.is_cuda else torch.default_generator.manual_seed)(seed)
            if net.drops:
                masks = CountedMasks(self._keys[k], step)
        with masks:
            return net.call(parameters, buffers, x, seen=self._seen, module=net.row_module)

    def _row(self, shared: Rows, row: Tensor, x: Tensor, per_row: Rows) -> Tensor:
        return self._net.call(self._net.layout.unflatten(row), shared | per_row, x, seen=self._seen)

    def _masked(self, shared: Rows, row: Tensor, x: Tensor, per_row: Rows, key: Tensor, step: Tensor) -> Tensor:
        with CountedMasks(key, step):
            return self._row(shared, row, x, per_row)

    def _apart(self, both: Tensor) -> tuple[Tensor, Tensor]:
        classes = self._net.module.get_submodule(self._net.head).out_features
        assert isinstance(classes, int)
        return both[..., :classes], both[..., classes:]


# Dropout masks are computed, not drawn: each is a function of (seed, round, client, step, which dropout, element).
# Integer arithmetic is the same everywhere, so every engine drops the same units: one client alone, many in a stack, on
# a CPU, on a GPU, within a captured graph. torch's generators cannot do that, since what they draw depends on the
# device and on the shape of the whole stack.

DropoutKey = tuple[int, int, int]  # seed, round, client

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd, as a signed number
RESOLUTION = 24  # bits of the uniform number each element is compared by


def mask_keys(rows: Sequence[DropoutKey], device: torch.device) -> Tensor:
    """One key for each row, `[K, 1]`."""
    keys = [torch_seed(seed, "dropout", round_, client) for seed, round_, client in rows]
    return torch.tensor(keys, dtype=torch.int64, device=device)[:, None]


def keep(key: Tensor, step: Tensor | int, place: int, shape: torch.Size, p: float) -> Tensor:
    """Which elements survive, bool in `shape`; `key` `[1]` is one row's, `place` counts the dropouts of a forward."""
    moment = _mixed(key + GOLDEN * (torch.as_tensor(step, device=key.device).to(torch.int64) * 1024 + place + 1))
    element = torch.arange(shape.numel(), dtype=torch.int64, device=key.device)
    uniform = _shifted(_mixed(moment + GOLDEN * element), 64 - RESOLUTION)
    return (uniform >= round(p * (1 << RESOLUTION))).view(shape)


class CountedMasks(TorchFunctionMode):
    """Within the block `F.dropout` (and so `nn.Dropout`) takes computed masks; no other function changes."""

    def __init__(self, key: Tensor, step: Tensor | int):
        super().__init__()
        self._key, self._step = key, step
        self.used = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return self._dropout(*args, **(kwargs or {}))

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        self.used += 1
        survives = keep(self._key, self._step, self.used, x.shape, p)
        return torch.where(survives, x / (1 - p), 0) if p < 1 else torch.zeros_like(x)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(z: Tensor) -> Tensor:
    """The finalising steps of SplitMix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit."""
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)
