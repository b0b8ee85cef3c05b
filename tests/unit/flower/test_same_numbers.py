"""A run over messages has the bits of the engine `fused`, alone and resumed, and the steps of `local_step`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process_grid import Federation, same, small
from step_cases import CASES, StepCase, assert_weights_as_reference, thinned

import fedgg
from fedgg.algorithms import ALGORITHMS
from fedgg.errors import UserError
from fedgg.flower.messages import array_bytes
from fedgg.lab.config import Experiment

MODEL = """
from torch import nn

class Normed(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, classes))
"""

CONSTANT = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, classes)
        self.register_buffer("mask", torch.full((12, 12), float("-inf")).triu(1))
        self.register_buffer("turn", torch.polar(torch.ones(32), torch.arange(32.0)))
        self.register_buffer("peak", torch.tensor([0.125, float("-inf")]))  # changed by some batches only

    def forward(self, x):
        x = torch.view_as_real(torch.view_as_complex(x.reshape(-1, 32, 2).contiguous()) * self.turn).flatten(1)
        brightest = float(x.mean(1).max())
        if self.training and len(x) > 2 and brightest > float(self.peak[0]):
            self.peak[0] = brightest
        return self.outer(self.norm(self.inner(x)) @ self.mask.softmax(-1))
"""


def of(name: str, **more: Any) -> Experiment:
    kind = ALGORITHMS[name]
    proxy = {"data__proxy": 40} if kind.needs_proxy else {}
    return small(algorithm__name=name, **proxy, **more)


@pytest.mark.parametrize(
    "case",
    thinned(
        (case for case in CASES if case.experiment.server.cohort and not case.model),
        hooks=("client_memory", "send_down", "finish", "loss"),  # what is in messages, and a loss that a node computes
    ),
)
def test_clients_over_messages_take_the_reference_steps_and_resume(case: StepCase, tmp_path: Path) -> None:
    experiment = case.experiment.changed({"engine.name": "fused"})
    federation = Federation(experiment, tmp_path)
    federation.run(rounds=2)
    finished = federation.run()
    same(finished, fedgg.run(experiment))
    assert_weights_as_reference(case, finished.weights)


@pytest.mark.parametrize(
    "split",
    [
        {
            "split__scheme": "k_labels",
            "split__labels_per_client": 3,
            "split__feature_noise": 0.2,
            "split__feature_rotation": 90.0,
        },
        {"split__scheme": "dirichlet_repeated", "split__beta": 0.2},
    ],
    ids=["feature skew", "repetition"],
)
def test_splits_and_early_stopping(split: dict[str, Any], tmp_path: Path) -> None:
    stop = {"stop__metric": "holdout_accuracy", "stop__patience": 1, "stop__min_delta": 0.5}
    experiment = small(data__holdout=0.2, data__proxy=20, rounds=5, **split, **stop)
    finished = Federation(experiment, tmp_path).run()
    same(finished, fedgg.run(experiment))
    assert finished.status == "stopped_early"
    assert len(finished.rounds) < 5


