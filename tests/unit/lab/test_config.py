"""Experiments: TOML in and out, identity, and changes by dotted key."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgg.algorithms import FedProx
from fedgg.errors import UserError
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.study import Study, grid, load_study
from fedgg.lab.study_folder import slug


@settings(deadline=None, max_examples=50)
@given(
    cohort=st.none() | st.integers(1, 10),
    start=st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=5),
    name=st.text(max_size=6),
    mu=st.floats(0, 10),
    seed=st.integers(0, 2**40),
    holdout=st.floats(0, 0.99),
)
def test_toml_round_trip(
    cohort: int | None, start: str | None, name: str, mu: float, seed: int, holdout: float, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    experiment = Experiment(
        name=name,
        seed=seed,
        server={"cohort": cohort},
        model={"name": "mlp", "start": start, "hidden": 7},
        algorithm={"name": "fedgg", "mu": mu, "weight": "fixed"},
        data={"holdout": holdout},
    )
    path.write_bytes(experiment.to_toml().encode())
    again = load_experiment(path)
    assert again == experiment
    assert again.hash() == experiment.hash()


def test_hashes_of_ordinary_experiments_are_those_of_older_versions() -> None:
    """Run folders and result files name experiments by them."""
    settings = {"algorithm": {"name": "fedprox", "mu": 1}, "model": {"name": "mlp", "hidden": 7}}
    wrapped = Experiment(**settings, robust={"rule": "median"})
    found = [identity[:12] for one in (Experiment(), wrapped) for identity in (one.hash(), one.trajectory())]
    assert found == ["efacc91555c4", "6c85a70c1891", "b00f0b0b1d9e", "aad188f13819"], (
        "identities have changed, so that existing run folders are not found: a key declared in a section is part of "
        "them (in [robust] under every rule, as None); leave it out of `_identity` where it changes nothing"
    )


INF = float("inf")


def _unchecked_settings(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What comes back of a model's settings, which stand unchecked until the model is built."""
    experiment = Experiment(model={"name": "own.py:Own", **settings})
    path.write_bytes(experiment.to_toml().encode())
    again = load_experiment(path)
    assert again == experiment == experiment.changed({})
    assert again.hash() == experiment.hash() == experiment.changed({}).hash()
    assert again.trajectory() == experiment.trajectory()
    return again.model.settings


@pytest.mark.parametrize("value", [INF, -INF, [1.0, INF], [[INF], [2.0, -INF]], [], 0.1, "inf"])
def test_infinite_settings_and_lists_of_them_survive_every_copy(value: Any, tmp_path: Path) -> None:
    assert _unchecked_settings(tmp_path / "config.toml", {"scale": value}) == {"scale": value}


def test_an_infinite_setting_is_part_of_the_identity() -> None:
    usual = Experiment(algorithm={"name": "fedexp"})
    infinite = usual.changed({"algorithm.epsilon": INF})
    assert infinite.algorithm.settings == {"epsilon": INF}
    assert infinite.hash() != usual.hash()
    assert infinite.trajectory() != usual.trajectory()
    assert usual.differences(infinite) == "algorithm.epsilon = its default there, inf here"
    study = Study(usual, grid({"algorithm.epsilon": [0.001, INF]}), (0,), "epsilon=0.001")
    assert study.experiment("epsilon=inf", 0).algorithm.settings == {"epsilon": INF}


