"""TensorBoard events of rounds: the numbers of a round by tag, and the classes that write events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fedgg.errors import UserError
from fedgg.runfolder.validation import BY_CLASS, BY_CLIENT, PLACES, is_number

SCALARS = ("train_loss", "server_lr", "bytes_up", "bytes_down")
INSTALL = "pip install 'fedgg[tensorboard]'"


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of rounds.jsonl: scores and losses, bytes, diagnostics and seconds."""
    numbers: dict[str, Any] = {
        key: value for key, value in line.items() if key in SCALARS or key.partition("_")[0] in PLACES
    }
    for key in [key for key in numbers if key.endswith((BY_CLASS, BY_CLIENT))]:
        values = numbers.pop(key)
        if key.endswith(BY_CLASS):
            numbers |= {f"{key}/{name}": value for name, value in (values or {}).items()}
    numbers |= {f"diagnostics/{name}": value for name, value in (line.get("readings") or {}).items()}
    numbers |= {f"seconds/{name}": value for name, value in (line.get("seconds") or {}).items()}
    return {key: float(value) for key, value in numbers.items() if is_number(value)}


def event_classes(option: str) -> tuple[Any, Any, Any]:
    """TensorBoard's EventFileWriter, Event and Summary; UserError where they are missing. `option` needs them."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError(f"{option} needs the package tensorboard ({error}): {INSTALL}") from error
    return EventFileWriter, Event, Summary


def safe_name(label: str) -> str:
    """A label as the name of a folder of events."""
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", label).strip("-.") or "row"
