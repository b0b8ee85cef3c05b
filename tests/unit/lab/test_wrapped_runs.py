"""Whole runs with wrappers: every engine, some clients a round, a stop and a resume, several of them in one stack."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from earlier_folders import without_checksums
from observers import Callbacks
from torch import nn

from fedgg.aggregation import RULES
from fedgg.algorithms import FedAvg
from fedgg.core.algorithm import Client, Server
from fedgg.core.tensor_rows import Rows
from fedgg.data.readers import load_digits
from fedgg.engines import Fused, Loop, Stacked, Workers
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.one_round import State, begin, next_job
from fedgg.lab.parallel_runs import run_together
from fedgg.lab.run_processes import Job
from fedgg.lab.runner import play_round, run

ACCOUNTED = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None,
    reason='the accountant is not installed: pip install "fedgg[privacy]"',
)
BASE = Experiment(
    rounds=4,
    split={"clients": 6, "beta": 0.5},
    model={"name": "mlp", "hidden": 8},
    local={"epochs": 1, "batch": 32, "lr": 0.05},
    server={"cohort": 4, "evaluate_every": 3},
    algorithm={"name": "scaffold", "variate_mean": "uniform"},
)
NOISY = {"privacy.noise": 2.0, "privacy.clip": 0.5}
FLIPPED = {"attack.kind": "sign_flip", "attack.clients": 2, "attack.scale": 5.0}
WRAPPERS: dict[str, dict[str, Any]] = {
    "noise": NOISY,
    "clip alone": {"privacy.noise": 0.0, "privacy.clip": 0.2},
    "median under attack": {"robust.rule": "median", **FLIPPED},
    "trimmed mean of noise": {"robust.rule": "trimmed_mean", "attack.kind": "noise"},
    "norm clip and nan": {"robust.rule": "norm_clip", "attack.kind": "nan", "attack.clients": 2},
    "attacked privacy": {"privacy.noise": 0.0, **FLIPPED},
}
WRAPPERS |= {  # rules that are not among those above
    rule: {"robust.rule": rule, **FLIPPED}
    for rule in RULES
    if rule not in {wrapper.get("robust.rule") for wrapper in WRAPPERS.values()}
}
EACH = [pytest.param(name, marks=[ACCOUNTED] if name == "noise" else []) for name in WRAPPERS]


def played(experiment: Experiment, engine: Any, rounds: int = 3) -> State:
    federation = build(experiment)
    state = begin(federation)
    for _ in range(rounds):
        state, _ = play_round(federation, state, engine)
    return state


def same(one: State, two: State, tolerance: float = 0.0) -> None:
    assert torch.allclose(one.server.w, two.server.w, rtol=0, atol=tolerance)
    assert one.memory.keys() == two.memory.keys()
    for name, row in one.server.memory.items():
        assert torch.allclose(row, two.server.memory[name], rtol=0, atol=tolerance), name


@pytest.mark.parametrize("name", EACH)
def test_every_engine_has_the_loops_numbers(name: str) -> None:
    experiment = BASE.changed({**WRAPPERS[name], "engine.precision": "fp64"})
    alone = played(experiment, Loop())
    assert not torch.equal(alone.server.w, played(BASE.changed({"engine.precision": "fp64"}), Loop()).server.w)
    same(played(experiment, Stacked()), alone, 1e-10)
    fused = played(experiment, Fused())
    same(fused, alone, 1e-10)
    with Workers(2) as workers:
        same(played(experiment, workers), fused)


@pytest.mark.parametrize("name", EACH)
def test_resumed_is_uninterrupted_bit_for_bit(name: str, tmp_path: Path) -> None:
    experiment = BASE.changed({**WRAPPERS[name], "server.evaluate_every": 1})
    straight = run(experiment, out=tmp_path / "straight")
    run(experiment.changed({"rounds": 2}), out=tmp_path / "halves")
    resumed = run(experiment, out=tmp_path / "halves")
    for key, tensor in straight.weights.items():
        assert torch.equal(resumed.weights[key], tensor), key
    lines = [[{**record, "seconds": 0} for record in one.rounds] for one in (straight, resumed)]
    assert lines[0] == lines[1]


@ACCOUNTED
def test_different_wrappers_train_in_one_stack(tmp_path: Path) -> None:
    """They differ in what happens after training; together they have the numbers they have alone."""
    base = BASE.changed({"engine.name": "stacked", "engine.precision": "fp64"})
    experiments = {"none": base, **{name: base.changed(wrapper) for name, wrapper in WRAPPERS.items()}}
    data = load_digits()
    first, *others = [next_job(f, begin(f)) for f in (build(e, data=data) for e in experiments.values())]
    assert all(Stacked()._can_train_together(first, other) for other in others)
    jobs = [Job(name, e, tmp_path / name.replace(" ", "-"), None) for name, e in experiments.items()]
    run_together(jobs, Observer())
    for job in jobs:
        together, alone = run(job.experiment, out=job.folder), run(job.experiment)
        assert len(together.rounds) == 4
        for key, tensor in alone.weights.items():
            assert torch.allclose(together.weights[key], tensor, rtol=0, atol=1e-10), (job.name, key)


@dataclass(frozen=True)
class Listening(FedAvg):
    """Writes down what the server says of the cohort, and how many rows there are."""

    heard: list[tuple[str, float, int]] = field(default_factory=list)

    def send_down(self, w: torch.Tensor, server: Server) -> Rows:
        self.heard.append(("down", server.coverage, 0))
        return {}

    def aggregate(self, w: torch.Tensor, up: Rows, share: torch.Tensor, server: Server) -> tuple[torch.Tensor, Rows]:
        self.heard.append(("up", server.coverage, len(share)))
        return super().aggregate(w, up, share, server)


@pytest.mark.parametrize(
    ("wrapper", "rows"), [({"privacy.noise": 0.0}, [4, 4]), ({"robust.rule": "median"}, [3, 3]), ({}, [3, 3])]
)
def test_what_the_hub_says_of_the_cohort(wrapper: dict[str, Any], rows: list[int]) -> None:
    """Two of six send NaN: one of the four in each of these cohorts. Under privacy nothing tells that one was lost."""
    attacked = BASE.changed({"algorithm.name": "fedavg", "attack.kind": "nan", "attack.clients": 2, **wrapper})
    algorithm = Listening()
    federation = build(attacked, algorithm=algorithm)
    state = begin(federation)
    for _ in range(2):
        state, _ = play_round(federation, state, Loop())
    ups = [(coverage, count) for way, coverage, count in algorithm.heard if way == "up"]
    assert [count for _, count in ups] == rows
    equally = [count / 6 for count in rows]
    assert ([coverage for coverage, _ in ups] == equally) == bool(wrapper)
    downs = [coverage for way, coverage, _ in algorithm.heard if way == "down"]
    assert (downs == [4 / 6, 4 / 6]) == bool(wrapper)


# Clients without examples ---------------------------------------------------------------------------------------------


def sparse(**changes: Any) -> tuple[Experiment, tuple[Any, ...], list[int]]:
    """An experiment on 12 clients of which some hold nothing, its data, and the clients that hold something."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), np.arange(60) % 3
    split = {"scheme": "dirichlet_unbalanced", "clients": 12, "beta": 0.05, "min_examples": 0, "allow_empty": True}
    asked = BASE.changed({f"split.{key}": value for key, value in split.items()}).changed(
        {"engine.precision": "fp64", "server.cohort": None, "local.momentum": 0.0, **changes}
    )
    federation = build(asked.changed({"local.batch": 1}), data=(x, y, x, y))
    asked = asked.changed({"local.batch": max(federation.examples)})  # one batch a client, whatever its number
    owners = np.empty(60, int)
    for number, client in enumerate(federation.filled):
        owners[federation.feed.clients[client]] = number
    return asked, (x, y, x, y, owners), [int(client) for client in federation.filled]


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.name": "scaffold", "algorithm.variate_mean": "uniform"},
        {"algorithm.name": "scaffold", "robust.rule": "median"},
        {"algorithm.name": "scaffold", "privacy.noise": 0.0},
        {"algorithm.name": "feddyn", "algorithm.mean": "uniform"},
        {"algorithm.name": "feddyn", "robust.rule": "trimmed_mean"},
        {"algorithm.name": "scaffold", "algorithm.variate_mean": "uniform", "server.cohort": 0.5},
    ],
    ids=str,
)
def test_clients_without_examples_change_no_result(changes: dict[str, Any]) -> None:
    """The same federation without them, but for the order in which a client's one batch is added up."""
    asked, data, filled = sparse(**changes)
    assert 3 < len(filled) < 12
    without = asked.changed({"split.scheme": "given", "split.clients": len(filled)})
    one, two = (run(e, data=d) for e, d in ((asked, data[:4]), (without, data)))
    for key, tensor in two.weights.items():
        assert torch.allclose(one.weights[key], tensor, rtol=0, atol=1e-9), key


