"""The paper's Tables 1 to 4 with our results beside the printed values, and the tables of our own studies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedgg.analysis.compare import WINDOW, Comparison, ComparisonRow, Reach, Spread, compare, paired_difference, spread
from fedgg.analysis.run_environment import conditions, shown_megabytes
from fedgg.analysis.verdict import shown_spread
from fedgg.lab.name_resolution import extra_work
from fedgg.paper.find_or_run import Results
from fedgg.paper.items import BETA_01, BETA_05, READINGS, REFERENCE, ROUNDS, Item, shown_dataset
from fedgg.paper.plan import PlannedMethod, ReproductionPlan
from fedgg.report.tables import NONE, VERDICTS, Table, shown_difference
from fedgg.runfolder.measure import ACCURACY
from fedgg.runfolder.record_types import RunRecord, StudyRecord

Accuracy = Literal["highest", "final"]
MISSING = "missing"
PAIRED = f"paired by seed, ± half the width of the 95 % confidence interval. Verdict: {VERDICTS}"
STUDY_COLUMNS = ("method", "highest %", "over FedAvg", "final %", "worst final %", "rounds", "rounds*", "diverged")
COST_COLUMNS = ("setting", "MB a round", "arithmetic")
ABOUT_COSTS = (
    "MB a round: sent and received by all clients together, in 10^6 bytes. Arithmetic: forward and backward passes of "
    "local training, relative to FedAvg's."
)

# Highest test accuracy in per cent over 100 rounds: mean and spread over three repetitions, by split and data set.
PRINTED_ACCURACY: dict[str, dict[str, dict[str, tuple[float, float]]]] = {
    BETA_05: {  # Table 1
        "svhn": {"FedAvg": (79.6, 0.3), "FedProx": (79.7, 0.4), "SCAFFOLD": (78.2, 0.3), "FedGG": (80.0, 0.2)},
        "cifar10": {"FedAvg": (69.2, 0.4), "FedProx": (69.0, 0.4), "SCAFFOLD": (70.1, 0.3), "FedGG": (71.1, 0.2)},
        "cifar100": {"FedAvg": (60.1, 0.2), "FedProx": (59.8, 0.2), "SCAFFOLD": (61.0, 0.1), "FedGG": (61.6, 0.1)},
    },
    BETA_01: {  # Table 2
        "svhn": {"FedAvg": (70.3, 0.2), "FedProx": (70.1, 0.3), "SCAFFOLD": (64.4, 0.2), "FedGG": (70.8, 0.3)},
        "cifar10": {"FedAvg": (61.6, 0.3), "FedProx": (60.5, 0.2), "SCAFFOLD": (61.2, 0.3), "FedGG": (63.8, 0.1)},
        "cifar100": {"FedAvg": (52.0, 0.3), "FedProx": (50.0, 0.2), "SCAFFOLD": (53.3, 0.2), "FedGG": (55.2, 0.2)},
    },
}

# Rounds to FedAvg's accuracy at round 100, and the speed-up printed beside them; None: a dash, "<1x" beside it.
PRINTED_ROUNDS: dict[str, dict[str, dict[str, tuple[int, float] | None]]] = {
    BETA_05: {  # Table 3
        "svhn": {"FedAvg": (100, 1.0), "FedProx": (88, 1.13), "SCAFFOLD": None, "FedGG": (65, 1.53)},
        "cifar10": {"FedAvg": (100, 1.0), "FedProx": (80, 1.25), "SCAFFOLD": (59, 1.69), "FedGG": (47, 2.12)},
        "cifar100": {"FedAvg": (100, 1.0), "FedProx": None, "SCAFFOLD": (89, 1.12), "FedGG": (70, 1.42)},
    },
    BETA_01: {  # Table 4
        "svhn": {"FedAvg": (100, 1.0), "FedProx": (95, 1.05), "SCAFFOLD": None, "FedGG": (75, 1.33)},
        "cifar10": {"FedAvg": (100, 1.0), "FedProx": (90, 1.11), "SCAFFOLD": (100, 1.0), "FedGG": (38, 2.63)},
        "cifar100": {"FedAvg": (100, 1.0), "FedProx": None, "SCAFFOLD": (81, 1.23), "FedGG": (57, 1.75)},
    },
}


def _of_niid_bench(fedavg: str, scaffold: str, fedprox: str, fednova: str) -> dict[str, str]:
    of_fedprox = {f"FedProx, mu {mu}": fedprox for mu in (0.001, 0.01, 0.1, 1.0)}
    return {"FedAvg": fedavg, "SCAFFOLD": scaffold, **of_fedprox, "FedNova": fednova}


@dataclass(frozen=True)
class Published:
    """Test accuracies in per cent that others print for a protocol, by split and label: a column of a table."""

    column: str
    source: str
    values: dict[str, dict[str, str]]


_FEDWMSAM = (
    "Printed, 500 rounds: Table 1 of FedWMSAM (arXiv 2511.22080), for FedLESAM the best of its variants; in per cent."
)
_FL_SIMULATOR = "Printed, 1000 rounds: the README of FL-Simulator; in per cent, one run each as far as it says."
PUBLISHED: dict[str, tuple[Published, ...]] = {
    "literature-cifar10": (
        Published(
            "printed, 500 rounds",
            _FEDWMSAM,
            {
                "beta 0.6": {
                    **{"FedAvg": "78.86", "FedCM": "81.26", "SCAFFOLD": "82.32", "FedSAM": "79.63"},
                    **{"MoFedSAM": "83.39", "FedLESAM": "81.65", "FedWMSAM": "83.56"},
                },
                BETA_01: {
                    **{"FedAvg": "70.05", "FedCM": "72.29", "SCAFFOLD": "74.28", "FedSAM": "69.63"},
                    **{"MoFedSAM": "73.86", "FedLESAM": "72.84", "FedWMSAM": "76.64"},
                },
            },
        ),
        Published(
            "printed, 1000 rounds",
            _FL_SIMULATOR,
            {
                "beta 0.6": {
                    **{"FedAvg": "80.65", "FedProx": "81.05", "FedAdam": "82.56", "SCAFFOLD": "83.53"},
                    **{"FedDyn": "84.22", "FedCM": "83.81", "MoFedSAM": "85.74", "FedSpeed": "86.33"},
                },
                BETA_01: {
                    **{"FedAvg": "77.31", "FedProx": "76.86", "FedAdam": "77.58", "SCAFFOLD": "79.92"},
                    **{"FedDyn": "78.96", "FedCM": "78.92", "MoFedSAM": "81.58", "FedSpeed": "82.26"},
                },
            },
        ),
    ),
    "literature-cifar100": (
        Published(
            "printed, 500 rounds",
            _FEDWMSAM,
            {
                "beta 0.6": {
                    **{"FedAvg": "39.17", "FedCM": "46.35", "SCAFFOLD": "48.55", "FedSAM": "40.83"},
                    **{"MoFedSAM": "48.59", "FedLESAM": "42.60", "FedWMSAM": "49.08"},
                },
                BETA_01: {
                    **{"FedAvg": "38.15", "FedCM": "42.90", "SCAFFOLD": "44.37", "FedSAM": "37.90"},
                    **{"MoFedSAM": "44.72", "FedLESAM": "41.14", "FedWMSAM": "46.46"},
                },
            },
        ),
    ),
    "niid-bench": (
        Published(
            "printed",
            "Printed: the README of Flower's baseline niid_bench, the highest accuracy of all rounds; it does not say "
            "what its ± is. FedProx there is tuned over four values of mu.",
            {
                "iid": _of_niid_bench("71.32 ± 0.33", "71.66 ± 1.13", "71.26 ± 1.18", "70.69 ± 1.14"),
                BETA_05: _of_niid_bench("62.47 ± 0.43", "68.08 ± 0.96", "65.63 ± 0.08", "63.89 ± 1.40"),
                "1 label": _of_niid_bench("10.00 ± 0.00", "10.00 ± 0.00", "12.71 ± 0.96", "10.00 ± 0.00"),
                "2 labels": _of_niid_bench("51.17 ± 1.09", "49.42 ± 2.18", "50.44 ± 0.79", "46.9 ± 0.66"),
                "3 labels": _of_niid_bench("59.11 ± 0.87", "61.00 ± 0.91", "59.20 ± 1.18", "57.83 ± 0.42"),
            },
        ),
    ),
}
CPU_LITERATURE = (
    "This protocol is ours: a small network, one epoch a round and fewer rounds than papers have, so that it runs on a "
    "CPU. No paper prints values for it. Settings were chosen on held-out examples of another seed."
)


def paper_table(plan: ReproductionPlan, item: Item, results: Results, accuracy: Accuracy = "highest") -> Table:
    """One of Tables 1 to 4."""
    methods = plan.methods_of(item)
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    records: list[RunRecord] = []
    for dataset in plan.datasets_of(item):
        of_dataset = [method for method in methods if method.dataset == dataset]
        study = as_study(plan, of_dataset, results)
        comparison = compare(study, ACCURACY)
        for method, row in zip(of_dataset, comparison.rows, strict=True):
            cells = _accuracies(method, row, study, accuracy) if item.kind == "accuracy" else _rounds(method, row)
            rows.append((shown_dataset(dataset), method.label, *cells))
        notes += [f"{shown_dataset(dataset)}: {note}" for note in notes_of(comparison, study)]
        records += study.records
    rule = _accuracy_rule(accuracy) if item.kind == "accuracy" else rounds_rule()
    about = (*rule, *about_runs(plan, item), *conditions(records), *notes)
    return Table(titled(plan, item), _columns(item, accuracy), tuple(rows), about)


def titled(plan: ReproductionPlan, item: Item) -> str:
    """The item's title, with a remark if the runs differ from the paper's in rounds or data."""
    if plan.quick:
        return f"{item.title}; quick version"
    if plan.lengths(item) == (ROUNDS,):
        return item.title
    if item.ours or max(plan.lengths(item)) > ROUNDS:
        return f"{item.title}; {plan.rounds(item)} rounds" + ("" if item.ours else f", the paper has {ROUNDS}")
    return f"{item.title}; {plan.rounds(item)} of the paper's {ROUNDS} rounds"


def about_runs(plan: ReproductionPlan, item: Item) -> tuple[str, ...]:
    """Notes on the runs: quick version, rounds, readings of FedGG, seeds."""
    notes = []
    if plan.quick:
        notes.append(
            f"The quick version: a small MLP on the embedded digits for {plan.rounds(item)} rounds. It shows that "
            "everything works; the paper's values are for other data and networks, so they are omitted."
        )
    elif plan.lengths(item) != (ROUNDS,) and not item.ours:
        notes.append(
            f"Rounds: {plan.rounds(item)}. The paper's values are for {ROUNDS} rounds, so not directly comparable."
        )
    if not item.study:
        notes += [f"FedGG, {name}: {READINGS[name].description}." for name in plan.readings]
    return (*notes, f"Seed{'s' if len(plan.seeds) > 1 else ''} {', '.join(map(str, plan.seeds))}.")


def as_study(plan: ReproductionPlan, methods: list[PlannedMethod], results: Results) -> StudyRecord:
    """The runs of one data set and split as a comparison; runs that do not exist are missing in it."""
    runs: dict[str, dict[int, RunRecord]] = {method.label: {} for method in methods}
    for method in methods:
        for seed in plan.seeds:
            record = results.record(method, seed)
            if record is not None:
                runs[method.label][seed] = record
    return StudyRecord(Path(), tuple(runs), plan.seeds, REFERENCE, runs)


def _columns(item: Item, accuracy: Accuracy) -> tuple[str, ...]:
    if item.kind == "accuracy":
        ours = f"{accuracy} here %"
        return ("data set", "method", "paper %", ours, "difference", "over FedAvg, paper", "over FedAvg, here")
    counted = ("paper rounds", "rounds", "rounds*", "paper speed-up", "speed-up", "speed-up*")
    return ("data set", "method", *counted, "MB up", "MB down")


def _accuracies(method: PlannedMethod, row: ComparisonRow, study: StudyRecord, accuracy: Accuracy) -> tuple[str, ...]:
    printed = PRINTED_ACCURACY[method.split].get(method.dataset, {})
    ours = row.best if accuracy == "highest" else row.final
    cells = ["", "", "", "", ""]
    cells[0] = "{:.1f} ± {:.1f}".format(*printed[method.name]) if printed else NONE
    cells[1] = _percent(ours, row, len(study.seeds))
    cells[2] = f"{100 * ours.mean - printed[method.name][0]:+.1f}" if printed and ours else NONE
    is_reference = method.label == REFERENCE
    over = printed[method.name][0] - printed[REFERENCE][0] if printed else 0.0
    cells[3] = "reference" if is_reference else f"{over:+.1f}" if printed else NONE
    cells[4] = "reference" if is_reference else over_reference(method, study, accuracy)
    return tuple(cells)


def over_reference(method: PlannedMethod, study: StudyRecord, accuracy: Accuracy) -> str:
    mine, theirs = (_values(study.runs.get(label, {}), accuracy) for label in (method.label, REFERENCE))
    if not mine.keys() & theirs.keys():
        return NONE
    return shown_difference(paired_difference(method.label, REFERENCE, mine, theirs))


def _values(runs: dict[int, RunRecord], accuracy: Accuracy) -> dict[int, float]:
    curves = {seed: run.accuracy()[1] for seed, run in runs.items() if run.status == "finished"}
    return {
        seed: float(curve.max() if accuracy == "highest" else curve[-1]) for seed, curve in curves.items() if len(curve)
    }


def _rounds(method: PlannedMethod, row: ComparisonRow) -> tuple[str, ...]:
    printed = PRINTED_ROUNDS[method.split].get(method.dataset)
    if printed is None:
        paper = (NONE, NONE)
    else:
        there = printed[method.name]
        paper = ("never", "<1×") if there is None else (str(there[0]), f"{there[1]:g}×")
    raw, smooth = row.raw, row.smoothed
    if not row.finished and not row.diverged:
        return (paper[0], MISSING, MISSING, paper[1], NONE, NONE, NONE, NONE)
    sent, received = NONE, NONE
    if raw.megabytes is not None and raw.megabytes_up is not None:
        sent, received = (shown_megabytes(m) for m in (raw.megabytes_up, raw.megabytes - raw.megabytes_up))
    return (paper[0], reached(raw), reached(smooth), paper[1], _speed(raw), _speed(smooth), sent, received)


def reached(reach: Reach) -> str:
    if reach.rounds is None:
        return "never" if reach.seeds else NONE
    some = "" if reach.reached == reach.seeds else f" ({reach.reached} of {reach.seeds})"
    return f"{reach.rounds:.1f}".removesuffix(".0") + some


def _speed(reach: Reach) -> str:
    """Only if every seed reaches the target: a mean over some seeds does not include the others."""
    if reach.speed_up is None:
        return "<1×" if reach.seeds else NONE
    return f"{reach.speed_up:.2f}×" if reach.reached == reach.seeds else NONE


def _percent(ours: Spread | None, row: ComparisonRow, seeds: int) -> str:
    if ours is None:
        return "diverged" if row.diverged else MISSING
    text = shown_spread(ours)
    return text if ours.n == seeds else f"{text} ({ours.n} of {seeds})"


def notes_of(comparison: Comparison, study: StudyRecord) -> list[str]:
    """The comparison's notes, or a note that nothing has been run."""
    return list(comparison.notes) if any(study.runs.values()) else ["Nothing has been run yet."]


