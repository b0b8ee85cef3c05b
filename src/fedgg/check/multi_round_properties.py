"""Properties of an algorithm over several rounds."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgg.algorithms import FedAvg
from fedgg.check.hook_properties import Broken, Skipped, demand, demand_equal
from fedgg.check.toy_problems import Quadratics
from fedgg.core import random_choices
from fedgg.core.algorithm import Algorithm
from fedgg.core.optimisers import SGD, sgd
from fedgg.core.random_choices import Work
from fedgg.core.server import ServerState
from fedgg.engines import Engine, Fused, RoundJob, Workers
from fedgg.errors import UserError
from fedgg.files import parse_toml
from fedgg.lab.build import Federation, build
from fedgg.lab.checkpoint import read_checkpoint, write_checkpoint
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import given_algorithm
from fedgg.lab.one_round import State, begin, close, server_of, train
from fedgg.lab.runner import play_round, with_names


def digits(algorithm: Algorithm, rounds: int, cohort: int | None = None, precision: str = "fp32") -> Experiment:
    """A small federation on real data, with a proxy set if the algorithm needs one."""
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
        _demand_fedavg(neutral, experiment, f"weight decay {decay:g}")


def _demand_fedavg(neutral: Algorithm, experiment: Experiment, setting: str) -> None:
    ours = _run(build(experiment, algorithm=neutral), 3)
    demand_equal(ours.server.w, _by_fedavg(experiment.to_toml()), f"the model after three rounds ({setting})")


@cache
def _by_fedavg(experiment: str) -> Tensor:
    """The model after three rounds of the experiment in this TOML text: the same for every algorithm checked."""
    return _run(build(Experiment(**parse_toml(experiment)), algorithm=FedAvg()), 3).server.w


def _demand_runnable(neutral: Algorithm) -> None:
    """Its settings are valid, and unchanged after writing and reading a config.toml."""
    try:
        experiment = with_names(Experiment(), None, None, given_algorithm(neutral))
    except UserError as error:
        raise Broken(f"neutral() cannot be run: {error}") from error
    settings = Experiment(**parse_toml(experiment.to_toml())).algorithm.settings
    demand(settings == vars(neutral), f"of neutral()'s settings {vars(neutral)} a config.toml keeps {settings}")


def resumed_equals_uninterrupted(algorithm: Algorithm) -> None:
    """A checkpoint holds the whole state."""
    _demand_resumable(algorithm, digits(algorithm, 4, cohort=3))


def _demand_resumable(algorithm: Algorithm, experiment: Experiment) -> None:
    federation = build(experiment, algorithm=algorithm)
    uninterrupted = _run(federation, 4)
    halfway = _run(federation, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_checkpoint(path, halfway, "check")
        restored = read_checkpoint(path, ["check"], torch.device("cpu"))
    resumed = _run(build(experiment, algorithm=algorithm), 2, restored)
    demand_equal(resumed.server.w, uninterrupted.server.w, "the model after four rounds")
    for name, rows in uninterrupted.server.memory.items():
        demand_equal(resumed.server.memory[name], rows, f"the server's {name}")


def clients_may_miss_rounds(algorithm: Algorithm) -> None:
    """With two of five clients a round: everything stays finite, and only clients that took part have state."""
    federation = build(digits(algorithm, 5, cohort=2), algorithm=algorithm)
    state, participants = begin(federation), set[int]()
    for number in range(5):
        participants |= set(random_choices.cohort(0, number, 5, 2))
        state, record = play_round(federation, state, Fused())
        demand(not record["lost"], f"round {number + 1}: {record['lost']}")
        demand(
            set(state.memory) <= participants,
            f"clients {sorted(set(state.memory) - participants)} have a memory but did not take part",
        )


def approaches_optimum_of_quadratics(algorithm: Algorithm) -> None:
    """The optimum named by `solves()`; with and without momentum, with all clients and with half of them."""
    if algorithm.needs_classes:
        raise Skipped("it is defined for classification")
    world = Quadratics.draw(disagreement=0.3)
    goal = world.optimum(algorithm.solves())
    for momentum in (0.0, 0.9):
        for cohort in (4, 2):
            end = on_quadratics(algorithm, world, steps=750, momentum=momentum, cohort=cohort)
            distance = float((end - goal).norm() / goal.norm())
            setting = f"momentum {momentum}, {cohort} of 4 clients"
            left = f"after 750 local steps the distance to the optimum is still {distance:.2f} of the initial one"
            demand(distance < 0.35, f"{setting}: {left}")


def holds_under_adamw(algorithm: Algorithm) -> None:
    """Where clients train by AdamW and keep its state: neutral is FedAvg, resumed is uninterrupted, and it learns."""
    if reason := algorithm.needs_sgd():
        raise Skipped(f"it is defined for SGD: {reason}")
    adamw = {"optimiser.name": "adamw", "optimiser.state": "kept", "local.lr": 0.01, "local.weight_decay": 0.01}
    neutral = algorithm.neutral()
    if neutral is not None and not neutral.needs_sgd():
        _demand_fedavg(neutral, digits(algorithm, 3, cohort=3).changed(adamw), "AdamW")
    _demand_resumable(algorithm, digits(algorithm, 4, cohort=3).changed(adamw))
    _demand_learning(algorithm, adamw)


def learns_digits(algorithm: Algorithm) -> None:
    """Far better than chance after 12 rounds, or 96 for algorithms with one full-batch step a round."""
    _demand_learning(algorithm, {})


def _demand_learning(algorithm: Algorithm, changes: dict[str, Any]) -> None:
    full_batch = build(digits(algorithm, 12), algorithm=algorithm).work.batch is None
    federation = build(digits(algorithm, 96 if full_batch else 12).changed(changes), algorithm=algorithm)
    state = begin(federation)
    record: dict[str, Any] = {}
    while state.rounds_done < federation.experiment.rounds:
        state, record = play_round(federation, state, Fused())
    demand(
        record["test_accuracy"] > 0.5,
        f"test accuracy is only {100 * record['test_accuracy']:.0f}% after {state.rounds_done} rounds",
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
    """The model after `steps` local epochs; with full batches the result depends on the algorithm only."""
    net, feed, examples = world.net(hidden=algorithm.needs_representation), world.feed(), [len(x) for x in world.x]
    work = algorithm.work(Work(epochs, batch))
    state = State(0, ServerState(net.start, {}, algorithm.server_memory(net.start)), {}, {})
    effective_steps = SGD.of(lr, momentum, 0.0, net.start).effective_steps(torch.full((1, 1), float(work.epochs)))
    round_lr = lr * work.epochs / float(effective_steps)  # a round moves as far as without momentum
    for number in range(steps // work.epochs):
        members = random_choices.cohort(0, number, len(examples), cohort)
        server = server_of(state, net, feed, examples, members)
        job = RoundJob(
            algorithm=algorithm,
            net=net,
            data=feed,
            work=work,
            optimiser=sgd(round_lr, momentum, 0.0),
            policy="average",
            seed=0,
            round=number,
            cohort=members,
            w=algorithm.broadcast(state.server.w, server),
            buffers={},
            down=algorithm.send_down(state.server.w, server),
            memory=state.memory,
            kept_buffers={},
        )
        state, _ = close(state, job, examples, train(job, Fused()))
    return world.coefficients(net, state.server.w)


def workers_give_the_same(algorithm: Algorithm) -> None:
    """No state is kept in a process: one process and two worker processes compute the same."""
    federation, notices = build(digits(algorithm, 3, cohort=3), algorithm=algorithm), list[str]()
    expected = _run(federation, 3)
    with Workers(2, notice=notices.append) as workers:
        state = _run(federation, 3, engine=workers)
    if notices:
        raise Skipped(notices[0])
    demand_equal(state.server.w, expected.server.w, "the model after three rounds")
    for client, memory in expected.memory.items():
        for name, rows in memory.items():
            demand_equal(state.memory[client][name], rows, f"the {name} of client {client}")


def _run(federation: Federation, rounds: int, state: State | None = None, engine: Engine | None = None) -> State:
    state = state or begin(federation)
    for _ in range(rounds):
        state, _ = play_round(federation, state, engine or Fused())
    return state
