"""Run the tests with the oldest and with the newest versions that pyproject.toml allows.

python .ci/versions.py                        # `make versions`: both environments, all fast tests
python .ci/versions.py oldest -- tests/unit   # one environment, some tests; arguments after -- are pytest's

Environments are kept in .versions and need about 6 GB each, since the package index has torch with CUDA only, and the
interpreters on the path (with pyenv: PYENV_VERSION=3.10.13:3.13.0). They are made by uv, whose resolution
`lowest-direct` takes the smallest version of every package that pyproject.toml names; packages behind them are the
newest. So warnings of old packages about new ones are shown there instead of failing the tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".versions"
FLOWER = ("tests/unit/flower", "tests/federation")


@dataclass(frozen=True)
class Environment:
    python: str
    resolution: str
    pytest: tuple[str, ...] = ()


ENVIRONMENTS = {
    "oldest": Environment(
        "3.10",
        "lowest-direct",
        ("-W", "default", *(f"--ignore={place}" for place in FLOWER)),  # Flower needs Python 3.11
    ),
    "newest": Environment("3.13", "highest"),
}


def make(name: str, environment: Environment) -> Path:
    """The interpreter of an environment with fedgg and its test packages."""
    place = FOLDER / name
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    uv = [sys.executable, "-m", "uv"]
    if not python.exists():
        call([*uv, "venv", "--python", environment.python, "--no-python-downloads", str(place)])
    options = ["--python", str(python), "--resolution", environment.resolution]
    call([*uv, "pip", "install", *options, "--editable", ".[test]"])
    return python


def call(words: list[str], may_fail: bool = False) -> int:
    print("$", " ".join(words), flush=True)
    code = subprocess.run(words, cwd=ROOT).returncode
    if code and not may_fail:
        sys.exit(f"{words[0]} ended with {code}")
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"{', '.join(ENVIRONMENTS)}; all by default")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    names, pytest = parser.parse_args(words[:end]).names or list(ENVIRONMENTS), words[end + 1 :]
    if unknown := set(names) - ENVIRONMENTS.keys():
        parser.error(f"there is no environment {', '.join(unknown)}: choose {' or '.join(ENVIRONMENTS)}")
    results = {}
    for name in names:
        python = make(name, ENVIRONMENTS[name])
        call([str(python), "-c", "import torch, numpy, sys; print(sys.version, torch.__version__, numpy.__version__)"])
        options = [*ENVIRONMENTS[name].pytest, *(pytest or ["-n", "2"])]
        results[name] = call([str(python), "-m", "pytest", *options], may_fail=True)
    for name, code in results.items():
        print(f"{name}: {f'pytest ended with {code}' if code else 'passed'}")
    sys.exit(any(results.values()))


if __name__ == "__main__":
    main()
