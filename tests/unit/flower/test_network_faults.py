"""Messages that are lost, repeated, delayed or changed, and nodes that fail.

A dropped client is named, the rest of the round is that of the loop without the client, and a run that stopped is
resumed to the same bits as the loop.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message
from in_process_grid import Carry, Deliver, Federation, InProcessGrid, same, small

import fedgg
from fedgg.errors import UserError
from fedgg.flower.messages import header_of, to_record

Change = Callable[[Message], None]


def in_round(number: int, client: int, carry: Carry, times: int = 99) -> Carry:
    """Carries the first so many messages of this client in this round that way."""
    left = [times]

    def way(question: Message, deliver: Deliver) -> list[Message]:
        header = header_of(question.content)
        hit = question.metadata.message_type == "train" and (header.round, header.client) == (number, client)
        if hit and left[0] > 0:
            left[0] -= 1
            return carry(question, deliver)
        return [deliver()]

    return way


def changed(change: Change) -> Carry:
    def way(question: Message, deliver: Deliver) -> list[Message]:
        reply = deliver()
        change(reply)
        return [reply]

    return way


def lose(question: Message, deliver: Deliver) -> list[Message]:
    """The node has trained, and its reply is lost."""
    deliver()
    return []


def header(**values: Any) -> Change:
    return lambda reply: reply.content.config_records["about"].update(values)


def sends(**rows: torch.Tensor) -> Change:
    def change(reply: Message) -> None:
        reply.content.array_records["up"].update(to_record(rows))

    return change


def without(name: str) -> Change:
    def change(reply: Message) -> None:
        del reply.content[name]

    return change


def flipped(reply: Message) -> None:
    array = reply.content.array_records["up"]["delta"]
    array.stype = "numpy.ndarray"


def crashed(question: Message, deliver: Deliver) -> list[Message]:
    return [Message(Error(code=0, reason="killed by\n a signal"), reply_to=question)]


MISSING_STATE = "its client state of round 2 is missing; it started from the initial state"
NAN = torch.full((1, 650), float("nan"), dtype=torch.float64)
EXPERIMENT = {"model__name": "linear", "algorithm__name": "scaffold", "server__cohort": 4, "rounds": 3}
FAULTS: dict[str, tuple[Carry, str]] = {
    "no reply": (lose, "no reply within 0.5 s"),
    "crashed": (crashed, "its ClientApp failed: killed by a signal"),
    "replies twice": (lambda question, deliver: [deliver(), deliver()], "it replied 2 times"),
    "another run": (changed(header(run="abc")), "it replied for run abc"),
    "another round": (changed(header(round=1)), "it replied for round 1 instead of 2"),
    "another attempt": (changed(header(attempt=2)), "it replied for attempt 2 instead of 1"),
    "another client": (changed(header(client=0)), "it replied for client 0 instead of 1"),
    "another format": (changed(header(format=2)), "its message format is 2"),
    "nan": (changed(sends(delta=NAN)), "not finite: delta"),
    "wrong shape": (changed(sends(delta=NAN[:, :3])), "its update: delta is torch.float64 [1, 3]"),
    "wrong type": (changed(sends(delta=NAN.float())), "its update: delta is torch.float32"),
    "more entries": (changed(sends(more=NAN)), "its update has the unexpected entry more"),
    "another serialization": (changed(flipped), "delta is serialized as 'numpy.ndarray'"),
    "a long reason": (
        changed(lambda reply: reply.content.config_records["answer"].update(refused="so\n\x1b[31m" + "o" * 999)),
        "so [31m" + "o" * 293,
    ),
    "no arrays": (changed(without("up")), "it has no arrays 'up'"),
    "no metrics": (changed(without("numbers")), "its metrics are none, expected"),
    "no status": (changed(without("answer")), "it has no record 'answer'"),
    "no header": (changed(without("about")), "it has no record 'about'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_that_fails_is_dropped_and_named(fault: str, tmp_path: Path) -> None:
    carry, why = FAULTS[fault]
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.grid.carry = in_round(2, 1, carry)
    run = federation.run()
    assert [len(record["clients"]) for record in run.rounds] == [4, 3, 4]
    (lost,) = run.rounds[1]["lost"]
    assert lost["client"] == 1
    assert lost["why"].startswith(why)
    assert any("client 1 dropped (" in sentence for sentence in federation.notices)
    same_with_a_dropped_client(run, federation.experiment, lost["why"])


def same_with_a_dropped_client(run: fedgg.Run, experiment: fedgg.Experiment, why: str) -> None:
    """The loop with client 1 dropped in round 2, client state included."""
    from fedgg.core.server import Lost
    from fedgg.engines import Fused
    from fedgg.lab.build import build
    from fedgg.lab.one_round import begin, close_before_looking, next_job, train
    from fedgg.lab.round_record import record_of

    federation = build(experiment)
    state = begin(federation)
    for number in range(1, experiment.rounds + 1):
        job = next_job(federation, state)
        ends = dict(train(job, Fused()))
        if number == 2:
            ends[1] = Lost(1, why)
        closed = close_before_looking(federation, state, job, ends, 0.0)
        record = record_of(federation, closed, Fused().score(closed.looks))
        assert record | {"seconds": 0} == run.rounds[number - 1] | {"seconds": 0}
        state = closed.state


def test_a_client_that_is_not_finite_by_itself_is_named_as_in_the_loop(tmp_path: Path) -> None:
    experiment = small(local__lr=1e300, algorithm__name="fedprox")
    run, plain = Federation(experiment, tmp_path).run(), fedgg.run(experiment)
    assert run.status == plain.status == "diverged"
    assert run.summary["why"] == plain.summary["why"]


def test_with_too_few_replies_the_missing_clients_are_repeated(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path, settings={"min_clients": 4})
    federation.grid.carry = in_round(2, 1, lose, times=2)
    run = federation.run()
    headers = [header_of(m.content) for m in federation.grid.sent if m.metadata.message_type == "train"]
    assert [(h.client, h.attempt) for h in headers if h.round == 2] == [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]
    plain = fedgg.run(federation.experiment)
    (note,) = run.rounds[1].pop("notes")
    assert note == {"client": 1, "what": "repeated, because at first: no reply within 0.5 s"}
    same(run, plain)


def test_with_too_few_replies_in_all_attempts_the_run_stops_and_can_be_resumed(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path, settings={"min_clients": 4, "attempts": 2})
    federation.grid.carry = in_round(2, 1, lose)
    with pytest.raises(UserError, match=r"round 2: 3 of 4 clients replied in 2 attempts, and 4 are needed \(client 1"):
        federation.run()
    lines = (federation.out / "rounds.jsonl").read_text().splitlines()
    assert len(lines) == 1  # nothing of the round that failed
    federation.grid.carry = in_round(0, 0, lose)
    same(federation.run(), fedgg.run(federation.experiment))


def test_half_of_the_clients_is_enough_by_default(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path, settings={"attempts": 1})

    def three_of_four(question: Message, deliver: Deliver) -> list[Message]:
        gone = question.metadata.message_type == "train" and header_of(question.content).client < 3
        return [] if gone else [deliver()]

    federation.grid.carry = three_of_four
    with pytest.raises(UserError, match="round 1: 1 of 4 clients replied in 1 attempts, and 2 are needed"):
        federation.run()


class Killed(BaseException):
    """The server's process ends here."""


