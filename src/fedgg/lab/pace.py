"""How long a local step of an experiment takes here, measured on random input: no data set is needed."""

from __future__ import annotations

import time

import numpy as np
import torch

from fedgg.core.seeds import stream
from fedgg.data.catalog import PUBLICATIONS
from fedgg.data.dataset import Dataset
from fedgg.lab.arithmetic import arithmetic
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.runner import make_engine
from fedgg.lab.state import begin, play_round

STEPS = 3  # of each client, in each of two rounds: the first warms up
_DIGITS = ((1, 8, 8), 10, 1437)  # shape, classes, training examples


def steps_a_round(experiment: Experiment) -> int:
    """Local steps of all clients together, a little fewer than with ragged last batches."""
    _, _, examples = _facts(experiment.data.source)
    return -(-experiment.local.epochs * examples // experiment.local.batch)


def seconds_a_step(experiment: Experiment) -> float:
    """One client's step as this experiment's engine takes it, its share of the aggregation included."""
    shape, classes, _ = _facts(experiment.data.source)
    clients = 1 if experiment.engine.device == "cpu" else experiment.split.clients
    engine = "loop" if experiment.engine.device == "cpu" else experiment.engine.name
    small = experiment.changed(
        {"split.scheme": "iid", "split.clients": clients, "local.epochs": 1, "rounds": 2, "engine.name": engine}
    )
    with arithmetic(small):
        federation = build(small, data=_noise(shape, classes, STEPS * clients * small.local.batch))
        maker, state = make_engine(federation), begin(federation)
        for _ in range(2):
            started = time.perf_counter()
            state, _ = play_round(federation, state, maker)
            spent = time.perf_counter() - started
    return spent / (STEPS * clients)


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
