"""What works around any algorithm: client-level differential privacy, robust aggregation, and clients that attack.

They sit between what clients send up and `aggregate` (`core.collect`), so engines and algorithms know nothing of them.
"""

from __future__ import annotations

from fedgg.aggregation.attack import Attack
from fedgg.aggregation.privacy import ClientPrivacy
from fedgg.aggregation.privacy_budget import Budget
from fedgg.aggregation.robust import CoordinateMedian, NormClip, TrimmedMean

__all__ = ["Attack", "Budget", "ClientPrivacy", "CoordinateMedian", "NormClip", "TrimmedMean"]
