"""What the hooks of an algorithm must keep, each looked at on its own."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedgg.check.bench import Client, Standing, play, small_net, train_rows
from fedgg.check.verdict import Broken, Skipped, demand, demand_equal_rows
from fedgg.core.algorithm import Algorithm, Batch, Hub, Site
from fedgg.core.local import LocalEnd
from fedgg.core.rows import Rows

ROUNDING = 1e-12  # float64, a handful of steps, another order of summation
HOOKS = ("broadcast", "send_down", "begin", "loss", "terms", "steer", "nudge", "finish", "readings", "aggregate")


def _clients() -> list[Client]:
    return [Client.draw(0, 13), Client.draw(1, 4), Client.draw(2, 22)]


def _after_two_rounds(algorithm: Algorithm) -> Standing:
    """A standing in which there is a last global update and every memory has content."""
    net, clients = small_net(), _clients()
    standing = Standing.at_start(algorithm, net, len(clients))
    for _ in range(2):
        standing, _ = play(algorithm, net, standing, clients)
    return standing


def fields_are_settings(algorithm: Algorithm) -> None:
    """A frozen dataclass whose fields are numbers, switches or words."""
    # Asked of the class itself: a forgotten decorator would be hidden by the one it inherits from.
    own = vars(type(algorithm)).get("__dataclass_params__")
    demand(own is not None and own.frozen, "it is no frozen dataclass: decorate it with @dataclass(frozen=True)")
    for field in fields(algorithm):
        documented = {"about", "origin"} <= field.metadata.keys()
        demand(
            documented, f"{field.name} does not say what it is: {field.name} = fedgg.setting(default, about, origin)"
        )
        value = getattr(algorithm, field.name)
        demand(isinstance(value, int | float | str | bool | Tensor), f"{field.name} is a {type(value).__name__}")
    for name in vars(type(algorithm)):
        near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.75)
        demand(name in dir(Algorithm) or not near, f"{name}() is no function of the interface: did you mean {near}?")
    demand(bool((type(algorithm).__doc__ or "").strip()), "it has no docstring saying how it differs from FedAvg")


def arguments_are_left_alone(algorithm: Algorithm) -> None:
    """No hook writes into what it is given: state that is shared must not change behind anybody's back."""
    net, clients = small_net(), _clients()
    watched = type(type(algorithm).__name__, (_Watched,), {})(algorithm)  # called as what it watches
    standing = Standing.at_start(watched, net, len(clients))
    for _ in range(3):
        standing, _ = play(watched, net, standing, clients)


def the_same_again(algorithm: Algorithm) -> None:
    """Nothing is remembered outside the rows and nothing is drawn at random."""
    standing = _after_two_rounds(algorithm)
    first = _ends(algorithm, standing, [0, 1, 2])
    demand_equal_rows(first, _ends(algorithm, standing, [0, 1, 2]), "a second call")


def rows_are_independent(algorithm: Algorithm) -> None:
    """Alone is the same as stacked with others that take more steps or bring fewer examples."""
    standing = _after_two_rounds(algorithm)
    stacked = _ends(algorithm, standing, [0, 1, 2])
    for row in range(3):
        alone = _ends(algorithm, standing, [row])
        together = {name: tensor[row : row + 1] for name, tensor in stacked.items()}
        where = f"client {row} alone and in a stack (no mean over dimension 0, and scalars are [K, 1], not [K])"
        demand_equal_rows(alone, together, where, ROUNDING)


def settings_may_be_columns(algorithm: Algorithm) -> None:
    """A number may be a `[K, 1]` column: each row then trains with its own."""
    numbers = [f.name for f in fields(algorithm) if isinstance(getattr(algorithm, f.name), float)]
    if not numbers:
        raise Skipped("it has no numeric settings")
    standing = _after_two_rounds(algorithm)
    for name in numbers:
        value = float(getattr(algorithm, name))
        values = [value, 0.5 * value + 0.01, 0.3]
        column = torch.tensor([[number] for number in values], dtype=torch.float64)
        try:
            stacked = _ends(replace(algorithm, **{name: column}), standing, [0, 1, 2])
        except RuntimeError as error:
            raise Broken(f"{name} as a column [K, 1] fails, so no `if self.{name}`: {error}") from error
        for row, number in enumerate(values):
            alone = _ends(replace(algorithm, **{name: number}), standing, [row])
            together = {key: tensor[row : row + 1] for key, tensor in stacked.items()}
            demand_equal_rows(alone, together, f"{name} as a column, row {row}", ROUNDING)


def finite_at_zero_drift(algorithm: Algorithm) -> None:
    """A model that no gradient moves stays where it is, or at least finite: nothing divides by a length of zero."""
    net, clients = small_net(), [Client.draw(number, 7, flat=True) for number in range(2)]
    with torch.no_grad():
        net.start.zero_()
    standing = Standing.at_start(algorithm, net, len(clients))
    for _ in range(3):
        standing, end = play(algorithm, net, standing, clients)
        _demand_finite(end, standing)


def a_client_of_one_example(algorithm: Algorithm) -> None:
    net, clients = small_net(), [Client.draw(0, 1), Client.draw(1, 9)]
    standing = Standing.at_start(algorithm, net, len(clients))
    for _ in range(3):
        standing, end = play(algorithm, net, standing, clients)
        _demand_finite(end, standing)


def _demand_finite(end: LocalEnd, standing: Standing) -> None:
    for name, tensor in {**end.up, **end.memory, **end.readings, "w": standing.w}.items():
        demand(bool(torch.isfinite(tensor).all()), f"{name} is not finite")


def _ends(algorithm: Algorithm, standing: Standing, rows: list[int]) -> Rows:
    end = train_rows(algorithm, small_net(), standing, _clients(), rows, momentum=0.9)
    parts = {"up": end.up, "memory": end.memory, "readings": end.readings}
    return {f"{part} {name}": tensor for part, named in parts.items() for name, tensor in named.items()}


@dataclass(frozen=True)
class _Watched(Algorithm):
    """Passes every call on, and looks whether the tensors handed over are the same afterwards."""

    inner: Algorithm

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner" or not hasattr(Algorithm, name):
            return object.__getattribute__(self, name)
        hook = getattr(object.__getattribute__(self, "inner"), name)
        return _watching(name, hook) if name in HOOKS else hook


def _watching(name: str, hook: Any) -> Any:
    def call(*arguments: Any) -> Any:
        before = [(label, tensor, tensor.detach().clone()) for label, tensor in _tensors(arguments)]
        result = hook(*arguments)
        for label, tensor, copy in before:
            if not torch.allclose(tensor.detach(), copy, rtol=0, atol=0, equal_nan=True):
                raise Broken(f"{name}() changes {label}: write `a = a + b`, not `a += b`")
        return result

    return call


def _tensors(arguments: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield "a tensor it was given", argument
        elif isinstance(argument, dict):
            yield from ((f"[{key!r}]", tensor) for key, tensor in argument.items())
        elif isinstance(argument, Site | Hub | Batch):
            for field in fields(argument):
                value = getattr(argument, field.name)
                if isinstance(value, Tensor):
                    yield f"{type(argument).__name__.lower()}.{field.name}", value
                elif isinstance(value, dict):
                    yield from ((f"{field.name}[{key!r}]", tensor) for key, tensor in value.items())
