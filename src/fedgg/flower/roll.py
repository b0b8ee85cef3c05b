"""Who is there: which node is which client.

Flower's node ids are random, and a node that comes back may have another one. So every node is asked who it is when it
is first seen, and the list is renewed before each round. Nobody waits twice for a node that does not answer: its reply
counts whenever it comes. The nodes of a simulation share the clients among them, and are asked for each by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fedgg.errors import UserError
from fedgg.flower.exchange import PAUSE, Exchange, Question
from fedgg.flower.letters import NEVER, NOBODY, About, Hello, hello_of, write
from fedgg.flower.records import BadRecord

PATIENCE = 60.0  # seconds that a round waits for a node which has just come
LIFE = 3600.0  # seconds after which a node that did not answer is asked again
AGAIN = 10.0  # and one that said no


@dataclass(frozen=True)
class Asked:
    question: Question
    at: float


@dataclass(frozen=True)
class Refused:
    why: str
    at: float


@dataclass
class Roll:
    """The nodes that are connected and have said who they are."""

    exchange: Exchange
    run: str
    experiment: str
    notice: Callable[[str], None]
    clients: int
    known: dict[tuple[int, int], Hello] = field(default_factory=dict)  # by node and client
    plays: dict[int, range] = field(default_factory=dict)  # by node of a simulation: its clients
    said: dict[int, Hello] = field(default_factory=dict)  # by client: what it said first, which must stay true
    asked: dict[str, Asked] = field(default_factory=dict)  # by message: who has not answered yet
    refused: dict[int, Refused] = field(default_factory=dict)  # by node: who said no
    followed: dict[int, int] = field(default_factory=dict)  # by node: the one that came as the same client after it

    def nodes(self) -> dict[int, int]:
        """By client."""
        return {client: node for node, client in self.known}

    def renew(self) -> dict[int, int]:
        """The nodes by client, as far as they have said so by now; those who are new are asked."""
        there, now = self.exchange.node_ids(), self.exchange.now()
        self.known = {key: hello for key, hello in self.known.items() if key[0] in there}
        self.followed = {a: b for a, b in self.followed.items() if a in there and b in there}
        self.asked = {
            number: asked
            for number, asked in self.asked.items()
            if asked.question.node in there and now - asked.at < LIFE
        }
        self.refused = {node: no for node, no in self.refused.items() if node in there and now - no.at < AGAIN}
        at_it = {(asked.question.node, asked.question.about.client) for asked in self.asked.values()}
        for node in sorted(there - self.refused.keys()):
            for client in self._unknown(node):
                if (node, client) not in at_it:
                    self._ask(node, client)
        waiting = {number: asked.question for number, asked in self.asked.items()}
        for number, reply in self.exchange.collect(waiting).items():
            question, why = self.asked.pop(number).question, reply.why
            node = question.node
            try:
                if reply.content is not None:
                    self._introduce(node, hello_of(reply.content), question.about.client)
            except BadRecord as error:
                why = str(error)
            if why:
                self.refused[node] = Refused(why, now)
                self.notice(f"node {node} did not say who it is: {why}")
        return self.nodes()

    def wait_for(self, clients: Collection[int], seconds: float) -> list[int]:
        """Those who have not come by then."""
        until = self.exchange.now() + seconds
        while missing := [client for client in clients if client not in self.renew()]:
            if self.exchange.now() >= until:
                return missing
            self.exchange.sleep(PAUSE)
        return []

    def after_hellos(self, clients: Collection[int]) -> dict[int, int]:
        """The nodes by client; where one is missing, those who have just come get a moment to say who they are."""
        while any(client not in self.renew() for client in clients):
            now = self.exchange.now()
            if not any(now - asked.at < min(PATIENCE, self.exchange.deadline) for asked in self.asked.values()):
                break
            self.exchange.sleep(PAUSE)
        return self.nodes()

    def forget(self, client: int) -> None:
        """It may have restarted as somebody else: ask again who it is."""
        self.known = {key: hello for key, hello in self.known.items() if key[1] != client}

    def _unknown(self, node: int) -> list[int]:
        """Whom to ask it for: who it is, or, in a simulation, those of its clients that are not known."""
        if node in self.plays:
            return [client for client in self.plays[node] if (node, client) not in self.known]
        return [] if any(one == node for one, _ in self.known) else [NOBODY]

    def _ask(self, node: int, client: int = NOBODY) -> None:
        about = About(self.run, self.experiment, round=NEVER, attempt=1, client=client)
        question = Question(node, about, write(about))
        number = self.exchange.post("query.hello", question, LIFE)
        if number is not None:
            self.asked[number] = Asked(question, self.exchange.now())

    def _introduce(self, node: int, hello: Hello, asked_for: int) -> None:
        if hello.simulated and asked_for == NOBODY:
            self.plays[node] = range(hello.client, self.clients, hello.simulated)
            return
        self._refuse_strangers(node, hello)
        if any(one == self.followed.get(node) for one, _ in self.known):
            raise UserError(
                f"nodes {node} and {self.followed[node]} both say that they are client {hello.client}: "
                f"give each its own client-id"
            )
        before = self.nodes().get(hello.client)
        if before is not None and before != node:
            # A node that was killed counts as connected for a while; if it answers still, there are two of them.
            self.followed[before] = node
            del self.known[before, hello.client]
            self._ask(before)
        self.known[node, hello.client] = hello

    def _refuse_strangers(self, node: int, hello: Hello) -> None:
        if not 0 <= hello.client < self.clients:
            raise UserError(
                f"node {node} says that it is client {hello.client}, but the experiment has {self.clients} clients: "
                f"give it a client-id from 0 to {self.clients - 1}, or set split.clients"
            )
        before = self.said.setdefault(hello.client, hello)
        if before != hello:
            raise UserError(
                f"client {hello.client} (node {node}) came with other data than before: {hello.examples} examples, "
                f"before {before.examples}; give it the file it had, or begin anew in another folder"
            )
