"""`fedgg list`: what is available; the parts of one kind; one algorithm with its measured costs, or another part."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from fedgg.cli.terminal import OutputLost, print_table, say
from fedgg.errors import UserError
from fedgg.lab.trusted_code import trust_named
from fedgg.registry import described_parameters, first_line, names_code, nearest
from fedgg.report.tables import Table

if TYPE_CHECKING:
    from fedgg.check.cost import Cost
    from fedgg.core.algorithm import Algorithm
    from fedgg.registry import Registry


def show_algorithm(name: str) -> None:
    """Print its paper and equation, how it differs and when to use it, its settings and costs."""
    from fedgg.lab.name_resolution import algorithm_class

    kind = algorithm_class(name)
    for paragraph in (sys.modules[kind.__module__].__doc__, kind.__doc__):
        if paragraph:
            say(f"{paragraph.strip()}\n")
    if kind.when:
        say(f"When to use it: {kind.when}.\n")
    settings = _settings(kind)
    if settings:
        columns = ("key", "default", "meaning", "origin of the default")
        print_table(Table(f"algorithm.* of {name}", columns, settings), numbers=False)
    try:
        print_table(_costs(kind), numbers=False)
    except OutputLost:
        raise
    except Exception as error:  # a user's algorithm may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{name} cannot run two rounds ({reason}): see `fedgg check {name}`") from error
    example = f":{settings[0][0].removeprefix('algorithm.')}={settings[0][1]}" if settings else ""
    proxy = " --set data.proxy=100" if kind.needs_proxy else ""
    say(f"To run it: fedgg run --algorithm {name}{example}{proxy}")


def _settings(kind: type[Algorithm]) -> tuple[tuple[str, str, str, str], ...]:
    """Key, default, meaning with the choices, and origin of the default."""
    types = get_type_hints(kind)
    rows = []
    for field in fields(kind):
        about, origin = (str(field.metadata.get(key, "not documented")) for key in ("about", "origin"))
        names = _names(types[field.name])
        infinite = " (may be inf)" if field.metadata.get("may_be_infinite") else ""
        choices = f" (one of {', '.join(map(str, names))})" if names else infinite
        rows.append((f"algorithm.{field.name}", str(field.default), about + choices, origin))
    return tuple(rows)


def _names(type_: Any) -> tuple[Any, ...]:
    return get_args(type_) if get_origin(type_) is Literal else ()


def _costs(kind: type[Algorithm]) -> Table:
    """With its defaults, and with every choice of a setting that changes messages, state or arithmetic."""
    default = kind()
    rows = tuple((choice, *_cost_cells(cost)) for choice, cost in _costs_by_setting(kind))
    others = [(choice, variant) for choice, variant in _choices(kind) if variant.solves() != default.solves()]
    weighing = "".join(f"; with {choice}, {_weighing(variant)}" for choice, variant in others)
    notes = [*_cost_notes(), f"Clients count {_weighing(default)}{weighing}."]
    if kind.needs_proxy:
        notes.append("It needs examples at the server (data.proxy), which the server uses once a round.")
    if kind.needs_classes:
        notes.append("It needs the task classification.")
    if kind.needs_representation:
        notes.append("It needs a model whose last layer is nn.Linear; the input of that layer is the representation.")
    return Table("costs", ("with", *_COST_COLUMNS), rows, tuple(notes))


_COST_COLUMNS = ("sent besides model and update", "stored besides the server's model", "bytes", "work")


def _cost_cells(cost: Cost) -> tuple[str, str, str, str]:
    return cost.sent, cost.stored, f"{cost.bytes:g}", f"{cost.arithmetic:.3g}"


def _cost_notes() -> tuple[str, str, str]:
    from fedgg.check.cost import EPOCHS

    return (
        "Each is as long as the model, except those marked as a number.",
        "bytes: of a round, relative to FedAvg's two models per client (8 bytes per parameter in fp32).",
        f"work: arithmetic per training example, relative to FedAvg's, with {EPOCHS} local epochs.",
    )


def _costs_by_setting(kind: type[Algorithm]) -> Iterator[tuple[str, Cost]]:
    from fedgg.check.cost import cost_of

    default = cost_of(kind())
    yield "its defaults", default
    for choice, variant in _choices(kind):
        try:
            cost = cost_of(variant)
        except (RuntimeError, ValueError):  # a choice that is valid only together with another
            continue
        if cost != default:
            yield choice, cost


def _choices(kind: type[Algorithm]) -> Iterator[tuple[str, Algorithm]]:
    """The algorithm with each named choice of each setting that is not its default, one at a time."""
    defaults = {field.name: field.default for field in fields(kind)}
    for key, type_ in get_type_hints(kind).items():
        for value in _names(type_):
            if key in defaults and value != defaults[key]:
                yield f"{key}={value}", kind(**{key: value})


def _weighing(algorithm: Algorithm) -> str:
    return "by their examples" if algorithm.solves() == "examples" else "equally"


def show_part(name: str) -> None:
    """Print a registered part other than an algorithm: its description, its settings, and the setting that takes it."""
    from fedgg.lab.config import Experiment
    from fedgg.lab.config_errors import section_in
    from fedgg.lab.config_sections import PartConfig

    for setting, registry in _registries().values():  # a model and a schedule may have the same name
        if name not in registry:
            continue
        part = registry[name]
        say(f"{name}: {registry.kind}\n\n{inspect.getdoc(part) or 'It has no description.'}\n")
        section_name = setting.partition(".")[0]
        section = section_in(Experiment.model_fields[section_name].annotation)
        rows = []
        if section is not None and issubclass(section, PartConfig):
            takes_any = section.model_config.get("extra") == "allow"
            for key, (default, about) in described_parameters(part).items():
                field = section.model_fields.get(key)
                if key in section.not_settings or (field is None and not takes_any):
                    continue
                declared = "" if field is None or field.default is None else str(field.default)
                meaning = about or (field and field.description) or "not documented"
                rows.append((f"{section_name}.{key}", default or declared, meaning))
        if rows:
            title = f"[{section_name}]: settings of {name}"
            print_table(Table(title, ("key", "default", "meaning"), tuple(rows)), numbers=False)
        say(f"To run it: fedgg run {' '.join(f'--set {one}' for one in (*_NEEDED.get(name, ()), f'{setting}={name}'))}")


_BY_ROLE = ("data.source=shakespeare", "split.scheme=given")
_OF_TEXT = (*_BY_ROLE, "task.name=next_token")
_OF_IMAGES = ("data.source=cifar10",)  # the embedded digits have 8 x 8 pixels
_OF_YOURS = ("data.source=npz:FILE",)  # a file whose targets, or clients, are those that the part is for
_WITHOUT_CLASSES = (*_OF_YOURS, "split.scheme=iid")  # the default split goes by classes
# Parts that need other settings than the default ones, to run at all.
_NEEDED = {
    "cnn": _OF_IMAGES,
    "vgg16": _OF_IMAGES,
    "char_lstm": _OF_TEXT,
    "transformer": _OF_TEXT,
    "shakespeare": ("split.scheme=given", "task.name=next_token", "model.name=char_lstm"),
    "multilabel": _WITHOUT_CLASSES,
    "regression": _WITHOUT_CLASSES,
    "next_token": (*_BY_ROLE, "model.name=char_lstm"),
    "label_accuracy": (*_WITHOUT_CLASSES, "task.name=multilabel"),
    "rmse": (*_WITHOUT_CLASSES, "task.name=regression"),
    "mae": (*_WITHOUT_CLASSES, "task.name=regression"),
    "domains": _OF_YOURS,
    "given": _OF_YOURS,
    "streams": ("engine.device=cuda",),
    "devices": ("engine.device=cuda:0,1",),
}


def show_kind(title: str) -> None:
    """Print the parts of one kind, and the settings of their section."""
    from fedgg.algorithms import ALGORITHMS
    from fedgg.lab.config import described_settings

    if title == "algorithms":
        print_table(_algorithm_table(ALGORITHMS), numbers=False)
        print_table(_cost_table(ALGORITHMS), numbers=False)
        return
    setting, registry = _registries()[title]
    print_table(_part_table(title, setting, registry), numbers=False)
    section = setting.partition(".")[0]
    settings = tuple(row for row in described_settings() if row[0].partition(".")[0] == section)
    print_table(Table("settings", ("key", "default", "meaning"), settings), numbers=False)
    say("`fedgg list NAME` shows one in full.")


def _kinds() -> dict[str, str]:
    """By every name that a kind of parts may be asked for by, reduced to letters without the plural's s: its title."""
    names: dict[str, tuple[str, ...]] = {"algorithms": ("algorithms",)}
    for title, (setting, _) in _registries().items():
        names[title] = (title, title.split()[-1], setting.partition(".")[0])
    return {_reduced(name): title for title, several in names.items() for name in several if name != "sets"}


