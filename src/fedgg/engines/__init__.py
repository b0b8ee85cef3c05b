"""Engines train the clients of a round and score models; they differ in speed, and in the order of rounding."""

from __future__ import annotations

from fedgg.engines.fused.engine import Fused
from fedgg.engines.job import Engine, RoundJob
from fedgg.engines.loop import Loop
from fedgg.engines.stacked import Stacked
from fedgg.engines.streams import Streams
from fedgg.engines.workers import Workers

__all__ = ["Engine", "Fused", "Loop", "RoundJob", "Stacked", "Streams", "Workers"]
