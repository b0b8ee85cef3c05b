"""Errors that the user can put right, and packages that belong to an extra.

Everything that a user can put right (a wrong key, a missing file, a full disk) is raised as `UserError` with one line
that names the offending thing and the way out. The command line prints that line and exits with code 2; any other
exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

EXTRAS = {
    "matplotlib": "report",
    "plotly": "report",
    "pooch": "data",
    "requests": "data",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "ray": "flower",
    "psutil": "bench",
    "tensorboard": "tensorboard",
}


class UserError(Exception):
    """A mistake the user can put right; its message is one line."""


def missing_extra(error: ImportError) -> UserError | None:
    """The command that installs the package whose import failed, where it belongs to an extra of fedgg."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return None
    return UserError(f"this needs {package}, which is not installed: pip install 'fedgg[{EXTRAS[package]}]'")
