"""Comparisons with numbers small enough to work out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from written_folders import RMSE, write_run, write_study

from fedgg.analysis import compare as module
from fedgg.analysis.collect import RunCollection
from fedgg.analysis.compare import (
    Comparison,
    ComparisonRow,
    compare,
    first_reaching,
    paired_difference,
    spread,
    trailing_average,
    unpaired_difference,
)
from fedgg.analysis.verdict import conclude
from fedgg.runfolder.measure import ACCURACY
from fedgg.runfolder.read import read_study


def row(comparison: Comparison, label: str) -> ComparisonRow:
    return next(row for row in comparison.rows if row.label == label)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Each round moves 1 MB. Targets: 0.5 with seed 0, 0.6 with seed 1."""
    curves = {
        "Avg": [[0.1, 0.6, 0.4, 0.5], [0.2, 0.3, 0.4, 0.6]],
        "Fast": [[0.5, 0.6, 0.7, 0.8], [0.4, 0.5, 0.6, 0.7]],
        "Slow": [[0.1, 0.2, 0.3, 0.5], [0.1, 0.2, 0.3, 0.4]],
    }
    return compare(read_study(write_study(tmp_path, curves, reference="Avg")))


def test_accuracies(comparison: Comparison) -> None:
    average = row(comparison, "Avg")
    assert average.final is not None
    assert average.best is not None
    assert average.final.mean == pytest.approx(0.55)
    assert average.final.sd == pytest.approx(0.1 / np.sqrt(2))
    assert average.final.n == 2
    assert average.best.mean == pytest.approx(0.6)
    assert average.best.sd == pytest.approx(0.0)
    assert comparison.best == "Fast"
    assert comparison.notes == ()


def test_rounds_and_megabytes_to_the_target(comparison: Comparison) -> None:
    fast, slow, average = (row(comparison, label).raw for label in ("Fast", "Slow", "Avg"))
    assert (fast.reached, fast.seeds) == (2, 2)
    assert fast.rounds == pytest.approx(2.0)  # rounds 1 and 3
    assert fast.megabytes == pytest.approx(2.0)
    assert fast.speed_up == pytest.approx(2.0)  # 4 rounds over 2
    assert (slow.reached, slow.seeds) == (1, 2)
    assert slow.rounds == pytest.approx(4.0)
    assert slow.speed_up == pytest.approx(1.0)
    assert average.rounds == pytest.approx(3.0)  # rounds 2 and 4: the reference obeys its own rule


def test_smoothing_needs_five_evaluations(comparison: Comparison) -> None:
    assert row(comparison, "Fast").smoothed == module.Reach(0, 0, None, None, None)


def test_smoothed_target_by_hand(tmp_path: Path) -> None:
    curves = {
        "Avg": [[0.1, 0.1, 0.2, 0.2, 0.4, 0.5, 0.7]],  # averages 0.2, 0.28, 0.4
        "B": [[0.0, 0.9, 0.0, 0.0, 0.9, 0.3, 0.1]],  # averages 0.36, 0.42, 0.26
    }
    result = row(compare(read_study(write_study(tmp_path, curves, reference="Avg"))), "B")
    assert result.raw.rounds == 2
    assert result.smoothed.rounds == 6
    assert result.smoothed.megabytes == pytest.approx(6.0)
    assert result.smoothed.speed_up == pytest.approx(7 / 6)


def test_rounds_without_evaluation_still_count(tmp_path: Path) -> None:
    curves: dict[str, list[list[float | None] | None]] = {
        "Avg": [[None, 0.2, None, 0.5, None]],
        "B": [[None, 0.6, None, 0.7, None]],
    }
    reach = row(compare(read_study(write_study(tmp_path, curves, reference="Avg"))), "B").raw
    assert reach.rounds == 2
    assert reach.megabytes == pytest.approx(2.0)
    assert reach.speed_up == pytest.approx(4 / 2)


