"""`fedgg watch` in a real browser: the page is updated while a run is in progress, and keeps the reader's choices."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import until
from observers import Callbacks

from fedgg.lab.config import Experiment
from fedgg.lab.runner import run
from fedgg.report.live import LiveData, LivePage

pytestmark = pytest.mark.browser

POINTS = "Math.max(0, ...(document.querySelector('#curves .plot')?.data ?? []).map((trace) => trace.x.length))"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[LivePage]:
    with LivePage(LiveData([tmp_path / "run", tmp_path / "other"], pause=0.05)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Gate:
    """Lets a real run play one round at a time."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)

    def play(self, folder: Path) -> threading.Thread:
        experiment = Experiment(rounds=4, split={"clients": 3}, local={"epochs": 1}, model={"name": "mlp", "hidden": 4})

        def played(record: dict[str, Any]) -> None:
            self.may.acquire(timeout=120)

        thread = threading.Thread(
            target=run, args=(experiment,), kwargs={"out": folder, "observer": Callbacks(round=played)}
        )
        thread.start()
        return thread


def test_the_page_grows_with_the_run(open_page: Callable[..., Any], served: LivePage, tmp_path: Path) -> None:
    page = open_page(served.address, offline=False, wait="#answer")
    assert "No run yet" in page.inner_text("#title")
    assert "does not exist (yet)" in page.inner_text("#troubles")
    gate = Gate()
    runner = gate.play(tmp_path / "run")
    try:
        until(page, f"{POINTS} === 1")
        assert "not finished (round 1 of 4), so there is no result yet" in page.inner_text("#answer")
        page.locator("#curves .choice button", has_text="megabytes").click()
        page.fill("#target", "12.5")
        page.focus(".results thead button >> nth=2")
        gate.may.release()
        until(page, f"{POINTS} === 2")
        # What the reader chose stays, and so does the focus.
        assert page.evaluate("document.querySelector('#curves .xtitle').textContent").startswith("MB")
        assert page.input_value("#target") == "12.5"
        assert page.evaluate("document.activeElement.closest('.results') !== null")
    finally:
        for _ in range(5):
            gate.may.release()
        runner.join()
    until(page, "document.querySelector('#answer').textContent.includes('test accuracy after 4 rounds')")
    assert all(address.startswith(served.address) for address in page.asked)
    assert {address.removeprefix(served.address).partition("?")[0] for address in page.asked} <= {"", "data.json"}
    shutil.copytree(tmp_path / "run", tmp_path / "other")  # appears later, and the first one vanishes
    shutil.rmtree(tmp_path / "run")
    until(page, "document.querySelector('#troubles').textContent.includes('/run')")
    assert page.locator(".results tbody tr").count() == 1


def test_an_ended_server_leaves_the_page(open_page: Callable[..., Any], tmp_path: Path) -> None:
    experiment = Experiment(rounds=2, split={"clients": 3}, local={"epochs": 1}, model={"name": "mlp", "hidden": 4})
    run(experiment, out=tmp_path / "run")
    with LivePage(LiveData([tmp_path / "run"])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        page = open_page(server.address, offline=False)
        server.shutdown()
        thread.join()
    page.context.set_offline(True)
    until(page, "document.querySelector('#live').classList.contains('lost')")
    assert page.locator(".results tbody tr").count() == 1
    page.complaints_are_fine()
