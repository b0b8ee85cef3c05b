"""Personal parts, Ditto and local training against plain PyTorch, in every engine, resumed, and with unseen clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from step_cases import CASES
from torch import Tensor, nn

import fedgg
from fedgg.algorithms import ALGORITHMS
from fedgg.core import random_choices
from fedgg.core.personal import KEPT, personal_rows
from fedgg.data.user_arrays import from_arrays
from fedgg.engines import Loop
from fedgg.errors import UserError
from fedgg.lab.build import Federation, build
from fedgg.lab.one_round import State, begin, next_job
from fedgg.lab.runner import play_round, run
from fedgg.lab.study import Study, run_study
from fedgg.report.data_figures import figure_of_partition
from fedgg.runfolder.read import read_run
from fedgg.runfolder.record_types import unseen_in

TOLERANCE = 1e-10
CLIENTS, CLASSES, EPOCHS, ROUNDS, LR, MOMENTUM, DECAY = 4, 3, 3, 4, 0.05, 0.9, 0.01


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh())
        return nn.Sequential(body, nn.Linear(7, CLASSES)).double()


def arrays() -> tuple[Any, Any, Any, Any]:
    random = np.random.default_rng(8)
    y = random.integers(0, CLASSES, 120)
    x = np.round(random.normal(size=(120, 5)) + 2 * random.normal(size=(CLASSES, 5))[y], 2).astype(np.float32)
    return x, y, x[:30], y[:30]


def experiment(**changes: Any) -> fedgg.Experiment:
    base = fedgg.Experiment(
        rounds=ROUNDS,
        seed=2,
        data={"holdout": 0.25, "normalise": "none"},
        split={"clients": CLIENTS, "beta": 0.6, "min_examples": 8},
        algorithm={"name": "fedavg"},
        local={"epochs": EPOCHS, "batch": 8, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY},
        server={"cohort": 3},
        engine={"precision": "fp64", "name": "loop"},
    )
    return base.changed({key.replace("__", "."): value for key, value in changes.items()})


def federation(**changes: Any) -> Federation:
    return build(experiment(**changes), model=network(), data=arrays())


def by_library(built: Federation) -> list[State]:
    states, state = [], begin(built)
    for _ in range(ROUNDS):
        state, _ = play_round(built, state, Loop())
        states.append(state)
    return states


# Plain PyTorch --------------------------------------------------------------------------------------------------------

Weights = dict[str, Tensor]
HEAD, NORM = {"1.weight", "1.bias"}, {name for name in network().state_dict() if name.startswith("0.1.")}
ALL = set(network().state_dict())
PERSONAL = {"fedper": HEAD, "fedrep": HEAD, "fedbn": NORM, "lg_fedavg": ALL - HEAD, "local": ALL}


def is_counter(value: Tensor) -> bool:
    return not value.is_floating_point()


def epochs_of(built: Federation, round_: int, client: int) -> list[list[Tensor]]:
    """The batches that the library draws, epoch by epoch."""
    positions = random_choices.schedule(built.experiment.seed, round_, client, built.examples[client], built.work)
    batches = [torch.from_numpy(built.feed.clients[client][row[row >= 0]]) for row in positions]
    length = len(batches) // EPOCHS
    return [batches[start : start + length] for start in range(0, len(batches), length)]


def descend(
    model: nn.Module, batches: Sequence[Tensor], trained: set[str], change: Callable[[nn.Module], None] | None = None
) -> None:
    x, y = torch.from_numpy(arrays()[0]).double(), torch.from_numpy(arrays()[1])
    parameters = [parameter for name, parameter in model.named_parameters() if name in trained]
    optimiser = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    model.train()
    for batch in batches:
        model.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        if change is not None:
            change(model)
        optimiser.step()


def plain(method: str, built: Federation) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The server's model and the clients' own tensors after each round."""
    personal = PERSONAL[method]
    server, own = copy.deepcopy(network().state_dict()), dict[int, Weights]()
    globals_, owns = [], []
    for round_ in range(ROUNDS):
        cohort = random_choices.cohort(built.experiment.seed, round_, CLIENTS, 3)
        sent = {}
        for client in cohort:
            model = network()
            start = server | {name: value for name, value in own.get(client, {}).items() if name in personal}
            model.load_state_dict(start)
            epochs = epochs_of(built, round_, client)
            if method == "fedrep":  # the head in all epochs but the last, then the body
                descend(model, [batch for epoch in epochs[:-1] for batch in epoch], HEAD)
                descend(model, epochs[-1], ALL - HEAD)
            else:
                descend(model, [batch for epoch in epochs for batch in epoch], ALL)
            sent[client] = copy.deepcopy(model.state_dict())
            own[client] = {name: sent[client][name] for name in personal}
        server = averaged(server, sent, {client: built.examples[client] for client in cohort}, ALL - personal)
        globals_.append(server)
        owns.append(dict(own))
    return globals_, owns