def test_attackers_are_drawn_from_clients_that_take_part() -> None:
    asked, data, filled = sparse(**{"attack.kind": "sign_flip", "attack.clients": 1})
    for count in range(1, len(filled) + 1):
        attack = build(asked.changed({"attack.clients": count}), data=data[:4]).aggregation.attack
        assert attack is not None
        assert len(attack.clients) == count
        assert attack.clients <= set(filled)
    with pytest.raises(UserError, match=f"attack.clients = 12 but only {len(filled)} of 12 clients hold examples"):
        build(asked.changed({"attack.clients": 12}), data=data[:4])


def test_clients_without_examples_are_named_and_are_not_small() -> None:
    asked, data, filled = sparse(**{"local.small_clients": "refuse"})
    smallest = min(size for size in build(asked.changed({"local.batch": 1}), data=data[:4]).examples if size)
    federation = build(asked.changed({"local.batch": smallest}), data=data[:4])
    assert f"{12 - len(filled)} of 12 clients hold no examples and never take part" in federation.notices
    assert federation.cohort_size == len(filled)


# Neutral settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedgg", "fedavgm"])
def test_a_bound_that_nobody_reaches_changes_no_bit(algorithm: str, cohort: int | None) -> None:
    base = BASE.changed({"algorithm.name": algorithm, "server.cohort": cohort})
    same(played(base.changed({"robust.rule": "norm_clip", "robust.clip": 1e9}), Loop()), played(base, Loop()))


