"""Laws that the hooks of every algorithm must keep, each checked on its own."""

from __future__ import annotations

import difflib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgg.check.toy_problems import Standing, ToyClient, aggregated, play, server_of, small_net, train_rows
from fedgg.core.algorithm import Algorithm, Batch, Client, Server
from fedgg.core.client_rows import Assigned, Rows, assigns, check_sparse
from fedgg.core.local import LocalEnd
from fedgg.errors import UserError
from fedgg.files import read_bytes


class Broken(Exception):
    """The property does not hold; the message says where."""


class Skipped(Exception):
    """The property does not apply to this algorithm; the message says why."""


def demand(truth: bool, otherwise: str) -> None:
    if not truth:
        raise Broken(otherwise)


def demand_equal(a: Tensor, b: Tensor, what: str, tolerance: float = 0.0) -> None:
    """Equal bit for bit, or within a tolerance, which is relative for numbers larger than one."""
    demand(a.shape == b.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if tolerance == 0:
        demand(torch.equal(a, b), f"{what}: differs by up to {_gap(a, b):.3g}, must be equal")
    else:
        size = max(1.0, float(b.double().abs().max()) if b.numel() else 0.0)
        demand(_gap(a, b) <= tolerance * size, f"{what}: differs by up to {_gap(a, b):.3g}, more than {tolerance:g}")


def demand_equal_rows(a: Rows, b: Rows, what: str, tolerance: float = 0.0) -> None:
    demand(a.keys() == b.keys(), f"{what}: names {sorted(a)} and {sorted(b)}")
    for name in a:
        demand_equal(a[name], b[name], f"{what}[{name!r}]", tolerance)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


ROUNDING = 1e-12  # float64, a handful of steps, another order of summation
HOOKS = ("broadcast", "send_down", "begin", "loss", "terms", "steer", "nudge", "finish", "diagnostics", "aggregate")
WATCHED = (*HOOKS, "server_memory", "client_memory")
NAMES = (*WATCHED, "sparse_up", "sparse_down")
Hook = Callable[..., Any]
Around = Callable[[str, Hook, Algorithm], Hook]  # by its name and its algorithm: a hook with a look at what it does


def _clients() -> list[ToyClient]:
    return [ToyClient.draw(0, 13), ToyClient.draw(1, 4), ToyClient.draw(2, 22)]


def _after_two_rounds(algorithm: Algorithm) -> Standing:
    """A standing in which there is a last global update and every memory has content."""
    return _after_rounds(algorithm, _clients())


def _after_rounds(algorithm: Algorithm, clients: list[ToyClient], rounds: int = 2) -> Standing:
    net = small_net()
    standing = Standing.at_start(algorithm, net, len(clients))
    for _ in range(rounds):
        standing, _ = play(algorithm, net, standing, clients)
    return standing


def _side_by_side(algorithm: Algorithm, worlds: list[list[ToyClient]], rounds: int = 2) -> list[Standing]:
    """Several runs in one process, in turns: the clients of all of them train before a server aggregates."""
    net = small_net()
    standings = [Standing.at_start(algorithm, net, len(clients)) for clients in worlds]
    for _ in range(rounds):
        both = list(zip(standings, worlds, strict=True))
        ends = [train_rows(algorithm, net, at, clients, range(len(clients)), momentum=0.9) for at, clients in both]
        standings = [
            aggregated(algorithm, net, at, clients, end) for (at, clients), end in zip(both, ends, strict=True)
        ]
    return standings


def _demand_same(one: Standing, other: Standing, what: str) -> None:
    for name, a, b in (("w", {"w": one.w}, {"w": other.w}), ("the server's memory", one.server, other.server)):
        demand_equal_rows(a, b, f"{what}: {name}")
    for a, b in zip(one.clients, other.clients, strict=True):
        demand_equal_rows(a, b, f"{what}: a client's memory")


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
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
        demand(name in dir(Algorithm) or not near, f"{name}() is no function of the interface: did you mean {near}?")
    demand(bool((type(algorithm).__doc__ or "").strip()), "it has no docstring saying how it differs from FedAvg")


def arguments_are_left_alone(algorithm: Algorithm) -> None:
    """No hook writes into what it is given: state that is shared must not change behind anybody's back."""
    net, clients, watched = small_net(), _clients(), _watched(algorithm, _comparing_arguments)
    standing = Standing.at_start(watched, net, len(clients))
    for _ in range(3):
        standing, _ = play(watched, net, standing, clients)


def the_same_again(algorithm: Algorithm) -> None:
    """Nothing is remembered outside the rows and nothing is drawn at random: hook by hook, and over whole runs."""
    with _generators_at_rest():
        _after_rounds(_watched(algorithm, _calling_twice), _clients())
    worlds = [[ToyClient.draw(3, 5), ToyClient.draw(4, 8)], [ToyClient.draw(5, 9), ToyClient.draw(6, 4)]]
    alone = [_after_rounds(algorithm, clients) for clients in worlds]
    for one, beside in zip(alone, _side_by_side(algorithm, worlds), strict=True):
        _demand_same(beside, one, "two runs side by side and one after the other")
    again = _read_again(algorithm)
    if again is not None:
        _demand_same(_after_rounds(again, worlds[1]), alone[1], "in a process that has run nothing else, and here")


def rows_are_independent(algorithm: Algorithm) -> None:
    """Alone is the same as stacked with others that take more steps or bring fewer examples."""
    standing = _after_two_rounds(algorithm)
    stacked = _ends(algorithm, standing, [0, 1, 2])
    for row in range(3):
        alone = _ends(algorithm, standing, [row])
        together = {name: tensor[row : row + 1] for name, tensor in stacked.items()}
        where = f"client {row} alone and in a stack (no mean over dimension 0, and scalars are [K, 1], not [K])"
        demand_equal_rows(alone, together, where, ROUNDING)


def declared_messages(algorithm: Algorithm) -> None:
    """Messages that are declared sparse have no more values that are not zero than declared."""
    net, clients = small_net(), _clients()
    who, standing = type(algorithm).__name__, Standing.at_start(algorithm, net, len(clients))
    up, down = (declared(net.layout.total) for declared in (algorithm.sparse_up, algorithm.sparse_down))
    if not up and not down:
        raise Skipped("it declares no sparse messages")
    for _ in range(3):
        sent_down = algorithm.send_down(standing.w, server_of(standing, net, clients))
        standing, end = play(algorithm, net, standing, clients)
        try:
            check_sparse(sent_down, down, f"{who}.sparse_down()")
            check_sparse(end.up, up, f"{who}.sparse_up()")
        except UserError as error:
            raise Broken(str(error)) from error


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
    net, clients = small_net(), [ToyClient.draw(number, 7, flat=True) for number in range(2)]
    with torch.no_grad():
        net.start.zero_()
    standing = Standing.at_start(algorithm, net, len(clients))
    for _ in range(3):
        standing, end = play(algorithm, net, standing, clients)
        _demand_finite(end, standing)


def a_client_of_one_example(algorithm: Algorithm) -> None:
    net, clients = small_net(), [ToyClient.draw(0, 1), ToyClient.draw(1, 9)]
    standing = Standing.at_start(algorithm, net, len(clients))
    for _ in range(3):
        standing, end = play(algorithm, net, standing, clients)
        _demand_finite(end, standing)


def _demand_finite(end: LocalEnd, standing: Standing) -> None:
    for name, tensor in {**end.up, **end.memory, **end.diagnostics, "w": standing.w}.items():
        demand(bool(torch.isfinite(tensor).all()), f"{name} is not finite")


def _ends(algorithm: Algorithm, standing: Standing, rows: list[int]) -> Rows:
    end = train_rows(algorithm, small_net(), standing, _clients(), rows, momentum=0.9)
    parts = {"up": end.up, "memory": end.memory, "diagnostics": end.diagnostics}
    return {f"{part} {name}": tensor for part, named in parts.items() for name, tensor in named.items()}


@dataclass(frozen=True)
class _Watched(Algorithm):
    """Passes every call on, with a look at what the hook does."""

    inner: Algorithm
    around: Around

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Algorithm, name):
            return object.__getattribute__(self, name)
        inner = object.__getattribute__(self, "inner")
        hook = getattr(inner, name)
        if name not in WATCHED:
            return hook
        plain_steer = name == "steer" and type(inner).steer is Algorithm.steer  # which does no more than call terms()
        around: Around = object.__getattribute__(self, "around")
        return around("terms" if plain_steer else name, hook, inner)


