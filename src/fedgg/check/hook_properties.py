"""Properties of an algorithm's hooks, each checked on a toy problem."""

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

from fedgg.check.toy_problems import ToyClient, ToyState, aggregated, run_round, server_of, small_net, train_rows
from fedgg.core.algorithm import Algorithm, Batch, Client, Server
from fedgg.core.local import LocalEnd
from fedgg.core.tensor_rows import Assigned, Rows, assigns, check_sparse
from fedgg.errors import UserError
from fedgg.files import read_bytes


class Broken(Exception):
    """The property does not hold; the message says where."""


class Skipped(Exception):
    """The property does not apply to this algorithm; the message says why."""


def demand(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)


def demand_equal(a: Tensor, b: Tensor, what: str, tolerance: float = 0.0) -> None:
    """Equal bit for bit, or within a tolerance, which is relative for numbers above one."""
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


ROUNDING = 1e-12  # float64, a few steps, another order of summation
HOOKS = (
    *("broadcast", "send_down", "begin", "displacement", "loss", "second_displacement", "terms", "steer", "nudge"),
    *("finish", "diagnostics", "aggregate"),
)
WATCHED = (*HOOKS, "server_memory", "client_memory")
NAMES = (*WATCHED, "sparse_up", "sparse_down")
Hook = Callable[..., Any]
Wrapper = Callable[[str, Hook, Algorithm], Hook]  # from a hook, its name and its algorithm: the hook with checks


def _clients() -> list[ToyClient]:
    return [ToyClient.draw(0, 13), ToyClient.draw(1, 4), ToyClient.draw(2, 22)]


def _after_two_rounds(algorithm: Algorithm) -> ToyState:
    """A state with a last global update and non-zero memories."""
    return _after_rounds(algorithm, _clients())


def _after_rounds(algorithm: Algorithm, clients: list[ToyClient], rounds: int = 2) -> ToyState:
    net = small_net()
    state = ToyState.initial(algorithm, net, len(clients))
    for _ in range(rounds):
        state, _ = run_round(algorithm, net, state, clients)
    return state


def _interleaved(algorithm: Algorithm, worlds: list[list[ToyClient]], rounds: int = 2) -> list[ToyState]:
    """Interleaved runs in one process: in each round the clients of all runs train before any server aggregates."""
    net = small_net()
    states = [ToyState.initial(algorithm, net, len(clients)) for clients in worlds]
    for _ in range(rounds):
        runs = list(zip(states, worlds, strict=True))
        ends = [train_rows(algorithm, net, state, clients, range(len(clients)), 0.9) for state, clients in runs]
        states = [
            aggregated(algorithm, net, state, clients, end) for (state, clients), end in zip(runs, ends, strict=True)
        ]
    return states


def _demand_same(state: ToyState, expected: ToyState, what: str) -> None:
    demand_equal(state.w, expected.w, f"{what}: w")
    demand_equal_rows(state.server, expected.server, f"{what}: the server's memory")
    for a, b in zip(state.clients, expected.clients, strict=True):
        demand_equal_rows(a, b, f"{what}: a client's memory")


def fields_are_settings(algorithm: Algorithm) -> None:
    """A frozen dataclass whose fields are documented numbers, switches or strings."""
    # Read from the class itself: `dataclasses.is_dataclass` is also true for a subclass without the decorator.
    parameters = vars(type(algorithm)).get("__dataclass_params__")
    frozen = parameters is not None and parameters.frozen
    demand(frozen, "it is not a frozen dataclass: decorate it with @dataclass(frozen=True)")
    for field in fields(algorithm):
        documented = {"about", "origin"} <= field.metadata.keys()
        demand(
            documented, f"{field.name} is not documented: write {field.name} = fedgg.setting(default, about, origin)"
        )
        value = getattr(algorithm, field.name)
        demand(isinstance(value, int | float | str | bool | Tensor), f"{field.name} is a {type(value).__name__}")
    for name in vars(type(algorithm)):
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
        known = name in dir(Algorithm) or not near
        demand(known, f"{name}() is not a function of the interface: did you mean {near}?")
    demand(bool((type(algorithm).__doc__ or "").strip()), "it has no docstring saying how it differs from FedAvg")


