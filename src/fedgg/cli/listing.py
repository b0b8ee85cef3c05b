"""`fedgg list` and `fedgg check`: what is available, one algorithm in full, and the conformance suite."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.text import Text

from fedgg.cli.screen import console, print_table, printable, progress, say
from fedgg.errors import UserError
from fedgg.lab.trusted_code import trust_named
from fedgg.registry import first_line
from fedgg.report.tables import Table

if TYPE_CHECKING:
    from fedgg.check.cost import Cost
    from fedgg.core.algorithm import Algorithm
    from fedgg.registry import Registry


def show_algorithm(name: str) -> None:
    """Paper and equation, how it differs and when to use it, its settings, what it costs."""
    from fedgg.algorithms import ALGORITHMS
    from fedgg.lab.name_resolution import algorithm_class

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
    from fedgg.check.cost import EPOCHS

    usual = kind()
    found = dict(_costs_by_setting(kind))
    rows = tuple((words, p.sent, p.stored, f"{p.bytes:g}", f"{p.arithmetic:.3g}") for words, p in found.items())
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
    columns = ("with", "sent besides model and update", "stored besides the server's model", "bytes", "work")
    return Table("what it costs", columns, rows, tuple(notes))


def _costs_by_setting(kind: type[Algorithm]) -> Iterator[tuple[str, Cost]]:
    from fedgg.check.cost import cost_of

    usual = cost_of(kind())
    yield "its defaults", usual
    for words, one in _choices(kind):
        try:
            other = cost_of(one)
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


def list_parts(
    algorithm: Annotated[
        str | None, typer.Argument(help="Show this one in full: a name from the list, FILE.py:CLASS or MODULE:CLASS.")
    ] = None,
) -> None:
    """Show every setting of an experiment and every registered part: algorithms, models, data sets, splits, engines.

    Examples:

    - `fedgg list`
    - `fedgg list scaffold`
    """
    if algorithm is not None:
        trust_named({"algorithm.name": algorithm})
        show_algorithm(algorithm)
        return
    from fedgg.algorithms import ALGORITHMS
    from fedgg.lab.config import described_settings

    settings = tuple(described_settings())
    print_table(
        Table("an experiment: TOML keys, or --set KEY=VALUE", ("key", "default", "meaning"), settings), numbers=False
    )
    algorithms = tuple((name, _difference(kind), kind.when) for name, kind in ALGORITHMS.items())
    more = ("`fedgg list NAME` shows one in full: paper and equation, settings, costs.",)
    print_table(Table("algorithms", ("name", "differs from FedAvg", "when to use it"), algorithms, more), numbers=False)
    print_table(_cost_table(ALGORITHMS), numbers=False)
    for name, kind in ALGORITHMS.items():
        own = tuple(
            (f.name, str(f.default), f"{f.metadata['about']} (default: {f.metadata['origin']})") for f in fields(kind)
        )
        if own:
            print_table(Table(f"algorithm.* of {name}", ("key", "default", "meaning"), own), numbers=False)
    print_table(_optional_sections(), numbers=False)
    for table in part_tables():
        print_table(table, numbers=False)


def part_tables() -> list[Table]:
    """The registered parts beside the algorithms, with their descriptions."""
    from fedgg.aggregation import RULES
    from fedgg.data import DATASETS, SPLITS
    from fedgg.engines import ENGINES
    from fedgg.models import MODELS

    registries: dict[str, tuple[str, Registry[Any]]] = {
        "aggregation rules": ("robust.rule", RULES),
        "models": ("model.name", MODELS),
        "data sets": ("data.source", DATASETS),
        "splits": ("split.scheme", SPLITS),
        "engines": ("engine.name", ENGINES),
    }
    return [
        Table(f"{title}: {setting}", ("name", "description"), tuple(registry.descriptions().items()))
        for title, (setting, registry) in registries.items()
    ]


def _cost_table(algorithms: Mapping[str, type[Algorithm]]) -> Table:
    """What each sends, keeps and computes, seen by letting it play two rounds."""
    from fedgg.check.cost import EPOCHS, cost_of

    found = {name: cost_of(kind()) for name, kind in algorithms.items()}
    rows = tuple((name, p.sent, p.stored, f"{p.bytes:g}", f"{p.arithmetic:.3g}") for name, p in found.items())
    looking = ", ".join(name for name, kind in algorithms.items() if kind.needs_proxy)
    equal = ", ".join(f"{name}:{key}" for name, key in _counting_clients_equally(algorithms))
    notes = (
        "Each is as long as the model but for what is marked as a number.",
        "bytes: a round's, in times FedAvg's, which are two models a client: 8 bytes a parameter in fp32.",
        f"work: arithmetic for each example trained on, in times FedAvg's, with {EPOCHS} local epochs.",
        f"{looking}: the server also takes the gradient of each of its own examples (data.proxy), once a round.",
        f"Clients count by their examples; each the same with {equal}.",
    )
    columns = ("name", "sent besides model and update", "stored besides the server's model", "bytes", "work")
    return Table("what they cost", columns, rows, notes)


def _counting_clients_equally(algorithms: Mapping[str, type[Algorithm]]) -> Iterator[tuple[str, str]]:
    """The settings under which an algorithm solves the problem in which every client is the same."""
    for name, kind in algorithms.items():
        for own, type_ in get_type_hints(kind).items():
            for value in get_args(type_) if get_origin(type_) is Literal else ():
                if kind(**{own: value}).solves() == "clients":
                    yield name, f"{own}={value}"


def _difference(kind: type[Algorithm]) -> str:
    return first_line(kind).removeprefix("Differs from FedAvg: ")


def _optional_sections() -> Table:
    from fedgg.lab.config_sections import AttackConfig, PrivacyConfig, RobustConfig

    sections = {"privacy": PrivacyConfig, "robust": RobustConfig, "attack": AttackConfig}
    rows = tuple((f"[{name}]", " ".join((kind.__doc__ or "").split())) for name, kind in sections.items())
    return Table("with any algorithm; off unless a key of the section is set", ("section", "what it does"), rows)


def check(
    algorithm: Annotated[str, typer.Argument(help="FILE.py:CLASS, MODULE:CLASS or a name from `fedgg list`.")],
) -> None:
    """Run the conformance suite on an algorithm, your own or one of the library's.

    Examples:

    - `fedgg check examples/my_algorithm.py:MyAlgorithm`
    - `fedgg check fedgg`
    """
    import torch

    from fedgg.check import PROPERTIES, Broken, Skipped
    from fedgg.lab.name_resolution import algorithm_class

    torch.set_num_threads(1)
    trust_named({"algorithm.name": algorithm})
    kind = algorithm_class(algorithm)
    broken = skipped = 0
    said: set[str] = set()
    with progress() as bar:
        seen = bar.console if console.is_terminal else console  # above the bar, or into a file
        task = bar.add_task(kind.__name__, total=len(PROPERTIES), news="", within="")
        for name, holds in PROPERTIES.items():
            bar.update(task, news=name)
            try:
                holds(kind())
                verdict = [("holds", "green")]
            except Skipped as why:
                skipped += 1
                verdict = [(f"skipped  {printable(str(why))}", "dim")]
            except Broken as why:
                broken += 1
                verdict = [("broken", "red"), (f"  {printable(str(why))}", "")]
            except Exception as error:
                broken += 1
                told = f"it raised {type(error).__name__}: {error}{_where(error, kind)}"
                verdict = [("broken", "red"), (f"  {printable('the same as above' if told in said else told)}", "")]
                said.add(told)
            seen.print(Text.assemble(f"{name:42} ", *verdict), soft_wrap=True)
            bar.advance(task)
    held = len(PROPERTIES) - broken - skipped
    say(f"{kind.__name__}: of {len(PROPERTIES)} properties {held} hold, {broken} broken, {skipped} not applicable")
    if broken:
        raise typer.Exit(1)


def _where(error: Exception, kind: type) -> str:
    """The line of the algorithm's own file that was the last to be at work, if any."""
    own = inspect.getsourcefile(kind)
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f" ({Path(lines[-1].filename).name}, line {lines[-1].lineno}, in {lines[-1].name})" if lines else ""
