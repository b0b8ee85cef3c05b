"""Who trains the clients of a round: engines differ in speed, never in numbers."""

from __future__ import annotations

from fedgg.engines.job import Engine, RoundJob
from fedgg.engines.loop import Loop
from fedgg.engines.stacked import Stacked
from fedgg.engines.streams import Streams
from fedgg.engines.workers import Workers

__all__ = ["Engine", "Loop", "RoundJob", "Stacked", "Streams", "Workers"]