def test_diverged_and_unfinished_runs_are_shown_and_kept_out(tmp_path: Path) -> None:
    curves: dict[str, list[list[float] | None]] = {
        "Avg": [[0.4, 0.5], [0.4, 0.5], [0.4, 0.5]],
        "B": [[0.6, 0.8], [0.9, 0.1], None],
        "C": [[0.6], [0.6], [0.6]],
    }
    statuses = {("B", 1): "diverged", ("C", 0): "diverged", ("C", 1): "stopped", ("C", 2): None}
    study = read_study(write_study(tmp_path, curves, reference="Avg", statuses=statuses))
    result = compare(study)
    b, c = row(result, "B"), row(result, "C")
    assert (b.finished, b.diverged, b.unfinished) == (1, 1, 1)
    assert b.final is not None
    assert b.final.mean == pytest.approx(0.8)
    assert b.final.sd is None
    assert (b.raw.reached, b.raw.seeds) == (1, 2)
    assert (c.finished, c.diverged, c.unfinished) == (0, 1, 2)
    assert c.final is None
    assert c.against_best is None
    assert "B: seed 1 excluded from the averages (diverged)." in result.notes
    assert "C: seeds 1, 2 excluded from the averages (not finished, or never evaluated)." in result.notes


def test_a_reference_that_never_finished_gives_no_target(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"A": [[0.5]], "B": [[0.5]]}, reference="A", statuses={("A", 0): "diverged"})
    result = compare(read_study(study))
    assert row(result, "B").raw.seeds == 0
    assert row(result, "B").against_reference is None
    assert any("no target" in note for note in result.notes)


def test_unlike_splits_and_lengths_are_told(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {"A": [[0.5, 0.6]], "B": [None]}, reference="A")
    write_run(folder / "run-1" / "seed-0", [0.5], split_hash="another")
    study = read_study(folder)
    comparison = compare(study)
    notes = " ".join(comparison.notes)
    assert "not paired by seed, because the runs have different splits" in conclude(study, comparison).method
    assert "different splits" in notes
    assert "different rounds" in notes


def test_verdicts_by_hand() -> None:
    other = {0: 0.50, 1: 0.50, 2: 0.50}
    # Differences 0.01, 0.02, 0.03: mean 0.02, sd 0.01, half width 4.303 * 0.01 / sqrt(3) = 0.02484.
    unsure = paired_difference("a", "b", {0: 0.51, 1: 0.52, 2: 0.53}, other)
    assert unsure.mean == pytest.approx(0.02)
    assert unsure.half_width == pytest.approx(0.024844, abs=1e-6)
    assert unsure.verdict == "perhaps higher"  # beyond one sd, within the interval
    assert paired_difference("b", "a", other, {0: 0.51, 1: 0.52, 2: 0.53}).verdict == "perhaps lower"
    # Mean 0.01 of differences 0, 0.01, 0.02 is not beyond their sd of 0.01.
    assert paired_difference("a", "b", {0: 0.499, 1: 0.51, 2: 0.52}, other).verdict == "not distinguishable"
    # The same spread around 0.03 excludes zero.
    assert paired_difference("a", "b", {0: 0.52, 1: 0.53, 2: 0.54}, other).verdict == "higher"
    assert paired_difference("a", "b", {0: 0.48, 1: 0.47, 2: 0.46}, other).verdict == "lower"
    assert paired_difference("a", "b", other, other).verdict == "not distinguishable"
    alone = paired_difference("a", "b", {0: 0.9, 7: 0.1}, other)
    assert (alone.n, alone.half_width, alone.verdict) == (1, None, "too few seeds")


def test_pairing_sees_through_a_spread_that_seeds_share() -> None:
    ours, theirs = {0: 0.52, 1: 0.721, 2: 0.92}, {0: 0.50, 1: 0.70, 2: 0.90}
    assert paired_difference("a", "b", ours, theirs).verdict == "higher"


def test_seeds_that_differ_by_the_very_same_amount_claim_nothing() -> None:
    """On 50 test images three seeds may each gain one of them: that is no certainty."""
    same = paired_difference("a", "b", {0: 0.52, 1: 0.72, 2: 0.92}, {0: 0.50, 1: 0.70, 2: 0.90})
    assert (same.half_width, same.verdict) == (None, "perhaps higher")
    assert same.mean == pytest.approx(0.02)


def test_what_several_rows_have_alike_is_said_once(tmp_path: Path) -> None:
    curves: dict[str, list[list[float] | None]] = {
        "Avg": [[0.5], [0.5], [0.5]],
        "B": [None, None, None],
        "C": [[0.6], None, None],
        "D": [None, None, None],
    }
    folder = write_study(tmp_path, curves, reference="Avg")
    for seed in range(3):
        status = "finished" if seed == 0 else None
        write_run(folder / "run-1" / f"seed-{seed}", [0.5], split_hash="another", status=status)
    notes = compare(read_study(folder)).notes
    assert "B; C: seeds 1, 2 excluded from the averages (not finished, or never evaluated)." in notes
    assert "Not run yet: D." in notes
    assert any(note.startswith("Seeds 0, 1, 2: the runs have different splits; differences") for note in notes)


