"""Byzantine clients: simulated attacks, and robust aggregation rules, which limit the influence of a minority.

    median        each coordinate's median over clients                              Yin et al., ICML 2018, Def. 1
    trimmed mean  each coordinate's mean without its trim K largest and smallest       Yin et al., ICML 2018, Def. 2
    norm clip     the mean of updates no longer than a bound                                Sun et al., 2019, Sec. 3

Median and trimmed mean weight clients equally, since an attacker could claim any number of examples; `aggregate`
receives K copies of the result. Norm clipping keeps the row of every client and its share by examples.

Attackers train like the other clients and replace what they send:

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

from fedgg.aggregation.privacy import clip_factors, lengths, require_model_vectors
from fedgg.core.algorithm import setting
from fedgg.core.local import LocalEnd
from fedgg.core.random_choices import stream
from fedgg.core.server import Collector, Lost, Sent, all_sent_the_same
from fedgg.core.tensor_rows import Rows


@dataclass(frozen=True)
class CoordinateMedian(Collector):
    """Each coordinate's median; of an even number of clients, the mean of the two in the middle."""

    counts_equally: ClassVar[bool] = True

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        return all_sent_the_same({name: median(rows) for name, rows in sent.up.items()}, len(sent.share))


@dataclass(frozen=True)
class TrimmedMean(Collector):
    """Each coordinate's mean over the clients, without the largest and the smallest values."""

    counts_equally: ClassVar[bool] = True

    trim: float = setting(0.2, "share of the clients that is removed at each end, below 0.5", "ours")

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        clients = len(sent.share)
        cut = trimmed_clients(self.trim, clients)
        trimmed = {
            name: rows.sort(dim=0).values[cut : clients - cut].mean(0, keepdim=True) for name, rows in sent.up.items()
        }
        return all_sent_the_same(trimmed, clients)


@dataclass(frozen=True)
class NormClip(Collector):
    """Each entry of a client's message, clipped to the length `clip` or to the median of the cohort's lengths.

    Entries are clipped separately: under one bound for the whole message, a short entry would allow a longer other one.
    """

    clip: float | None = setting(None, "the longest entry; none: the median of the cohort's lengths", "ours")

    def check(self, up: Rows, parameters: int) -> None:
        way_out = (
            "take a rule that also applies to single numbers, such as robust.rule = 'median', or another algorithm"
        )
        require_model_vectors("robust.rule = 'norm_clip'", up, parameters, way_out)

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        return {name: self._clipped(rows) for name, rows in sent.up.items()}, sent.share

    def _clipped(self, rows: Tensor) -> Tensor:
        length = lengths([rows])
        return rows * clip_factors(median(length) if self.clip is None else self.clip, length).to(rows.dtype)


def trimmed_clients(trim: float, clients: int) -> int:
    """The number of clients removed at each end."""
    return int(trim * clients + 1e-9)  # 0.29 * 100 is 28.999... in binary


def median(rows: Tensor) -> Tensor:
    """Over clients, `[1, ...]`; halves are added, since the sum of two large numbers may overflow."""
    ordered = rows.sort(dim=0).values
    low, high = ordered[(len(rows) - 1) // 2], ordered[len(rows) // 2]
    if len(rows) % 2:
        return low[None].clone()
    # Clamped between the two: half of the smallest subnormal number rounds to zero.
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
        """The attackers of all rounds, drawn from `clients`, those that can take part."""
        attackers = stream(seed, "attack").choice(clients, size=count, replace=False)
        return cls(kind, scale, frozenset(int(client) for client in attackers), seed)

    def act(self, ends: Mapping[int, LocalEnd | Lost], round_: int) -> dict[int, LocalEnd | Lost]:
        """The messages that reach the server; client state is not changed."""
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
    noise = torch.from_numpy(scale * numbers.standard_normal(tuple(rows.shape)))
    return noise.to(dtype=rows.dtype, device=rows.device)
