"""Feature skew: noise and rotations of each client's inputs, the same for every engine and for Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedgg import Experiment, run
from fedgg.data.dataset import Dataset
from fedgg.data.feature_skew import rotated, with_feature_skew
from fedgg.data.readers import load_digits
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.federated_data import holdings, split_of

DIGITS = load_digits()


def images(dtype: torch.dtype, shape: tuple[int, ...] = (3, 9, 9), count: int = 60) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(count, *shape, generator=generator) * 255).to(dtype)
    peak = 255.0 if dtype == torch.uint8 else 1.0
    return Dataset(
        "made", x, torch.zeros(count, dtype=torch.int64), x[:5], torch.zeros(5, dtype=torch.int64), ("a",), peak
    )


def test_noise_grows_with_the_client_and_has_the_variance_it_is_given() -> None:
    data = images(torch.uint8, (3, 40, 40))
    clients = [np.arange(0, 30), np.arange(30, 50)]  # the last ten are of no client
    changed = with_feature_skew(data, clients, noise=0.3, rotation=0.0, seed=1)
    assert changed.x_train.dtype == changed.x_test.dtype == torch.float32  # beyond 0 and 255, and between whole numbers
    assert torch.equal(changed.x_test, data.x_test.float())
    assert torch.equal(changed.x_train[50:], data.x_train[50:].float())
    added = (changed.x_train - data.x_train.float()) / 255
    for client, held in enumerate(clients):
        values = added[held].double()
        assert float(values.mean()) == pytest.approx(0, abs=0.01)
        assert float(values.var()) == pytest.approx(0.3 * (client + 1) / 2, rel=0.02)
    assert torch.equal(data.x_train, images(torch.uint8, (3, 40, 40)).x_train)  # the data set is left as it was


def test_the_noise_of_a_client_depends_on_seed_and_client_only() -> None:
    def noise(seed: int, *clients: Any) -> torch.Tensor:
        data = images(torch.float64)
        return with_feature_skew(data, [np.array(held) for held in clients], 0.5, 0.0, seed).x_train - data.x_train

    first, second = range(10), range(10, 30)
    both = noise(0, first, second)
    assert torch.equal(both[10:30], noise(0, [], second)[10:30])
    assert not torch.equal(both, noise(1, first, second))
    assert not torch.equal(both[:10], both[10:20])


@pytest.mark.parametrize("degrees", [30.0, -77.5, 200.0])
@pytest.mark.parametrize("size", [(9, 9), (8, 8), (6, 10)])
def test_rotations_against_torchs_interpolation(degrees: float, size: tuple[int, int]) -> None:
    x = images(torch.float64, (2, *size)).x_train[:4]
    height, width = size
    cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    # From an output's coordinates to the input's, both scaled to -1 .. 1.
    to_input = torch.tensor([[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0]]).double()
    grid = F.affine_grid(to_input.expand(4, 2, 3), list(x.shape), align_corners=False)
    expected = F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)
    inside = F.grid_sample(torch.ones_like(x), grid, padding_mode="zeros", align_corners=False) > 0.999
    assert inside.double().mean() > 0.4
    torch.testing.assert_close(rotated(x, degrees)[inside], expected[inside], atol=1e-10, rtol=0)


def test_quarter_turns_are_exact_and_bytes_stay_bytes() -> None:
    x = images(torch.uint8).x_train
    assert torch.equal(rotated(x, 90.0), torch.rot90(x, 1, (2, 3)))
    assert torch.equal(rotated(x, -90.0), torch.rot90(x, -1, (2, 3)))
    assert torch.equal(
        rotated(images(torch.uint8, (1, 4, 6)).x_train, 180.0).flip(2, 3), images(torch.uint8, (1, 4, 6)).x_train
    )
    turned = rotated(x, 40.0)
    assert turned.dtype == torch.uint8
    assert int((turned.int() - rotated(x.double(), 40.0).round().int()).abs().max()) == 0
    near = rotated(x.double(), 90.0001)
    assert float((near - torch.rot90(x, 1, (2, 3)))[:, :, 1:-1, 1:-1].abs().max()) < 0.01  # the same direction


def test_each_client_has_its_angle() -> None:
    data, clients = images(torch.uint8), [np.arange(0, 20), np.arange(20, 40), np.arange(40, 60)]
    changed = with_feature_skew(data, clients, noise=0.0, rotation=270.0, seed=0)
    assert changed.x_train.dtype == torch.uint8
    for client, held in enumerate(clients):
        assert torch.equal(changed.x_train[held], torch.rot90(data.x_train[held], client, (2, 3)))


def test_runs_of_a_study_share_the_inputs() -> None:
    clients = [np.arange(0, 40), np.arange(40, 60)]
    data = images(torch.uint8)
    first = with_feature_skew(data, clients, 0.1, 0.0, 0)
    assert with_feature_skew(data, [held.copy() for held in clients], 0.1, 0.0, 0) is first
    assert with_feature_skew(data, clients, 0.1, 0.0, 1) is not first
    assert with_feature_skew(data, [np.arange(0, 41), np.arange(41, 60)], 0.1, 0.0, 0) is not first


def test_inputs_that_cannot_be_changed_are_refused() -> None:
    table = images(torch.float32, (12,))
    with pytest.raises(UserError) as caught:
        with_feature_skew(table, [np.arange(60)], noise=0.1, rotation=10.0, seed=0)
    assert "needs images [C, H, W], but examples of made have shape (12,)" in str(caught.value)
    assert with_feature_skew(table, [np.arange(60)], noise=0.1, rotation=0.0, seed=0).shape == (12,)


SKEWED: dict[str, Any] = {
    "seed": 2,
    "rounds": 2,
    "data": {"holdout": 0.2, "proxy": 30},
    "split": {"scheme": "iid", "clients": 4, "feature_noise": 0.2, "feature_rotation": 120.0},
    "local": {"epochs": 1},
}


def test_hold_out_is_changed_as_the_client_and_the_servers_examples_are_not() -> None:
    experiment = Experiment(**SKEWED)
    feed = build(experiment).feed
    held = holdings(experiment, split_of(experiment, DIGITS))
    clients = [np.union1d(train, out) for train, out in zip(held.clients, held.held_out, strict=True)]
    expected = with_feature_skew(DIGITS, clients, 0.2, 120.0, 2)
    assert torch.equal(feed.x, expected.x_train)
    assert torch.equal(feed.x[held.proxy], DIGITS.x_train[held.proxy])
    assert torch.equal(feed.x_test, DIGITS.x_test)
    for out in held.held_out:
        assert not torch.equal(feed.x[out], DIGITS.x_train[out])


def test_every_engine_trains_on_the_same_inputs() -> None:
    losses = {}
    for engine in ("loop", "fused", "stacked", "workers"):
        rounds = run(
            SKEWED | {"engine": {"name": engine, "precision": "fp64", "workers": 1 if engine == "workers" else None}}
        ).rounds
        losses[engine] = [[line["train_loss"], line["test_loss"], line["holdout_accuracy"]] for line in rounds]
    for engine, values in losses.items():
        np.testing.assert_allclose(values, losses["loop"], rtol=1e-10, err_msg=engine)
    unchanged = run(SKEWED | {"split": {"scheme": "iid", "clients": 4}}).rounds
    assert abs(unchanged[0]["train_loss"] - losses["loop"][0][0]) > 1e-3


def test_flowers_files_have_the_same_inputs(tmp_path: Path) -> None:
    data_files = pytest.importorskip("fedgg.flower.data_files", reason="needs the extra flower")
    experiment = Experiment(**SKEWED)
    feed = build(experiment).feed
    data_files.divide(experiment, tmp_path)
    server = data_files.read_server_file(tmp_path / "server.npz", experiment)
    assert torch.equal(server.test.x, feed.x_test)
    assert torch.equal(server.proxy.x, feed.x[feed.proxy])
    assert torch.equal(server.scaling.shift, feed.scaling.shift)
    for client in range(4):
        file = data_files.read_client_file(tmp_path / f"client-{client}.npz", experiment)
        assert torch.equal(file.train.x, feed.x[feed.clients[client]])
        assert torch.equal(file.held_out.x, feed.x[feed.held_out[client]])


def test_without_feature_skew_an_experiment_is_the_same_as_before() -> None:
    plain, off = Experiment(), Experiment(split={"feature_noise": 0.0, "feature_rotation": 0.0})
    assert plain.hash() == off.hash()
    assert plain.trajectory() == "6c85a70c1891d0b9266d77d975e59192aed58bcfafb9665a5830da71b2f11594"
    for key in ("feature_noise", "feature_rotation"):
        assert plain.changed({f"split.{key}": 0.1}).trajectory() != plain.trajectory()
