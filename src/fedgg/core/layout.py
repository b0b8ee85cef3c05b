"""How a module's trainable parameters lie in a flat row, its buffers beside it, and several inputs in one tensor.

Parameters that do not require a gradient are no part of the row: they stay in the module, never move and never travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedgg.core.tensor_rows import dot
from fedgg.errors import UserError


@dataclass(frozen=True)
class Layout:
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    buffers: tuple[str, ...]
    sizes: tuple[int, ...]  # length of each parameter in the row
    total: int  # P, the length of a row
    tied: tuple[tuple[str, str], ...]  # further names of tensors that stand in several modules, and their first names
    pixelwise: bool = False  # whether convolutions' weights lie output, row, column, input, as tensor cores read them

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """UserError where the module cannot be trained."""
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise UserError(f"{type(module).__name__} has lazy layers: run one batch through it first")
        if not trainable:
            raise UserError(f"{type(module).__name__} has no trainable parameters: nothing to learn")
        if unreal := [name for name, p in trainable.items() if p.is_complex()]:
            raise UserError(f"{unreal[0]} is complex: train its real and imaginary part (torch.view_as_complex)")
        if too_long := [name for name, b in module.named_buffers() if b.dtype == torch.complex128]:
            raise UserError(f"the buffer {too_long[0]} is complex128, which no checkpoint can hold: make it complex64")
        # Tied tensors are set under all their names here, since `functional_call(tie_weights=True)` leaves the tensors
        # it was given in a module that stands in two places.
        owners, first = dict(module.named_modules(remove_duplicate=False)), dict[int, str]()
        places, tied = set[tuple[int, str]](), list[tuple[str, str]]()
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            owner, _, attribute = name.rpartition(".")
            place = (id(owners[owner]), attribute)
            if place not in places and first.setdefault(id(tensor), name) != name:
                tied.append((name, first[id(tensor)]))
            places.add(place)
        sizes = tuple(p.numel() for p in trainable.values())
        return cls(
            names=tuple(trainable),
            shapes=tuple(p.shape for p in trainable.values()),
            buffers=tuple(name for name, _ in module.named_buffers()),
            sizes=sizes,
            total=sum(sizes),
            tied=tuple(tied),
        )

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One row `[1, P]` from tensors by name."""
        return torch.cat([tensors[name].detach().reshape(1, -1) for name in self.names], dim=1)

    def unflatten(self, w: Tensor) -> dict[str, Tensor]:
        """Views `[K, *shape]` into rows `[K, P]`; one `split` so that the backward pass is one concatenation."""
        parts = w.split(self.sizes, dim=-1)
        lead = w.shape[:-1]
        if not self.pixelwise:
            views = (part.view((*lead, *shape)) for part, shape in zip(parts, self.shapes, strict=True))
        else:
            views = (_pixelwise(part, lead, shape) for part, shape in zip(parts, self.shapes, strict=True))
        return dict(zip(self.names, views, strict=True))

    def arranged(self, rows: Tensor) -> Tensor:
        """Rows `[K, P]` of the plain layout as the pixelwise one has them; whatever else as it is."""
        return torch.cat(list(self._turned(rows, back=False)), 1) if self._is_row(rows) else rows

    def restored(self, rows: Tensor) -> Tensor:
        """And back."""
        return torch.cat(list(self._turned(rows, back=True)), 1) if self._is_row(rows) else rows

    def _is_row(self, rows: Tensor) -> bool:
        return rows.ndim == 2 and rows.shape[1] == self.total

    def _turned(self, rows: Tensor, *, back: bool) -> Iterator[Tensor]:
        for part, shape in zip(rows.split(self.sizes, 1), self.shapes, strict=True):
            if len(shape) != 4:
                yield part
            elif back:
                yield _pixelwise(part, rows.shape[:1], shape).reshape(len(rows), -1)
            else:
                yield part.view(-1, *shape).movedim(2, -1).reshape(len(rows), -1)

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Start and end, in the row, of each layer: the parameters of one submodule, weight and bias together."""
        spans: list[tuple[str, int, int]] = []
        start = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            owner = name.rpartition(".")[0]
            if spans and spans[-1][0] == owner:
                spans[-1] = (owner, spans[-1][1], start + size)
            else:
                spans.append((owner, start, start + size))
            start += size
        return tuple((begin, end) for _, begin, end in spans)

    def layer_dot(self, a: Tensor, b: Tensor) -> Tensor:
        """`[K, P]`: every parameter carries the inner product of its own layer."""
        return torch.cat([dot(a[:, i:j], b[:, i:j]).expand(-1, j - i) for i, j in self.layers], dim=1)


@dataclass(frozen=True)
class InputPart:
    """One of several inputs of a model: its keyword, or None where inputs are given by position."""

    keyword: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def described(self) -> tuple[str | None, tuple[int, ...], str]:
        """For JSON."""
        return self.keyword, self.shape, str(self.dtype).removeprefix("torch.")


def unpacked(parts: tuple[InputPart, ...], x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The arguments and keyword arguments of a model with several inputs, which lie side by side in `x` `[N, values]`.

    Inputs that are whole numbers have their type again; those in floating point have the type of `x`, the run's.
    """
    sizes = [torch.Size(part.shape).numel() for part in parts]
    tensors = []
    for part, values in zip(parts, x.split(sizes, -1), strict=True):
        values = values.reshape(*x.shape[:-1], *part.shape)
        tensors.append(values if part.dtype.is_floating_point else values.to(part.dtype))
    if parts[0].keyword is None:
        return tuple(tensors), {}
    return (), {str(part.keyword): tensor for part, tensor in zip(parts, tensors, strict=True)}


def _pixelwise(part: Tensor, lead: torch.Size, shape: torch.Size) -> Tensor:
    if len(shape) != 4:
        return part.view((*lead, *shape))
    out, channels, high, wide = shape
    return part.view((*lead, out, high, wide, channels)).movedim(-1, -3)
