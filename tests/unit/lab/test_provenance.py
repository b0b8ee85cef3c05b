"""A run records which code it ran: the commit of the repository, or the one that the environment names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedgg
from fedgg.lab.provenance import COMMIT_VARIABLE, commit


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    commit.cache_clear()
    yield
    commit.cache_clear()


def test_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc1234")
    assert commit() == {"commit": "abc1234", "changed": None}


def test_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    found = commit()["commit"]
    if (Path(fedgg.__file__).parents[2] / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}", found)
    else:
        assert found is None


def test_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(fedgg, "__file__", str(tmp_path / "a" / "b" / "__init__.py"))
    assert commit() == {"commit": None, "changed": None}
