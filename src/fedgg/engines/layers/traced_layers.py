"""The layers of any module whose `forward` `torch.fx` can trace, as a graph: residual sums, several uses of a value.

Convolutions, linear layers, group normalisation, max-pools and dropout have layers of their own, ReLUs, residual sums
and pools behind them become part of these; all other operations on tensors are run by `torch.func.vmap`. Whether the
layers compute what the module does is checked by the caller (`engines.layers.program`): a traced `forward` lacks
branches that depend on values, and context managers.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedgg.core.model import Net
from fedgg.engines.base import Precision
from fedgg.engines.layers.row_layers import (
    AnyOperation,
    MaxPool,
    MeanPool,
    RowConvolution,
    RowDense,
    RowGroupNorm,
    TokenDense,
)
from fedgg.engines.layers.stacked_layers import Dense, Dropout, Flatten, Layer, Pair, Views
from fedgg.engines.module_equivalence import is_plain, shares_parameters

FEW_CHANNELS = 4  # images with so few have kernels of their own (`kernels.narrow_convolution`)


@dataclass
class TracedLayer:
    """A layer, the fx nodes whose values it reads, and the node whose value it computes."""

    layer: Layer
    inputs: tuple[fx.Node, ...]
    output: fx.Node


@dataclass(frozen=True)
class TracedLayers:
    """Layers in the order they run, with the numbers of the values they read (0 is the model's input)."""

    layers: tuple[Layer, ...]
    inputs: tuple[tuple[int, ...], ...]
    sides: Mapping[str, Pair]  # of the images that layers with weights read, by the name of the weights


def traced_layers(net: Net, precision: Precision) -> TracedLayers | None:
    """The layers of the net's module, or None if there are none.

    It cannot be traced, reads tensors that are no parameters, or uses a parameter twice.
    """
    if net.sample is None or net.parts or net.layout.buffers or shares_parameters(net.module):
        return None
    if set(net.layout.names) != {name for name, _ in net.module.named_parameters()}:
        return None  # frozen parameters are not in the rows
    try:
        module = copy.deepcopy(net.module).train()  # tracing runs `forward`, which may keep what it is given
        graph_module = fx.GraphModule(module, fx.Tracer().trace(module))
        graph = graph_module.graph
        graph.eliminate_dead_code()
        interpreter = _Shapes(graph_module)
        with torch.no_grad():
            interpreter.run(net.sample)
        traced = list(_Lowering(net, module, precision, interpreter.shapes).layers(graph))
    except Exception:  # a user's module may raise anything, and fx has errors of its own
        return None
    names = [name for one in traced for name in one.layer.parameter_names]
    if not traced or len(names) > len(set(names)):
        return None  # the backward pass writes a gradient once, and a parameter that is used twice has a sum of two
    shapes = interpreter.shapes
    return _numbered(_with_relus_of_next(_fused(traced, shapes), shapes), graph, shapes)


class _Shapes(fx.Interpreter):
    """Runs the module and records the shape of each node's value; None if it is no tensor."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.shapes: dict[str, torch.Size | None] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.shapes[n.name] = value.shape if isinstance(value, Tensor) else None
        return value


class _Lowering:
    """From fx nodes to layers."""

    def __init__(self, net: Net, module: nn.Module, precision: Precision, shapes: Mapping[str, torch.Size | None]):
        self._net = net
        self._modules = dict(module.named_modules())
        self._parameters = set(net.layout.names)
        self._precision = precision
        self._shapes = shapes
        self._dropouts = 0

    def layers(self, graph: fx.Graph) -> Iterator[TracedLayer]:
        for node in graph.nodes:
            is_value = self._shapes.get(node.name) is not None
            if node.op in ("placeholder", "output") or not is_value or self._is_parameter(node):
                continue  # values that are no tensors are computed where they are read
            layer, inputs = self._known(node) or self._any(node)
            yield TracedLayer(layer, inputs, node)

    def _is_parameter(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and node.target in self._parameters

    def _known(self, node: fx.Node) -> tuple[Layer, tuple[fx.Node, ...]] | None:
        """A layer with an implementation of its own, with its inputs."""
        inputs = tuple(node.all_input_nodes)
        if node.op == "call_module" and len(inputs) == 1:
            layer = self._of_module(
                str(node.target), self._modules[str(node.target)], len(self._shapes[node.name] or ())
            )
            return None if layer is None else (layer, inputs)
        if node.op == "call_function" and node.target is F.dropout:
            bound = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
            share = bound.get("p", 0.5)
            if bound.get("training", True) is True and isinstance(share, float) and 0 < share < 1:
                return self._dropout(share), inputs
        is_flatten = node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten")
        if is_flatten and tuple(node.args[1:]) in ((1,), (1, -1)) and not node.kwargs:
            return Flatten(), inputs
        return None

    def _dropout(self, share: float) -> Dropout:
        self._dropouts += 1
        return Dropout(self._dropouts, share)

    def _of_module(self, name: str, part: nn.Module, dimensions: int) -> Layer | None:
        weight, bias = f"{name}.weight", f"{name}.bias"
        has_bias = bias in self._parameters
        if is_plain(part, nn.Conv2d) and weight in self._parameters and dimensions == 4:
            assert isinstance(part, nn.Conv2d)
            is_usual = part.groups == 1 and part.padding_mode == "zeros" and part.dilation == (1, 1)
            if not is_usual or isinstance(part.padding, str):
                return None
            sizes = (_pair(part.kernel_size), _pair(part.stride), _pair(part.padding))
            return RowConvolution(weight, bias if has_bias else None, *sizes, self._precision)
        if is_plain(part, nn.Linear) and has_bias:
            return (RowDense if dimensions == 2 else TokenDense)(weight, bias, False)
        if is_plain(part, nn.GroupNorm) and has_bias and dimensions == 4:
            assert isinstance(part, nn.GroupNorm)
            return RowGroupNorm(weight, bias, part.num_groups, part.eps)
        if is_plain(part, nn.MaxPool2d) and dimensions == 4:
            assert isinstance(part, nn.MaxPool2d)
            kernel, stride = _pair(part.kernel_size), _pair(part.stride)
            is_usual = _pair(part.dilation) == (1, 1) and not part.ceil_mode and not part.return_indices
            return MaxPool(kernel, stride, _pair(part.padding)) if is_usual and kernel[0] * kernel[1] < 128 else None
        if isinstance(part, nn.AdaptiveAvgPool2d) and is_plain(part, nn.AdaptiveAvgPool2d) and dimensions == 4:
            return MeanPool() if _pair(part.output_size) == (1, 1) else None
        if isinstance(part, nn.Dropout) and is_plain(part, nn.Dropout) and 0 < part.p < 1:
            return self._dropout(part.p)
        if isinstance(part, nn.Flatten) and is_plain(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            return Flatten()
        return None

    def _any(self, node: fx.Node) -> tuple[Layer, tuple[fx.Node, ...]]:
        """The node as an operation for `vmap`, with the nodes before it that are no tensors."""
        nodes, inputs, names = [node], list[fx.Node](), list[str]()

        def collect(upcoming: fx.Node) -> None:
            for source in upcoming.all_input_nodes:
                if self._is_parameter(source):
                    names.append(str(source.target))
                elif self._shapes[source.name] is None:
                    if source not in nodes:
                        nodes.insert(0, source)
                        collect(source)
                elif source not in inputs:
                    inputs.append(source)

        collect(node)
        if node.op == "call_module":
            prefix = f"{node.target}."
            names += [name for name in self._net.layout.names if name.startswith(prefix)]
        if node.op == "get_attr" or not inputs:
            raise ValueError("a tensor that is neither a parameter nor computed from the input")
        if any(
            earlier.op == "call_module"
            and earlier is not node
            and list(self._modules[str(earlier.target)].parameters())
            for earlier in nodes
        ):
            raise ValueError("a layer with parameters whose output is not a tensor")
        nodes.sort(key=_position(node.graph))
        function = _Expression(self._modules, tuple(nodes), tuple(inputs))
        views = any(one.op == "call_method" and one.target == "view" for one in nodes)
        return AnyOperation(function, tuple(dict.fromkeys(names)), self._net.products, views), tuple(inputs)


def _position(graph: fx.Graph) -> Callable[[fx.Node], int]:
    order = {node: number for number, node in enumerate(graph.nodes)}
    return order.__getitem__


@dataclass(frozen=True, eq=False)
class _Expression:
    """Some nodes of the graph as a function of their inputs and parameters, for one row."""

    modules: Mapping[str, nn.Module]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]

    def __call__(self, inputs: Sequence[Tensor], parameters: Views) -> Tensor:
        values: dict[fx.Node, Any] = dict(zip(self.inputs, inputs, strict=True))

        def value_of(source: fx.Node) -> Any:
            return values[source] if source in values else parameters[str(source.target)]

        for node in self.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
            if node.op == "call_function":
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            elif node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                prefix = f"{node.target}."
                own = {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
                values[node] = torch.func.functional_call(self.modules[str(node.target)], own, args, kwargs)
        result: Tensor = values[self.nodes[-1]]
        return result

    def is_function(self, *functions: Any) -> bool:
        """Whether it is only a call of one of these functions, of a method or module of that name or type."""
        if len(self.nodes) != 1 or self.nodes[0].kwargs.keys() - {"inplace"}:
            return False
        node = self.nodes[0]
        if node.op == "call_module":
            part = self.modules[str(node.target)]
            return any(isinstance(kind, type) and is_plain(part, kind) for kind in functions)
        return node.target in functions


def _fused(traced: list[TracedLayer], shapes: Mapping[str, torch.Size | None]) -> list[TracedLayer]:
    """With ReLUs, residual sums and 2 x 2 max-pools as parts of the layers before them, if nothing else reads these."""
    result: list[TracedLayer] = []
    merged: dict[fx.Node, TracedLayer] = {}  # the layer that computes this node's value now

    def before(one: TracedLayer, position: int = 0) -> TracedLayer | None:
        """The layer that computes an input, if nothing else reads that."""
        source = one.inputs[position]
        return merged.get(source) if len(source.users) == 1 else None

    for one in traced:
        fused = _with_relu(one, before) or _with_shortcut(one, before, shapes) or _with_pool(one, before)
        if fused is not None:
            earlier, replaced, inputs = fused
            result.remove(earlier)
            one = TracedLayer(replaced, inputs, one.output)
        result.append(one)
        merged[one.output] = one
    return result


Fusion = tuple[TracedLayer, Layer, tuple[fx.Node, ...]]
Before = Callable[..., TracedLayer | None]


def _is(layer: Layer, *functions: Any) -> bool:
    return (
        isinstance(layer, AnyOperation)
        and isinstance(layer.function, _Expression)
        and layer.function.is_function(*functions)
    )


def _with_relu(one: TracedLayer, before: Before) -> Fusion | None:
    if not _is(one.layer, F.relu, torch.relu, nn.ReLU, "relu", "relu_"):
        return None
    earlier = before(one)
    if earlier is None:
        return None
    layer = earlier.layer
    if isinstance(layer, RowConvolution) and not layer.relu and not layer.pool:
        return earlier, replace(layer, relu=True), earlier.inputs
    if isinstance(layer, Dense | RowGroupNorm) and not layer.relu:
        return earlier, replace(layer, relu=True), earlier.inputs
    return None


def _with_shortcut(one: TracedLayer, before: Before, shapes: Mapping[str, torch.Size | None]) -> Fusion | None:
    if not _is(one.layer, operator.add, operator.iadd, torch.add, "add", "add_") or len(one.inputs) != 2:
        return None
    if shapes[one.inputs[0].name] != shapes[one.inputs[1].name]:
        return None  # the kernel does not broadcast
    for position in (0, 1):
        earlier = before(one, position)
        layer = earlier and earlier.layer
        if earlier is not None and isinstance(layer, RowGroupNorm) and not layer.shortcut and not layer.relu:
            return earlier, replace(layer, shortcut=True), (*earlier.inputs, one.inputs[1 - position])
    return None


def _with_pool(one: TracedLayer, before: Before) -> Fusion | None:
    layer = one.layer
    if not isinstance(layer, MaxPool) or (layer.kernel, layer.stride, layer.padding) != ((2, 2), (2, 2), (0, 0)):
        return None
    earlier = before(one)
    first = earlier and earlier.layer
    if earlier is None or not isinstance(first, RowConvolution) or not first.relu or first.pool or first.bias is None:
        return None
    return earlier, replace(first, pool=True), earlier.inputs


def _with_relus_of_next(traced: list[TracedLayer], shapes: Mapping[str, torch.Size | None]) -> list[TracedLayer]:
    """With the backward pass of ReLUs in the layers behind them, where a convolution alone reads the outputs."""
    result = list(traced)
    for number, one in enumerate(result):
        readers = [n for n, other in enumerate(result) for node in other.inputs if node is one.output]
        layer, shape = one.layer, shapes[one.output.name]
        if len(readers) != 1 or not isinstance(layer, RowConvolution) or not layer.relu or layer.pool:
            continue
        reader = result[readers[0]].layer
        if layer.bias is None or not isinstance(reader, RowConvolution) or shape is None or shape[1] <= FEW_CHANNELS:
            continue
        result[number] = TracedLayer(replace(layer, relu_by_next=True), one.inputs, one.output)
        behind = result[readers[0]]
        result[readers[0]] = TracedLayer(replace(reader, bias_before=layer.bias), behind.inputs, behind.output)
    return result


def _numbered(
    traced: list[TracedLayer], graph: fx.Graph, shapes: Mapping[str, torch.Size | None]
) -> TracedLayers | None:
    """None if the model does not return the last layer's value."""
    (placeholder,) = (node for node in graph.nodes if node.op == "placeholder")
    numbers = {placeholder: 0} | {one.output: number for number, one in enumerate(traced, 1)}
    (returned,) = (node.args[0] for node in graph.nodes if node.op == "output")
    if returned is not traced[-1].output:
        return None
    sides = dict[str, Pair]()
    for one in traced:
        shape = shapes[one.inputs[0].name]
        if isinstance(one.layer, RowConvolution) and shape is not None:
            sides[one.layer.weight] = (shape[2], shape[3])
        elif isinstance(one.layer, RowDense):
            sides[one.layer.weight] = (1, 1)
    inputs = tuple(tuple(numbers[node] for node in one.inputs) for one in traced)
    return TracedLayers(tuple(one.layer for one in traced), inputs, sides)


def _pair(value: Any) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple) else (value, value)
