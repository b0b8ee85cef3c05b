"""Which code ran: the commit of this library, and whether the user's code is still the same."""

from __future__ import annotations

import hashlib
import inspect
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

import fedgg

OURS = ("fedgg", "torch", "builtins", "abc", "typing")  # versions tell of these


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def structure_of(module: nn.Module) -> str:
    """Of the layers as torch prints them: a ReLU is no Tanh, though both have no parameters."""
    return fingerprint(str(module))


def code_of(thing: Any) -> str | None:
    """Of the source of a class, or of an object's class, with its bases; None for the library's, or without a file."""
    bases = (thing if isinstance(thing, type) else type(thing)).__mro__
    kinds = [kind for kind in bases if kind.__module__.partition(".")[0] not in OURS]
    try:
        return fingerprint("\n".join(inspect.getsource(kind) for kind in kinds)) if kinds else None
    except (OSError, TypeError):
        return None


TOLD = "FEDGG_COMMIT"  # says the commit where there is only a copy of the files, as in a container


@cache
def commit() -> dict[str, Any]:
    """`commit`, and whether files are `changed` against it; both None where nobody can say."""
    root = Path(fedgg.__file__).parents[2]
    if told := os.environ.get(TOLD):
        return {"commit": told, "changed": None}
    found = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    changed = bool(_git(root, "status", "--porcelain", "--untracked-files=no")) if found else None
    return {"commit": found, "changed": changed}


def _git(root: Path, *words: str) -> str | None:
    try:
        # Without locks: a run that is killed while it looks must not leave the user's repository locked.
        asked = ["git", "--no-optional-locks", "-C", str(root), *words]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
