"""Who trains the clients of a round: engines differ in speed, never in numbers."""

from __future__ import annotations

from fedgg.engines.job import RoundJob
from fedgg.engines.loop import Loop

__all__ = ["Loop", "RoundJob"]
