"""The client's side of Flower: `ClientApp`. Reads a message, lets the node work, writes the reply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedgg.core.buffers import starting_buffers, travelling, travels
from fedgg.core.rows import Rows
from fedgg.core.server import healthy
from fedgg.errors import UserError
from fedgg.flower.letters import NOBODY, About, Answer, Hello, about_of, arrays_of, reading, write
from fedgg.flower.memory import Kept, NodeMemory, Overtaken
from fedgg.flower.node import Received, Site, site_of
from fedgg.flower.records import (
    BadRecord,
    check_buffers,
    check_finite,
    check_kinds,
    check_some,
    from_record,
    kinds,
    to_record,
)
from fedgg.flower.settings import Configuration, NodeSettings, node_settings

LOG = logging.getLogger("flwr")
Do = Callable[[About, Site, NodeSettings, Message], RecordDict]


def client_app(experiment_file: str | Path, config: Configuration | None = None) -> ClientApp:
    """The app of every node; `config` stands in for a run configuration that Flower does not hand on."""
    app = ClientApp()
    file, defaults = Path(experiment_file), dict(config or {})
    app.train()(partial(_answer, file, defaults, _train))
    app.evaluate()(partial(_answer, file, defaults, _score))
    app.query("hello")(partial(_answer, file, defaults, _introduce))
    return app


def _answer(file: Path, defaults: Configuration, do: Do, message: Message, context: Context) -> Message:
    """Whatever goes wrong here, the server is told in words; nothing is kept of a message that failed."""
    about = About("", "", 0, 0, -1)
    try:
        about = about_of(message.content)
        settings = node_settings(context.node_config, {**defaults, **context.run_config})
        if settings.simulated and about.client == NOBODY:
            hello = Hello(settings.client, 0, 0, "", 0, "", settings.simulated)
            return Message(write(about, answer=Answer(), hello=hello), reply_to=message)
        if settings.simulated:
            settings = settings.playing(about.client)
        site = site_of(file, settings)
        _refuse_another(about, site, settings, message)
        reply = do(about, site, settings, message)
    except (UserError, BadRecord, Overtaken) as error:
        LOG.error("%s", error)
        reply = write(about, answer=Answer(refused=str(error)))
    except Exception as error:  # a bug of a user's algorithm or of ours must reach the server as words, too
        LOG.exception("the client failed")
        reply = write(about, answer=Answer(refused=f"{type(error).__name__}: {error}"))
    return Message(reply, reply_to=message)


def _refuse_another(about: About, site: Site, settings: NodeSettings, message: Message) -> None:
    if about.experiment != site.experiment.trajectory():
        raise BadRecord("this node was given another experiment than the server: start both from the same app")
    if not _is_hello(message) and about.client != settings.client:
        raise BadRecord(f"this node is client {settings.client}, not {about.client}")


def _is_hello(message: Message) -> bool:
    return str(message.metadata.message_type).startswith("query")


def _introduce(about: About, site: Site, settings: NodeSettings, message: Message) -> RecordDict:
    hello = Hello(
        client=settings.client,
        examples=site.examples,
        held_out=site.held_out,
        shape=" ".join(map(str, site.shape)),
        classes=site.classes,
        data=site.fingerprint(),
    )
    return write(about, answer=Answer(), hello=hello)


def _train(about: About, site: Site, settings: NodeSettings, message: Message) -> RecordDict:
    received = _received(site, message.content)
    memory, ticket = NodeMemory(settings.memory, about.run), _ticket(about, message)
    kept, gone = memory.begin(about, ticket, site.net.start.device)
    end = site.train(about.round, received, kept)
    policy = site.experiment.model.statistics
    before = starting_buffers(policy, received.buffers, kept.buffers if kept is not None and kept.buffers else None)
    _, sick = healthy({site.client: end}, lambda client: before)
    if sick:
        raise BadRecord(sick[0].why)
    own_buffers = end.buffers if policy == "local" else {}
    memory.keep(about, ticket, Kept(end.memory, own_buffers))
    _, buffers_go_up = travels(policy)
    sent = travelling(site.net.moving, before, end.buffers) if buffers_go_up else {}
    arrays = {"up": to_record(end.up)} | ({"buffers": to_record(sent)} if sent else {})
    numbers = {"loss": float(end.loss)} | {reading(name): float(value) for name, value in end.diagnostics.items()}
    note = gone if end.memory or own_buffers else ""  # who keeps nothing has lost nothing
    return write(about, arrays, answer=Answer(note=note), numbers=numbers)


def _score(about: About, site: Site, settings: NodeSettings, message: Message) -> RecordDict:
    score = site.score(_received(site, message.content))
    return write(about, answer=Answer(), numbers={"accuracy": score.accuracy, "loss": score.loss})


def _ticket(about: About, message: Message) -> str:
    return f"round {about.round}, attempt {about.attempt}, message {message.metadata.message_id}"


def _received(site: Site, content: RecordDict) -> Received:
    """The arrays of a message, of the model's own types and shapes, and finite."""
    device = site.net.start.device
    model = check_kinds(_rows(content, "model", device), kinds({"w": site.net.start}), "the model")
    down = _rows(content, "down", device) if "down" in content else {}
    buffers = site.net.start_buffers
    if "buffers" in content:
        sent = check_some(from_record(arrays_of(content, "buffers"), device), kinds(buffers), "buffers")
        buffers = buffers | check_buffers(buffers, sent, "buffers")
    return Received(model["w"], down, buffers)


def _rows(content: RecordDict, name: str, device: torch.device) -> Rows:
    return check_finite(from_record(arrays_of(content, name), device), name)
