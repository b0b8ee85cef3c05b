"""Batches: moved as drawn, scaled as named, and the same whether gathered alone or in a stack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedgg.core.random_choices import Work
from fedgg.data.batch_preparation import MARGIN, Augmentation, Draws, Feed, Normalisation, augment, draw, scaling
from fedgg.data.dataset import Dataset
from fedgg.data.user_arrays import from_arrays


def pictures(count: int = 40, kind: Any = np.uint8) -> Dataset:
    numbers = np.random.default_rng(0)
    x = numbers.integers(0, 256, size=(count + 4, 2, 6, 5)).astype(kind)
    y = numbers.integers(0, 3, size=count + 4)
    return from_arrays(x[:count], y[:count], x[count:], y[count:], name="pictures", classes=3)


def feed(augmentation: Augmentation = "none", normalise: Normalisation = "standard") -> Feed:
    dataset = pictures()
    clients = (np.arange(0, 17), np.arange(17, 20), np.arange(20, 40))
    nobody = (np.arange(0),) * 3
    scale = scaling(normalise, dataset, torch.float64)
    tensors = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    return Feed(*tensors, clients, nobody, scale, augmentation)


def moved_by_hand(image: torch.Tensor, top: int, left: int, mirror: int) -> torch.Tensor:
    """Black around, a window of the old size, then left and right exchanged."""
    height, width = image.shape[1:]
    wide = torch.zeros(image.shape[0], height + 2 * MARGIN, width + 2 * MARGIN, dtype=image.dtype)
    wide[:, MARGIN : MARGIN + height, MARGIN : MARGIN + width] = image
    window = wide[:, top : top + height, left : left + width]
    return window.flip(2) if mirror else window


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_every_move_is_the_one_done_by_hand(kind: Any) -> None:
    images = pictures(kind=kind).x_train[:1].expand(2 * 9 * 9, -1, -1, -1)
    moves = [(top, left, mirror) for top in range(9) for left in range(9) for mirror in (0, 1)]
    draws = Draws(*(torch.tensor(part) for part in zip(*moves, strict=True)))
    for image, result, move in zip(images, augment(images, draws), moves, strict=True):
        assert torch.equal(result, moved_by_hand(image, *move)), move


def test_draws_are_a_function_of_seed_round_and_client() -> None:
    def drawn(seed: int, round_: int, client: int) -> list[int]:
        draws = draw("crop_flip", seed, round_, client, 50)
        return [int(number) for part in (draws.top, draws.left, draws.mirror) for number in part]

    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    assert len({tuple(drawn(*key)) for key in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3)]}) == 4
    assert set(drawn(0, 1, 2)[:100]) <= set(range(2 * MARGIN + 1))


@pytest.mark.parametrize(("kind", "crops", "flips"), [("flip", False, True), ("crop", True, False)])
def test_crop_and_flip_do_only_what_they_say(kind: Augmentation, crops: bool, flips: bool) -> None:
    draws = draw(kind, 0, 0, 0, 100)
    assert bool((draws.top != MARGIN).any()) == crops
    assert bool(draws.mirror.any()) == flips
    assert feed("none").agenda(0, 0, 0, Work(1, 4)).moves is None
    assert feed(kind).agenda(0, 0, 0, Work(1, 4)).moves is not None


def test_normalisations() -> None:
    dataset = pictures()
    x = dataset.x_train.double()
    standard = scaling("standard", dataset, torch.float64)(dataset.x_train)
    assert torch.allclose(standard.mean((0, 2, 3)), torch.zeros(2, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(standard.std((0, 2, 3), correction=0), torch.ones(2, dtype=torch.float64), atol=1e-12)
    assert torch.equal(scaling("none", dataset, torch.float64)(dataset.x_train), x)
    assert float(scaling("unit", dataset, torch.float64)(dataset.x_train).max()) <= 1


def test_a_constant_feature_stays_finite() -> None:
    x = np.ones((6, 3))
    x[:, 0] = np.arange(6)
    dataset = from_arrays(x, [0, 1] * 3, x, [0, 1] * 3)
    scaled = scaling("standard", dataset, torch.float64)(dataset.x_train)
    assert torch.isfinite(scaled).all()
    assert not scaled[:, 1:].any()


@pytest.mark.parametrize("augmentation", ["none", "crop_flip"])
def test_gathered_batches_are_the_clients_own(augmentation: Augmentation) -> None:
    """Longest first, short ones padded, rows that are done gone: and every example the one it was alone."""
    source, work = feed(augmentation), Work(epochs=2, batch=8)
    clients = [2, 0, 1]  # 20, 17 and 3 examples: 6, 6 and 2 steps
    alone = [list(source.batches(5, 3, client, work)) for client in clients]
    stacked = list(source.gather([source.agenda(5, 3, client, work) for client in clients]))
    assert [len(batch.mask) for batch in stacked] == [3, 3, 2, 2, 2, 2]
    for step, batch in enumerate(stacked):
        for row in range(len(batch.mask)):
            real = batch.mask[row] > 0
            assert torch.equal(batch.x[row][real], alone[row][step].x[0])
            assert torch.equal(batch.y[row][real], alone[row][step].y[0])


def test_every_epoch_sees_every_example_once() -> None:
    source = feed()
    seen = torch.cat([batch.y[0] for batch in source.batches(0, 0, 0, Work(epochs=3, batch=4))])
    assert len(seen) == 3 * 17
    for epoch in seen.split(17):
        assert torch.equal(epoch.sort().values, source.y[:17].sort().values)
