"""`fedgg.flower.guided`: an algorithm in the training loop of an existing ClientApp.

    with fedgg.flower.guided(FedGG(mu=0.1), model, message, context) as guide:
        train(model, loader)                       # unchanged; steps of its torch.optim.SGD follow the algorithm
    return guide.reply({"num-examples": len(loader.dataset)})

Optimizer hooks change the gradient before `step()` (`Algorithm.steer`) and the step itself after it (`nudge`); update
and client state are the algorithm's. Algorithms that change anything else (the loss, passes over the client's data, the
number of local steps) need `fedgg.flower.client_app`. The ServerApp uses `fedgg.flower.strategy`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fedgg.core.algorithm import Algorithm, Client
from fedgg.core.client_rows import Rows
from fedgg.core.local import SGD
from fedgg.core.model import Net
from fedgg.errors import UserError
from fedgg.flower.messages import from_record, to_record
from fedgg.lab.name_resolution import given_algorithm

DOWN, UP, BUFFERS, MEMORY = "fedgg.down", "fedgg.up", "fedgg.buffers", "fedgg.memory"
ROUND, ALGORITHM = "server-round", "fedgg-algorithm"
LOG = logging.getLogger("flwr")


def guidable_algorithm(argument: Any) -> Algorithm:
    """The algorithm; UserError where it changes more than gradients and steps."""
    algorithm = given_algorithm(argument)
    kind = type(algorithm)
    changes_loop = kind.loss is not Algorithm.loss or kind.work is not Algorithm.work
    if changes_loop or algorithm.look_passes or algorithm.step_passes or algorithm.needs_proxy:
        raise UserError(
            f"{kind.__name__} changes more of the training loop than gradients and steps: use "
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


def _config_value(message: Message, key: str) -> Any:
    return next((config[key] for config in message.content.config_records.values() if key in config), None)


class guided:  # noqa: N801 (it reads as a verb where it is used)
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
        buffers = self.net.layout.buffer_rows(self.model)
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
