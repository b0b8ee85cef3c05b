"""CONTRIBUTING.md names files that exist, every package, and the places of the registries."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import fedgg
from fedgg.aggregation import RULES
from fedgg.algorithms import ALGORITHMS
from fedgg.core.optimisers import OPTIMISERS, SCHEDULES
from fedgg.data import DATASETS, SPLITS
from fedgg.engines import ENGINES
from fedgg.models import MODELS

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
HOME = Path(fedgg.__file__).parent
REGISTRIES: dict[str, tuple[str, Iterable[str]]] = {
    "algorithm": ("algorithms/__init__.py", ALGORITHMS),
    "data set": ("data/__init__.py", DATASETS),
    "model": ("models/__init__.py", MODELS),
    "split": ("data/__init__.py", SPLITS),
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
    assert len(rows()) == 10
    for path in re.findall(r"`([\w/]+\.py)`", "".join(rows().values())):
        assert (HOME / path).is_file(), path


def test_each_registry_is_where_the_table_says() -> None:
    for change, (path, registry) in REGISTRIES.items():
        assert f"`{path}`" in rows()[change]
        text = (HOME / path).read_text()
        for name in registry:
            assert f'"{name}"' in text or change == "algorithm", (change, name)


def test_every_package_is_described() -> None:
    table = TEXT.partition("| package | contents |")[2].partition("\n\n")[0]
    packages = {path.parent.name for path in HOME.glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`(\w+)`", table))
