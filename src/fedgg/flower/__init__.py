"""The same algorithms on machines that are not yours, over Flower (https://flower.ai).

    app = fedgg.flower.client_app("experiment.toml")     # every node
    app = fedgg.flower.server_app("experiment.toml")     # the server
    fedgg.flower.divide(experiment, folder)              # a data set into one file for each machine

In a Flower app of your own, `fedgg.flower.strategy` takes the place of Flower's, and `fedgg.flower.guided` stands
around the training.

`pip install "fedgg[flower]"` brings Flower. Names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedgg.errors import UserError

if TYPE_CHECKING:
    from fedgg.flower.client import client_app
    from fedgg.flower.data_files import divide
    from fedgg.flower.guided_training import guided
    from fedgg.flower.server import server_app
    from fedgg.flower.server_strategy import strategy

# No module has the name of a function here: importing it would put the module in the place of the function.
_HOMES = {
    "client_app": "client",
    "server_app": "server",
    "divide": "data_files",
    "guided": "guided_training",
    "strategy": "server_strategy",
}

__all__ = ["client_app", "divide", "guided", "server_app", "strategy"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedgg.flower' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"fedgg.flower.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flwr":
            raise UserError('Flower is not installed: pip install "fedgg[flower]"') from error
        raise