@pytest.mark.parametrize(
    ("section", "value", "words"),
    [
        ("algorithm", float("nan"), "algorithm.x = nan: a setting cannot be NaN"),
        ("model", float("nan"), "model.x = nan: a setting cannot be NaN"),
        ("model", [1.0, [float("nan")]], "a setting cannot be NaN"),
        ("model", None, "model.x = None: a setting cannot be None; leave it out for its default"),
        ("model", [1, None], "model.x = [1, None]: a setting cannot be None"),
    ],
)
def test_values_that_toml_cannot_keep_or_that_equal_nothing_are_refused(section: str, value: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        Experiment(**{section: {"name": "mlp", "x": value}})
    with pytest.raises(UserError) as again:
        Experiment().changed({f"{section}.x": value})
    assert words in str(caught.value)
    assert words in str(again.value)


def test_a_setting_that_cannot_be_written_is_named() -> None:
    for odd, kind in ((torch.zeros(2), "Tensor"), (datetime.date(1979, 5, 27), "date")):
        with pytest.raises(UserError, match=rf"model\.shape is a {kind}: a setting is a number, a text"):
            Experiment(model={"name": "own.py:Own", "start": None, "shape": odd})


def test_hash_ignores_name_and_processes_and_nothing_else() -> None:
    base = Experiment()
    assert base.changed({"name": "other"}).hash() == base.hash()
    assert base.changed({"engine.workers": 4}).hash() == base.hash()
    different = {
        "seed": 1,
        "rounds": 7,
        "data.normalise": "none",
        "split.beta": 0.1,
        "model.hidden": 3,
        "model.statistics": "local",
        "algorithm.mu": 0.2,
        "local.lr_decay": 0.5,
        "server.cohort": 3,
        "server.evaluate_every": 2,
        "engine.precision": "fp64",
        "engine.threads": 4,
    }
    hashes = {base.hash(), *(base.changed({key: value}).hash() for key, value in different.items())}
    assert len(hashes) == 1 + len(different)


def test_threads_are_part_of_a_runs_identity_unless_workers_have_one_each() -> None:
    """Two threads add up in another order than one."""
    fused = Experiment(engine={"name": "fused"})
    threads = fused.changed({"engine.threads": 2})
    assert threads.trajectory() != fused.trajectory()
    assert fused.differences(threads) == "engine.threads = its default there, 2 here"
    assert threads.changed({"engine.name": "auto"}).trajectory() == threads.trajectory()
    workers = threads.changed({"engine.name": "workers"})
    assert (workers.hash(), workers.trajectory()) == (fused.hash(), fused.trajectory())
    assert workers.engine.threads_in_use == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local.epoch": 1}, ("'local.epoch'", "did you mean 'local.epochs'")),
        ({"spilt.clients": 3}, ("'spilt.clients'", "did you mean 'split.clients'")),
        ({"round": 3}, ("'round'", "'rounds'")),
        ({"zzz": 3}, ("'zzz'", "choose from", "rounds")),
        ({"lr": 3}, ("did you mean 'local.lr' or 'server.lr'?",)),
        ({"clip": 3}, ("did you mean 'privacy.clip' or 'robust.clip'?",)),
        ({"mu": 3}, ("did you mean 'algorithm.mu' of fedprox, ",)),
        ({"momentum": 0.5}, ("did you mean 'local.momentum' or 'algorithm.momentum' of fedavgm, fedacg?",)),
        ({"optimizer.lr": 3}, ("'optimizer.lr'", "did you mean 'local.lr' or 'server.lr'?")),
        ({"split.seed": 3}, ("[split] has scheme, clients, ", "elsewhere: 'seed' (random seed: split")),
        (
            {"local.clients": 3},
            ("did you mean 'local.small_clients'? Elsewhere: 'split.clients' (number of clients)",),
        ),
        ({"local.mu": 3}, ("[local] has epochs, ", "elsewhere: 'algorithm.mu' of fedprox, ")),
        (
            {"local.clip": 3},
            (
                "[local] has epochs, steps, part, batch, ",
                "elsewhere: 'privacy.clip' (length that no client's message",
                "'robust.clip'",
            ),
        ),
        (
            {"server.momentum": 3},
            (
                "[server] has cohort, lr, ",
                "elsewhere: 'local.momentum' (of SGD)",
                "'algorithm.momentum' of fedavgm, fedacg",
            ),
        ),
        ({"server.server_lr": 3}, ("elsewhere: 'algorithm.server_lr' of fedavgm, fedadagrad, fedadam, fedyogi",)),
        ({"split.clients": -1}, ("split.clients = -1", "greater than or equal to 1")),
        ({"local.batch": 0}, ("local.batch = 0",)),
        ({"local.lr": float("nan")}, ("local.lr",)),
        ({"local.lr": float("inf")}, ("local.lr",)),
        ({"split.beta": 0}, ("split.beta = 0", "greater than 0")),
        ({"server.cohort": 11}, ("server.cohort = 11", "10 clients")),
        ({"server.cohort": 0}, ("server.cohort = 0", "a share between 0 and 1")),
        ({"server.cohort": 2.5}, ("server.cohort = 2.5", "a number of clients")),
        ({"engine.device": "tpu"}, ("engine.device",)),
        ({"rounds.x": 1}, ("'rounds' is a value",)),
        ({"local.lr.x": 1}, ("'lr' is a value",)),
        ({"local": 3}, ("local = 3",)),
        ({"seed": -1}, ("seed = -1",)),
        ({"local.momentum": 1.0}, ("local.momentum", "less than 1")),
        ({"data.holdout": 1.0}, ("data.holdout",)),
        ({"split.scheme": "dirichlett"}, ("split.scheme", "'dirichlet'")),
    ],
)
def test_mistakes_in_one_line(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        Experiment().changed(changes)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("key", "wrong"), [("local.clip", "privacy.clip"), ("server.momentum", "local.momentum")])
def test_a_key_of_another_section_is_not_what_was_meant(key: str, wrong: str) -> None:
    """It has the same last word and another meaning."""
    with pytest.raises(UserError) as caught:
        Experiment().changed({key: 1})
    assert f"did you mean '{wrong}'" not in str(caught.value)