@pytest.mark.parametrize("neutral", [{"privacy.noise": 0.0, "privacy.clip": 1e9}, {"robust.rule": "trimmed_mean"}])
def test_where_clients_are_alike_counting_them_equally_is_fedavg(neutral: dict[str, Any]) -> None:
    """An iid split of as many examples to each: here equal shares are shares by examples."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 5)), np.arange(120) % 3
    base = BASE.changed(
        {"split.scheme": "iid", "algorithm.name": "fedavg", "local.batch": 8, "engine.precision": "fp64"}
    )
    changed = base.changed(neutral)
    changed = changed.changed({"robust.trim": 0.0}) if changed.robust else changed
    ours, fedavg = (run(e, data=(x, y, x[:9], y[:9])) for e in (changed, base))
    for key, tensor in fedavg.weights.items():
        assert torch.allclose(ours.weights[key], tensor, rtol=0, atol=1e-13)


# The privacy budget ---------------------------------------------------------------------------------------------------


@ACCOUNTED
def test_every_round_says_what_was_spent() -> None:
    notices: list[str] = []
    finished = run(BASE.changed(NOISY), observer=Callbacks(notice=notices.append))
    spent = [record["epsilon"] for record in finished.rounds]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert finished.summary["epsilon"] == spent[-1]
    assert finished.summary["delta"] == 1e-5
    assert {place["accountant"] for place in (*finished.rounds, finished.summary)} == {"gaussian, known cohorts"}
    assert any("epsilon counts cohorts as known" in sentence for sentence in notices)  # SCAFFOLD's clients keep state
    assert any(f"4 rounds spend epsilon {spent[-1]:.2f}" in sentence for sentence in notices)
    assert "epsilon" not in run(BASE).rounds[0]
    unprotected = run(BASE.changed({"privacy.noise": 0.0}))
    assert unprotected.rounds[0]["epsilon"] is None
    assert unprotected.summary["epsilon"] is None
    assert "accountant" not in unprotected.summary
    stateless = run(BASE.changed(NOISY | {"algorithm.name": "fedavg"}))
    assert stateless.summary["accountant"] == "pld, secret cohorts"
    assert stateless.summary["epsilon"] < 0.9 * spent[-1]
    assert run(BASE.changed(NOISY | {"server.cohort": 6})).summary["accountant"] == "gaussian"


@ACCOUNTED
def test_a_run_stops_before_its_limit_and_goes_on_under_a_larger_one(tmp_path: Path) -> None:
    private = BASE.changed(NOISY)
    whole = run(private)
    limit = whole.rounds[1]["epsilon"]
    limited = private.changed({"privacy.epsilon_limit": limit})
    stopped = run(limited, out=tmp_path)
    assert stopped.status == "spent"
    assert f"round 3 would raise epsilon to {whole.rounds[2]['epsilon']:.2f}" in stopped.summary["why"]
    assert stopped.summary["epsilon"] == limit
    assert "test_accuracy" in stopped.rounds[-1], "the last model is looked at"
    assert run(limited, out=tmp_path).summary == stopped.summary
    further = run(private.changed({"privacy.epsilon_limit": 1e6}), out=tmp_path)
    assert further.status == json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    for key, tensor in whole.weights.items():
        assert torch.equal(further.weights[key], tensor)
    with pytest.raises(UserError, match="allows no round: the first one spends"):
        run(private.changed({"privacy.epsilon_limit": whole.rounds[0]["epsilon"] / 2}))
    before = (tmp_path / "config.toml").read_text()
    with pytest.raises(UserError, match="what is spent cannot be taken back"):
        run(limited, out=tmp_path)
    assert (tmp_path / "config.toml").read_text() == before, "the folder claims no limit that it has broken"


def as_of_old(folder: Path, epsilons: list[float]) -> None:
    """The folder as it was written when Rényi's was the only accountant, and was not named."""
    without_checksums(folder)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line, epsilon in zip(lines, epsilons, strict=True):
        del line["accountant"]
        line["epsilon"] = epsilon
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((folder / "summary.json").read_text())
    del summary["accountant"]
    (folder / "summary.json").write_text(json.dumps(summary | {"epsilon": epsilons[-1]}))