def averaged(server: Weights, sent: dict[int, Weights], counts: dict[int, int], shared: set[str]) -> Weights:
    total, new = sum(counts.values()), dict(server)
    for name in shared:
        if is_counter(server[name]):
            new[name] = torch.stack([weights[name] for weights in sent.values()]).max()
        else:
            new[name] = torch.stack([counts[c] / total * sent[c][name] for c in sent]).sum(0)
    return new


def tensors_kept(built: Federation, state: State, client: int) -> Weights:
    """A client's personal tensors in the library's state, by name."""
    _, own = personal_rows(state.memory[client])
    layout = built.net.layout if built.net.personal is None else built.net.personal.layout
    tensors = {name: rows[0] for name, rows in layout.unflatten(own["w"]).items()}
    return tensors | {name.removeprefix("buffers."): rows[0] for name, rows in own.items() if name[:8] == "buffers."}


def assert_same(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.allclose(ours[name].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE), name


@pytest.mark.parametrize("method", list(PERSONAL))
def test_against_plain_pytorch(method: str) -> None:
    built = federation(personal__method=method)
    globals_, owns = plain(method, built)
    for state, expected, own in zip(by_library(built), globals_, owns, strict=True):
        shared = {name: rows[0] for name, rows in built.net.layout.unflatten(state.server.w).items()}
        shared |= {name: rows[0] for name, rows in state.server.buffers.items()}
        assert_same(shared, {name: expected[name] for name in ALL - PERSONAL[method]})
        assert sorted(state.memory) == sorted(own)
        for client, tensors in own.items():
            assert_same(tensors_kept(built, state, client), tensors)


def test_ditto_against_plain_pytorch_and_its_global_model_is_that_of_fedavg() -> None:
    strength = 0.7
    built, alone = federation(personal__method="ditto", personal__ditto_lambda=strength), federation()
    own: dict[int, Weights] = {}
    states, before = by_library(built), alone.net.start
    buffers = alone.net.start_buffers
    for round_, (state, without) in enumerate(zip(states, by_library(alone), strict=True)):
        assert torch.equal(state.server.w, without.server.w)
        anchor = {name: rows[0] for name, rows in alone.net.layout.unflatten(before).items()}

        def toward(model: nn.Module, anchor: Weights = anchor) -> None:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter.grad += strength * (parameter.detach() - anchor[name])

        for client in random_choices.cohort(2, round_, CLIENTS, 3):
            model = network()
            model.load_state_dict(own.get(client, model.state_dict()))
            descend(model, [b for epoch in epochs_of(built, round_, client) for b in epoch], ALL, toward)
            own[client] = copy.deepcopy(model.state_dict())
            assert_same(tensors_kept(built, state, client), own[client])
        before, buffers = without.server.w, without.server.buffers
    assert buffers  # the model has statistics, which a personal model keeps for itself


def test_personal_scores_are_those_of_the_clients_models() -> None:
    for method in (*PERSONAL, "ditto"):
        built = federation(personal__method=method)
        state, record = play_round(built, begin(built), Loop())
        right = count = 0
        for client in range(CLIENTS):
            model = network().eval()
            weights = model.state_dict()
            if method != "ditto":
                weights |= {name: rows[0] for name, rows in built.net.layout.unflatten(state.server.w).items()}
                weights |= {name: rows[0] for name, rows in state.server.buffers.items()}
            if client in state.memory:
                weights |= tensors_kept(built, state, client)
            model.load_state_dict(weights)
            where = built.feed.held_out[client]
            hits = int((model(built.feed.x[where].double()).argmax(1) == built.feed.y[where]).sum())
            assert record["personal_accuracy_by_client"][str(client)] == hits / len(where)
            right, count = right + hits, count + len(where)
        assert record["personal_accuracy"] == pytest.approx(right / count, rel=1e-12)
        assert ("test_accuracy" in record, "holdout_accuracy" in record) == (method == "ditto",) * 2


@pytest.mark.parametrize("method", ["fedper", "fedbn", "ditto"])
def test_personal_models_of_a_run(method: str, tmp_path: Path) -> None:
    """Each has the accuracy that was recorded of it, from memory, from the folder, and of a run that was loaded."""
    given: dict[str, Any] = {"model": network(), "data": arrays()}
    chosen = experiment(personal__method=method, server__cohort=4, server__memory_limit_mb=0)
    built = federation(personal__method=method, server__cohort=4)
    for finished in (
        run(chosen.changed({"server.memory_limit_mb": 64}), **given),
        run(chosen, **given, out=tmp_path),
        fedgg.Run.load(tmp_path, model=network()),
    ):
        for client in range(CLIENTS):
            where = built.feed.held_out[client]
            outputs = finished.personal_model(client)(built.feed.x[where])
            accuracy = float((outputs.argmax(1) == built.feed.y[where]).double().mean())
            assert accuracy == finished.rounds[-1]["personal_accuracy_by_client"][str(client)]
    with pytest.raises(UserError, match="there is no client 4"):
        finished.personal_model(4)
    with pytest.raises(UserError, match="client 'north': give its number"):
        finished.personal_model("north")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no models of their own"):
        run(experiment(rounds=1), **given).personal_model(0)
    with pytest.raises(UserError, match="in a temporary file"):
        run(chosen.changed({"rounds": 1}), **given).personal_model(0)


# Engines, resume, algorithms ------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"holdout": 0.2},
    "split": {"clients": 5, "beta": 0.5, "min_examples": 5, "unseen": 1},
    "model": {"name": "mlp", "hidden": 8},
    "local": {"epochs": 2, "batch": 32, "lr": 0.01, "weight_decay": 0.01},
    "server": {"cohort": 3},
    "engine": {"precision": "fp64"},
}


