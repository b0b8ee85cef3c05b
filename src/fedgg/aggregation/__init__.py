"""Applied to the clients' messages before an algorithm's `aggregate`: privacy, robust aggregation rules, and attacks.

They are independent of algorithm and engine (`core.server`).
"""

from __future__ import annotations

from fedgg.aggregation.byzantine import Attack, CoordinateMedian, NormClip, TrimmedMean
from fedgg.aggregation.privacy import Budget, ClientPrivacy
from fedgg.core.server import Collector
from fedgg.registry import Registry

RULES: Registry[type[Collector]] = Registry(
    "aggregation rule",
    {"median": CoordinateMedian, "trimmed_mean": TrimmedMean, "norm_clip": NormClip},
    code="CLASS",
)

__all__ = ["RULES", "Attack", "Budget", "ClientPrivacy", "CoordinateMedian", "NormClip", "TrimmedMean"]
