"""A user's `nn.Module` as a function of rows: `[K, P]` parameters and `[K, B, ...]` inputs to `[K, B, ...]` outputs.

A model's representation is the input of the `nn.Linear` that computes the outputs. The layer is found by running the
module, and its input recorded with a hook: a user's module needs no second method, and one pass gives both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgg.core.buffers import differs
from fedgg.core.forward import CountedMasks, Forward, RowsForward
from fedgg.core.layout import InputPart, Layout, unpacked
from fedgg.core.metrics import Accuracy, Metric, check_metric
from fedgg.core.random_choices import unchanged_generators
from fedgg.core.tasks import CLASSIFICATION, Task, cross_entropy, task_name
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError

if TYPE_CHECKING:
    from fedgg.core.personal import PersonalPart


DEFAULT_METRICS: tuple[Metric, ...] = (Accuracy("accuracy"),)


class NeedsFloatingPoint(UserError):
    """A module that cannot take the whole numbers of the data, but the same as floating point numbers."""


@contextmanager
def recorded_inputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, the inputs of the layer, call by call."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, layer_inputs: inputs.append(layer_inputs[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def head_of(net: Net, x: Tensor, *, one_vector: bool = False) -> str:
    """The name of the layer whose input is the representation, as two examples go through the model.

    `one_vector`: UserError where an example's representation is more than a vector, such as one for each token.
    """
    title = type(net.module).__name__
    made: list[tuple[str, Tensor, Tensor]] = []  # name, input and output of every linear layer, as they are called

    def note(name: str, layer_inputs: tuple[Tensor, ...], output: Tensor) -> None:
        made.append((name, layer_inputs[0], output))

    layers = [(name, part) for name, part in net.module.named_modules() if isinstance(part, nn.Linear)]
    hooks = [
        part.register_forward_hook(lambda _, layer_inputs, output, name=name: note(name, layer_inputs, output))
        for name, part in layers
    ]
    try:
        net.set_mode(False)
        row = net.start[0].detach().requires_grad_()
        buffers = {name: rows[0] for name, rows in net.start_buffers.items()}
        outputs = net.call(net.layout.unflatten(row), buffers, x)
    finally:
        for hook in hooks:
            hook.remove()
    if not made or made[-1][2].shape != outputs.shape or not torch.equal(made[-1][2].to(outputs.dtype), outputs):
        raise UserError(
            f"{title} offers no representation: its outputs do not come out of an nn.Linear, whose input it would be; "
            f"let the model end with one"
        )
    name, representation, _ = made[-1]
    if not representation.requires_grad:
        raise UserError(
            f"{title} offers no representation: its only layer, {name!r}, sees the inputs themselves; "
            f"take a model with a hidden layer, as mlp or cnn"
        )
    if one_vector and representation.ndim != 2:
        raise UserError(
            f"{title} has no representation of a whole example: its last layer {name!r} takes "
            f"{list(representation.shape[1:])} numbers of each, as for sequences; take a model whose last layer takes "
            f"one vector an example, or another algorithm"
        )
    return name


class Net:
    """The module, its layout and its loss. The module's parameters are not read again after construction."""

    def __init__(
        self,
        module: nn.Module,
        task: Task = CLASSIFICATION,
        metrics: tuple[Metric, ...] = DEFAULT_METRICS,
        *,
        frozen_statistics: bool = False,
        products: torch.dtype | None = None,
    ):
        """`products`: the type of the operands of matrix products and convolutions, if not that of the module."""
        self.module = module
        self.row_module: nn.Module | None = None  # runs single rows instead, where an engine has a faster equivalent
        self.task, self.metrics = task, metrics
        self.criterion = task.losses
        self.layout = Layout.of(module)
        self.start = self.layout.flatten(dict(module.named_parameters()))
        # Copies, `[1, ...]` each: a scalar counter becomes `[1]`.
        self.start_buffers = {name: buffer.detach().clone()[None] for name, buffer in module.named_buffers()}
        self.embeds = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())
        self.frozen_statistics = frozen_statistics
        self.freezes = frozen_statistics and any(  # whether there are normalisation layers for which it matters
            isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None
            for part in module.modules()
        )
        self.products = products
        self.parts: tuple[InputPart, ...] = ()  # of several inputs
        self.channels_last = False
        # What `examine` finds out; until then what is safe to assume.
        self.draws_random_numbers = True  # from torch's generators; F.dropout takes computed masks instead
        self.drops = True
        self.needs_two_examples = False
        self.needs_two_in_evaluation = False
        self.mixes_in_evaluation = False  # whether an example's outputs depend on others, in evaluation mode too
        self.sample: Tensor | None = None  # the two examples
        self.output_shape: tuple[int, ...] = ()  # of one example
        self.moving = self.layout.buffers  # the buffers that training changes, as far as one step shows
        self.keeps_statistics = bool(self.moving)
        self.head = ""  # the layer whose input is the representation, where an algorithm needs one
        self.facts: dict[str, Any] = {}  # what engines have found out about the module; copies of the net share it
        self.personal: PersonalPart | None = None  # what stays with the clients, where something does
        self._training: bool | None = None

    def set_task(self, task: Task, metrics: tuple[Metric, ...]) -> None:
        """Another task than classification, or other metrics than accuracy."""
        self.task, self.metrics, self.criterion = task, metrics, task.losses

    def examine(self, x: Tensor, outputs_wanted: int | None, y: Tensor | None = None) -> None:
        """Run two examples through the module: are its outputs right, does it draw random numbers, change buffers?

        Looking at what happens finds `F.dropout` in a user's `forward` as well as an `nn.Dropout`. `outputs_wanted`:
        None where they have been checked before.
        """
        title, shape = type(self.module).__name__, tuple(x.shape[1:])
        for name, parameter in self.module.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UserError(
                    f"{title} has a hook on its parameter {name}, which would never be called, "
                    f"since clients train copies of it: change the gradient in forward() instead"
                )
        buffers = {name: rows.clone() for name, rows in self.start_buffers.items()}
        try:
            outputs, self.draws_random_numbers, self.drops = self._run(x, buffers, train=True)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            if x.dtype == torch.int64 and self._runs(x.to(self.start.dtype)):
                raise NeedsFloatingPoint(
                    f"{title} takes floating point inputs, and the data are whole numbers: convert them to float32"
                ) from error
            if self.parts:
                keywords = [part.keyword for part in self.parts if part.keyword is not None]
                inputs = f"the inputs {', '.join(keywords)}" if keywords else f"{len(self.parts)} inputs"
                raise UserError(
                    f"{title} cannot take {inputs}: {reason}; the keys of a dict are the arguments of forward() by "
                    f"name, the arrays of a tuple those in order"
                ) from error
            raise UserError(f"{title} cannot take examples of shape {shape}: {reason}{_hint(shape, reason)}") from error
        if y is None:
            y = x.new_zeros(len(x), dtype=torch.int64)
        is_usual = self.criterion is cross_entropy and self.metrics == DEFAULT_METRICS
        is_right = is_usual and getattr(outputs, "shape", ()) == (len(x), outputs_wanted)
        if outputs_wanted is not None and not is_right:
            self._check_outputs(outputs, y, outputs_wanted)
        self.moving = tuple(name for name in buffers if differs(self.start_buffers[name], buffers[name]))
        self.keeps_statistics = bool(self.moving)
        fails_on_one: dict[bool, bool] = {}  # batch statistics of a single value do not exist: PyTorch refuses them
        for train in (True, False):
            buffers = {name: rows.clone() for name, rows in self.start_buffers.items()}
            try:
                alone, _, _ = self._run(x[:1], buffers, train=train)
                fails_on_one[train] = alone.shape != (1, *outputs.shape[1:])
            except Exception:  # a user's module may raise anything
                fails_on_one[train] = True
        self.needs_two_examples, self.needs_two_in_evaluation = fails_on_one[True], fails_on_one[False]
        _, draws_in_evaluation, _ = self._run(x, self.start_buffers, train=False)
        if draws_in_evaluation:
            raise UserError(
                f"{title} draws random numbers in evaluation too: write F.dropout(x, training=self.training)"
            )
        self.sample, self.output_shape = x.detach().clone(), tuple(outputs.shape[1:])
        self.facts = {}
        self.mixes_in_evaluation = self._mixes_in_evaluation(x)

    def _runs(self, x: Tensor) -> bool:
        try:
            self._run(x, {name: rows.clone() for name, rows in self.start_buffers.items()}, train=True)
        except Exception:  # a user's module may raise anything
            return False
        return True

    def _check_outputs(self, outputs: Any, y: Tensor, outputs_wanted: int) -> None:
        """UserError where outputs do not have the shape that the task needs, or an example does not have one loss."""
        title = type(self.module).__name__
        shape = self.task.output_shape(y, outputs_wanted)
        if not isinstance(outputs, Tensor):
            needed = "" if shape is None else f" [{', '.join(['N', *map(str, shape[1:])])}]"
            raise UserError(
                f"{title} returned a {type(outputs).__name__}, not a tensor: "
                f"wrap it so that forward() returns the outputs{needed}"
            )
        if shape is not None and outputs.shape != shape and not (shape[1:] == (1,) and outputs.shape == shape[:1]):
            turned = len(shape) == 3 and outputs.shape == (shape[0], shape[2], shape[1])
            raise UserError(
                f"{title} returned {list(outputs.shape)} for {len(y)} examples; the task {task_name(self.task)} with "
                f"targets {list(y.shape)} of {outputs_wanted} value{'s' if outputs_wanted > 1 else ''} needs "
                f"{list(shape)}"
                f"{': return outputs.transpose(1, 2)' if turned else ''}"
            )
        shapes = _shapes(outputs, y)
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_(outputs.is_floating_point())
            try:
                losses: Any = self.criterion(leaf, y)
            except Exception as error:  # a user's function may raise anything
                reason = " ".join(str(error).split())
                raise UserError(f"the loss cannot take {shapes}: {type(error).__name__}: {reason}") from error
        if not isinstance(losses, Tensor) or losses.shape != (len(y),):
            got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise UserError(
                f"the loss returned {got} for {len(y)} examples: return the loss of each example, [{len(y)}] "
                f"(reduction='none', and a mean over further dimensions)"
            )
        if not losses.requires_grad:
            raise UserError("the loss has no gradient with respect to the outputs: compute it from them, undetached")
        scored = self.task.scored(outputs, y)
        for metric in self.metrics:
            try:
                check_metric(metric, *scored)
            except UserError:
                raise
            except Exception as error:  # a user's function may raise anything
                reason = " ".join(str(error).split())
                raise UserError(
                    f"the metric {metric.name} cannot take {_shapes(*scored)}: {type(error).__name__}: {reason}"
                ) from error

    def _run(self, x: Tensor, buffers: Rows, *, train: bool, w: Tensor | None = None) -> tuple[Any, bool, bool]:
        """Outputs of a batch; whether they took numbers from torch's generators, and in training from F.dropout."""
        parameters = self.layout.unflatten((self.start if w is None else w)[0])
        tensors = {name: rows[0] for name, rows in buffers.items()}
        devices = [x.device] if x.is_cuda else []
        masks = CountedMasks(torch.zeros(1, dtype=torch.int64, device=x.device), 0)
        self.set_mode(train)
        with torch.no_grad(), unchanged_generators():
            before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            with masks if train else nullcontext():
                outputs = self.call(parameters, tensors, x)
            after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        return outputs, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), masks.used > 0

    def _mixes_in_evaluation(self, x: Tensor) -> bool:
        """Whether an example's outputs change with the other one of its batch, in evaluation mode."""
        others = [x[0], x[-1], x[0].flip(list(range(x.ndim - 1)))]
        try:
            w = rows_around(self, 1)
            batches = [torch.stack([x[0], other]) for other in others]
            first, *beside = [self._run(batch, self.start_buffers, train=False, w=w)[0][0] for batch in batches]
        except Exception:  # a user's module may raise anything
            return False
        return not all(torch.allclose(first, one, rtol=1e-4, atol=1e-6, equal_nan=True) for one in beside)

    def arranged(self) -> Net:
        """The same net for rows that lie pixelwise (see `Layout`)."""
        twin = copy.copy(self)
        twin.layout = replace(self.layout, pixelwise=True)
        twin.start = self.layout.arranged(self.start)
        return twin

    def bind(
        self,
        buffers: Rows,
        *,
        train: bool,
        keys: Tensor | None = None,
        many: RowsForward | None = None,
        per_row: Rows | None = None,
    ) -> Forward:
        """The forward function of a round. In training the buffers given are updated in place.

        `keys` `[K, 1]` make the dropout masks; `many` is a faster way to run all rows, where an engine has one;
        `per_row` `[K, ...]` are frozen parameters and constant buffers, by name, in which rows differ.
        """
        return Forward(self, buffers, train, keys, 0, many, per_row or {})

    def call(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        *,
        seen: bool = False,
        module: nn.Module | None = None,
    ) -> Tensor:
        """The module's forward with these tensors in place of its parameters and buffers.

        `seen`: the representation beside the outputs, in one tensor. `module`: run this one instead, which has the same
        parameters under the same names.
        """
        if seen:
            with recorded_inputs(self.module.get_submodule(self.head)) as representations:
                outputs = self.call(parameters, buffers, x, module=module)
            return torch.cat([outputs, representations[-1].to(outputs.dtype)], -1)
        if self.layout.pixelwise and not self.channels_last:  # a user's `view` may need outputs as usual in memory
            parameters = {name: parameter.flatten().view(parameter.shape) for name, parameter in parameters.items()}
        tensors = {**parameters, **buffers}
        tensors |= {further: tensors[name] for further, name in self.layout.tied if name in tensors}
        module = self.module if module is None else module
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if x.is_floating_point() and x.dtype != self.start.dtype:
            x = x.to(self.start.dtype)  # a batch in the form that a program's first layer reads
        arguments, keywords = unpacked(self.parts, x) if self.parts else ((x,), {})
        if self.products is None:
            outputs = functional_call(module, tensors, arguments, keywords, tie_weights=False)
        else:
            with torch.autocast(x.device.type, self.products, cache_enabled=False):
                outputs = functional_call(module, tensors, arguments, keywords, tie_weights=False)
            outputs = outputs.to(self.start.dtype) if isinstance(outputs, Tensor) else outputs
        if self.module.training:
            for name, buffer in buffers.items():
                if tensors[name] is not buffer:  # the module has put another tensor in its place
                    buffer.copy_(tensors[name].detach())
        return outputs

    def losses(self, row: Tensor, buffers: Rows, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each example, `[B]`, under one row `[P]`."""
        tensors = {name: rows[0] for name, rows in buffers.items()}
        return self.criterion(self.call(self.layout.unflatten(row), tensors, x), y)

    def fisher(self, row: Tensor, buffers: Rows, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Mean square of the examples' gradients, `[1, P]`, one example after another, in evaluation mode."""
        self.set_mode(False)
        total, examples = torch.zeros_like(row), 0
        for x, y in chunks:
            total = total + self.squared_gradients(row, buffers, x, y)
            examples += len(x)
        return total / max(examples, 1)

    def squared_gradients(self, row: Tensor, buffers: Rows, x: Tensor, y: Tensor) -> Tensor:
        """Sum over examples of the squares of their gradients, `[1, P]`."""
        total = torch.zeros_like(row)
        for k in range(len(x)):
            with torch.enable_grad():
                leaf = row[0].detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.losses(leaf, buffers, x[k : k + 1], y[k : k + 1]).sum(), leaf)
            total = total + gradient.square()
        return total

    def set_mode(self, train: bool) -> None:
        if self._training == train == self.module.training:
            return
        self.module.train(train)
        if self.frozen_statistics:
            for part in self.module.modules():
                if isinstance(part, nn.modules.batchnorm._NormBase):
                    part.eval()
        self._training = train


