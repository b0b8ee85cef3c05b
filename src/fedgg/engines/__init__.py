"""Engines train the clients of a round and score models; they differ in speed, and in the order of rounding."""

from __future__ import annotations

from fedgg.engines.base import Engine, RoundJob
from fedgg.engines.fused.engine import Fused
from fedgg.engines.gpu.stacked import Stacked
from fedgg.engines.gpu.streams import Streams
from fedgg.engines.loop import Loop
from fedgg.engines.workers.engine import Workers

__all__ = ["Engine", "Fused", "Loop", "RoundJob", "Stacked", "Streams", "Workers"]
