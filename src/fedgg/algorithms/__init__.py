"""The algorithms, one file per paper, and the registry of their names."""

from __future__ import annotations

from fedgg.algorithms.fedacg import FedACG
from fedgg.algorithms.fedavg import FedAvg, FedSGD
from fedgg.algorithms.fedavgm import FedAvgM
from fedgg.algorithms.fedcl import FedCL
from fedgg.algorithms.fedcm import FedCM
from fedgg.algorithms.fedcurv import FedCurv
from fedgg.algorithms.feddyn import FedDyn
from fedgg.algorithms.fedexp import FedExP
from fedgg.algorithms.fedgg import FedGG
from fedgg.algorithms.fedlc import FedLC
from fedgg.algorithms.fedlesam import FedLESAM
from fedgg.algorithms.fednova import FedNova
from fedgg.algorithms.fedntd import FedNTD
from fedgg.algorithms.fedopt import FedAdagrad, FedAdam, FedYogi
from fedgg.algorithms.fedprox import FedProx
from fedgg.algorithms.fedsam import FedSAM, MoFedSAM
from fedgg.algorithms.fedspeed import FedSpeed
from fedgg.algorithms.fedwmsam import FedWMSAM
from fedgg.algorithms.ghbm import GHBM, FedHBM
from fedgg.algorithms.moon import MOON
from fedgg.algorithms.scaffold import SCAFFOLD
from fedgg.core.algorithm import Algorithm
from fedgg.registry import Registry

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    {
        "fedsgd": FedSGD,
        "fedavg": FedAvg,
        "fedavgm": FedAvgM,
        "fedprox": FedProx,
        "fednova": FedNova,
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedyogi": FedYogi,
        "fedcm": FedCM,
        "fedexp": FedExP,
        "fedacg": FedACG,
        "feddyn": FedDyn,
        "scaffold": SCAFFOLD,
        "fedcl": FedCL,
        "fedcurv": FedCurv,
        "moon": MOON,
        "fedsam": FedSAM,
        "mofedsam": MoFedSAM,
        "fedlesam": FedLESAM,
        "fedwmsam": FedWMSAM,
        "fedspeed": FedSpeed,
        "ghbm": GHBM,
        "fedhbm": FedHBM,
        "fedntd": FedNTD,
        "fedlc": FedLC,
        "fedgg": FedGG,
    },
    code="CLASS",
)

__all__ = [
    "ALGORITHMS",
    "GHBM",
    "MOON",
    "SCAFFOLD",
    "FedACG",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCL",
    "FedCM",
    "FedCurv",
    "FedDyn",
    "FedExP",
    "FedGG",
    "FedHBM",
    "FedLC",
    "FedLESAM",
    "FedNTD",
    "FedNova",
    "FedProx",
    "FedSAM",
    "FedSGD",
    "FedSpeed",
    "FedWMSAM",
    "FedYogi",
    "MoFedSAM",
]
