"""One client's numbers must not destroy the model for all; and a run that diverges keeps its history."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observers import Callbacks, Events
from safetensors.torch import load_file
from torch import nn

from fedgg.core.local import LocalEnd
from fedgg.engines import Loop, RoundJob
from fedgg.lab.build import ModelGiven, build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.run_result import Run
from fedgg.lab.run_session import opened
from fedgg.lab.runner import run, run_rounds
from fedgg.lab.study import Study, run_study

Alter = Callable[[int, int, LocalEnd], LocalEnd]  # (round from 1, client, what it sends)


def poisoned(clients: int = 4, sick: int = 1) -> tuple[Any, ...]:
    """Shards: each client holds one class; the inputs of class 0 overflow float32."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40 * clients, 6)).astype(np.float32)
    y = np.repeat(np.arange(clients), 40)
    x[y < sick] *= 1e30
    x_test = rng.normal(size=(20, 6)).astype(np.float32)
    return x, y, x_test, np.arange(20) % clients


def shards(**changes: Any) -> Experiment:
    return Experiment(
        rounds=3,
        data={"normalise": "none"},
        split={"clients": 4, "scheme": "shards", "shards_per_client": 1},
        local={"epochs": 2, "batch": 16},
        model={"name": "mlp", "hidden": 4},
        algorithm={"name": "fedavg"},
    ).changed(changes)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedgg", "fedavgm", "fedprox"])
