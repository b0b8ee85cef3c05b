"""The notebooks run, and are committed with their outputs. They need the extra `docs`; `make docs` runs them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
LARGEST = 200_000  # bytes of a notebook with its outputs


def site_build(name: str) -> ModuleType:
    """A module of docs/site_build."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site_build" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed_without_errors_and_without_paths_of_a_machine(path: Path) -> None:
    for cell in code_cells(path):
        assert cell["execution_count"] is not None, "run `make notebooks`"
        assert all(output["output_type"] != "error" for output in cell["outputs"])
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < LARGEST
    assert not any(word in text for word in ("/home/", "/root/", "/tmp/", "site-packages", "Traceback"))


@pytest.mark.filterwarnings("default")  # those of Jupyter's packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_as_much_as_it_did(path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the extra `docs`")
    pytest.importorskip("ipykernel", reason="needs the extra `docs`")
    notebook = site_build("execute_notebooks").executed(path)
    again = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, before in zip(again, code_cells(path), strict=True):
        kinds = [[output["output_type"] for output in one["outputs"]] for one in (cell, before)]
        assert kinds[0] == kinds[1], cell.source
    if path.stem == "simulation-to-flower":
        assert [output.get("text") for cell in again for output in cell.outputs].count("True\n") == 1
