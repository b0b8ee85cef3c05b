"""FedCL against a transcription of its paper, on quadratics, and where its proxy set comes from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import neighbours_transcription as paper
import numpy as np
import pytest
import torch
from test_against_transcription import (
    CASES,
    TOLERANCE,
    Case,
    by_library,
    data,
    distance,
    federation,
    flat,
    problem,
    with_settings,
)
from test_quadratics import LOCAL_STEPS, away, end, fixed_point, step_size, world
from torch import Tensor

from fedgg.algorithms import FedCL
from fedgg.engines import Loop, Stacked
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin
from fedgg.lab.runner import play_round, run
from fedgg.lab.study import Study

LAM = 2.0  # moves the model about as much as the data do
SMALL = Experiment(
    rounds=3,
    seed=3,
    data={"proxy": 40},
    split={"clients": 5, "beta": 0.2},
    model={"name": "mlp", "hidden": 8},
    algorithm={"name": "fedcl"},
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_library_is_the_paper(case: Case) -> None:
    case = replace(case, proxy=10)
    found = by_library("fedcl", with_settings(lam=LAM), case)
    where = federation("fedavg", (), case).feed.proxy
    x, y = (torch.from_numpy(part[where]) for part in data(case.model)[:2])
    assert len(y) == 10
    expected = [flat(w) for w in paper.fedcl({"lam": LAM}, problem(case), (x, y))]
    assert max(distance(found, expected)) < TOLERANCE
    assert distance(by_library("fedavg", (), case), expected)[-1] > 1e-4


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_quadratics_end_where_sum_of_updates_is_zero_under_their_own_fisher_information(momentum: float) -> None:
    """The server's Fisher information at the end, by hand, makes a linear recursion whose fixed point is the end."""
    w = end(FedCL(lam=0.5), momentum, steps=350 if momentum else 700)
    x, y = torch.cat(world().x)[::5], torch.cat(world().y)[::5]
    fisher = ((x @ w[0] - y)[:, None] * x).square().mean(0)
    assert away(w, elastic_fixed_point(0.5 * fisher, momentum)) < 1e-6
    assert away(w, fixed_point(momentum)) > 2e-4


def elastic_fixed_point(fisher: Tensor, momentum: float) -> Tensor:
    """sum p_i (w_i(w) - w) = 0 with w_i(w) = M_i w + c_i, the recursion run on a basis and on zero."""
    left, right, eye = torch.zeros(5, 5).double(), torch.zeros(5, 1).double(), torch.eye(5).double()
    for x, y in zip(world().x, world().y, strict=True):
        a, b = x.T @ x / len(x), (x.T @ y / len(x))[:, None]
        ends = []
        for start, target in ((eye, 0 * eye), (0 * b, b)):
            w, velocity = start, torch.zeros_like(start)
            for _ in range(LOCAL_STEPS):
                velocity = momentum * velocity + a @ w - target + fisher[:, None] * (w - start)
                w = w - step_size(momentum) * velocity
            ends.append(w)
        left, right = left + len(x) * (eye - ends[0]), right + len(x) * ends[1]
    solution: Tensor = torch.linalg.solve(left, right)
    return solution.T


def test_the_penalty_by_hand() -> None:
    """One proxy example (1, 2) of class 0, a model of zeros: p = 1/2, gradients -1/2, -1, 1/2, 1 and their squares."""
    module = torch.nn.Linear(2, 2, bias=False).double()
    torch.nn.init.zeros_(module.weight)
    x, y = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]), np.array([0, 0, 0])
    chosen = Experiment(
        data={"normalise": "none", "proxy": 1},
        split={"scheme": "iid", "clients": 1, "min_examples": 1},
        local={"batch": 2},
        engine={"precision": "fp64"},
        algorithm={"name": "fedcl", "lam": 4.0},
    )
    built = build(chosen, model=module, data=(x, y, x, np.array([0, 1, 0])))
    state, record = play_round(built, begin(built), Loop())
    assert record["bytes_down"] == 2 * record["bytes_up"]
    w = np.zeros(4)
    grad_of = np.array([-1.0, -2.0, 1.0, 2.0])
    fisher, velocity = (0.5 * grad_of) ** 2, np.zeros(4)
    for _ in range(5):
        wrong = 1 / (1 + np.exp((w[0] - w[2]) + 2 * (w[1] - w[3])))
        velocity = 0.9 * velocity + wrong * grad_of + 4.0 * fisher * w
        w = w - 0.01 * velocity
    torch.testing.assert_close(state.server.w[0], torch.from_numpy(w), rtol=0, atol=1e-12)