@ACCOUNTED
def test_an_old_private_run_keeps_its_figures_and_says_when_they_change(tmp_path: Path) -> None:
    private = BASE.changed(NOISY | {"algorithm.name": "fedavg", "rounds": 2})
    new = run(private, out=tmp_path)
    as_of_old(tmp_path, [20.0, 30.0])
    notices: list[str] = []
    again = run(private, out=tmp_path, observer=Callbacks(notice=notices.append))
    assert [record["epsilon"] for record in again.rounds] == [20.0, 30.0]
    assert again.summary["epsilon"] == json.loads((tmp_path / "summary.json").read_text())["epsilon"] == 30.0
    assert not any("was recorded by the accountant" in sentence for sentence in notices)

    further = run(private.changed({"rounds": 3}), out=tmp_path, observer=Callbacks(notice=notices.append))
    (sentence,) = (sentence for sentence in notices if "was recorded by the accountant" in sentence)
    assert "rounds 1 to 2 was recorded by the accountant 'rdp', 30.00 so far" in sentence
    assert f"by 'pld, secret cohorts', by which those 2 spent {new.summary['epsilon']:.2f}" in sentence
    assert sentence in json.loads((tmp_path / "resumes.jsonl").read_text().splitlines()[-1])["notes"]
    assert [record.get("accountant") for record in further.rounds] == [None, None, "pld, secret cohorts"]
    assert further.summary["epsilon"] == run(private.changed({"rounds": 3})).summary["epsilon"]


@ACCOUNTED
def test_an_old_run_under_a_limit(tmp_path: Path) -> None:
    """Within its limit by the accountant of its time it has ended well; where a better one allows more, it goes on."""
    private = BASE.changed(NOISY | {"algorithm.name": "fedavg", "rounds": 2})
    spent = [record["epsilon"] for record in run(private).rounds]
    run(private.changed({"privacy.epsilon_limit": 1.01 * spent[1]}), out=tmp_path / "ended")
    as_of_old(tmp_path / "ended", [spent[0] / 4, spent[1] / 4])
    below = private.changed({"privacy.epsilon_limit": 0.9 * spent[1]})
    (tmp_path / "ended" / "config.toml").write_text(below.to_toml())
    assert run(below, out=tmp_path / "ended").summary["epsilon"] == spent[1] / 4

    limited = private.changed({"privacy.epsilon_limit": 1.01 * spent[0]})
    assert run(limited, out=tmp_path / "spent").status == "spent"
    as_of_old(tmp_path / "spent", [1.9 * spent[1]])
    wider = private.changed({"privacy.epsilon_limit": 2 * spent[1]})
    (tmp_path / "spent" / "config.toml").write_text(wider.to_toml())
    assert run(wider, out=tmp_path / "spent").status == "finished"


@dataclass(frozen=True)
class Undeclared(FedAvg):
    """Keeps client state that `client_memory` does not have."""

    def finish(self, w: Any, client: Client) -> tuple[Rows, Rows]:
        return super().finish(w, client)[0], {"last": w}


