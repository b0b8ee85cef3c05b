"""Where a run's numbers come from: the versions, commit and user code that versions.json records.

User code is identified by its source and by the numbers that it gives for fixed inputs. The numbers also change with
what the source does not show: constants of its file, other functions, values in a closure, attributes of an object.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedgg
from fedgg.core.metrics import METRICS, Mean, Metric
from fedgg.core.random_choices import unchanged_generators
from fedgg.core.tasks import OwnLoss
from fedgg.engines import ENGINES
from fedgg.lab.build import Federation
from fedgg.lab.name_resolution import USED_CODE, engine_class, used_code
from fedgg.lab.run_places import PLACE

ACCURACY = [{"name": "accuracy", "higher_is_better": True, "percent": True}]  # where versions.json has no metrics
OURS = ("fedgg", "torch", "builtins", "abc", "typing")  # packages that are identified by their versions
PROBED = 64  # examples for which losses and metrics of user code are computed
NEAR = 1e-4  # relative difference that is rounding, on another device for instance
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
        ("engine", code_of(ENGINES.get(federation.choice.name) or engine_class(federation.choice.name))),
    ):
        code |= {} if user_code is None else {part: user_code}
    code_files = used_code(experiment) if USED_CODE else {}
    is_users = isinstance(net.task, OwnLoss) or metrics != ACCURACY or ":" in experiment.model.name
    behaviour = behaviour_of(federation) if is_users else {}
    engine = {"name": federation.engine, "precision": experiment.engine.precision, "reason": federation.choice.reason}
    if origin.keeper == "nodes":
        engine |= {"name": "flower", "reason": "clients train on nodes of their own"}
    texts = dict(federation.algorithm.diagnostic_texts)
    devices = [one if one == "cpu" else torch.cuda.get_device_name(one) for one in experiment.engine.devices]
    return {
        "experiment": experiment.trajectory(),
        "data": origin.fingerprint,
        "keeper": origin.keeper,
        "model": hashlib.sha256(" ".join(shapes).encode()).hexdigest(),
        "structure": fingerprint(str(net.module)),
        "code": code,
        **({"code_files": code_files} if code_files else {}),
        **({"behaviour": behaviour} if behaviour else {}),
        **({"diagnostics": texts} if texts else {}),
        **({"metrics": metrics} if metrics != ACCURACY else {}),
        "fedgg": fedgg.__version__,
        **commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": ", ".join(dict.fromkeys(devices)),
        "engine": engine,
        **({"where": dict(PLACE)} if PLACE else {}),
    }


def _code_of_metrics(metrics: Sequence[Metric]) -> str | None:
    codes = [code_of(metric.function if isinstance(metric, Mean) else metric) for metric in metrics]
    return fingerprint(" ".join(filter(None, codes))) if any(codes) else None


def behaviour_of(federation: Federation) -> dict[str, list[float]]:
    """Numbers that user code gives for fixed inputs, by part: `model`, `loss`, `metrics`.

    The model is given two examples of the data, in evaluation mode and with its initial weights; loss and metrics are
    given random outputs for examples of the test set. Code is left out if it gives other numbers when it is called
    again, numbers that are not finite, or an error.
    """
    net, task = federation.net, federation.net.task
    probes: dict[str, Callable[[], list[Tensor]]] = {}
    if ":" in federation.experiment.model.name and net.sample is not None:
        whole = net if net.personal is None else net.personal.whole
        forward = whole.bind(whole.start_buffers, train=False)
        probes["model"] = partial(lambda x: [forward(whole.start, x[None])], net.sample)
    targets = federation.feed.y_test[:PROBED]
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn((len(targets), *net.output_shape), generator=generator).to(net.start)
    if isinstance(task, OwnLoss):
        probes["loss"] = lambda: [task.losses(outputs, targets)]
    own_metrics = [metric for metric in net.metrics if type(metric) not in METRICS.values()]
    if own_metrics:
        scored = task.scored(outputs, targets)
        probes["metrics"] = lambda: [torch.tensor(metric.value(metric.sums(*scored))) for metric in own_metrics]
    numbers = {part: _numbers_of(probe) for part, probe in probes.items()}
    return {part: list(values) for part, values in numbers.items() if values}


def _numbers_of(probe: Callable[[], list[Tensor]]) -> tuple[float, ...]:
    """Two means of each tensor, plain and with weights that rise from zero to one; none if they do not repeat."""

    def measured() -> tuple[float, ...]:
        flat = [values.detach().double().flatten().cpu() for values in probe()]
        weights = [torch.linspace(0, 1, len(values), dtype=torch.float64) for values in flat]
        means = [(values.mean(), (values * weight).mean()) for values, weight in zip(flat, weights, strict=True)]
        return tuple(float(mean) for pair in means for mean in pair)

    try:
        with torch.no_grad(), unchanged_generators():
            first, second = measured(), measured()
    except Exception:  # user code may raise anything
        return ()
    return first if first == second and all(map(math.isfinite, first)) else ()


def behaves_differently(then: Mapping[str, Any], now: Mapping[str, Any], part: str) -> bool:
    """Whether a part of the user's gives other numbers than it did; False where either has none on record."""
    before, after = ((versions.get("behaviour") or {}).get(part) for versions in (then, now))
    if not before or not after:
        return False
    rounding = NEAR * max(map(abs, before))
    return len(before) != len(after) or any(abs(a - b) > rounding for a, b in zip(before, after, strict=True))


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
