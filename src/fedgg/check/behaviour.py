"""How an algorithm must behave over whole runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgg.algorithms import FedAvg
from fedgg.check.laws import Broken, Skipped, demand, demand_equal
from fedgg.check.toy_problems import Quadratics
from fedgg.core import sampling
from fedgg.core.algorithm import Algorithm
from fedgg.core.sampling import Work
from fedgg.core.server import first_state
from fedgg.core.sgd import SGD
from fedgg.engines import Engine, Fused, RoundJob, Workers
from fedgg.engines.base import Optimiser
from fedgg.errors import UserError
from fedgg.files import parse_toml
from fedgg.lab.build import build
from fedgg.lab.checkpoint import read_checkpoint, write_checkpoint
from fedgg.lab.config import Experiment
from fedgg.lab.federation import Federation
from fedgg.lab.name_resolution import given_algorithm
from fedgg.lab.run_state import State, begin, close, server_of, train
from fedgg.lab.runner import play_round, with_names


def digits(algorithm: Algorithm, rounds: int, cohort: int | None = None, precision: str = "fp32") -> Experiment:
    """A small federation on real data, with a proxy set where the algorithm asks for one."""
    return Experiment(
        rounds=rounds,
        data={"proxy": 50 if algorithm.needs_proxy else 0},
        split={"clients": 5, "beta": 0.3},
        model={"name": "mlp", "hidden": 16},
        local={"epochs": 1, "batch": 32, "lr": 0.05},
        server={"cohort": cohort, "evaluate_every": rounds},
        engine={"precision": precision},
    )


def neutral_is_fedavg(algorithm: Algorithm) -> None:
    try:
        neutral = algorithm.neutral()
    except UserError as error:
        raise Broken(f"neutral() cannot be made: {error}") from error
    if neutral is None:
        raise Skipped("neutral() names no setting under which it is FedAvg")
    _demand_runnable(neutral)
    for cohort, decay in ((None, 0.0), (3, 0.001)):  # with momentum, without and with weight decay beside it
        experiment = digits(algorithm, 3, cohort).changed({"local.weight_decay": decay})
        ours, fedavg = (_play(build(experiment, algorithm=one), 3) for one in (neutral, FedAvg()))
        demand_equal(ours.server.w, fedavg.server.w, f"the model after three rounds (weight decay {decay:g})")


def _demand_runnable(neutral: Algorithm) -> None:
    """Its settings are accepted, and come back from a config.toml as they were."""
    try:
        asked = with_names(Experiment(), None, None, given_algorithm(neutral))
    except UserError as error:
        raise Broken(f"neutral() cannot be run: {error}") from error
    settings = Experiment(**parse_toml(asked.to_toml())).algorithm.settings
    demand(settings == vars(neutral), f"of neutral()'s settings {vars(neutral)} a config.toml keeps {settings}")


def resumed_is_uninterrupted(algorithm: Algorithm) -> None:
    """What a checkpoint holds is all there is to know."""
    federation = build(digits(algorithm, 4, cohort=3), algorithm=algorithm)
    straight = _play(federation, 4)
    halfway = _play(federation, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_checkpoint(path, halfway, "check")
        restored = read_checkpoint(path, ["check"], torch.device("cpu"))
    resumed = _play(build(digits(algorithm, 4, cohort=3), algorithm=algorithm), 2, restored)
    demand_equal(resumed.server.w, straight.server.w, "the model after four rounds")
    for name, rows in straight.server.memory.items():
        demand_equal(resumed.server.memory[name], rows, f"the server's {name}")


def clients_may_miss_rounds(algorithm: Algorithm) -> None:
    """Two of five clients a round: everything stays finite, and nobody has a memory who was never called."""
    federation = build(digits(algorithm, 5, cohort=2), algorithm=algorithm)
    state, called = begin(federation), set[int]()
    for number in range(5):
        called |= set(sampling.cohort(0, number, 5, 2))
        state, record = play_round(federation, state, Fused())
        demand(not record["lost"], f"round {number + 1}: {record['lost']}")
        demand(
            set(state.memory) <= called,
            f"clients {sorted(set(state.memory) - called)} have a memory but were not called",
        )


def quadratics_come_closer(algorithm: Algorithm) -> None:
    """Towards the optimum of what it solves, with and without momentum, with all clients and with half of them."""
    world = Quadratics.draw(disagreement=0.3)
    goal = world.optimum(algorithm.solves())
    for momentum in (0.0, 0.9):
        for cohort in (4, 2):
            end = on_quadratics(algorithm, world, steps=750, momentum=momentum, cohort=cohort)
            left = float((end - goal).norm() / goal.norm())
            setting = f"momentum {momentum}, {cohort} of 4 clients"
            demand(left < 0.35, f"{setting}: after 750 local steps still {left:.2f} of the way from the optimum")


def learns_digits(algorithm: Algorithm) -> None:
    """Far better than a guess after a few rounds (one full-batch step a round is allowed to be slow)."""
    experiment = digits(algorithm, 12)
    federation = build(experiment, algorithm=algorithm)
    patience = 1 if federation.work.batch else 8
    federation = build(digits(algorithm, 12 * patience), algorithm=algorithm)
    state = begin(federation)
    record: dict[str, Any] = {}
    while state.rounds_done < federation.experiment.rounds:
        state, record = play_round(federation, state, Fused())
    demand(
        record["test_accuracy"] > 0.5,
        f"only {100 * record['test_accuracy']:.0f}% of the digits after {state.rounds_done} rounds",
    )


def on_quadratics(
    algorithm: Algorithm,
    world: Quadratics,
    *,
    steps: int,
    momentum: float,
    cohort: int = 4,
    lr: float = 0.04,
    batch: int | None = None,
    epochs: int = 5,
) -> Tensor:
    """The model after so many local epochs; in full batches, only the algorithm decides where training ends."""
    net, feed, examples = world.net(hidden=algorithm.needs_representation), world.feed(), [len(x) for x in world.x]
    work = algorithm.work(Work(epochs, batch))
    state = State(0, first_state(algorithm, net.start, {}), {}, {})
    worth = SGD.of(lr, momentum, 0.0, net.start).effective_steps(torch.full((1, 1), float(work.epochs)))
    for number in range(steps // work.epochs):
        invited = sampling.cohort(0, number, len(examples), cohort)
        server = server_of(state, net, feed, examples, invited)
        job = RoundJob(
            algorithm=algorithm,
            net=net,
            data=feed,
            work=work,
            optimiser=Optimiser(lr * work.epochs / float(worth), momentum, 0.0),  # as far a round as without momentum
            policy="average",
            seed=0,
            round=number,
            cohort=invited,
            w=algorithm.broadcast(state.server.w, server),
            buffers={},
            down=algorithm.send_down(state.server.w, server),
            memory=state.memory,
            kept_buffers={},
        )
        state, _ = close(state, job, examples, train(job, Fused()))
    return world.coefficients(net, state.server.w)


def workers_repeat_the_loop(algorithm: Algorithm) -> None:
    """Nothing is remembered in a process: in this one, or in two that take whichever client comes next."""
    federation, said = build(digits(algorithm, 3, cohort=3), algorithm=algorithm), list[str]()
    alone = _play(federation, 3)
    with Workers(2, notice=said.append) as workers:
        shared = _play(federation, 3, engine=workers)
    if said:
        raise Skipped(said[0])
    demand_equal(shared.server.w, alone.server.w, "the model after three rounds")
    for client, memory in alone.memory.items():
        for name, rows in memory.items():
            demand_equal(shared.memory[client][name], rows, f"the {name} of client {client}")


def _play(federation: Federation, rounds: int, state: State | None = None, engine: Engine | None = None) -> State:
    state = state or begin(federation)
    for _ in range(rounds):
        state, _ = play_round(federation, state, engine or Fused())
    return state