def _shapes(outputs: Tensor, y: Tensor) -> str:
    return f"outputs {list(outputs.shape)} and targets {list(y.shape)} ({y.dtype})"


def _hint(shape: tuple[int, ...], reason: str) -> str:
    """What happens to examples on their way to a model, where that may be the reason."""
    if "indices" in reason or "Long" in reason:
        return (
            "; bytes and floating point inputs arrive as floating point numbers: give token ids as int64, with "
            "data.normalise = 'none'"
        )
    if "index out of range" in reason or "device-side assert" in reason:
        return "; token ids must reach an Embedding unscaled, and be less than its size: set data.normalise = 'none'"
    if "same device" in reason or "dtype" in reason or "scalar type" in reason:
        return (
            "; tensors that are neither parameters nor buffers keep their device and precision: register_buffer() them"
        )
    if len(shape) == 2:
        return "; arrays [N, H, W] arrive as they are: data.images = true makes them images of one channel"
    return ""


def rows_around(net: Net, rows: int) -> Tensor:
    """Rows around the starting point, `[K, P]`, as far from it as each parameter is long."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((rows, net.layout.total), generator=generator).to(net.start)
    parts = zip(net.start.split(net.layout.sizes, 1), noise.split(net.layout.sizes, 1), net.layout.shapes, strict=True)
    moved = []
    for start, change, shape in parts:
        length = float(start.square().mean().sqrt()) or (shape[0] / max(shape.numel(), 1)) ** 0.5
        moved.append(start + 0.5 * length * change)
    return torch.cat(moved, 1)
