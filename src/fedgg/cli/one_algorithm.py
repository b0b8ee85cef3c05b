"""`fedgg list ALGORITHM`: one algorithm in full, from its own file and from letting it play two rounds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from fedgg.cli.screen import print_table, say
from fedgg.errors import UserError
from fedgg.report.tables import Table

if TYPE_CHECKING:
    from fedgg.check.price import Price
    from fedgg.core.algorithm import Algorithm


def show_algorithm(name: str) -> None:
    """Paper and equation, how it differs and when to use it, its settings, what it costs."""
    from fedgg.algorithms import ALGORITHMS
    from fedgg.lab.parts import algorithm_class

    name = name.lower() if name.lower() in ALGORITHMS else name
    kind = algorithm_class(name)
    for paragraph in (sys.modules[kind.__module__].__doc__, kind.__doc__):
        if paragraph:
            say(f"{paragraph.strip()}\n")
    if kind.when:
        say(f"When to use it: {kind.when}.\n")
    own = _settings(kind)
    if own:
        columns = ("key", "default", "meaning", "where the default comes from")
        print_table(Table(f"algorithm.* of {name}", columns, own), numbers=False)
    try:
        print_table(_costs(kind), numbers=False)
    except Exception as error:  # of a user's own, which may do anything
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{name} cannot be played ({said}): `fedgg check {name}` says more") from error
    example = f":{own[0][0].removeprefix('algorithm.')}={own[0][1]}" if own else ""
    proxy = " --set data.proxy=100" if kind.needs_proxy else ""
    say(f"To run it: fedgg run --algorithm {name}{example}{proxy}")


def _settings(kind: type[Algorithm]) -> tuple[tuple[str, str, str, str], ...]:
    """Key, default, meaning with the names there are to choose from, and where the default comes from."""
    types = get_type_hints(kind)
    rows = []
    for field in fields(kind):
        about, origin = (str(field.metadata.get(key, "not said")) for key in ("about", "origin"))
        names = _names(types[field.name])
        infinite = " (may be inf)" if field.metadata.get("may_be_infinite") else ""
        choices = f" (one of {', '.join(map(str, names))})" if names else infinite
        rows.append((f"algorithm.{field.name}", str(field.default), about + choices, origin))
    return tuple(rows)


def _names(type_: Any) -> tuple[Any, ...]:
    return get_args(type_) if get_origin(type_) is Literal else ()


def _costs(kind: type[Algorithm]) -> Table:
    """As it stands, and under every choice of a setting that changes what travels, what is kept or what it takes."""
    from fedgg.check.price import EPOCHS

    usual = kind()
    found = dict(_costs_by_setting(kind))
    rows = tuple((words, p.sent, p.kept, f"{p.bytes:g}", f"{p.arithmetic:.3g}") for words, p in found.items())
    notes = [
        "Each is as long as the model but for what is marked as a number.",
        "bytes: a round's, in times FedAvg's, which are two models a client: 8 bytes a parameter in fp32.",
        f"work: arithmetic for each example trained on, in times FedAvg's, with {EPOCHS} local epochs.",
        f"Clients count {_weighing(usual)}"
        + "".join(f"; with {words}, {_weighing(one)}" for words, one in _choices(kind) if _differs(one, usual))
        + ".",
    ]
    if kind.needs_proxy:
        notes.append("It needs examples at the server (data.proxy), at which the server looks once a round.")
    if kind.needs_representation:
        notes.append("It needs a model that says what it makes of its inputs before its last layer.")
    columns = ("with", "sent besides model and update", "kept besides the server's model", "bytes", "work")
    return Table("what it costs", columns, rows, tuple(notes))


def _costs_by_setting(kind: type[Algorithm]) -> Iterator[tuple[str, Price]]:
    from fedgg.check.price import price

    usual = price(kind())
    yield "its defaults", usual
    for words, one in _choices(kind):
        try:
            other = price(one)
        except (RuntimeError, ValueError):  # a choice that needs another one beside it
            continue
        if other != usual:
            yield words, other


def _choices(kind: type[Algorithm]) -> Iterator[tuple[str, Algorithm]]:
    """Every named choice of every setting, one at a time."""
    defaults = {field.name: field.default for field in fields(kind)}
    for own, type_ in get_type_hints(kind).items():
        for value in _names(type_):
            if own in defaults and value != defaults[own]:
                yield f"{own}={value}", kind(**{own: value})


def _weighing(algorithm: Algorithm) -> str:
    return "by their examples" if algorithm.solves() == "examples" else "each the same"


def _differs(one: Algorithm, other: Algorithm) -> bool:
    return one.solves() != other.solves()
