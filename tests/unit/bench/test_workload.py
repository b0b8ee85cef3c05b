"""The workload is the same for everyone: what the kit gives is what fedgg would take."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgg.bench import bench_kit
from fedgg.bench.driver import SIZES, stand_in, write_workload
from fedgg.data.batch_preparation import scaling
from fedgg.errors import UserError
from fedgg.models import MODELS


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "workload.npz"
    write_workload(file, "stand-in", quick=True)
    for name, value in (("WORKLOAD", str(file)), ("DEVICE", "cpu"), ("THREADS", "1")):
        monkeypatch.setenv(f"FEDGG_BENCH_{name}", value)
    return file


def test_the_sizes_are_cifars() -> None:
    assert sum(SIZES) == 50_000
    assert min(SIZES) >= 2_000
    assert max(SIZES) <= 7_000


def test_the_kits_model_is_the_librarys() -> None:
    ours, theirs = MODELS["cnn"](shape=(3, 32, 32), classes=10), bench_kit.cnn()
    assert str(ours) == str(theirs)


def test_clients_hold_each_image_once_and_standardised(quick: Path) -> None:
    workload = bench_kit.load()
    assert [len(y) for _, y in workload.clients] == [size // 20 for size in SIZES]
    arrays = bench_kit.raw()
    assert len(np.unique(arrays["members"])) == len(arrays["members"]) == len(arrays["x_train"])
    everything = torch.cat([x for x, _ in workload.clients])
    assert everything.mean().abs() < 1e-3
    assert abs(float(everything.std()) - 1) < 1e-2
    dataset = stand_in(len(arrays["x_train"]), len(arrays["x_test"]))
    first = bench_kit.members_of(arrays)[0]
    assert torch.equal(workload.clients[0][0], scaling("standard", dataset, torch.float32)(dataset.x_train[first]))


def test_everyone_begins_with_the_same_weights(quick: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.npz"
    write_workload(again, "stand-in", quick=True)
    assert again.read_bytes() == quick.read_bytes()
    one, other = (bench_kit.load().model().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_without_cifar_auto_says_so(tmp_path: Path) -> None:
    described = write_workload(tmp_path / "w.npz", "auto", tmp_path, quick=True)
    assert described.stand_in
    assert "not CIFAR-10" in described.title
    with pytest.raises(UserError, match="fetch cifar10"):
        write_workload(tmp_path / "w.npz", "cifar10", tmp_path, quick=True)


def test_the_kit_imports_nothing_of_fedgg() -> None:
    tree = ast.parse(Path(bench_kit.__file__).read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [module for module in modules if module.startswith("fedgg")]