def test_a_row_of_which_nothing_can_be_read_has_begun(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {"Avg": [[0.5]], "B": [[0.6]]}, reference="Avg")
    (folder / "run-1" / "seed-0" / "config.toml").write_text("not = [toml")
    collection = RunCollection([folder])
    collection.refresh()
    notes = compare(collection.groups[0].study).notes
    assert "B: seed 0 excluded from the averages (damaged: incomplete or unreadable)." in notes
    assert not any("Not run yet" in note for note in notes)


def test_rows_of_different_splits_are_not_paired(tmp_path: Path) -> None:
    """Each beta's FedAvg and FedProx share a split; across betas only the numbers can be compared."""
    curves: dict[str, list[list[float] | None]] = {
        "A": [[0.5], [0.6], [0.7]],
        "B": [[0.52], [0.621], [0.72]],
        "C": [None, None, None],
    }
    folder = write_study(tmp_path, curves, reference="A")
    others = [0.9, 0.91, 0.95]
    for seed, accuracy in enumerate(others):
        write_run(folder / "run-2" / f"seed-{seed}", [accuracy], split_hash="another")
    study = read_study(folder)
    result = compare(study)
    b, c = (row(result, label).against_reference for label in "BC")
    assert b is not None
    assert c is not None
    assert (b.paired, b.verdict) == (True, "higher")
    assert (c.paired, c.verdict) == (False, "higher")
    exact = stats.ttest_ind(others, [0.5, 0.6, 0.7], equal_var=False).confidence_interval(0.95)
    assert c.half_width is not None
    assert c.mean - c.half_width <= exact.low  # degrees of freedom are rounded down
    assert c.mean - c.half_width == pytest.approx(exact.low, abs=0.08)
    assert "paired by seed, except rows whose split differs from that of A" in conclude(study, result).method
    few = unpaired_difference("a", "b", [0.5, 0.6], [0.1, 0.2, 0.3])
    assert (few.n, few.half_width, few.verdict) == (2, None, "too few seeds")
    same = unpaired_difference("a", "b", [0.5, 0.5, 0.5], [0.4, 0.4, 0.4])
    assert (same.half_width, same.verdict) == (None, "perhaps higher")


def test_the_table_of_t_is_right() -> None:
    exact = stats.t.ppf(0.975, np.arange(1, len(module._T95) + 1))
    assert np.allclose(module._T95, exact, atol=6e-4)


def test_small_pieces() -> None:
    assert trailing_average(np.array([1.0, 2.0, 3.0, 4.0]), 3).tolist() == [2.0, 3.0]
    assert len(trailing_average(np.array([1.0]), 3)) == 0
    assert first_reaching(np.array([0.1, 0.5, 0.4]), 0.5) == 1
    assert first_reaching(np.array([0.1, 0.5]), 0.6) is None
    assert spread([]) is None


def test_seconds_to_the_target(tmp_path: Path) -> None:
    """Counted over all rounds, evaluated or not."""
    folder = write_study(tmp_path, {"A": [[0.1, 0.2, 0.3]], "B": [[0.1, 0.4, 0.5]]}, reference="A")
    file = folder / "run-1" / "seed-0" / "rounds.jsonl"
    lines = [json.loads(line) | {"seconds": {"train": 1.0, "evaluate": 0.25}} for line in file.read_text().splitlines()]
    lines[0]["test_accuracy"] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = row(compare(read_study(folder)), "B").raw
    assert (found.rounds, found.seconds) == (2.0, 2.5)


def test_a_run_alone_needs_no_note_on_a_target(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {"A": [[0.1, 0.2]]}, reference="A", statuses={("A", 0): None})
    assert compare(read_study(folder)).notes == (
        "A: seed 0 excluded from the averages (not finished, or never evaluated).",
    )


# Other measures -------------------------------------------------------------------------------------------------------