@ACCOUNTED
def test_client_state_must_be_declared_where_epsilon_depends_on_it() -> None:
    with pytest.raises(UserError, match=r"Undeclared\.finish\(\) returns client state \(last\) that client_memory"):
        run(BASE.changed(NOISY), algorithm=Undeclared())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"robust.rule": "trimmed_mean", "robust.trim": 0.2}, "removes none"),
        ({"robust.rule": "median", "attack.kind": "noise", "attack.clients": 2}, "no rule holds against a majority"),
    ],
)
def test_a_rule_that_cannot_hold_is_named(changes: dict[str, Any], word: str) -> None:
    assert any(word in notice for notice in build(BASE.changed(changes)).notices)
    enough = BASE.changed({"robust.rule": "trimmed_mean", "robust.trim": 0.25, "attack.kind": "noise"})
    assert not any(word in notice for notice in build(enough).notices)


# What does not go together --------------------------------------------------------------------------------------------


class Worth(FedAvg):
    """Sends a number beside its update."""

    def finish(self, w: torch.Tensor, client: Client) -> tuple[Rows, Rows]:
        up, memory = super().finish(w, client)
        return up | {"worth": client.effective_steps}, memory


@pytest.mark.parametrize("wrapper", [{"privacy.noise": 0.0}, {"robust.rule": "norm_clip"}])
def test_a_number_beside_the_update_is_refused_before_anything_is_written(
    wrapper: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"Worth: .* also sends up 'worth' of size 1"):
        run(BASE.changed({"algorithm.name": "fedavg", **wrapper}), algorithm=Worth(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    median = BASE.changed({"algorithm.name": "fedavg", "robust.rule": "median"})
    assert run(median, algorithm=Worth()).status == "finished"


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def test_batch_statistics_would_travel_without_noise() -> None:
    private = BASE.changed({"privacy.noise": 0.0})
    for policy in ("average", "local"):
        with pytest.raises(UserError, match=rf"model.statistics = '{policy}' sends .* set model.statistics = 'frozen'"):
            run(private.changed({"model.statistics": policy}), model=normalised)
    assert run(private.changed({"model.statistics": "frozen"}), model=normalised).status == "finished"
    notices: list[str] = []
    run(BASE.changed({"robust.rule": "median"}), model=normalised, observer=Callbacks(notice=notices.append))
    assert any("not batch statistics" in sentence for sentence in notices)


def test_a_missing_accountant_is_noticed_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r'pip install "fedgg\[privacy\]"'):
        run(BASE.changed({"privacy.noise": 1.7, "algorithm.name": "fedavg"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run(BASE.changed({"privacy.noise": 0.0, "rounds": 1})).status == "finished"


# Attackers ------------------------------------------------------------------------------------------------------------


def test_attackers_are_recorded_and_nan_is_left_out_by_name(tmp_path: Path) -> None:
    notices: list[str] = []
    experiment = BASE.changed({"attack.kind": "nan", "attack.clients": 3})
    finished = run(experiment, out=tmp_path, observer=Callbacks(notice=notices.append))
    told = json.loads((tmp_path / "attackers.json").read_text())
    assert told["kind"] == "nan"
    assert len(told["clients"]) == 3
    for record in finished.rounds:
        assert set(record["attackers"]) <= set(told["clients"])
        assert [gone["client"] for gone in record["lost"]] == record["attackers"]
        assert not {line["client"] for line in record["clients"]} & set(told["clients"])
    named = re.findall(r"\d+", " ".join(re.findall(r"clients? ([\d, ]+) dropped", " ".join(notices))))
    assert sorted(map(int, named)) == sorted({gone["client"] for r in finished.rounds for gone in r["lost"]})
    assert not (tmp_path / "elsewhere" / "attackers.json").exists()
    run(BASE.changed({"rounds": 1}), out=tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / "attackers.json").exists()


DIGITS = Experiment(
    rounds=12,
    split={"clients": 10, "beta": 1.0},
    model={"name": "mlp", "hidden": 16},
    local={"epochs": 2, "batch": 32, "lr": 0.05},
    server={"evaluate_every": 12},
    algorithm={"name": "fedavg"},
)


@pytest.mark.parametrize("attackers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_on_digits_fedavg_breaks_and_the_rules_hold(attackers: int) -> None:
    attacked = DIGITS.changed({"attack.kind": "sign_flip", "attack.clients": attackers, "attack.scale": 10.0})
    broken = run(attacked)
    assert broken.status == "diverged" or broken.test_accuracy[-1] < 0.3
    settings = {"trimmed_mean": {"robust.trim": 0.3}}  # beside the defaults of the rules
    for rule in RULES:
        held = run(attacked.changed({"robust.rule": rule, **settings.get(rule, {})}))
        assert held.test_accuracy[-1] > 0.65, (rule, held.test_accuracy)
