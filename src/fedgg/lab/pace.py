"""How long a local step of an experiment takes here, measured on random input: no data set is needed."""

from __future__ import annotations

import time

import numpy as np
import torch

from fedgg.core.seeds import stream
from fedgg.data.catalog import PUBLICATIONS
from fedgg.data.dataset import Dataset
from fedgg.engines import Stacked
from fedgg.lab.arithmetic import arithmetic
from fedgg.lab.build import build, chosen_device
from fedgg.lab.config import Experiment
from fedgg.lab.runner import make_engine
from fedgg.lab.state import begin, next_job, synchronise

STEPS = 3  # of each client, in each of two rounds: the first warms up
MOST = 24  # runs of a stack that are tried together: more cost memory and change little
_DIGITS = ((1, 8, 8), 10, 1437)  # shape, classes, training examples


def steps_a_round(experiment: Experiment) -> int:
    """Local steps of all clients together, a little fewer than with ragged last batches."""
    _, _, examples = _facts(experiment.data.source)
    return -(-experiment.local.epochs * examples // experiment.local.batch)


def seconds_a_step(experiment: Experiment, runs: int = 1) -> float:
    """One client's step as this experiment's engine takes it, while so many such runs are trained together."""
    shape, classes, _ = _facts(experiment.data.source)
    asked = experiment.engine
    one_by_one = asked.device == "cpu" and asked.name != "stacked"
    clients, engine = (1, "fused") if one_by_one else (experiment.split.clients, asked.name)
    small = experiment.changed(
        {"split.scheme": "iid", "split.clients": clients, "local.epochs": 1, "rounds": 2, "engine.name": engine}
    )
    with arithmetic(small):
        data = _noise(shape, classes, STEPS * clients * small.local.batch).to(chosen_device(small))
        federation = build(small, data=data)
        maker, state = make_engine(federation), begin(federation)
        together = min(runs, MOST) if isinstance(maker, Stacked) else 1
        jobs = [next_job(federation, state) for _ in range(together)]
        for _ in range(2):
            started = time.perf_counter()
            if isinstance(maker, Stacked):
                maker.train_together(jobs)
            else:
                dict(maker.train(jobs[0]))
            synchronise(federation.net.start)
            spent = time.perf_counter() - started
    return spent / (STEPS * clients * together)


def _facts(source: str) -> tuple[tuple[int, ...], int, int]:
    if source not in PUBLICATIONS:
        return _DIGITS
    published = PUBLICATIONS[source]
    return (3, 32, 32), len(published.classes), sum(published.train_counts)


def _noise(shape: tuple[int, ...], classes: int, examples: int) -> Dataset:
    x = torch.from_numpy(stream(0, "pace").integers(0, 256, (examples, *shape), dtype=np.uint8))
    y = torch.arange(examples) % classes
    few = min(examples, 64)
    names = tuple(map(str, range(classes)))
    return Dataset("noise", x, y, x[:few], y[:few], names, peak=255.0)
