"""Data files of a federation: one per client with its examples, one for the server with the test set.

`divide` writes them for a data set and an experiment's split. A client's file holds its examples in the order of the
split, its held-out examples, and the scaling of inputs, which is computed on the whole training set. So a client draws
the same batches from its file as in a run on one machine.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.core.layout import InputPart
from fedgg.core.tasks import Targets
from fedgg.data.batch_preparation import Scaling, scaling
from fedgg.data.dataset import Dataset
from fedgg.data.user_arrays import UNREADABLE_NPZ
from fedgg.errors import UserError
from fedgg.files import open_regular, parse_json, write_atomically, writing_to
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import DTYPES
from fedgg.lab.federated_data import Positions, WholeData, data_of, holdings, split_of, targets_of, with_given_clients

FORMAT = 1
PRIVATE = 0o600
Arrays = dict[str, NDArray[Any]]
_SCALING_ARRAYS = {"shift", "scale"}


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and targets."""

    x: Tensor
    y: Tensor

    def fingerprint(self) -> str:
        """A hash of every value."""
        digest = hashlib.sha256()
        # Where a model takes floating point numbers, whole inputs are converted; targets have the run's precision.
        x = self.x.float() if self.x.dtype == torch.int64 else self.x
        y = self.y.float() if self.y.is_floating_point() else self.y
        for tensor in (x, y):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ClientFile:
    """The content of a client's file."""

    client: int
    train: Examples
    held_out: Examples
    classes: tuple[str, ...]
    scaling: Scaling
    parts: tuple[InputPart, ...] = ()


@dataclass(frozen=True)
class ClientFileSummary:
    """Numbers of training and held-out examples in a client's file, and a hash of all of them."""

    examples: int
    held_out: int
    fingerprint: str


@dataclass(frozen=True, eq=False)
class ServerFile:
    """The content of the server's file."""

    clients: int
    test: Examples
    proxy: Examples
    classes: tuple[str, ...]
    scaling: Scaling
    split: dict[str, str]  # `scheme` and `hash`, if the file has them
    client_names: tuple[str, ...] | None = None  # by client, if the data set names its clients
    client_files: tuple[ClientFileSummary, ...] | None = None  # by client, if `divide` wrote the file
    parts: tuple[InputPart, ...] = ()


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """An .npz file that only its owner may read."""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, format=FORMAT, **arrays)
    write_atomically(path, content.getvalue(), PRIVATE)


def _scaling_arrays(scaling: Scaling) -> Arrays:
    return {"shift": scaling.shift.cpu().numpy(), "scale": scaling.scale.cpu().numpy()}


def read_client_file(path: Path, experiment: Experiment) -> ClientFile:
    arrays = _read(path, "x", "y", "classes")
    classes = _class_names(path, arrays)
    targets = targets_of(experiment)
    train = _examples(path, arrays, "x", "y", classes, targets, may_be_empty=True)  # split.allow_empty
    held_out = _examples(path, arrays, "x_held_out", "y_held_out", classes, targets, like=train)
    client = int(arrays["client"]) if "client" in arrays else -1
    return ClientFile(client, train, held_out, classes, _scaling(path, arrays, experiment, train), _parts(path, arrays))


def read_server_file(path: Path, experiment: Experiment) -> ServerFile:
    arrays = _read(path, "x_test", "y_test", "classes")
    classes = _class_names(path, arrays)
    targets = targets_of(experiment)
    test = _examples(path, arrays, "x_test", "y_test", classes, targets)
    proxy = _examples(path, arrays, "x_proxy", "y_proxy", classes, targets, like=test)
    clients = int(arrays["clients"]) if "clients" in arrays else experiment.split.clients
    split = {key: str(arrays[f"split_{key}"]) for key in ("scheme", "hash") if f"split_{key}" in arrays}
    names = tuple(str(name) for name in arrays["client_names"]) if "client_names" in arrays else None
    if names is not None and len(names) != clients:
        raise UserError(f"{path}: client_names has {len(names)} names for {clients} clients")
    scaling, client_files = _scaling(path, arrays, experiment, test), _client_files(path, arrays, clients)
    return ServerFile(clients, test, proxy, classes, scaling, split, names, client_files, _parts(path, arrays))


def _client_files(path: Path, arrays: Arrays, clients: int) -> tuple[ClientFileSummary, ...] | None:
    if not arrays.keys() >= {"sizes", "fingerprints"}:
        return None
    sizes, fingerprints = arrays["sizes"], arrays["fingerprints"]
    if sizes.shape != (clients, 2) or sizes.dtype.kind not in "ui" or fingerprints.shape != (clients,):
        raise UserError(f"{path}: sizes must be integers [{clients}, 2], and fingerprints [{clients}]")
    return tuple(
        ClientFileSummary(int(examples), int(held_out), str(digest))
        for (examples, held_out), digest in zip(sizes.tolist(), fingerprints.tolist(), strict=True)
    )


def _read(path: Path, *needed: str) -> Arrays:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise UserError(
            f"there is no file {path}: set `data` to the file of this machine (fedgg.flower.divide writes such files)"
        ) from None
    except UNREADABLE_NPZ as error:
        raise UserError(f"{path} cannot be read as .npz ({' '.join(str(error).split())})") from error
    for name in needed:
        if name not in arrays:
            raise UserError(f"{path}: the array {name!r} is missing; the file needs {', '.join(needed)}")
    if int(arrays.get("format", np.array(FORMAT))) != FORMAT:
        raise UserError(f"{path} has format {int(arrays['format'])}; this fedgg reads {FORMAT}")
    return arrays


