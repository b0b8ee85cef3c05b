"""Robust aggregation: what a minority of clients sends cannot carry the mean away.

    median        each coordinate's median over clients                              Yin et al., ICML 2018, Def. 1
    trimmed mean  each coordinate's mean without its trim K largest and smallest       Yin et al., ICML 2018, Def. 2
    norm clip     the mean of updates no longer than a bound                                Sun et al., 2019, Sec. 3

The first two count clients the same, since an example count is a claim an attacker can make; `aggregate` is given K
clients who all sent the result. Norm clipping keeps every client's own row and its share by examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedgg.aggregation.privacy import lengths, refuse_what_is_no_vector, within
from fedgg.core.client_rows import Rows
from fedgg.core.server import Collector, Sent, all_sent_the_same


@dataclass(frozen=True)
class CoordinateMedian(Collector):
    """Each coordinate's median; of an even number of clients, the mean of the two in the middle."""

    counts_equally: ClassVar[bool] = True

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        return all_sent_the_same({name: median(rows) for name, rows in sent.up.items()}, len(sent.share))


@dataclass(frozen=True)
class TrimmedMean(Collector):
    """Each coordinate's mean over the clients that are neither among its largest nor among its smallest."""

    counts_equally: ClassVar[bool] = True

    trim: float = 0.2  # share of the clients that is removed at either end

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        clients = len(sent.share)
        cut = trimmed_clients(self.trim, clients)
        trimmed = {
            name: rows.sort(dim=0).values[cut : clients - cut].mean(0, keepdim=True) for name, rows in sent.up.items()
        }
        return all_sent_the_same(trimmed, clients)


@dataclass(frozen=True)
class NormClip(Collector):
    """Each entry of a client's message no longer than `clip`, or than the median of the cohort's lengths.

    Entry by entry: under one bound for all of them together, a short one would leave room for a long other.
    """

    clip: float | None = None

    def check(self, up: Rows, parameters: int) -> None:
        way_out = "take robust.rule = 'median' or 'trimmed_mean', or another algorithm"
        refuse_what_is_no_vector("robust.rule = 'norm_clip'", up, parameters, way_out)

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        return {name: self._shortened(rows) for name, rows in sent.up.items()}, sent.share

    def _shortened(self, rows: Tensor) -> Tensor:
        length = lengths([rows])
        return rows * within(median(length) if self.clip is None else self.clip, length).to(rows.dtype)


def trimmed_clients(trim: float, clients: int) -> int:
    """How many are removed at either end."""
    return int(trim * clients + 1e-9)  # 0.29 of 100 is 29, though not in binary


def median(rows: Tensor) -> Tensor:
    """Over clients, `[1, ...]`; halves are added, since two large numbers may have no sum."""
    ordered = rows.sort(dim=0).values
    low, high = ordered[(len(rows) - 1) // 2], ordered[len(rows) // 2]
    if len(rows) % 2:
        return low[None].clone()
    # Held between the two: half of the smallest number there is would be none.
    return (low / 2 + high / 2).clamp(low, high)[None]
