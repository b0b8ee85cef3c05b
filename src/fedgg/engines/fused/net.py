"""The net of the engine `fused`: faster layers for single rows on a CPU, and the Fisher information in one pass.

The Fisher information is made of sums of squared per-example gradients, here from one backward pass for many examples.
The gradient of a layer's weight follows from the layer's input x and output gradient g. For a linear layer it is g x^T,
whose square is g^2 (x^2)^T, so that the sum over examples is one matrix product; a convolution needs one small product
per example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad as gradient_of
from torch.func import vmap

from fedgg.core.forward import Forward, RowsForward
from fedgg.core.layout import Layout
from fedgg.core.model import Net
from fedgg.core.tensor_rows import Rows
from fedgg.engines.fused.conv_pool import with_faster_layers
from fedgg.engines.module_equivalence import Trial, agree, is_plain, shares_parameters

Examples = tuple[Tensor, Tensor]  # x [B, ...], y [B]
AT_ONCE = 1 << 24  # elements of per-example gradients in memory at the same time
ON_A_GPU = 16  # times as many: a GB of memory for fewer launches


class FusedNet(Net):
    """A net for the fused step, created by `fused_net`."""

    row_module: nn.Module  # runs a single row on a CPU: the module itself, or with faster layers

    def bind(
        self,
        buffers: Rows,
        *,
        train: bool,
        keys: Tensor | None = None,
        many: RowsForward | None = None,
        per_row: Rows | None = None,
    ) -> FusedForward:
        return FusedForward(self, buffers, train, keys, 0, many, per_row or {})

    def set_mode(self, train: bool) -> None:
        super().set_mode(train)
        if self.row_module.training != train:  # its changed parts are copies
            for part in self.row_module.modules():
                part.training = part.training if isinstance(part, nn.modules.batchnorm._NormBase) else train

    def fisher(self, row: Tensor, buffers: Rows, chunks: Iterable[Examples]) -> Tensor:
        """Mean squared per-example gradient, `[1, P]`, in evaluation mode: from one pass for many examples."""
        self.set_mode(False)
        layers = one_pass_layers(self)
        if row.is_cuda and layers is not None:
            chunks = regrouped(chunks, lambda x: examples_at_once(layers, x, ON_A_GPU * AT_ONCE))
        total, examples = torch.zeros_like(row[:, :1]), 0
        for x, y in chunks:
            squares = None if layers is None else squares_in_one_pass(self, layers, row, buffers, x, y)
            squares = squares_by_vmap(self, row, buffers, x, y) if squares is None else squares
            total = total + len(x) * (squares / len(x))
            examples += len(x)
        return total / max(examples, 1)


class FusedForward(Forward):
    """Runs single rows with faster layers on a CPU."""

    _net: FusedNet

    def loss_with(self, parameters: Sequence[Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """`loss` for one row, from a list of its parameters in the layout's order."""
        net = self._net
        net.set_mode(self._train)
        outputs = self._alone(dict(zip(net.layout.names, parameters, strict=True)), x[0], 0)
        return self.mean_loss(outputs[None], y, mask)


def fused_net(net: Net) -> FusedNet:
    """The same net for the fused step: one object per net, updated to the net's current settings."""
    if isinstance(net, FusedNet):
        return net
    fused: FusedNet = net.facts.setdefault("fused net", FusedNet.__new__(FusedNet))
    row_module = vars(fused).get("row_module")
    vars(fused).update(vars(net))
    fused.row_module = _with_checked_layers(net) if row_module is None else row_module
    return fused


def _with_checked_layers(net: Net) -> nn.Module:
    """The module with faster layers if it gives equal results, else the module itself."""
    module = with_faster_layers(net.module)
    if module is net.module or net.start.is_cuda or net.personal is not None:
        return net.module
    trial = Trial.of(net)
    if trial is None:
        return net.module
    candidate = FusedNet.__new__(FusedNet)
    vars(candidate).update(vars(trial.net), row_module=with_faster_layers(trial.net.module))
    same = agree(partial(trial.with_buffers, trial.net), partial(trial.with_buffers, candidate), trial.tolerance)
    return module if same else net.module


# Squared gradients of single examples ---------------------------------------------------------------------------------


