"""Execute the notebooks in docs/notebooks and write their outputs into them.

python docs/site_build/execute_notebooks.py             # all
python docs/site_build/execute_notebooks.py inside-fedgg

Each runs in a folder of its own, which is removed afterwards.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SECONDS = 300  # for one cell, on a machine that is busy


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs, and without what differs from run to run (times of execution)."""
    notebook = nbformat.read(path, as_version=4)
    environment = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(
                notebook, timeout=SECONDS, kernel_name="python3", resources=resources, record_timing=False
            ).execute()
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return notebook


def main(names: list[str]) -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            started = time.perf_counter()
            notebook = executed(path)
            nbformat.write(notebook, path)
            print(
                f"{path.name}: {time.perf_counter() - started:.1f} s, {path.stat().st_size / 1000:.0f} kB", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
