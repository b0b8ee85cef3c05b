"""fedgg experiments and algorithms in Flower (https://flower.ai).

    app = fedgg.flower.client_app("experiment.toml")     # the ClientApp, on every node
    app = fedgg.flower.server_app("experiment.toml")     # the ServerApp
    fedgg.flower.divide(experiment, folder)              # writes one data file per client and one for the server

In an existing Flower app, `fedgg.flower.strategy` replaces the Flower strategy in the ServerApp, and the training loop
of the ClientApp runs inside a `with fedgg.flower.guided(...)` block.

Flower is an optional dependency: `pip install "fedgg[flower]"`. Each name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedgg.errors import UserError, without_flower

if TYPE_CHECKING:
    from fedgg.flower.client import client_app
    from fedgg.flower.data_files import divide
    from fedgg.flower.existing_apps import guided, strategy
    from fedgg.flower.server import server_app

# No module of this package may have the name of a function here: importing the module would hide the function.
_MODULE_OF = {
    "client_app": "client",
    "server_app": "server",
    "divide": "data_files",
    "guided": "existing_apps",
    "strategy": "existing_apps",
}

__all__ = ["client_app", "divide", "guided", "server_app", "strategy"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedgg.flower' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"fedgg.flower.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flwr":
            raise UserError(without_flower()) from error
        raise
