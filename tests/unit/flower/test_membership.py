"""Which node is which client: node ids change, nodes disconnect and reconnect, two nodes claim one client."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Message
from in_process_grid import Deliver, Federation, remove_client_summaries, same, small

import fedgg
from fedgg.errors import UserError
from fedgg.flower import divide
from fedgg.flower.messages import header_of

EXPERIMENT = {"model__name": "linear", "algorithm__name": "scaffold", "server__cohort": 4, "rounds": 4}


def test_node_ids_that_change_in_every_round(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)

    def way(question: Message, deliver: Deliver) -> list[Message]:
        reply = [deliver()]
        if question.metadata.message_type == "train" and header_of(question.content).client == 3:
            nodes = federation.grid.nodes
            federation.grid.nodes = {number + 1000: node for number, node in nodes.items()}
        return reply

    federation.grid.carry = way
    same(federation.run(), fedgg.run(federation.experiment))


def test_a_killed_node_that_flower_still_lists(tmp_path: Path) -> None:
    """The new node of the client trains; the old one, which is listed as connected, does not reply."""
    federation = Federation(small(**EXPERIMENT), tmp_path)
    dead: set[int] = set()

    def way(question: Message, deliver: Deliver) -> list[Message]:
        if question.metadata.dst_node_id in dead:
            return []
        reply = [deliver()]
        header = header_of(question.content)
        if question.metadata.message_type == "train" and (header.round, header.client) == (2, 3):
            dead.add(101)
            federation.grid.nodes[201] = federation.node(1)
        return reply

    federation.grid.carry = way
    same(federation.run(), fedgg.run(federation.experiment))


def test_a_client_id_beyond_the_experiment(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    extra = federation.node(0)
    file = Path(extra.config["data"]).with_name("client-7.npz")
    divide(small(**EXPERIMENT, split__clients=9), tmp_path / "other")
    (tmp_path / "other" / "client-7.npz").rename(file)
    extra.config |= {"client-id": 7, "data": str(file)}
    federation.grid.nodes[201] = extra
    same(federation.run(), fedgg.run(federation.experiment))
    notice = "node 201 is rejected: it reports client 7, but the experiment has 4 clients"
    assert any(sentence.startswith(notice) for sentence in federation.notices)


def test_a_client_with_changed_data(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.run(rounds=2)
    divide(small(**EXPERIMENT, seed=9), tmp_path / "other")
    (tmp_path / "other" / "client-1.npz").replace(federation.folder / "data" / "client-1.npz")
    run = federation.run()
    (lost,) = run.rounds[-1]["lost"]
    assert lost["client"] == 1
    assert lost["why"].startswith("node 101 is rejected: client 1 has ")
    remove_client_summaries(federation)
    run = federation.run(rounds=5)
    assert "node 101 is rejected: client 1 has other data than before" in run.rounds[-1]["lost"][0]["why"]


def test_clients_that_do_not_connect(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    gone = federation.grid.nodes.pop(102)
    with pytest.raises(UserError, match=r"client 2 of 4 did not connect within 0.5 s: start their nodes"):
        federation.run()
    assert not federation.out.exists()
    federation.grid.nodes[102] = gone
    federation.run(rounds=2)
    del federation.grid.nodes[102]
    run = federation.run()  # its number of examples is known by now
    assert [record["lost"] for record in run.rounds[2:]] == [[{"client": 2, "why": "its node is not connected"}]] * 2


def test_nodes_that_are_connected_and_do_not_reply_in_time(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.grid.held = lambda question: 1_000_000 if question.metadata.dst_node_id in (101, 102) else 0
    remedy = r"2 connected nodes have not replied yet: set `wait` of the run config to more seconds"
    with pytest.raises(UserError, match=rf"client 1, 2 of 4 did not connect within 0.5 s: {remedy}"):
        federation.run()


def test_a_node_with_another_experiment(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.file.write_text(small(**EXPERIMENT, local__lr=0.1).to_toml())
    with pytest.raises(
        UserError, match=r"did not connect .* reports: this node has another experiment than the server"
    ):
        federation.run()


def test_files_of_another_division(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    divide(small(**EXPERIMENT, split__clients=5), tmp_path / "other")
    (tmp_path / "other" / "server.npz").replace(federation.folder / "data" / "server.npz")
    with pytest.raises(UserError, match=r"server\.npz was divided for 5 clients, split\.clients = 4"):
        federation.run()


def test_the_loop_does_not_go_on_where_clients_keep_their_memory_elsewhere(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.run(rounds=2)
    with pytest.raises(UserError, match="keep their memory on Flower's nodes"):
        fedgg.run(federation.experiment, out=federation.out)
    fedgg.run(federation.experiment.changed({"rounds": 2}), out=tmp_path / "loop")
    federation.settings["out"] = tmp_path / "loop"
    with pytest.raises(UserError, match="keep their memory in it: go on with fedgg resume"):
        federation.run()
