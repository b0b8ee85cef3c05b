"""An existing Flower app: with `strategy` and `guided` its run is that of the loop engine."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from in_process_grid import InProcessGrid, Node, small
from step_cases import CASES, StepCase, assert_weights_as_reference
from torch import nn

import fedgg
from fedgg.algorithms import ALGORITHMS, MOON, SCAFFOLD, FedAvg, FedGG
from fedgg.core.algorithm import Algorithm
from fedgg.errors import UserError
from fedgg.flower import guided, strategy
from fedgg.flower.messages import to_record
from fedgg.lab.build import Federation, build
from fedgg.lab.name_resolution import build_model

CHANGE_THE_LOOP = {
    *("moon", "fedcurv", "fedcl", "fedsgd", "fedntd", "fedlc"),
    *("fedsam", "mofedsam", "fedlesam", "fedwmsam", "fedspeed"),
}
NEED_STEPS = {"ghbm", "fedhbm"}
GUIDABLE = [name for name in ALGORITHMS if name not in CHANGE_THE_LOOP | NEED_STEPS]
GUIDED = [
    case
    for case in CASES
    if case.experiment.algorithm.name in GUIDABLE
    and not case.experiment.server.cohort
    and case.model is None
    and case.experiment.optimiser.clip_norm is None  # the app's loop is its own, and clips nothing
]
WITH_BUFFERS = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)).double()


def model_of(federation: Federation) -> nn.Module:
    choice = federation.experiment.model
    return build_model(choice.name, choice.settings, (1, 8, 8), 10, federation.experiment.seed).double()


def existing_app(algorithm: Algorithm, federation: Federation, model: nn.Module) -> ClientApp:
    """A ClientApp as in Flower's tutorials, except for two lines; its batches are those of the loop engine."""
    app, experiment = ClientApp(), federation.experiment

    def train_function(round_: int, client: int) -> None:
        local = experiment.local
        lr = local.lr * local.lr_decay**round_
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=local.momentum, weight_decay=local.weight_decay)
        model.train()
        for batch in federation.feed.batches(experiment.seed, round_, client, federation.work):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x[0]), batch.y[0]).backward()
            optimizer.step()

    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        round_ = int(str(message.content.config_records["config"]["server-round"])) - 1
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        with guided(algorithm, model, message, context) as guide:
            train_function(round_, client)
        return guide.reply({"train_loss": 0.0, "num-examples": federation.examples[client]})

    app.train()(train)
    return app


class GridWithContexts(InProcessGrid):
    """Every node keeps its context between messages, as a running SuperNode does."""

    def _context(self, node: Node, question: Message) -> Context:
        contexts: dict[int, Context] = self.__dict__.setdefault("contexts", {})
        return contexts.setdefault(question.metadata.dst_node_id, super()._context(node, question))


def play(algorithm: Algorithm, federation: Federation, model: nn.Module, server_model: nn.Module) -> dict[str, Any]:
    app = existing_app(algorithm, federation, model)
    grid = GridWithContexts(
        {100 + client: Node(app, {"partition-id": client}) for client in range(federation.experiment.split.clients)}, {}
    )
    plan = strategy(algorithm, server_model, fraction_evaluate=0.0)
    start = ArrayRecord(server_model.state_dict())
    result = plan.start(grid, start, num_rounds=federation.experiment.rounds)
    return dict(result.arrays.to_torch_state_dict())


@pytest.mark.parametrize("case", GUIDED, ids=str)
def test_guided_steps_are_the_reference_steps(case: StepCase) -> None:
    federation = case.federation()
    assert_weights_as_reference(
        case, play(federation.algorithm, federation, model_of(federation), model_of(federation))
    )


def test_batch_statistics_are_averaged_and_counters_stay_whole() -> None:
    experiment = small(algorithm__name="fedgg", server__cohort=4, split__scheme="iid")
    run = fedgg.run(experiment, model=copy.deepcopy(WITH_BUFFERS))
    federation = build(experiment, model=copy.deepcopy(WITH_BUFFERS))
    found = play(FedGG(), federation, copy.deepcopy(WITH_BUFFERS), copy.deepcopy(WITH_BUFFERS))
    assert found["2.num_batches_tracked"].dtype == torch.int64
    for key, tensor in run.weights.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-11)


def test_algorithms_that_change_the_loop_are_refused() -> None:
    for name in CHANGE_THE_LOOP:
        with pytest.raises(UserError, match="changes more of the training loop"):
            strategy(ALGORITHMS[name](), nn.Linear(2, 2))
    for name in NEED_STEPS:
        with pytest.raises(UserError, match="needs the number of local steps before they are taken"):
            strategy(ALGORITHMS[name](), nn.Linear(2, 2))
    with pytest.raises(UserError, match="MOON changes more"):
        strategy(MOON(), nn.Linear(2, 2))


