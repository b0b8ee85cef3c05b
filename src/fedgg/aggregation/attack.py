"""Clients that attack: they train as everybody does, and send up something else.

    sign_flip  - scale times the update: the model is pushed back
    noise      normal numbers of standard deviation `scale` instead of the update (Blanchard et al., NeurIPS 2017)
    nan        NaN: what the guard must leave out

Vectors as long as the model are replaced; a number sent beside them (a step count) stays, but for `nan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.core.client_rows import Rows
from fedgg.core.local import LocalEnd
from fedgg.core.sampling import stream
from fedgg.core.server import Lost

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