@pytest.mark.parametrize(("after", "every"), [(after, 2) for after in range(5, 17)] + [(8, 1), (9, 1), (14, 1)])
def test_a_server_killed_at_any_message_resumes(after: int, every: int, tmp_path: Path) -> None:
    experiment = small(**EXPERIMENT, server__checkpoint_every=every)
    federation = Federation(experiment, tmp_path)

    def until(question: Message, deliver: Deliver) -> list[Message]:
        reply = deliver()
        if len(federation.grid.sent) == after:
            raise Killed
        return [reply]

    federation.grid.carry = until
    try:
        federation.run()
    except Killed:
        federation.grid = InProcessGrid(federation.grid.nodes, {})
    same(federation.run(), fedgg.run(experiment))


def test_nodes_have_the_state_for_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    """Messages of round 5 were sent, so every node knows of checkpoint 4, which is then damaged."""
    experiment = small(**(EXPERIMENT | {"rounds": 6}))
    federation = Federation(experiment, tmp_path)

    def kill(question: Message, deliver: Deliver) -> list[Message]:
        deliver()
        raise Killed

    federation.grid.carry = in_round(5, 3, kill)
    with pytest.raises(Killed):
        federation.run()
    newest = federation.out / "checkpoint" / "000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    federation.grid = InProcessGrid(federation.grid.nodes, {})
    same(federation.run(), fedgg.run(experiment))
    assert any("checkpoint 000004.safetensors is refused" in sentence for sentence in federation.notices)


def test_a_missing_client_state_is_recorded(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.run(rounds=2)
    shutil.rmtree(federation.memory(1))
    run = federation.run()
    assert run.rounds[2]["notes"] == [{"client": 1, "what": MISSING_STATE}]
    assert f"round 3: client 1: {MISSING_STATE}" in federation.notices
    assert json.loads((federation.out / "rounds.jsonl").read_text().splitlines()[2])["notes"]


def test_a_stateless_client_misses_no_state(tmp_path: Path) -> None:
    federation = Federation(small(**(EXPERIMENT | {"algorithm__name": "fedavg"})), tmp_path)
    federation.run(rounds=2)
    shutil.rmtree(federation.memory(1))
    same(federation.run(), fedgg.run(federation.experiment))


def test_an_error_on_a_node_reaches_the_server(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    (federation.folder / "data" / "client-1.npz").write_bytes(b"damaged")
    with pytest.raises(UserError, match="client 1 of 4 did not connect within"):
        federation.run()
    assert any("cannot be read as .npz" in sentence for sentence in federation.notices)


def test_a_client_that_does_not_evaluate_is_not_in_the_mean(tmp_path: Path) -> None:
    experiment = small(**EXPERIMENT, data__holdout=0.2)
    federation = Federation(experiment, tmp_path)

    def way(question: Message, deliver: Deliver) -> list[Message]:
        silent = question.metadata.message_type == "evaluate" and header_of(question.content).client == 1
        return [] if silent else [deliver()]

    federation.grid.carry = way
    run, plain = federation.run(), fedgg.run(experiment)
    assert set(run.rounds[0]["holdout_accuracy_by_client"]) == {"0", "2", "3"}
    assert run.rounds[0]["test_accuracy"] == plain.rounds[0]["test_accuracy"]
    assert any("client 1 did not evaluate the model: no reply" in sentence for sentence in federation.notices)
