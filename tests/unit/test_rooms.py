"""Who may import whom, by reading the imports of every file; and what must not wait for torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import fedgg

HOME = Path(fedgg.__file__).parent
MAY: dict[str, set[str]] = {
    "errors": set(),
    "registry": {"errors"},
    "older_python": set(),
    "files": {"errors", "older_python"},
    "child_process": {"errors"},
    "end_fork_server": {"child_process"},
    "core": {"errors", "older_python", "registry"},
    "algorithms": {"core", "registry"},
    "aggregation": {"core", "errors", "registry"},
    "models": {"errors", "registry"},
    "kernels": set(),
    "data": {"core", "errors", "files", "kernels", "older_python", "registry"},
    "engines": {"child_process", "core", "errors", "files", "kernels", "older_python", "registry"},
    "runfolder": {"errors", "files", "older_python"},
    "analysis": {"errors", "files", "runfolder"},
    "report": {"analysis", "errors", "files", "registry", "runfolder"},
    "lab": {
        *(
            "aggregation",
            "algorithms",
            "child_process",
            "core",
            "data",
            "engines",
            "errors",
            "files",
            "models",
            "older_python",
        ),
        *("registry", "runfolder", "__version__"),
    },
    "check": {"lab", "core", "algorithms", "models", "data", "engines", "errors", "files", "__version__"},
    "bench": {
        "analysis",
        "child_process",
        "engines",
        "lab",
        "core",
        "data",
        "errors",
        "files",
        "report",
        "__version__",
    },
    "cluster": {
        *("child_process", "core", "data", "engines", "errors", "files", "lab", "older_python", "registry"),
        *("runfolder", "__version__"),
    },
    "compare_and_sweep": {"analysis", "cluster", "lab", "core", "report", "runfolder", "errors", "files"},
    "run_experiment": {"cluster", "core", "errors", "lab"},
    "tune_settings": {"cluster", "compare_and_sweep", "core", "errors", "lab", "report", "runfolder"},
    "paper": {
        *(
            "analysis",
            "cluster",
            "lab",
            "engines",
            "core",
            "data",
            "report",
            "registry",
            "runfolder",
            "errors",
            "files",
        ),
    },
    "flower": {
        *("child_process", "core", "lab", "engines", "data", "errors", "files", "registry", "runfolder"),
        "__version__",
    },
}
WITHOUT_TORCH = (
    "analysis",
    "registry",
    "report",
    "runfolder",
    "errors",
    "files",
    "older_python",
    "__version__",
    "child_process",
    "end_fork_server",
)
FILES = sorted(path for path in HOME.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(HOME).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> set[str]:
    """Every module named in an import anywhere in the file, within functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            module = node.module or ""
            found |= {f"fedgg.{alias.name}" for alias in node.names} if module == "fedgg" else {module}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_rooms(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__", "cli"):
        return
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "fedgg" and len(parts) > 1:
            allowed = MAY[room] | {room}
            assert parts[1] in allowed, f"{room} imports {module}; it may import {', '.join(sorted(allowed))}"
        if room == "core" and parts[0] not in sys.stdlib_module_names:
            assert parts[0] in ("fedgg", "torch", "numpy"), f"core imports {module}"
        if room in WITHOUT_TORCH:
            assert parts[0] != "torch", f"{room} imports torch"
        assert parts[0] not in ("rich", "typer", "click"), f"{path} prints: that is the command line's business"


def test_nobody_imports_the_command_line() -> None:
    others = [path for path in FILES if room_of(path) not in ("cli", "__main__")]
    assert len(others) > 120
    assert [path for path in others if any(module.startswith("fedgg.cli") for module in imports(path))] == []


def test_only_one_room_knows_flower_and_one_ray() -> None:
    """They are extras: without them everything else works."""
    packages = {path: {module.partition(".")[0] for module in imports(path)} for path in FILES}
    assert {room_of(path) for path in FILES if "flwr" in packages[path]} == {"flower"}
    assert {room_of(path) for path in FILES if "ray" in packages[path]} <= {"flower", "cluster"}


def test_every_room_is_in_the_list() -> None:
    assert {room_of(path) for path in FILES} <= MAY.keys() | {"cli", "__init__", "__main__"}


def test_what_does_not_wait_for_torch() -> None:
    """One process for all of it: the report, the help, the names of the data sets, the version."""
    code = """
import sys
import fedgg, fedgg.errors, fedgg.report.run_figures, fedgg.report.tables, fedgg.analysis.compare, fedgg.runfolder.read
import fedgg.report.page, fedgg.report.live, fedgg.report.export, fedgg.report.export
import fedgg.cli, fedgg.data.catalog
try:
    fedgg.report.export.check_tensorboard(__import__("pathlib").Path("nowhere"))
except fedgg.errors.UserError:
    pass  # not installed here
from typer.testing import CliRunner
pages = (["run"], ["compare"], ["data", "show"], ["bench"], ["reproduce"], ["report"], ["watch"], ["flower", "up"])
for words in (["--help"], ["--version"], *([*page, "--help"] for page in pages)):
    assert CliRunner().invoke(fedgg.cli.app, words).exit_code == 0, words
print([name for name in ("torch", "sklearn", "scipy") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "torch" not in found.stdout
    assert "sklearn" not in found.stdout


def test_what_a_run_does_not_import(tmp_path: Path) -> None:
    """Packages that take a good part of a short run's time to import, and that it does not use."""
    code = """
import sys
import fedgg
for engine in ("auto", "loop"):
    fedgg.run(fedgg.Experiment(rounds=1, local={"epochs": 1}, engine={"name": engine}), out=sys.argv[1] + engine)
assert "torch" in sys.modules
print([name for name in ("scipy", "sklearn", "sympy", "matplotlib", "pandas", "torch._dynamo") if name in sys.modules])
"""
    words = [sys.executable, "-c", code, str(tmp_path / "run")]
    assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "[]"


def test_an_older_numpy_is_named(tmp_path: Path) -> None:
    """In one line, from the command line and from Python, before anything fails for another reason."""
    info = tmp_path / "numpy-1.25.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.25.2\n")
    older = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HOME.parent)])}
    code = "import fedgg; fedgg.run(fedgg.Experiment(rounds=1))"
    for words, status in ((["-m", "fedgg", "list"], 2), (["-c", code], 1)):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=older, timeout=60)
        assert "fedgg needs NumPy 1.26 or newer, and this is 1.25.2: pip install -U numpy" in done.stderr
        assert ("Traceback" in done.stderr) is (status == 1)
        assert done.returncode == status


def test_modules_of_unix_alone_are_not_needed(tmp_path: Path) -> None:
    """Every file can be imported, and a run made, where fcntl, resource, termios, pwd and grp do not exist."""
    code = """
import importlib, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
import signal
del signal.SIGHUP
import warnings
warnings.simplefilter("ignore")  # filelock says that it locks by other means
import fedgg
for name in sys.argv[1:]:
    importlib.import_module(name)
print(fedgg.run({"rounds": 1, "local": {"epochs": 1}}).status)
"""
    apart = (
        "kernels",
        "runners",
        "flower",
        "__main__",
        "end_fork_server",
    )  # for a GPU, a process, another package
    names = [".".join(path.relative_to(HOME.parent).with_suffix("").parts) for path in FILES]
    chosen = [name.removesuffix(".__init__") for name in names if not set(apart) & set(name.split("."))]
    assert len(chosen) > 120
    words = [sys.executable, "-c", code, *chosen]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout.strip() == "finished", done.stderr
