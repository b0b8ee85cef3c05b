"""A network that loses, repeats, holds back and mixes up what it carries; nodes that fail, vanish and come back.

A dropped client is named, the rest of the round is what it would be without the client, and a run that stopped goes
on to the loop's bits.
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
from fedgg.flower.messages import about_of, to_record

Change = Callable[[Message], None]


def in_round(number: int, client: int, carry: Carry, times: int = 99) -> Carry:
    """Only this client's messages of this round (its first so many) are carried that way."""
    left = [times]

    def way(question: Message, deliver: Deliver) -> list[Message]:
        about = about_of(question.content)
        hit = question.metadata.message_type == "train" and (about.round, about.client) == (number, client)
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
    """The node did its work; its answer is lost."""
    deliver()
    return []


def told(**values: Any) -> Change:
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


NAN = torch.full((1, 650), float("nan"), dtype=torch.float64)
EXPERIMENT = {"model__name": "linear", "algorithm__name": "scaffold", "server__cohort": 4, "rounds": 3}
FAULTS: dict[str, tuple[Carry, str]] = {
    "silent": (lose, "no answer within 0.5 s"),
    "crashed": (crashed, "its app failed: killed by a signal"),
    "answers twice": (lambda question, deliver: [deliver(), deliver()], "it answered 2 times"),
    "another run": (changed(told(run="abc")), "it answered for the run abc"),
    "another round": (changed(told(round=1)), "it answered for round 1 instead of 2"),
    "another attempt": (changed(told(attempt=2)), "it answered for attempt 2 instead of 1"),
    "another client": (changed(told(client=0)), "it answered for client 0 instead of 1"),
    "another format": (changed(told(format=2)), "it was written in format 2"),
    "nan": (changed(sends(delta=NAN)), "not finite: delta"),
    "wrong shape": (changed(sends(delta=NAN[:, :3])), "its message delta is torch.float64 [1, 3]"),
    "wrong type": (changed(sends(delta=NAN.float())), "its message delta is torch.float32"),
    "more": (changed(sends(more=NAN)), "its message holds more, which nobody asked for"),
    "written otherwise": (changed(flipped), "delta is written as 'numpy.ndarray'"),
    "says a lot": (
        changed(lambda reply: reply.content.config_records["answer"].update(refused="so\n\x1b[31m" + "o" * 999)),
        "so [31m" + "o" * 293,
    ),
    "no arrays": (changed(without("up")), "it has no arrays called 'up'"),
    "no numbers": (changed(without("numbers")), "it told no numbers where"),
    "no answer": (changed(without("answer")), "it does not say 'answer'"),
    "nothing": (changed(without("about")), "it does not say 'about'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whoever_fails_is_left_out_and_named(fault: str, tmp_path: Path) -> None:
    carry, why = FAULTS[fault]
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.grid.carry = in_round(2, 1, carry)
    run = federation.run()
    assert [len(record["clients"]) for record in run.rounds] == [4, 3, 4]
    (lost,) = run.rounds[1]["lost"]
    assert lost["client"] == 1
    assert lost["why"].startswith(why)
    assert any("client 1 dropped (" in sentence for sentence in federation.notices)
    same_with_a_loss(run, federation.experiment, lost["why"])


def same_with_a_loss(run: fedgg.Run, experiment: fedgg.Experiment, why: str) -> None:
    """The loop, with client 1 lost in round 2: memory and all."""
    from fedgg.core.server import Lost
    from fedgg.engines import Loop
    from fedgg.lab.build import build
    from fedgg.lab.state import begin, close_before_looking, next_job, record_of, train

    federation = build(experiment)
    state = begin(federation)
    for number in range(1, experiment.rounds + 1):
        job = next_job(federation, state)
        ends = dict(train(job, Loop()))
        if number == 2:
            ends[1] = Lost(1, why)
        closed = close_before_looking(federation, state, job, ends, 0.0)
        record = record_of(federation, closed, Loop().score(closed.looks))
        assert record | {"seconds": 0} == run.rounds[number - 1] | {"seconds": 0}
        state = closed.state


def test_a_client_that_is_not_finite_by_itself_is_named_as_in_the_loop(tmp_path: Path) -> None:
    experiment = small(local__lr=1e300, algorithm__name="fedprox")
    run, plain = Federation(experiment, tmp_path).run(), fedgg.run(experiment)
    assert run.status == plain.status == "diverged"
    assert run.summary["why"] == plain.summary["why"]


def test_too_few_means_again_and_nobody_works_twice_for_nothing(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path, settings={"min_clients": 4})
    federation.grid.carry = in_round(2, 1, lose, times=2)
    run = federation.run()
    asked = [about_of(m.content) for m in federation.grid.sent if m.metadata.message_type == "train"]
    assert [(a.client, a.attempt) for a in asked if a.round == 2] == [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]
    plain = fedgg.run(federation.experiment)
    (note,) = run.rounds[1].pop("notes")
    assert note == {"client": 1, "what": "asked again, because at first: no answer within 0.5 s"}
    same(run, plain)


def test_too_few_in_the_end_stops_cleanly_and_goes_on_later(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path, settings={"min_clients": 4, "attempts": 2})
    federation.grid.carry = in_round(2, 1, lose)
    with pytest.raises(UserError, match=r"round 2: 3 of 4 clients answered in 2 attempts, and 4 are needed \(client 1"):
        federation.run()
    lines = (federation.out / "rounds.jsonl").read_text().splitlines()
    assert len(lines) == 1  # nothing of the round that failed
    federation.grid.carry = in_round(0, 0, lose)
    same(federation.run(), fedgg.run(federation.experiment))


def test_half_is_enough_unless_told(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path, settings={"attempts": 1})

    def three_of_four(question: Message, deliver: Deliver) -> list[Message]:
        gone = question.metadata.message_type == "train" and about_of(question.content).client < 3
        return [] if gone else [deliver()]

    federation.grid.carry = three_of_four
    with pytest.raises(UserError, match="round 1: 1 of 4 clients answered in 1 attempts, and 2 are needed"):
        federation.run()


class Killed(BaseException):
    """The server's process ends here."""


@pytest.mark.parametrize(("after", "every"), [(after, 2) for after in range(5, 17)] + [(8, 1), (9, 1), (14, 1)])
def test_the_server_is_killed_at_any_message_and_goes_on(after: int, every: int, tmp_path: Path) -> None:
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


def test_a_torn_checkpoint_sends_the_server_back_and_nodes_remember_that_far(tmp_path: Path) -> None:
    """Round 5 has been asked for already, so every node knows of checkpoint 4, which then turns out to be torn."""
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


def test_memory_that_is_gone_is_said_and_written_down(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    federation.run(rounds=2)
    shutil.rmtree(federation.memory(1))
    run = federation.run()
    assert run.rounds[2]["notes"] == [{"client": 1, "what": "its memory of round 2 is gone, it started anew"}]
    assert "round 3: client 1: its memory of round 2 is gone, it started anew" in federation.notices
    assert json.loads((federation.out / "rounds.jsonl").read_text().splitlines()[2])["notes"]


def test_who_keeps_nothing_has_lost_nothing(tmp_path: Path) -> None:
    federation = Federation(small(**(EXPERIMENT | {"algorithm__name": "fedavg"})), tmp_path)
    federation.run(rounds=2)
    shutil.rmtree(federation.memory(1))
    same(federation.run(), fedgg.run(federation.experiment))


def test_a_client_that_fails_in_its_own_code_says_how(tmp_path: Path) -> None:
    federation = Federation(small(**EXPERIMENT), tmp_path)
    (federation.folder / "data" / "client-1.npz").write_bytes(b"torn")
    with pytest.raises(UserError, match="client 1 of 4 did not come within"):
        federation.run()
    assert any("cannot be read as .npz" in sentence for sentence in federation.notices)


def test_a_client_that_does_not_score_is_not_in_the_mean(tmp_path: Path) -> None:
    experiment = small(**EXPERIMENT, data__holdout=0.2)
    federation = Federation(experiment, tmp_path)

    def way(question: Message, deliver: Deliver) -> list[Message]:
        silent = question.metadata.message_type == "evaluate" and about_of(question.content).client == 1
        return [] if silent else [deliver()]

    federation.grid.carry = way
    run, plain = federation.run(), fedgg.run(experiment)
    assert set(run.rounds[0]["holdout_accuracy_by_client"]) == {"0", "2", "3"}
    assert run.rounds[0]["test_accuracy"] == plain.rounds[0]["test_accuracy"]
    assert any("client 1 did not say how good the model is: no answer" in sentence for sentence in federation.notices)
