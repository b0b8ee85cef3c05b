"""An algorithm from outside the package, in thirty lines.

    fedgg check examples/my_algorithm.py:MyAlgorithm
    fedgg compare --algorithm fedavg --algorithm examples/my_algorithm.py:MyAlgorithm --rounds 10

It clips each client's update to a maximal norm.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from fedgg import Algorithm, Client, Number, Rows, length, setting


@dataclass(frozen=True)
class MyAlgorithm(Algorithm):
    """Differs from FedAvg: an update with a norm above `radius` is scaled down to it. Neutral at a huge radius."""

    radius: Number = setting(0.5, "largest norm of an update", "tried on digits: half of the clients' drift")

    def neutral(self) -> "MyAlgorithm":
        return replace(self, radius=1e9)

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        delta = up["delta"]
        factor = (self.radius / length(delta).clamp_min(1e-12)).clamp_max(1.0)  # [K, 1]: one factor per client
        return {"delta": factor * delta}, memory
