"""From the command line to experiments: shorthand options, `--set KEY=VALUE`, seeds, default folders."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgg.analysis.labels import short_names
from fedgg.data import DATASETS
from fedgg.errors import UserError
from fedgg.files import parse_toml, read_json
from fedgg.lab.trusted_code import trust, trust_named
from fedgg.models import MODELS
from fedgg.registry import names_code
from fedgg.runfolder.checksums import without_checksum

if TYPE_CHECKING:
    from fedgg.lab.config import Experiment
    from fedgg.lab.run_places import Shard


MAX_COMMANDS = 3  # shown of those that wrote to a folder


def called_as() -> str | None:
    """The command line of this process; None if another program uses the library."""
    program = Path(sys.argv[0])
    ours = program.stem == "fedgg" or (program.name == "__main__.py" and program.parent.name == "fedgg")
    return shlex.join(["fedgg", *sys.argv[1:]]) if ours else None


def refuse_a_study(folder: Path) -> None:
    """A comparison or sweep is continued by the command that started it: name it, if the folder records it."""
    file = folder / "study.json"
    if not file.is_file():
        return
    try:
        content = without_checksum(read_json(file))
        recorded = [entry for entry in content.get("commands", [content.get("command")]) if isinstance(entry, str)]
    except (OSError, ValueError, AttributeError, TypeError):
        recorded = []
    commands = [command for command in (_continuing(entry, folder) for entry in recorded) if command is not None]
    hidden = len(commands) - MAX_COMMANDS
    more = f" (and {hidden} other calls, which {file} lists)" if hidden > 0 else ""
    advice = "; ".join(commands[-MAX_COMMANDS:]) + more
    advice = advice or f"call the same `fedgg compare` or `fedgg sweep` again, with --out {shlex.quote(str(folder))}"
    raise UserError(
        f"{folder} holds a comparison or sweep, which needs no resume; to continue, {advice} (finished runs are kept, "
        "the others are resumed)"
    )


def _continuing(command: str, folder: Path) -> str | None:
    """How to repeat a recorded command; None unless it is exactly such a call, since folders may be from others."""
    if command.startswith("fedgg.compare("):
        return f"call again: fedgg.compare(..., out={str(folder)!r}), from Python, with the same variants"
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if words[:2] not in (["fedgg", "compare"], ["fedgg", "sweep"]) or not command.isprintable():
        return None
    warning = ", which runs code from outside fedgg" if _names_code(words) else ""
    return f"call again{warning}: {shlex.join(words)}"


def _names_code(words: list[str]) -> bool:
    """Whether a command line names code, FILE.py:NAME or MODULE:NAME, which then runs without a question."""
    values = [name_and_settings(word)[0].rpartition("=")[2] for word in words]
    named = any(names_code(name) for value in values for name in value.split(","))
    return named or any(word.partition("=")[0] == "--trust" for word in words)


DataOption = Annotated[str | None, typer.Option(help=f"{DATASETS.choices()}.")]
ModelOption = Annotated[str | None, typer.Option(help=f"{MODELS.choices()}.")]
ClientsOption = Annotated[int | None, typer.Option(help="Number of clients.")]
BetaOption = Annotated[float | None, typer.Option(help="Dirichlet concentration; smaller is more skewed.")]
RoundsOption = Annotated[int | None, typer.Option(help="Communication rounds.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")]
SpreadOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N; cuda:all or a list (cuda:0,1) to spread the clients of a round over them."),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N; cuda:all or a list (cuda:0,1) for one process on each of them."),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        help="Run on Ray: ray (the cluster of this machine, else this machine alone), ray:auto, ray:HOST:PORT or "
        "ray://HOST:PORT."
    ),
]
ResourcesOption = Annotated[
    str | None,
    typer.Option(help="With --on ray, what one task or actor needs: gpu=0.5, cpu=2, memory=4G or NAME=1, with commas."),
]
ActorsOption = Annotated[
    int | None,
    typer.Option(
        help="With --on ray, over how many actors the clients of a round are spread; by default as many as the "
        "cluster's free GPUs, or CPUs, have room for.",
        min=1,
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option(help="Run a fixed part of the runs, as 3/8: the third of eight jobs with one --out."),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as KEY=VALUE; may be repeated.")]
DataFolderOption = Annotated[
    Path | None, typer.Option(help="Folder of the data sets; by default $FEDGG_DATA, or your cache folder.")
]
OutOption = Annotated[Path | None, typer.Option(help="Folder to write to.")]
SeedsOption = Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 or 0-4.")]
TrustOption = Annotated[
    list[str] | None,
    typer.Option("--trust", help="FILE.py or PACKAGE whose code the experiment may run; may be repeated."),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help="Measure to compare by, as test_rmse, holdout_accuracy or holdout_accuracy_worst_client; by default the "
        "first metric of the runs, on the test set."
    ),
]
TrackOption = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also send rounds to tensorboard, wandb, mlflow or FILE.py:CLASS; may be repeated."),
]
JobsOption = Annotated[int | None, typer.Option(help="Runs at a time; by default one for each core.", min=1)]


def device_and_on(device: str | None, on: str | None) -> tuple[str | None, str | None]:
    """`--device` as an experiment has it, and where the runs are computed: `--on`, or the devices of a list."""
    from fedgg.cluster.runners import device_named
    from fedgg.lab.run_places import devices_from

    if on is not None:
        named = device_named(on)
        if named is not None:
            raise UserError(f"--on {on!r} names devices: write --device {on}")
    devices = devices_from(device) if device is not None else None
    if devices is None:
        return device, on
    if on is not None:
        raise UserError(
            f"--device {device!r} with --on {on!r}: Ray assigns the devices of its nodes; write --device cuda"
        )
    return device_named(device), device


def shard_of_call(text: str | None, on: str | None) -> Shard | None:
    """`--shard`, which the runs of this process record."""
    from fedgg.cluster.connect import is_ray
    from fedgg.lab.run_places import machine_name, record_place, shard_from

    if text is None:
        return None
    if on is not None and is_ray(on):
        raise UserError("--shard is for jobs without Ray, which divides the runs itself: leave out one of the two")
    shard = shard_from(text)
    record_place(node=machine_name(), shard=str(shard))
    return shard


def changes(
    *,
    data: str | None = None,
    model: str | None = None,
    clients: int | None = None,
    beta: float | None = None,
    rounds: int | None = None,
    device: str | None = None,
    settings: list[str] | None = None,
    also: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Dotted keys and their values; `also`: those of further options. Code named on the command line is trusted.

    UserError where an option and `--set` give the same key other values. Of two `--set` the last one counts.
    """
    short = {
        "data.source": data,
        "model.name": model,
        "split.clients": clients,
        "split.beta": beta,
        "rounds": rounds,
        "engine.device": device,
        **(also or {}),
    }
    changed = {key: value for key, value in short.items() if value is not None}
    by_set = dict(map(key_and_value, settings or []))
    for key in sorted(by_set.keys() & changed.keys()):
        if by_set[key] != changed[key]:
            raise UserError(
                f"{key} is set to {changed[key]!r} and by --set to {by_set[key]!r}: leave out one of the two"
            )
    changed |= by_set
    trust_named(changed)
    return changed


