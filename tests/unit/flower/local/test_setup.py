"""Files of a federation before its processes start: each node has its own, readable by the owner alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedgg.older_python import tomllib

pytest.importorskip("flwr")

from fedgg.errors import UserError
from fedgg.flower.local.setup import FederationFolder, Listening, prepare
from fedgg.lab.config import Experiment

EXPERIMENT = Experiment(rounds=1, split={"clients": 2}, model={"name": "linear"})


def test_files_of_nodes(tmp_path: Path) -> None:
    paths = FederationFolder(tmp_path / "run")
    prepare(paths, EXPERIMENT, Listening(), {"deadline": 5.0}, None)
    for client in (0, 1):
        node = paths.node(client)
        config = tomllib.loads(node.settings.read_text())
        assert config == {"client-id": client, "data": str(node.data), "memory": str(node.memory)}
        assert node.data.is_file()
        assert node.authority.read_bytes() == paths.certificates.authority.read_bytes()
        assert stat.S_IMODE(node.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(node.data.stat().st_mode) == 0o600
    assert paths.node(0).data.read_bytes() != paths.node(1).data.read_bytes()
    assert sorted(file.name for file in paths.folder.iterdir()) == ["app", "nodes", "run.toml", "server"]


def test_client_state_is_kept_when_a_run_is_resumed_and_deleted_when_it_did_not_start(tmp_path: Path) -> None:
    paths = FederationFolder(tmp_path / "run")
    prepare(paths, EXPERIMENT, Listening(), {"deadline": 5.0}, None)
    state = paths.node(1).memory / "round-1"
    state.touch()
    prepare(paths, EXPERIMENT, Listening(), {}, None)
    assert not state.exists()
    assert "deadline" not in tomllib.loads(paths.run_settings.read_text())
    state.touch()
    (paths.out / "config.toml").write_text(EXPERIMENT.to_toml())
    prepare(paths, EXPERIMENT, Listening(), {"deadline": 5.0}, None)
    prepare(paths, EXPERIMENT, Listening(), {"min_clients": 1}, None)
    assert state.exists()
    config = tomllib.loads(paths.run_settings.read_text())
    assert (config["deadline"], config["min_clients"]) == (5.0, 1)


def test_other_files_in_the_app_folder_are_deleted(tmp_path: Path) -> None:
    """Flower puts the app's folder before all others from which Python imports."""
    paths = FederationFolder(tmp_path / "run")
    prepare(paths, EXPERIMENT, Listening(), {}, None)
    written = sorted(file.relative_to(paths.app) for file in paths.app.rglob("*"))
    (paths.out / "config.toml").write_text(EXPERIMENT.to_toml())
    for folder in (paths.app / "fedgg", paths.home / "apps", paths.node(0).home, paths.server / ".flwr"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    prepare(paths, EXPERIMENT, Listening(), {}, None)
    assert sorted(file.relative_to(paths.app) for file in paths.app.rglob("*")) == written
    assert not paths.home.exists()
    assert not paths.node(0).home.exists()
    assert not (paths.server / ".flwr").exists()


@pytest.mark.parametrize("name", ["", "app", "server", "nodes", "nodes/client-0", ".flwr"])
def test_links_in_the_run_folder_are_refused(tmp_path: Path, name: str) -> None:
    paths, elsewhere = FederationFolder(tmp_path / "run"), tmp_path / "elsewhere"
    (elsewhere / ".flwr").mkdir(parents=True)
    link = paths.folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a symbolic link"):
        prepare(paths, EXPERIMENT, Listening(), {}, None)
    assert [file.name for file in elsewhere.iterdir()] == [".flwr"]
