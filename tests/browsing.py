"""A real Chromium, where there is one: $FEDGG_CHROMIUM or `chromium` on the path, driven by playwright."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


def until(page: Any, expression: str) -> None:
    """Wait for it. Playwright's own way evaluates text within the page, which the page's policy rightly refuses."""
    deadline = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    driver = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'fedgg[browser]'"
    )
    binary = os.environ.get("FEDGG_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("there is no Chromium: install one, or say where it is in FEDGG_CHROMIUM")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address, without a network unless told otherwise; complaints of the page fail the test at its end."""
    with ExitStack() as stack:
        complaints: list[str] = []

        def dismissed(dialog: Any) -> None:
            complaints.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        def opened(address: str, *, width: int = 1200, wait: str = ".plot .main-svg", **more: Any) -> Any:
            context = chromium.new_context(viewport={"width": width, "height": 900}, **({"offline": True} | more))
            stack.callback(context.close)
            page = context.new_page()
            page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
            page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
            page.on("dialog", dismissed)
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.goto(address)
            page.asked = asked
            page.complaints_are_fine = complaints.clear
            if wait:
                page.wait_for_selector(wait, timeout=60_000)
            return page

        yield opened
        assert complaints == []
