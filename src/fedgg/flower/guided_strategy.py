"""An algorithm as a Flower strategy: for Flower apps that exist already, the server's half of `fedgg.flower.guided`.

    strategy = fedgg.flower.strategy(FedGG(mu=0.1), model, fraction_evaluate=0.5)
    result = strategy.start(grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=10)

Sampling, evaluation and configuration are Flower's own. Clients whose answer is not finite, out of all proportion or of
another shape are left out and named in the log; a round without any healthy answer, or whose model would not be finite,
ends the run instead of passing for one.
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

from fedgg.core.algorithm import Algorithm, Hub
from fedgg.core.buffers import close_buffers
from fedgg.core.collect import shares
from fedgg.core.layout import Layout
from fedgg.core.local import LocalEnd
from fedgg.core.rows import Rows, read_only, stack
from fedgg.core.server import ServerState, in_proportion, spoilt
from fedgg.errors import UserError
from fedgg.flower.app_config import MAX_EXAMPLES
from fedgg.flower.guided_client import ALGORITHM, BUFFERS, DOWN, UP, guidable
from fedgg.flower.messages import (
    BadRecord,
    arrays_of,
    check_buffers,
    check_finite,
    check_kinds,
    from_record,
    kinds,
    to_record,
)

LOG = logging.getLogger("flwr")
EXAMPLES = "num-examples"
CPU = torch.device("cpu")


def strategy(algorithm: Algorithm, model: nn.Module, *, max_examples: int = MAX_EXAMPLES, **flower: Any) -> Guiding:
    """`flower`: what Flower's FedAvg takes, such as `fraction_train`, `min_train_nodes` and `fraction_evaluate`.

    A client that claims more than `max_examples` in `num-examples` is left out.
    """
    return Guiding(algorithm, model, max_examples=max_examples, **flower)


class Guiding(FlowerFedAvg):
    """Flower's FedAvg, with what travels and how it is added up replaced by the algorithm's."""

    def __init__(self, algorithm: Algorithm, model: nn.Module, *, max_examples: int = MAX_EXAMPLES, **flower: Any):
        algorithm = guidable(algorithm)
        super().__init__(**flower)
        self.max_examples = max_examples
        self.algorithm, self.model = algorithm, model.cpu()
        self.layout = Layout.of(self.model)
        self.memory: Rows | None = None
        self._hub: Hub | None = None

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
        asked = list(super().configure_train(server_round, arrays, config, grid))
        self._hub = Hub(self.memory, nodes, len(asked) / max(nodes, 1), server_round - 1)
        with torch.no_grad():
            sent, down = self.algorithm.broadcast(w, self._hub), self.algorithm.send_down(w, self._hub)
        model, beside = self._with(sent), to_record(down)
        for message in asked:
            message.content[self.arrayrecord_key] = model
            if down:
                message.content[DOWN] = beside
        return asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self._hub is not None
        healthy = self._in_proportion(self._healthy(list(replies)))
        if not healthy:
            raise UserError(f"round {server_round}: no client sent a finite update")
        order = sorted(healthy)  # the same sum in the same order, whoever answered first
        contents = [healthy[node][2].content for node in order]
        counts = [self._examples(healthy[node][2]) for node in order]
        with torch.no_grad():
            w, share = self._w(), shares(counts, self._w(), equally=False)
            up = stack([healthy[node][0] for node in order])
            new, memory = self.algorithm.aggregate(w, read_only(up, "up"), share, self._hub)
            before = ServerState(w, self._buffers(), self.memory or {})
            buffers = close_buffers("average", before.buffers, stack([healthy[node][1] for node in order]), share)
            wrong = spoilt(before, ServerState(new, buffers, memory))
            if wrong is not None:  # the strategy keeps the model it had
                raise UserError(f"round {server_round}: {wrong}")
            self.memory = memory
            self._set(new)
            for name, rows in buffers.items():
                self.model.get_buffer(name).copy_(rows[0])
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        return ArrayRecord(self.model.state_dict()), metrics

    def _healthy(self, replies: list[Message]) -> dict[int, tuple[Rows, Rows, Message]]:
        """By node: what it sent up, its buffers, the message."""
        found: dict[int, tuple[Rows, Rows, Message]] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise BadRecord(str(reply.error.reason))
                if node in found:
                    raise BadRecord("it answered twice")
                up = check_finite(from_record(arrays_of(reply.content, UP), CPU), "")
                buffers = from_record(arrays_of(reply.content, BUFFERS), CPU) if self.layout.buffers else {}
                check_buffers(self._buffers(), check_kinds(buffers, kinds(self._buffers()), "its statistics"), "")
                check_kinds({"delta": up.get("delta", torch.empty(1, 0))}, kinds({"delta": self._w()}), "its message")
                self._examples(reply)
            except BadRecord as error:
                LOG.warning("fedgg: left out: node %d: %s", node, error)
                continue
            found[node] = (up, buffers, reply)
        return _of_one_kind(found)

    def _in_proportion(self, found: dict[int, tuple[Rows, Rows, Message]]) -> dict[int, tuple[Rows, Rows, Message]]:
        """As in every other run of the library."""
        none = torch.zeros(1, 1)
        ends = {node: LocalEnd(up, {}, buffers, {}, none) for node, (up, buffers, _) in found.items()}
        _, lost = in_proportion(ends, self._w())
        for gone in lost:
            LOG.warning("fedgg: left out: node %d: %s", gone.client, gone.why)
            del found[gone.client]
        return found

    def _examples(self, reply: Message) -> int:
        """What a client counts for: a whole number, within the limit."""
        for metrics in reply.content.metric_records.values():
            count = metrics.get(EXAMPLES)
            if isinstance(count, int | float) and count > self.max_examples:
                raise BadRecord(f"its {EXAMPLES!r} is {count:g}, and max_examples = {self.max_examples}")
            if isinstance(count, int | float) and count >= 1:
                return int(count)
        raise BadRecord(f"its metrics have no {EXAMPLES!r} above zero")

    def _w(self) -> torch.Tensor:
        return self.layout.flatten(dict(self.model.named_parameters()))

    def _buffers(self) -> Rows:
        return self.layout.buffer_rows(self.model)

    def _set(self, w: torch.Tensor) -> None:
        own = dict(self.model.named_parameters())
        for name, value in self.layout.unflatten(w).items():
            own[name].copy_(value[0])

    def _with(self, w: torch.Tensor) -> ArrayRecord:
        """The model's state with these parameters; its own stay as they are."""
        own = self._w()
        with torch.no_grad():
            self._set(w)
            record = ArrayRecord(self.model.state_dict())
            self._set(own)
        return record


def _of_one_kind(found: dict[int, tuple[Rows, Rows, Message]]) -> dict[int, tuple[Rows, Rows, Message]]:
    """Whoever sends other names or shapes than most is left out."""
    votes = [str(kinds(up)) for up, _, _ in found.values()]
    usual = max(sorted(set(votes)), key=votes.count, default="")
    for node, (up, _, _) in found.items():
        if str(kinds(up)) != usual:
            LOG.warning("fedgg: left out: node %d: it sent %s, which others did not", node, sorted(up))
    return {node: told for node, told in found.items() if str(kinds(told[0])) == usual}