def test_many_mistakes_are_not_all_listed() -> None:
    with pytest.raises(UserError, match="and 2 more"):
        Experiment(local={"epochs": 0, "batch": 0, "lr": 0, "momentum": 2, "weight_decay": -1})


def test_switching_the_algorithm_drops_the_old_ones_settings() -> None:
    base = Experiment(algorithm={"name": "fedgg", "mu": 0.5, "weight": "fixed"})
    assert base.changed({"algorithm.name": "fedprox"}).algorithm.settings == {}
    assert base.changed({"algorithm.name": "fedgg"}).algorithm.settings == {"mu": 0.5, "weight": "fixed"}
    assert base.changed({"algorithm.mu": 0.1}).algorithm.settings == {"mu": 0.1, "weight": "fixed"}
    switched = base.changed({"algorithm.name": "fedprox", "algorithm.mu": 0.1})
    assert switched.algorithm.settings == {"mu": 0.1}


def test_the_order_of_changes_does_not_matter() -> None:
    """A setting given together with a name is a setting of that name, whichever is written first."""
    base = Experiment()
    first = base.changed({"algorithm.name": "fedprox", "algorithm.mu": 0.7})
    assert base.changed({"algorithm.mu": 0.7, "algorithm.name": "fedprox"}) == first
    first = base.changed({"model.name": "mlp", "model.hidden": 3})
    base = base.changed({"model.name": "linear"})
    assert base.changed({"model.hidden": 3, "model.name": "mlp"}) == first


def test_switching_the_model_keeps_start_and_statistics() -> None:
    base = Experiment(model={"name": "mlp", "hidden": 3, "statistics": "local", "start": "x"})
    changed = base.changed({"model.name": "linear"}).model
    assert (changed.settings, changed.statistics, changed.start) == ({}, "local", "x")


def test_changed_leaves_the_original_alone() -> None:
    base = Experiment(algorithm={"name": "fedgg", "mu": 0.5})
    base.changed({"algorithm.mu": 0.1, "rounds": 3, "server.cohort": None})
    assert base.algorithm.settings == {"mu": 0.5}
    with pytest.raises(Exception, match="frozen"):
        base.rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize("content", [b"rounds = = 3", b"\xff\xfe", b"rounds = 3\nrounds = 4", b"[local"])
