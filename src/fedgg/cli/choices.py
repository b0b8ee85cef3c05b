"""From what a person types to experiments: shorthand options, `--set KEY=VALUE`, lists of seeds and algorithms."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgg.errors import UserError
from fedgg.files import parse_toml

DataOption = Annotated[str | None, typer.Option(help="digits, cifar10, cifar100, svhn or npz:FILE.")]
ModelOption = Annotated[str | None, typer.Option(help="linear, mlp, cnn, vgg16, or FILE.py:CLASS.")]
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
    """Dotted keys and their values; `--set` has the last word."""
    short = {
        "data.source": data,
        "model.name": model,
        "split.clients": clients,
        "split.beta": beta,
        "rounds": rounds,
        "engine.device": device,
    }
    given = {key: value for key, value in short.items() if value is not None}
    return given | dict(key_and_value(text) for text in settings or [])


def key_and_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not of the form KEY=VALUE, for instance local.lr=0.1")
    return key.strip(), parsed(value.strip())


def parsed(value: str) -> Any:
    """A value as TOML reads it; what TOML cannot read is text."""
    try:
        read = parse_toml(f"value = {value}")["value"]
    except ValueError:
        return value
    return value if read != read else read  # no setting is a NaN, and attack.kind may be that word


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


def variant(text: str) -> tuple[str, dict[str, Any]]:
    """`[LABEL@]NAME[:KEY=VALUE,...]`, for instance `fedgg:mu=0.1` or `as printed@fedgg:gradient=printed`."""
    label, at, rest = text.rpartition("@")
    name, settings = _name_and_settings(rest)
    pairs = dict(key_and_value(part) for part in settings.split(",")) if settings else {}
    shown = " ".join([name, *(f"{key}={value}" for key, value in pairs.items())])
    return (label if at else shown), {"algorithm.name": name, **{f"algorithm.{k}": v for k, v in pairs.items()}}


def variants(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Several of them, each under a label of its own."""
    labelled = [variant(text) for text in texts]
    for label, count in Counter(label for label, _ in labelled).items():
        if count > 1:
            raise UserError(f"--algorithm {label!r} is named twice: give one a label, as in 'again@{label}'")
    return dict(labelled)


def _name_and_settings(text: str) -> tuple[str, str]:
    """Split at the colon before the settings; a user's own class has one colon more in its name."""
    head, colon, tail = text.rpartition(":")
    return (head, tail) if colon and "=" in tail else (text, "")