@pytest.mark.parametrize("policy", ["average", "local", "frozen"])
@pytest.mark.parametrize("name", ["fedgg", "fedcurv"])
def test_every_treatment_of_buffers(policy: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(MODEL)
    fedgg.trust(tmp_path / "normed.py")
    model = f"{tmp_path / 'normed.py'}:Normed"
    experiment = of(name, model__name=model, model__statistics=policy, data__holdout=0.2, server__cohort=2, rounds=5)
    federation = Federation(experiment, tmp_path)
    federation.run(rounds=3)
    same(federation.run(), fedgg.run(experiment))


@pytest.mark.parametrize("policy", ["average", "local", "frozen"])
def test_constants_that_do_not_travel_and_one_that_changes_later(policy: str, tmp_path: Path) -> None:
    (tmp_path / "masked.py").write_text(CONSTANT)
    fedgg.trust(tmp_path / "masked.py")
    experiment = of(
        "fedavg",
        model__name=f"{tmp_path / 'masked.py'}:Masked",
        model__statistics=policy,
        engine__name="fused",
        data__holdout=0.2,
    )
    federation = Federation(experiment, tmp_path)
    federation.run(rounds=2)
    over, alone = federation.run(), fedgg.run(experiment)
    same(over, alone)
    for way in ("bytes_up", "bytes_down"):
        assert [record[way] for record in over.rounds] == [record[way] for record in alone.rounds]
    lines = [json.loads(line) for line in (federation.out / "exchanges.jsonl").read_text().splitlines()]
    trained = [line["bytes"] for line in lines if line["kind"] == "train"]
    assert [told["down"] for told in trained] == [record["bytes_down"] for record in alone.rounds]
    assert [told["up"] for told in trained] == [record["bytes_up"] for record in alone.rounds]


@pytest.mark.parametrize(
    "changes",
    [
        {"engine__precision": "fp32"},
        {"data__augment": "crop_flip"},
        {"data__normalise": "unit"},
        {"algorithm__name": "fedsgd"},
        {"split__min_examples": 0, "split__allow_empty": True, "split__beta": 0.05, "split__clients": 12},
        {"robust__rule": "median", "algorithm__name": "scaffold"},
        {"attack__kind": "sign_flip", "attack__clients": 1},
        {"privacy__noise": 0.5, "privacy__clip": 1.0},
        {"server__checkpoint_every": 3, "server__evaluate_every": 2},
    ],
    ids=str,
)
def test_other_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    experiment = small(**changes)
    same(Federation(experiment, tmp_path).run(), fedgg.run(experiment))


TWO_INPUTS = """
import torch
from torch import nn

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3 + 5, 2)

    def forward(self, table, tokens):
        return self.head(torch.cat([self.embedding(tokens).mean(1), table], 1))
"""


@pytest.mark.parametrize("task", ["regression", "next_token", "multilabel", "two inputs"])
def test_tasks(task: str, tmp_path: Path) -> None:
    """Targets, whole numbers and several inputs go through the data files; metrics come back from the clients."""
    numbers = np.random.default_rng(0)
    table, tokens = numbers.normal(size=(80, 5)), numbers.integers(0, 7, (80, 6))
    x, y = {
        "regression": (table, table[:, 0] * 2),
        "next_token": (tokens, np.roll(tokens, -1, 1)),
        "multilabel": (table, (table[:, :3] > 0).astype(int)),
        "two inputs": ({".table": table, ".tokens": tokens}, tokens[:, 0] % 2),
    }[task]
    inputs: dict[str, Any] = x if isinstance(x, dict) else {"": x}
    arrays: dict[str, Any] = {
        f"x_{part}{name}": values for part in ("train", "test") for name, values in inputs.items()
    }
    np.savez(tmp_path / "arrays.npz", y_train=y, y_test=y, **arrays)
    (tmp_path / "two_inputs.py").write_text(TWO_INPUTS)
    model: dict[str, Any] = {"next_token": {"model__name": "char_lstm", "model__hidden": 8}}.get(task, {})
    if task == "two inputs":
        fedgg.trust(tmp_path / "two_inputs.py")
        model = {"model__name": f"{tmp_path / 'two_inputs.py'}:TwoInputs"}
    experiment = small(
        data__source=f"npz:{tmp_path / 'arrays.npz'}",
        data__normalise="none",
        data__holdout=0.2,
        local__batch=8,
        local__lr=0.01,
        split__scheme="iid",
        task__name="classification" if task == "two inputs" else task,
        **model,
    )
    finished = Federation(experiment, tmp_path / "federation").run()
    same(finished, fedgg.run(experiment))
    assert any(key.startswith("holdout_") for key in finished.rounds[-1])


def test_bytes_on_the_wire_are_the_simulators(tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(MODEL)
    fedgg.trust(tmp_path / "normed.py")
    experiment = of(
        "scaffold", model__name=f"{tmp_path / 'normed.py'}:Normed", model__statistics="local", server__cohort=2
    )
    federation = Federation(experiment, tmp_path)
    federation.run()
    lines = [json.loads(line) for line in (federation.out / "exchanges.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    counted = [(line["bytes"]["down"], line["bytes"]["up"]) for line in trained]
    assert counted == [(record["bytes_down"], record["bytes_up"]) for record in fedgg.run(experiment).rounds]
    assert all(line["bytes"]["overhead_down"] > 0 and line["bytes"]["overhead_up"] > 0 for line in trained)


SPARSE = """
from dataclasses import dataclass
import torch
from fedgg import Algorithm

@dataclass(frozen=True)
class First(Algorithm):
    def finish(self, w, client):
        return {"delta": (w - client.notes["anchor"]) * (torch.arange(w.shape[1]) < 10)}, {}

    def sparse_up(self, parameters):
        return {"delta": 10}
"""


def test_a_sparse_message_travels_whole(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(SPARSE)
    fedgg.trust(tmp_path / "first.py")
    experiment = small(algorithm__name=f"{tmp_path / 'first.py'}:First", engine__precision="fp64")
    federation = Federation(experiment, tmp_path)
    done = federation.run()
    lines = [json.loads(line) for line in (federation.out / "exchanges.jsonl").read_text().splitlines()]
    whole = {line["bytes"]["up"] for line in lines if line["kind"] == "train"}
    clients = len(done.rounds[0]["clients"])
    assert whole == {clients * done.summary["parameters"] * 8}
    assert {record["bytes_up"] for record in done.rounds} == {clients * 10 * (8 + 4)}


def test_the_server_keeps_nothing_of_what_clients_remember(tmp_path: Path) -> None:
    from safetensors import safe_open

    federation = Federation(of("scaffold"), tmp_path)
    federation.run()
    newest = max((federation.out / "checkpoint").glob("*.safetensors"))
    with safe_open(newest, framework="pt") as file:
        assert not [name for name in file.keys() if name.startswith("client")]  # noqa: SIM118 (not a dict)


def test_a_node_runs_only_code_that_its_owner_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server allows it; each node checks for itself, and its error reaches the server."""
    file = tmp_path / "normed.py"
    file.write_text(f"{MODEL}\nfrom pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    federation = Federation(small(model__name=f"{file}:Normed"), tmp_path)
    with pytest.raises(UserError, match=r"node \d+ reports: this experiment runs the code of .*normed\.py"):
        federation.run()
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("FEDGG_TRUST", str(file))
    federation.run()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("method", "shared"),
    [
        ("fedper", 64 * 12 + 12 + 24),
        ("fedrep", 64 * 12 + 12 + 24),
        ("fedbn", 64 * 12 + 12 + 130),
        ("lg_fedavg", 130),
        ("local", 0),
        ("ditto", 64 * 12 + 12 + 24 + 130),
    ],
)
def test_personal_parts_stay_on_the_node(method: str, shared: int, tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(MODEL)
    fedgg.trust(tmp_path / "normed.py")
    changes: dict[str, Any] = {"algorithm__name": "fedavg", "personal__method": method, "split__unseen": 1}
    experiment = small(
        model__name=f"{tmp_path / 'normed.py'}:Normed",
        data__holdout=0.2,
        server__cohort=2,
        rounds=4,
        local__epochs=2,
        **changes,
    )
    federation = Federation(experiment, tmp_path)
    federation.run(rounds=2)
    finished, alone = federation.run(), fedgg.run(experiment)
    same(finished, alone)
    for over, here in zip(finished.rounds, alone.rounds, strict=True):
        for key in ("personal_accuracy_by_client", "unseen_accuracy_by_client", "bytes_up", "bytes_down"):
            assert over[key] == here[key], key
    # Nothing but the shared parameters and statistics is in any message.
    statistics = 0 if method in ("fedbn", "lg_fedavg", "local") else 12 + 12 + 1
    element = finished.weights["1.weight"].element_size()
    for message in federation.grid.sent:
        assert array_bytes(message.content) <= shared * element + statistics * 8
        names = [name for record in message.content.array_records.values() for name in record]
        assert not [name for name in names if name.startswith("personal")]
    files = list(federation.folder.rglob("0*.safetensors"))
    assert any(b"personal.w" in file.read_bytes() for file in files)
