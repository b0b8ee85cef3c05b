"""Small messages for tests of what happens to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedgg.core.server import Sent
from fedgg.core.tensor_rows import Rows


def rows(*clients: Sequence[float]) -> torch.Tensor:
    return torch.tensor(clients, dtype=torch.float64)


def sent(up: Rows, share: Sequence[float] | None = None, round_: int = 0, asked: int | None = None) -> Sent:
    clients = len(next(iter(up.values())))
    parts = share or [1 / clients] * clients
    return Sent(up, rows(*([part] for part in parts)), round_, asked or clients)