def small(engine: str, algorithm: str = "scaffold", **changes: Any) -> fedgg.Experiment:
    name = "fedavg" if changes.get("personal__method") == "local" else algorithm
    base = fedgg.Experiment(**SMALL, algorithm={"name": name})
    return base.changed({"engine.name": engine, **{key.replace("__", "."): value for key, value in changes.items()}})


def scores(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if "accuracy" in key or key in ("bytes_up", "bytes_down")}


@pytest.mark.parametrize("method", ["fedper", "ditto"])
def test_runs_of_engines_agree(method: str) -> None:
    """As runs have them, with kept state of an optimiser and clipped gradients; `test_every_engine` has the steps."""
    changes: dict[str, Any] = {"personal__method": method, "algorithm": "fedprox"}
    changes |= {"optimiser__name": "adamw", "optimiser__state": "kept", "optimiser__clip_norm": 0.5}
    loop = run(small("loop", **changes))
    for engine in ("workers", "stacked"):
        other = run(small(engine, **changes))
        for name, tensor in loop.weights.items():
            assert torch.allclose(tensor, other.weights[name], rtol=1e-10, atol=1e-12), (engine, name)
        assert [scores(record) for record in loop.rounds] == [scores(record) for record in other.rounds]
    assert {"personal_accuracy", "unseen_accuracy"} <= loop.rounds[-1].keys()


