"""One paper, one file; and the names under which they are known."""

from __future__ import annotations

from fedgg.algorithms.fedavg import FedAvg
from fedgg.algorithms.fedavgm import FedAvgM
from fedgg.algorithms.fedcl import FedCL
from fedgg.algorithms.fedcurv import FedCurv
from fedgg.algorithms.fedgg import FedGG
from fedgg.algorithms.fedprox import FedProx
from fedgg.algorithms.fedsgd import FedSGD
from fedgg.algorithms.moon import MOON
from fedgg.algorithms.scaffold import SCAFFOLD
from fedgg.core.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedsgd": FedSGD,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "fedcl": FedCL,
    "fedcurv": FedCurv,
    "moon": MOON,
    "fedgg": FedGG,
}

__all__ = ["ALGORITHMS", "MOON", "SCAFFOLD", "FedAvg", "FedAvgM", "FedCL", "FedCurv", "FedGG", "FedProx", "FedSGD"]
