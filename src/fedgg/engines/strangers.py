"""Classes from a user's own FILE.py, made known to a process that has never read that file.

The text travels, not the path: all processes of a run work with what was read, even if the file is edited meanwhile.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

PREFIX = "fedgg_user_"  # modules that were read from a file carry it before their name

Stranger = tuple[str, str, str]  # name of the module, path, text


def strangers() -> list[Stranger]:
    """Every user's file this process has read."""
    found = [(name, str(module.__file__)) for name, module in sys.modules.items() if name.startswith(PREFIX)]
    return [(name, path, Path(path).read_text(encoding="utf-8")) for name, path in found if Path(path).is_file()]


def meet(stranger: Stranger) -> None:
    """Read it here."""
    name, path, text = stranger
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = path
    exec(compile(text, path, "exec"), vars(module))
