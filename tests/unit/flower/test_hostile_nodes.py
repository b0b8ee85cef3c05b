"""Nodes that report a false client or number of examples, or send wrong updates.

A run continues without such a node and names it; its result is that of the loop without that client.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from in_process_grid import Carry, Deliver, Federation, InProcessGrid, remove_client_summaries, same, small, unchanged
from safetensors.torch import load_file

import fedgg
from fedgg.aggregation import RULES
from fedgg.core.server import Lost
from fedgg.engines import Fused
from fedgg.errors import UserError
from fedgg.flower.messages import header_of, to_record
from fedgg.lab.build import build
from fedgg.lab.one_round import begin, close_before_looking, next_job, train
from fedgg.lab.round_record import record_of

EXPERIMENT = {"model__name": "linear", "algorithm__name": "scaffold", "server__cohort": 4, "rounds": 3}
HASH = "0" * 64
QUICK = {"wait": 0.1}  # seconds to wait for nodes that are rejected in any case
Update = Callable[[torch.Tensor], torch.Tensor]


def claims(node: int, **values: Any) -> Carry:
    """This node reports these values when it is queried."""

    def way(question: Message, deliver: Deliver) -> list[Message]:
        reply = deliver()
        if question.metadata.dst_node_id == node and question.metadata.message_type.startswith("query"):
            reply.content.config_records["hello"].update(values)
        return [reply]

    return way


def sends(update: Update, clients: Collection[int], rounds: Collection[int]) -> Carry:
    """These clients replace all arrays of their update in these rounds."""

    def way(question: Message, deliver: Deliver) -> list[Message]:
        reply, header = deliver(), header_of(question.content)
        if question.metadata.message_type == "train" and header.client in clients and header.round in rounds:
            up = reply.content.array_records["up"]
            for name in list(up):
                shape = tuple(up[name].shape)
                up.update(to_record({name: update(torch.ones(shape, dtype=torch.float64))}))
        return [reply]

    return way


def fill(value: float) -> Update:
    return lambda ones: ones * value


def loop_without(experiment: fedgg.Experiment, lost: dict[int, dict[int, str]]) -> list[dict[str, Any]]:
    """The history of the loop with these clients dropped in these rounds for these reasons."""
    federation = build(experiment)
    state, history = begin(federation), []
    for number in range(1, experiment.rounds + 1):
        job = next_job(federation, state)
        ends = dict(train(job, Fused()))
        ends |= {client: Lost(client, why) for client, why in lost.get(number, {}).items()}
        closed = close_before_looking(federation, state, job, ends, 0.0)
        history.append(record_of(federation, closed, Fused().score(closed.looks)) | {"seconds": 0})
        state = closed.state
    return history


def same_as_loop(run: fedgg.Run, experiment: fedgg.Experiment) -> None:
    """The reasons are taken from the run; everything else is computed again."""
    lost = {r["round"]: {gone["client"]: gone["why"] for gone in r["lost"]} for r in run.rounds}
    assert [record | {"seconds": 0} for record in run.rounds] == loop_without(experiment, lost)


# False reports of a client -------------------------------------------------------------------------------------------

FALSE_REPORTS: dict[str, dict[str, Any]] = {
    "fewer than none": {"examples": -5},
    "none": {"examples": 0},
    "ten million": {"examples": 10**7},
    "a thousand million": {"examples": 10**9},
    "beyond memory": {"examples": 10**15},
    "one more": {"examples": 500},
    "not a number": {"examples": "many"},
    "a fraction": {"examples": 10.5},
    "keeps back too much": {"held_out": 10**12},
    "keeps back less than nothing": {"held_out": -1},
    "another shape": {"shape": "3 32 32"},
    "a long shape": {"shape": "1 " * 100_000},
    "other classes": {"classes": 10**9},
    "other data": {"data": HASH},
    "no hash": {"data": "\x1b[31m" * 100_000},
    "no client": {"client": 99},
    "a client below zero": {"client": -1},
    "another client": {"client": 0},
    "all clients": {"client": 0, "simulated": 1},
    "simulated backwards": {"simulated": -1},
}


@pytest.mark.parametrize("case", FALSE_REPORTS)
def test_a_node_with_a_false_report_is_rejected_and_the_others_train(case: str, tmp_path: Path) -> None:
    federation = Federation(small(**(EXPERIMENT | {"rounds": 1})), tmp_path, settings=QUICK)
    federation.grid.carry = claims(101, **FALSE_REPORTS[case])
    run = federation.run()
    assert run.status == "finished"
    assert [line["client"] for line in run.rounds[0]["clients"]] == [0, 2, 3]
    (lost,) = run.rounds[0]["lost"]
    assert lost["client"] == 1
    assert any(sentence.startswith("node 101 is rejected: ") for sentence in federation.notices)
    assert all(len(sentence) < 500 and sentence.isprintable() for sentence in [*federation.notices, lost["why"]])
    same_as_loop(run, federation.experiment)


@pytest.mark.parametrize("case", ["fewer than none", "beyond memory", "other classes"])
def test_a_client_whose_number_of_examples_is_unknown_is_left_out_of_the_run(case: str, tmp_path: Path) -> None:
    federation = Federation(small(**(EXPERIMENT | {"rounds": 2})), tmp_path, settings=QUICK)
    remove_client_summaries(federation)
    federation.grid.carry = claims(101, **FALSE_REPORTS[case])
    run = federation.run()
    assert [[line["client"] for line in record["clients"]] for record in run.rounds] == [[0, 2, 3], [0, 2, 3]]
    (left_out,) = json.loads((federation.out / "flower.json").read_text())["left_out"]
    assert left_out["client"] == 1
    assert any("client 1 is left out of this run: node 101" in sentence for sentence in federation.notices)
    federation.grid.carry = unchanged
    run = federation.run(rounds=3)  # weights and cohorts stay those of the first start
    assert [line["client"] for line in run.rounds[2]["clients"]] == [0, 2, 3]


def test_too_many_false_reports_stop_the_run_before_it_starts(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    remove_client_summaries(federation)
    reports = [claims(100 + client, examples=-5) for client in (0, 1, 3)]

    def all_three(question: Message, deliver: Deliver) -> list[Message]:
        node = question.metadata.dst_node_id
        return reports[{100: 0, 101: 1, 103: 2}[node]](question, deliver) if node != 102 else [deliver()]

    federation.grid.carry = all_three
    with pytest.raises(UserError, match=r"client 0, 1, 3 of 4 did not connect .* -5 training"):
        federation.run()
    assert not federation.out.exists()


def test_the_limit_of_examples_is_a_setting(tmp_path: Path) -> None:
    experiment = small(**(EXPERIMENT | {"rounds": 1}))
    sizes = {line["client"]: line["examples"] for line in fedgg.run(experiment).rounds[0]["clients"]}
    *smaller, largest = sorted(sizes, key=lambda client: sizes[client])
    limit = sizes[largest] - 1
    federation = Federation(experiment, tmp_path, settings={"max_examples": limit})
    remove_client_summaries(federation)
    run = federation.run()
    assert [line["client"] for line in run.rounds[0]["clients"]] == sorted(smaller)
    assert any(f"max_examples = {limit}" in sentence for sentence in federation.notices)


def test_a_report_of_more_examples_than_all_others_is_named(tmp_path: Path) -> None:
    federation = Federation(small(**(EXPERIMENT | {"rounds": 1})), tmp_path, settings=QUICK)
    remove_client_summaries(federation)
    federation.grid.carry = claims(101, examples=999_999)
    federation.run()
    assert any("client 1 reports 999,999 of" in sentence for sentence in federation.notices)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedcurv", "fedcl"])
def test_a_large_reported_number_takes_no_memory(algorithm: str, tmp_path: Path) -> None:
    """Even where the limit allows it: FedCurv and FedCL read all of a client's examples."""
    changes = EXPERIMENT | {"rounds": 1, "algorithm__name": algorithm}
    if algorithm == "fedcl":
        changes |= {"data__proxy": 50}
    federation = Federation(small(**changes), tmp_path, settings={"max_examples": 10**12})
    remove_client_summaries(federation)
    federation.grid.carry = claims(101, examples=10**9, held_out=10**9)
    tracemalloc.start()
    try:
        federation.run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_second_node_of_a_client_is_rejected_and_the_first_stays(when: str, tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    if when == "later":
        federation.run(rounds=2)
    federation.grid.nodes[201] = federation.node(1)
    run = federation.run()
    trained = {m.metadata.dst_node_id for m in federation.grid.sent if m.metadata.message_type == "train"}
    assert trained == {100, 101, 102, 103}
    notice = "node 201 is rejected: node 101 is client 1 already, and replies: give each node its own client-id"
    assert notice in federation.notices
    same(run, fedgg.run(federation.experiment))


# Wrong updates --------------------------------------------------------------------------------------------------------

OUT_OF_PROPORTION = "out of all proportion: "


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [("fedavg", 1e9), ("fedavg", 1e308), ("scaffold", -1e30), ("fednova", 1e30), ("fedadam", 1e154), ("fedcurv", 1e30)],
)
def test_an_update_out_of_all_proportion_is_left_out_of_its_round(algorithm: str, value: float, tmp_path: Path) -> None:
    federation = Federation(small(**(EXPERIMENT | {"algorithm__name": algorithm})), tmp_path)
    federation.grid.carry = sends(fill(value), [1], [2])
    run = federation.run()
    assert run.status == "finished"
    assert [len(record["clients"]) for record in run.rounds] == [4, 3, 4]
    (lost,) = run.rounds[1]["lost"]
    assert lost["client"] == 1
    assert lost["why"].startswith(OUT_OF_PROPORTION)
    assert any("client 1 dropped (out of all proportion" in sentence for sentence in federation.notices)
    same_as_loop(run, federation.experiment)


