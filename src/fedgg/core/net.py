"""A user's `nn.Module` as a function of rows: `[K, P]` parameters and `[K, B, ...]` inputs to `[K, B, ...]` outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgg.core.buffers import differs
from fedgg.core.criterion import Criterion, cross_entropy
from fedgg.core.effort import CountedProducts
from fedgg.core.equivalence import Trial, agree, mixes_examples, mixes_in_evaluation, unchanged_generators
from fedgg.core.forward import Forward, RowsForward
from fedgg.core.layout import Layout
from fedgg.core.masks import CountedMasks
from fedgg.core.quick import quickened
from fedgg.core.representation import heard
from fedgg.core.rows import Rows
from fedgg.errors import UserError


class Net:
    """The module, its layout and its loss. The module's own parameters are never read after construction."""

    def __init__(
        self,
        module: nn.Module,
        criterion: Criterion = cross_entropy,
        *,
        frozen_statistics: bool = False,
        products: torch.dtype | None = None,
    ):
        """`products`: what matrix products and convolutions take, if not what the module is made of."""
        self.module = module
        self._quick = module  # on a CPU, for one row: a quicker form, where it is found equal
        self.criterion = criterion
        self.layout = Layout.of(module)
        self.start = self.layout.flatten(dict(module.named_parameters()))
        self.start_buffers = self.layout.buffer_rows(module)
        self.frozen_statistics = frozen_statistics
        self.products = products
        self.channels_last = False
        self.multiply_adds = 0.0  # of a forward pass, an example
        self.activations = 0  # numbers in between, an example
        self.draws_random_numbers = True  # from torch's generators; what F.dropout drops is counted instead
        self.drops = True
        self.needs_two_examples = False
        self.needs_two_in_evaluation = False
        self.mixes_in_evaluation = False  # whether an example's outputs depend on others, in evaluation mode too
        self.sample: Tensor | None = None  # two examples, by which `examine` has looked at the module
        self.head = ""  # the layer whose input is the representation, where an algorithm asks for one
        self.moving = self.layout.buffers  # the buffers that training changes, as far as one step shows
        self.keeps_statistics = bool(self.moving)
        self._training: bool | None = None
        self._further_names = _further_names(module)
        self._mixes: bool | None = None
        self._stackable: bool | None = None
        self.squares_in_one_pass: bool | None = None  # `core.probe` finds it out when it is asked for the first time

    def examine(self, x: Tensor, classes: int) -> None:
        """Run two examples through the module: is its output right, does it draw random numbers, move buffers?

        Looking at what happens finds `F.dropout` in a user's `forward` as well as an `nn.Dropout`.
        """
        self._refuse_hooks_on_parameters()
        buffers = {name: rows.clone() for name, rows in self.start_buffers.items()}
        try:
            with torch.no_grad(), unchanged_generators():
                before = _generators(x)
                self.set_mode(True)
                own = {name: rows[0] for name, rows in buffers.items()}
                with CountedMasks(torch.zeros(1, dtype=torch.int64, device=x.device), 0) as masks:
                    outputs = self.call(self.layout.unflatten(self.start[0]), own, x)
                self.drops = masks.used > 0
                after = _generators(x)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shape = tuple(x.shape[1:])
            reason = str(error).splitlines()[0]
            complaint = f"{type(self.module).__name__} cannot take examples of shape {shape}: {reason}"
            raise UserError(complaint + _hint(shape, reason)) from error
        if not isinstance(outputs, Tensor):
            raise UserError(
                f"{type(self.module).__name__} returned a {type(outputs).__name__}, not a tensor: "
                f"wrap it so that forward() returns the logits [N, {classes}]"
            )
        self.draws_random_numbers = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if outputs.shape != (len(x), classes):
            raise UserError(
                f"{type(self.module).__name__} returned {tuple(outputs.shape)} for {len(x)} examples; "
                f"{classes} classes need [{len(x)}, {classes}]"
            )
        self.moving = tuple(name for name in buffers if differs(self.start_buffers[name], buffers[name]))
        self.keeps_statistics = bool(self.moving)
        self.needs_two_examples = self._fails_on_one(x[:1], classes, train=True)
        self.needs_two_in_evaluation = self._fails_on_one(x[:1], classes, train=False)
        self._refuse_random_evaluation(x)
        self.sample = x.detach().clone()
        self._mixes = self._stackable = self.squares_in_one_pass = None
        self.multiply_adds = self._count_work(x)
        self._quick = self._proven_quick()
        if self._quick is not self.module:
            self.multiply_adds = self._count_work(x)
        self.mixes_in_evaluation = mixes_in_evaluation(self, x)

    @property
    def mixes_examples(self) -> bool:
        """Whether what is computed for an example depends on its batch, so that batches must not be padded."""
        if self._mixes is None:
            trial = Trial.of(self)
            self._mixes = trial is None or mixes_examples(trial)
        return self._mixes

    @property
    def stackable(self) -> bool:
        """Whether many rows, with padded batches, can be run as one by `torch.func.vmap`, with the same numbers."""
        if self._stackable is None:
            alone = self.keeps_statistics or self.draws_random_numbers or self._mixes
            trial = None if alone else Trial.of(self, rows=2)
            self._stackable = trial is not None and not mixes_examples(trial, together=True)
            self._mixes = False if self._stackable else self._mixes
        return self._stackable

    def _count_work(self, x: Tensor) -> float:
        """Multiply-adds an example; and, on the way, how many numbers a forward pass of it leaves behind."""
        sizes: list[int] = [x[0].numel()]
        leaves = [part for part in self.module.modules() if not list(part.children())]
        counted = CountedProducts()
        hooks = [part.register_forward_hook(lambda _, __, y: sizes.append(_numel(y) // len(x))) for part in leaves]
        try:
            with torch.no_grad(), counted:
                self.bind(self.start_buffers, train=False)(self.start, x[None])
        finally:
            for hook in hooks:
                hook.remove()
        self.activations = sum(sizes)
        return counted.multiply_adds / len(x)

    def _fails_on_one(self, x: Tensor, classes: int, *, train: bool) -> bool:
        """Batch statistics of a single value do not exist: PyTorch refuses them."""
        buffers = {name: rows.clone() for name, rows in self.start_buffers.items()}
        try:
            with torch.no_grad(), unchanged_generators():
                outputs = self.bind(buffers, train=train)(self.start, x[None])
        except Exception:  # a user's module may raise anything
            return True
        return outputs.shape != (1, 1, classes)

    def _proven_quick(self) -> nn.Module:
        """The module's quicker form, if it has one and that computes the same."""
        self._quick = quickened(self.module)
        if self._quick is self.module or self.start.is_cuda:
            return self.module
        trial = Trial.of(self)
        same = trial is not None and agree(
            partial(trial.with_buffers, quick=False), partial(trial.with_buffers, quick=True), trial.tolerance
        )
        return self._quick if same else self.module

    def without_quick(self) -> Net:
        """The same net, run by the module's own forward alone."""
        if self._quick is self.module:
            return self
        twin = copy.copy(self)
        twin._quick = self.module
        return twin

    def _refuse_hooks_on_parameters(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UserError(
                    f"{type(self.module).__name__} has a hook on its parameter {name}, which would never be called, "
                    f"since clients train copies of it: change the gradient in forward() instead"
                )

    def _refuse_random_evaluation(self, x: Tensor) -> None:
        with torch.no_grad(), unchanged_generators():
            before = _generators(x)
            self.bind(self.start_buffers, train=False)(self.start, x[None])
            if any(not torch.equal(a, b) for a, b in zip(before, _generators(x), strict=True)):
                raise UserError(
                    f"{type(self.module).__name__} draws random numbers in evaluation too: "
                    f"write F.dropout(x, training=self.training)"
                )

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
        own: Rows | None = None,
    ) -> Forward:
        """The forward function of a round. In training the buffers given are updated in place.

        `keys` `[K, 1]` make the dropout masks; `many` is a faster way to run all rows, where an engine has one; `own`
        `[K, ...]` are frozen parameters and constant buffers, by name, in which rows differ.
        """
        return Forward(self, buffers, train, keys, 0, many, own or {})

    def call(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        *,
        quick: bool = False,
        seen: bool = False,
    ) -> Tensor:
        """The module's own forward with these tensors in place of its own; `quick` where nothing maps over it.

        `seen`: the representation beside the outputs, in one tensor.
        """
        if seen:
            with heard(self.module.get_submodule(self.head)) as representations:
                outputs = self.call(parameters, buffers, x, quick=quick)
            return torch.cat([outputs, representations[-1].to(outputs.dtype)], -1)
        tensors = {**parameters, **buffers}
        tensors |= {further: tensors[name] for further, name in self._further_names.items() if name in tensors}
        module = self._quick if quick and x.device.type == "cpu" else self.module
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self.products is None:
            outputs = functional_call(module, tensors, (x,), tie_weights=False)
        else:
            with torch.autocast(x.device.type, self.products, cache_enabled=False):
                outputs = functional_call(module, tensors, (x,), tie_weights=False)
            outputs = outputs.to(self.start.dtype) if isinstance(outputs, Tensor) else outputs
        if self.module.training:
            for name, buffer in buffers.items():
                if tensors[name] is not buffer:  # the module has put another tensor in its place
                    buffer.copy_(tensors[name].detach())
        return outputs

    @property
    def freezes(self) -> bool:
        """Whether there are normalisation layers with statistics, which a step would change and use otherwise."""
        return self.frozen_statistics and any(
            isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None
            for part in self.module.modules()
        )

    def set_mode(self, train: bool) -> None:
        if self._training == train == self.module.training:
            return
        self.module.train(train)
        if self.frozen_statistics:
            for part in self.module.modules():
                if isinstance(part, nn.modules.batchnorm._NormBase):
                    part.eval()
        self._training = train


def _hint(shape: tuple[int, ...], reason: str) -> str:
    """What happens to examples on their way to a model, where that may be the reason."""
    if "indices" in reason or "Long" in reason:
        return "; inputs arrive as floating point numbers: write x.long() in forward() and set data.normalise = 'none'"
    if "index out of range" in reason or "device-side assert" in reason:
        return "; token ids must reach an Embedding unscaled, and be less than its size: set data.normalise = 'none'"
    if "same device" in reason or "dtype" in reason or "scalar type" in reason:
        return (
            "; tensors that are neither parameters nor buffers keep their device and precision: register_buffer() them"
        )
    if len(shape) == 3 and shape[0] == 1:
        return "; examples of two dimensions arrive as images of one channel: write x.squeeze(1) in forward()"
    return ""


def _further_names(module: nn.Module) -> dict[str, str]:
    """Names under which a tensor stands in another module as well, and the first of them.

    `functional_call(tie_weights=True)` leaves the tensors it was given in a module that stands in two places.
    """
    owners, first = dict(module.named_modules(remove_duplicate=False)), dict[int, str]()
    places, further = set[tuple[int, str]](), dict[str, str]()
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        owner, _, attribute = name.rpartition(".")
        place = (id(owners[owner]), attribute)
        if place not in places and first.setdefault(id(tensor), name) != name:
            further[name] = first[id(tensor)]
        places.add(place)
    return further


def _numel(outputs: object) -> int:
    return outputs.numel() if isinstance(outputs, Tensor) else 0


def _generators(x: Tensor) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])]
