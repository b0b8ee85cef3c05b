"""Where a run's numbers come from: the versions, commit and user code that versions.json records."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedgg
from fedgg.core.metrics import Mean, Metric
from fedgg.core.tasks import OwnLoss
from fedgg.lab.build import Federation
from fedgg.lab.name_resolution import engine_class, used_code

ACCURACY = [{"name": "accuracy", "higher_is_better": True, "percent": True}]  # where versions.json has no metrics
OURS = ("fedgg", "torch", "builtins", "abc", "typing")  # packages that are identified by their versions
COMMIT_VARIABLE = "FEDGG_COMMIT"  # names the commit where there is only a copy of the files, as in a container


def versions_of(federation: Federation) -> dict[str, Any]:
    """The content of versions.json, less its format: what a resumed run must have, and what the run was made with."""
    net, experiment, origin = federation.net, federation.experiment, federation.origin
    # Two models from Python may share a name; the shapes of their parameters distinguish them.
    shapes = [f"{name}{tuple(shape)}" for name, shape in zip(net.layout.names, net.layout.shapes, strict=True)]
    metrics = [
        {"name": metric.name, "higher_is_better": metric.higher_is_better, "percent": metric.percent}
        for metric in net.metrics
    ]
    # Fingerprints of the user code that trains and aggregates; data and split are identified by their content.
    code = {"algorithm": code_of(federation.algorithm), "model": code_of(net.module)}
    for part, user_code in (
        ("task", code_of(net.task.function) if isinstance(net.task, OwnLoss) else None),
        ("metrics", _code_of_metrics(net.metrics) if metrics != ACCURACY else None),
        ("robust", code_of(federation.aggregation.collector)),
        ("engine", code_of(engine_class(federation.engine))),
    ):
        code |= {} if user_code is None else {part: user_code}
    code_files = used_code(experiment)
    engine = {"name": federation.engine, "precision": experiment.engine.precision, "reason": federation.choice.reason}
    if origin.keeper == "nodes":
        engine |= {"name": "flower", "reason": "clients train on nodes of their own"}
    device, texts = net.start.device, dict(federation.algorithm.diagnostic_texts)
    return {
        "experiment": experiment.trajectory(),
        "data": origin.fingerprint,
        "keeper": origin.keeper,
        "model": hashlib.sha256(" ".join(shapes).encode()).hexdigest(),
        "structure": fingerprint(str(net.module)),
        "code": code,
        **({"code_files": code_files} if code_files else {}),
        **({"diagnostics": texts} if texts else {}),
        **({"metrics": metrics} if metrics != ACCURACY else {}),
        "fedgg": fedgg.__version__,
        **commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "engine": engine,
    }


def _code_of_metrics(metrics: Sequence[Metric]) -> str | None:
    codes = [code_of(metric.function if isinstance(metric, Mean) else metric) for metric in metrics]
    return fingerprint(" ".join(filter(None, codes))) if any(codes) else None


def fingerprint(text: str) -> str:
    """Of source code, or of a module's layers as torch prints them: ReLU and Tanh differ, though without parameters."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_of(thing: Any) -> str | None:
    """Of the source of a function, or of a class or an object's class with its bases; None for the library's, or
    without a file."""
    if inspect.isfunction(thing):
        return None if thing.__module__.partition(".")[0] in OURS else _source((thing,))
    bases = (thing if isinstance(thing, type) else type(thing)).__mro__
    kinds = [kind for kind in bases if kind.__module__.partition(".")[0] not in OURS]
    return _source(kinds) if kinds else None


def _source(parts: Sequence[Any]) -> str | None:
    try:
        return fingerprint("\n".join(inspect.getsource(part) for part in parts))
    except (OSError, TypeError):
        return None


@cache
def commit() -> dict[str, Any]:
    """`commit`, and whether files are `changed` against it; both None where they are not known."""
    root = Path(fedgg.__file__).parents[2]
    if named := os.environ.get(COMMIT_VARIABLE):
        return {"commit": named, "changed": None}
    head = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    changed = bool(_git(root, "status", "--porcelain", "--untracked-files=no")) if head else None
    return {"commit": head, "changed": changed}


def _git(root: Path, *words: str) -> str | None:
    try:
        # Without locks: a run that is killed meanwhile must not leave the user's repository locked.
        command = ["git", "--no-optional-locks", "-C", str(root), *words]
        completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
