"""Without Flower its commands say how to get it, and nothing is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
sys.modules["flwr"] = None  # as if it were not installed
sys.argv = ["fedgg", "flower", *sys.argv[1:]]
from fedgg.cli import main
main()
"""


@pytest.mark.parametrize("words", [["up", "experiment.toml"], ["new", "app", "experiment.toml"]])
def test_without_flower(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "experiment.toml").write_text("rounds = 1\n")
    command = [sys.executable, "-c", CODE, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    way_out = "pip install 'fedgg[flower]'" if sys.version_info >= (3, 11) else "Python 3.11 or newer"
    assert way_out in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["experiment.toml"]