def test_a_reply_with_nan_is_left_out_and_a_round_without_valid_replies_ends_the_run() -> None:
    experiment = small(algorithm__name="fedavg", server__cohort=4, split__scheme="iid", rounds=1)
    federation = build(experiment)
    broken: set[int] = {1}

    def way(question: Message, deliver: Any) -> list[Message]:
        reply = deliver()
        if question.metadata.dst_node_id - 100 in broken:
            array = reply.content.array_records["fedgg.up"]["delta"]
            array.data = b"\xff" * len(array.data)
        return [reply]

    model = model_of(federation)
    app = existing_app(FedAvg(), federation, model)
    grid = GridWithContexts({100 + client: Node(app, {"partition-id": client}) for client in range(4)}, {}, carry=way)
    result = strategy(FedAvg(), model_of(federation), fraction_evaluate=0.0).start(
        grid, ArrayRecord(model.state_dict()), num_rounds=1
    )
    assert all(bool(torch.isfinite(t).all()) for t in result.arrays.to_torch_state_dict().values())
    broken.update(range(4))
    with pytest.raises(UserError, match="round 1: no client sent a valid update"):
        strategy(FedAvg(), model_of(federation), fraction_evaluate=0.0).start(
            grid, ArrayRecord(model.state_dict()), num_rounds=1
        )


@pytest.mark.parametrize(("name", "value"), [("delta", 1e30), ("num-examples", 10**15), ("num-examples", 0.5)])
def test_a_reply_with_wrong_values_is_left_out(name: str, value: float, caplog: pytest.LogCaptureFixture) -> None:
    federation = build(small(algorithm__name="fedavg", server__cohort=4, split__scheme="iid", rounds=1))
    broken: set[int] = {1}

    def way(question: Message, deliver: Any) -> list[Message]:
        reply = deliver()
        if question.metadata.dst_node_id - 100 in broken and name == "delta":
            up = reply.content.array_records["fedgg.up"]
            up.update(to_record({name: torch.full(tuple(up[name].shape), value, dtype=torch.float64)}))
        elif question.metadata.dst_node_id - 100 in broken:
            reply.content.metric_records["metrics"][name] = value
        return [reply]

    model = model_of(federation)
    app = existing_app(FedAvg(), federation, model)
    grid = GridWithContexts({100 + client: Node(app, {"partition-id": client}) for client in range(4)}, {}, carry=way)
    start, plan = ArrayRecord(model.state_dict()), strategy(FedAvg(), model_of(federation), fraction_evaluate=0.0)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = plan.start(grid, start, num_rounds=1)
    assert all(float(t.abs().max()) < 10 for t in result.arrays.to_torch_state_dict().values())
    assert any("left out: node 101" in record.getMessage() for record in caplog.records)
    broken.update(range(4))
    if name == "delta":
        plan = strategy(FedAvg(), model_of(federation), fraction_evaluate=0.0)
        with pytest.raises(UserError, match="round 1: the global model is out of all proportion"):
            plan.start(grid, start, num_rounds=1)
        assert all(float(p.detach().abs().max()) < 10 for p in plan.model.parameters()), (
            "the strategy keeps the model of the last round"
        )


def one_client(**config: Any) -> tuple[nn.Module, Message, Context]:
    """A client's model, and a message to it."""
    model = model_of(build(small(algorithm__name="fedavg", rounds=1)))
    GridWithContexts({}, {})  # sets the task identity that Message needs
    message = Message(RecordDict({"config": ConfigRecord({"server-round": 1, **config})}), 100, "train")
    model(torch.zeros(2, 1, 8, 8, dtype=torch.float64)).sum().backward()
    return model, message, Context(1, 100, {}, RecordDict(), {})


def test_an_optimiser_that_is_not_sgd_is_refused() -> None:
    model, message, context = one_client()
    optimizer = torch.optim.Adam(model.parameters())
    with (
        pytest.raises(UserError, match=r"needs one torch\.optim\.SGD"),
        guided(FedAvg(), model, message, context),
    ):
        optimizer.step()
    other = nn.Linear(2, 1)
    loose, ours = torch.optim.Adam(other.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    with guided(FedAvg(), model, message, context) as guide:  # an optimiser of another model is not changed
        other(torch.ones(1, 2)).sum().backward()
        loose.step()
        ours.step()
    assert guide.reply({"num-examples": 1}).content.array_records["fedgg.up"]


def test_a_block_without_an_optimizer_step_is_an_error() -> None:
    model, message, context = one_client()
    twin = model_of(build(small(algorithm__name="fedavg", rounds=1)))
    elsewhere = torch.optim.SGD(twin.parameters(), 0.1)
    twin(torch.zeros(2, 1, 8, 8, dtype=torch.float64)).sum().backward()
    with pytest.raises(UserError, match=r"guided\(\) saw no optimizer step"), guided(FedAvg(), model, message, context):
        elsewhere.step()


def test_a_client_with_another_algorithm_than_the_servers_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model, message, context = one_client(**{"fedgg-algorithm": repr(SCAFFOLD())})
    with pytest.raises(UserError, match=r"the server runs SCAFFOLD\(.*\) and this client FedGG\("):
        guided(FedGG(), model, message, context)
    model, message, context = one_client(**{"fedgg-algorithm": repr(FedGG(mu=0.1))})
    with caplog.at_level(logging.WARNING, logger="flwr"):
        guided(FedGG(mu=0.2), model, message, context)
    assert "the server runs FedGG(mu=0.1" in caplog.text


def test_an_algorithm_may_be_a_name_or_a_class() -> None:
    model, message, context = one_client()
    for argument in ("fedgg", FedGG, FedGG()):
        assert guided(argument, model, message, context).algorithm == FedGG()  # type: ignore[arg-type]
        assert strategy(argument, model).algorithm == FedGG()  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"must be a fedgg\.Algorithm such as fedgg\.FedGG"):
        strategy(3, model)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="MOON changes more of the training loop"):
        strategy("moon", model)  # type: ignore[arg-type]
