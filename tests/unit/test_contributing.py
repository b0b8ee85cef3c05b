"""CONTRIBUTING.md names files that exist, every package, and the places of the registries."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import fedgg
from fedgg.aggregation import RULES
from fedgg.algorithms import ALGORITHMS
from fedgg.core.metrics import METRICS
from fedgg.core.optimisers import OPTIMISERS, SCHEDULES
from fedgg.core.tasks import TASKS
from fedgg.data import DATASETS, SPLITS
from fedgg.engines import ENGINES
from fedgg.models import MODELS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
HOME = Path(fedgg.__file__).parent
REGISTRIES: dict[str, tuple[str, Iterable[str]]] = {
    "algorithm": ("algorithms/__init__.py", ALGORITHMS),
    "data set": ("data/__init__.py", DATASETS),
    "model": ("models/__init__.py", MODELS),
    "split": ("data/__init__.py", SPLITS),
    "task": ("core/tasks.py", TASKS),
    "metric": ("core/metrics.py", METRICS),
    "aggregation rule": ("aggregation/__init__.py", RULES),
    "engine": ("engines/__init__.py", ENGINES),
    "client optimiser": ("core/optimisers.py", OPTIMISERS),
    "learning-rate schedule": ("core/optimisers.py", SCHEDULES),
}


def rows() -> dict[str, str]:
    table = TEXT.partition("| change | files |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.M)
    return {change: files for change, files in found if change != "---"}


def test_the_files_exist() -> None:
    """Of the table those below src/fedgg; elsewhere in the text those below the repository's root, too."""
    assert rows().keys() > REGISTRIES.keys()
    for path in re.findall(r"`([\w/]+\.(?:py|js|css|toml))`", "".join(rows().values())):
        assert (HOME / path).is_file(), path
    for path in re.findall(r"\]\(([\w./-]+)[)#]|((?:docs|tests)/[\w./-]*\w)", TEXT):
        assert (ROOT / "".join(path)).exists(), path


def test_the_functions_exist() -> None:
    """Those that a row names together with a file."""
    named = re.findall(r"`(\w+)` in `([\w/]+\.py)`", "".join(rows().values()))
    assert ("_row", "report/page_data.py") in named
    for function, path in named:
        assert f"def {function}(" in (HOME / path).read_text(), (function, path)


def test_every_target_of_make_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make (\w+)`", TEXT))
    assert targets >= {"test", "slow", "browser"}
    assert [target for target in targets if f"\n{target}: " not in makefile] == []


def test_each_registry_is_where_the_table_says() -> None:
    for change, (path, registry) in REGISTRIES.items():
        assert f"`{path}`" in rows()[change]
        text = (HOME / path).read_text()
        for name in registry:
            assert f'"{name}"' in text or change == "algorithm", (change, name)


def test_the_first_rows_are_the_parts_that_user_code_may_replace() -> None:
    assert set(list(rows())[:10]) == REGISTRIES.keys()
    assert "For the first ten" in TEXT


def test_every_package_is_described() -> None:
    table = TEXT.partition("| package | contents |")[2].partition("\n\n")[0]
    packages = {path.parent.name for path in HOME.glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`(\w+)`", table))
