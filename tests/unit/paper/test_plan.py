"""Items share their runs, a run's folder is its settings, and the presets are what the items run."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from fedgg.errors import UserError
from fedgg.lab.name_resolution import build_algorithm, build_model
from fedgg.older_python import tomllib
from fedgg.paper.find_or_run import identity
from fedgg.paper.items import DATASETS, ITEMS, READINGS, chosen_datasets, chosen_items
from fedgg.paper.plan import METHODS, PlannedMethod, ReproductionPlan, preset
from fedgg.paper.tables import PRINTED_ACCURACY, PRINTED_ROUNDS, PUBLISHED

PUSHES = ("push-cifar10", "push-svhn", "push-cifar100")


def plan(*items: str, **more: object) -> ReproductionPlan:
    return ReproductionPlan(chosen_items(items), tuple(DATASETS), (0, 1, 2), **more)  # type: ignore[arg-type]


def counts(*items: str, **more: object) -> int:
    return len(plan(*items, **more).runs())


def test_shared_runs_count_once() -> None:
    assert counts("table1") == counts("table1", "table3") == 3 * 4 * 3
    assert counts("table1", "table2") == counts("fig2", "table3", "table4") == 2 * 3 * 4 * 3
    assert counts("fig1") == 0
    assert counts("fig3") == 11 * 3
    assert counts("all") == 72 + 33 - 2 * 3  # FedAvg and mu 0.01 at beta 0.5 are in both
    assert counts("table1", readings=("text", "epsilon")) == 3 * 5 * 3
    assert counts("readings") == counts("readings", "inner", "fig3") == 46 * 3
    assert counts("inner") == 4 * 2 * 3
    assert counts("scaffold") == 6 * 3
    assert counts("scaffold-small") == 4 * 3
    assert counts("comparison") == 2 * 18 * 3
    assert counts("push") == counts("push-svhn") == counts("push-cifar100") == 2 * 7 * 3
    assert counts("pushes") == 3 * 2 * 4 * 3
    assert counts("pushes", "push", "push-svhn", "push-cifar100") == 3 * 2 * 7 * 3
    # FedAvg, FedAvgM 0.5 and mu 0.1 are among the readings too, so are three of the push; two of the push are compared.
    assert counts("ours") == (46 + 5 + 4 + (36 - 5) + (14 - 6 - 2) + 14 + 14) * 3


def test_the_literature_has_its_own_settings_and_is_not_among_ours() -> None:
    assert (counts("literature-cifar10"), counts("literature-cifar100")) == ((2 * 17 + 1) * 3, 2 * 17 * 3)
    groups = [{item.name for item in chosen_items([group])} for group in ("all", "ours", "literature")]
    papers = {"literature-cifar10", "literature-cifar100", "niid-bench"}
    assert groups[2] == papers | {"literature-cpu", "literature-cpu-cifar100"}
    assert not groups[2] & (groups[0] | groups[1])
    assert set.union(*groups) == set(ITEMS)
    for name, size in (("cifar10", 10), ("cifar100", 100)):
        for method in plan(f"literature-{name}").methods_of(ITEMS[f"literature-{name}"]):
            base = method.base
            assert (base.split.clients, base.server.cohort, base.rounds) == (100, 10, 500)
            assert (base.split.scheme, f"beta {base.split.beta:g}") == ("dirichlet_repeated", method.split)
            decay = 0.9995 if method.name == "FedDyn" else 0.998
            assert (base.local.lr, base.local.lr_decay, base.local.momentum) == (0.1, decay, 0.0)
            assert (base.local.epochs, base.local.batch) == (5, 50)
            # FL-Simulator clips and decays outside of alpha, see tests/unit/algorithms/test_fedcm.py
            share = base.algorithm.settings["alpha"] if method.name in ("FedCM", "MoFedSAM") else 1.0
            assert share * base.local.weight_decay == pytest.approx(0.001)
            assert share * (base.optimiser.clip_norm or 0) == pytest.approx(10.0)
            assert base.data.source == name
            build_algorithm(base.algorithm.name, base.algorithm.settings)
        model = build_model(base.model.name, base.model.settings, (3, 32, 32), size, 0)
        assert sum(p.numel() for p in model.parameters()) == 11_176_512 + 513 * size  # torchvision's resnet18
    quick = plan("literature", quick=True)
    assert {method.base.data.source for method, _ in quick.runs()} == {"digits"}
    assert plan("literature-cpu", changes={"rounds": 3}).lengths() == (3,)


def test_a_part_of_the_runs() -> None:
    """What is shown stays the same: a table grows as its parts are run."""

    def made(item: str = "literature-cifar10", **more: object) -> list[tuple[str, str, int]]:
        return [(method.label, method.split, seed) for method, seed in plan(item, **more).runs_to_make()]

    assert len(made()) == counts("literature-cifar10")
    labels = ["FedAvg", "FedGG, text", "FedGG, relative push"]
    wanted = [(label, "beta 0.6", seed) for seed in range(3) for label in labels]
    assert made(methods=("fedgg", "FedAvg"), splits=("0.6",)) == made(methods=("FedAvg", "FedGG"), splits=("beta 0.6",))
    assert made(methods=("fedgg", "FedAvg"), splits=("0.6",)) == wanted
    assert {split for _, split, _ in made(methods=("FedACG",))} == {"beta 0.6", "beta 0.1"}
    assert counts("literature-cifar10", methods=("FedAvg",), splits=("0.1",)) == counts("literature-cifar10")
    assert {split for _, split, _ in made("niid-bench", splits=("iid", "2 labels"))} == {"iid", "2 labels"}
    with pytest.raises(UserError, match="has a method 'FedACGG': did you mean 'FedACG'"):
        made(methods=("FedACGG",))
    with pytest.raises(UserError, match=r"on the split 'beta 0.5': choose from beta 0.6, beta 0.1"):
        made(splits=("0.5",))


def test_the_table_of_niid_bench() -> None:
    """Its five splits, each with all methods; the settings that are the same in all runs are those of its code."""
    item = ITEMS["niid-bench"]
    methods = plan("niid-bench").methods_of(item)
    labels = [method.label for method in methods if method.split == "iid"]
    assert [(method.label, method.split) for method in methods] == [(x, split) for split in item.splits for x in labels]
    for method in methods:
        base = method.base
        assert (base.rounds, base.split.clients, base.cohort_of(10), base.model.name) == (50, 10, 10, "cnn")
        assert (base.local.epochs, base.local.batch, base.local.lr, base.local.momentum) == (10, 64, 0.01, 0.9)
        assert (base.local.weight_decay, base.data.normalise, base.data.augment) == (1e-5, "unit", "crop_flip")
        labels_each = re.match(r"(\d) label", method.split)
        if method.label == "SCAFFOLD":  # models.py and strategy.py there
            chosen = build_algorithm(base.algorithm.name, base.algorithm.settings)
            assert (chosen.correction, chosen.variate_mean) == ("after", "share")  # type: ignore[attr-defined]
        assert base.split.settings == ({"labels_per_client": int(labels_each[1])} if labels_each else {})


@pytest.mark.parametrize("name", ["literature-cpu", "literature-cpu-cifar100"])
def test_settings_of_the_protocol_for_a_cpu_are_the_best_trials_of_another_seed(name: str) -> None:
    home = Path(__file__).parents[3]
    search, chosen = tomllib.loads((home / f"experiments/{name}-tuning.toml").read_text()), preset(name)
    trials = [json.loads(line) for line in (home / f"results/{name}-tuning.jsonl").read_text().splitlines()]
    assert not set(search["seeds"]) & set(chosen.seeds)
    assert set(chosen.variants) == set(search["variants"])
    assert Counter(trial["algorithm"] for trial in trials) == dict.fromkeys(chosen.variants, search["trials"])
    for label, changes in chosen.variants.items():
        finished = [trial for trial in trials if trial["algorithm"] == label and trial["state"] == "finished"]
        best = max(finished, key=lambda trial: float(trial["scores"][str(search["experiment"]["rounds"])]))
        assert {key: changes[key] for key in best["settings"]} == best["settings"], label


def test_printed_values_are_of_the_methods_and_splits_of_their_table() -> None:
    for name, columns in PUBLISHED.items():
        labels = {method.label for method in plan(name).methods_of(ITEMS[name])}
        for published in columns:
            assert set(published.values) == set(ITEMS[name].splits)
            assert all(set(values) - {"FedAdam"} <= labels for values in published.values.values())


def test_a_study_has_its_own_length_unless_another_is_asked_for() -> None:
    studies = plan("push", "push-cifar100")
    assert studies.lengths(ITEMS["push-cifar100"]) == (40,)
    assert studies.lengths() == (40, 100)
    assert studies.rounds() == "40 and 100"
    assert plan("push-cifar100", changes={"rounds": 3}).lengths() == (3,)
    assert plan("push-cifar100", quick=True).lengths() == plan("table1", quick=True).lengths()


def test_every_run_has_a_folder_of_its_own() -> None:
    everything = plan("all", readings=tuple(READINGS))
    places = [line.folder(seed) for line, seed in everything.runs()]
    assert len(set(places)) == len(places)
    hashes = {line.experiment(seed).hash() for line, seed in everything.runs()}
    assert len(hashes) == len(places)


def test_other_rounds_or_precision_go_elsewhere_and_another_label_does_not() -> None:
    (base, *_) = plan("table1").methods_of(ITEMS["table1"])
    (short, *_) = plan("table1", changes={"rounds": 5}).methods_of(ITEMS["table1"])
    (other, *_) = plan("table1", changes={"engine.precision": "fp64"}).methods_of(ITEMS["table1"])
    assert len({line.folder(0).parent for line in (base, short, other)}) == 3
    assert base.folder(0).parent == base.folder(1).parent
    named = PlannedMethod(base.dataset, base.split, base.name, "x", base.base.changed({"name": "x"}))
    assert named.folder(2) == base.folder(2)


@pytest.mark.parametrize(
    "name", ["fig3", "readings", "scaffold-modes", "scaffold-small-clients", "tuned", *PUSHES, *DATASETS]
)
def test_presets_are_what_the_items_run(name: str) -> None:
    """`fedgg compare experiments/NAME.toml` and `fedgg reproduce` train the same experiments."""
    study = preset(name)
    ours = {line.base.hash() for line, _ in plan("all", "ours", readings=tuple(READINGS)).runs()}
    theirs = {label: study.experiment(label, 0).hash() for label in study.variants}
    assert set(theirs.values()) <= ours
    if name == "readings":  # every reading that can be asked for by name is in the study of them
        cifar10 = ReproductionPlan(chosen_items(["table1", "table2"]), ("cifar10",), (0,), tuple(READINGS))
        fedgg = {line.base.hash() for line, _ in cifar10.runs() if line.name == "FedGG"}
        assert fedgg <= set(theirs.values())


def test_readings_can_be_built_and_differ() -> None:
    built = [build_algorithm("fedgg", reading.settings) for reading in READINGS.values()]
    assert len(set(map(str, built))) == len(built)


def test_what_was_trained_is_known_whatever_it_ran_on() -> None:
    line = plan("table1").table_methods("cifar10", "beta 0.5")[-1]
    here = line.experiment(0)
    keeping = {"name": "y", "engine.precision": "fp64", "server.checkpoint_every": 3}
    same = here.changed({**keeping, "algorithm.weight": "adaptive"})
    assert identity(same) == identity(here)
    for change in ({"seed": 1}, {"algorithm.mu": 0.02}, {"rounds": 99}, {"data.augment": "none"}):
        assert identity(here.changed(change)) != identity(here)


def test_names_that_are_none() -> None:
    with pytest.raises(UserError, match="did you mean 'table1'"):
        chosen_items(["tabel1"])
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        chosen_datasets("CIFAR-10")
    with pytest.raises(UserError, match="did you mean 'epsilon'"):
        plan("table1", readings=("epsilo",))
    for key, option in (("algorithm.mu", "--reading"), ("seed", "--seeds"), ("data.source", "--datasets")):
        with pytest.raises(UserError, match=option):
            plan("table1", changes={key: 1})


def test_the_printed_tables_are_complete_and_speed_ups_fit_their_rounds() -> None:
    for split, dataset, method in itertools.product(("beta 0.5", "beta 0.1"), DATASETS, METHODS):
        assert 0 < PRINTED_ACCURACY[split][dataset][method][0] < 100
        told = PRINTED_ROUNDS[split][dataset][method]
        if told is not None:
            assert told[1] == pytest.approx(100 / told[0], abs=0.01)