def _accuracy_rule(accuracy: Accuracy) -> tuple[str, ...]:
    which = "the highest over all rounds, as in the paper" if accuracy == "highest" else "that after the last round"
    return (
        f"Test accuracy on the whole test set: {which}; ± is the sample standard deviation over seeds.",
        f"Over FedAvg, here: {PAIRED}",
    )


ROUNDS_RULE = (
    "Rounds until FedAvg's final test accuracy with the same seed is first reached; mean over the seeds that reach it; "
    "(1 of 3) means that one of three seeds does{}. FedAvg itself may reach its final accuracy before its last round{}."
)
SMOOTHED_RULE = f"* the same with accuracies, and the target, averaged over the last {WINDOW} rounds."


def rounds_rule() -> tuple[str, ...]:
    """Of tables with speed-ups."""
    return (
        ROUNDS_RULE.format(
            ", and then no speed-up is given", ", so its own speed-up can exceed 1× (the paper prints its last round)"
        ),
        f"{SMOOTHED_RULE} MB: sent (up) and received (down) by all clients together until the round without averaging.",
    )


def spread_of(records: list[RunRecord], accuracy: Accuracy) -> Spread | None:
    """Mean and standard deviation over the finished runs."""
    return spread(list(_values(dict(enumerate(records)), accuracy).values()))