def arguments_are_not_modified(algorithm: Algorithm) -> None:
    """No hook modifies its arguments, which may be shared."""
    net, clients, watched = small_net(), _clients(), _watched(algorithm, _comparing_arguments)
    state = ToyState.initial(watched, net, len(clients))
    for _ in range(3):
        state, _ = run_round(watched, net, state, clients)


def repeated_calls_agree(algorithm: Algorithm) -> None:
    """No state outside the rows and no random draws: checked for each hook and for whole runs."""
    with _fixed_generators():
        _after_rounds(_watched(algorithm, _calling_twice), _clients())
    worlds = [[ToyClient.draw(3, 5), ToyClient.draw(4, 8)], [ToyClient.draw(5, 9), ToyClient.draw(6, 4)]]
    sequential = [_after_rounds(algorithm, clients) for clients in worlds]
    for state, expected in zip(_interleaved(algorithm, worlds), sequential, strict=True):
        _demand_same(state, expected, "two runs side by side and one after the other")
    fresh = _from_reloaded_module(algorithm)
    if fresh is not None:
        _demand_same(_after_rounds(fresh, worlds[1]), sequential[1], "in a process that has run nothing else, and here")


def rows_are_independent(algorithm: Algorithm) -> None:
    """A client trained alone equals the same client stacked with others of more steps or fewer examples."""
    state = _after_two_rounds(algorithm)
    stacked = _ends(algorithm, state, [0, 1, 2])
    for row in range(3):
        alone = _ends(algorithm, state, [row])
        together = {name: tensor[row : row + 1] for name, tensor in stacked.items()}
        where = f"client {row} alone and in a stack (no mean over dimension 0, and scalars are [K, 1], not [K])"
        demand_equal_rows(alone, together, where, ROUNDING)


def sparse_messages_are_as_declared(algorithm: Algorithm) -> None:
    """Messages declared sparse have at most the declared number of non-zero values."""
    net, clients = small_net(), _clients()
    who, state = type(algorithm).__name__, ToyState.initial(algorithm, net, len(clients))
    up, down = (declared(net.layout.total) for declared in (algorithm.sparse_up, algorithm.sparse_down))
    if not up and not down:
        raise Skipped("it declares no sparse messages")
    for _ in range(3):
        sent_down = algorithm.send_down(state.w, server_of(state, net, clients))
        state, end = run_round(algorithm, net, state, clients)
        try:
            check_sparse(sent_down, down, f"{who}.sparse_down()")
            check_sparse(end.up, up, f"{who}.sparse_up()")
        except UserError as error:
            raise Broken(str(error)) from error


def settings_may_be_columns(algorithm: Algorithm) -> None:
    """A numeric setting may be a `[K, 1]` column, one value for each row."""
    numbers = [f.name for f in fields(algorithm) if isinstance(getattr(algorithm, f.name), float)]
    if not numbers:
        raise Skipped("it has no numeric settings")
    state = _after_two_rounds(algorithm)
    for name in numbers:
        value = float(getattr(algorithm, name))
        values = [value, 0.5 * value + 0.01, 0.3]
        column = torch.tensor([[number] for number in values], dtype=torch.float64)
        try:
            stacked = _ends(replace(algorithm, **{name: column}), state, [0, 1, 2])
        except RuntimeError as error:
            raise Broken(f"{name} as a column [K, 1] fails (avoid `if self.{name}`): {error}") from error
        for row, number in enumerate(values):
            alone = _ends(replace(algorithm, **{name: number}), state, [row])
            together = {key: tensor[row : row + 1] for key, tensor in stacked.items()}
            demand_equal_rows(alone, together, f"{name} as a column, row {row}", ROUNDING)


def finite_at_zero_drift(algorithm: Algorithm) -> None:
    """With gradients of zero everything stays finite: nothing divides by a length of zero."""
    net, clients = small_net(), [ToyClient.draw(number, 7, flat=True) for number in range(2)]
    with torch.no_grad():
        net.start.zero_()
    state = ToyState.initial(algorithm, net, len(clients))
    for _ in range(3):
        state, end = run_round(algorithm, net, state, clients)
        _demand_finite(end, state)


