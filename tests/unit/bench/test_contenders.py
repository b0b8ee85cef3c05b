"""Which contenders there are, and why others cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedgg.bench import contenders
from fedgg.bench.contenders import RECEIPT, EngineEntry, all_contenders, chosen, chosen_peers, find_peers, peers_folder
from fedgg.errors import UserError


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks" / "peers" / "other"
    folder.mkdir(parents=True)
    (folder / "peer.toml").write_text('[[contender]]\nname = "other-2"\nlabel = "Other, 2"\nwords = ["2"]\n')
    (folder / "requirements.txt").write_text("other==1.0\n")
    return folder.parent


def test_an_engine_this_version_lacks_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "ENGINES", (EngineEntry("loop", "loop"), EngineEntry("warp", "warp")))
    absent = {contender.name: contender.absent for contender in all_contenders()}
    assert absent["fedgg-loop"] is None
    assert "no engine 'warp'" in (absent["fedgg-warp"] or "")


def test_names_and_families(peers: Path) -> None:
    everyone = all_contenders(peers)
    assert [c.name for c in chosen(everyone, "cpu", only=["tight", "other-2"])] == ["tight-2", "tight-1", "other-2"]
    assert "plain-2" not in [c.name for c in chosen(everyone, "cpu", skip=["plain"])]
    with pytest.raises(UserError, match="did you mean tight-2"):
        chosen(everyone, "cpu", only=["thight-2"])
    with pytest.raises(UserError, match="no contender is left"):
        chosen(everyone, "cuda", only=["tight-1"])


def test_peers_are_for_the_cpu_and_stacks_for_the_gpu(peers: Path) -> None:
    everyone = all_contenders(peers)
    on_cpu, on_gpu = ({c.name for c in chosen(everyone, device)} for device in ("cpu", "cuda"))
    assert "other-2" in on_cpu - on_gpu
    assert "fedgg-stacked" in on_gpu - on_cpu
    assert {"fedgg-loop", "tight-2", "plain-2"} <= on_cpu & on_gpu


def test_a_peer_is_there_when_its_receipt_fits_its_requirements(peers: Path) -> None:
    (peer,) = find_peers(peers)
    assert "fedgg bench setup other" in (peer.absent or "")
    peer.python.parent.mkdir(parents=True)
    peer.python.touch()
    (peer.environment / RECEIPT).write_text(json.dumps({"requirements": peer.fingerprint()}))
    assert peer.absent is None
    (peers / "other" / "requirements.txt").write_text("other==2.0\n")
    assert "changed" in (peer.absent or "")


def test_a_broken_peer_names_its_file(peers: Path) -> None:
    (peers / "other" / "peer.toml").write_text("[[contender]]\nname = 'x'\n")
    with pytest.raises(UserError, match=r"peer\.toml.*label"):
        find_peers(peers)


def test_the_repositorys_own_peers() -> None:
    folder = peers_folder()
    assert folder is not None
    assert {peer.name for peer in find_peers(folder)} == {"pfl", "flower", "fedlab"}
    for peer in find_peers(folder):
        assert "import fedgg" not in peer.script.read_text()
        assert "from fedgg" not in peer.script.read_text()
    with pytest.raises(UserError, match="unknown peer 'nobody'"):
        chosen_peers(["nobody"])


def test_without_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgg.bench.contenders.peers_folder", lambda: None)
    monkeypatch.setattr(contenders, "peers_folder", lambda: None)
    assert {c.kind for c in all_contenders()} == {"fedgg", "loop"}
    with pytest.raises(UserError, match="repository"):
        chosen_peers([])