def study_table(plan: ReproductionPlan, item: Item, results: Results) -> Table:
    """Accuracies, differences from FedAvg, and rounds to its final accuracy; one block of rows for each split."""
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    records: list[RunRecord] = []
    methods = plan.methods_of(item)
    published = () if plan.quick else PUBLISHED.get(item.name, ())
    for split in item.splits:
        of_split = [method for method in methods if method.split == split]
        study = as_study(plan, of_split, results)
        comparison, left_out = compare(study, ACCURACY), list[str]()
        for method, row in zip(of_split, comparison.rows, strict=True):
            is_excluded = bool(plan.methods) and method.name.lower() not in map(str.lower, plan.methods)
            is_printed = any(method.label in each.values.get(split, {}) for each in published)
            if not study.runs[method.label] and (is_excluded or not is_printed) and method.label != REFERENCE:
                left_out.append(method.label)
                continue  # the notes name the methods that were not run
            over = "reference" if method.label == REFERENCE else over_reference(method, study, "highest")
            accuracies = (_shown(row.best, row), over, _shown(row.final, row), _worst(study.runs[method.label]))
            costs = _costs(method, of_split, study.runs[method.label]) if item.costs else ()
            printed = (each.values.get(split, {}).get(method.label, NONE) for each in published)
            rows.append((item.split_cell(split), method.label, *accuracies, *_ends(row), *costs, *printed))
        notes += [f"{split}: {note}" for note in notes_of(comparison, study)]
        if left_out and not any(study.runs.values()):
            notes[-1] += f" Not shown, since no values are printed: {'; '.join(left_out)}."
        records += study.records
    where = ", ".join(map(shown_dataset, plan.datasets_of(item)))
    about = (
        "Highest and final test accuracy, ± the sample standard deviation over seeds; means are over the seeds that "
        f"did not diverge. Over FedAvg: highest accuracy, {PAIRED}",
        ROUNDS_RULE.format("", ""),
        SMOOTHED_RULE,
        *([ABOUT_COSTS] if item.costs else []),
        *(each.source for each in published),
        *([CPU_LITERATURE] if item.name.startswith("literature-cpu") and not plan.quick else []),
        *about_runs(plan, item),
    )
    columns = (item.split_column, *STUDY_COLUMNS, *(COST_COLUMNS if item.costs else ()))
    columns = (*columns, *(each.column for each in published))
    return Table(f"{titled(plan, item)}; {where}", columns, tuple(rows), (*about, *conditions(records), *notes))