def trust_all(places: list[str] | None) -> None:
    """Allow the code that `--trust` names."""
    trust(*places or [])


def key_and_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not of the form KEY=VALUE, for instance local.lr=0.1")
    return key.strip(), parsed(value.strip())


def parsed(value: str) -> Any:
    """A value as TOML reads it, or the text itself if it is not TOML."""
    try:
        return parse_toml(f"value = {value}")["value"]
    except ValueError:
        return value


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets, braces and quotes."""
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
    """As `seeds`, but a single number is a count: 3 is 0, 1, 2."""
    if text.strip().isdecimal() and int(text) > 0:
        return tuple(range(int(text)))
    return seeds(text)


def algorithm_settings(text: str) -> dict[str, Any]:
    """`NAME[:KEY=VALUE,...]` as dotted keys, for instance `fedgg:mu=0.1`; a label before it has no effect."""
    _, name, settings = _variant(text)
    trust_named({"algorithm.name": name})
    return {"algorithm.name": name, **{f"algorithm.{key}": value for key, value in settings.items()}}


def variants(texts: list[str], recorded: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Several `[LABEL@]NAME[:KEY=VALUE,...]` by label; without a LABEL, name and settings are the label.

    An algorithm from a file is labelled by its class, unless `recorded`, the labels of a study to be continued, has the
    full name.
    """
    parsed_texts = [_variant(text) for text in texts]
    shown = short_names(name for _, name, _ in parsed_texts)
    labelled: dict[str, dict[str, Any]] = {}
    for text, (label, name, settings) in zip(texts, parsed_texts, strict=True):
        as_typed, by_class = (_label(word, settings) for word in (name, shown[name]))
        chosen = label or (as_typed if as_typed in recorded else by_class)
        if chosen in labelled:
            raise UserError(
                f"two algorithms have the label {chosen!r}: give one of them another, "
                f"for instance --algorithm 'again@{text.rpartition('@')[2]}'"
            )
        labelled[chosen] = algorithm_settings(text)
    return labelled


def _label(name: str, settings: dict[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])


def _variant(text: str) -> tuple[str, str, dict[str, Any]]:
    """Label (or an empty string), name and settings."""
    label, _, rest = text.rpartition("@")
    name, settings = name_and_settings(rest)
    before, comma, first = settings.partition("=")[0].partition(",")
    if comma:
        written = f"{name}:{before}:{first}{settings[len(before + comma + first) :]}"
        raise UserError(f"{text!r}: settings follow a colon, as in {written}")
    return label, name, dict(key_and_value(part) for part in split_values(settings)) if settings else {}


def name_and_settings(text: str) -> tuple[str, str]:
    """Split at the colon before the settings; the name of a user's class (FILE.py:CLASS) has a colon too."""
    head, colon, tail = text.rpartition(":")
    return (head, tail) if colon and "=" in tail else (text, "")


def folder_name(experiment: Experiment) -> str:
    """The name of a run's folder without `--out`."""
    from fedgg.lab.study_folder import slug

    source = experiment.data.source.rpartition("/")[2]
    parts = [experiment.name or experiment.algorithm.name, source, f"seed-{experiment.seed}", experiment.hash()[:6]]
    return "-".join(slug(part) for part in parts)
