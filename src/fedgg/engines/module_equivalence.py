"""Whether a faster form of a user's module computes the same function: by its exact structure, then by its results.

Structure: a part counts as a torch layer only if calling it runs that layer's `forward` and nothing else. Types are
compared exactly, since a subclass may compute anything; hooks, parametrizations and methods set on an instance exclude
a part. Results: outputs and gradients of both forms are compared on a probe batch, in training and in evaluation mode,
with the same dropout masks, in float64 on a copy of the module, so that buffers and random generators of the run do not
change. The probe's weights are drawn around the initial ones: a layer initialised to zero would hide the layers before
it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedgg.core.model import Net, rows_around
from fedgg.core.random_choices import unchanged_generators
from fedgg.core.tensor_rows import Rows
from fedgg.engines.flops import multiply_adds

EXACT = 1e-9  # tolerated relative difference in float64: a thousand times the rounding error of a deep model
ROUGH = 1e-3  # in float32, for modules that do not run in float64
SMALL_SHARE = 1e-3  # smaller tensors are compared relative to this share of the largest one
LARGE = 20e6  # multiply-adds per example
WIDE = 8  # times the probe batch: size of a batch of many examples
STEP = 3  # number of the step whose dropout masks are used
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{hooks}" for hooks in HOOKS)


def is_plain(part: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling the part runs `kind.forward` on its registered parameters, and nothing else."""
    if type(part) is not kind or any(getattr(nn.modules.module, hooks) for hooks in GLOBAL_HOOKS):
        return False
    if any(getattr(part, hooks) for hooks in HOOKS) or part._compiled_call_impl is not None:
        return False
    return not any(
        isinstance(value, Tensor) or callable(getattr(kind, name, None)) for name, value in vars(part).items()
    )