def _costs(method: PlannedMethod, others: list[PlannedMethod], runs: dict[int, RunRecord]) -> tuple[str, str, str]:
    of_local_steps = _differing_settings(method, others)
    chosen = {**method.base.algorithm.settings, **of_local_steps}
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in chosen.items()}
    settings = ", ".join(f"{key} {value}" for key, value in shown.items()) or "none"
    bytes_a_round = [float(run.megabytes()[-1]) / len(run.rounds) for run in runs.values() if len(run.megabytes())]
    traffic = shown_megabytes(sum(bytes_a_round) / len(bytes_a_round)) if bytes_a_round else NONE
    return settings, traffic, f"{extra_work(method.base):.2f}"


def _differing_settings(method: PlannedMethod, methods: list[PlannedMethod]) -> dict[str, Any]:
    """The settings of local steps that are not the reference's; of the reference, those that no other method has."""
    ours = _settings_of_steps(method)
    others = [_settings_of_steps(each) for each in methods if each.label != method.label]
    if method.label != REFERENCE:
        others = [_settings_of_steps(each) for each in methods if each.label == REFERENCE]
    return {key: value for key, value in ours.items() if others and all(value != other.get(key) for other in others)}


def _settings_of_steps(method: PlannedMethod) -> dict[str, Any]:
    local, optimiser = method.base.local, method.base.optimiser
    return {**local.model_dump(exclude_none=True), **optimiser.model_dump(exclude_none=True)}


def _shown(accuracy: Spread | None, row: ComparisonRow) -> str:
    if accuracy is None:
        return NONE if row.diverged else MISSING
    return shown_spread(accuracy)


def _worst(runs: dict[int, RunRecord]) -> str:
    """The lowest final accuracy of a seed: a run can fail without diverging."""
    finals = [run.accuracy()[1][-1] for run in runs.values() if run.status == "finished" and len(run.rounds)]
    return f"{100 * min(finals):.1f}" if finals else NONE


def _ends(row: ComparisonRow) -> tuple[str, str, str]:
    ended = row.finished + row.diverged
    diverged = f"{row.diverged} of {ended}" if row.diverged else "0" if ended else NONE
    return reached(row.raw), reached(row.smoothed), diverged
