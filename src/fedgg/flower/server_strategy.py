"""`fedgg.flower.strategy`: an algorithm as the strategy of an existing ServerApp, with `fedgg.flower.guided` clients.

    strategy = fedgg.flower.strategy(FedGG(mu=0.1), model, fraction_evaluate=0.5)
    result = strategy.start(grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=10)

Sampling, evaluation and configuration are Flower's. A reply that is not finite, out of proportion to the others or of
another shape is left out of the average, with a warning in the log. A round without any valid reply, or whose model
would not be finite, ends the run with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn

from fedgg.core.algorithm import Algorithm, Server
from fedgg.core.buffers import close_buffers
from fedgg.core.client_rows import Rows, read_only, stack
from fedgg.core.layout import Layout
from fedgg.core.local import LocalEnd
from fedgg.core.server import ServerState, in_proportion, shares, spoilt
from fedgg.errors import UserError
from fedgg.flower.app_project import MAX_EXAMPLES
from fedgg.flower.guided_training import ALGORITHM, BUFFERS, DOWN, UP, guidable_algorithm
from fedgg.flower.messages import (
    InvalidMessage,
    arrays_of,
    check_buffers,
    check_finite,
    check_specs,
    from_record,
    specs_of,
    to_record,
)

LOG = logging.getLogger("flwr")
EXAMPLES = "num-examples"
CPU = torch.device("cpu")


def strategy(
    algorithm: Algorithm, model: nn.Module, *, max_examples: int = MAX_EXAMPLES, **flower: Any
) -> GuidedStrategy:
    """`flower`: arguments of Flower's FedAvg, such as `fraction_train`, `min_train_nodes` and `fraction_evaluate`.

    A reply with more than `max_examples` in `num-examples` is left out.
    """
    return GuidedStrategy(algorithm, model, max_examples=max_examples, **flower)


class GuidedStrategy(FlowerFedAvg):
    """Flower's FedAvg; the algorithm determines the content of messages and the aggregation."""

    def __init__(self, algorithm: Algorithm, model: nn.Module, *, max_examples: int = MAX_EXAMPLES, **flower: Any):
        algorithm = guidable_algorithm(algorithm)
        super().__init__(**flower)
        self.max_examples = max_examples
        self.algorithm, self.model = algorithm, model.cpu()
        self.layout = Layout.of(self.model)
        self.memory: Rows | None = None
        self._server: Server | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round == 1:
            self.model.load_state_dict(arrays.to_torch_state_dict())
        w = self._w()
        if self.memory is None:
            self.memory = self.algorithm.server_memory(w)
        nodes = len(list(grid.get_node_ids()))
        config[ALGORITHM] = repr(self.algorithm)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._server = Server(self.memory, nodes, len(messages) / max(nodes, 1), server_round - 1)
        with torch.no_grad():
            w_sent, down = self.algorithm.broadcast(w, self._server), self.algorithm.send_down(w, self._server)
        model, down_record = self._state_with(w_sent), to_record(down)
        for message in messages:
            message.content[self.arrayrecord_key] = model
            if down:
                message.content[DOWN] = down_record
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self._server is not None
        valid = self._in_proportion(self._valid(list(replies)))
        if not valid:
            raise UserError(f"round {server_round}: no client sent a valid update")
        order = sorted(valid)  # floating-point sums depend on the order
        contents = [valid[node][2].content for node in order]
        counts = [self._examples(valid[node][2]) for node in order]
        with torch.no_grad():
            w, share = self._w(), shares(counts, self._w(), equally=False)
            up = stack([valid[node][0] for node in order])
            new, memory = self.algorithm.aggregate(w, read_only(up, "up"), share, self._server)
            before = ServerState(w, self._buffers(), self.memory or {})
            buffers = close_buffers("average", before.buffers, stack([valid[node][1] for node in order]), share)
            error = spoilt(before, ServerState(new, buffers, memory))
            if error is not None:  # the strategy keeps the model of the last round
                raise UserError(f"round {server_round}: {error}")
            self.memory = memory
            self._set(new)
            for name, rows in buffers.items():
                self.model.get_buffer(name).copy_(rows[0])
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        return ArrayRecord(self.model.state_dict()), metrics

    def _valid(self, replies: list[Message]) -> dict[int, tuple[Rows, Rows, Message]]:
        """By node: its update, its buffers, the message."""
        replies_by_node: dict[int, tuple[Rows, Rows, Message]] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise InvalidMessage(str(reply.error.reason))
                if node in replies_by_node:
                    raise InvalidMessage("it replied twice")
                up = check_finite(from_record(arrays_of(reply.content, UP), CPU), "")
                buffers = from_record(arrays_of(reply.content, BUFFERS), CPU) if self.layout.buffers else {}
                check_buffers(self._buffers(), check_specs(buffers, specs_of(self._buffers()), "its buffers"), "")
                check_specs({"delta": up.get("delta", torch.empty(1, 0))}, specs_of({"delta": self._w()}), "its update")
                self._examples(reply)
            except InvalidMessage as error:
                LOG.warning("fedgg: left out: node %d: %s", node, error)
                continue
            replies_by_node[node] = (up, buffers, reply)
        return _with_common_specs(replies_by_node)

    def _in_proportion(self, replies: dict[int, tuple[Rows, Rows, Message]]) -> dict[int, tuple[Rows, Rows, Message]]:
        """The same check as in other engines."""
        none = torch.zeros(1, 1)
        ends = {node: LocalEnd(up, {}, buffers, {}, none) for node, (up, buffers, _) in replies.items()}
        _, dropped = in_proportion(ends, self._w())
        for client in dropped:
            LOG.warning("fedgg: left out: node %d: %s", client.client, client.why)
            del replies[client.client]
        return replies

    def _examples(self, reply: Message) -> int:
        """The weight of a client: its number of examples, from 1 to `max_examples`."""
        for metrics in reply.content.metric_records.values():
            count = metrics.get(EXAMPLES)
            if isinstance(count, int | float) and count > self.max_examples:
                raise InvalidMessage(f"its {EXAMPLES!r} is {count:g}, and max_examples = {self.max_examples}")
            if isinstance(count, int | float) and count >= 1:
                return int(count)
        raise InvalidMessage(f"its metrics have no {EXAMPLES!r} above zero")

    def _w(self) -> torch.Tensor:
        return self.layout.flatten(dict(self.model.named_parameters()))

    def _buffers(self) -> Rows:
        return self.layout.buffer_rows(self.model)

    def _set(self, w: torch.Tensor) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in self.layout.unflatten(w).items():
            parameters[name].copy_(value[0])

    def _state_with(self, w: torch.Tensor) -> ArrayRecord:
        """The state dict of the model with these parameters; the model itself does not change."""
        before = self._w()
        with torch.no_grad():
            self._set(w)
            record = ArrayRecord(self.model.state_dict())
            self._set(before)
        return record


def _with_common_specs(replies_by_node: dict[int, tuple[Rows, Rows, Message]]) -> dict[int, tuple[Rows, Rows, Message]]:
    """Without replies whose names, dtypes or shapes differ from the most common ones."""
    specs = [str(specs_of(up)) for up, _, _ in replies_by_node.values()]
    most_common = max(sorted(set(specs)), key=specs.count, default="")
    for node, (up, _, _) in replies_by_node.items():
        if str(specs_of(up)) != most_common:
            LOG.warning("fedgg: left out: node %d: its entries %s are not those of the other replies", node, sorted(up))
    return {node: reply for node, reply in replies_by_node.items() if str(specs_of(reply[0])) == most_common}