def parts_in_order(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of nested plain `nn.Sequential`s in the order they run, with the prefix of their parameters' names.

    A module in two places is listed twice, unlike in `named_children()`.
    """
    if not is_plain(module, nn.Sequential):
        yield prefix, module
        return
    for name, part in module._modules.items():
        if part is not None:
            yield from parts_in_order(part, f"{prefix}{name}.")


def shares_parameters(module: nn.Module) -> bool:
    """Whether a parameter has two names."""
    return len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))


@dataclass(frozen=True)
class Trial:
    """A copy of a net, with `rows` different models and a batch to try it on."""

    net: Net
    w: Tensor  # [K, P]
    x: Tensor  # [K, B, ...]
    keys: Tensor  # [K, 1] of the dropout masks
    tolerance: float
    large: bool = False

    @classmethod
    def of(cls, net: Net, rows: int = 1) -> Trial | None:
        """In float64 if the module runs in it, else in the net's precision; None if no copy of the module runs.

        A large model on a CPU, where float64 takes seconds, is tried in the net's precision.
        """
        if net.sample is None:
            return None
        rough = (net.start.dtype, EXACT if net.start.dtype == torch.float64 else ROUGH)
        large = multiply_adds(net) > LARGE and not net.start.is_cuda
        for dtype, tolerance in [rough] if large else [(torch.float64, EXACT), rough]:
            try:
                net_copy = _copied(net, dtype)
                w = rows_around(net, rows).to(dtype)
                keys = torch.arange(1, rows + 1, device=w.device)[:, None]
                sample = net.sample.to(dtype) if net.sample.is_floating_point() else net.sample
                for x in [sample] if large else _inputs(sample, tokens=takes_tokens(net)):
                    trial = cls(net_copy, w, x.expand(rows, *x.shape), keys, tolerance, large)
                    if trial._runs():
                        return trial
            except Exception:  # a user's module may raise anything
                continue
        return None

    def _runs(self) -> bool:
        try:
            with torch.no_grad(), unchanged_generators():
                return bool(self.alone(self.w, True, self.x).isfinite().all())
        except Exception:  # a user's module may raise anything
            return False

    def alone(
        self, w: Tensor, train: bool, x: Tensor, buffers: Rows | None = None, *, net: Net | None = None
    ) -> Tensor:
        """Outputs of each row separately, by this net or by `net`; updates `buffers` in place."""
        outputs = []
        for k in range(len(w)):
            rows = {name: value[k : k + 1] for name, value in (buffers or self.buffers()).items()}
            forward = (net or self.net).bind(rows, train=train, keys=self.keys[k : k + 1] if train else None)
            forward.step = STEP
            outputs.append(forward(w[k : k + 1], x[k : k + 1]))
        return torch.cat(outputs)

    def together(self, w: Tensor, train: bool, x: Tensor) -> Tensor:
        """Outputs of all rows at once, as in a stack."""
        forward = self.net.bind(self.buffers(), train=train, keys=self.keys if train else None)
        forward.step = STEP
        return forward(w, x)

    def buffers(self) -> Rows:
        """Copies of the initial buffers, one per row."""
        return {name: torch.cat([rows] * len(self.w)) for name, rows in self.net.start_buffers.items()}

    def measured(self, run: Callable[[Tensor, bool], Tensor], examples: int | None = None) -> list[Tensor]:
        """Outputs, and the gradient of each parameter, in both modes; only of the first `examples`, if given.

        The other examples get no gradient, like padding. For a large model, gradients are taken in training mode only.
        """
        results = []
        for train in (True, False):
            leaf = self.w.detach().requires_grad_()
            with torch.set_grad_enabled(train or not self.large):
                outputs = run(leaf, train)[:, :examples]
            if not outputs.requires_grad:
                results.append(outputs)
                continue
            (gradient,) = torch.autograd.grad((outputs * normal_numbers(outputs.shape, outputs)).sum(), leaf)
            if not math.isfinite(float(outputs.detach().norm() + gradient.norm())):
                raise ArithmeticError("results that are not finite cannot be compared")
            results += [outputs.detach(), *self.net.layout.unflatten(gradient).values()]
        return results

    def outputs(self, x: Tensor, which: slice) -> list[Tensor]:
        """Outputs of some examples of a batch, in both modes."""
        with torch.no_grad():
            return [self.alone(self.w, train, x)[:, which] for train in (True, False)]

    def with_buffers(self, net: Net) -> list[Tensor]:
        """`measured` results of this net, and the buffers after them."""
        buffers = self.buffers()
        results = self.measured(partial(self.alone, x=self.x, buffers=buffers, net=net))
        return [*results, *buffers.values()]


def mixes_examples(net: Net) -> bool:
    """Whether the output for an example depends on its batch, so that batches must not be padded."""
    net = net if net.personal is None else net.personal.whole
    mixes: bool | None = net.facts.get("mixes examples")
    if mixes is None:
        trial = Trial.of(net)
        mixes = net.facts["mixes examples"] = trial is None or _depends_on_batch(trial)
    return mixes


def is_stackable(net: Net) -> bool:
    """Whether `torch.func.vmap` can run many rows with padded batches at once and give the same results."""
    net = net if net.personal is None else net.personal.whole
    stackable: bool | None = net.facts.get("stackable")
    if stackable is None:
        excluded = net.keeps_statistics or net.draws_random_numbers or net.facts.get("mixes examples")
        trial = None if excluded else Trial.of(net, rows=2)
        stackable = net.facts["stackable"] = trial is not None and not _depends_on_batch(trial, together=True)
        if stackable:
            net.facts["mixes examples"] = False
    return stackable


def _depends_on_batch(trial: Trial, *, together: bool = False) -> bool:
    """Whether the output for an example depends on the other examples of its batch, or on the size of the batch.

    This is tested by running the module, since any `forward` may take a mean over its batch: outputs and gradients of a
    batch are compared with those of the same examples in a longer batch, whose other examples get no gradient. The
    other examples are copies, as in padding, inputs far outside the data, and NaN, which passes through products, sums
    and maxima of any weight. A batch of many examples is tried too, for modules that treat short batches differently.
    With `together`, the longer batches are run for all rows at once, which is tested as well.
    """
    x, examples, tokens = trial.x, trial.x.shape[1], takes_tokens(trial.net)
    far = [] if tokens else [normal_numbers(x.shape, x, 2) * 10 * _width(x) - x]
    others = torch.cat([x[:, :1], *_accepted(trial, [*far, _reversed(x)])], 1)
    longer, large = torch.cat([x, others], 1), torch.cat([x] * WIDE, 1)
    run = partial(trial.together if together else trial.alone, x=longer)
    alone = partial(trial.measured, partial(trial.alone, x=x))
    if not agree(alone, partial(trial.measured, run, examples), trial.tolerance):
        return True
    last = slice(others.shape[1], None)
    pairs = [
        (torch.cat([x[:, :1].expand_as(others), x], 1), torch.cat([others, x], 1), last),
        (large, torch.cat([large, others], 1), slice(large.shape[1])),
    ]
    nan_batches = _accepted(trial, [] if tokens else [torch.full_like(x, torch.nan)])
    pairs += [(x, torch.cat([x, nan_batch], 1), slice(examples)) for nan_batch in nan_batches]
    return not all(
        agree(partial(trial.outputs, short, which), partial(trial.outputs, long, which), trial.tolerance)
        for short, long, which in pairs
    )


def _accepted(trial: Trial, batches: list[Tensor]) -> Iterator[Tensor]:
    """The batches that the module accepts: tokens, for instance, cannot be arbitrary numbers."""
    for x in batches:
        try:
            with unchanged_generators():
                trial.outputs(x, slice(None))
        except Exception:  # a user's module may raise anything
            continue
        yield x


def _reversed(x: Tensor) -> Tensor:
    """The values of each example in reverse order."""
    return x.flip(list(range(2, x.ndim)))


def _width(x: Tensor) -> float:
    return (float(x.std()) if x.numel() > 1 else 0.0) or 1.0


def agree(
    reference: Callable[[], Sequence[Tensor]], candidate: Callable[[], Sequence[Tensor]], tolerance: float
) -> bool:
    """Whether two computations give the same tensors; False if one of them raises an error."""
    try:
        with unchanged_generators():
            torch.manual_seed(0)
            expected = reference()
            torch.manual_seed(0)
            actual = candidate()
    except Exception:  # a user's module may raise anything
        return False
    norms = [float(tensor.double().norm()) for tensor in expected]
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    return len(expected) == len(actual) and all(
        _close(a, b, tolerance, SMALL_SHARE * largest) for a, b in zip(expected, actual, strict=True)
    )


def _close(expected: Tensor, actual: Tensor, tolerance: float, smallest_norm: float) -> bool:
    if expected.shape != actual.shape:
        return False
    expected, actual = expected.double(), actual.double()
    distance, norm = float((expected - actual).norm()), float(expected.norm())
    if math.isfinite(distance) and math.isfinite(norm):
        return distance <= tolerance * max(norm, smallest_norm)
    finite = expected.isfinite()
    if not torch.equal(
        torch.where(finite, 0, expected).nan_to_num(9.0), torch.where(finite, 0, actual).nan_to_num(9.0)
    ):
        return False  # infinities and NaN, which a mask in a buffer may hold, must be in the same places
    distance, norm = (float(torch.where(finite, tensor, 0).norm()) for tensor in (expected - actual, expected))
    return distance <= tolerance * max(norm, smallest_norm)


def _copied(net: Net, dtype: torch.dtype) -> Net:
    net_copy = Net.__new__(Net)
    vars(net_copy).update(vars(net), facts={}, row_module=None)
    net_copy.module = copy.deepcopy(net.module).to(dtype)
    net_copy.start = net.start.to(dtype)
    net_copy.start_buffers = {
        name: rows.to(dtype) if rows.is_floating_point() else rows.clone() for name, rows in net.start_buffers.items()
    }
    net_copy.products = None
    net_copy._training = None
    return net_copy


def _inputs(sample: Tensor, tokens: bool) -> Iterator[Tensor]:
    """Batches to try: the sample with noisy copies, then without noise; tokens without noise only."""
    if not tokens:
        yield torch.cat([sample, sample + normal_numbers(sample.shape, sample, 1) * _width(sample)])
    yield torch.cat([sample, sample.flip(0)])


def normal_numbers(shape: Sequence[int], like: Tensor, seed: int = 0) -> Tensor:
    """Normal numbers that are a function of the shape and the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(like)


def takes_tokens(net: Net) -> bool:
    """Whether inputs are indices, which must not be changed: one out of range ends every further use of a GPU."""
    return net.embeds or (net.sample is not None and not net.sample.is_floating_point())
