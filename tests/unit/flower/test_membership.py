"""Which node is which client: ids change, nodes go and come back, and two of one are one too many."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Message
from in_process_grid import Deliver, Federation, forget_holdings, same, small

import fedgg
from fedgg.errors import UserError
from fedgg.flower import divide
from fedgg.flower.messages import about_of

EXPERIMENT = {"model__name": "linear", "algorithm__name": "scaffold", "server__cohort": 4, "rounds": 4}


def test_ids_are_given_anew_in_every_round(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)

    def way(question: Message, deliver: Deliver) -> list[Message]:
        reply = [deliver()]
        if question.metadata.message_type == "train" and about_of(question.content).client == 3:
            nodes = federation.grid.nodes
            federation.grid.nodes = {number + 1000: node for number, node in nodes.items()}
        return reply

    federation.grid.carry = way
    same(federation.run(), fedgg.run(federation.experiment))


def test_a_node_that_was_killed_still_counts_for_a_while(tmp_path: Path) -> None:
    """The new one is asked; the old one, which is connected by the list alone, never answers."""
    federation = Federation(small(**EXPERIMENT), tmp_path)
    dead: set[int] = set()

    def way(question: Message, deliver: Deliver) -> list[Message]:
        if question.metadata.dst_node_id in dead:
            return []
        reply = [deliver()]
        about = about_of(question.content)
        if question.metadata.message_type == "train" and (about.round, about.client) == (2, 3):
            dead.add(101)
            federation.grid.nodes[201] = federation.node(1)
        return reply

    federation.grid.carry = way
    same(federation.run(), fedgg.run(federation.experiment))


def test_a_node_that_is_no_client_of_this_experiment(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    stranger = federation.node(0)
    file = Path(stranger.config["data"]).with_name("client-7.npz")
    divide(small(**EXPERIMENT, split__clients=9), tmp_path / "other")
    (tmp_path / "other" / "client-7.npz").rename(file)
    stranger.config |= {"client-id": 7, "data": str(file)}
    federation.grid.nodes[201] = stranger
    same(federation.run(), fedgg.run(federation.experiment))
    said = "node 201 is refused: it says that it is client 7, but the experiment has 4 clients"
    assert any(sentence.startswith(said) for sentence in federation.notices)


def test_a_client_that_comes_back_with_other_data(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.run(rounds=2)
    divide(small(**EXPERIMENT, seed=9), tmp_path / "other")
    (tmp_path / "other" / "client-1.npz").replace(federation.folder / "data" / "client-1.npz")
    run = federation.run()
    (lost,) = run.rounds[-1]["lost"]
    assert lost["client"] == 1
    assert lost["why"].startswith("node 101 is refused: client 1 has ")
    forget_holdings(federation)
    run = federation.run(rounds=5)
    assert "node 101 is refused: client 1 came with other data than before" in run.rounds[-1]["lost"][0]["why"]


def test_clients_that_do_not_come(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    gone = federation.grid.nodes.pop(102)
    with pytest.raises(UserError, match=r"client 2 of 4 did not come within 0.5 s: start their nodes"):
        federation.run()
    assert not federation.out.exists()
    federation.grid.nodes[102] = gone
    federation.run(rounds=2)
    del federation.grid.nodes[102]
    run = federation.run()  # it is known by now, so the others go on
    assert [record["lost"] for record in run.rounds[2:]] == [[{"client": 2, "why": "its node is not connected"}]] * 2


def test_a_node_with_another_experiment(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.file.write_text(small(**EXPERIMENT, local__lr=0.1).to_toml())
    with pytest.raises(
        UserError, match=r"did not come .* says: this node was given another experiment than the server"
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