def _watched(algorithm: Algorithm, around: Around) -> Algorithm:
    kind = type(type(algorithm).__name__, (_Watched,), {})  # messages call it as what it watches
    watched: Algorithm = kind(algorithm, around)
    return watched


def _comparing_arguments(name: str, hook: Hook, algorithm: Algorithm) -> Hook:
    def call(*arguments: Any) -> Any:
        tensors = [(label, tensor, tensor.detach().clone()) for label, tensor in _tensors(arguments)]
        mappings = [(label, rows, dict(rows)) for label, rows in _mappings(arguments)]
        settings = dict(vars(algorithm))
        try:
            result = hook(*arguments)
        except Assigned as error:
            raise Broken(f"{name}() {assigns(error.args[0])}") from error
        for label, rows, before in mappings:
            for key in before.keys() | rows.keys():
                demand(rows.get(key) is before.get(key), f"{name}() {assigns(f'{label}[{key!r}]')}")
        for label, tensor, copy in tensors:
            same = torch.allclose(tensor.detach(), copy, rtol=0, atol=0, equal_nan=True)
            demand(same, f"{name}() changes {label}: write `a = a + b`, not `a += b`")
        for key, value in vars(algorithm).items():
            demand(value is settings.get(key), f"{name}() assigns self.{key}: keep what changes in rows")
        return result

    return call


