"""Feature skew: the inputs of each client changed in its own way, by noise or by a rotation.

Training and held-out examples of a client are changed; the test set and the server's proxy examples are not. The change
is a function of the seed, the client and the settings, so that every engine and Flower train on the same inputs.
The scaling of inputs (`data.normalise`) is that of the unchanged training set.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.core.random_choices import stream
from fedgg.data.dataset import Dataset
from fedgg.errors import UserError

Positions = NDArray[np.int64]
CHUNK = 1024  # examples that are changed at a time
_CHANGED: WeakKeyDictionary[Dataset, dict[tuple[object, ...], Dataset]] = WeakKeyDictionary()


def check_feature_skew(dataset: Dataset, noise: float, rotation: float) -> None:
    """UserError where inputs of this kind cannot be changed so."""
    if noise and not (dataset.x_train.dtype == torch.uint8 or dataset.x_train.is_floating_point()):
        raise UserError(
            f"split.feature_noise = {noise:g}: inputs of {dataset.name} are {dataset.x_train.dtype}, and noise is for "
            f"pixels and floating-point numbers; leave it out"
        )
    if rotation and len(dataset.shape) != 3:
        raise UserError(
            f"split.feature_rotation = {rotation:g} needs images [C, H, W], but examples of {dataset.name} have shape "
            f"{dataset.shape}; leave it out"
        )


def with_feature_skew(
    dataset: Dataset, clients: Sequence[Positions], noise: float, rotation: float, seed: int
) -> Dataset:
    """The data set with the inputs of each client changed; no example has two clients.

    Runs of a study that share data and split share the result.
    """
    check_feature_skew(dataset, noise, rotation)
    digest = hashlib.sha256()
    for positions in clients:
        digest.update(len(positions).to_bytes(8, "little") + positions.tobytes())
    results, key = _CHANGED.setdefault(dataset, {}), (digest.digest(), noise, rotation, seed)
    if key not in results:
        x = dataset.x_train.cpu()
        # Noise takes bytes out of their range and off whole numbers.
        dtype = torch.float32 if noise and not x.is_floating_point() else x.dtype
        changed = x.to(dtype, copy=True)
        for client, positions in enumerate(clients):
            angle, deviation = rotation * client / len(clients), math.sqrt(noise * (client + 1) / len(clients))
            rng = stream(seed, "feature noise", client)
            for start in range(0, len(positions), CHUNK):
                where = torch.from_numpy(positions[start : start + CHUNK])
                inputs = x[where]
                if angle:
                    inputs = rotated(inputs, angle)
                if deviation:
                    drawn = rng.standard_normal(tuple(inputs.shape))
                    inputs = inputs.double() + torch.from_numpy(drawn) * (deviation * dataset.peak)
                changed[where] = inputs.to(dtype)
        device = dataset.x_train.device
        results[key] = replace(dataset, x_train=changed.to(device), x_test=dataset.x_test.to(dtype))
    return results[key]


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images [N, C, H, W] turned counter-clockwise about their centre: bilinear interpolation, black corners."""
    quarters, rest = divmod(degrees, 90)
    if rest == 0 and (quarters % 2 == 0 or images.shape[2] == images.shape[3]):
        return torch.rot90(images, int(quarters), (2, 3))
    from scipy import ndimage  # here: scipy takes half a second to import

    turned = ndimage.rotate(images.double().numpy(), degrees, axes=(3, 2), reshape=False, order=1)
    if not images.is_floating_point():
        turned = turned.round().clip(0, 255)
    return torch.from_numpy(turned).to(images.dtype)
