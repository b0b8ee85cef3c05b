"""`fedgg run` from Python, with your own model and arrays."""

import numpy as np
from sklearn.datasets import load_wine
from torch import nn

import fedgg

x, y = load_wine(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))
train, test = order[:128], order[128:]

run = fedgg.run(
    fedgg.Experiment(
        rounds=20,
        data={"normalise": "standard"},  # your own arrays are not scaled by default
        split={"clients": 4, "beta": 0.5},
        local={"batch": 16},
    ),
    model=lambda: nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3)),
    data=(x[train], y[train], x[test], y[test]),
    algorithm=fedgg.FedGG(mu=0.1),
)
print(f"{run.status}: test accuracy {100 * run.test_accuracy[-1]:.1f}% after {len(run.rounds)} rounds")
print(f"first wines: predicted {run.predict(x[test][:5])}, labelled {y[test][:5]}")  # predict takes unscaled inputs
