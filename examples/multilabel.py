"""Multi-label classification: which segments of a seven-segment display show a handwritten digit."""

import numpy as np
from sklearn.datasets import load_digits

import fedgg

SEGMENTS = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]
x, digits = load_digits(return_X_y=True)
y = np.array([[segment in SEGMENTS[digit] for segment in "abcdefg"] for digit in digits])
train, test = np.arange(1500), np.arange(1500, len(x))

run = fedgg.run(
    {
        "rounds": 10,
        "task": {"name": "multilabel"},
        "metrics": ["f1", "auroc", "label_accuracy"],
        "data": {"normalise": "standard"},
        "split": {"scheme": "quantity", "clients": 8},
    },
    data=(x[train], y[train], x[test], y[test]),
    algorithm="scaffold",
)
last = run.rounds[-1]
print(f"macro-F1 {last['test_f1']:.3f}, AUROC {last['test_auroc']:.4f}, labels right {last['test_label_accuracy']:.3f}")
