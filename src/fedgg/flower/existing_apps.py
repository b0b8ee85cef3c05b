"""An algorithm in an existing Flower app: `guided` in its ClientApp, `strategy` in its ServerApp.

    with fedgg.flower.guided(FedGG(mu=0.1), model, message, context) as guide:
        train(model, loader)                       # unchanged; steps of its torch.optim.SGD follow the algorithm
    return guide.reply({"num-examples": len(loader.dataset)})

    strategy = fedgg.flower.strategy(FedGG(mu=0.1), model, fraction_evaluate=0.5)
    result = strategy.start(grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=10)

On the client, optimizer hooks change the gradient before `step()` (`Algorithm.steer`) and the step itself after it
(`nudge`); update and client state are the algorithm's. Algorithms that change anything else (the loss, the point at
which the gradient is taken, passes over the client's data, the number of local steps) need `fedgg.flower.client_app`
and `server_app`.

On the server, sampling, evaluation and configuration are Flower's. A reply that is not finite, out of proportion to the
others or of another shape is left out of the average, with a warning in the log. A round without any valid reply, or
whose model would not be finite, ends the run with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fedgg.core.algorithm import Algorithm, Client, Server
from fedgg.core.buffers import close_buffers
from fedgg.core.layout import Layout
from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.core.optimisers import SGD
from fedgg.core.server import ServerState, in_proportion, shares, spoilt
from fedgg.core.tensor_rows import Rows, read_only, stack
from fedgg.errors import UserError
from fedgg.flower.app_project import MAX_EXAMPLES
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
from fedgg.lab.name_resolution import given_algorithm

DOWN, UP, BUFFERS, MEMORY = "fedgg.down", "fedgg.up", "fedgg.buffers", "fedgg.memory"
ROUND, ALGORITHM = "server-round", "fedgg-algorithm"
LOG = logging.getLogger("flwr")
EXAMPLES = "num-examples"
CPU = torch.device("cpu")


def guidable_algorithm(argument: Any) -> Algorithm:
    """The algorithm; UserError if it changes more than gradients and steps."""
    algorithm = given_algorithm(argument)
    kind = type(algorithm)
    hooks = ("loss", "work", "displacement", "second_displacement")
    changes_loop = any(getattr(kind, hook) is not getattr(Algorithm, hook) for hook in hooks)
    if changes_loop or algorithm.look_passes or algorithm.step_passes or algorithm.needs_proxy:
        raise UserError(
            f"{kind.__name__} changes more of the training loop than gradients and steps: use "
            f"fedgg.flower.client_app and server_app"
        )
    if algorithm.needs_steps:  # the app's own loop ends when it ends
        raise UserError(
            f"{kind.__name__} needs the number of local steps before they are taken, which guided() cannot know: use "
            f"fedgg.flower.client_app and server_app"
        )
    return algorithm


def _check_same_algorithm(algorithm: Algorithm, message: Message) -> None:
    """Client and server must run the same algorithm; other hyperparameters are allowed, with a warning."""
    server, client = _config_value(message, ALGORITHM), repr(algorithm)
    if not isinstance(server, str) or server == client:
        return
    if server.partition("(")[0] != client.partition("(")[0]:
        raise UserError(f"the server runs {server} and this client {client}: give guided(...) the server's algorithm")
    LOG.warning("fedgg: the server runs %s and this client %s", server, client)


def _buffer_rows(model: nn.Module) -> Rows:
    """Copies of the model's buffers, `[1, ...]` each."""
    return {name: buffer.detach().clone()[None] for name, buffer in model.named_buffers()}


def _config_value(message: Message, key: str) -> Any:
    return next((config[key] for config in message.content.config_records.values() if key in config), None)


