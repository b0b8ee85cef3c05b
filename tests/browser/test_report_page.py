"""The page in a real browser, from disk and without a network: read, sorted, dragged, darkened, by mouse and by key."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsing import until
from earlier_folders import without_checksums

import fedgg
from fedgg.analysis.collect import RunCollection
from fedgg.analysis.compare import compare
from fedgg.analysis.verdict import conclude
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.study import Study, grid, run_study
from fedgg.report.page import report_html
from fedgg.report.tables import comparison_tables
from fedgg.runfolder.read import read_study

pytestmark = pytest.mark.browser

EVIL = "<script>window.hacked = 1; alert(1)</script>"
SMALL = {"rounds": 4, "split": {"clients": 4, "beta": 0.3}, "local": {"epochs": 1}, "data": {"holdout": 0.2}}


def study_folder(folder: Path, variants: dict[str, dict[str, Any]], seeds: tuple[int, ...]) -> Path:
    base = Experiment(**SMALL, model={"name": "mlp", "hidden": 8})
    study = Study(base, variants, seeds, next(iter(variants)))
    run_study(study, folder, processes=1, observer=Observer())
    return folder


def write_page(*folders: Path, to: Path) -> str:
    collection = RunCollection(folders)
    collection.refresh()
    to.write_text(report_html(collection), encoding="utf-8")
    return to.as_uri()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real comparison, one of whose rows has a name that would like to be markup."""
    variants = {
        "FedAvg": {"algorithm.name": "fedavg", "local.lr": 0.05},
        EVIL: {"algorithm.name": "fedgg", "local.lr": 0.1},
        "SCAFFOLD, %{x} & $a$": {"algorithm.name": "scaffold", "local.lr": 0.2},
    }
    return study_folder(tmp_path_factory.mktemp("compared") / "runs", variants, (0, 1))


@pytest.fixture(scope="module")
def address(compared: Path) -> str:
    return write_page(compared, to=compared / "report.html")


@pytest.fixture
def page(open_page: Callable[..., Any], address: str) -> Any:
    return open_page(address)


def column(page: Any, number: int) -> list[str]:
    found: list[str] = page.locator(f".results tbody tr > :nth-child({number})").all_text_contents()
    return found


def head(page: Any, words: str) -> Any:
    return page.locator(".results thead button", has_text=re.compile(words))


def test_opens_from_disk_and_asks_nobody(page: Any, address: str) -> None:
    assert page.asked == [address]
    assert "2 seeds are too few for a verdict" in page.inner_text("#answer")
    headings = page.locator("h2").all_text_contents()
    sections = ["Training curves", "Results", "Data split", "Clients", "Algorithm diagnostics"]
    assert headings == [*sections, "Events", "Settings and versions"]
    # Each says which accuracy it is.
    assert "server's test set" in page.inner_text("#curves figcaption")
    assert "hold-out examples" in page.inner_text("#clients")


def test_a_name_is_only_a_name(page: Any) -> None:
    assert page.evaluate("window.hacked") is None
    assert column(page, 1) == ["FedAvg", EVIL, "SCAFFOLD, %{x} & $a$"]
    assert EVIL in page.locator("#curves .legend button").all_text_contents()
    assert EVIL in page.locator("#settings summary").all_text_contents()
    hover(page)
    told = page.text_content("#curves .hoverlayer")
    assert "<script>" in told
    assert "%{x}" in told


def hover(page: Any) -> None:
    box = page.locator("#curves .plot .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + box["width"] / 2 + 3, box["y"] + box["height"] / 2)
    page.wait_for_selector("#curves .hoverlayer .legend", timeout=20_000)


def test_hover_tells_values(page: Any) -> None:
    hover(page)
    told = page.text_content("#curves .hoverlayer")
    assert re.search(r"round \d", told)
    assert re.search(r"FedAvg.*\d\d\.\d% \(\d\d\.\d% to \d\d\.\d%\)", told, re.DOTALL)
    assert told.index("FedAvg") < told.index("SCAFFOLD")  # as in the legend


def test_every_column_sorts(page: Any) -> None:
    for number in range(page.locator(".results thead button").count()):
        button = page.locator(".results thead button").nth(number)
        button.click()
        first = column(page, 1)
        way = page.locator(".results thead th").nth(number).get_attribute("aria-sort")
        assert way in ("ascending", "descending")
        button.click()
        other = page.locator(".results thead th").nth(number).get_attribute("aria-sort")
        assert {way, other} == {"ascending", "descending"}
        assert sorted(column(page, 1)) == sorted(first)
        assert page.locator(".results [aria-sort=none]").count() == page.locator(".results thead th").count() - 1
    head(page, "^final test").click()
    finals = [float(cell.split()[0]) for cell in column(page, 3)]
    assert finals == sorted(finals, reverse=True)
    head(page, "^final test").click()
    assert [float(cell.split()[0]) for cell in column(page, 3)] == sorted(finals)


def test_the_target_can_be_typed_and_dragged(page: Any) -> None:
    page.fill("#target", "20")
    until(page, "document.querySelector('.results').innerText.includes('rounds to 20.0 %')")
    place = [
        re.match(r"rounds to", text) is not None for text in page.locator(".results thead button").all_text_contents()
    ]
    reached = column(page, place.index(True) + 1)
    assert all(re.match(r"\d+\.\d", cell) for cell in reached)
    page.fill("#target", "100")
    until(page, "document.querySelector('.results').innerText.includes('never')")
    page.fill("#target", "40")
    line = page.locator("#curves .shapelayer path").last
    page.wait_for_timeout(300)
    box = line.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y - 30, steps=5)
    page.mouse.up()
    until(page, "Number(document.querySelector('#target').value) > 40.5")
    typed = page.input_value("#target")
    assert f"rounds to {float(typed):.1f} %" in page.inner_text(".results")
    page.fill("#target", "30")
    until(page, "Math.abs(document.querySelector('#curves .plot')._fullLayout.shapes[0].y0 - 0.3) < 1e-9")


