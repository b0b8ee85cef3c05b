"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels with values 0 to 16, there without any download."""

from __future__ import annotations

import numpy as np
import torch

from fedgg.core.seeds import stream
from fedgg.data.dataset import Dataset

TEST_IMAGES = 360


def load_digits() -> Dataset:
    """Handwritten digits, 1,797 images 1x8x8 in 10 classes; part of scikit-learn, no download.

    Always the same 1,437 training and 360 test images, whatever the seed of a run.

    The split is stratified: every class gives its share of the 360 (rounded by largest remainder), drawn from the
    stream (0, "digits split"), class after class. Within both splits the images keep scikit-learn's order.
    """
    from sklearn.datasets import load_digits as read

    images, labels = read(return_X_y=True)
    counts = np.bincount(labels)
    share = counts * TEST_IMAGES / len(labels)
    quota = np.floor(share).astype(int)
    quota[np.argsort(quota - share, kind="stable")[: TEST_IMAGES - quota.sum()]] += 1

    draw = stream(0, "digits split")
    in_test = np.zeros(len(labels), bool)
    for label, chosen in enumerate(quota):
        in_test[draw.permutation(np.flatnonzero(labels == label))[:chosen]] = True

    x = torch.from_numpy(images.astype(np.float32).reshape(-1, 1, 8, 8))
    y = torch.from_numpy(labels.astype(np.int64))
    test = torch.from_numpy(in_test)
    return Dataset("digits", x[~test], y[~test], x[test], y[test], tuple("0123456789"), peak=16.0)