@pytest.mark.parametrize("clients", [[1], [0, 3], [0, 1, 3]])
def test_wrong_updates_in_every_round(clients: list[int], tmp_path: Path) -> None:
    """Up to half of a cohort is dropped; with more than half, the run diverges."""
    federation = Federation(small(**EXPERIMENT), tmp_path, settings={"min_clients": 1})
    federation.grid.carry = sends(fill(1e30), clients, range(9))
    run = federation.run()
    if len(clients) < 3:
        assert [[gone["client"] for gone in record["lost"]] for record in run.rounds] == [clients] * 3
        same_as_loop(run, federation.experiment)
    else:  # the wrong updates cannot be told from the right ones
        assert run.status == "diverged"
        assert run.rounds == []
        assert "the global model is out of all proportion after round 1" in run.summary["why"]


def test_too_few_valid_updates_repeat_the_missing_ones(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path, settings={"min_clients": 4})
    changed: list[int] = []

    def once(question: Message, deliver: Deliver) -> list[Message]:
        first = question.metadata.message_type == "train" and header_of(question.content).round == 2 and not changed
        if first and header_of(question.content).client == 1:
            changed.append(1)
            return sends(fill(1e30), [1], [2])(question, deliver)
        return [deliver()]

    federation.grid.carry = once
    run = federation.run()
    (note,) = run.rounds[1].pop("notes")
    assert note["what"].startswith("repeated, because at first: out of all proportion")
    same(run, fedgg.run(federation.experiment))


