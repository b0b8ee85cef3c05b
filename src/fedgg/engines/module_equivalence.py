"""Whether a faster form of a user's module computes the same function: its exact structure first, then its numbers.

Structure: a part counts as torch's own layer only when calling it runs that layer's `forward` and nothing else. Types
are compared exactly, since a subclass may compute anything; hooks, parametrizations and methods set on an instance rule
a part out. Numbers: outputs and gradients of both forms are compared on a probe batch, in training and in evaluation
mode, with the same dropout masks, in float64 on a copy of the module, so that neither buffers nor random generators of
the run are touched. Weights of the probe are drawn around the starting point: a layer that starts at zero would hide
what stands before it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedgg.core.client_rows import Rows
from fedgg.core.net import Net, normal_numbers, rows_around
from fedgg.core.sampling import unchanged_generators
from fedgg.engines.flops import multiply_adds

EXACT = 1e-9  # relative difference allowed in float64: a thousand times more than rounding makes in a deep model
ROUGH = 1e-3  # in float32, for modules that do not run in float64
SMALL_SHARE = 1e-3  # of the largest gradient: what is smaller is measured against this much of it
LARGE = 20e6  # multiply-adds an example
WIDE = 8  # times the probe batch: a batch of many examples
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
    """The parts of nested plain `nn.Sequential`s as often as they run, with the prefix of their parameters' names.

    `named_children()` lists a module that stands in two places once.
    """
    if not is_plain(module, nn.Sequential):
        yield prefix, module
        return
    for name, part in module._modules.items():
        if part is not None:
            yield from parts_in_order(part, f"{prefix}{name}.")


def shares_parameters(module: nn.Module) -> bool:
    """Whether a parameter stands under two names."""
    return len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))


@dataclass(frozen=True)
class Trial:
    """A copy of a net with what it is tried on; `rows` models, all different."""

    net: Net
    w: Tensor  # [K, P]
    x: Tensor  # [K, B, ...]
    keys: Tensor  # [K, 1] of the dropout masks
    tolerance: float
    large: bool = False

    @classmethod
    def of(cls, net: Net, rows: int = 1) -> Trial | None:
        """In float64 where the module runs in it, else in its own precision; None where no copy of it runs.

        A large model on a CPU, where float64 takes seconds, is tried in its own precision.
        """
        if net.sample is None:
            return None
        rough = (net.start.dtype, EXACT if net.start.dtype == torch.float64 else ROUGH)
        large = multiply_adds(net) > LARGE and not net.start.is_cuda
        for dtype, tolerance in [rough] if large else [(torch.float64, EXACT), rough]:
            try:
                twin = _copied(net, dtype)
                w = rows_around(net, rows).to(dtype)
                keys = torch.arange(1, rows + 1, device=w.device)[:, None]
                sample = net.sample.to(dtype) if net.sample.is_floating_point() else net.sample
                for x in [sample] if large else _inputs(sample, tokens=takes_tokens(net)):
                    trial = cls(twin, w, x.expand(rows, *x.shape), keys, tolerance, large)
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
        """Each row by itself, by the module's own forward or as another net runs it; buffers are moved in place."""
        outputs = []
        for k in range(len(w)):
            rows = {name: value[k : k + 1] for name, value in (buffers or self.buffers()).items()}
            forward = (net or self.net).bind(rows, train=train, keys=self.keys[k : k + 1] if train else None)
            forward.at_step(STEP)
            outputs.append(forward(w[k : k + 1], x[k : k + 1]))
        return torch.cat(outputs)

    def together(self, w: Tensor, train: bool, x: Tensor) -> Tensor:
        """All rows at once, as a stack runs them."""
        forward = self.net.bind(self.buffers(), train=train, keys=self.keys if train else None)
        forward.at_step(STEP)
        return forward(w, x)

    def buffers(self) -> Rows:
        """Fresh copies of the starting ones for every row."""
        return {name: torch.cat([rows] * len(self.w)) for name, rows in self.net.start_buffers.items()}

    def measured(self, run: Callable[[Tensor, bool], Tensor], examples: int | None = None) -> list[Tensor]:
        """Outputs, and the gradient of each parameter, in both modes; only of the first examples, if so many are named.

        The others get no gradient, as examples that are padding get none. Of a large model gradients are taken in
        training mode alone.
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
                raise ArithmeticError("nothing can be told by numbers that are not finite")
            results += [outputs.detach(), *self.net.layout.unflatten(gradient).values()]
        return results

    def outputs(self, x: Tensor, which: slice) -> list[Tensor]:
        """Of some examples of a batch, in both modes."""
        with torch.no_grad():
            return [self.alone(self.w, train, x)[:, which] for train in (True, False)]

    def with_buffers(self, net: Net) -> list[Tensor]:
        """What this net gives, and the buffers it leaves behind."""
        buffers = self.buffers()
        results = self.measured(partial(self.alone, x=self.x, buffers=buffers, net=net))
        return [*results, *buffers.values()]


def mixes_examples(net: Net) -> bool:
    """Whether what is computed for an example depends on its batch, so that batches must not be padded."""
    mixes: bool | None = net.facts.get("mixes examples")
    if mixes is None:
        trial = Trial.of(net)
        mixes = net.facts["mixes examples"] = trial is None or _depends_on_batch(trial)
    return mixes


def is_stackable(net: Net) -> bool:
    """Whether many rows, with padded batches, can be run as one by `torch.func.vmap`, with the same numbers."""
    stackable: bool | None = net.facts.get("stackable")
    if stackable is None:
        alone = net.keeps_statistics or net.draws_random_numbers or net.facts.get("mixes examples")
        trial = None if alone else Trial.of(net, rows=2)
        stackable = net.facts["stackable"] = trial is not None and not _depends_on_batch(trial, together=True)
        if stackable:
            net.facts["mixes examples"] = False
    return stackable


def _depends_on_batch(trial: Trial, *, together: bool = False) -> bool:
    """Whether what is computed for an example depends on the others of its batch, or on how many they are.

    Found out by trying, since any `forward` may take a mean over its batch: outputs and gradients of a batch are
    compared with those of the same examples in a longer one, whose other examples get no gradient. These are chosen so
    that they show: copies, as padding has them, inputs far outside the data, and NaN, which passes through products,
    sums and maxima however little they weigh. A batch of many examples is tried as well, for modules that treat short
    ones differently. `together`: whether this, or running all rows as one, changes anything.
    """
    x, examples, tokens = trial.x, trial.x.shape[1], takes_tokens(trial.net)
    far = [] if tokens else [normal_numbers(x.shape, x, 2) * 10 * _width(x) - x]
    others = torch.cat([x[:, :1], *_taken(trial, [*far, _reversed(x)])], 1)
    longer, many = torch.cat([x, others], 1), torch.cat([x] * WIDE, 1)
    run = partial(trial.together if together else trial.alone, x=longer)
    alone = partial(trial.measured, partial(trial.alone, x=x))
    if not agree(alone, partial(trial.measured, run, examples), trial.tolerance):
        return True
    shown = slice(others.shape[1], None)
    pairs = [
        (torch.cat([x[:, :1].expand_as(others), x], 1), torch.cat([others, x], 1), shown),
        (many, torch.cat([many, others], 1), slice(many.shape[1])),
    ]
    undefined = _taken(trial, [] if tokens else [torch.full_like(x, torch.nan)])
    pairs += [(x, torch.cat([x, other], 1), slice(examples)) for other in undefined]
    return not all(
        agree(partial(trial.outputs, short, which), partial(trial.outputs, long, which), trial.tolerance)
        for short, long, which in pairs
    )


def _taken(trial: Trial, batches: list[Tensor]) -> Iterator[Tensor]:
    """Those that the module takes, which need not be any numbers."""
    for x in batches:
        try:
            with unchanged_generators():
                trial.outputs(x, slice(None))
        except Exception:  # a user's module may raise anything
            continue
        yield x


def _reversed(x: Tensor) -> Tensor:
    """The same numbers of each example in the opposite order."""
    return x.flip(list(range(2, x.ndim)))


def _width(x: Tensor) -> float:
    return (float(x.std()) if x.numel() > 1 else 0.0) or 1.0


def agree(
    reference: Callable[[], Sequence[Tensor]], candidate: Callable[[], Sequence[Tensor]], tolerance: float
) -> bool:
    """Whether two computations give the same tensors; one that fails agrees with nothing."""
    try:
        with unchanged_generators():
            torch.manual_seed(0)
            expected = reference()
            torch.manual_seed(0)
            actual = candidate()
    except Exception:  # a user's module may raise anything
        return False
    lengths = [float(one.double().norm()) for one in expected]
    largest = max((length for length in lengths if math.isfinite(length)), default=0.0)
    return len(expected) == len(actual) and all(
        _close(a, b, tolerance, SMALL_SHARE * largest) for a, b in zip(expected, actual, strict=True)
    )


def _close(expected: Tensor, actual: Tensor, tolerance: float, least: float) -> bool:
    if expected.shape != actual.shape:
        return False
    expected, actual = expected.double(), actual.double()
    gap, length = float((expected - actual).norm()), float(expected.norm())
    if math.isfinite(gap) and math.isfinite(length):
        return gap <= tolerance * max(length, least)
    finite = expected.isfinite()
    if not torch.equal(
        torch.where(finite, 0, expected).nan_to_num(9.0), torch.where(finite, 0, actual).nan_to_num(9.0)
    ):
        return False  # infinities and NaN stand in the same places: a mask in a buffer may hold them
    gap, length = (float(torch.where(finite, one, 0).norm()) for one in (expected - actual, expected))
    return gap <= tolerance * max(length, least)


def _copied(net: Net, dtype: torch.dtype) -> Net:
    twin = Net.__new__(Net)
    vars(twin).update(vars(net), facts={})
    twin.module = copy.deepcopy(net.module).to(dtype)
    twin.start = net.start.to(dtype)
    twin.start_buffers = {
        name: rows.to(dtype) if rows.is_floating_point() else rows.clone() for name, rows in net.start_buffers.items()
    }
    twin.products = None
    twin._training = None
    return twin


def _inputs(sample: Tensor, tokens: bool) -> Iterator[Tensor]:
    """Batches to be tried: the sample with noisy copies, or for inputs that cannot be noisy, by itself."""
    if not tokens:
        yield torch.cat([sample, sample + normal_numbers(sample.shape, sample, 1) * _width(sample)])
    yield torch.cat([sample, sample.flip(0)])


def takes_tokens(net: Net) -> bool:
    """Whether inputs are indices, which must not be changed: one out of range ends every further use of a GPU."""
    return embeds(net.module) or (net.sample is not None and not net.sample.is_floating_point())


def embeds(module: nn.Module) -> bool:
    """Whether there is an `nn.Embedding` in it."""
    return any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())
