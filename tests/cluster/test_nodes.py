"""What a node checks and sends, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedgg
from fedgg.cluster.connect import RayAddress, Resources, ray_address, resources_from
from fedgg.cluster.run_file_transfer import RunFiles, folder_of_a_node, read_files, write_files
from fedgg.cluster.study_on_ray import task_options
from fedgg.cluster.task import DriverInfo, SharedParts, check_node, sees_folder
from fedgg.data.dataset import load
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.run_processes import Given
from fedgg.runfolder.locks import LockFile


def driver_info(**changes: Any) -> DriverInfo:
    plain = DriverInfo(Path(), "", Path.cwd(), frozenset(), {}, fedgg.__version__, torch.__version__)
    return replace(plain, **changes)


def test_another_version_of_fedgg_is_refused() -> None:
    with pytest.raises(UserError, match=r"has fedgg .* and the study is run by 9\.9: install the same version"):
        check_node(driver_info(fedgg="9.9"), {"node": "a"})


def test_another_torch_is_mentioned() -> None:
    sentence = check_node(driver_info(torch="1.0"), {"node": "a"})
    assert sentence == f"the node a has torch {torch.__version__}, not 1.0: bits may differ"
    assert check_node(driver_info(), {"node": "a"}) is None


def test_code_with_another_content_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("x = 1")
    with pytest.raises(UserError, match="another file on this node"):
        check_node(driver_info(code={str(file): "0" * 64}), {"node": "a"})


def test_a_folder_is_seen_by_a_lock_of_the_driver(tmp_path: Path) -> None:
    """A copy of the folder, or one without working locks, has the file but not the lock."""
    token = tmp_path / ".ray-1"
    assert not sees_folder(driver_info(root=tmp_path, token=token.name))
    token.touch()
    assert not sees_folder(driver_info(root=tmp_path, token=token.name))
    lock = LockFile(token)
    assert lock.acquire()
    assert sees_folder(driver_info(root=tmp_path, token=token.name))
    lock.release()


def test_files_are_sent_when_they_change(tmp_path: Path) -> None:
    with folder_of_a_node() as folder:
        run_files = RunFiles(folder / "0", {"config.toml": b"a", "checkpoint/000001.safetensors": b"b"})
        assert run_files.changed(at_once=True) == ({}, ["checkpoint/000001.safetensors", "config.toml"])
        write_files(folder / "0", {"rounds.jsonl": b"c", "checkpoint/000002.safetensors": b"d"}, ["rounds.jsonl"])
        changed = run_files.changed(at_once=True)
        assert changed is not None
        files, names = changed
        assert sorted(files) == ["rounds.jsonl"]  # the checkpoints were not among the names, and are removed
        write_files(tmp_path / "run", files, names)
        assert read_files(tmp_path / "run") == {"rounds.jsonl": b"c"}
        assert run_files.changed() is None, "it is too early"
    assert not folder.exists()


def test_files_outside_the_run_folder_are_refused(tmp_path: Path) -> None:
    for name in ("../x", "/x", "checkpoint/../../x"):
        with pytest.raises(UserError, match="not within a run folder"):
            write_files(tmp_path / "run", {name: b""}, [name])


def test_data_come_back_as_they_were() -> None:
    data = load("digits")
    again = SharedParts.of(Given(data=data)).dataset(torch.device("cpu"))
    assert again.fingerprint == data.fingerprint
    assert torch.equal(again.x_train, data.x_train)
    assert replace(again, name="x").fingerprint == data.fingerprint  # computed from the values


@pytest.mark.parametrize(
    ("device", "cores", "gpus"), [("cpu", 1, 0), ("cpu,cpu,cpu", 3, 0), ("cuda:0,1", 1, 2), ("cuda:0,cuda:0", 1, 1)]
)
def test_a_task_asks_for_the_devices_of_its_run(device: str, cores: int, gpus: int) -> None:
    options = task_options(Experiment(engine={"device": device}), Resources())
    assert (options["num_cpus"], options["num_gpus"]) == (cores, gpus)
    assert task_options(Experiment(engine={"device": device}), Resources(gpu=0.5))["num_gpus"] == 0.5


def test_addresses_and_resources() -> None:
    assert ray_address("ray") == RayAddress("ray", None)
    assert ray_address("ray:auto").init == "auto"
    assert ray_address("ray:10.0.0.1:6379").init == "10.0.0.1:6379"
    assert ray_address("ray://head.example:10001").init == "ray://head.example:10001"
    assert resources_from("gpu=0.5, cpu=2,memory=4G,big=1") == Resources(2.0, 0.5, 4e9, {"big": 1.0})
