"""Client-level differential privacy: McMahan, Ramage, Talwar and Zhang, ICLR 2018, with a cohort of fixed size.

mean = (1 / m) (sum_i  u_i min(1, clip / |u_i|)  +  N(0, (noise clip)^2 I))

u_i is all that client i sends up, as one vector; m is the number of clients asked, whoever was lost. Clients count the
same: an example count is data. `aggregate` is given m clients who all sent this mean, so that whatever it does is
post-processing and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgg.core.rows import Rows
from fedgg.core.sampling import stream
from fedgg.core.server import Collector, Sent, all_sent_the_same
from fedgg.errors import UserError


def lengths(entries: Iterable[Tensor]) -> Tensor:
    """Euclidean length of each client's entries taken as one vector, `[K, 1]` in float64: squares cannot overflow."""
    squares = [torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64).square() for rows in entries]
    return torch.stack(squares).sum(0).sqrt()


def within(bound: float | Tensor, length: Tensor) -> Tensor:
    """What to multiply vectors by so that none is longer than `bound`: exactly 1 where that holds already."""
    return torch.where(length > bound, bound / length.clamp_min(torch.finfo(length.dtype).tiny), 1.0)


def refuse_what_is_no_vector(wrapper: str, up: Rows, parameters: int, way_out: str) -> None:
    """A number beside the update has no length that could be bounded in the update's units."""
    for name, rows in up.items():
        if rows.shape[1:] != (parameters,):
            shape = " x ".join(map(str, rows.shape[1:]))
            raise UserError(
                f"{wrapper} bounds vectors as long as the model ({parameters}), but this algorithm also sends up "
                f"{name!r} of size {shape}: {way_out}"
            )


@dataclass(frozen=True)
class ClientPrivacy(Collector):
    """The Gaussian mechanism on the sum of clipped updates."""

    counts_equally: ClassVar[bool] = True

    clip: float
    noise: float  # standard deviation of the noise on the sum, in units of clip
    seed: int

    def check(self, up: Rows, parameters: int) -> None:
        refuse_what_is_no_vector("privacy", up, parameters, "take another algorithm, or run without [privacy]")

    def collect(self, sent: Sent) -> tuple[Rows, Tensor]:
        weights = within(self.clip, lengths(sent.up.values())) / sent.asked
        means = {name: torch.sum(weights.to(rows.dtype) * rows, 0, keepdim=True) for name, rows in sent.up.items()}
        return all_sent_the_same(self._noisy(means, sent), sent.asked)

    def _noisy(self, means: Rows, sent: Sent) -> Rows:
        """One draw for all entries in the order of their names: the same numbers on every device."""
        if self.noise == 0:
            return means
        numbers = stream(self.seed, "privacy", sent.round)
        deviation = self.noise * self.clip / sent.asked
        noisy = {}
        for name in sorted(means):
            mean = means[name]
            noise = torch.from_numpy(deviation * numbers.standard_normal(tuple(mean.shape)))
            noisy[name] = mean + noise.to(dtype=mean.dtype, device=mean.device)
        return noisy