def test_the_proxy_set_is_taken_out_of_the_split_and_out_of_nothing_else() -> None:
    built = build(SMALL.changed({"data.holdout": 0.2}))
    proxy = set(built.feed.proxy.tolist())
    assert len(proxy) == 40
    held = [set(own.tolist()) for own in (*built.feed.clients, *built.feed.held_out)]
    assert sum(len(own) for own in held) + 40 == len(built.feed.y)
    assert set().union(*held, proxy) == set(range(len(built.feed.y)))
    whole = build(SMALL.changed({"data.proxy": 0, "algorithm.name": "fedavg"}))
    assert built.origin.split_hash() == whole.origin.split_hash()  # the same split, less the server's examples
    assert all(len(own) >= 10 for own in build(SMALL).feed.clients)
    seen = torch.cat([x for x, _ in built.feed.proxy_chunks()])
    torch.testing.assert_close(seen, built.feed.scaling(built.feed.x[torch.from_numpy(built.feed.proxy)]))


def test_which_examples_the_server_takes_is_a_function_of_the_seed() -> None:
    first, again, other = (build(SMALL.changed({"seed": seed})).feed.proxy for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_small_clients_give_nothing_away() -> None:
    with pytest.raises(UserError, match=r"data\.proxy = 1400 is more than the \d+ examples clients can spare"):
        build(SMALL.changed({"data.proxy": 1400, "split.min_examples": 50}))


def test_without_a_proxy_set_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"FedCL needs examples at the server: set data\.proxy"):
        build(SMALL.changed({"data.proxy": 0}))
    variants = {"FedAvg": {"algorithm": {"name": "fedavg"}}, "FedCL": {"algorithm": {"name": "fedcl"}}}
    with pytest.raises(UserError, match=r"set data\.proxy"):  # before any of a study's runs begins
        Study(Experiment(), variants, (0,), "FedAvg")


def test_a_run_says_which_examples_the_server_had_and_resumes(tmp_path: Path) -> None:
    straight = run(SMALL.changed({"rounds": 4}))
    run(SMALL.changed({"rounds": 2}), out=tmp_path / "run")
    resumed = run(SMALL.changed({"rounds": 4}), out=tmp_path / "run")
    for name, tensor in straight.weights.items():
        assert torch.equal(resumed.weights[name], tensor)
    built = build(SMALL)
    with np.load(tmp_path / "run" / "partition.npz") as stored:
        assert np.array_equal(stored["proxy"], built.feed.proxy)
    labels = built.feed.y[torch.from_numpy(built.feed.proxy)]
    stored = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert stored["proxy"] == labels.bincount(minlength=10).tolist()


def test_a_proxy_set_that_is_off_leaves_no_trace_in_an_experiments_identity() -> None:
    plain = SMALL.changed({"data.proxy": 0, "algorithm.name": "fedavg"})
    assert "proxy" not in plain._identity(path=True)["data"]
    assert plain.hash() != plain.changed({"data.proxy": 5}).hash()
    assert plain.trajectory() != plain.changed({"data.proxy": 5}).trajectory()


def test_the_server_measures_the_same_for_every_engine() -> None:
    ends = []
    for engine in (Loop(), Stacked("fp64")):
        built = build(SMALL.changed({"engine.precision": "fp64", "algorithm.lam": 10.0}))
        state = begin(built)
        for _ in range(3):
            state, _ = play_round(built, state, engine)
        ends.append(state.server.w)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-10)