def _reduced(name: str) -> str:
    return re.sub("[^a-z]", "", name.lower()).removesuffix("s")


def list_parts(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this one in full: a name from the list, a kind such as `metrics`, a section such as `stop`, a "
            "setting such as `local.lr`, or FILE.py:CLASS or MODULE:CLASS of an algorithm."
        ),
    ] = None,
) -> None:
    """Show every setting of an experiment and every registered part.

    Parts are algorithms, aggregation rules, client optimisers, learning-rate schedules, tasks, metrics, models,
    data sets, splits and engines.

    Examples:

    - `fedgg list`
    - `fedgg list metrics`
    - `fedgg list scaffold`
    - `fedgg list median`
    - `fedgg list personal`
    """
    from fedgg.algorithms import ALGORITHMS
    from fedgg.lab.config import described_settings

    if name is not None:
        parts = [part for _, registry in _registries().values() for part in registry]
        if name in parts:
            show_part(name)
        elif name.lower() in ALGORITHMS or names_code(name) or name.endswith(".py"):
            trust_named({"algorithm.name": name})
            show_algorithm(name.lower() if name.lower() in ALGORITHMS else name)
        elif _reduced(name) in (kinds := _kinds()):
            show_kind(kinds[_reduced(name)])
        elif named := [row for row in described_settings() if name in (row[0], *row[0].split("."))]:
            print_table(Table("settings", ("key", "default", "meaning"), tuple(named)), numbers=False)
        else:
            keys = [key for key, *_ in described_settings()]
            sections = dict.fromkeys(key.partition(".")[0] for key in keys)
            choices = [*ALGORITHMS, *parts, "algorithms", *_registries(), *sections, *(keys if "." in name else ())]
            raise UserError(f"unknown algorithm, part or setting {name!r}{nearest(name, choices)}")
        return
    settings = tuple(described_settings())
    print_table(
        Table("an experiment: TOML keys, or --set KEY=VALUE", ("key", "default", "meaning"), settings), numbers=False
    )
    print_table(_algorithm_table(ALGORITHMS), numbers=False)
    print_table(_cost_table(ALGORITHMS), numbers=False)
    for name, kind in ALGORITHMS.items():
        rows = tuple(
            (f.name, str(f.default), f"{f.metadata['about']} (default: {f.metadata['origin']})") for f in fields(kind)
        )
        if rows:
            print_table(Table(f"algorithm.* of {name}", ("key", "default", "meaning"), rows), numbers=False)
    print_table(_optional_sections(), numbers=False)
    for table in part_tables():
        print_table(table, numbers=False)


