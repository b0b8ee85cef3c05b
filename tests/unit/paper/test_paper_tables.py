"""Cells say what is there: the paper's value, ours, the difference; missing, diverged and never in their words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedgg.paper.figures import paper_figure
from fedgg.paper.find_or_run import ArchivedRuns, NoRuns
from fedgg.paper.items import DATASETS, ITEMS, QUICK
from fedgg.paper.output import html, make_items, markdown
from fedgg.paper.plan import PlannedMethod, ReproductionPlan
from fedgg.paper.tables import paper_table
from fedgg.runfolder.archive_file import write_archive
from fedgg.runfolder.record_types import RunRecord

SPLIT = {"hash": "same", "classes": ["a", "b"], "counts": [[1, 2], [3, 0]]}


class Invented:
    """Curves by label and seed; labels that are not named have not been run."""

    def __init__(self, **curves: Any):
        self.curves = {label.replace("_", ", "): by_seed for label, by_seed in curves.items()}

    def record(self, method: PlannedMethod, seed: int) -> RunRecord | None:
        curve = self.curves.get(method.label, {}).get(seed)
        if curve is None or method.dataset != "cifar10":
            return None
        status = "diverged" if curve == "diverged" else "finished"
        rounds = [
            {"round": at + 1, "test_accuracy": value, "bytes_up": 2_000_000, "bytes_down": 1_000_000}
            for at, value in enumerate([0.1] if curve == "diverged" else curve)
        ]
        summary = {"status": status, "rounds_done": len(rounds), "seconds": 2.0}
        versions = {"commit": "abcdef0123", "device": "cpu", "torch": "2", "python": "3"}
        return RunRecord(Path("x"), method.experiment(seed).model_dump(mode="json"), rounds, SPLIT, summary, versions)


def plan(*items: str, **more: Any) -> ReproductionPlan:
    return ReproductionPlan(tuple(ITEMS[name] for name in items), ("cifar10",), (0, 1, 2), **more)


RESULTS = Invented(
    FedAvg={seed: [0.5, 0.72, 0.7] for seed in range(3)},
    FedProx={0: [0.71, 0.6, 0.65], 1: [0.1, 0.2, 0.3], 2: "diverged"},
    FedGG_text={0: [0.6, 0.71, 0.7]},
)


def cells(table_of: ReproductionPlan, item: str, accuracy: Any = "highest") -> dict[str, tuple[str, ...]]:
    return {row[1]: row[2:] for row in paper_table(table_of, ITEMS[item], RESULTS, accuracy).rows}


def test_accuracies() -> None:
    rows = cells(plan("table1"), "table1")
    assert rows["FedAvg"] == ("69.2 ± 0.4", "72.0 ± 0.0", "+2.8", "reference", "reference")
    assert rows["FedProx"][1] == "50.5 ± 29.0 (2 of 3)"
    assert rows["FedProx"][3] == "-0.2"
    assert rows["SCAFFOLD"] == ("70.1 ± 0.3", "missing", "–", "+0.9", "–")
    assert rows["FedGG, text"][:3] == ("71.1 ± 0.2", "71.0 (1 of 3)", "-0.1")
    assert rows["FedGG, text"][4].startswith("-1.0")
    assert cells(plan("table1"), "table1", "final")["FedAvg"][1] == "70.0 ± 0.0"


def test_rounds() -> None:
    rows = cells(plan("table3"), "table3")
    # The target is 70.0 %: FedAvg itself is there at round 2 of 3.
    assert rows["FedAvg"] == ("100", "2", "–", "1×", "1.50×", "–", "4.0", "2.0")
    assert rows["FedProx"][:2] == ("80", "1 (1 of 3)")
    assert rows["SCAFFOLD"][:3] == ("59", "missing", "missing")


def test_notes_name_conditions_and_what_diverged() -> None:
    notes = "\n".join(paper_table(plan("table1"), ITEMS["table1"], RESULTS).notes)
    for words in (
        "FedProx: seed 2 excluded from the averages (diverged)",
        "commit abcdef0",
        "precision fp32",
        "Seeds 0, 1, 2",
        "FedGG, text:",
    ):
        assert words in notes
    assert "highest over all rounds" in notes
    assert "7 runs, 14 s" in notes
    short = paper_table(plan("table1", changes={"rounds": 7}), ITEMS["table1"], NoRuns())
    assert short.title.endswith("7 of the paper's 100 rounds")
    assert any("not directly comparable" in note for note in short.notes)


def test_with_nothing_run_every_cell_is_missing_and_figures_are_not_drawn() -> None:
    everything = ReproductionPlan(tuple(ITEMS.values()), tuple(DATASETS), (0, 1, 2))
    for item in everything.items:
        if item.kind == "accuracy":
            assert {row[3] for row in paper_table(everything, item, NoRuns()).rows} == {"missing"}
        if not item.is_table:
            assert paper_figure(everything, item, NoRuns(), run=False) is None
    made = make_items(everything, NoRuns(), "highest", run=False)
    assert "missing" in markdown(everything, made)
    assert "Not drawn: it has no finished runs" in html(everything, made)


def test_the_quick_version_shows_none_of_the_papers_values() -> None:
    quick = ReproductionPlan(tuple(ITEMS.values()), (QUICK,), (0,), quick=True)
    tables = [one.table for one in make_items(quick, NoRuns(), "highest", run=False) if one.table is not None]
    assert len(tables) == sum(item.is_table for item in quick.items) == 16
    for table in tables:
        paper = [at for at, name in enumerate(table.columns) if "paper" in name]
        assert {row[at] for row in table.rows for at in paper} <= {"–", "reference"}
        assert any("so they are omitted" in note for note in table.notes)


def test_folded_runs_give_the_same_table(tmp_path: Path) -> None:
    wanted = plan("table1", "fig1", "fig2")
    records = [record for method, seed in wanted.runs() if (record := RESULTS.record(method, seed))]
    write_archive([record for record in records if record.config["split"]["beta"] == 0.5], tmp_path / "some.json")
    archived = ArchivedRuns(tmp_path)
    other = plan("table1", changes={"engine.name": "stacked"})  # found by what was trained, not by what trained it
    assert paper_table(other, ITEMS["table1"], archived).rows == paper_table(wanted, ITEMS["table1"], RESULTS).rows
    picture = paper_figure(wanted, ITEMS["fig1"], archived, run=False)
    assert picture is not None
    assert len(picture.numbers.rows) == 4  # two clients, two classes; nothing of beta 0.1 was archived
    curves = paper_figure(wanted, ITEMS["fig2"], archived, run=False)
    assert curves is not None
    assert ("CIFAR-10, beta 0.5", "FedAvg", "2", "72.00", "72.00", "72.00") in curves.numbers.rows


def test_fig3_has_one_panel_for_each_treatment_of_the_first_step() -> None:
    results = Invented(**{"FedAvg": {0: [0.1, 0.2]}, "FedGG mu 1": {0: [0.2, 0.3]}})
    picture = paper_figure(plan("fig3"), ITEMS["fig3"], results)
    assert picture is not None
    assert picture.summary is not None
    assert [axes.get_title(loc="left") for axes in picture.figure.axes] == [
        "adaptive weight",
        "fixed weight, first step skipped",
        "fixed weight, epsilon",
    ]
    assert len(picture.summary.rows) == 11
    assert picture.summary.rows[1][1] == "30.0"


def test_a_figure_says_what_is_not_in_it() -> None:
    results = Invented(**{"FedAvg": {0: [0.5, 0.6]}, "push 0.5": {0: [0.6, 0.7]}})
    picture = paper_figure(plan("pushes"), ITEMS["pushes"], results, run=False)
    assert picture is not None
    assert "CIFAR-10: seed 0 only." in picture.notes
    lacking = "; ".join(f"relative push {kappa} at beta {beta}" for beta in (0.5, 0.1) for kappa in (0.3, 0.6))
    assert f"CIFAR-10: not run yet: {lacking}." in picture.notes
    whole = paper_figure(plan("fig2"), ITEMS["fig2"], Invented(FedAvg={seed: [0.5] for seed in range(3)}), run=False)
    assert whole is not None
    assert not any(note.endswith(" only.") for note in whole.notes)