@pytest.mark.parametrize("engine", ["stacked", pytest.param("workers", marks=pytest.mark.slow)])
def test_runs_of_a_study_agree(engine: str, tmp_path: Path) -> None:
    """Runs of a study that share a stack or a pool of workers: of different methods, they keep their numbers."""
    variants = {name: {"personal.method": name} for name in ("none", "fedper", "fedrep", "ditto", "local")}
    base = small(engine, "fedavg", rounds=2)
    run_study(Study(base, variants, (0, 1), "none"), tmp_path, processes=2, observer=fedgg.Observer())
    for label, changes in variants.items():
        alone = run(base.changed({**changes, "seed": 1, "engine.name": "loop"}))
        together = fedgg.Run.load(tmp_path / label / "seed-1")
        for name, tensor in alone.weights.items():
            assert torch.allclose(tensor, together.weights[name], rtol=1e-10, atol=1e-12), (label, name)
        assert alone.summary.get("final_personal_accuracy") == together.summary.get("final_personal_accuracy")
        if label == "local":
            assert alone.summary["bytes"] == 0


@pytest.mark.parametrize("method", ["fedrep", "fedbn", "ditto"])
@pytest.mark.parametrize("limit", [1024, 0], ids=["in memory", "in a file"])
def test_resumed_bit_for_bit(method: str, limit: int, tmp_path: Path) -> None:
    chosen = experiment(personal__method=method, server__memory_limit_mb=limit)
    given: dict[str, Any] = {"model": network(), "data": arrays()}
    whole = run(chosen, **given)
    run(chosen.changed({"rounds": 2}), **given, out=tmp_path)
    resumed = run(chosen, **given, out=tmp_path)
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, resumed.weights[name])
    assert [scores(record) for record in whole.rounds] == [scores(record) for record in resumed.rounds]


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_with_a_personal_head_runs_or_is_refused_by_name(name: str) -> None:
    chosen = small("loop", name, personal__method="fedper", data__proxy=50, rounds=2)
    if ALGORITHMS[name].needs_proxy:
        with pytest.raises(UserError, match=f"{ALGORITHMS[name].__name__} measures the global model"):
            build(chosen)
        return
    one, other = run(chosen), run(chosen.changed({"engine.name": "stacked"}))
    assert one.summary["parameters"] == 64 * 8 + 8
    for key, tensor in one.weights.items():
        assert torch.allclose(tensor, other.weights[key], rtol=1e-9, atol=1e-11), key
    start = build(chosen).net.module.state_dict()
    assert torch.equal(one.weights["3.weight" if "3.weight" in start else list(start)[-2]], list(start.values())[-2])


def test_fedrep_counts_the_steps_of_the_shared_part() -> None:
    """SCAFFOLD divides by them: in a body of one epoch, its variates are those of one epoch."""
    built = build(small("loop", personal__method="fedrep", local__epochs=4, personal__head_epochs=3))
    job = next_job(built, begin(built))
    client = job.cohort[0]
    assert job.personal_steps(client) == 3 * job.work.steps(job.data.examples(client)) // 4


