"""Which code ran: the commit of the repository this library lies in, if it lies in one."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import fedgg

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
