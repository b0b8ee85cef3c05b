"""What a plain `pip install fedgg` can do, and what it says where a package of an extra is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
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


PROGRAM = """
import json, sys
from fedgg.cli import main

for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    print(f"<ended with {code}>", flush=True)
"""


def fedgg(bare: dict[str, str], *commands: Sequence[str]) -> list[tuple[str, int]]:
    """Commands, one after the other in one process: what each prints, and its exit status."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env=bare | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    *said, rest = re.split(r"<ended with (\d+)>\n", done.stdout)
    assert rest == ""
    assert len(said) == 2 * len(commands)
    return [(text, int(code)) for text, code in zip(said[::2], said[1::2], strict=True)]


def test_runs_and_comparisons_need_no_extra(bare: dict[str, str], tmp_path: Path) -> None:
    (run, ran), (compare, compared), (report, reported) = fedgg(
        bare,
        ["run", *SMALL, "--out", str(tmp_path / "run")],
        ["compare", "--algorithm", "fedavg", "--seeds", "0", *SMALL, "--out", str(tmp_path / "study")],
        ["report", str(tmp_path / "run")],
    )
    assert (ran, compared, reported) == (0, 0, 2)
    assert "no figures: this needs matplotlib, which is not installed: pip install 'fedgg[report]'" in run
    assert "no figures and no page: this needs matplotlib" in compare
    assert (tmp_path / "study" / "tables.md").is_file()
    assert "this needs matplotlib" in report


def test_a_missing_extra_is_named(bare: dict[str, str], tmp_path: Path) -> None:
    commands = {
        "data": ["data", "fetch", "svhn"],
        "bench": ["bench"],
        "tune": ["tune", "--out", str(tmp_path / "tuned")],
    }
    said = fedgg(bare | {"FEDGG_DATA": str(tmp_path)}, *commands.values())
    for extra, (text, code) in zip(commands, said, strict=True):
        assert f"pip install 'fedgg[{extra}]'" in text
        assert code == 2
    assert not (tmp_path / "tuned").exists()