def test_a_client_whose_update_is_not_finite_is_left_out_and_named(algorithm: str, tmp_path: Path) -> None:
    notices: list[str] = []
    finished = run(
        shards(**{"algorithm.name": algorithm}),
        data=poisoned(),
        out=tmp_path,
        observer=Callbacks(notice=notices.append),
    )
    assert finished.status == "finished"
    assert len(finished.rounds) == 3
    for record in finished.rounds:
        assert len(record["lost"]) == 1
        assert len(record["clients"]) == 3
        assert record["lost"][0]["client"] not in [line["client"] for line in record["clients"]]
        assert record["train_loss"] is not None
    gone = finished.rounds[0]["lost"][0]
    assert gone["why"].startswith("not finite: ")  # and not that it is out of proportion, which holds too
    said = f"round 1: client {gone['client']} dropped ({gone['why']}); not repeated here for later rounds"
    assert [sentence for sentence in notices if "dropped" in sentence] == [said]
    assert finished.summary["clients_lost"] == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in finished.weights.values())
    text = (tmp_path / "rounds.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


FLIPPED = {"attack.kind": "sign_flip", "attack.clients": 2, "attack.scale": 1e12}


def small(**changes: Any) -> Experiment:
    return Experiment(
        rounds=3,
        split={"clients": 4},
        local={"epochs": 1},
        model={"name": "linear"},
        algorithm={"name": "fedavg"},
        engine={"name": "loop"},
    ).changed(changes)


@pytest.mark.parametrize("engine", ["loop", "stacked", "workers"])
def test_updates_out_of_all_proportion_are_left_out_and_named_in_every_engine(engine: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = FLIPPED | {"engine.name": engine}
    if engine == "workers":
        changes |= {"engine.workers": 2}
    finished = run(small(**changes), out=tmp_path)
    liars = json.loads((tmp_path / "attackers.json").read_text())["clients"]
    assert finished.status == "finished"
    for record in finished.rounds:
        assert [gone["client"] for gone in record["lost"]] == liars
        assert all(
            gone["why"].startswith("out of all proportion: delta, over 1,000,000 times") for gone in record["lost"]
        )
    assert all(float(tensor.abs().max()) < 10 for tensor in finished.weights.values())


def test_large_updates_that_are_not_out_of_proportion_are_used() -> None:
    """The guard is against nonsense; `[robust]` is against attackers who know how far they can go."""
    assert run(small(**FLIPPED | {"attack.scale": 1e4})).summary["clients_lost"] == 0


class Altered(Loop):
    """The loop, with something done to what clients send up."""

    def __init__(self, alter: Alter):
        self.alter = alter

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        for client, end in super().train(job):
            yield client, self.alter(job.round + 1, client, end)


def run_altered(experiment: Experiment, out: Path, alter: Alter, model: ModelGiven | None = None) -> Run:
    build_it = partial(build, experiment, model=model)
    with arithmetic(experiment), opened(build_it, experiment, out, Callbacks()) as session:
        run_rounds(session, Altered(alter))
        return session.finish()


def test_a_whole_cohort_out_of_proportion_ends_the_run_with_the_last_good_model(tmp_path: Path) -> None:
    def alter(round_: int, client: int, end: LocalEnd) -> LocalEnd:
        return replace(end, up={"delta": torch.full_like(end.up["delta"], 1e30)}) if round_ == 2 else end

    finished = run_altered(small(), tmp_path, alter)
    assert finished.status == "diverged"
    assert finished.summary["why"] == "the global model is out of all proportion after round 2"
    assert finished.summary["rounds_done"] == len(finished.rounds) == 1
    assert [path.name for path in sorted((tmp_path / "checkpoint").glob("0*"))] == ["000001.safetensors"]
    good = run(small(rounds=1)).weights
    kept = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in good.items())
    assert run(small(), out=tmp_path).summary == finished.summary, "the same numbers would come again"


def test_the_one_client_without_which_the_model_is_finite_is_left_out(tmp_path: Path) -> None:
    """FedNova divides by the number of steps that a client claims."""

    def alter(round_: int, client: int, end: LocalEnd) -> LocalEnd:
        worth = torch.zeros_like(end.up["worth"]) if (round_, client) == (2, 1) else end.up["worth"]
        return replace(end, up=end.up | {"worth": worth})

    finished = run_altered(small(**{"algorithm.name": "fednova"}), tmp_path, alter)
    assert finished.status == "finished"
    assert [record["lost"] for record in finished.rounds] == [
        [],
        [{"client": 1, "why": "the global model is not finite with its update"}],
        [],
    ]


def test_of_a_run_that_has_been_diverging_nobody_is_left_out(tmp_path: Path) -> None:
    """The same client, once the model has grown beyond all that training makes: the run ends, as it always did."""

    def alter(round_: int, client: int, end: LocalEnd) -> LocalEnd:
        if round_ < 3:
            return replace(end, up=end.up | {"delta": torch.full_like(end.up["delta"], 9e5 * 1e5 ** (round_ - 1))})
        return replace(end, up=end.up | {"worth": torch.zeros_like(end.up["worth"])}) if client == 1 else end

    finished = run_altered(small(**{"algorithm.name": "fednova"}), tmp_path, alter)
    assert (finished.status, len(finished.rounds)) == ("diverged", 2)
    assert finished.summary["clients_lost"] == 0


def test_the_one_client_without_which_the_test_loss_is_finite_is_left_out(tmp_path: Path) -> None:
    """A variance below zero is as finite as the weights; what comes of it in evaluation is not."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    def alter(liars: Collection[int], round_: int, client: int, end: LocalEnd) -> LocalEnd:
        if round_ != 2 or client not in liars:
            return end
        return replace(
            end, buffers=end.buffers | {"2.running_var": torch.full_like(end.buffers["2.running_var"], -100)}
        )

    experiment = small(**{"model.name": f"python:{type(model).__qualname__}", "data.holdout": 0.1})
    finished = run_altered(experiment, tmp_path / "one", partial(alter, [1]), model)
    assert finished.status == "finished"
    assert [gone["client"] for record in finished.rounds for gone in record["lost"]] == [1]
    assert finished.rounds[1]["lost"][0]["why"] == "the test loss is not finite with its update"
    assert finished.rounds[1]["test_loss"] < 3
    finished = run_altered(experiment, tmp_path / "two", partial(alter, [1, 2]), model)
    assert (finished.status, len(finished.rounds)) == ("diverged", 1)  # nobody can be told to be at fault


def test_everybody_lost(tmp_path: Path) -> None:
    finished = run(shards(), data=poisoned(sick=4), out=tmp_path)
    assert finished.status == "diverged"
    assert "no client of round 1" in finished.summary["why"]
    assert "client 0" in finished.summary["why"]


def test_divergence_keeps_the_history(tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=40,
        split={"clients": 3},
        local={"epochs": 1, "batch": 64, "lr": 8.0, "momentum": 0.9},
        model={"name": "mlp", "hidden": 8},
        algorithm={"name": "scaffold", "correction": "plain"},
    )
    finished = run(experiment, out=tmp_path)
    assert finished.status == "diverged"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rounds_done"] == len((tmp_path / "rounds.jsonl").read_text().splitlines())
    again = run(experiment, out=tmp_path)
    assert again.summary == finished.summary


def test_opening_a_diverged_run_again_keeps_all_of_its_history(tmp_path: Path) -> None:
    """Even where its last rounds lie beyond the last checkpoint."""
    experiment = Experiment(
        rounds=40,
        split={"clients": 3},
        local={"epochs": 1, "batch": 64, "lr": 8.0, "momentum": 0.9},
        model={"name": "mlp", "hidden": 8},
        algorithm={"name": "scaffold", "correction": "plain"},
        server={"checkpoint_every": 100},
    )
    finished = run(experiment, out=tmp_path)
    assert finished.status == "diverged"
    assert finished.rounds, "the test needs a run that diverges after its first round"
    before = (tmp_path / "rounds.jsonl").read_bytes()
    again = run(experiment, out=tmp_path)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before
    assert len(again.rounds) == len(finished.rounds)
    assert all(torch.equal(again.weights[name], finished.weights[name]) for name in finished.weights)


def test_in_a_study_the_other_runs_go_on(tmp_path: Path) -> None:
    base = Experiment(
        rounds=3, split={"clients": 3}, local={"epochs": 1}, algorithm={"name": "fedavg"}, model={"name": "linear"}
    )
    study = Study(base, {"fine": {}, "wild": {"local.lr": 1e38}, "also fine": {"rounds": 3}}, (0,), "fine")
    ended: dict[str, str] = {}

    def heard(run: str, kind: str, what: Any) -> None:
        if kind == "ended":
            ended[run] = what["status"]

    run_study(study, tmp_path, processes=1, observer=Events(heard))
    assert ended == {"fine, seed 0": "finished", "wild, seed 0": "diverged", "also fine, seed 0": "finished"}


# Evaluation -----------------------------------------------------------------------------------------------------------


def test_holdout_accuracy_says_where_it_was_measured() -> None:
    experiment = Experiment(
        rounds=2,
        data={"holdout": 0.25},
        split={"clients": 3},
        local={"epochs": 1},
        model={"name": "linear"},
        algorithm={"name": "fedavg"},
    )
    record = run(experiment).rounds[-1]
    assert {"test_accuracy", "test_loss", "holdout_accuracy", "holdout_accuracy_by_client"} <= record.keys()
    assert set(record["holdout_accuracy_by_client"]) == {"0", "1", "2"}
    values = record["holdout_accuracy_by_client"].values()
    assert min(values) <= record["holdout_accuracy"] <= max(values)
    assert "accuracy" not in record
    plain = run(experiment.changed({"data.holdout": 0.0})).rounds[-1]
    assert not any("holdout" in key for key in plain)


def test_partial_evaluation() -> None:
    experiment = Experiment(
        rounds=5,
        split={"clients": 3},
        local={"epochs": 1},
        server={"evaluate_every": 2},
        model={"name": "linear"},
        algorithm={"name": "fedavg"},
    )
    finished = run(experiment)
    assert [record["round"] for record in finished.rounds if "test_accuracy" in record] == [2, 4, 5]
    assert len(finished.test_accuracy) == 3


def tiny(x: int = 6) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(x, 3)), np.arange(x) % 2, rng.normal(size=(4, 3)), np.arange(4) % 2


def test_holdout_where_nobody_has_two_examples() -> None:
    experiment = Experiment(
        rounds=1,
        data={"holdout": 0.5},
        split={"clients": 6, "scheme": "iid", "min_examples": 1},
        local={"epochs": 1, "batch": 1},
        model={"name": "linear"},
        algorithm={"name": "fedavg"},
    )
    record = run(experiment, data=tiny()).rounds[0]
    assert record["test_accuracy"] is not None
    assert record.get("holdout_accuracy") is None


def test_a_cohort_of_empty_clients_is_no_divergence() -> None:
    """Clients without examples are allowed when asked for; a round that draws only such is an empty round."""
    experiment = Experiment(
        rounds=12,
        seed=1,
        split={
            "clients": 12,
            "scheme": "dirichlet_unbalanced",
            "beta": 0.05,
            "min_examples": 0,
            "allow_empty": True,
        },
        local={"epochs": 1, "batch": 1},
        server={"cohort": 1},
        model={"name": "linear"},
        algorithm={"name": "fedavg"},
    )
    finished = run(experiment, data=tiny(12))
    assert finished.status == "finished", finished.summary["why"]
