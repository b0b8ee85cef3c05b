"""Where training ends when some of ten clients attack, in a world whose optimum is known."""

from __future__ import annotations

import numpy as np
import pytest

from fedgg.aggregation import Attack, ClientPrivacy, CoordinateMedian, NormClip, TrimmedMean
from fedgg.algorithms import FedAvg
from fedgg.check.toy_problems import Quadratics
from fedgg.core.optimisers import sgd
from fedgg.core.random_choices import Work
from fedgg.core.server import PLAIN, Collector, ServerState
from fedgg.engines import Loop, RoundJob
from fedgg.lab.aggregation import Aggregation
from fedgg.lab.one_round import State, close, train

WORLD = Quadratics.draw(clients=10, disagreement=0.1)
GOAL = WORLD.optimum()


def left(collector: Collector, attackers: int, kind: str = "sign_flip", rounds: int = 25) -> float:
    """Of the way to the optimum, after so many rounds of four full-batch steps."""
    algorithm, net, feed, examples = FedAvg(), WORLD.net(), WORLD.feed(), [len(x) for x in WORLD.x]
    attack = Attack.draw(kind, 10.0, attackers, np.arange(10), seed=0) if attackers else None  # type: ignore[arg-type]
    state = State(0, ServerState(net.start, {}, algorithm.server_memory(net.start)), {}, {})
    for number in range(rounds):
        job = RoundJob(
            algorithm=algorithm,
            net=net,
            data=feed,
            work=Work(epochs=4, batch=None),
            optimiser=sgd(0.2, 0.0, 0.0),
            policy="average",
            seed=0,
            round=number,
            cohort=list(range(10)),
            w=state.server.w,
            buffers={},
            down={},
            memory={},
            kept_buffers={},
        )
        state, _ = close(state, job, examples, train(job, Loop()), aggregation=Aggregation(collector, attack))
        if float(state.server.w.norm()) > 1e6:
            return float("inf")
    return float((state.server.w - GOAL).norm() / GOAL.norm())


RULES = [CoordinateMedian(), TrimmedMean(0.3), NormClip(None), NormClip(0.2)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("attackers", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_rules_hold(rule: Collector, attackers: int) -> None:
    assert left(rule, attackers) < 0.2


@pytest.mark.parametrize("attackers", [2, 3])
def test_fedavg_does_not(attackers: int) -> None:
    assert left(PLAIN, attackers, rounds=10) > 1
    assert left(PLAIN, attackers, "noise", rounds=10) > 0.5


def test_neutral_rules_end_where_fedavg_does() -> None:
    fedavg = left(PLAIN, 0, rounds=8)
    assert left(NormClip(1e9), 0, rounds=8) == fedavg
    means = (left(rule, 0, rounds=8) for rule in (ClientPrivacy(1e9, 0.0, 0), TrimmedMean(0.0)))
    assert next(means) == pytest.approx(next(means), rel=1e-9)


def test_noise_costs_what_it_must() -> None:
    """Little noise is close to none, much noise keeps the model off the optimum."""
    none, little, much = (left(ClientPrivacy(0.5, noise, 0), 0, rounds=15) for noise in (0.0, 0.01, 10.0))
    assert little == pytest.approx(none, abs=0.02)
    assert 0.1 < much < 10
