"""The net of the fused step: the same module and parameters, with faster ways to run single rows and to measure.

On a CPU a single row runs by a module with fused pooling, where `engines.equivalence` finds that one equal; the Fisher
information comes from one pass for many examples, where that is found equal too. Everything else is `core.net.Net`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from fedgg.core.criterion import mean_loss
from fedgg.core.forward import Forward, RowsForward
from fedgg.core.net import Net
from fedgg.core.rows import Rows
from fedgg.engines.equivalence import Trial, agree
from fedgg.engines.fused import per_example_gradients
from fedgg.engines.fused.pooling import with_fused_pooling


class FusedNet(Net):
    """Made by `fused_net`."""

    pooled: nn.Module  # what runs a single row on a CPU: the module itself, or its parts with fused pooling

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

    def fisher(self, row: Tensor, buffers: Rows, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        return per_example_gradients.fisher(self, row, buffers, chunks)


class FusedForward(Forward):
    """Single rows on a CPU, with fused pooling."""

    _net: FusedNet

    def loss_with(self, parameters: Sequence[Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """`loss` for one row whose parameters are given one by one, in the layout's order."""
        net = self._net
        net.set_mode(self._train)
        outputs = self._alone(dict(zip(net.layout.names, parameters, strict=True)), x[0], 0)
        return mean_loss(net.criterion, outputs[None], y, mask)

    def _call(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor) -> Tensor:
        module = self._net.pooled if x.device.type == "cpu" else self._net.module
        return self._net.call(parameters, buffers, x, seen=self._seen, module=module)


def fused_net(net: Net) -> FusedNet:
    """The same net for the fused step: one object for each net, with that net's settings of this moment."""
    if isinstance(net, FusedNet):
        return net
    twin: FusedNet = net.facts.setdefault("fused net", FusedNet.__new__(FusedNet))
    known = vars(twin).get("pooled")
    vars(twin).update(vars(net))
    twin.pooled = _pooled(net) if known is None else known
    return twin


def _pooled(net: Net) -> nn.Module:
    """The module with fused pooling, if there is something to fuse and it computes the same."""
    module = with_fused_pooling(net.module)
    if module is net.module or net.start.is_cuda:
        return net.module
    trial = Trial.of(net)
    if trial is None:
        return net.module
    candidate = FusedNet.__new__(FusedNet)
    vars(candidate).update(vars(trial.net), pooled=with_fused_pooling(trial.net.module))
    same = agree(partial(trial.with_buffers, trial.net), partial(trial.with_buffers, candidate), trial.tolerance)
    return module if same else net.module
