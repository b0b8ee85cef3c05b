"""Engines train the clients of a round and score models; they differ in speed and in floating-point rounding.

`ENGINES` holds the values of `engine.name`. A constructor's parameters are filled, by name, from the settings in the
section [engine]. A class attribute `devices` limits an engine to these devices.
"""

from __future__ import annotations

from fedgg.engines.base import Engine, RoundJob
from fedgg.engines.devices import Devices
from fedgg.engines.fused.engine import Fused
from fedgg.engines.gpu.stacked import Stacked
from fedgg.engines.gpu.streams import Streams
from fedgg.engines.loop import Loop
from fedgg.engines.workers.engine import Workers
from fedgg.registry import Registry

ENGINES: Registry[type[Engine]] = Registry(
    "engine",
    {"loop": Loop, "fused": Fused, "workers": Workers, "stacked": Stacked, "streams": Streams, "devices": Devices},
    code="CLASS",
)

__all__ = ["ENGINES", "Engine", "Fused", "Loop", "RoundJob", "Stacked", "Streams", "Workers"]
