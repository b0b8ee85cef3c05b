"""Data files of a federation: each has the examples of one client; files with mistakes are refused."""

from __future__ import annotations

import stat
import struct
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process_grid import small

from fedgg.errors import UserError
from fedgg.flower import divide
from fedgg.flower.app_project import NodeConfig, node_config, run_config
from fedgg.flower.data_files import read_client_file, read_server_file, write_arrays
from fedgg.lab.build import build
from fedgg.lab.config import Experiment

EXPERIMENT = small(data__holdout=0.2, data__proxy=30)


def rows(x: Any) -> Counter[bytes]:
    return Counter(example.tobytes() for example in np.asarray(x))


def test_every_example_is_in_one_file_and_no_more(tmp_path: Path) -> None:
    paths = divide(EXPERIMENT, tmp_path)
    assert [path.name for path in paths] == ["server.npz", *(f"client-{n}.npz" for n in range(4))]
    feed = build(EXPERIMENT).feed
    server = read_server_file(paths[0], EXPERIMENT)
    assert torch.equal(server.test.x, feed.x_test)
    assert torch.equal(server.proxy.x, feed.x[torch.from_numpy(feed.proxy)])
    together = rows(server.proxy.x)
    for client, path in enumerate(paths[1:]):
        file = read_client_file(path, EXPERIMENT)
        assert torch.equal(file.train.x, feed.x[torch.from_numpy(feed.clients[client])])
        assert torch.equal(file.held_out.y, feed.y[torch.from_numpy(feed.held_out[client])])
        together += rows(file.train.x) + rows(file.held_out.x)
        assert torch.equal(file.scaling.shift, feed.scaling.shift)
        with np.load(path, allow_pickle=False) as archive:
            examples = sum(len(archive[name]) for name in archive.files if name.startswith("x"))
            assert examples == len(feed.clients[client]) + len(feed.held_out[client])
    assert together == rows(feed.x)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)


def good() -> dict[str, Any]:
    return {"x": np.zeros((4, 3)), "y": np.array([0, 1, 0, 1]), "classes": np.array(["a", "b"])}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"y": np.array([0, 1, 0, 2])}, "outside the 2 classes"),
        ({"x": np.full((4, 3), np.nan)}, "NaN or infinity"),
        ({"x": np.zeros((3, 3))}, "y_train has shape"),
        ({"classes": np.array([1, 2])}, "classes must be an array of names"),
        ({"x": np.array(["a"] * 4)}, "x must be an array of numbers"),
        ({"x_held_out": np.zeros((1, 5)), "y_held_out": np.array([0])}, "another dtype or shape than the first"),
    ],
)
def test_files_with_mistakes_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_arrays(tmp_path / "own.npz", good() | changes)
    with pytest.raises(UserError, match=reason):
        read_client_file(tmp_path / "own.npz", small(data__normalise="none"))


def test_files_not_written_by_divide(tmp_path: Path) -> None:
    write_arrays(tmp_path / "own.npz", good())
    assert read_client_file(tmp_path / "own.npz", small(data__normalise="none")).client == -1
    with pytest.raises(UserError, match="needs the arrays shift and scale, the same in every file"):
        read_client_file(tmp_path / "own.npz", small())
    with pytest.raises(UserError, match=r"there is no file .*fedgg\.flower\.divide writes"):
        read_client_file(tmp_path / "absent.npz", small())
    (tmp_path / "torn.npz").write_bytes((tmp_path / "own.npz").read_bytes()[:-40])
    with pytest.raises(UserError, match="cannot be read as"):
        read_client_file(tmp_path / "torn.npz", small())
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1), classes=np.array(["a"]))
    with pytest.raises(UserError, match="cannot be read as"):
        read_client_file(tmp_path / "objects.npz", small())


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_arrays_are_refused(compression: int, tmp_path: Path) -> None:
    """A header of parentheses, which some versions of Python cannot split; and a byte changed in compressed content."""
    file = tmp_path / "own.npz"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 3000 + b")" * 3000 + b"}\n"
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    if compression == zipfile.ZIP_DEFLATED:
        content = file.read_bytes()
        file.write_bytes(content.replace(content[35:40], b"\xff" * 5, 1))
    with pytest.raises(UserError, match="cannot be read as"):
        read_client_file(file, small())


def test_run_config_and_node_config(tmp_path: Path) -> None:
    assert run_config({"out": "runs/a", "lr": 0.1}).out == Path("runs/a")
    assert run_config({"out": "a", "data": ""}).data is None
    for config, reason in (
        ({}, "name the run folder"),
        ({"out": "a", "deadline": "soon"}, "deadline = 'soon' must be a number of seconds"),
        ({"out": "a", "attempts": 0}, "attempts = 0 is too small"),
        ({"out": "a", "deadline": float("nan")}, "deadline = nan must be finite"),
        ({"out": "a", "wait": float("inf")}, "wait = inf must be finite"),
        ({"out": "a", "min-clients": 2}, "unknown key 'min-clients'"),
    ):
        with pytest.raises(UserError, match=reason):
            run_config(config)
    simulated = node_config({"partition-id": 7, "num-partitions": 9}, {"out": "runs/a"})
    assert simulated == NodeConfig(7, None, Path("runs/a/nodes/client-7"), simulated=9)
    real = node_config({"client-id": 2, "data": "x.npz", "memory": "m"}, {})
    assert real == NodeConfig(2, Path("x.npz"), Path("m"))
    for node in ({}, {"client-id": 2}, {"client-id": -1, "data": "x", "memory": "m"}):
        with pytest.raises(UserError, match="node config"):
            node_config(node, {})


def test_clients_of_the_data_are_divided_by_their_names(tmp_path: Path) -> None:
    """The number of clients is that of the data set; the server's file has their names."""
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(60, 3)), np.arange(60) % 2
    owners = np.array(["charite"] * 30 + ["mayo"] * 20 + ["ucsf"] * 10)
    np.savez(tmp_path / "wards.npz", x_train=x, y_train=y, x_test=x, y_test=y, clients=owners)
    experiment = Experiment(data={"source": f"npz:{tmp_path / 'wards.npz'}"}, split={"scheme": "given"})
    server, *clients = divide(experiment, tmp_path / "divided")
    assert len(clients) == 3
    assert read_server_file(server, experiment).client_names == ("charite", "mayo", "ucsf")
    with np.load(server) as archive:
        arrays = dict(archive) | {"client_names": np.array(["charite"])}
    write_arrays(tmp_path / "wrong.npz", {name: arrays[name] for name in arrays if name != "format"})
    with pytest.raises(UserError, match="1 names for 3 clients"):
        read_server_file(tmp_path / "wrong.npz", experiment)
