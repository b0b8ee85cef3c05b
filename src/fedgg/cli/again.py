"""The command that was typed, written down with what it began and told to whoever wants to go on with it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from fedgg.errors import UserError

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
        content = json.loads(file.read_text(encoding="utf-8"))
        called = [command for command in content.get("commands", [content.get("command")]) if isinstance(command, str)]
    except (OSError, ValueError, AttributeError, TypeError):
        called = []
    more = f" (and {len(called) - NAMED} other calls, which {file} lists)" if len(called) > NAMED else ""
    again = f"call again: {'; '.join(called[-NAMED:])}{more}" if called else (
        f"call the same `fedgg compare` or `fedgg sweep` again, with --out {shlex.quote(str(folder))}"
    )  # fmt: skip
    raise UserError(
        f"{folder} holds a comparison or sweep, which needs no resume; to go on, {again} (finished runs are kept, "
        "the others go on where they stopped)"
    )
