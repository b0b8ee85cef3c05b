"""fedgg: Global Update Guided Federated Learning, and a laboratory for the algorithms around it.

    import fedgg
    run = fedgg.run(fedgg.Experiment(rounds=20), algorithm=fedgg.FedGG(mu=0.1))
"""

from __future__ import annotations

from fedgg.algorithms import SCAFFOLD, FedAvg, FedAvgM, FedGG, FedProx, FedSGD
from fedgg.core.algorithm import Algorithm, Batch, Hub, Number, Site, setting
from fedgg.core.plan import Work
from fedgg.core.rows import Rows, dot, length
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.runner import Run, Watcher, run
from fedgg.lab.study import Study, run_study
from fedgg.version import VERSION as __version__

__all__ = [
    "SCAFFOLD",
    "Algorithm",
    "Batch",
    "Experiment",
    "FedAvg",
    "FedAvgM",
    "FedGG",
    "FedProx",
    "FedSGD",
    "Hub",
    "Number",
    "Rows",
    "Run",
    "Site",
    "Study",
    "UserError",
    "Watcher",
    "Work",
    "__version__",
    "dot",
    "length",
    "run",
    "run_study",
    "setting",
]
