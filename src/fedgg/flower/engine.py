"""Flower as one more engine: a round is a message to every client of the cohort, and what comes back.

Like every engine it trains the clients of a round and scores models; the session around it aggregates, guards, records
and resumes as ever. What clients keep between rounds stays with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import ArrayRecord

from fedgg.core.buffers import travelling, travels
from fedgg.core.evaluate import Score
from fedgg.core.local import LocalEnd
from fedgg.core.server import Lost, in_proportion
from fedgg.engines import RoundJob
from fedgg.engines.base import Look, score_here
from fedgg.errors import UserError
from fedgg.flower.app_config import RunSettings
from fedgg.flower.exchange import Exchange, ExchangeLog, Question, Reply, one_line
from fedgg.flower.membership import Roll
from fedgg.flower.messages import (
    NEVER,
    About,
    BadRecord,
    arrays_of,
    check_buffers,
    check_finite,
    check_kinds,
    check_some,
    from_record,
    kinds,
    numbers_of,
    reading,
    to_record,
    write,
)

NOT_FINITE = "not finite"
NO_SCORE = Score(0.0, 0.0, 0)  # of no example: whoever did not answer is not in the mean


@dataclass
class OverMessages:
    """Trains clients that have machines of their own."""

    roll: Roll
    exchange: Exchange
    settings: RunSettings
    example: LocalEnd  # what a client of this algorithm sends, by names, types and shapes
    history: Sequence[Mapping[str, Any]]  # the finished rounds, growing
    settled: Callable[[], int]
    log: ExchangeLog
    notice: Callable[[str], None]
    private: bool = False  # then no client is judged by what others sent
    _met: dict[int, int] = field(default_factory=dict)
    _read: int = 0

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd | Lost]]:
        """Ask; as long as too few have answered, ask those again who have not; give up cleanly."""
        ends: dict[int, LocalEnd | Lost] = {}
        for attempt in range(1, self.settings.attempts + 1):
            missing = [client for client in job.cohort if not isinstance(ends.get(client), LocalEnd)]
            ends |= {
                client: _noted(end, ends.get(client)) for client, end in self._asked(job, missing, attempt).items()
            }
            ends |= self._out_of_proportion(job, ends)
            if self._enough(job, ends):
                return iter(ends.items())
            self.notice(f"round {job.round + 1}, attempt {attempt}: too few clients: {_named(ends)}")
        raise UserError(
            f"round {job.round + 1}: {_healthy(ends)} of {len(job.cohort)} clients answered in "
            f"{self.settings.attempts} attempts, and {self.settings.enough(len(job.cohort))} are needed "
            f"({_named(ends)}): see to their nodes and start again, finished rounds are kept in {self.settings.out}"
        )

    def score(self, looks: Sequence[Look]) -> list[Score]:
        """The server's test set here; what clients keep back, with them."""
        away = {look.client: look for look in looks if look.client is not None}
        found = self._by_clients(away) if away else {}
        return [found[look.client] if look.client is not None else score_here([look])[0] for look in looks]

    def _out_of_proportion(self, job: RoundJob, ends: Mapping[int, LocalEnd | Lost]) -> dict[int, LocalEnd | Lost]:
        """As the session does when it closes the round; here, so that clients are asked again if too few are left."""
        if self.private:
            return {}
        _, lost = in_proportion({client: end for client, end in ends.items() if isinstance(end, LocalEnd)}, job.w)
        return {gone.client: gone for gone in lost}

    def _enough(self, job: RoundJob, ends: Mapping[int, LocalEnd | Lost]) -> bool:
        """Where everybody has answered and nobody with a number, asking again is no use: the run has diverged."""
        if all(isinstance(end, Lost) and end.why.startswith(NOT_FINITE) for end in ends.values()):
            return True
        return _healthy(ends) >= self.settings.enough(len(job.cohort))

    def _asked(self, job: RoundJob, clients: list[int], attempt: int) -> dict[int, LocalEnd | Lost]:
        """One exchange."""
        nodes = self._nodes(clients, self.settings.enough(len(job.cohort)))
        number, met = job.round + 1, self._last_met()
        shared = {"model": to_record({"w": job.w})} | ({"down": to_record(job.down)} if job.down else {})
        buffers = to_record(job.travelling_down)
        questions = []
        for client in clients:
            if client in nodes:
                about = About(
                    self.roll.run, self.roll.experiment, number, attempt, client, self.settled(), met.get(client, NEVER)
                )
                arrays = shared | ({"buffers": buffers} if job.buffers_down(client) else {})
                questions.append(Question(nodes[client], about, write(about, arrays)))
        ends: dict[int, LocalEnd | Lost] = {client: Lost(client, self.roll.absence(client)) for client in clients}
        with self.log.exchange("train", number, attempt, clients, self.exchange) as done:
            for question, reply in self.exchange.ask("train", questions):
                client = question.about.client
                ends[client] = self._end(job, client, reply)
            done.lost.extend(end for end in ends.values() if isinstance(end, Lost))
        for question in questions:  # a node that fails may be somebody else by now
            if isinstance(ends[question.about.client], Lost):
                self.roll.forget(question.about.client)
        return {client: ends[client] for client in clients}

    def _nodes(self, clients: list[int], needed: int) -> dict[int, int]:
        """Waits only where a round would fail without those who are missing."""
        nodes = self.roll.after_hellos(clients)
        if sum(client in nodes for client in clients) < min(needed, len(clients)):
            self.roll.wait_for(clients, self.settings.wait)
            nodes = self.roll.nodes()
        return nodes

    def _last_met(self) -> dict[int, int]:
        """By client: the last finished round that it is a part of."""
        for record in self.history[self._read :]:
            self._met |= {line["client"]: record["round"] for line in record["clients"]}
        self._read = len(self.history)
        return self._met

    def _end(self, job: RoundJob, client: int, reply: Reply) -> LocalEnd | Lost:
        if reply.content is None:
            return Lost(client, reply.why)
        device = job.w.device
        try:
            up = check_kinds(from_record(arrays_of(reply.content, "up"), device), kinds(self.example.up), "its message")
            buffers = job.buffers_before(client)
            if travels(job.policy)[1] and "buffers" in reply.content:
                found = from_record(arrays_of(reply.content, "buffers"), device)
                buffers = buffers | check_some(found, kinds(job.buffers), "its statistics")
            numbers = numbers_of(reply.content, {"loss", *map(reading, self.example.diagnostics)})
            check_finite(up, "")
            check_buffers(job.buffers_before(client), buffers, "")
        except BadRecord as error:
            return Lost(client, one_line(str(error)))
        told = {name: torch.tensor([[value]], dtype=torch.float64).to(job.w.dtype) for name, value in numbers.items()}
        diagnostics = {name: told[reading(name)] for name in self.example.diagnostics}
        return LocalEnd(up, {}, buffers, diagnostics, told["loss"], reply.answer.note)

    def _by_clients(self, looks: Mapping[int, Look]) -> dict[int, Score]:
        """Ask every client that keeps examples back."""
        clients = list(looks)
        nodes, number = self.roll.renew(), len(self.history) + 1
        model = to_record({"w": next(iter(looks.values())).w})
        questions = []
        for client, look in looks.items():
            if client in nodes:
                about = About(self.roll.run, self.roll.experiment, number, 1, client)
                questions.append(Question(nodes[client], about, write(about, _model_of(look, model))))
        found: dict[int, Score | Lost] = {client: Lost(client, self.roll.absence(client)) for client in clients}
        with self.log.exchange("evaluate", number, 1, clients, self.exchange) as done:
            found |= {
                q.about.client: self._score(q.about.client, reply)
                for q, reply in self.exchange.ask("evaluate", questions)
            }
            lost = [score for score in found.values() if isinstance(score, Lost)]
            done.lost.extend(lost)
        for gone in lost:
            self.notice(f"round {number}: client {gone.client} did not say how good the model is: {gone.why}")
        return {client: NO_SCORE if isinstance(score, Lost) else score for client, score in found.items()}

    def _score(self, client: int, reply: Reply) -> Score | Lost:
        if reply.content is None:
            return Lost(client, reply.why)
        try:
            numbers = numbers_of(reply.content, {"accuracy", "loss"})
        except BadRecord as error:
            return Lost(client, one_line(str(error)))
        if not 0 <= numbers["accuracy"] <= 1:
            return Lost(client, f"it sent the accuracy {numbers['accuracy']}")
        return Score(numbers["accuracy"], numbers["loss"], self.roll.said[client].held_out)


def _model_of(look: Look, model: ArrayRecord) -> dict[str, ArrayRecord]:
    buffers = travelling(look.net.moving, look.net.start_buffers, look.buffers)
    return {"model": model} | ({"buffers": to_record(buffers)} if buffers else {})


def _noted(end: LocalEnd | Lost, before: LocalEnd | Lost | None) -> LocalEnd | Lost:
    """A client that answered only when it was asked again says why."""
    if isinstance(end, LocalEnd) and isinstance(before, Lost):
        return replace(end, note="; ".join(filter(None, [f"asked again, because at first: {before.why}", end.note])))
    return end


def _healthy(ends: Mapping[int, LocalEnd | Lost]) -> int:
    return sum(isinstance(end, LocalEnd) for end in ends.values())


def _named(ends: Mapping[int, LocalEnd | Lost]) -> str:
    return "; ".join(f"client {end.client}: {end.why}" for end in ends.values() if isinstance(end, Lost))