def test_what_is_no_toml(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.toml"):
        load_experiment(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        load_experiment(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load_experiment(tmp_path)


# Studies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "seeds = 3",
        "seeds = ['a']",
        "seeds = []",
        "variants = 3",
        "experiment = 3",
        "[variants]\nFedAvg = 3",
        "reference = 3\n[variants.A]\nseed = 1",
        "reference = 'B'\n[variants.A]\nrounds = 1",
        "[variants.A]\nround = 1",
        "[variants.A]\nalgorithm.name = 'fedgg'\nalgorithm.my = 1",
        "[variants.A]\nrounds = 1\n[variants.a]\nrounds = 2",
        "[variants.A]\nalgorithm = 3",
        "seed = [1]\n[variants.A]\nrounds = 1",
        "[experiment]\nround = 3\n[variants.A]\nrounds = 1",
        "seeds = [0, 0]\n[variants.A]\nrounds = 1",
    ],
)
def test_a_study_with_a_mistake_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_study(path)
    assert "\n" not in str(caught.value)


def test_a_study_file() -> None:
    study = Study(Experiment(rounds=3), {"A": {"algorithm.name": "fedavg"}, "B x": {}}, (0, 2), "A")
    assert study.experiment("B x", 2).seed == 2
    assert study.experiment("B x", 2).name == "B x"
    names = [(job.name, str(job.folder)) for job in study.jobs(Path("f"), None)]
    assert names == [
        ("A, seed 0", "f/a/seed-0"),
        ("B x, seed 0", "f/b-x/seed-0"),
        ("A, seed 2", "f/a/seed-2"),
        ("B x, seed 2", "f/b-x/seed-2"),
    ]


def test_grid_is_every_combination_and_labels_are_folders() -> None:
    made = grid({"algorithm.mu": [0.1, 1], "local.lr": [0.01, 0.1]})
    assert list(made) == ["mu=0.1 lr=0.01", "mu=0.1 lr=0.1", "mu=1 lr=0.01", "mu=1 lr=0.1"]
    assert made["mu=1 lr=0.1"] == {"algorithm.mu": 1, "local.lr": 0.1}
    assert slug("FedGG, first-step push") == "fedgg-first-step-push"
    assert slug("µ") != slug("λ")
    assert slug("lr +") != slug("lr -")
    assert len(slug("x" * 300)) < 100
    assert slug("x" * 300) != slug("x" * 301)
    assert ".." not in slug("../../etc")
    assert slug("..") == "variant"


def test_axes_with_the_same_last_word_are_told_apart() -> None:
    made = grid({"algorithm.momentum": [0.0, 0.9], "local.momentum": [0.0, 0.9]})
    assert len(made) == 4


@pytest.mark.parametrize(
    ("cohort", "clients", "drawn"), [(None, 7, 7), (3, 7, 3), (3.0, 7, 3), (0.5, 10, 5), (0.01, 20, 1), (0.34, 10, 3)]
)
def test_a_cohort_is_a_number_or_a_share(cohort: float | None, clients: int, drawn: int) -> None:
    assert Experiment(split={"clients": clients}, server={"cohort": cohort}).cohort_of(clients) == drawn


def test_labels_of_a_grid_are_short_and_clear() -> None:
    assert list(grid({"algorithm.mu": [1], "rounds": [2, 3]})) == ["mu=1 rounds=2", "mu=1 rounds=3"]
    made = grid({"model.name": ["mlp", "nets.py:Net"]}, {"nets.py:Net": "Net"})
    assert made == {"model.name=mlp": {"model.name": "mlp"}, "model.name=Net": {"model.name": "nets.py:Net"}}
    assert list(grid({"algorithm.momentum": [0], "local.momentum": [0.9], "local.lr": [1]})) == [
        "algorithm.momentum=0 local.momentum=0.9 lr=1"
    ]
    assert list(grid({"model.name": ["mlp"]})) == ["model.name=mlp"]
    assert list(grid({"algorithm.mu": [1, 1000.0, 1e30, 0.5]})) == ["mu=1", "mu=1000", "mu=1e+30", "mu=0.5"]


def test_an_algorithm_in_a_key_is_told_where_it_belongs() -> None:
    with pytest.raises(UserError, match=r"'algorithm\.mu', its algorithm is said by --algorithm fedgg"):
        Experiment().changed({"fedgg:mu": 1})


def test_what_one_of_two_experiments_does_not_say() -> None:
    plain = Experiment(algorithm={"name": "fedgg"})
    assert plain.differences(plain.changed({"algorithm.mu": 1})) == "algorithm.mu = its default there, 1 here"
    assert plain.differences(plain.changed({"robust.rule": "median"})).startswith(
        "robust.rule = off there, median here"
    )


def test_a_section_is_no_setting() -> None:
    with pytest.raises(UserError, match=r"algorithm is a section; write algorithm\.name"):
        Experiment().changed({"algorithm": "scaffold"})


def test_a_section_can_be_switched_off_by_a_word() -> None:
    plain = Experiment()
    for key, word in (("robust.rule", "median"), ("attack.kind", "nan")):
        on = plain.changed({key: word})
        assert on.hash() != plain.hash()
        assert on.changed({key: "none"}) == plain
        assert plain.changed({key: "none"}).hash() == plain.hash()
    trimmed = Experiment(robust={"rule": "trimmed_mean", "trim": 0.1})
    assert trimmed.changed({"robust.rule": "none"}) == plain
    assert Experiment(robust={"rule": "none"}, attack={"kind": "none"}) == plain


def test_a_name_where_there_is_none_is_answered_with_the_sections_own_keys() -> None:
    with pytest.raises(UserError, match=r"unknown key 'data\.name': choose from data\.source, data\.normalise"):
        Experiment(data={"name": "digits"})


def test_a_study_is_not_an_experiment(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text("seeds = [0]\n[variants.a]\nlocal.lr = 0.1\n")
    with pytest.raises(UserError, match=r"is a study of several experiments, not one: fedgg compare"):
        load_experiment(file)


@pytest.mark.parametrize(
    ("sections", "way_out"),
    [
        ({"task": {"loss": max}}, "task.loss = <built-in function max>: functions, classes and objects are handed in"),
        ({"task": {"loss": max}}, "beside the experiment, as loss=..."),
        ({"metrics": [max]}, "as metrics=..."),
        ({"model": {"name": dict}}, "as model=..."),
        ({"model": dict}, "as model=..."),
        ({"algorithm": FedProx()}, "as algorithm=..."),
        ({"optimiser": {"name": dict}}, "this is an object of Python; give sgd, adam, adamw, FILE.py:CLASS"),
        ({"optimiser": dict}, "optimiser is a section; write optimiser.name"),
    ],
)
def test_an_object_where_a_name_belongs(sections: dict[str, Any], way_out: str) -> None:
    with pytest.raises(UserError) as caught:
        Experiment(**sections)
    assert way_out in str(caught.value)
