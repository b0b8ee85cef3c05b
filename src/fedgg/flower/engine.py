"""Flower as an engine: a round is one message to each client of the cohort and the replies to them.

Like every engine it trains the clients of a round and evaluates models; the session around it aggregates, checks,
records and resumes. Client state stays on the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord

from fedgg.core.buffers import travelling
from fedgg.core.evaluation import Score
from fedgg.core.local import LocalEnd
from fedgg.core.metrics import Metric
from fedgg.core.server import Lost, in_proportion
from fedgg.engines import RoundJob
from fedgg.engines.base import Look, score_here
from fedgg.errors import UserError
from fedgg.flower import messages
from fedgg.flower.app_project import RunConfig
from fedgg.flower.membership import Membership
from fedgg.flower.messages import (
    EVALUATION,
    NO_ROUND,
    InvalidMessage,
    MessageHeader,
    diagnostic_key,
    from_record,
    to_record,
)
from fedgg.flower.send_and_receive import Exchange, ExchangeLog, OutgoingMessage, Reply, one_line

NOT_FINITE = "not finite"
NO_SCORE = Score(0.0, 0, {})  # of no examples: a client that did not reply is not part of the mean


@dataclass
class FlowerEngine:
    """Trains clients on Flower nodes."""

    membership: Membership
    exchange: Exchange
    config: RunConfig
    example: LocalEnd  # what a client of this algorithm sends: names, dtypes and shapes
    history: Sequence[Mapping[str, Any]]  # the records of the finished rounds; grows during the run
    settled: Callable[[], int]  # the round of the oldest checkpoint
    log: ExchangeLog
    notice: Callable[[str], None]
    private: bool = False  # under [privacy], updates are not compared with those of other clients
    _last_used: dict[int, int] = field(default_factory=dict)
    _read: int = 0
    _trained_in: dict[int, set[int]] = field(default_factory=dict)  # clients by round

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd | Lost]]:
        """Train the cohort; if too few clients reply, send to the missing ones again, up to `attempts` times."""
        results: dict[int, LocalEnd | Lost] = {}
        for attempt in range(1, self.config.attempts + 1):
            missing = [client for client in job.cohort if not isinstance(results.get(client), LocalEnd)]
            results |= {
                client: _with_note(result, results.get(client))
                for client, result in self._train_clients(job, missing, attempt).items()
            }
            results |= self._out_of_proportion(job, results)
            self._trained_in[job.round + 1] = {c for c, result in results.items() if isinstance(result, LocalEnd)}
            if self._enough(job, results):
                return iter(results.items())
            self.notice(f"round {job.round + 1}, attempt {attempt}: too few clients: {_dropped_text(results)}")
        raise UserError(
            f"round {job.round + 1}: {_count_trained(results)} of {len(job.cohort)} clients replied in "
            f"{self.config.attempts} attempts, and {self.config.enough(len(job.cohort))} are needed "
            f"({_dropped_text(results)}): check their nodes and start the run again; finished rounds are in "
            f"{self.config.out}"
        )

    def score(self, looks: Sequence[Look]) -> list[Score]:
        """Models on the server's test set are evaluated here, models on clients' held-out examples by the clients."""
        scores: dict[tuple[str, int], Score] = {}
        for model in dict.fromkeys(look.model for look in looks):
            client_looks = {look.client: look for look in looks if look.client is not None and look.model == model}
            if client_looks:
                on_clients = self._evaluate_on_clients(client_looks)
                scores |= {(model, client): score for client, score in on_clients.items()}
        return [score_here([look])[0] if look.client is None else scores[look.model, look.client] for look in looks]

    def _out_of_proportion(self, job: RoundJob, results: Mapping[int, LocalEnd | Lost]) -> dict[int, LocalEnd | Lost]:
        """The same check as at the end of a round, made earlier so that these clients are sent to again."""
        if self.private:
            return {}
        trained = {client: result for client, result in results.items() if isinstance(result, LocalEnd)}
        _, dropped = in_proportion(trained, job.w)
        return {client.client: client for client in dropped}

    def _enough(self, job: RoundJob, results: Mapping[int, LocalEnd | Lost]) -> bool:
        """Also true if all replies have NaN or infinity: the run has diverged, and a repetition does not help."""
        if all(isinstance(result, Lost) and result.why.startswith(NOT_FINITE) for result in results.values()):
            return True
        return _count_trained(results) >= self.config.enough(len(job.cohort))

    def _train_clients(self, job: RoundJob, clients: list[int], attempt: int) -> dict[int, LocalEnd | Lost]:
        """One exchange of messages."""
        nodes = self._nodes(clients, self.config.enough(len(job.cohort)))
        number, last_used = job.round + 1, self._last_used_rounds()
        shared = {"model": to_record({"w": job.w})} | ({"down": to_record(job.down)} if job.down else {})
        buffers = to_record(job.travelling_down)
        requests = []
        for client in clients:
            if client in nodes:
                header = self._header(number, attempt, client, self.settled(), last_used.get(client, NO_ROUND))
                arrays = shared | ({"buffers": buffers} if job.buffers_down(client) else {})
                requests.append(OutgoingMessage(nodes[client], header, messages.message_content(header, arrays)))
        results: dict[int, LocalEnd | Lost] = {
            client: Lost(client, self.membership.reason_absent(client)) for client in clients
        }
        with self.log.record("train", number, attempt, clients, self.exchange) as dropped:
            for request, reply in self.exchange.send_and_receive("train", requests):
                client = request.header.client
                results[client] = self._trained(job, client, reply)
            dropped.extend(result for result in results.values() if isinstance(result, Lost))
        for request in requests:  # a node that failed may come back as another client
            if isinstance(results[request.header.client], Lost):
                self.membership.remove(request.header.client)
        return {client: results[client] for client in clients}

    def _header(
        self, number: int, attempt: int, client: int, settled: int = NO_ROUND, last_used: int = NO_ROUND
    ) -> MessageHeader:
        run, experiment = self.membership.run, self.membership.experiment
        return MessageHeader(run, experiment, number, attempt, client, settled, last_used)

    def _nodes(self, clients: list[int], needed: int) -> dict[int, int]:
        """Node by client; waits for missing nodes if the round would fail without them."""
        nodes = self.membership.wait_for_new_nodes(clients)
        if sum(client in nodes for client in clients) < min(needed, len(clients)):
            self.membership.wait_for(clients, self.config.wait)
            nodes = self.membership.nodes()
        return nodes

    def _last_used_rounds(self) -> dict[int, int]:
        """By client: the last finished round that used its reply."""
        for record in self.history[self._read :]:
            self._last_used |= {line["client"]: record["round"] for line in record["clients"]}
        self._read = len(self.history)
        return self._last_used

    def _trained(self, job: RoundJob, client: int, reply: Reply) -> LocalEnd | Lost:
        if reply.content is None:
            return Lost(client, reply.why)
        device, buffers_before = job.w.device, job.buffers_before(client)
        try:
            up = from_record(messages.arrays_of(reply.content, "up"), device)
            up = messages.check_specs(up, messages.specs_of(self.example.up), "its update")
            buffers = buffers_before
            if job.policy != "frozen" and "buffers" in reply.content:
                sent = from_record(messages.arrays_of(reply.content, "buffers"), device)
                buffers = buffers | messages.check_subset(sent, messages.specs_of(job.buffers), "its buffers")
            metrics = messages.metrics_of(reply.content, {"loss", *map(diagnostic_key, self.example.diagnostics)})
            messages.check_finite(up, "")
            messages.check_buffers(buffers_before, buffers, "")
        except InvalidMessage as error:
            return Lost(client, one_line(str(error)))
        values = {name: torch.tensor([[value]], dtype=torch.float64).to(job.w.dtype) for name, value in metrics.items()}
        diagnostics = {name: values[diagnostic_key(name)] for name in self.example.diagnostics}
        return LocalEnd(up, {}, buffers, diagnostics, values["loss"], reply.status.note)

    def _evaluate_on_clients(self, looks: Mapping[int, Look]) -> dict[int, Score]:
        """Scores of the clients that have held-out examples."""
        clients = list(looks)
        nodes, number = self.membership.update(), len(self.history) + 1
        model = to_record({"w": next(iter(looks.values())).w})
        requests = []
        for client, look in looks.items():
            if client in nodes:
                met = self._last_round_of(client, number) if look.model == "personal" else NO_ROUND
                header = self._header(number, 1, client, last_used=met)
                content = messages.message_content(header, _model_arrays(look, model))
                if look.model != "global":
                    content[EVALUATION] = ConfigRecord({"model": look.model})
                requests.append(OutgoingMessage(nodes[client], header, content))
        scores: dict[int, Score | Lost] = {
            client: Lost(client, self.membership.reason_absent(client)) for client in clients
        }
        with self.log.record("evaluate", number, 1, clients, self.exchange) as dropped:
            for request, reply in self.exchange.send_and_receive("evaluate", requests):
                client = request.header.client
                scores[client] = self._evaluated(client, reply, looks[client].net.metrics)
            dropped.extend(score for score in scores.values() if isinstance(score, Lost))
        for lost in dropped:
            self.notice(f"round {number}: client {lost.client} did not evaluate the model: {lost.why}")
        return {client: NO_SCORE if isinstance(score, Lost) else score for client, score in scores.items()}

    def _last_round_of(self, client: int, number: int) -> int:
        """The last round that used the client's reply, up to the one that is being evaluated."""
        if client in self._trained_in.get(number, ()):
            return number
        return self._last_used_rounds().get(client, NO_ROUND)

    def _evaluated(self, client: int, reply: Reply, metrics: Sequence[Metric]) -> Score | Lost:
        if reply.content is None:
            return Lost(client, reply.why)
        try:
            values = messages.metrics_of(reply.content, {"loss", *(metric.name for metric in metrics)})
        except InvalidMessage as error:
            return Lost(client, one_line(str(error)))
        for metric in metrics:
            if metric.percent and (values[metric.name] < 0 or values[metric.name] > 1):
                return Lost(client, f"it sent the {metric.name} {values[metric.name]}")
        loss, held_out = values["loss"], self.membership.client_info[client].held_out
        return Score(loss, held_out, {metric.name: values[metric.name] for metric in metrics})


def _model_arrays(look: Look, model: ArrayRecord) -> dict[str, ArrayRecord]:
    buffers = travelling(look.net.moving, look.net.start_buffers, look.buffers)
    return {"model": model} | ({"buffers": to_record(buffers)} if buffers else {})


def _with_note(result: LocalEnd | Lost, before: LocalEnd | Lost | None) -> LocalEnd | Lost:
    """Adds a note on the first attempt's failure, which is written into the record of the round."""
    if isinstance(result, LocalEnd) and isinstance(before, Lost):
        return replace(result, note="; ".join(filter(None, [f"repeated, because at first: {before.why}", result.note])))
    return result


def _count_trained(results: Mapping[int, LocalEnd | Lost]) -> int:
    return sum(isinstance(result, LocalEnd) for result in results.values())


def _dropped_text(results: Mapping[int, LocalEnd | Lost]) -> str:
    return "; ".join(f"client {result.client}: {result.why}" for result in results.values() if isinstance(result, Lost))
