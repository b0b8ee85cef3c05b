"""Who is there: which node is which client.

Flower's node ids are random, and a node that comes back may have another one. So every node is asked who it is when it
is first seen, and the list is renewed before each round. Nobody waits twice for a node that does not answer: its reply
counts whenever it comes. The nodes of a simulation share the clients among them, and are asked for each by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fedgg.flower.exchange import PAUSE, Exchange, Question, one_line
from fedgg.flower.messages import NEVER, NOBODY, About, BadRecord, Hello, hello_of, write

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


class Rejected(Exception):
    """What a node says of itself cannot be true; `client` is the one it says it is."""

    def __init__(self, why: str, client: int = NOBODY):
        super().__init__(why)
        self.client = client


@dataclass
class Roll:
    """The nodes that are connected and have said who they are."""

    exchange: Exchange
    run: str
    experiment: str
    notice: Callable[[str], None]
    clients: int
    refusal: Callable[[Hello], str | None] = lambda hello: None  # why what a node says cannot be true
    simulation: bool = False  # whether nodes may play several clients
    known: dict[tuple[int, int], Hello] = field(default_factory=dict)  # by node and client
    plays: dict[int, range] = field(default_factory=dict)  # by node of a simulation: its clients
    said: dict[int, Hello] = field(default_factory=dict)  # by client: what it said first, which must stay true
    asked: dict[str, Asked] = field(default_factory=dict)  # by message: who has not answered yet
    refused: dict[int, Refused] = field(default_factory=dict)  # by node: who said no
    rejected: dict[int, Rejected] = field(default_factory=dict)  # by node: what it said cannot be true
    followed: dict[int, int] = field(default_factory=dict)  # by node: the one that came as the same client after it
    second: dict[int, int] = field(default_factory=dict)  # by node: the other one that is its client
    _noticed: set[tuple[int, str]] = field(default_factory=set)

    def nodes(self) -> dict[int, int]:
        """By client."""
        return {client: node for node, client in self.known}

    def renew(self) -> dict[int, int]:
        """The nodes by client, as far as they have said so by now; those who are new are asked."""
        there, now = self.exchange.node_ids(), self.exchange.now()
        self.known = {key: hello for key, hello in self.known.items() if key[0] in there}
        self.followed = {a: b for a, b in self.followed.items() if a in there and b in there}
        self.second = {a: b for a, b in self.second.items() if a in there and b in there}
        self.rejected = {node: no for node, no in self.rejected.items() if node in there}
        self.asked = {
            number: asked
            for number, asked in self.asked.items()
            if asked.question.node in there and now - asked.at < LIFE
        }
        self.refused = {node: no for node, no in self.refused.items() if node in there and now - no.at < AGAIN}
        at_it = {(asked.question.node, asked.question.about.client) for asked in self.asked.values()}
        for node in sorted(there - self.refused.keys() - self.second.keys()):
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
                self._reject(node, Rejected(str(error)))
            except Rejected as rejected:
                self._reject(node, rejected)
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

    def absence(self, client: int) -> str:
        """Why there is no node to ask for this client."""
        reasons = [f"node {node} is refused: {no}" for node, no in self.rejected.items() if no.client == client]
        return one_line(reasons[0]) if reasons else "its node is not connected"

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
        """Rejected where what it says cannot be true."""
        if hello.simulated:
            self._introduce_simulated(node, hello, asked_for)
            return
        if asked_for not in (NOBODY, hello.client):
            raise Rejected(f"it was asked as client {asked_for} and answers as client {hello.client}", asked_for)
        refusal = self.refusal(hello)
        if refusal is not None:
            raise Rejected(refusal, hello.client)
        before = self.said.get(hello.client, hello)
        if before != hello:
            raise Rejected(_other_data(hello, before), hello.client)
        client, first = hello.client, self.nodes().get(hello.client)
        follower = self.followed.pop(node, None)
        if follower is not None and (follower, client) in self.known:
            # It was not dead, only followed: there are two of them, and the first one stays.
            del self.known[follower, client]
            self.second[follower] = node
            why = f"node {node} is client {client} already, and answers: give each node its own client-id"
            self._reject(follower, Rejected(why, client))
        elif first is not None and first != node:
            # A node that was killed counts as connected for a while; if it answers still, there are two of them.
            self.followed[first] = node
            del self.known[first, client]
            self._ask(first)
        self.said[client] = hello
        self.known[node, client] = hello
        self.rejected.pop(node, None)

    def _introduce_simulated(self, node: int, hello: Hello, asked_for: int) -> None:
        """A node of a simulation says which part of the clients it plays; nobody else may play more than one."""
        nodes = len(self.exchange.node_ids())
        if not self.simulation or asked_for != NOBODY:
            raise Rejected("it says that it is a node of a simulation, which this is not")
        if not (nodes <= hello.simulated and 0 <= hello.client < hello.simulated):
            raise Rejected(f"it says that it is node {hello.client} of {hello.simulated}, and {nodes} are connected")
        self.plays[node] = range(hello.client, self.clients, hello.simulated)

    def _reject(self, node: int, rejected: Rejected) -> None:
        why = one_line(str(rejected))
        if (node, why) not in self._noticed:
            self.notice(f"node {node} is refused: {why}")
            self._noticed.add((node, why))
        self.rejected[node] = Rejected(why, rejected.client)
        self.refused[node] = Refused(why, self.exchange.now())


def _other_data(hello: Hello, before: Hello) -> str:
    if not before.data:
        return f"client {hello.client} is left out of this run, which began without it"
    return (
        f"client {hello.client} came with other data than before: {hello.examples} examples, before {before.examples}; "
        f"give it the file it had, or begin anew in another folder"
    )
