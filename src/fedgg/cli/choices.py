"""From what a person types to experiments: shorthand options, `--set KEY=VALUE`, lists of seeds and algorithms."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgg.analysis.labels import short_names
from fedgg.data import DATASETS
from fedgg.errors import UserError
from fedgg.files import parse_toml
from fedgg.lab.trust import trust, trust_named
from fedgg.models import MODELS

DataOption = Annotated[str | None, typer.Option(help=f"{DATASETS.choices()}.")]
ModelOption = Annotated[str | None, typer.Option(help=f"{MODELS.choices()}.")]
ClientsOption = Annotated[int | None, typer.Option(help="Number of clients.")]
BetaOption = Annotated[float | None, typer.Option(help="Dirichlet concentration; smaller is more skewed.")]
RoundsOption = Annotated[int | None, typer.Option(help="Communication rounds.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as KEY=VALUE; may be repeated.")]
DataFolderOption = Annotated[
    Path | None, typer.Option(help="Where data sets lie; else $FEDGG_DATA, else your cache folder.")
]
OutOption = Annotated[Path | None, typer.Option(help="Folder to write to.")]
SeedsOption = Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 or 0-4.")]
TrustOption = Annotated[
    list[str] | None,
    typer.Option("--trust", help="FILE.py or PACKAGE whose code the experiment may run; may be repeated."),
]
JobsOption = Annotated[int | None, typer.Option(help="Runs at a time; by default one for each core.", min=1)]


def changes(
    *,
    data: str | None = None,
    model: str | None = None,
    clients: int | None = None,
    beta: float | None = None,
    rounds: int | None = None,
    device: str | None = None,
    settings: list[str] | None = None,
) -> dict[str, Any]:
    """Dotted keys and their values; `--set` has the last word. Code that is typed here may run."""
    short = {
        "data.source": data,
        "model.name": model,
        "split.clients": clients,
        "split.beta": beta,
        "rounds": rounds,
        "engine.device": device,
    }
    given = {key: value for key, value in short.items() if value is not None}
    given |= dict(key_and_value(text) for text in settings or [])
    trust_named(given)
    return given


def trust_all(places: list[str] | None) -> None:
    """What `--trust` allows."""
    trust(*places or [])


def key_and_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not of the form KEY=VALUE, for instance local.lr=0.1")
    return key.strip(), parsed(value.strip())


def parsed(value: str) -> Any:
    """A value as TOML reads it; what TOML cannot read is text."""
    try:
        return parse_toml(f"value = {value}")["value"]
    except ValueError:
        return value


def split_values(text: str) -> list[str]:
    """What stands between commas; those within brackets, braces and quotes separate nothing."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += sign
    return parts


def seeds(text: str) -> tuple[int, ...]:
    try:
        numbers: list[int] = []
        for part in text.split(","):
            first, dash, last = part.partition("-")
            numbers += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        raise UserError(f"seeds {text!r}: write 0,1,2 or 0-4") from None
    if not numbers or len(set(numbers)) != len(numbers):
        raise UserError(f"seeds {text!r}: name each seed once, and at least one")
    return tuple(numbers)


def seeds_or_count(text: str) -> tuple[int, ...]:
    """As `seeds`, where a number alone says how many: 3 is 0, 1, 2."""
    if text.strip().isdecimal() and int(text) > 0:
        return tuple(range(int(text)))
    return seeds(text)


def algorithm_settings(text: str) -> dict[str, Any]:
    """`NAME[:KEY=VALUE,...]` as dotted keys, for instance `fedgg:mu=0.1`; a label before it has no effect."""
    _, name, settings = _variant(text)
    trust_named({"algorithm.name": name})
    return {"algorithm.name": name, **{f"algorithm.{key}": value for key, value in settings.items()}}


def variants(texts: list[str], recorded: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Several `[LABEL@]NAME[:KEY=VALUE,...]` by their labels: the one given, else the name and settings.

    An algorithm from a file is labelled by its class, unless `recorded`, the labels of a study to be continued, has it
    as it was typed.
    """
    given = [_variant(text) for text in texts]
    shown = short_names(name for _, name, _ in given)
    labelled: dict[str, dict[str, Any]] = {}
    for text, (label, name, settings) in zip(texts, given, strict=True):
        as_typed, by_class = (_labelled(word, settings) for word in (name, shown[name]))
        chosen = label or (as_typed if as_typed in recorded else by_class)
        if chosen in labelled:
            raise UserError(
                f"two algorithms have the label {chosen!r}: give one of them another, "
                f"for instance --algorithm 'again@{text.rpartition('@')[2]}'"
            )
        labelled[chosen] = algorithm_settings(text)
    return labelled


def _labelled(name: str, settings: dict[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])


def _variant(text: str) -> tuple[str, str, dict[str, Any]]:
    """Label (or nothing), name and settings."""
    label, _, rest = text.rpartition("@")
    name, settings = name_and_settings(rest)
    return label, name, dict(key_and_value(part) for part in split_values(settings)) if settings else {}


def name_and_settings(text: str) -> tuple[str, str]:
    """Split at the colon before the settings; a user's own class has one colon more in its name."""
    head, colon, tail = text.rpartition(":")
    return (head, tail) if colon and "=" in tail else (text, "")
