"""A run's state as one safetensors file: torn and foreign ones are recognised, equal tensors are stored once."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedgg.core.rows import Rows
from fedgg.core.server import ServerState
from fedgg.lab.files import write_atomically
from fedgg.lab.state import State

FORMAT = "1"


class BadCheckpoint(Exception):
    """This file is no checkpoint of this run; the message says why."""


def write_checkpoint(path: Path, state: State, experiment_hash: str) -> None:
    tensors, same_as = _without_copies(_named(state))
    facts = {
        "format": FORMAT,
        "experiment": experiment_hash,
        "rounds_done": str(state.rounds_done),
        "same_as": json.dumps(same_as),
    }
    write_atomically(path, save(tensors, metadata=facts | {"checksum": _checksum(tensors, facts)}))


def read_checkpoint(path: Path, experiment_hash: str, device: torch.device) -> State:
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"it is torn or no safetensors file ({error})") from error
    if facts.get("format") != FORMAT:
        raise BadCheckpoint(f"it has format {facts.get('format')}, this fedgg reads {FORMAT}")
    if facts.pop("checksum", None) != _checksum(tensors, facts):
        raise BadCheckpoint("its checksum does not fit its content")
    if facts.get("experiment") != experiment_hash:
        raise BadCheckpoint("it belongs to another experiment")
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    for name, original in json.loads(facts["same_as"]).items():
        tensors[name] = tensors[original]
    return _state(tensors, int(facts["rounds_done"]))


def _named(state: State) -> dict[str, Tensor]:
    named = {"w": state.server.w}
    named |= {f"buffers/{name}": t for name, t in state.server.buffers.items()}
    named |= {f"server/{name}": t for name, t in state.server.memory.items()}
    for group, clients in (("client", state.memory), ("client_buffers", state.kept_buffers)):
        named |= {f"{group}/{client}/{name}": t for client, rows in clients.items() for name, t in rows.items()}
    return named


def _state(tensors: dict[str, Tensor], rounds_done: int) -> State:
    buffers: Rows = {}
    server: Rows = {}
    clients: dict[str, dict[int, Rows]] = {"client": {}, "client_buffers": {}}
    for full, tensor in tensors.items():
        group, _, name = full.partition("/")
        if group == "buffers":
            buffers[name] = tensor
        elif group == "server":
            server[name] = tensor
        elif group in clients:
            client, _, name = name.partition("/")
            clients[group].setdefault(int(client), {})[name] = tensor
    return State(rounds_done, ServerState(tensors["w"], buffers, server), clients["client"], clients["client_buffers"])


def _without_copies(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """FedGG's clients all remember the same model: one tensor in memory, and so one on disk."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    tensors: dict[str, Tensor] = {}
    same_as: dict[str, str] = {}
    for name, tensor in named.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and identity in first:
            same_as[name] = first[identity]
        else:
            first[identity] = name
            tensors[name] = _own_storage(tensor.detach().cpu().contiguous())
    return tensors, same_as


def _own_storage(tensor: Tensor) -> Tensor:
    """safetensors refuses views into a larger tensor."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def _checksum(tensors: dict[str, Tensor], facts: dict[str, str]) -> str:
    """Over content and facts: a flipped bit in the header must not pass either."""
    value = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        value = zlib.crc32(f"{name}{tensors[name].dtype}{tuple(tensors[name].shape)}".encode(), value)
        value = zlib.crc32(tensors[name].contiguous().numpy().reshape(-1).view(np.uint8).data, value)
    return f"{value:08x}"
