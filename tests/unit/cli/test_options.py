"""Options of the command line that contradict each other or themselves are refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedgg.cli.compare_and_sweep import _check_metric, compare, sweep
from fedgg.cli.options import changes
from fedgg.cli.run import run
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.study import Study, demo_study, run_study


def test_a_key_is_set_once() -> None:
    assert changes(data="digits", rounds=3, settings=["local.lr=0.1", "rounds=3"]) == {
        "data.source": "digits",
        "rounds": 3,
        "local.lr": 0.1,
    }
    with pytest.raises(UserError, match=r"rounds is set to 2 and by --set to 3: leave out one of the two"):
        changes(rounds=2, settings=["rounds=3"])
    assert changes(settings=["local.lr=0.1", "local.lr=0.2"]) == {
        "local.lr": 0.2
    }  # a later one replaces an earlier one
    with pytest.raises(UserError, match=r"algorithm\.mu is set to 0\.1 and by --set to 0\.2"):
        run(algorithm=["fedgg:mu=0.1"], settings=["algorithm.mu=0.2"])
    with pytest.raises(UserError, match="seed is set to 3 and by --set to 4"):
        run(seed=3, settings=["seed=4"])
    with pytest.raises(UserError, match="the seeds of a comparison are given by --seeds"):
        compare(settings=["seed=4"])
    with pytest.raises(UserError, match=r"local\.lr is set and is in --grid"):
        sweep(grid=["local.lr=0.1,0.2"], settings=["local.lr=0.7"])


def test_a_run_has_one_algorithm(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run has one algorithm, not 2: `fedgg compare` takes several"):
        run(algorithm=["fedavg", "fedprox"], out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_measure_that_no_run_has_is_refused_in_a_folder_with_runs_too(tmp_path: Path) -> None:
    study = demo_study()
    with pytest.raises(UserError, match=r"--metric: the runs do not record 'test_acc': did you mean 'test_accuracy'\?"):
        _check_metric(study, "test_acc", tmp_path)
    base = study.base.changed({"rounds": 1, "metrics": ["accuracy", "f1"]})
    variants = dict([next(iter(study.variants.items()))])
    (tmp_path / "study.json").write_text("{}")  # of a call that was stopped before its first run
    with pytest.raises(UserError, match="do not record 'test_acc'"):
        _check_metric(study, "test_acc", tmp_path)
    (tmp_path / "study.json").unlink()
    run_study(Study(base, variants, (0,), next(iter(variants))), tmp_path, observer=Observer())
    _check_metric(study, "test_f1", tmp_path)  # a run of the folder has it
    with pytest.raises(UserError, match="do not record 'test_auroc'"):
        _check_metric(study, "test_auroc", tmp_path)


def test_patterns_of_personal_parameters_may_be_typed_with_commas() -> None:
    chosen = Experiment().changed({"personal.parameters": "fc.*, head.weight", "data.holdout": 0.2})
    assert chosen.personal is not None
    assert chosen.personal.parameters == ["fc.*", "head.weight"]
