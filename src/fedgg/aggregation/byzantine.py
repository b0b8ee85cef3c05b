"""Byzantine clients: simulated attacks, and robust aggregation rules, with which a minority cannot determine the mean.

    median        each coordinate's median over clients                              Yin et al., ICML 2018, Def. 1
    trimmed mean  each coordinate's mean without its trim K largest and smallest       Yin et al., ICML 2018, Def. 2
    norm clip     the mean of updates no longer than a bound                                Sun et al., 2019, Sec. 3

The first two weight clients equally, since an example count is a claim an attacker can make; `aggregate` receives K
equal rows, the result. Norm clipping keeps the row of every client and its share by examples.

Attackers train like the others and send something else:

    sign_flip  - scale times the update
    noise      normal numbers of standard deviation `scale` instead of the update (Blanchard et al., NeurIPS 2017)
    nan        NaN

Vectors as long as the model are replaced; a number sent beside them (a step count) is replaced by `nan` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.aggregation.privacy import lengths, refuse_what_is_no_vector, within
from fedgg.core.client_rows import Rows
from fedgg.core.local import LocalEnd
from fedgg.core.sampling import stream
from fedgg.core.server import Collector, Lost, Sent, all_sent_the_same


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


Kind = Literal["sign_flip", "noise", "nan"]


@dataclass(frozen=True)
class Attack:
    kind: Kind
    scale: float
    clients: frozenset[int]
    seed: int

    @classmethod
    def draw(cls, kind: Kind, scale: float, count: int, clients: NDArray[np.int64], seed: int) -> Attack:
        """The same attackers in every round, drawn from these clients: all that can take part."""
        drawn = stream(seed, "attack").choice(clients, size=count, replace=False)
        return cls(kind, scale, frozenset(int(client) for client in drawn), seed)

    def act(self, ends: Mapping[int, LocalEnd | Lost], round_: int) -> dict[int, LocalEnd | Lost]:
        """What reaches the server; what clients keep for themselves is left alone."""
        return {
            client: replace(end, up=self._sent(end.up, round_, client))
            if client in self.clients and isinstance(end, LocalEnd)
            else end
            for client, end in ends.items()
        }

    def _sent(self, up: Rows, round_: int, client: int) -> Rows:
        if self.kind == "nan":
            return {name: torch.full_like(rows, float("nan")) for name, rows in up.items()}
        numbers = stream(self.seed, "attack noise", round_, client)
        sent = dict(up)
        for name in sorted(name for name, rows in up.items() if rows.shape[-1] > 1):
            rows = up[name]
            sent[name] = -self.scale * rows if self.kind == "sign_flip" else _normal(numbers, rows, self.scale)
        return sent


def _normal(numbers: np.random.Generator, rows: Tensor, scale: float) -> Tensor:
    drawn = torch.from_numpy(scale * numbers.standard_normal(tuple(rows.shape)))
    return drawn.to(dtype=rows.dtype, device=rows.device)
