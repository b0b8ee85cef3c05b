"""Errors that the user can correct, and packages that belong to an extra.

An error that the user can correct (a wrong key, a missing file, a full disk) is raised as `UserError` with a message of
one line that names the cause and the remedy. The command line prints the message and exits with code 2; any other
exception is a bug in fedgg and keeps its traceback.
"""

from __future__ import annotations

EXTRAS = {
    "matplotlib": "report",
    "plotly": "report",
    "pooch": "data",
    "requests": "data",
    "PIL": "data",
    "datasets": "datasets",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "ray": "flower",
    "psutil": "bench",
    "tensorboard": "tensorboard",
    "optuna": "tune",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


class UserError(Exception):
    """An error that the user can correct; its message is one line."""


def missing_extra(error: ImportError) -> UserError | None:
    """A UserError with the install command if the missing package belongs to an extra of fedgg, else None."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return None
    return UserError(f"this needs {package}, which is not installed: pip install 'fedgg[{EXTRAS[package]}]'")
