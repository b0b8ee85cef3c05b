"""The answer says what the seeds can tell, and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from written_folders import write_study

from fedgg.analysis.compare import compare
from fedgg.analysis.verdict import conclude
from fedgg.runfolder.read import read_study

BASE = [0.80, 0.81, 0.79]


def said(
    tmp_path: Path,
    finals: Mapping[str, Sequence[float | None]],
    statuses: Mapping[tuple[str, int], str | None] | None = None,
) -> str:
    curves = {label: [None if f is None else [f / 2, f] for f in by_seed] for label, by_seed in finals.items()}
    study = read_study(write_study(tmp_path / "s", curves, reference=next(iter(finals)), statuses=statuses))
    found = conclude(study, compare(study))
    return f"{found.text} {found.method}".strip()


def test_what_seeds_can_tell(tmp_path: Path) -> None:
    text = said(tmp_path, {"FedAvg": BASE, "SCAFFOLD": [0.85, 0.86, 0.85], "FedGG, text": [0.80, 0.80, 0.80]})
    assert "SCAFFOLD is 5.3 ± 1.4 points higher than FedAvg" in text
    assert "“FedGG, text” is not distinguishable from FedAvg" in text
    assert "over 3 seeds, paired by seed" in text
    assert "95 % confidence interval" in text


def test_below_and_perhaps(tmp_path: Path) -> None:
    text = said(tmp_path, {"A": BASE, "B": [0.70, 0.71, 0.70], "C": [0.86, 0.84, 0.80]})
    assert "B is 9.7 ± 1.4 points lower than A" in text
    assert "C (+3.3 ± 6.3 points) is perhaps higher than A (more seeds are needed to decide)" in text


def test_two_seeds_say_nothing(tmp_path: Path) -> None:
    text = said(tmp_path, {"A": BASE[:2], "B": [0.9, 0.9]})
    assert text.startswith("Against A, B ends at +9.5 points, but 2 seeds are too few for a verdict.")
    assert "confidence" not in text


def test_one_row(tmp_path: Path) -> None:
    assert said(tmp_path, {"A": BASE}).startswith("A ends at 80.0 ± 1.0 % test accuracy after 2 rounds. Mean and")
    alone = said(tmp_path / "alone", {"A": [0.8]})
    assert "its highest was 80.0 %" in alone
    assert "One seed, so the spread over seeds is unknown." in alone


def test_many_rows_name_the_best_and_warn(tmp_path: Path) -> None:
    rows = {f"row {at}": [value + 0.01 * at for value in BASE] for at in range(8)}
    text = said(tmp_path, rows)
    assert "row 7 has the highest final accuracy of 8 rows, 87.0 ± 1.0 % (3 seeds; selected by this result" in text
    assert "and 4 more" in text
    assert "Not corrected for 7 comparisons" in text


def test_unfinished_and_diverged(tmp_path: Path) -> None:
    text = said(tmp_path, {"A": BASE, "B": [0.9, 0.9, None]}, {("B", 1): "diverged"})
    assert text.startswith("Preliminary, with 5 of 6 runs finished: ")
    assert "1 run of B diverged and is excluded from the averages." in text
    nothing = said(tmp_path / "n", {"A": [0.1, 0.2]}, {("A", 0): None, ("A", 1): None})
    assert nothing == "2 of 2 runs have started and none has finished, so there is no result yet."
    assert said(tmp_path / "d", {"A": [0.1]}, {("A", 0): "diverged"}) == "The run diverged."


def test_damaged_runs_are_called_so_whatever_the_others_are(tmp_path: Path) -> None:
    statuses = {("A", 0): "finished", ("A", 1): None}
    folder = write_study(tmp_path, {"A": [[0.1, 0.2], [0.1, 0.2]]}, reference="A", statuses=statuses)
    (folder / "run-0" / "seed-0" / "rounds.jsonl").write_text("", encoding="utf-8")  # and yet it says that it finished
    study = read_study(folder)
    assert study.damaged("A") == [0]
    text = conclude(study, compare(study)).text
    assert text == "1 of 2 runs is damaged and no other has finished, so there is no result."


def test_a_run_whose_privacy_budget_is_spent_has_ended(tmp_path: Path) -> None:
    text = said(tmp_path, {"A": BASE}, {("A", 0): "spent", ("A", 1): "spent"})
    assert text.startswith("A ends at 80.0 ± 1.0 % test accuracy after 2 rounds.")


def test_a_reference_that_is_late(tmp_path: Path) -> None:
    text = said(tmp_path, {"A": BASE, "B": BASE}, {("A", 0): None, ("A", 1): None, ("A", 2): None})
    assert (
        "B has the highest final accuracy, 80.0 ± 1.0 %; the reference A has not finished with the same seeds yet."
        in text
    )
    first = said(tmp_path / "first", {"A": BASE, "B": [None, None, None]})
    assert "A has the highest final accuracy, 80.0 ± 1.0 %; no other row has finished with the same seeds yet." in first


def test_a_reference_without_the_measure(tmp_path: Path) -> None:
    """Runs with personal models beside a global one, by personal accuracy."""
    path = write_study(tmp_path, {"Avg": [[0.5]], "Per": [[0.5]]}, reference="Avg")
    personal = {"round": 1, "personal_accuracy": 0.9, "personal_accuracy_by_client": {"0": 0.9}}
    (tmp_path / "run-1" / "seed-0" / "rounds.jsonl").write_text(json.dumps(personal) + "\n")
    study = read_study(path)
    found = conclude(study, compare(study, study.measure("personal_accuracy")))
    assert "the reference Avg has no personal accuracy" in found.text