def _registries() -> dict[str, tuple[str, Registry[Any]]]:
    """The registries beside that of the algorithms: the setting that takes a name of it, and the registry."""
    from fedgg.aggregation import RULES
    from fedgg.core.metrics import METRICS
    from fedgg.core.optimisers import OPTIMISERS, SCHEDULES
    from fedgg.core.tasks import TASKS
    from fedgg.data import DATASETS, SPLITS
    from fedgg.engines import ENGINES
    from fedgg.models import MODELS

    return {
        "aggregation rules": ("robust.rule", RULES),
        "client optimisers": ("optimiser.name", OPTIMISERS),
        "learning-rate schedules": ("schedule.name", SCHEDULES),
        "tasks": ("task.name", TASKS),
        "metrics": ("metrics", METRICS),
        "models": ("model.name", MODELS),
        "data sets": ("data.source", DATASETS),
        "splits": ("split.scheme", SPLITS),
        "engines": ("engine.name", ENGINES),
    }


def part_tables() -> list[Table]:
    """The registered parts beside the algorithms, with their descriptions."""
    return [_part_table(title, setting, registry) for title, (setting, registry) in _registries().items()]


def _part_table(title: str, setting: str, registry: Registry[Any]) -> Table:
    return Table(f"{title}: {setting}", ("name", "description"), tuple(registry.descriptions().items()))


def _algorithm_table(algorithms: Mapping[str, type[Algorithm]]) -> Table:
    rows = tuple((name, _difference(kind), kind.when) for name, kind in algorithms.items())
    notes = ("`fedgg list NAME` shows one in full: paper and equation, settings, costs; of other parts, the settings.",)
    return Table("algorithms", ("name", "differs from FedAvg", "when to use it"), rows, notes)


def _cost_table(algorithms: Mapping[str, type[Algorithm]]) -> Table:
    """What each sends, stores and computes, measured by running it for two rounds."""
    from fedgg.check.cost import cost_of

    rows = tuple((name, *_cost_cells(cost_of(kind()))) for name, kind in algorithms.items())
    with_proxy = ", ".join(name for name, kind in algorithms.items() if kind.needs_proxy)
    equally = ", ".join(f"{name}:{choice}" for name, choice in _counting_clients_equally(algorithms))
    notes = (
        *_cost_notes(),
        f"{with_proxy}: the server also computes the gradient of each of its own examples (data.proxy), once a round.",
        f"Clients count by their examples; equally with {equally}.",
    )
    return Table("costs", ("name", *_COST_COLUMNS), rows, notes)


def _counting_clients_equally(algorithms: Mapping[str, type[Algorithm]]) -> Iterator[tuple[str, str]]:
    """The settings with which an algorithm solves the problem that weights clients equally."""
    for name, kind in algorithms.items():
        for key, type_ in get_type_hints(kind).items():
            for value in get_args(type_) if get_origin(type_) is Literal else ():
                if kind(**{key: value}).solves() == "clients":
                    yield name, f"{key}={value}"


def _difference(kind: type[Algorithm]) -> str:
    return first_line(kind).removeprefix("Differs from FedAvg: ")


def _optional_sections() -> Table:
    from fedgg.lab.config import Experiment
    from fedgg.lab.config_errors import section_in
    from fedgg.lab.optional_sections import OFF_UNLESS_THERE

    rows = tuple(
        (f"[{name}]", first_line(section_in(Experiment.model_fields[name].annotation))) for name in OFF_UNLESS_THERE
    )
    return Table("with any algorithm; off unless a key of the section is set", ("section", "what it does"), rows)
