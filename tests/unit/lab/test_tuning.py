"""`fedgg tune`: scored on hold-out examples only, the same after an interruption, the same budget for all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fedgg
from fedgg.algorithms import ALGORITHMS
from fedgg.data.batch_preparation import Feed
from fedgg.lab.search_space import Choices, Range, Search, default_space, read_search, spaces
from fedgg.lab.study import Study, load_study

pytest.importorskip("optuna", reason="needs the extra `tune`")

SMALL: dict[str, Any] = {
    "rounds": 4,
    "split": {"clients": 3, "beta": 1.0},
    "model": {"name": "linear"},
    "local": {"epochs": 1, "batch": 64},
}


def small(**options: Any) -> Any:
    variants = options.pop("variants", ["fedavg", "fedprox"])
    return fedgg.tune(variants, SMALL, **{"trials": 7, **options})


class StopIn(fedgg.Observer):
    """Ctrl-C in a round of a trial."""

    def __init__(self, run: str, round_: int):
        self.run, self.round = run, round_

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        if run.startswith(self.run) and record["round"] == self.round:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [("tpe", "median"), ("tpe", "hyperband"), pytest.param("random", "none", marks=pytest.mark.slow)],
    ids=str,
)
def test_an_interrupted_search_ends_as_one_that_was_not(sampler: Any, pruner: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": sampler, "pruner": pruner, "trials": 9, "out": tmp_path / "stopped"}
    whole = small(**options | {"out": tmp_path / "whole"})
    for place in (("FedAvg, trial 2 ", 2), ("FedProx, trial 6 ", 1)):
        with pytest.raises(KeyboardInterrupt):
            small(**options, observer=StopIn(*place))
    with (tmp_path / "stopped" / "trials.jsonl").open("a") as file:
        file.write('{"algorithm": "FedProx", "num')  # a line torn by a kill
    lines = (tmp_path / "stopped" / "trials.jsonl").read_text().splitlines()[:-1]
    continued = small(**options)
    assert continued.trials == whole.trials
    assert str(continued) == str(whole)
    for name in ("trials.jsonl", "winners.toml"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "whole" / "trials.jsonl").read_text().splitlines()[: len(lines)] == lines
    states = [trial.state for trial in whole.trials]
    assert ("pruned" in states) == (pruner != "none")


def test_a_score_is_the_mean_of_the_last_evaluations() -> None:
    single = small(variants=["fedavg"], trials=3, pruner="none").trials
    averaged = small(variants=["fedavg"], trials=3, pruner="none", window=2)
    for one, two in zip(single, averaged.trials, strict=True):
        scores = one.scores
        assert two.scores == {round_: (scores[round_] + scores[max(1, round_ - 1)]) / 2 for round_ in scores}
    assert "mean of the last 2 evaluations" in str(averaged)
    assert averaged.search.hash() != replace(averaged.search, window=1).hash()


@pytest.mark.slow
def test_killed_in_the_middle_of_a_trial(tmp_path: Path) -> None:
    program = (
        "import fedgg, os, signal, sys, json\n"
        "class Kill(fedgg.Observer):\n"
        "    def on_round(self, run, record):\n"
        "        if run.startswith('FedProx, trial 3 ') and record['round'] == 3 and sys.argv[2] == 'kill':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        f"small = json.loads({json.dumps(json.dumps(SMALL))})\n"
        "fedgg.tune(['fedavg', 'fedprox'], small, trials=7, out=sys.argv[1], observer=Kill())\n"
    )
    ended = {}
    for word in ("kill", "continue"):
        command = [sys.executable, "-c", program, str(tmp_path / "killed"), word]
        ended[word] = subprocess.run(command, timeout=120, env=dict(os.environ)).returncode
    assert ended == {"kill": -signal.SIGKILL, "continue": 0}
    whole = small(out=tmp_path / "whole")
    killed = small(out=tmp_path / "killed")
    assert killed.trials == whole.trials


def test_scores_are_the_hold_out_accuracy_of_a_run_and_the_test_set_is_not_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unseen = Feed.unseen
    calls: list[int | None] = []

    def watched(feed: Feed, client: int | None, number: int) -> Any:
        calls.append(client)
        return unseen(feed, client, number)

    monkeypatch.setattr(Feed, "unseen", watched)
    result = small(variants=["fedprox"], trials=2, pruner="none", seeds=(3, 4))
    builds = calls.count(None)  # a sample to trace the model with, once for each seed of a trial
    assert builds == 2 * 2
    assert len(calls) - builds == 2 * 2 * 4 * 3
    for trial in result.trials:
        runs = [
            fedgg.run(
                fedgg.Experiment(**SMALL, seed=seed, algorithm={"name": "fedprox"}, data={"holdout": 0.2}).changed(
                    trial.settings
                )
            )
            for seed in (3, 4)
        ]
        for number, score in trial.scores.items():
            wanted = np.mean([run.rounds[number - 1]["holdout_accuracy"] for run in runs])
            assert score == pytest.approx(wanted, abs=1e-12)


def test_winners_on_seeds_that_no_trial_had(tmp_path: Path) -> None:
    result = small(out=tmp_path, seeds=(5,), trials=3)
    for label, best in result.best.items():
        own = [trial for trial in result.trials if trial.algorithm == label]
        assert [trial.number for trial in own] == [1, 2, 3]
        assert best.score == max(trial.score for trial in own if trial.score is not None)
    study = load_study(tmp_path / "winners.toml")
    assert study.seeds == (6, 7, 8)
    assert study.reference == "FedAvg"
    for label, best in result.best.items():
        assert study.experiment(label, 6) == result.study.experiment(label, 6)
        assert study.experiment(label, 6).local.lr == best.settings["local.lr"]
        assert study.base.data.holdout == 0
    more = small(out=tmp_path, seeds=(5,), trials=4)
    assert [trial for trial in more.trials if trial.number < 4] == result.trials
    with pytest.raises(fedgg.UserError, match="seed 5 is one of the trials' seeds"):
        small(seeds=(5,), fresh_seeds=(4, 5))


def test_another_search_and_damage_are_refused(tmp_path: Path) -> None:
    small(out=tmp_path, trials=1)
    with pytest.raises(fedgg.UserError, match="holds another search for 'FedAvg'"):
        small(out=tmp_path, trials=1, space={"local.lr": [0.1]})
    lines = tmp_path / "trials.jsonl"
    lines.write_text(lines.read_text().replace('"number": 1', '"number": 2', 1))
    with pytest.raises(fedgg.UserError, match="line 1 does not fit its checksum"):
        small(out=tmp_path, trials=1)


@pytest.mark.slow
def test_the_number_of_processes_does_not_change_the_trials(tmp_path: Path) -> None:
    here = small(variants=["fedprox"], trials=3)
    base = fedgg.Experiment(**SMALL, engine={"name": "workers"})
    assert fedgg.tune(["fedprox"], base, trials=3, processes=2).trials == here.trials


def test_trials_that_diverge_are_not_chosen() -> None:
    result = small(variants=["fedavg"], trials=6, space={"local.lr": [1e30, 0.1]})
    states = {trial.settings["local.lr"]: trial.state for trial in result.trials}
    assert states == {1e30: "diverged", 0.1: "finished"}
    assert result.best["FedAvg"].settings == {"local.lr": 0.1}
    with pytest.raises(fedgg.UserError, match="no trial finished"):
        _ = small(variants=["fedavg"], trials=1, space={"local.lr": [1e30]}).study


def test_every_algorithm_has_a_space_of_valid_settings() -> None:
    variants: dict[str, dict[str, Any]] = {name: {"algorithm.name": name} for name in ALGORITHMS}
    study = Study(fedgg.Experiment(**SMALL, data={"proxy": 20}), variants, (0,), "fedavg")
    search = Search(study, spaces({}, variants))
    assert all("local.lr" in space for space in search.space.values())
    assert search.space["fedprox"]["algorithm.mu"] == Range(1e-3, 1.0, log=True)
    assert search.space["fedavgm"]["algorithm.momentum"] == Range(0.5, 0.99)
    for name, kind in ALGORITHMS.items():
        for key, one in default_space(name).items():
            assert isinstance(one, Range)
            if key != "local.lr":
                default = getattr(kind(), key.removeprefix("algorithm."))
                assert one.low <= default <= one.high, f"the default of {name} is outside of what is searched"


def test_spaces_for_all_and_for_one() -> None:
    variants: dict[str, dict[str, Any]] = {
        "A": {"algorithm.name": "fedprox", "local.lr": 0.5},
        "B": {"algorithm.name": "fedavg"},
    }
    given = {"local.batch": [16, 32], "B": {"local": {"lr": {"low": 0.1, "high": 0.2}}}, "local.epochs": Range(1, 4)}
    found = spaces(given, variants)
    assert found == spaces({key.lower(): value for key, value in given.items()}, variants)  # labels in any case
    assert found["A"].keys() == {"algorithm.mu", "local.batch", "local.epochs"}
    assert found["B"] == {"local.lr": Range(0.1, 0.2), "local.batch": Choices((16, 32)), "local.epochs": Range(1, 4)}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"space": {"local.lr": {"low": 1.0, "high": 0.1}}}, "space.local.lr: .*low below high"),
        ({"space": {"local.lr": {"low": 0.0, "high": 0.1, "log": True}}}, "begins above zero"),
        ({"space": {"local.lr": {"low": 0.1, "hihg": 1.0}}}, "unknown key 'hihg': did you mean 'high'"),
        ({"space": {"local.lr": 0.1}}, "space.local.lr: 0.1: give"),
        ({"space": {"local.lr": []}}, "at least one"),
        ({"space": {"local.lrr": [0.1]}}, "space of FedAvg: .*local.lr"),
        ({"space": {"algorithm.mu": [0.1]}}, "space of FedAvg: .*mu"),
        ({"space": {"local.batch": {"low": 0, "high": 9}}}, "space of FedAvg: .*local.batch"),
        ({"sampler": "tpee"}, "did you mean 'tpe'"),
        ({"pruner": "best"}, "choose from median, hyperband, none"),
        ({"window": 0}, "window = 0: give a whole number from 1"),
        ({"trials": 0}, "trials = 0"),
        ({"space": {"seed": [1, 2]}}, "seed is the same in all trials"),
    ],
)
def test_mistakes_before_the_first_trial(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(fedgg.UserError, match=complaint):
        small(**options)


def test_a_search_file(tmp_path: Path) -> None:
    file = tmp_path / "search.toml"
    file.write_text(
        'trials = 3\npruner = "none"\nwindow = 2\nseeds = [1]\nfresh_seeds = [7]\n[experiment]\nrounds = 2\n'
        '[variants.A]\nalgorithm.name = "fedavg"\n[space]\n"local.lr" = { low = 0.1, high = 1.0, log = true }\n'
    )
    study, space, options = read_search(file)
    search = Search(study, spaces(space, study.variants), **options)
    assert (search.trials, search.pruner, search.window) == (3, "none", 2)
    assert (search.fresh_seeds, study.seeds) == ((7,), (1,))
    file.write_text(file.read_text() + "\n[spce]\n")
    with pytest.raises(fedgg.UserError, match=r"unknown key 'spce'; a study has .*space"):
        read_search(file)


def test_a_setting_with_which_no_federation_can_be_built_is_named() -> None:
    with pytest.raises(fedgg.UserError, match=r"FedAvg, trial 1 of 7, {.*'local.batch': 5000}: local.batch = 5000 is"):
        small(variants=["fedavg"], space={"local.batch": [5000]})


def test_clients_too_small_to_hold_out_an_example() -> None:
    x, y = np.eye(8), np.arange(8) % 2
    base = {**SMALL, "split": {"scheme": "iid", "clients": 8, "min_examples": 1}, "local": {"batch": 1}}
    with pytest.raises(fedgg.UserError, match=r"no client has an example to hold out at data\.holdout = 0\.01"):
        fedgg.tune(["fedavg"], {**base, "data": {"holdout": 0.01}}, trials=1, data=(x, y, x, y))


def test_own_data_and_model() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x, owners = rng.normal(size=(90, 4)) + y[:, None], np.arange(90) % 2
    result = fedgg.tune(
        {"mine": fedgg.FedProx(mu=0.5)},
        {"rounds": 2, "local": {"batch": 8}},
        trials=2,
        data=(x, y, x, y, owners),
        model=lambda: nn.Linear(4, 3),
    )
    assert result.study.variants["mine"] == {
        "algorithm.name": "fedprox",
        "algorithm.mu": 0.5,
        **result.best["mine"].settings,
    }
    assert result.best["mine"].settings.keys() == {"local.lr"}, "what the algorithm sets is not searched"


def test_a_task_loss_and_metric_of_ones_own(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
    data = (x, x[:, 0], x[:20], x[:20, 0])

    def huber(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.huber_loss(outputs.squeeze(1), targets, reduction="none")

    def off_by_more_than_one(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs.squeeze(1) - targets).abs() > 1).float()

    off_by_more_than_one.higher_is_better = False  # type: ignore[attr-defined]
    settings = {"rounds": 3, "task": {"name": "regression"}, "split": {"clients": 3, "scheme": "iid"}}
    space: dict[str, Any] = {"local.lr": [0.0001, 0.1], "local.batch": [16]}
    options: dict[str, Any] = {"space": space, "trials": 4, "sampler": "random", "pruner": "none", "model": linear}
    by_rmse = fedgg.tune(["fedavg"], settings, data=data, **options)
    assert "hold-out RMSE" in str(by_rmse)
    assert by_rmse.best["FedAvg"].settings["local.lr"] == 0.1

    options |= {"loss": huber, "metrics": [off_by_more_than_one], "out": tmp_path / "own"}
    own = fedgg.tune(["fedavg"], settings, data=data, **options)
    assert [trial.settings for trial in own.trials] == [trial.settings for trial in by_rmse.trials]
    best = own.best["FedAvg"]
    assert best.last_score == min(trial.last_score for trial in own.trials) < max(t.last_score for t in own.trials)
    alone = fedgg.run(
        own.search.experiment("FedAvg", 0, best.settings),
        data=data,
        model=linear,
        loss=huber,
        metrics=[off_by_more_than_one],
    )
    assert alone.rounds[-1]["holdout_off_by_more_than_one"] == best.last_score
    assert fedgg.tune(["fedavg"], settings, data=data, **options).trials == own.trials
    with pytest.raises(fedgg.UserError, match="holds another search for 'FedAvg'"):
        fedgg.tune(["fedavg"], settings, data=data, **{**options, "metrics": ["mae"]})


def linear() -> nn.Module:
    return nn.Linear(5, 1)


def test_trials_of_other_code_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "from fedgg import FedProx\n\n\nclass Mine(FedProx):\n    '''{}'''\n"
    Path("mine.py").write_text(code.format("first"))
    fedgg.trust("mine.py")
    options: dict[str, Any] = {"space": {"local.lr": [0.1]}, "trials": 1, "out": "search"}
    experiment = {"rounds": 1, "split": {"clients": 3}}
    fedgg.tune(["mine.py:Mine"], experiment, **options)
    fedgg.tune(["mine.py:Mine"], experiment, **options)
    Path("mine.py").write_text(code.format("second"))
    with pytest.raises(fedgg.UserError, match=r"holds another search .*code"):
        fedgg.tune(["mine.py:Mine"], experiment, **options)
