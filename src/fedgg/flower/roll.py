"""Who is there: which node is which client.

Flower's node ids are random, and a node that comes back may have another one. So every node is asked who it is when it
is first seen, and the list is renewed before each round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fedgg.errors import UserError
from fedgg.flower.exchange import PAUSE, Exchange, Question
from fedgg.flower.letters import About, Hello, hello_of, write
from fedgg.flower.records import BadRecord

NOBODY = -1


@dataclass
class Roll:
    """The nodes that are connected and have said who they are."""

    exchange: Exchange
    run: str
    experiment: str
    notice: Callable[[str], None]
    clients: int
    known: dict[int, Hello] = field(default_factory=dict)  # by node
    said: dict[int, Hello] = field(default_factory=dict)  # by client: what it said first, which must stay true
    silent: set[int] = field(default_factory=set)  # nodes that are there and do not answer

    def nodes(self) -> dict[int, int]:
        """By client."""
        return {hello.client: node for node, hello in self.known.items()}

    def renew(self, wanted: Collection[int]) -> dict[int, int]:
        """The nodes by client, after those who are new have been asked. Who did not answer before is asked again only
        while a wanted client is missing."""
        there = self.exchange.node_ids()
        self.known = {node: hello for node, hello in self.known.items() if node in there}
        self.silent &= there
        new = there - self.known.keys() - self.silent
        if not new and any(client not in self.nodes() for client in wanted):
            new = set(self.silent)
        self._meet(sorted(new))
        return self.nodes()

    def wait_for(self, clients: Collection[int], seconds: float) -> list[int]:
        """Those who have not come by then."""
        until = self.exchange.now() + seconds
        while missing := [client for client in clients if client not in self.renew(clients)]:
            if self.exchange.now() >= until:
                return missing
            self.exchange.sleep(5 * PAUSE)
        return []

    def forget(self, client: int) -> None:
        """It may have restarted as somebody else: ask again who it is."""
        self.known = {node: hello for node, hello in self.known.items() if hello.client != client}

    def _meet(self, nodes: list[int]) -> None:
        for node, hello in self._asked(nodes).items():
            if hello is None:
                self.silent.add(node)
                continue
            self.silent.discard(node)
            self._refuse_another(node, hello)
            twin = self.nodes().get(hello.client)
            if twin is not None and twin != node:
                self._settle(twin, node, hello.client)
            self.known[node] = hello

    def _settle(self, before: int, now: int, client: int) -> None:
        """A node that was killed counts as connected for a while. If it answers still, there are two of them."""
        if self._asked([before])[before] is not None:
            raise UserError(
                f"nodes {before} and {now} both say that they are client {client}: give each its own client-id"
            )
        del self.known[before]
        self.silent.add(before)

    def _refuse_another(self, node: int, hello: Hello) -> None:
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

    def _asked(self, nodes: list[int]) -> dict[int, Hello | None]:
        about = About(self.run, self.experiment, round=0, attempt=1, client=NOBODY)
        questions = [Question(node, about, write(about)) for node in nodes]
        found: dict[int, Hello | None] = {}
        for place, reply in self.exchange.ask("query.hello", questions).items():
            node, why = nodes[place], reply.why
            found[node] = None
            if reply.content is not None:
                try:
                    found[node] = hello_of(reply.content)
                except BadRecord as error:
                    why = str(error)
            if found[node] is None:
                self.notice(f"node {node} did not say who it is: {why}")
        return found