# Refusals and settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"personal__method": "fedper", "data__holdout": 0.0}, "set data.holdout"),
        ({"split__unseen": 1, "data__holdout": 0.0}, "set data.holdout"),
        ({"split__unseen": 4}, "leaves none of 4 clients"),
        ({"personal__method": "fedpr"}, "personal.method"),
        ({"personal__parameters": ["fcc.*"]}, "'fcc.\\*' matches no trainable parameter"),
        ({"personal__parameters": []}, "needs personal.method"),
        ({"personal__method": "ditto", "personal__parameters": ["1.*"]}, "no meaning"),
        ({"personal__method": "ditto", "personal__unseen_epochs": 2}, "no meaning under 'ditto'"),
        ({"personal__method": "fedper", "personal__head_epochs": 2}, "belongs to personal.method = 'fedrep'"),
        ({"personal__method": "fedrep", "local__epochs": 1}, "set local.epochs = 2"),
        ({"personal__method": "fedrep", "personal__head_epochs": 3}, "leaves none of 3 epochs"),
        ({"personal__method": "fedrep", "local__steps": 9}, "not defined with local.steps = 9"),
        ({"personal__method": "fedrep", "local__part": 0.5}, "not defined with local.part = 0.5"),
        ({"personal__method": "local", "algorithm__name": "fedgg"}, "FedGG has nothing to act on"),
        ({"personal__method": "lg_fedavg", "algorithm__name": "moon"}, "MOON compares representations"),
    ],
    ids=str,
)
def test_refused_before_anything_trains(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        federation(**changes)


def test_fedbn_needs_normalisation_layers() -> None:
    with pytest.raises(UserError, match="has no normalisation layer"):
        build(small("loop", personal__method="fedbn"))


def test_a_run_folder_records_unseen_clients_and_held_out_examples(tmp_path: Path) -> None:
    chosen = experiment(split__unseen=1, rounds=1)
    fedgg.run(chosen, data=arrays(), model=network, out=tmp_path / "run")
    known = build(chosen, model=network, data=from_arrays(*arrays()))
    record = read_run(tmp_path / "run")
    assert record.partition is not None
    assert unseen_in(record.partition) == known.unseen != []
    with np.load(tmp_path / "run" / "partition.npz") as saved:
        assert saved["held_out"].tolist() == sorted(np.concatenate(known.feed.held_out).tolist())
    (bars,) = (axes for axes in figure_of_partition(record).axes if axes.get_title() == "total")
    assert [text.get_text() for text in bars.get_legend().get_texts()] == ["never trains (unseen)"]  # type: ignore[union-attr]
    fedgg.run(chosen.changed({"split.unseen": 0}), data=arrays(), model=network, out=tmp_path / "all")
    assert "unseen" not in (read_run(tmp_path / "all").partition or {})


@pytest.mark.parametrize("work", [{"local__steps": 2}, {"local__part": 0.1}], ids=str)
def test_unseen_clients_train_whole_epochs(work: dict[str, Any]) -> None:
    """However much the others do of theirs: without a step of the shared part, the score is that of plain epochs."""
    changes: dict[str, Any] = {"split__unseen": 1, "personal__method": "fedper", "personal__unseen_epochs": 6}
    base = small("loop", "fedavg", **changes, rounds=1, local__lr=0.1, server__lr=1e-12)
    losses = [
        fedgg.run(experiment, metrics=["loss"]).rounds[-1]["unseen_loss"]
        for experiment in (base, base.changed({key.replace("__", "."): value for key, value in work.items()}))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_patterns_are_the_methods() -> None:
    """FedPer by pattern has FedPer's bits; patterns may name buffers and several layers."""
    named, by_pattern = federation(personal__method="fedper"), federation(personal__parameters=["1.*"])
    for one, other in zip(by_library(named), by_library(by_pattern), strict=True):
        assert torch.equal(one.server.w, other.server.w)
    part = federation(personal__parameters=["0.1.running_*", "1.bias"]).net.personal
    assert part is not None
    assert (part.layout.names, sorted(part.start_buffers)) == (("1.bias",), ["0.1.running_mean", "0.1.running_var"])


def test_default_experiments_keep_their_identity() -> None:
    for case in CASES:
        content = case.experiment._identity(path=False)
        assert "personal" not in content
        assert "unseen" not in content["split"]
    assert experiment(personal__method="none").hash() == experiment().hash()
    assert experiment(personal__method="fedper").trajectory() != experiment().trajectory()
    changed = experiment(personal__method="ditto", personal__ditto_lambda=1.0).changed({"personal.method": "fedper"})
    assert changed.personal is not None
    assert changed.personal.ditto_lambda is None


def test_unseen_clients_never_train_and_their_head_is_trained_before_it_is_scored() -> None:
    built = federation(split__unseen=2, personal__method="fedper", server__cohort=2, personal__unseen_epochs=2)
    assert len(built.unseen) == 2
    state = begin(built)
    for _ in range(3):
        state, record = play_round(built, state, Loop())
        assert not {line["client"] for line in record["clients"]} & set(built.unseen)
        assert sorted(record["unseen_accuracy_by_client"]) == sorted(map(str, built.unseen))
        assert not set(record["personal_accuracy_by_client"]) & set(map(str, built.unseen))
    client = built.unseen[0]
    model = network()
    weights = {name: rows[0] for name, rows in built.net.layout.unflatten(state.server.w).items()}
    weights |= {name: rows[0] for name, rows in state.server.buffers.items()}
    model.load_state_dict(model.state_dict() | weights)
    work = random_choices.Work(2, 8)
    rows = random_choices.schedule(2, 2, client, built.examples[client], work)
    descend(model, [torch.from_numpy(built.feed.clients[client][row[row >= 0]]) for row in rows], HEAD)
    for name, rows_ in state.server.buffers.items():  # statistics are the server's
        model.get_buffer(name).copy_(rows_[0])
    where = built.feed.held_out[client]
    hits = (model.eval()(built.feed.x[where].double()).argmax(1) == built.feed.y[where]).double().mean()
    assert record["unseen_accuracy_by_client"][str(client)] == pytest.approx(float(hits), abs=1e-12)
    without = federation(split__unseen=2)
    _, record = play_round(without, begin(without), Loop())
    assert record.keys() >= {"unseen_accuracy", "holdout_accuracy", "test_accuracy"}
    assert "personal_accuracy" not in record


def test_personal_state_is_marked_by_its_name() -> None:
    built = federation(personal__method="fedbn")
    state = by_library(built)[-1]
    assert all(name.startswith(KEPT) for rows in state.memory.values() for name in rows)


def test_frozen_parameters_are_in_no_row_and_no_checkpoint(tmp_path: Path) -> None:
    """Adapters beside a large frozen layer: rows, bytes, client state and checkpoints are of the adapters alone."""

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 2), nn.Linear(2, 10))
        module[1].requires_grad_(False)
        return module

    trained = 600 * 2 + 2 + 2 * 10 + 10
    for engine, changes in (("fused", {}), ("stacked", {"personal.parameters": ["4.*"]})):
        chosen = small(engine, rounds=2).changed({"split.clients": 8, **changes})
        finished = run(chosen, model=adapted, out=tmp_path / engine)
        shared = trained - (30 if changes else 0)
        assert finished.summary["parameters"] == shared
        assert finished.rounds[0]["bytes_up"] == 2 * 8 * shared * len(finished.rounds[0]["clients"])  # and variates
        assert torch.equal(finished.weights["1.weight"], adapted().double().state_dict()["1.weight"])
        if changes:
            with pytest.raises(UserError, match=r"take run\.personal_model"):
                finished.model()
        else:
            assert torch.equal(finished.model().get_parameter("module.1.weight"), finished.weights["1.weight"])
        files = list((tmp_path / engine / "checkpoint").iterdir())
        assert max(file.stat().st_size for file in files) < 8 * 600 * 64
    with pytest.raises(UserError, match="'1\\.\\*' matches no trainable parameter"):
        run(small("loop", personal__parameters=["1.*"]), model=adapted)
