"""What a plain `pip install fedgg` can do, and what it says where a package of an extra is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedgg.errors import EXTRAS

SMALL = ("--rounds", "1", "--clients", "3", "--set", "local.epochs=1", "--set", "model.name=linear")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which no package of an extra can be imported."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(
        f"import sys\n"
        f"class Missing:\n"
        f"    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {sorted(EXTRAS)!r}:\n"
        f"            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
        f"sys.meta_path.insert(0, Missing())\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def fedgg(bare: dict[str, str], *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fedgg", *words], env=bare, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_runs_and_comparisons_need_no_extra(bare: dict[str, str], tmp_path: Path) -> None:
    out = fedgg(bare, "run", *SMALL, "--out", str(tmp_path / "run"))
    assert "no figures: this needs matplotlib, which is not installed: pip install 'fedgg[report]'" in out
    out = fedgg(bare, "compare", "--algorithm", "fedavg", "--seeds", "0", *SMALL, "--out", str(tmp_path / "study"))
    assert "no figures and no page: this needs matplotlib" in out
    assert (tmp_path / "study" / "tables.md").is_file()
    assert "this needs matplotlib" in fedgg(bare, "report", str(tmp_path / "run"), code=2)


@pytest.mark.parametrize(
    ("words", "extra"),
    [(("data", "fetch", "svhn"), "data"), (("bench",), "bench"), (("tune", "--out", "{folder}/tuned"), "tune")],
    ids=["data", "bench", "tune"],
)
def test_a_missing_extra_is_named(bare: dict[str, str], tmp_path: Path, words: tuple[str, ...], extra: str) -> None:
    words = tuple(word.format(folder=tmp_path) for word in words)
    assert f"pip install 'fedgg[{extra}]'" in fedgg(bare | {"FEDGG_DATA": str(tmp_path)}, *words, code=2)
    assert not (tmp_path / "tuned").exists()
