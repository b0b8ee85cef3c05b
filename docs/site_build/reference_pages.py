"""The reference, written from the code whenever the site is built: API, commands, settings, run folder.

A public name, a method of a public class, a command, an option or a setting without a description raises
`Undocumented`, which ends the build.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import typer
from pydantic import BaseModel
from repository_links import DOCS, ROOT

import fedgg
import fedgg.flower
from fedgg.cli import app
from fedgg.lab.config import described_settings
from fedgg.runfolder import validation

NOT_EXPLAINED = "no description in the code"


class Undocumented(Exception):
    """A public name of the product without a description."""


def reference_pages() -> dict[str, str]:
    """The generated pages by their place in the site."""
    pages = {f"reference/api/{_slug(title)}.md": _api_page(title, names) for title, names in _api_groups().items()}
    return pages | {
        "reference/commands.md": _commands_page(),
        "reference/settings.md": _settings_page(),
        "reference/run-folder-files.md": _run_folder_page(),
    }


# --- API


def _api_groups() -> dict[str, list[str]]:
    """The public names by the sections of docs/api.md."""
    groups: dict[str, list[str]] = {}
    for title, name in re.findall(
        r"^## (.+)$|^### `(fedgg\.[\w.]+)`$", (ROOT / DOCS / "api.md").read_text(encoding="utf-8"), re.M
    ):
        if title:
            groups[title] = names = []
        else:
            names.append(name)
    listed = {name for names in groups.values() for name in names}
    public = {f"fedgg.{name}" for name in fedgg.__all__} | {f"fedgg.flower.{name}" for name in fedgg.flower.__all__}
    if listed != public:
        raise Undocumented(f"docs/api.md and the public names differ in {', '.join(sorted(listed ^ public))}")
    return groups


def _api_page(title: str, names: list[str]) -> str:
    parts = [f"# {title}", "Public names with their signatures; [the Python API](../../api.md) has an example of each."]
    return "\n\n".join(parts + [_name_section(name) for name in names if name != "fedgg.__version__"]) + "\n"


def _name_section(name: str) -> str:
    thing = getattr(fedgg.flower if name.startswith("fedgg.flower.") else fedgg, name.rpartition(".")[2])
    if not isinstance(thing, type) and not callable(thing):  # an alias of a type
        return f"## `{name}`\n\n```\n{name} = {thing}\n```"
    _check_documented(name, thing)
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        link = "" if thing is fedgg.Experiment else " Its keys are in [Settings](../settings.md)."
        return f"::: {name}\n    options:\n      members: {_own_methods(thing)}\n{link and chr(10) + link.strip()}"
    if isinstance(thing, type) and issubclass(thing, fedgg.Algorithm) and thing is not fedgg.Algorithm:
        return f"::: {name}\n    options:\n      members: []\n\n{_algorithm_settings(thing)}"
    made_by_fedgg = dataclasses.is_dataclass(thing) and any(one.name[0] == "_" for one in dataclasses.fields(thing))
    return f"::: {name}\n    options:\n      show_signature: false" if made_by_fedgg else f"::: {name}"


def _check_documented(name: str, thing: Any) -> None:
    undocumented = [] if inspect.getdoc(thing) else [name]
    for key in _own_methods(thing) if isinstance(thing, type) else ():
        if not any(inspect.getdoc(vars(base)[key]) for base in thing.__mro__ if key in vars(base)):
            undocumented.append(f"{name}.{key}")
    if undocumented:
        raise Undocumented(f"without a docstring: {', '.join(undocumented)}")


def _own_methods(thing: type) -> list[str]:
    kinds = (classmethod, staticmethod, property)
    return [
        key
        for key, value in vars(thing).items()
        if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
        if not key.startswith("model_")
    ]


def _algorithm_settings(algorithm: type[fedgg.Algorithm]) -> str:
    rows = [
        (f"`{one.name}`", f"`{one.default!r}`", one.metadata["about"], one.metadata["origin"])
        for one in dataclasses.fields(algorithm)
    ]
    return _table(("setting", "default", "meaning", "origin of the default"), rows) if rows else ""


# --- commands


def _commands_page() -> str:
    intro = (
        "# Commands\n\nWritten from the commands' own help when this site was built. "
        "Exit codes: 0 success, 1 a check failed or a run diverged, 2 a user error, 130 stopped by Ctrl-C."
    )
    return "\n\n".join([intro, *_command_sections(typer.main.get_command(app), "fedgg")]) + "\n"


def _command_sections(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    if not command.help:
        raise Undocumented(f"the command {path} has no help")
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece)
    parts = [f"## {path}", f"```\n{path} {usage}\n```", inspect.cleandoc(command.help)]
    for heading, kind in (("argument", click.Argument), ("option", click.Option)):
        parameters = [one for one in command.params if isinstance(one, kind) and not getattr(one, "hidden", False)]
        rows = [_parameter_row(one, path, context) for one in parameters]
        if rows:
            parts.append(_table((heading, "meaning", "default"), rows))
    yield "\n\n".join(parts)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command_sections(inner, f"{path} {name}")


def _parameter_row(parameter: Any, path: str, context: click.Context) -> tuple[str, str, str]:
    shown = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
    if not parameter.help:
        raise Undocumented(f"{path}: {shown} has no help")
    if not getattr(parameter, "is_flag", False):
        shown += f" `{parameter.make_metavar(context)}`" if isinstance(parameter, click.Option) else ""
    default = parameter.default
    visible = default not in (None, False, [], ()) and not callable(default)
    return shown, parameter.help, f"`{default}`" if visible else ""


# --- settings


def _settings_page() -> str:
    settings = described_settings()
    undocumented = [key for key, _, meaning in settings if not meaning]
    if undocumented:
        raise Undocumented(f"settings without a description: {', '.join(undocumented)}")
    parts = [
        "# Settings",
        "Every key of an experiment, in a TOML file or as `--set KEY=VALUE`; written from the code when this site was "
        "built. An unknown key is refused with the nearest valid one. What a key may name is in [Parts](../parts.md).",
    ]
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for key, default, meaning in settings:
        section = key.partition(".")[0] if "." in key else ""
        sections.setdefault(section, []).append((f"`{key}`", f"`{default}`" if default else "", meaning))
    for section, rows in sections.items():
        parts.append(f"## `[{section}]`" if section else "## Top level")
        parts.append(_table(("key", "default", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


# --- run folder


def _run_folder_page() -> str:
    """The files of a real run, made while the site is built, and the keys that are checked when a file is read."""
    explained = (ROOT / DOCS / "run-folder.md").read_text(encoding="utf-8")
    parts = [
        "# Files of a run, as written",
        "A run of two rounds on two clients, made when this site was built, and what is checked whenever a file is "
        "read ([validation.py](../source/src/fedgg/runfolder/validation_py.md)). [The run folder](../run-folder.md) "
        "explains files and keys.",
        "## Files",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        fedgg.run({"rounds": 2, "split": {"clients": 2, "scheme": "iid"}, "local": {"epochs": 1}}, out=folder)
        written = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        parts.append(_table(("file", "bytes"), [(f"`{one}`", f"{(folder / one).stat().st_size:,}") for one in written]))
        round_ = json.loads((folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[0])
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    names = {one.parts[0] for one in written}
    missing = [one for one in (*names, *round_, *summary) if f"`{one}" not in explained and one != "checksums"]
    if missing:
        raise Undocumented(f"docs/run-folder.md does not explain {', '.join(sorted(missing))}")
    for title, content in (("A line of `rounds.jsonl`", round_), ("`summary.json`", summary)):
        parts += [f"## {title}", f"```json\n{json.dumps(content, indent=2, ensure_ascii=False)}\n```"]
    for title, spec in (
        ("`rounds.jsonl`", validation._ROUND),
        ("an entry of `clients`", validation._CLIENT),
        ("an entry of `lost` or `notes`", validation._EVENT),
        ("`summary.json`", validation._SUMMARY),
        ("`partition.json`", validation._PARTITION),
    ):
        parts += [f"## Checked keys: {title}", _checked_keys(spec)]
    return "\n\n".join(parts) + "\n"


def _checked_keys(spec: Mapping[str, tuple[Any, str]]) -> str:
    return _table(
        ("key", "what it must be, where it is present"), [(f"`{key}`", what) for key, (_, what) in spec.items()]
    )


# --- Markdown


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Without columns that are empty."""
    used = [place for place, _ in enumerate(columns) if any(row[place] for row in rows)]
    columns, rows = tuple(columns[place] for place in used), [tuple(row[place] for place in used) for row in rows]
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text for a cell of a table: in one line, bars escaped, angle brackets as themselves."""
    escaped = " ".join(str(text).split()).replace("|", "\\|")
    return re.sub(r"<(?=\w)", "&lt;", escaped) if "`" not in escaped else escaped


def _slug(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
