"""FedCurv by hand, against a transcription of its paper, and on quadratics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import neighbours_transcription as paper
import pytest
import torch
from plain_rounds import compare
from test_against_transcription import PARTIAL, Case, by_library, every_case, problem, with_settings
from test_quadratics import EVERYBODY, LOCAL_STEPS, end, fixed_point, step_size, world
from torch import Tensor

from fedgg.algorithms import FedCurv
from fedgg.core.algorithm import Client, Server
from fedgg.core.local import LocalEnd
from fedgg.engines import Loop, RoundJob
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import State, begin, next_job
from fedgg.lab.runner import play_round

LAM = 0.3  # moves the model about as much as the data do


@every_case
def test_as_transcribed(case: Case) -> None:
    compare("fedcurv", with_settings(lam=LAM), case, lambda given: paper.fedcurv({"lam": LAM}, given))


def test_the_first_round_is_fedavg() -> None:
    """Nobody has said anything before it."""
    ours, fedavg = (by_library(*which, PARTIAL) for which in (("fedcurv", with_settings(lam=LAM)), ("fedavg", ())))
    assert torch.equal(ours[0], fedavg[0])


def test_its_own_part_is_subtracted_only_where_it_is_inside() -> None:
    """Clients of the case PARTIAL return after a round without them: subtracting then would be wrong."""
    cohorts = problem(PARTIAL).cohorts
    pauses = [
        (client, r)
        for r, cohort in enumerate(cohorts)
        for client in cohort
        if r and client not in cohorts[r - 1] and any(client in earlier for earlier in cohorts[:r])
    ]
    assert pauses


def test_the_penalty_by_hand() -> None:
    """Two parameters, two others: I = (1, 2) at (3, 0) and I = (0, 4) at (5, 1), from w = (1, 1)."""
    kind, w = FedCurv(lam=0.5), torch.tensor([[1.0, 1.0]])
    theirs = {"curvature": torch.tensor([[1.0, 2.0], [0.0, 4.0]]), "weighted": torch.tensor([[3.0, 0.0], [0.0, 4.0]])}
    share = torch.tensor([[0.5], [0.5]])
    server = Server(kind.server_memory(w), 3, 1.0, 0)
    moved, memory = kind.aggregate(w, {"delta": torch.tensor([[2.0, 0.0], [0.0, 2.0]]), **theirs}, share, server)
    assert moved.tolist() == [[2.0, 2.0]]
    assert memory["curvature"].tolist() == [[1.0, 6.0]]
    assert memory["weighted"].tolist() == [[3.0, 4.0]]
    # lambda sum (w - w_j)^T I_j (w - w_j): gradient 2 * 0.5 * ((1 * (1 - 3)), (2 * 1 + 4 * 0)) = (-2, 2)
    for own_round, expected in ((0.0, [-2.0, 2.0]), (1.0, [0.0, 0.0])):  # the second's part: (0, 4), (0, 4) ...
        own = {name: rows[1:] for name, rows in theirs.items()}
        if own_round == 1.0:  # ... and alone in the last round, nothing is left
            memory = own
        client = stand(kind, w, kind.send_down(w, replace(server, memory=memory)), own, own_round)
        assert kind.steer(torch.zeros_like(w), w, client).tolist() == [expected]


def stand(kind: FedCurv, w: Tensor, down: dict[str, Tensor], own: dict[str, Tensor], own_round: float) -> Client:
    one = torch.ones(1, 1)
    memory = own | {"until": own_round * one}  # now it is round 1
    nothing: dict[str, Any] = {"notes": {}, "sums": {}, "net": None, "probe": None, "last_step": None}
    columns: dict[str, Any] = dict.fromkeys(
        ("steps", "effective_steps", "lr", "momentum", "examples", "round", "step"), one
    )
    client = Client(down=down, memory=memory, w=w, **columns, **nothing)
    return replace(client, notes=kind.begin(w, client))


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_quadratics_end_where_the_papers_objective_lets_them(momentum: float) -> None:
    """Iterated with matrices, each other client a penalty of its own; far from FedAvg's end, and at rest there.

    The Fisher information of a squared error is its residual's square times the input's: with the disagreement of this
    world it is large, and a penalty of weight 1 is beyond what steps of this length follow.
    """
    lam, w = 0.05, torch.zeros(5).double()
    last: list[tuple[Tensor, Tensor]] = []
    sizes = torch.tensor([float(len(x)) for x in world().x]).double()
    for number in range(100):
        now = []
        for i, (x, y) in enumerate(zip(world().x, world().y, strict=True)):
            local, velocity = w.clone(), torch.zeros_like(w)
            for _ in range(LOCAL_STEPS):
                grad = x.T @ (x @ local - y) / len(x)
                for j, (model, curvature) in enumerate(last):
                    grad = grad + (2 * lam * curvature * (local - model) if j != i else 0)
                velocity = momentum * velocity + grad
                local = local - step_size(momentum) * velocity
            now.append((local, ((x @ local - y)[:, None] * x).square().mean(0)))
        before, w = w, (torch.stack([model for model, _ in now]) * (sizes / sizes.sum())[:, None]).sum(0)
        last = now
        if number == 29:
            after_30 = w
    assert float((w - before).norm()) < 1e-8
    found = end(FedCurv(lam=lam), momentum, EVERYBODY, steps=150)
    torch.testing.assert_close(found[0], after_30, rtol=0, atol=1e-10)
    assert float((w - fixed_point(momentum)[0]).norm()) > 0.01


def test_three_times_the_bytes_of_fedavg() -> None:
    records = {}
    for name in ("fedavg", "fedcurv"):
        experiment = Experiment(
            rounds=1, split={"clients": 4}, model={"name": "mlp", "hidden": 8}, algorithm={"name": name}
        )
        federation = build(experiment)
        assert any("1.20 times FedAvg's arithmetic" in notice for notice in federation.notices) == (name == "fedcurv")
        _, records[name] = play_round(federation, begin(federation), Loop())
    assert records["fedcurv"]["bytes_up"] == 3 * records["fedavg"]["bytes_up"]
    assert records["fedcurv"]["bytes_down"] == 3 * records["fedavg"]["bytes_down"]
    assert records["fedcurv"]["readings"]["penalty_gradient"] == 0  # the first round


def test_a_client_that_was_lost_has_no_part_in_the_sums() -> None:
    """What it sent is left out, and its memory is of a round before: it does not subtract what is not there."""
    experiment = Experiment(split={"clients": 3}, model={"name": "mlp", "hidden": 4}, algorithm={"name": "fedcurv"})
    federation = build(experiment)
    state, _ = play_round(federation, begin(federation), Lossy(client=1))
    assert set(state.memory) == {0, 2}
    total = sum(memory["curvature"] for memory in state.memory.values())
    torch.testing.assert_close(state.server.memory["curvature"], total)
    opened(state, federation)


def opened(state: State, federation: Federation) -> None:
    """In the next round the lost one sees both others, and each of the others one."""
    job, memory = next_job(federation, state), state.server.memory
    for client in job.cohort:
        own = job.memory.get(client) or federation.algorithm.client_memory(job.w)
        client_view = stand(FedCurv(), job.w, job.down, own, float(own["until"]))
        mine = 0 * memory["curvature"] if client == 1 else own["curvature"]
        torch.testing.assert_close(client_view.notes["curvature"], memory["curvature"] - mine)


class Lossy(Loop):
    """Loses a client on the way."""

    def __init__(self, client: int):
        self._client = client

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd]]:
        for client, done in super().train(job):
            nan = {name: rows * float("nan") for name, rows in done.up.items()}
            yield client, replace(done, up=nan) if client == self._client else done