def a_client_of_one_example(algorithm: Algorithm) -> None:
    net, clients = small_net(), [ToyClient.draw(0, 1), ToyClient.draw(1, 9)]
    state = ToyState.initial(algorithm, net, len(clients))
    for _ in range(3):
        state, end = run_round(algorithm, net, state, clients)
        _demand_finite(end, state)


def _demand_finite(end: LocalEnd, state: ToyState) -> None:
    for name, tensor in {**end.up, **end.memory, **end.diagnostics, "w": state.w}.items():
        demand(bool(torch.isfinite(tensor).all()), f"{name} is not finite")


def _ends(algorithm: Algorithm, state: ToyState, rows: list[int]) -> Rows:
    end = train_rows(algorithm, small_net(), state, _clients(), rows, momentum=0.9)
    parts = {"up": end.up, "memory": end.memory, "diagnostics": end.diagnostics}
    return {f"{part} {name}": tensor for part, named in parts.items() for name, tensor in named.items()}


@dataclass(frozen=True)
class _Watched(Algorithm):
    """Forwards every call to `inner`, hooks through `wrapper`."""

    inner: Algorithm
    wrapper: Wrapper

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Algorithm, name):
            return object.__getattribute__(self, name)
        inner = object.__getattribute__(self, "inner")
        hook = getattr(inner, name)
        if name not in WATCHED:
            return hook
        plain_steer = name == "steer" and type(inner).steer is Algorithm.steer  # which only calls terms()
        wrapper: Wrapper = object.__getattribute__(self, "wrapper")
        return wrapper("terms" if plain_steer else name, hook, inner)


def _watched(algorithm: Algorithm, wrapper: Wrapper) -> Algorithm:
    # With the algorithm's name, for messages, and with hooks that `local_step` looks for in the class.
    hooks = {name: getattr(type(algorithm), name) for name in ("displacement", "second_displacement")}
    kind = type(type(algorithm).__name__, (_Watched,), hooks)
    watched: Algorithm = kind(algorithm, wrapper)
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
            demand(value is settings.get(key), f"{name}() assigns self.{key}: keep state in rows")
        return result

    return call


def _calling_twice(name: str, hook: Hook, algorithm: Algorithm) -> Hook:
    def call(*arguments: Any) -> Any:
        before = _generator_states()
        result = hook(*arguments)
        used = " and ".join(library for library, state in _generator_states().items() if state != before[library])
        demand(not used, f"{name}() draws from {used} global random numbers: runs would not be reproducible")
        demand(
            _same(result, hook(*arguments)),
            f"{name}() returns something else when called again with the same arguments: keep state in rows only",
        )
        return result

    return call


@contextmanager
def _fixed_generators() -> Iterator[None]:
    """Seed the global generators with a number that an algorithm is unlikely to use; restore them afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed = 20_220_725
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
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


def _same(a: Any, b: Any) -> bool:
    """Equal values (NaN equals NaN), through dicts and tuples."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _from_reloaded_module(algorithm: Algorithm) -> Algorithm | None:
    """The algorithm from a new execution of its file, without module state; None if that is impossible."""
    kind = type(algorithm)
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or kind.__qualname__ != kind.__name__:
        return None
    reloaded = ModuleType(f"{module.__name__}_again")
    vars(reloaded).update(__file__=file, __package__=module.__package__)
    sys.modules[reloaded.__name__] = reloaded  # where dataclasses look up their module
    try:
        text = getattr(module, "__text__", None) or read_bytes(Path(file)).decode("utf-8")
        exec(compile(text, file, "exec"), vars(reloaded))
        settings = {field.name: getattr(algorithm, field.name) for field in fields(kind)}
        copy: Algorithm = getattr(reloaded, kind.__name__)(**settings)
    except Exception:  # a file that can be executed only once does not break the property
        return None
    finally:
        del sys.modules[reloaded.__name__]
    return copy


def _mappings(arguments: tuple[Any, ...]) -> Iterator[tuple[str, Rows]]:
    for argument in arguments:
        if isinstance(argument, dict):
            yield getattr(argument, "label", "the rows it receives"), argument
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
            yield "an argument", argument
        elif isinstance(argument, Client | Server | Batch):
            for field in fields(argument):
                if isinstance(value := getattr(argument, field.name), Tensor):
                    yield f"{type(argument).__name__.lower()}.{field.name}", value
