"""Progress from Python: in a log, and in the kernel of a notebook."""

from __future__ import annotations

from typing import Any

import pytest

import fedgg


def test_progress_from_python_in_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    observer = fedgg.ProgressObserver()
    for _ in range(2):  # a second call begins anew
        fedgg.compare([fedgg.FedAvg(), fedgg.FedGG()], fedgg.Experiment(rounds=2), seeds=(0,), observer=observer)
    lines = capfd.readouterr().err.splitlines()
    ends = [line for line in lines if "finished, test accuracy" in line]
    assert [line.partition(",")[0] for line in ends] == ["FedAvg", "FedGG"] * 2
    others = [line for line in lines if line not in ends]
    assert all(line.startswith("note: ") or " of 4 rounds; " in line for line in others)
    assert "\x1b" not in "".join(lines)


NOTEBOOK = """
import fedgg
fedgg.run(fedgg.Experiment(name="<b>", rounds=3), observer=fedgg.ProgressObserver()).status
"""


def test_progress_in_a_notebook() -> None:
    """In a real kernel: one table in the cell's output, updated in place, with names escaped."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK) for _ in range(2)])
    client, updates = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3"), list[tuple[str, str]]()
    process = client.process_message

    def watched(message: Any, cell: Any, index: int) -> Any:
        if message["msg_type"] in ("display_data", "update_display_data"):
            updates.append((message["msg_type"], message["content"]["data"]["text/html"]))
        return process(message, cell, index)

    client.process_message = watched
    client.execute()
    for cell in notebook.cells:
        shown, result = cell.outputs
        assert "<td>&lt;b&gt;</td>" in shown["data"]["text/html"]
        assert "value='3' max='3'" in shown["data"]["text/html"]
        assert "finished, test accuracy" in shown["data"]["text/html"]
        assert result["data"]["text/plain"] == "'finished'"
    kinds = [kind for kind, _ in updates]
    assert kinds.count("display_data") == 2
    assert kinds.count("update_display_data") > 2
    assert "value='0' max='3'" in updates[0][1]