class guided:  # noqa: N801 (a context manager with the name of a function)
    """Inside the block, steps of a `torch.optim.SGD` on the parameters of this model follow the algorithm."""

    def __init__(self, algorithm: Algorithm, model: nn.Module, message: Message, context: Context):
        """`model` with the received weights; `context.state` holds the client state while the SuperNode runs."""
        algorithm = guidable_algorithm(algorithm)
        _check_same_algorithm(algorithm, message)
        self.algorithm, self.model, self.message, self.context = algorithm, model, message, context
        self.net = Net(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._anchor = self.net.start
        self._client: Client | None = None
        self._sgd = SGD.of(1.0, 0.0, 0.0, self._anchor)
        self._before = self._anchor
        self._sent: Rows | None = None

    def __enter__(self) -> guided:
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self._finish()

    def reply(self, metrics: Mapping[str, Any]) -> Message:
        """The reply message; `metrics` must contain `num-examples`."""
        if self._sent is None:
            raise UserError("guided(...).reply() must be called after the with block in which the model is trained")
        content = RecordDict({UP: to_record(self._sent), "metrics": MetricRecord(dict(metrics))})
        buffers = _buffer_rows(self.model)
        if buffers:
            content[BUFFERS] = to_record(buffers)
        return Message(content, reply_to=self.message)

    # Optimizer hooks --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_for_this_model(optimizer):
            return
        client = self._client or self._start(optimizer)
        with torch.no_grad():
            w, grad = self._flat(), self._gradient()
            client = replace(client, w=w)
            steered = self.net.layout.unflatten(self.algorithm.steer(grad, w, client))
            for name, parameter in self._parameters.items():
                parameter.grad = steered[name][0].clone()
        self._client, self._before = client, w

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_for_this_model(optimizer) or self._client is None:
            return
        with torch.no_grad():
            move = self._flat() - self._before
            nudged = self.algorithm.nudge(move, self._before, self._client)
            if nudged is not move:
                self._set(self._before + nudged)
        self._client = replace(self._client, last_step=nudged, step=self._client.step + 1)

    def _is_for_this_model(self, optimizer: Optimizer) -> bool:
        optimised = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trainable = {id(p) for p in self._parameters.values()}
        if not optimised & trainable:
            return False
        if not trainable <= optimised or len(optimizer.param_groups) > 1 or not isinstance(optimizer, torch.optim.SGD):
            raise UserError(
                f"guided() needs one torch.optim.SGD with all trainable parameters of the model in one group; "
                f"this is {type(optimizer).__name__} with {len(optimizer.param_groups)} groups"
            )
        return True

    # The round --------------------------------------------------------------------------------------------------------

    def _start(self, optimizer: Optimizer) -> Client:
        group = optimizer.param_groups[0]
        self._sgd = SGD.of(float(group["lr"]), float(group["momentum"]), 0.0, self._anchor)
        zero = torch.zeros_like(self._anchor[:, :1])
        content, device = self.message.content, self._anchor.device
        down = content.get(DOWN)
        memory = self.context.state.get(MEMORY)
        client = Client(
            net=self.net.bind(self.net.start_buffers, train=True),
            probe=None,
            down=from_record(down, device) if isinstance(down, ArrayRecord) else {},
            memory=from_record(memory, device)
            if isinstance(memory, ArrayRecord)
            else self.algorithm.client_memory(self._anchor),
            notes={},
            steps=zero,
            effective_steps=zero,
            lr=self._sgd.lr,
            momentum=self._sgd.momentum,
            examples=zero,
            round=zero + self._round() - 1,
            step=zero,
            w=self._anchor,
            last_step=torch.zeros_like(self._anchor),
            sums={},
        )
        with torch.no_grad():
            return replace(client, notes=self.algorithm.begin(self._anchor, client))

    def _finish(self) -> None:
        client = self._client
        if client is None:
            raise UserError(
                "guided() saw no optimizer step: train the model passed to guided() inside its block, with a "
                "torch.optim.SGD over its parameters"
            )
        with torch.no_grad():
            w, steps = self._flat(), client.step
            client = replace(client, w=w, steps=steps, effective_steps=self._sgd.effective_steps(steps))
            self._sent, memory = self.algorithm.finish(w, client)
        if memory:
            self.context.state[MEMORY] = to_record(memory)

    def _round(self) -> int:
        number = _config_value(self.message, ROUND)
        if isinstance(number, int):
            return number
        raise UserError(f"the message has no {ROUND!r}: the ServerApp must use fedgg.flower.strategy")

    def _flat(self) -> Tensor:
        return self.net.layout.flatten(self._parameters)

    def _gradient(self) -> Tensor:
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._parameters.items()}
        return self.net.layout.flatten(grads)

    def _set(self, w: Tensor) -> None:
        for name, value in self.net.layout.unflatten(w).items():
            self._parameters[name].copy_(value[0])


# The server ----------------------------------------------------------------------------------------------------------


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
        return _buffer_rows(self.model)

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
