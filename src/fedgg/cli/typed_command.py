"""The command that was typed, written down with what it began and told to whoever wants to go on with it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from fedgg.cli import choices
from fedgg.errors import UserError
from fedgg.files import read_json
from fedgg.registry import names_code
from fedgg.runfolder.checksums import without_checksum

NAMED = 3  # calls that are shown


def called_as() -> str | None:
    """This process's own command line; None where it is another program that uses the library."""
    program = Path(sys.argv[0])
    ours = program.stem == "fedgg" or (program.name == "__main__.py" and program.parent.name == "fedgg")
    return shlex.join(["fedgg", *sys.argv[1:]]) if ours else None


def refuse_a_study(folder: Path) -> None:
    """A comparison or sweep goes on by the command that began it: say which, if its folder knows."""
    file = folder / "study.json"
    if not file.is_file():
        return
    try:
        content = without_checksum(read_json(file))
        called = [command for command in content.get("commands", [content.get("command")]) if isinstance(command, str)]
    except (OSError, ValueError, AttributeError, TypeError):
        called = []
    commands = [command for command in (_again(one, folder) for one in called) if command is not None]
    more = f" (and {len(commands) - NAMED} other calls, which {file} lists)" if len(commands) > NAMED else ""
    again = "; ".join(commands[-NAMED:]) + more
    again = again or f"call the same `fedgg compare` or `fedgg sweep` again, with --out {shlex.quote(str(folder))}"
    raise UserError(
        f"{folder} holds a comparison or sweep, which needs no resume; to go on, {again} (finished runs are kept, "
        "the others go on where they stopped)"
    )


def _again(command: str, folder: Path) -> str | None:
    """What the folder says was called, if it is such a call and nothing else: folders also come from other people."""
    if command.startswith("fedgg.compare("):
        return f"call again: fedgg.compare(..., out={str(folder)!r}), from Python, with the same rows"
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if words[:2] not in (["fedgg", "compare"], ["fedgg", "sweep"]) or not command.isprintable():
        return None
    warning = ", which runs code from outside fedgg" if _names_code(words) else ""
    return f"call again{warning}: {shlex.join(words)}"


def _names_code(words: list[str]) -> bool:
    """Whether a command line says FILE.py:NAME or MODULE:NAME, which then runs without a question."""
    values = [choices.name_and_settings(word)[0].rpartition("=")[2] for word in words]
    named = any(names_code(name) for value in values for name in value.split(","))
    return named or any(word.partition("=")[0] == "--trust" for word in words)
