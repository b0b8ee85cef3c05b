"""What lies on disk before a federation starts: everybody's own, for nobody else's eyes."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedgg.errors import UserError
from fedgg.flower.local.setup import Listening, Places, prepare
from fedgg.lab.config import Experiment

EXPERIMENT = Experiment(rounds=1, split={"clients": 2}, model={"name": "linear"})


def test_every_node_has_its_own(tmp_path: Path) -> None:
    places = Places(tmp_path / "run")
    prepare(places, EXPERIMENT, Listening(), {"deadline": 5.0}, None)
    for client in (0, 1):
        place = places.node(client)
        told = tomllib.loads(place.settings.read_text())
        assert told == {"client-id": client, "data": str(place.data), "memory": str(place.memory)}
        assert place.data.is_file()
        assert place.authority.read_bytes() == places.certificates.authority.read_bytes()
        assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(place.data.stat().st_mode) == 0o600
    assert places.node(0).data.read_bytes() != places.node(1).data.read_bytes()
    assert sorted(file.name for file in places.folder.iterdir()) == ["app", "nodes", "run.toml", "server"]


def test_a_run_that_never_began_leaves_no_memory_and_one_that_did_keeps_it(tmp_path: Path) -> None:
    places = Places(tmp_path / "run")
    prepare(places, EXPERIMENT, Listening(), {"deadline": 5.0}, None)
    kept = places.node(1).memory / "round-1"
    kept.touch()
    prepare(places, EXPERIMENT, Listening(), {}, None)
    assert not kept.exists()
    assert "deadline" not in tomllib.loads(places.run_settings.read_text())
    kept.touch()
    (places.out / "config.toml").write_text(EXPERIMENT.to_toml())
    prepare(places, EXPERIMENT, Listening(), {"deadline": 5.0}, None)
    prepare(places, EXPERIMENT, Listening(), {"min_clients": 1}, None)
    assert kept.exists()
    said = tomllib.loads(places.run_settings.read_text())
    assert (said["deadline"], said["min_clients"]) == (5.0, 1)


def test_nothing_that_lay_beside_the_app_travels_with_it(tmp_path: Path) -> None:
    """Flower puts the app's folder before all others from which Python imports."""
    places = Places(tmp_path / "run")
    prepare(places, EXPERIMENT, Listening(), {}, None)
    written = sorted(file.relative_to(places.app) for file in places.app.rglob("*"))
    (places.out / "config.toml").write_text(EXPERIMENT.to_toml())
    for folder in (places.app / "fedgg", places.home / "apps", places.node(0).home, places.server / ".flwr"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    prepare(places, EXPERIMENT, Listening(), {}, None)
    assert sorted(file.relative_to(places.app) for file in places.app.rglob("*")) == written
    assert not places.home.exists()
    assert not places.node(0).home.exists()
    assert not (places.server / ".flwr").exists()


@pytest.mark.parametrize("name", ["", "app", "server", "nodes", "nodes/client-0", ".flwr"])
def test_a_link_in_a_received_folder_leads_nowhere(tmp_path: Path, name: str) -> None:
    places, elsewhere = Places(tmp_path / "run"), tmp_path / "elsewhere"
    (elsewhere / ".flwr").mkdir(parents=True)
    link = places.folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link"):
        prepare(places, EXPERIMENT, Listening(), {}, None)
    assert [file.name for file in elsewhere.iterdir()] == [".flwr"]