def _calling_twice(name: str, hook: Hook, algorithm: Algorithm) -> Hook:
    def call(*arguments: Any) -> Any:
        before = _generator_states()
        result = hook(*arguments)
        moved = " and ".join(whose for whose, state in _generator_states().items() if state != before[whose])
        demand(not moved, f"{name}() draws from {moved} global random numbers: runs would not repeat")
        demand(
            _same(result, hook(*arguments)),
            f"{name}() gives something else when it is called again with the same arguments: nothing may be "
            f"remembered outside the rows",
        )
        return result

    return call


@contextmanager
def _generators_at_rest() -> Iterator[None]:
    """The global generators at a place to which no algorithm would set them, and back."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    place = 20_220_725
    torch.manual_seed(place)
    np.random.seed(place)
    random.seed(place)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _generator_states() -> dict[str, Any]:
    _, key, *rest = np.random.get_state()
    return {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "NumPy's": (np.asarray(key).tobytes(), *rest),
        "Python's": random.getstate(),
    }


def _same(one: Any, other: Any) -> bool:
    """Bit for bit, NaN included, through dicts and tuples."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _read_again(algorithm: Algorithm) -> Algorithm | None:
    """The algorithm from its file read once more, so that its module remembers nothing; None where that cannot be."""
    kind = type(algorithm)
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or kind.__qualname__ != kind.__name__:
        return None
    again = ModuleType(f"{module.__name__}_again")
    vars(again).update(__file__=file, __package__=module.__package__)
    sys.modules[again.__name__] = again  # dataclasses look their module up there
    try:
        text = getattr(module, "__text__", None) or read_bytes(Path(file)).decode("utf-8")
        exec(compile(text, file, "exec"), vars(again))
        made: Algorithm = getattr(again, kind.__name__)(**{f.name: getattr(algorithm, f.name) for f in fields(kind)})
    except Exception:  # a file that can be read only once is no fault of the algorithm
        return None
    finally:
        del sys.modules[again.__name__]
    return made


def _mappings(arguments: tuple[Any, ...]) -> Iterator[tuple[str, Rows]]:
    for argument in arguments:
        if isinstance(argument, dict):
            yield getattr(argument, "label", "the rows it is given"), argument
        elif isinstance(argument, Client | Server):
            named = ((field.name, getattr(argument, field.name)) for field in fields(argument))
            yield from (
                (f"{type(argument).__name__.lower()}.{name}", rows) for name, rows in named if isinstance(rows, dict)
            )


def _tensors(arguments: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    for label, rows in _mappings(arguments):
        yield from ((f"{label}[{key!r}]", tensor) for key, tensor in rows.items())
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield "a tensor it was given", argument
        elif isinstance(argument, Client | Server | Batch):
            for field in fields(argument):
                if isinstance(value := getattr(argument, field.name), Tensor):
                    yield f"{type(argument).__name__.lower()}.{field.name}", value