SETTINGS = {"trimmed_mean": {"robust__trim": 0.1}}  # of rules, beside their defaults
ROBUST: list[dict[str, Any]] = [
    *({"robust__rule": rule, **SETTINGS.get(rule, {})} for rule in RULES),
    {"privacy__clip": 1.0, "privacy__noise": 0.1, "privacy__delta": 1e-3},
]


@pytest.mark.parametrize("wrapper", ROBUST, ids=[*RULES, "privacy"])
@pytest.mark.parametrize("value", [1e30, 1e308])
def test_under_robust_rules_and_privacy(value: float, wrapper: dict[str, Any], tmp_path: Path) -> None:
    if "privacy__clip" in wrapper:
        pytest.importorskip("dp_accounting")
    changes = EXPERIMENT | {"algorithm__name": "fedavg"} | wrapper
    federation = Federation(small(**changes), tmp_path)
    federation.grid.carry = sends(fill(value), [1], [2])
    run = federation.run()
    assert run.status == "finished"
    if "privacy__clip" in wrapper:  # dropping must not depend on other clients' data; updates are clipped instead
        assert run.rounds[1]["lost"] == []
    else:
        assert [gone["client"] for gone in run.rounds[1]["lost"]] == [1]
        same_as_loop(run, federation.experiment)
    assert all(float(tensor.abs().max()) < 10 for tensor in run.weights.values())


def test_a_round_with_wrong_updates_alone_is_resumed_from_the_last_good_model(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.grid.carry = sends(fill(1e308), range(4), [2])
    run = federation.run()
    assert run.status == "diverged"
    assert run.summary["rounds_done"] == 1
    plain = fedgg.run(federation.experiment.changed({"rounds": 1}))
    saved = load_file(federation.out / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in plain.weights.items())
    federation.grid = InProcessGrid(federation.grid.nodes, {})  # the nodes are repaired and the server restarted
    same(federation.run(), fedgg.run(federation.experiment))
    assert json.loads((federation.out / "summary.json").read_text())["status"] == "finished"
    (resumed,) = [json.loads(line) for line in (federation.out / "resumes.jsonl").read_text().splitlines()]
    assert resumed["after_round"] == 1
    assert any("had diverged" in note for note in resumed["notes"])


@pytest.mark.parametrize("values", [{"examples": -5}, {"examples": "many"}, {"held_out": 1.5}, {"client": None}])
def test_a_run_folder_with_false_clients_is_refused_in_one_line(values: dict[str, Any], tmp_path: Path) -> None:
    federation = Federation(small(**(EXPERIMENT | {"rounds": 1})), tmp_path, settings=QUICK)
    federation.run()
    file = federation.out / "flower.json"
    content = json.loads(file.read_text())
    content["clients"][1] |= values
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"flower\.json cannot be read"):
        federation.run(rounds=2)
