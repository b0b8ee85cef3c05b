"""fedgg: Global Update Guided Federated Learning, and a laboratory for the algorithms around it.

    import fedgg
    run = fedgg.run(fedgg.Experiment(rounds=20), algorithm=fedgg.FedGG(mu=0.1))

Names are looked up when they are first used, so that `fedgg --help` and the report do not wait for torch.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fedgg.errors import UserError

if TYPE_CHECKING:
    from fedgg.algorithms import (
        GHBM,
        MOON,
        SCAFFOLD,
        FedACG,
        FedAdagrad,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedCL,
        FedCM,
        FedCurv,
        FedDyn,
        FedExP,
        FedGG,
        FedHBM,
        FedLC,
        FedLESAM,
        FedNova,
        FedNTD,
        FedProx,
        FedSAM,
        FedSGD,
        FedSpeed,
        FedWMSAM,
        FedYogi,
        MoFedSAM,
    )
    from fedgg.compare_and_sweep import StudyResult, compare, sweep
    from fedgg.core.algorithm import Algorithm, Batch, Client, Number, Server, setting
    from fedgg.core.metrics import Metric
    from fedgg.core.optimisers import Optimiser
    from fedgg.core.random_choices import Work
    from fedgg.core.server import Collector
    from fedgg.core.tasks import Task
    from fedgg.core.tensor_rows import Rows, dot, length
    from fedgg.engines.base import RoundJob
    from fedgg.lab.config import Experiment
    from fedgg.lab.config_sections import (
        AlgorithmConfig,
        DataConfig,
        EngineConfig,
        LocalConfig,
        ModelConfig,
        OptimiserConfig,
        ScheduleConfig,
        ServerConfig,
        SplitConfig,
        TaskConfig,
    )
    from fedgg.lab.observer import Observer, PrintObserver, ProgressObserver
    from fedgg.lab.optional_sections import AttackConfig, PersonalConfig, PrivacyConfig, RobustConfig, StopConfig
    from fedgg.lab.run_result import Run
    from fedgg.lab.study import Study, run_study
    from fedgg.lab.trackers import MLflowTracker, TensorBoardTracker, Tracker, WandbTracker
    from fedgg.lab.trusted_code import trust
    from fedgg.run_experiment import run
    from fedgg.tune_settings import TuningResult, tune

__version__ = "0.1.0"
OLDEST_NUMPY = (1, 26)
_RENAMED = {"Site": "Client", "Hub": "Server"}
_HOMES = {
    "fedgg.compare_and_sweep": ("StudyResult", "compare", "sweep"),
    "fedgg.run_experiment": ("run",),
    "fedgg.tune_settings": ("TuningResult", "tune"),
    "fedgg.core.algorithm": ("Algorithm", "Batch", "Server", "Number", "Client", "setting"),
    "fedgg.core.metrics": ("Metric",),
    "fedgg.core.optimisers": ("Optimiser",),
    "fedgg.core.random_choices": ("Work",),
    "fedgg.core.server": ("Collector",),
    "fedgg.core.tasks": ("Task",),
    "fedgg.engines.base": ("RoundJob",),
    "fedgg.core.tensor_rows": ("Rows", "dot", "length"),
    "fedgg.lab.config": ("Experiment",),
    "fedgg.lab.config_sections": (
        "AlgorithmConfig",
        "DataConfig",
        "EngineConfig",
        "LocalConfig",
        "ModelConfig",
        "OptimiserConfig",
        "ScheduleConfig",
        "ServerConfig",
        "SplitConfig",
        "TaskConfig",
    ),
    "fedgg.lab.optional_sections": ("AttackConfig", "PersonalConfig", "PrivacyConfig", "RobustConfig", "StopConfig"),
    "fedgg.lab.observer": ("Observer", "PrintObserver", "ProgressObserver"),
    "fedgg.lab.run_result": ("Run",),
    "fedgg.lab.study": ("Study", "run_study"),
    "fedgg.lab.trackers": ("MLflowTracker", "TensorBoardTracker", "Tracker", "WandbTracker"),
    "fedgg.lab.trusted_code": ("trust",),
}


@cache
def check_numpy() -> None:
    """Refuse an older NumPy by name, before something else fails because of it. Nothing is imported for that."""
    try:
        version = metadata.version("numpy")
    except metadata.PackageNotFoundError:
        return  # the import will say so
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < OLDEST_NUMPY:
        raise UserError(f"fedgg needs NumPy 1.26 or newer, and this is {version}: pip install -U numpy")


def __getattr__(name: str) -> Any:
    if name == "flower":
        return importlib.import_module("fedgg.flower")
    if name in _RENAMED:
        raise UserError(f"fedgg.{name} is called fedgg.{_RENAMED[name]} now: change the import")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fedgg' has no attribute {name!r}")
    check_numpy()
    globals()[name] = value = getattr(importlib.import_module(_HOME_OF[name]), name)  # not looked up here again
    return value


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "GHBM",
    "MOON",
    "SCAFFOLD",
    "Algorithm",
    "AlgorithmConfig",
    "AttackConfig",
    "Batch",
    "Client",
    "Collector",
    "DataConfig",
    "EngineConfig",
    "Experiment",
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
    "LocalConfig",
    "MLflowTracker",
    "Metric",
    "MoFedSAM",
    "ModelConfig",
    "Number",
    "Observer",
    "Optimiser",
    "OptimiserConfig",
    "PersonalConfig",
    "PrintObserver",
    "PrivacyConfig",
    "ProgressObserver",
    "RobustConfig",
    "RoundJob",
    "Rows",
    "Run",
    "ScheduleConfig",
    "Server",
    "ServerConfig",
    "SplitConfig",
    "StopConfig",
    "Study",
    "StudyResult",
    "Task",
    "TaskConfig",
    "TensorBoardTracker",
    "Tracker",
    "TuningResult",
    "UserError",
    "WandbTracker",
    "Work",
    "__version__",
    "compare",
    "dot",
    "length",
    "run",
    "run_study",
    "setting",
    "sweep",
    "trust",
    "tune",
]

# Everything that has no other home is an algorithm.
_HOME_OF = dict.fromkeys(__all__, "fedgg.algorithms") | {name: home for home, names in _HOMES.items() for name in names}
