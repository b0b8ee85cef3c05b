"""Errors that the user can correct, and packages that belong to an extra.

An error that the user can correct (a wrong key, a missing file, a full disk) is raised as `UserError` with a message of
one line that names the cause and the remedy. The command line prints the message and exits with code 2; any other
exception is a bug in fedgg and keeps its traceback.
"""

from __future__ import annotations

import sys

EXTRAS = {
    "matplotlib": "report",
    "plotly": "report",
    "pooch": "data",
    "requests": "data",
    "PIL": "data",
    "datasets": "datasets",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "ray": "ray",
    "psutil": "bench",
    "tensorboard": "tensorboard",
    "optuna": "tune",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


class UserError(Exception):
    """An error that the user can correct; its message is one line."""


def without_flower() -> str:
    """What to do where Flower is not installed."""
    if sys.version_info < (3, 11):
        return "this needs Flower, which needs Python 3.11 or newer: make an environment with a newer Python"
    return "this needs Flower: pip install 'fedgg[flower]'"


def missing_extra(error: ImportError) -> UserError | None:
    """A UserError with the install command if the missing package belongs to an extra of fedgg, else None."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return None
    if EXTRAS[package] == "flower":
        return UserError(without_flower())
    return UserError(f"this needs {package}, which is not installed: pip install 'fedgg[{EXTRAS[package]}]'")