@dataclass(eq=False)
class _LayerRecord:
    """Inputs and outputs of a layer in a forward pass."""

    layer: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def record(self, _: nn.Module, layer_inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """A forward hook. The model continues with a copy of the output: the next layer may be in place."""
        self.inputs.append(layer_inputs[0].detach())
        self.outputs.append(output)
        return output.clone()


def squares_in_one_pass(
    net: Net, layers: dict[str, nn.Module], row: Tensor, buffers: Rows, x: Tensor, y: Tensor
) -> Tensor | None:
    """Sum of squared per-example gradients; None if a layer is not called exactly once per forward pass."""
    size = examples_at_once(layers, x, ON_A_GPU * AT_ONCE if x.is_cuda else AT_ONCE)
    total = torch.zeros_like(row)
    for inputs, targets in zip(x.split(size), y.split(size), strict=True):
        with torch.enable_grad():
            losses = partial(net.losses, row[0].detach().requires_grad_(), buffers, inputs, targets)
            squares = sums_of_squares(layers, losses, net.layout, row)
        if squares is None:
            return None
        total = total + squares
    return total


def squares_by_vmap(net: Net, row: Tensor, buffers: Rows, x: Tensor, y: Tensor) -> Tensor:
    """The same for any model, from per-example gradients by `vmap` or one by one."""
    size = max(AT_ONCE // row.shape[1], 1)
    each = vmap(gradient_of(lambda row, x, y: net.losses(row, buffers, x[None], y[None]).sum()), in_dims=(None, 0, 0))
    parts = zip(x.split(size), y.split(size), strict=True)
    try:
        return torch.stack([each(row[0].detach(), *part).square().sum(0, keepdim=True) for part in parts]).sum(0)
    except (RuntimeError, NotImplementedError, ValueError):  # a module that vmap does not support
        return net.squared_gradients(row, buffers, x, y)


def one_pass_layers(net: Net) -> dict[str, nn.Module] | None:
    """The layers whose squared gradients come from one pass, if a trial on this net shows equal results; else None.

    Depends on the net only, not on the data, so that all processes choose the same way.
    """
    layers = layers_of(net.module, net.layout)
    if layers is None:
        return None
    if "squares in one pass" not in net.facts:
        net.facts["squares in one pass"] = _squares_agree(net)
    return layers if net.facts["squares in one pass"] else None


def _squares_agree(net: Net) -> bool:
    trial = Trial.of(net)
    if trial is None:
        return False
    net, row, x = trial.net, trial.w, trial.x[0]
    layers = layers_of(net.module, net.layout)
    y = trial.outputs(trial.x, slice(None))[1][0].argmin(1)  # unlikely classes, whose gradients are large
    net.set_mode(False)

    def in_one_pass() -> list[Tensor]:
        squares = None if layers is None else squares_in_one_pass(net, layers, row, net.start_buffers, x, y)
        return [] if squares is None else [squares]

    return agree(lambda: [net.squared_gradients(row, net.start_buffers, x, y)], in_one_pass, trial.tolerance)


def regrouped(chunks: Iterable[Examples], limit: Callable[[Tensor], int]) -> Iterator[Examples]:
    """Joins consecutive chunks up to `limit` examples; a chunk that is larger by itself stays whole."""
    pending: list[Examples] = []
    for x, y in chunks:
        if pending and sum(len(y) for _, y in pending) + len(y) > limit(x):
            yield _joined(pending)
            pending = []
        pending.append((x, y))
    if pending:
        yield _joined(pending)


def _joined(parts: list[Examples]) -> Examples:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def layers_of(module: nn.Module, layout: Layout) -> dict[str, nn.Module] | None:
    """The layers that hold the parameters, if all of them are supported linear layers or convolutions; else None.

    Whether the module uses them as layers only is tested by a trial (`one_pass_layers`).
    """
    trainable = {name.rpartition(".")[0] for name in layout.names}
    layers = {name: part for name, part in module.named_modules() if name in trainable}
    return None if shares_parameters(module) or not all(_is_supported(part) for part in layers.values()) else layers


def examples_at_once(layers: dict[str, nn.Module], x: Tensor, numbers: int) -> int:
    """How many examples fit if patches and per-example gradients may take this many numbers."""
    pixels = x[0].numel() // x.shape[1] if x.ndim == 4 else 1
    weights = [part.weight for part in layers.values() if isinstance(part, nn.Conv2d)]
    each = max((max(weight[0].numel() * pixels, weight.numel()) for weight in weights), default=x[0].numel())
    return max(numbers // each, 1)


def sums_of_squares(
    layers: dict[str, nn.Module], losses: Callable[[], Tensor], layout: Layout, like: Tensor
) -> Tensor | None:
    """`[1, P]` from the per-example `losses`; None if a layer is not called exactly once on the batch."""
    records = {name: _LayerRecord(part) for name, part in layers.items()}
    hooks = [record.layer.register_forward_hook(record.record) for record in records.values()]
    try:
        each = losses()
    finally:
        for hook in hooks:
            hook.remove()
    if any(len(record.outputs) != 1 or not _is_batch(record, len(each)) for record in records.values()):
        return None
    grads = torch.autograd.grad(each.sum(), [record.outputs[0] for record in records.values()])
    parts: dict[str, Tensor] = {}
    for (name, record), grad in zip(records.items(), grads, strict=True):
        for key, value in _squares(record.layer, record.inputs[0].to(like.dtype), grad.to(like.dtype)).items():
            parts[f"{name}.{key}" if name else key] = value
    row = layout.flatten(parts)
    return layout.arranged(row) if layout.pixelwise else row


def _is_supported(layer: nn.Module) -> bool:
    if is_plain(layer, nn.Conv2d):
        assert isinstance(layer, nn.Conv2d)
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return is_plain(layer, nn.Linear)


def _is_batch(record: _LayerRecord, examples: int) -> bool:
    """Whether the layer's input is a batch of this many examples without further dimensions."""
    x = record.inputs[0]
    return x.ndim == (4 if isinstance(record.layer, nn.Conv2d) else 2) and len(x) == examples


def _squares(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    if isinstance(layer, nn.Conv2d):
        grad = grad.flatten(2)
        weight = (grad @ _patches(layer, x).mT).square().sum(0).view_as(layer.weight)
        bias = grad.sum(2).square().sum(0)
    else:
        assert isinstance(layer, nn.Linear)
        weight, bias = grad.square().mT @ x.square(), grad.square().sum(0)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": bias}


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The input patch of each output pixel, `[N, C k k, pixels]`, in one copy; F.unfold makes one per example."""
    assert not isinstance(layer.padding, str)
    (sy, sx), (ky, kx), (dy, dx) = layer.stride, layer.kernel_size, layer.dilation
    x = F.pad(x, (layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0])).contiguous()
    examples, channels, height, width = x.shape
    outputs = ((height - dy * (ky - 1) - 1) // sy + 1, (width - dx * (kx - 1) - 1) // sx + 1)
    example, channel, row, column = x.stride()
    strides = (example, channel, row * dy, column * dx, row * sy, column * sx)
    return x.as_strided((examples, channels, ky, kx, *outputs), strides).reshape(examples, channels * ky * kx, -1)