def _class_names(path: Path, arrays: Arrays) -> tuple[str, ...]:
    names = arrays["classes"]
    if names.dtype.kind != "U" or names.ndim != 1:
        raise UserError(f"{path}: classes must be an array of names, [C]")
    return tuple(str(name) for name in names)


def _examples(
    path: Path,
    arrays: Arrays,
    x: str,
    y: str,
    classes: tuple[str, ...],
    targets: Targets,
    like: Examples | None = None,
    *,
    may_be_empty: bool = False,
) -> Examples:
    """The arrays, checked like those of a data set; if they may be missing, `like` has their dtype and shape."""
    if like is not None and len(arrays.get(x, ())) == 0:
        return Examples(like.x[:0], like.y[:0])
    for name in (x, y):
        if name not in arrays or arrays[name].dtype.kind not in "uif":
            raise UserError(f"{path}: {name} must be an array of numbers")
    is_whole = targets != "values" and arrays[y].dtype.kind != "f"
    values = arrays[y].astype(np.int64) if is_whole or targets in ("classes", "tokens", "labels") else arrays[y]
    examples = Examples(torch.from_numpy(arrays[x]), torch.from_numpy(values))
    if len(examples.y) or not may_be_empty:
        one = examples.x[:1], examples.y[:1]
        Dataset(f"{path} ({x})", examples.x, examples.y, *one, classes, targets=targets)
    if like is not None and (examples.x.dtype != like.x.dtype or examples.x.shape[1:] != like.x.shape[1:]):
        raise UserError(f"{path}: {x} has another dtype or shape than the first array")
    return examples


def _parts(path: Path, arrays: Arrays) -> tuple[InputPart, ...]:
    """The parts of several inputs, if the file has them."""
    try:
        described = parse_json(str(arrays.get("parts", "[]")))
        return tuple(InputPart(key, tuple(shape), getattr(torch, dtype)) for key, shape, dtype in described)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the array parts is not what fedgg wrote ({error})") from error


def _scaling(path: Path, arrays: Arrays, experiment: Experiment, examples: Examples) -> Scaling:
    dtype, kind = DTYPES[experiment.engine.precision], experiment.data.normalise
    if arrays.keys() >= _SCALING_ARRAYS:
        return Scaling(*(torch.from_numpy(arrays[name]).to(dtype) for name in ("shift", "scale")))
    if kind == "standard":
        raise UserError(
            f"{path}: data.normalise = 'standard' needs the arrays shift and scale, the same in every file: "
            f"add them, or take 'unit' or 'none'"
        )
    peak = 255.0 if kind == "unit" and examples.x.dtype == torch.uint8 else 1.0
    return Scaling(torch.zeros(1, dtype=dtype), torch.full((1,), 1 / peak, dtype=dtype))


def divide(experiment: Experiment, folder: Path, data_folder: Path | None = None) -> list[Path]:
    """Write `server.npz`, `client-0.npz`, `client-1.npz`, ... for the experiment's split; returns their paths."""
    dataset = data_of(experiment, None, data_folder)
    experiment = with_given_clients(experiment, dataset)
    split = split_of(experiment, dataset)
    division = holdings(experiment, split)
    names = WholeData(dataset, split).client_names
    positions = list(zip(division.clients, division.held_out, strict=True))
    shared = {
        "classes": np.array(dataset.classes, dtype=np.str_),
        **_scaling_arrays(scaling(experiment.data.normalise, dataset, torch.float64)),
    }
    if dataset.parts:
        shared["parts"] = np.array(json.dumps([part.described() for part in dataset.parts]))
    if experiment.split.feature_noise or experiment.split.feature_rotation:
        dataset = division.skewed_inputs(experiment, dataset)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        server = folder / "server.npz"
        write_arrays(
            server,
            {
                "clients": len(division.clients),
                "x_test": dataset.x_test.numpy(),
                "y_test": dataset.y_test.numpy(),
                **_arrays("proxy", dataset, division.proxy),
                "sizes": np.array([[len(train), len(held_out)] for train, held_out in positions], np.int64),
                "fingerprints": np.array([fingerprint(dataset, *client) for client in positions], np.str_),
                "split_scheme": split.scheme,
                "split_hash": split.hash(),
                **({} if names is None else {"client_names": np.array(names, dtype=np.str_)}),
                **shared,
            },
        )
        paths = [server]
        for client, (train, held_out) in enumerate(positions):
            path = folder / f"client-{client}.npz"
            examples = {"x": dataset.x_train[train].numpy(), "y": dataset.y_train[train].numpy()}
            write_arrays(path, {"client": client, **examples, **_arrays("held_out", dataset, held_out), **shared})
            paths.append(path)
    return paths


def fingerprint(dataset: Dataset, train: Positions, held_out: Positions) -> str:
    """The hash that the node with this client's file reports."""
    positions = torch.from_numpy(np.concatenate([train, held_out]))
    return Examples(dataset.x_train[positions], dataset.y_train[positions]).fingerprint()


def _arrays(name: str, dataset: Dataset, positions: Positions) -> dict[str, object]:
    return {f"x_{name}": dataset.x_train[positions].numpy(), f"y_{name}": dataset.y_train[positions].numpy()}
