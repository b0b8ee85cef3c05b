"""What the page is given: complete enough to do it again, small enough for a browser."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from written_folders import write_run, write_study

import fedgg
from fedgg.analysis import chart_data, compare
from fedgg.analysis.chart_data import CLIENTS, HISTORY_ROUNDS, SPLIT_ROWS, client_columns, run_columns, split_data
from fedgg.analysis.collect import Group, RunCollection
from fedgg.lab.config import Experiment
from fedgg.lab.study import Study, load_study
from fedgg.older_python import tomllib
from fedgg.report.page import as_json, report_html, write_page
from fedgg.report.page_data import about, command_again, page_group, place, runs_data, title
from fedgg.runfolder.archive_file import read_archive, write_archive
from fedgg.runfolder.read import read_run
from fedgg.runfolder.record_types import RunRecord, StudyRecord


def record(rounds: list[dict[str, Any]], **more: Any) -> RunRecord:
    return RunRecord(Path("run"), {"seed": 0}, rounds, None, {"status": "finished"}, **more)


def study_of(study: Study) -> StudyRecord:
    """As if every run of it had been started."""
    runs = {
        label: {
            seed: RunRecord(Path(label), tomllib.loads(study.experiment(label, seed).to_toml()), [], None, None)
            for seed in study.seeds
        }
        for label in study.variants
    }
    return StudyRecord(Path(), tuple(runs), study.seeds, study.reference, runs)


def test_the_command_makes_the_same_runs(tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "FedAvg": {"algorithm.name": "fedavg"},
        'odd "name" \\ END\nEND': {"algorithm.name": "fedgg", "algorithm.mu": 0.1, "local.lr": 0.5},
        "SCAFFOLD": {"algorithm.name": "scaffold", "server.cohort": 3},
        "neutral": {"algorithm.name": "fedexp", "algorithm.epsilon": float("inf")},
    }
    asked = Study(Experiment(rounds=7, split={"beta": 0.25}), variants, (3, 1), "SCAFFOLD")
    command = command_again(study_of(asked))
    assert command is not None
    first, *document, last, call = command.split("\n")
    assert (first, last, call) == ("cat > again.toml <<'END'", "END", "fedgg compare again.toml")
    assert "END" not in document
    file = tmp_path / "again.toml"
    file.write_text("\n".join(document))
    again = load_study(file)
    assert (again.seeds, again.reference, list(again.variants)) == (asked.seeds, asked.reference, list(variants))
    assert again.hash() == asked.hash()


def test_an_infinite_value_is_shown_on_its_axis_and_among_the_settings() -> None:
    rows = {"usual": {"algorithm.epsilon": 0.001}, "neutral": {"algorithm.epsilon": float("inf")}}
    study = study_of(Study(Experiment(algorithm={"name": "fedexp"}), rows, (0,), "usual"))
    shown = json.loads(as_json(page_group(Group(study)).data))
    assert shown["axes"]["values"] == {"algorithm.epsilon": [0.001, "inf"]}
    assert tomllib.loads(shown["settings"]["by_row"]["neutral"]) == {"algorithm": {"epsilon": float("inf")}}


def test_one_row_again(tmp_path: Path) -> None:
    asked = Study(Experiment(), {"only": {"algorithm.name": "fedprox"}}, (0,), "only")
    command = command_again(study_of(asked))
    assert command is not None
    (tmp_path / "again.toml").write_text("\n".join(command.split("\n")[1:-2]))
    assert load_study(tmp_path / "again.toml").hash() == asked.hash()


def test_the_command_says_that_it_runs_code_and_no_name_ends_that_comment() -> None:
    names = {"model": {"name": "net.py:Net\nrm -rf .\r"}, "algorithm": {"name": "package:Own"}, "seed": 0}
    runs = {"a": {0: RunRecord(Path(), names, [], None, None)}}
    command = command_again(StudyRecord(Path(), ("a",), (0,), "a", runs))
    assert command is not None
    first, second, *_ = command.split("\n")
    assert first.startswith("# It runs code from outside fedgg: 'net.py:Net\\nrm -rf .\\r', 'package:Own'. Read it")
    assert second == "cat > again.toml <<'END'"
    assert "--trust" not in command.split("\n")[-1]  # that is the reader's to add


def test_what_came_from_python_has_no_command() -> None:
    config = {"model": {"name": "python:Net"}, "seed": 0}
    runs = {"a": {0: RunRecord(Path(), config, [], None, None)}}
    assert command_again(StudyRecord(Path(), ("a",), (0,), "a", runs)) is None


def test_clients_are_no_more_than_a_screen_shows() -> None:
    lines = [
        {
            "round": number,
            "clients": [{"client": c, "examples": c, "loss": float(c)} for c in range(number % 2, 2000, 2)],
            "holdout_accuracy_by_client": {str(c): c / 2000 for c in range(2000)},
        }
        for number in (1, 2)
    ]
    told = client_columns(record(lines))
    assert told is not None
    assert told["of"] == 2000
    assert len(told["client"]) == len(told["loss"]) == len(told["scores"]["holdout_accuracy"]) == CLIENTS
    assert told["client"][0] == 0  # the worst is always among them
    assert told["history"] is None
    # Of so many, the distribution over all of them: lowest, 10 %, 25 %, median, 75 %, 90 %, highest.
    assert told["quantiles"]["evaluated"] == {"holdout_accuracy": [1, 2]}
    quantiles = [0.0, 0.09995, 0.249875, 0.49975, 0.749625, 0.89955, 0.9995]
    assert told["quantiles"]["scores"]["holdout_accuracy"][1] == quantiles
    assert told["quantiles"]["loss"][0][0] == 1.0  # of the clients that took part: the odd ones
    assert told["evaluated"] == {"holdout_accuracy": 2}
    split = split_data({"counts": [[c, 1] for c in range(2000)], "classes": ["a", "b"], "hash": "h"})
    assert split is not None
    assert len(split["counts"]) == SPLIT_ROWS
    assert split["of"] == 2000


def test_a_clients_way_is_thinned() -> None:
    lines = [
        {"round": n, "clients": [{"client": 1, "loss": 1 / n}], "holdout_accuracy_by_client": {"1": 0.5}}
        for n in range(1, 201)
    ]
    told = client_columns(record(lines))
    assert told is not None
    assert len(told["history"]["round"]) == len(told["history"]["loss"][0]) == HISTORY_ROUNDS
    assert (told["history"]["round"][0], told["history"]["round"][-1]) == (1, 200)
    assert told["rounds"] == [200]


@dataclass(frozen=True)
class Explained(fedgg.Algorithm):
    """Differs from FedAvg: it records the number of local steps."""

    diagnostic_texts = {"length": "How many local steps there were."}  # noqa: RUF012

    def diagnostics(self, w: Tensor, client: fedgg.Client) -> fedgg.Rows:
        return super().diagnostics(w, client) | {"length": client.steps + 0.0}


def test_an_algorithm_explains_its_diagnostics(tmp_path: Path) -> None:
    """Recorded with the run, they survive an archive and are not shown among the versions."""
    small: dict[str, Any] = {"rounds": 1, "split": {"clients": 2}, "local": {"epochs": 1}}
    fedgg.run(fedgg.Experiment(**small), algorithm=Explained(), out=tmp_path / "run")
    fedgg.run(fedgg.Experiment(**small, algorithm={"name": "fedavg"}), out=tmp_path / "plain")
    assert "diagnostics" not in json.loads((tmp_path / "plain" / "versions.json").read_text())
    archived = tmp_path / "archive.json"
    write_archive([read_run(tmp_path / "run")], archived)
    for run in (read_run(tmp_path / "run"), read_archive(archived)[0]):
        study = StudyRecord(Path(), ("a", "b"), (0,), "a", {"a": {0: run}, "b": {0: read_run(tmp_path / "plain")}})
        data = page_group(Group(study)).data
        assert data["diagnostic_texts"] == {"a": {"length": "How many local steps there were."}}
        assert "How many" not in json.dumps(data["versions"])


@pytest.mark.parametrize("texts", [None, [], "x", {"length": 1}, {"length": ["x"]}])
def test_odd_explanations_are_ignored(texts: Any) -> None:
    runs = {"a": {0: record([], versions={"diagnostics": texts})}}
    data = page_group(Group(StudyRecord(Path(), ("a",), (0,), "a", runs))).data
    assert data["diagnostic_texts"] == {}


def test_runs_without_much() -> None:
    told = run_columns(record([]))
    assert told["round"] == []
    assert told["clients"] is None
    json.loads(as_json(told))


def test_lost_clients_and_resumes_are_told() -> None:
    lines = [{"round": 1, "lost": [{"client": 4, "why": "not finite"}] * 300}]
    told = run_columns(record(lines, resumes=({"after_round": 0},)))
    assert told["dropped"][0] == {"round": 1, "client": 4, "why": "not finite"}
    assert (len(told["dropped"]), told["dropped_count"]) == (200, 300)
    assert told["resumes"] == [{"after_round": 0}]


def test_clients_are_called_by_their_names() -> None:
    names = ["charite", "mayo", "a hospital of a very long name, north", "a hospital of a very long name, south"]
    counts = [[9, 1], [2, 2], [3, 3], [1, 4]]
    lines = [{"round": 1, "clients": [{"client": c, "loss": 1.0, "examples": 4} for c in range(4)]}]
    lines[0] |= {"lost": [{"client": 1, "name": "mayo", "why": "gone"}]}
    one = replace(record(lines), partition={"counts": counts, "names": names})
    told = run_columns(one)
    shown = told["clients"]["client"]
    assert shown[:2] == ["charite", "mayo"]
    assert len({*shown}) == 4
    assert max(map(len, shown)) < 30
    assert told["dropped"][0]["client"] == "mayo"
    split = split_data({"counts": counts, "names": names})
    assert split is not None
    assert split["clients"] == shown
    without = split_data({"counts": counts, "names": names[:3]})  # names that do not fit name nobody
    assert without is not None
    assert without["clients"] == [0, 1, 2, 3]


def test_what_happened_in_a_federation_is_told() -> None:
    lines: list[dict[str, Any]] = [{"round": 1, "notes": [{"client": 2, "what": "its memory is gone"}]}, {"round": 2}]
    ended = {"after_round": 1, "who": "client 2", "what": "its SuperNode ended with code -9", "when": "now"}
    told = run_columns(record(lines, processes=(ended,)))
    assert told["notes"] == [{"round": 1, "client": 2, "what": "its memory is gone"}]
    assert told["processes"] == [ended]


def test_titles() -> None:
    variants = {"A": {"algorithm.name": "fedavg"}, "B, c": {"algorithm.name": "fedgg"}}
    group = Group(study_of(Study(Experiment(), variants, (0, 1), "A")))
    assert title(group) == "A and “B, c” on digits"
    assert about(group.study).startswith("digits, 10 clients, dirichlet 0.5, mlp, 100 rounds, 5 local epochs")
    betas = {f"beta={beta}": {"split.beta": beta} for beta in (0.5, 0.1)}
    swept_betas = study_of(Study(Experiment(), betas, (0,), "beta=0.5"))
    assert about(swept_betas).startswith("digits, 10 clients, dirichlet 0.5 and 0.1, mlp, 100 rounds")
    assert place(swept_betas) == "digits, dirichlet 0.5 and 0.1"
    both = {f"a={x} b={y}": {"algorithm.momentum": x, "local.momentum": y} for x in (0.1, 0.2) for y in (0.3, 0.4)}
    momenta = study_of(Study(Experiment(algorithm={"name": "fedavgm"}), both, (0,), "a=0.1 b=0.3"))
    assert title(Group(momenta)) == "Sweep over algorithm.momentum and local.momentum on digits"
    swept = {f"mu={mu}": {"algorithm.mu": mu} for mu in (0.1, 1.0)}
    assert title(Group(study_of(Study(Experiment(), swept, (0,), "mu=0.1")))) == "Sweep over mu on digits"


def test_a_large_sweep_fits(tmp_path: Path) -> None:
    """48 runs of 100 rounds and 10 clients, all numbers told: under 8 MB with the charts' own code."""
    clients = [{"client": c, "examples": 100, "steps": 5, "loss": 0.123456, "cosine": 0.1} for c in range(10)]
    numbers = dict.fromkeys(("test_accuracy", "test_loss", "holdout_accuracy", "train_loss"), 0.12345678)
    readings = dict.fromkeys(("cosine", "weight", "drift", "step"), 0.123456789)
    rest = {"bytes_up": 123456, "bytes_down": 123456, "seconds": {"train": 0.123456, "aggregate": 0.01}, "lost": []}
    own = {"holdout_accuracy_by_client": {str(c): 0.123456789 for c in range(10)}, "clients": clients}
    labels = [f"mu={at}" for at in range(16)]
    runs = {label: {str(s): f"run-{at}/seed-{s}" for s in range(3)} for at, label in enumerate(labels)}
    for by_seed in runs.values():
        for where in by_seed.values():
            folder = write_run(tmp_path / where, [0.1])
            lines = [{"round": n, **numbers, "readings": readings, **rest, **own} for n in range(1, 101)]
            (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = {"format": 1, "labels": labels, "seeds": [0, 1, 2], "reference": labels[0], "runs": runs}
    (tmp_path / "study.json").write_text(json.dumps(plan))
    collection = RunCollection([tmp_path])
    collection.refresh()
    assert len(report_html(collection).encode()) < 8_000_000


def test_the_page_is_the_same_every_time(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", {"A": [[0.1], [0.2]], "B": [[0.3], [0.4]]}, reference="A")
    pages = []
    for _ in range(2):
        collection = RunCollection([folder])
        collection.refresh()
        pages.append(report_html(collection, {"paper.html": "The paper"}))
    assert pages[0] == pages[1]
    assert '<a href="paper.html">The paper</a>' in pages[0]
    (group,) = collection.groups
    assert (
        page_group(group).data["results"]["test_accuracy"]["rows"][1]["against_reference"]["verdict"] == "too few seeds"
    )
    assert {run["seed"] for run in runs_data(group)} == {0, 1}
    assert read_run(folder / "run-0" / "seed-0").status == "finished"


def test_splits_of_one_seed_are_told_apart_by_a_row() -> None:
    def run(label: str, seed: int, split: str) -> RunRecord:
        partition = {"scheme": "iid", "hash": split, "counts": [[1, 2]], "classes": ["a", "b"]}
        return RunRecord(Path(label), {"seed": seed}, [], partition, None)

    splits = {"A": ("one", "two"), "B": ("one", "two"), "C": ("other", "two")}
    runs = {label: {seed: run(label, seed, own[seed]) for seed in (0, 1)} for label, own in splits.items()}
    shown = page_group(Group(StudyRecord(Path(), tuple(runs), (0, 1), "A", runs))).data["splits"]
    assert {name: (split["seed"], split.get("label")) for name, split in shown.items()} == {
        "one": (0, "A"),
        "two": (1, None),
        "other": (0, "C"),
    }


def test_facts_of_several_parts_are_words() -> None:
    def told(code: dict[str, str | None]) -> dict[str, Any]:
        versions = {"format": 1, "torch": "2", "code": code}
        one = RunRecord(Path("x"), {"seed": 0}, [], None, None, versions)
        data = page_group(Group(StudyRecord(Path("s"), ("A",), (0,), "A", {"A": {0: one}}))).data
        (entry,) = data["versions"]
        return dict(entry["facts"])

    assert told({"algorithm": None, "model": None}) == {"torch": "2"}
    assert told({"algorithm": "abc", "model": None}) == {"torch": "2", "code hashes": "algorithm abc"}


def test_a_page_compares_once_by_each_measure_and_reads_each_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_study(tmp_path / "study", {"A": [[0.1], [0.2]], "B": [[0.3], [0.4]]}, reference="A")
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(compare, "caveats", counted("compare", compare.caveats))
    monkeypatch.setattr(chart_data, "client_columns", counted("columns", chart_data.client_columns))
    write_page([folder], tmp_path / "report.html")
    assert calls == {"compare": 3, "columns": 4}  # by accuracy, test loss and training loss


def test_a_global_model_has_a_curve_beside_personal_ones() -> None:
    of_global = {"round": 1, "test_accuracy": 0.5, "holdout_accuracy": 0.3, "holdout_accuracy_by_client": {"0": 0.3}}
    of_clients = {"round": 1, "personal_accuracy": 0.9, "personal_accuracy_by_client": {"0": 0.9}}
    runs = {"Avg": {0: record([of_global])}, "Per": {0: record([of_clients])}}
    group = Group(StudyRecord(Path(), ("Avg", "Per"), (0,), "Avg", runs))
    assert [run["client_accuracy"] for run in runs_data(group)] == [[0.3], [0.9]]
    assert page_group(group).data["measure"] == "client_accuracy"
