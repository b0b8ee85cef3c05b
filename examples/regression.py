"""Regression: the progress of diabetes a year ahead, by four hospitals whose patients differ in age."""

from sklearn.datasets import load_diabetes

import fedgg

x, y = load_diabetes(return_X_y=True, scaled=False)
y = (y - y.mean()) / y.std()
hospital = x[:, 0].argsort().argsort() * 4 // len(x)  # by age, youngest first
train = [place for place in range(len(x)) if place % 4]
test = [place for place in range(len(x)) if place % 4 == 0]

run = fedgg.run(
    {
        "rounds": 30,
        "task": {"name": "regression"},
        "data": {"normalise": "standard"},
        "model": {"name": "mlp", "hidden": 32},
        "local": {"batch": 16, "lr": 0.003},
        "algorithm": {"name": "fedgg"},
    },
    data=(x[train], y[train], x[test], y[test], hospital[train]),
)
print(f"RMSE {run.rounds[-1]['test_rmse']:.3f}, MAE {run.rounds[-1]['test_mae']:.3f} standard deviations")