def test_where_lower_is_better(tmp_path: Path) -> None:
    """The same curves as above, upside down: every result is that of the others, with the opposite sign."""
    curves = {"Avg": [[0.9, 0.4, 0.6, 0.5], [0.8, 0.7, 0.6, 0.4]], "Fast": [[0.5, 0.4, 0.3, 0.2], [0.6, 0.5, 0.4, 0.3]]}
    curves["Slow"] = [[0.9, 0.8, 0.7, 0.5], [0.9, 0.8, 0.7, 0.6]]
    study = read_study(write_study(tmp_path, curves, reference="Avg", metrics=[RMSE]))
    comparison = compare(study)
    fast, slow, average = (row(comparison, label) for label in ("Fast", "Slow", "Avg"))
    assert comparison.measure.key == "test_rmse"
    assert comparison.best == "Fast"
    assert average.best is not None
    assert average.best.mean == pytest.approx(0.4)  # the lowest of each seed
    assert (fast.raw.reached, fast.raw.rounds) == (2, 2.0)  # rounds 1 and 3
    assert (slow.raw.reached, slow.raw.seeds, slow.raw.rounds) == (1, 2, 4.0)
    assert average.raw.rounds == pytest.approx(3.0)  # rounds 2 and 4
    assert fast.against_reference is not None
    assert fast.against_reference.mean == pytest.approx(-0.2)
    assert conclude(study, comparison).text == (
        "Against Avg, Fast ends at −0.200 (better) and Slow ends at +0.100 (worse), but 2 seeds are too few for a "
        "verdict."
    )


def test_verdicts_say_which_direction_is_better(tmp_path: Path) -> None:
    curves = {"Avg": [[0.50], [0.51], [0.52]], "Low": [[0.30], [0.32], [0.31]], "High": [[0.71], [0.70], [0.73]]}
    study = read_study(write_study(tmp_path, curves, reference="Avg", metrics=[RMSE]))
    answer = conclude(study, compare(study))
    differences = np.array([0.30 - 0.50, 0.32 - 0.51, 0.31 - 0.52])
    interval = stats.t.interval(0.95, 2, loc=differences.mean(), scale=stats.sem(differences))
    half = (interval[1] - interval[0]) / 2
    assert f"Low is 0.200 ± {half:.3f} lower (better) than Avg" in answer.text
    assert " higher (worse) than Avg" in answer.text
    assert answer.method.endswith("; lower is better.")


def test_any_recorded_measure(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {"A": [[0.5, 0.4]], "B": [[0.6, 0.7]]}, reference="A")
    study = read_study(folder)
    comparison = compare(study, study.measure("test_loss"))  # 1 - accuracy
    assert comparison.best == "B"
    assert [one.final.mean for one in comparison.rows if one.final] == pytest.approx([0.6, 0.3])
    assert [one.raw.rounds for one in comparison.rows] == [1.0, 1.0]


def test_runs_that_lack_the_measure_are_named(tmp_path: Path) -> None:
    """Also where a metric of the same name has another direction."""
    upwards = RMSE | {"higher_is_better": True}
    metrics = {"A": [RMSE], "C": [upwards]}
    curves = {"A": [[0.5], [0.4]], "B": [[0.6], [0.7]], "C": [[0.1], [0.1]]}
    study = read_study(write_study(tmp_path, curves, reference="A", metrics=metrics))
    comparison = compare(study)
    assert [(one.finished, one.lacking, one.unfinished) for one in comparison.rows] == [(2, 0, 0), (2, 2, 0), (2, 2, 0)]
    assert comparison.notes == ("B; C: seeds 0, 1 excluded from the averages (no test RMSE was recorded).",)
    assert "4 runs of B and C have no test RMSE and are excluded from the averages." in conclude(study, comparison).text
    by_accuracy = compare(study, ACCURACY)
    assert by_accuracy.best == "B"
    assert "The reference A has no finished run with a test accuracy, so there is no target." in by_accuracy.notes


def test_the_primary_metric_is_one_that_all_runs_have(tmp_path: Path) -> None:
    mae = RMSE | {"name": "mae"}
    metrics = {"A": [RMSE, mae], "B": [mae]}
    study = read_study(write_study(tmp_path, {"A": [[0.5]], "B": [[0.6]]}, reference="A", metrics=metrics))
    assert study.primary.key == "test_mae"


def test_small_numbers_are_not_taken_for_rounding(tmp_path: Path) -> None:
    """The same comparison in other units: deviations of 1e-12 are real where values are 1e-10."""
    curves = {"A": [[5.0], [5.1], [5.2]], "B": [[3.0], [3.2], [3.1]]}
    small = {label: [[1e-10 * value for value in curve] for curve in seeds] for label, seeds in curves.items()}
    verdicts = set()
    for name, these in (("one", curves), ("other", small)):
        study = read_study(write_study(tmp_path / name, these, reference="A", metrics=[RMSE]))
        difference = row(compare(study), "B").against_reference
        assert difference is not None
        verdicts.add((difference.verdict, difference.half_width is None))
    assert verdicts == {("lower", False)}