def test_smoothing_and_axis(page: Any) -> None:
    lines = "document.querySelector('#curves .plot').data.filter((trace) => trace.fill !== 'toself')"
    longest = f"Math.max(...{lines}.map((trace) => trace.x.length))"
    assert page.evaluate(longest) == 4
    page.focus("#curves input[type=range]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    until(page, f"{longest} === 2")
    assert page.inner_text("#window-now") == "3 rounds"
    assert "average of the last 3 evaluated rounds" in page.inner_text("#curves figcaption")
    for choice, title in (("megabytes", "MB"), ("seconds", "seconds"), ("rounds", "round")):
        button = page.locator("#curves .choice button", has_text=choice)
        button.click()
        words = "document.querySelector('#curves .xtitle').textContent"
        until(page, f"{words}.startsWith('{title}')")
        assert button.get_attribute("aria-pressed") == "true"
    page.select_option("#curves select", "holdout_accuracy")
    until(page, "document.querySelector('#curves figcaption').textContent.includes('hold-out examples')")


def test_light_and_dark(open_page: Callable[..., Any], address: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('#curves .xtick text')).fill"
    light, dark = open_page(address), open_page(address, color_scheme="dark")
    assert light.evaluate(ground) == "rgb(255, 255, 255)"
    assert dark.evaluate(ground) != light.evaluate(ground)
    assert dark.evaluate(ink) != light.evaluate(ink)
    for _ in range(2):
        light.click("#theme")
    assert light.inner_text("#theme") == "Theme: dark"
    assert light.evaluate(ground) == dark.evaluate(ground)
    until(light, f"{ink} === '{dark.evaluate(ink)}'")


@pytest.mark.parametrize("width", [320, 380, 768])
def test_a_narrow_screen_scrolls_downwards_only(open_page: Callable[..., Any], address: str, width: int) -> None:
    page = open_page(address, width=width)
    for place in page.locator("section").all():
        place.scroll_into_view_if_needed()
        page.wait_for_timeout(150)
    for details in page.locator("details").all():
        details.evaluate("one => one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_keys_reach_everything(page: Any) -> None:
    want = page.evaluate(
        """() => {
          const all = [...document.querySelectorAll('a[href], button, select, input, summary, [tabindex="0"]')];
          const seen = all.filter((one) => one.checkVisibility() && !one.disabled);
          seen.forEach((one, at) => { one.dataset.stop = at; });
          return seen.length;
        }"""
    )
    met, unmarked = set(), 0
    for _ in range(want + 5):
        page.keyboard.press("Tab")
        stop, outline = page.evaluate(
            "[document.activeElement.dataset.stop ?? null, getComputedStyle(document.activeElement).outlineStyle]"
        )
        if stop is not None:
            met.add(stop)
            unmarked += outline == "none"
    assert len(met) == want
    assert unmarked == 0
    page.focus(".legend button")
    page.keyboard.press("Space")
    until(page, "document.querySelector('.legend button').ariaPressed === 'false'")


def test_charts_have_words_and_numbers(page: Any) -> None:
    for plot in page.locator(".plot").all():
        assert plot.get_attribute("role") == "img"
        assert len(plot.get_attribute("aria-label")) > 20
    button = page.locator("#curves .tools button", has_text="Show as table")
    button.click()
    sheet = page.locator("#curves figure table")
    assert sheet.locator("tbody tr").count() == 4
    assert sheet.locator("caption").count() == 1
    assert page.locator("#curves .tools [aria-expanded=true]").inner_text() == "Hide table"
    page.locator("#curves .tools button", has_text="Hide").click()
    assert not sheet.is_visible()
    for form in ("PNG", "SVG"):
        with page.expect_download(timeout=60_000) as download:
            page.locator("#curves .tools button", has_text=form).click()
        assert Path(download.value.path()).stat().st_size > 1000


def test_the_command_can_be_copied(page: Any) -> None:
    page.click("text=Copy the command")
    until(page, "/Copied|Selected/.test(document.querySelector('#settings [role=status]').textContent)")
    assert page.inner_text("#again").startswith("cat > again.toml <<'END'")


def test_without_script_there_is_the_answer_and_the_table(open_page: Callable[..., Any], address: str) -> None:
    page = open_page(address, wait="", java_script_enabled=False)
    assert "2 seeds are too few for a verdict" in page.inner_text("#static .answer")
    assert EVIL in page.inner_text("#static table >> nth=0")
    assert page.locator("#static table").count() == 2


def test_what_is_broken_is_named_and_the_rest_stands(
    open_page: Callable[..., Any], compared: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(compared, copy)
    (copy / "fedavg" / "seed-0" / "rounds.jsonl").write_text('{"round": 1}\nnonsense\n{"round": 2}\n')
    (copy / "fedavg" / "seed-1" / "config.toml").write_text("= what")
    page = open_page(write_page(copy, to=tmp_path / "report.html"))
    told = page.inner_text("#troubles")
    assert "rounds.jsonl is broken: line 2" in told
    assert "config.toml is broken" in told
    assert page.locator(".results tbody tr").count() == 3
    assert column(page, 2)[0] == "0, 2 damaged"
    assert "2 runs of FedAvg are damaged and excluded from the averages." in page.inner_text("#answer")


def test_a_sweep_of_three_axes(open_page: Callable[..., Any], tmp_path: Path) -> None:
    variants = grid({"algorithm.mu": [0.01, 1.0], "local.lr": [0.01, 0.1], "local.momentum": [0.0, 0.5]})
    folder = study_folder(tmp_path / "sweep", variants, (0,))
    page = open_page(write_page(folder, to=tmp_path / "report.html"))
    page.locator("#sweep").scroll_into_view_if_needed()
    page.wait_for_selector("#sweep .hm")
    cells = "document.querySelector('#sweep .plot').data[0].text.flat()"
    shown = page.evaluate(cells)
    assert len(shown) == 4
    assert all(re.fullmatch(r"\d+\.\d", text) for text in shown)
    assert page.locator("#sweep select").count() == 3
    page.select_option("#sweep label:has-text('Columns') select", "algorithm.mu")
    until(page, "document.querySelector('#sweep .xtitle').textContent === 'algorithm.mu'")
    held = page.locator("#sweep select").nth(2)
    before = page.evaluate(cells)
    held.select_option(index=0)
    first = page.evaluate(cells)
    page.locator("#sweep select").nth(2).select_option(index=1)
    until(page, f"JSON.stringify({cells}) !== '{json.dumps(first, separators=(',', ':'))}'")
    assert before in (first, page.evaluate(cells))


def test_what_went_wrong_is_told(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """A run that diverged, one that was resumed, and one whose client was dropped; times have a column of their own."""
    wild = {"algorithm.name": "fedavg", "local.lr": 1e38}
    folder = study_folder(tmp_path / "runs", {"calm": {"algorithm.name": "fedavg"}, "wild": wild}, (0,))
    resumed = without_checksums(folder / "calm" / "seed-0")
    (resumed / "resumes.jsonl").write_text(
        '{"after_round": 2, "when": "2026-01-01T10:00:00+00:00", "notes": ["torch <1> is new"]}\n'
    )
    lines = [json.loads(line) for line in (resumed / "rounds.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["lost"] = [{"client": 3, "why": "its model is not finite"}]
    lines[0]["notes"] = [{"client": 1, "what": "its memory is gone"}]
    (resumed / "federation").mkdir()
    ended = {"after_round": 3, "when": "2026-01-02", "who": "client 2", "what": "its SuperNode ended"}
    (resumed / "federation" / "events.jsonl").write_text(json.dumps(ended) + "\n")
    (resumed / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = open_page(write_page(folder, to=tmp_path / "report.html"))
    assert "1 run of wild diverged and is excluded from the averages." in page.inner_text("#answer")
    told = [row.all_inner_texts() for row in (r.locator("th, td") for r in page.locator("#events tbody tr").all())]
    assert page.locator("#events thead th").all_inner_texts() == ["run", "event", "details", "time"]
    assert ["calm, seed 0", "resumed after round 2", "torch <1> is new", "2026-01-01 10:00:00 UTC"] in told
    assert ["calm, seed 0", "client 3 dropped in 3 rounds (2 to 4)", "its model is not finite", ""] in told
    assert ["calm, seed 0", "client 1 in round 1", "its memory is gone", ""] in told
    assert ["calm, seed 0", "after round 3: client 2", "its SuperNode ended", "2026-01-02"] in told
    assert any(row[0] == "wild, seed 0" and row[1].startswith("diverged after round") for row in told)
    assert "1 diverged" in page.inner_text(".results")


def test_very_many_rows_come_when_asked_for(open_page: Callable[..., Any], compared: Path, tmp_path: Path) -> None:
    """The first fifty of the order chosen, which is an order of all; the button works by key and keeps its place."""
    folder = many_rows(compared / "fedavg" / "seed-0", tmp_path / "runs", 120)
    page = open_page(write_page(folder, to=tmp_path / "report.html"))
    assert column(page, 1) == [f"row {at:03}" for at in range(50)]
    more = page.locator("#results button[aria-expanded]")
    assert more.inner_text() == "Show all 120 rows"
    head(page, "^final test").click()
    assert column(page, 1) == [f"row {at:03}" for at in range(119, 69, -1)]
    more.focus()
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.results tbody tr').length === 120")
    assert column(page, 1) == [f"row {at:03}" for at in range(119, -1, -1)]
    assert page.evaluate("document.activeElement.ariaExpanded") == "true"
    page.keyboard.press("Space")
    until(page, "document.querySelectorAll('.results tbody tr').length === 50")


def many_rows(run: Path, folder: Path, count: int) -> Path:
    """Copies of a run under other names, each a little better than the one before."""
    labels = [f"row {at:03}" for at in range(count)]
    for at in range(count):
        place = folder / f"r{at}"
        shutil.copytree(run, place, ignore=shutil.ignore_patterns("checkpoint"))
        lines = [json.loads(line) for line in (without_checksums(place) / "rounds.jsonl").read_text().splitlines()]
        told = [line | {"test_accuracy": 0.5 + at / 1000} for line in lines]
        (place / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    runs = {label: {"0": f"r{at}"} for at, label in enumerate(labels)}
    study = {"format": 1, "labels": labels, "seeds": [0], "reference": labels[0], "runs": runs}
    (folder / "study.json").write_text(json.dumps(study))
    return folder


def test_few_rows_need_no_button(page: Any) -> None:
    assert not page.locator("#results button[aria-expanded]").is_visible()


def test_privacy_is_a_column(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Sorted by number, with what has no noise last; what is not private has a dash."""
    variants: dict[str, dict[str, Any]] = {
        "open": {"algorithm.name": "fedavg"},
        "clipped": {"privacy.noise": 0.0},
        "little noise": {"privacy.noise": 2.0},
        "much noise": {"privacy.noise": 20.0},
    }
    pytest.importorskip("dp_accounting", reason="pip install 'fedgg[privacy]'")
    folder = study_folder(tmp_path / "runs", variants, (0,))
    page = open_page(write_page(folder, to=tmp_path / "report.html"))
    heads = page.locator(".results thead button").all_text_contents()
    at = heads.index("epsilon") + 1
    shown = column(page, at)
    assert shown[:2] == ["–", "infinite"]
    spent = [json.loads((folder / name / "seed-0" / "summary.json").read_text())["epsilon"]
             for name in ("little-noise", "much-noise")]  # fmt: skip
    assert shown[2:] == [f"{epsilon:.2f}" for epsilon in spent]
    head(page, "^epsilon$").click()
    assert column(page, 1) == ["much noise", "little noise", "clipped", "open"]
    assert "epsilon: the privacy spent over the whole run, at delta 1e-05" in page.inner_text("#results .notes")


def test_a_damaged_run_has_a_curve_and_no_part_in_the_mean(
    open_page: Callable[..., Any], compared: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(compared, copy)
    history = copy / "fedavg" / "seed-1" / "rounds.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:2]))
    (copy / "fedavg" / "seed-0" / "summary.json").write_text("")
    page = open_page(write_page(copy, to=tmp_path / "report.html"))
    told = page.inner_text("#troubles")
    assert (
        "seed-1 is damaged and excluded from the averages: rounds.jsonl ends at round 2, but summary.json counts 4"
        in told
    )
    assert "seed-0 is incomplete: summary.json is broken (it is empty)" in told
    assert column(page, 2)[0] == "1, 1 damaged"
    lines = "document.querySelector('#curves .plot').data.filter((trace) => trace.name === 'FedAvg')"
    assert page.evaluate(f"{lines}.map((trace) => trace.x.length)") == [4, 2]
    assert "Thin lines: single runs (damaged, excluded from the averages)." in page.inner_text("#curves figcaption")
    events = [row.all_inner_texts() for row in (r.locator("th, td") for r in page.locator("#events tbody tr").all())]
    assert ["FedAvg, seed 1", "damaged, excluded from the averages"] in [row[:2] for row in events]
    assert ["FedAvg, seed 0", "incomplete folder"] in [row[:2] for row in events]


def diagnostic_captions(page: Any) -> dict[str, str]:
    names = page.locator("#diagnostics h3").all_text_contents()
    return dict(zip(names, page.locator("#diagnostics figcaption").all_text_contents(), strict=True))


def test_diagnostics_are_explained_by_their_algorithm(
    page: Any, four_seeds: Path, tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    captions = diagnostic_captions(page)
    assert captions["cosine"].startswith("Cosine between a client's drift")
    of_fedavg = diagnostic_captions(open_page(write_page(four_seeds, to=tmp_path / "report.html")))
    for drift in (captions["drift"], of_fedavg["drift"]):
        assert drift.startswith("Distance between a client's model and the global model")


def test_a_class_of_the_user_explains_its_diagnostics(
    compared: Path, tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    folder = Path(shutil.copytree(compared, tmp_path / "runs"))
    texts = {"drift": "Another distance.", "constructor": "None of this name."}
    for seed in (0, 1):
        versions = without_checksums(folder / "fedavg" / f"seed-{seed}") / "versions.json"
        versions.write_text(json.dumps(json.loads(versions.read_text()) | {"diagnostics": texts}))
    captions = diagnostic_captions(open_page(write_page(folder, to=tmp_path / "report.html")))
    assert captions["drift"].startswith(f"FedAvg: Another distance. {EVIL}: Distance between a client's model")
    assert captions["cosine"].startswith("Cosine between a client's drift")


ODD_WORDS = re.compile(
    r"in no mean|\breadings?\b|whoever|nobody|go(es)? on\b|left out|all the same|cannot be told|gives away|[↑↓≈]", re.I
)


def plain_words(page: Any) -> None:
    """Technical English, one word for one thing: no arrows for verdicts, no readings where diagnostics are meant."""
    for details in page.locator("details").all():
        details.evaluate("one => one.open = true")
    everything = page.evaluate(
        "[document.body.innerText, ...[...document.querySelectorAll('[title], [aria-label]')]"
        ".flatMap((one) => [one.title, one.ariaLabel ?? ''])].join('\\n')"
    )
    assert ODD_WORDS.search(everything) is None, ODD_WORDS.search(everything)


@pytest.fixture(scope="module")
def four_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough to be smoothed over five rounds, and four seeds, whose means may lie between two decimals."""
    base = Experiment(**SMALL | {"rounds": 9}, model={"name": "mlp", "hidden": 8})
    variants = {"slow": {"local.lr": 0.02}, "fast": {"local.lr": 0.1}, "wild": {"local.lr": 0.5}}
    study = Study(base, {k: {"algorithm.name": "fedavg", **v} for k, v in variants.items()}, (0, 1, 2, 3), "slow")
    folder = tmp_path_factory.mktemp("four") / "runs"
    run_study(study, folder, processes=1, observer=Observer())
    return folder


def cells(page: Any, words: str) -> list[str]:
    heads = page.locator(".results thead button").all_text_contents()
    (at,) = [at for at, text in enumerate(heads, start=1) if re.search(words, text)]
    return column(page, at)


def test_page_and_terminal_show_the_same_numbers(
    open_page: Callable[..., Any], four_seeds: Path, tmp_path: Path
) -> None:
    """Accuracies, differences, verdicts, and rounds and traffic to the target, without and with smoothing."""
    comparison = compare(read_study(four_seeds))
    accuracy, target = comparison_tables(comparison)
    page = open_page(write_page(four_seeds, to=tmp_path / "report.html"))
    assert cells(page, "^final test accuracy") == [row[2] for row in accuracy.rows]
    assert cells(page, "^highest") == [row[3] for row in accuracy.rows]
    differences, verdicts = cells(page, "^against slow"), cells(page, "^verdict$")
    shown = [f"{difference} {verdict}" for difference, verdict in zip(differences[1:], verdicts[1:], strict=True)]
    assert [text.replace("−", "-") for text in shown] == [row[4] for row in accuracy.rows[1:]]
    assert cells(page, "^rounds to target") == [row[1] for row in target.rows]
    assert cells(page, "^MB to target") == [row[2] for row in target.rows]
    rule = page.locator(".results thead th", has_text="rounds to target").get_attribute("title")
    assert "slow's final test accuracy with the same seed" in rule
    # The page's own rule, which it needs for other smoothing and other targets, is the same.
    for window, kind in ((1, "raw"), (5, "smoothed")):
        for row in comparison.rows:
            found = page.evaluate(
                "([label, window]) => reachedInRuns(page.groups[0], label, 'test_accuracy', null, window)",
                [row.label, window],
            )
            reach = getattr(row, kind)
            assert (found["reached"], found["seeds"], found["rounds"]) == (reach.reached, reach.seeds, reach.rounds)
            assert found["megabytes"] == pytest.approx(reach.megabytes)
    page.focus("#curves input[type=range]")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('#window-now').textContent === '5 rounds'")
    page.wait_for_timeout(200)
    assert cells(page, "^rounds to target") == [row[4] for row in target.rows]
    assert cells(page, "^MB to target") == [row[5] for row in target.rows]
    page.fill("#target", "20")
    until(page, "document.querySelector('.results').innerText.includes('rounds to 20.0 %')")
    page.locator("#curves button", has_text="Reset target").click()
    until(page, "document.querySelector('.results').innerText.includes('rounds to target')")
    plain_words(page)


def test_numbers_are_rounded_as_python_rounds_them(page: Any) -> None:
    values = [at / 16 for at in range(400)] + [0.05, 0.15, 1.005, 2.675, 8.25, 12.35, 99.95, 1234.5678]
    for digits in (1, 2):
        shown = page.evaluate("([values, digits]) => values.map((one) => fixed(one, digits))", [values, digits])
        assert shown == [f"{value:.{digits}f}" for value in values]


def drawn_charts(page: Any) -> list[str]:
    """Every chart that can be seen, by its name; each must have a point, or a sentence in its place and no buttons."""
    found = []
    for figure in page.locator("figure").all():
        figure.scroll_into_view_if_needed()
        if figure.locator(".nothing").is_visible():
            assert not figure.locator(".plot, .tools").first.is_visible()
            continue
        figure.locator(".plot .main-svg").first.wait_for(timeout=20_000)
        points = figure.evaluate(
            "one => one.querySelector('.plot').data.flatMap((t) => (t.z ?? t.y).flat()).filter(Number.isFinite).length"
        )
        name = figure.locator(".tools button", has_text="PNG").get_attribute("aria-label")
        assert points, name
        found.append(name)
    return found


def test_a_hundred_clients(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Their distribution: sorted, over the rounds, and one of them highlighted."""
    base = Experiment(
        rounds=3,
        data={"holdout": 0.2},
        split={"scheme": "iid", "clients": 100},
        local={"epochs": 1, "batch": 8},
        model={"name": "mlp", "hidden": 8},
    )
    study = Study(base, {name: {"algorithm.name": name} for name in ("fedavg", "fedgg")}, (0,), "fedavg")
    run_study(study, tmp_path / "runs", processes=1, observer=Observer())
    page = open_page(write_page(tmp_path / "runs", to=tmp_path / "report.html"))
    charts = drawn_charts(page)
    for name in ("Hold-out accuracy by client", "Training loss by client", "Clients over rounds"):
        assert f"{name} as PNG" in charts
    history = page.locator("#clients figure").nth(2)
    assert "Line: median; bands" in history.inner_text()
    history.locator("button", has_text="Show as table").click()
    assert history.locator("tbody tr").count() == 3
    last = [float(cell) for cell in history.locator("tbody tr").last.locator("td").all_inner_texts()]
    assert last == sorted(last)
    record = json.loads((tmp_path / "runs/fedavg/seed-0/rounds.jsonl").read_text().splitlines()[-1])
    held = sorted(record["holdout_accuracy_by_client"].values())
    assert (last[0], last[-1]) == (round(100 * held[0], 1), round(100 * held[-1], 1))
    page.fill("#client", "17")
    own = 100 * record["holdout_accuracy_by_client"]["17"]
    until(page, f"document.querySelector('#clients').innerText.includes('Client 17: fedavg {own:.1f} % (rank ')")
    marks = "document.querySelector('#clients .plot').data.filter((trace) => trace.mode === 'markers').length"
    until(page, f"{marks} === 2")
    page.fill("#client", "100")
    until(page, "document.querySelector('#clients').innerText.includes('have no value of client 100')")
    plain_words(page)


def test_a_chart_without_data_is_a_sentence(page: Any) -> None:
    for button in page.locator("#curves .legend button").all():
        button.click()
    until(page, "!document.querySelector('#curves .nothing').hidden")
    assert "All lines are hidden" in page.inner_text("#curves .nothing")
    assert not page.locator("#curves .tools").is_visible()
    page.locator("#curves .legend button").first.click()
    until(page, "document.querySelector('#curves .plot').checkVisibility()")
    assert page.locator("#curves .tools").is_visible()


def labels_of(page: Any, axis: str, section: str = "#curves") -> list[str]:
    return list(page.locator(f"{section} .plot >> nth=0").locator(f".{axis}tick text").all_text_contents())


def test_ticks_differ_and_rounds_are_whole(open_page: Callable[..., Any], compared: Path, tmp_path: Path) -> None:
    """Of a run whose accuracy hardly moves within three rounds; and after a zoom."""
    folder = tmp_path / "run"
    shutil.copytree(compared / "fedavg" / "seed-0", folder)
    lines = [json.loads(line) for line in (without_checksums(folder) / "rounds.jsonl").read_text().splitlines()]
    for at, line in enumerate(lines):
        line |= {"test_accuracy": 0.121 + at / 400, "test_loss": 2.3 + at / 10_000}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = open_page(write_page(folder, to=tmp_path / "report.html"))
    until(page, "document.querySelectorAll('#curves .xtick text').length > 1")
    for what in ("test_accuracy", "test_loss"):
        page.select_option("#curves select", what)
        until(page, f"document.querySelector('#curves .ytitle').textContent === '{what.replace('_', ' ')}'")
        page.wait_for_timeout(200)
        levels = labels_of(page, "y")
        assert len(levels) > 1
        assert len(set(levels)) == len(levels), levels
        assert labels_of(page, "x") == ["1", "2", "3", "4"]
    page.evaluate("Plotly.relayout(document.querySelector('#curves .plot'), {'xaxis.range': [1.2, 2.9]})")
    until(page, "document.querySelectorAll('#curves .xtick text').length === 1")
    assert labels_of(page, "x") == ["2"]
    for chart in page.locator("#diagnostics .plot, #clients .wide .plot").all():
        chart.scroll_into_view_if_needed()
        chart.locator(".xtick text").first.wait_for()
        page.wait_for_timeout(200)
        assert all(text.isdecimal() for text in chart.locator(".xtick text").all_text_contents())


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real comparison by two errors, where lower is better."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(320, 5)).astype(np.float32)
    y = (x @ generator.normal(size=5) + 0.1 * generator.normal(size=320)).astype(np.float32)
    variants = {name: {"algorithm.name": "fedavg", "local.lr": lr} for name, lr in (("slow", 0.01), ("fast", 0.05))}
    settings = SMALL | {"rounds": 8, "task": {"name": "regression"}, "metrics": ["rmse", "mae"]}
    settings |= {"split": {"scheme": "iid", "clients": 4}, "local": {"epochs": 1, "batch": 16}}
    folder = tmp_path_factory.mktemp("regression") / "runs"
    model = torch.nn.Sequential(torch.nn.Linear(5, 1), torch.nn.Flatten(0))
    data = (x[:240], y[:240], x[240:], y[240:])
    fedgg.compare(variants, settings, seeds=(0, 1, 2), model=model, data=data, out=folder)
    return folder


def test_every_measure_has_the_same_numbers_on_the_page_and_in_the_terminal(
    open_page: Callable[..., Any], regression: Path, tmp_path: Path
) -> None:
    page, study = open_page(write_page(regression, to=tmp_path / "report.html")), read_study(regression)
    options = page.locator("#curves select option").evaluate_all("all => all.map((one) => one.value)")
    assert options == [*study.measures]
    assert options[:4] == ["test_rmse", "test_mae", "holdout_rmse", "holdout_rmse_worst_client"]
    for key in options:
        page.select_option("#curves select", key)
        comparison = compare(study, study.measures[key])
        scores, target = comparison_tables(comparison)
        answer = conclude(study, comparison).text
        until(page, f"document.querySelector('#answer').textContent === {json.dumps(answer)}")
        page.wait_for_timeout(100)
        assert cells(page, "^final") == [row[2] for row in scores.rows]
        assert cells(page, "^lowest" if "highest" not in scores.columns else "^highest") == [r[3] for r in scores.rows]
        assert cells(page, "^rounds to target") == [row[1] for row in target.rows]
        assert page.text_content("#results .notes li").split(" Differences")[0] in scores.notes[0]
        for row in comparison.rows:  # the page's own rule, also where lower is better
            found = page.evaluate(
                "([label, key]) => reachedInRuns(page.groups[0], label, key, null, 1)", [row.label, key]
            )
            assert (found["reached"], found["rounds"]) == (row.raw.reached, row.raw.rounds)


def test_a_target_where_lower_is_better(open_page: Callable[..., Any], regression: Path, tmp_path: Path) -> None:
    page = open_page(write_page(regression, to=tmp_path / "report.html"))
    assert "lower is better" in page.inner_text("#results")
    assert "is at most the target" in page.inner_text("#results .notes")
    page.fill("#target", "1.5")
    until(page, "document.querySelector('.results').innerText.includes('rounds to 1.50')")
    assert all(re.match(r"\d+\.\d", cell) for cell in cells(page, "^rounds to"))
    page.fill("#target", "0.01")
    until(page, "document.querySelector('.results').innerText.includes('never')")
    head(page, "^final").click()
    finals = [float(cell.split()[0]) for cell in cells(page, "^final")]
    assert finals == sorted(finals)  # the best first
    page.select_option("#curves select", "test_loss")
    until(page, "document.querySelector('.results').innerText.includes('rounds to target')")
    drawn_charts(page)
    plain_words(page)


def test_personal_scores_and_classes(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Ditto records all four kinds of scores; a class has a name that would like to be markup."""
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    y = np.array([EVIL, "one", "two"])[np.argmax(x[:, :3], axis=1)]
    settings = SMALL | {"metrics": ["accuracy", "recall"], "personal": {"method": "ditto"}}
    settings |= {"split": {"scheme": "iid", "clients": 5, "unseen": 1}, "local": {"epochs": 1, "batch": 8}}
    folder = tmp_path / "runs"
    data, variants = (x[:160], y[:160], x[160:], y[160:]), {"FedAvg": fedgg.FedAvg(), "FedGG": fedgg.FedGG()}
    fedgg.compare(variants, settings, seeds=(0,), model=lambda: torch.nn.Linear(4, 3), data=data, out=folder)
    page = open_page(write_page(folder, to=tmp_path / "report.html"), width=420)
    options = page.locator("#curves select option").evaluate_all("all => all.map((one) => one.value)")
    assert {"test_recall", "holdout_accuracy", "personal_accuracy_spread", "unseen_accuracy"} <= {*options}
    assert "Worst clients by hold-out accuracy" in page.inner_text("#clients")
    page.select_option("#curves select", "personal_accuracy")
    until(page, "document.querySelector('#clients .lead').textContent.includes('by personal accuracy')")
    assert "worst client, personal" in page.inner_text(".results thead")
    page.locator("#clients select").first.select_option("holdout_accuracy")
    until(page, "document.querySelector('#clients .lead').textContent.includes('by hold-out accuracy')")
    charts = drawn_charts(page)
    for name in ("Hold-out accuracy by client", "Scores by class"):
        assert f"{name} as PNG" in charts
    page.locator("#classes button", has_text="Show as table").click()
    assert EVIL[:20] in page.inner_text("#classes table")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_unfinished_run(open_page: Callable[..., Any], compared: Path, tmp_path: Path) -> None:
    """Killed after two rounds of four: nothing on the page speaks of its end."""
    folder = tmp_path / "run"
    shutil.copytree(compared / "fedavg" / "seed-0", folder, ignore=shutil.ignore_patterns("checkpoint", "summary.json"))
    (folder / "rounds.jsonl").write_text("".join((folder / "rounds.jsonl").read_text().splitlines(keepends=True)[:2]))
    page = open_page(write_page(folder, to=tmp_path / "report.html"))
    assert page.inner_text("#answer") == "The run has not finished (round 2 of 4), so there is no result yet."
    assert re.search(r"Worst clients by hold-out accuracy, seed 0: .*, round 2 of 4\)", page.inner_text("#clients"))
    assert "unfinished: round 2 of 4" in page.inner_text("#events")
    for section in ("#answer", "#curves", "#results", "#clients", "#events"):
        assert "at the end" not in page.inner_text(section)
    assert cells(page, "^rounds to target") == ["–"]
    drawn_charts(page)
    plain_words(page)


def test_an_algorithm_from_a_file_is_called_by_its_class(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """By the command line in table and page; two files with the same class are told apart."""
    source = (Path(__file__).parents[2] / "examples" / "my_algorithm.py").read_text(encoding="utf-8")
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    folder = tmp_path / "runs"
    settings = ["model.hidden=8", "local.epochs=1", "split.clients=4"]
    typed = [word for name in ("one", "other") for word in ("--algorithm", f"{tmp_path / name}.py:MyAlgorithm")]
    chosen = ["--algorithm", "fedavg", *typed, "--rounds", "2", "--seeds", "0", "--jobs", "1", "--out", str(folder)]
    command = [sys.executable, "-m", "fedgg", "compare", *chosen, *(f"--set={setting}" for setting in settings)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "MyAlgorithm (one.py)" in printed
    assert str(tmp_path) + "/one.py:" not in printed
    page = open_page((folder / "report.html").as_uri())
    assert column(page, 1) == ["fedavg", "MyAlgorithm (one.py)", "MyAlgorithm (other.py)"]
    assert page.inner_text("#title") == "fedavg, MyAlgorithm (one.py) and MyAlgorithm (other.py) on digits"
