"""Run folders that no run writes, for `report`, `watch` and `resume`: a page or one line, no traceback, no wait."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from odd import CRAFTED, FILES, LARGE, crafted, mutated, odd_folder, patience, reference

from fedgg.analysis.chart_data import run_columns
from fedgg.analysis.collect import RunCollection
from fedgg.cli.progress import _draw
from fedgg.errors import UserError
from fedgg.files import write_output
from fedgg.lab.runner import run
from fedgg.lab.store import Store
from fedgg.older_python import add_note
from fedgg.report.export import write_figures, write_tables
from fedgg.report.live import LiveData
from fedgg.report.page import report_html
from fedgg.runfolder.archive_file import archive_of, read_archive
from fedgg.runfolder.read import read_run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory.mktemp("whole") / "run")


def assert_shown_beside(folders: list[Path], whole: Path) -> None:
    """The page comes, with the sound run on it; odd ones are shown, or named with what is wrong with them."""
    with patience():
        collection = RunCollection([whole, *folders])
        collection.refresh()
        html = report_html(collection)
    html.encode("utf-8", "strict")
    assert "something no run writes" not in html, "it was not refused when it was read"
    shown = [record.path for group in collection.groups for by in group.study.runs.values() for record in by.values()]
    assert whole in shown
    for odd in folders:
        odd_is_shown = odd in shown or (odd.is_file() and len(shown) > 1)  # archived runs have other paths
        assert odd_is_shown or any(str(odd) in problem.path for problem in collection.problems)
    for problem in collection.problems:
        assert "\n" not in problem.why
        assert len(problem.why) < 2000


def assert_resumed_or_refused(odd: Path) -> None:
    """As `fedgg resume` does, with the pictures it draws."""
    with patience():
        try:
            run(Store(odd).experiment(), out=odd)
            _draw(odd)
        except UserError as error:
            line = str(error)
        else:
            return
    assert "\n" not in line
    assert len(line) < 2000


def test_crafted_folders_on_one_page(whole: Path, tmp_path: Path) -> None:
    odd = [crafted(name, whole, tmp_path / str(at)) for at, name in enumerate(CRAFTED) if name not in LARGE]
    assert_shown_beside(odd, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_folders_one_by_one(name: str, whole: Path, tmp_path: Path) -> None:
    assert_shown_beside([crafted(name, whole, tmp_path / "odd")], whole)


def test_the_real_command(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "runs" / "whole")
    for at, name in enumerate(("rounds.jsonl is a FIFO", "config.toml leads to /dev/zero", "deep summary.json",
                               "infinite bytes", "study: surrogates", "reason as markup")):  # fmt: skip
        crafted(name, whole, tmp_path / "runs" / f"odd-{at}")
    command = [str(Path(sys.executable).with_name("fedgg")), "report", str(tmp_path / "runs"), "-o", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    for said in ("is a FIFO, not a regular file", "is a device, not a regular file", "nested more than 64 deep",
                 "bytes_up = inf, not a number of bytes", "half of a surrogate pair"):  # fmt: skip
        assert said in done.stderr
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()


def test_a_folder_whose_name_is_no_text(whole: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"run-\xff-\xed\xa0\x80")
    for place in (odd / "a", odd / "b", odd / "broken"):
        shutil.copytree(whole, place)
    (odd / "broken" / "config.toml").write_text("=")
    with patience():
        collection = RunCollection([odd])
        collection.refresh()
        write_output(tmp_path / "page.html", report_html(collection))
        write_tables(collection.groups, tmp_path / "tables")
        write_figures(collection.groups, tmp_path / "figures")
        news = LiveData([odd])
        assert b"run-?" in news.page()
        (news.since("")[1] or "").encode()
    assert "run-?" in (tmp_path / "page.html").read_text()
    assert [problem.path for problem in collection.problems] == [str(odd / "broken")]


def test_links_that_lead_in_circles(whole: Path, tmp_path: Path) -> None:
    """Twenty links in each of three folders would be 20**5 ways to go."""
    shutil.copytree(whole, tmp_path / "runs" / "a")
    for number in range(20):
        for folder in ("x", "y", "z"):
            (tmp_path / "runs" / folder).mkdir(exist_ok=True)
            (tmp_path / "runs" / folder / f"link-{number}").symlink_to(tmp_path / "runs")
    with patience(20):
        collection = RunCollection([tmp_path / "runs"])
        collection.refresh()
    assert len(collection.groups) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_folders_resumed_and_drawn(name: str, whole: Path, tmp_path: Path) -> None:
    odd = crafted(name, whole, tmp_path / "odd")
    assert_resumed_or_refused(odd)
    with patience(120):
        LiveData([odd]).page()
        if name.startswith(FILES):
            return  # pictures take seconds, and these are alike
        collection = RunCollection([odd])
        collection.refresh()
        write_figures(collection.groups, tmp_path / "figures")
        write_tables(collection.groups, tmp_path / "tables")


def through(seed: int, count: int, whole: Path, tmp_path: Path) -> None:
    """Odd folders one after another, every fourth resumed as well."""
    chance = random.Random(seed)
    for number in range(count):
        odd = odd_folder(whole, tmp_path / f"odd-{number}", chance)
        try:
            assert_shown_beside([odd], whole)
            if number % 4 == 0:
                assert_resumed_or_refused(odd)
        except BaseException as error:
            add_note(error, f"folder {number} of seed {seed}, kept at {odd}")
            raise
        shutil.rmtree(odd)


def test_forty_odd_folders_on_one_page(whole: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    folders = [odd_folder(whole, tmp_path / str(number), chance) for number in range(40)]
    assert_shown_beside(folders, whole)
    for odd in folders[:3]:
        assert_resumed_or_refused(odd)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_thousand_odd_folders(seed: int, whole: Path, tmp_path: Path) -> None:
    through(seed, 200, whole, tmp_path)


def folded_through(seed: int, count: int, whole: Path, tmp_path: Path) -> None:
    """Odd archives."""
    chance, file = random.Random(seed), tmp_path / "archive.json"
    content = json.loads(json.dumps(archive_of([read_run(whole)] * 3)))
    for number in range(count):
        odd = mutated(content, chance)
        # The first key says what kind of file it is.
        file.write_text(json.dumps({"format": odd.get("format", 1)} | odd, separators=(",", ":")))
        try:
            assert_shown_beside([file], whole) if number % 10 == 0 else _read_or_refused(file)
        except BaseException as error:
            add_note(error, f"file {number} of seed {seed}: {json.dumps(odd)[:2000]}")
            raise


def _read_or_refused(file: Path) -> None:
    with patience(), suppress(UserError):
        for record in read_archive(file):
            run_columns(record)


def test_fifty_odd_folded_files(whole: Path, tmp_path: Path) -> None:
    folded_through(0, 50, whole, tmp_path)


@pytest.mark.slow
def test_a_thousand_odd_folded_files(whole: Path, tmp_path: Path) -> None:
    folded_through(1, 1000, whole, tmp_path)
