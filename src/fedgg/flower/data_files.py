"""A data set divided into files: one for each client with its own examples, one for the server with the test set.

A client's file reproduces its batches exactly: its examples in the order of the split, what it keeps back behind them,
and how inputs are scaled, which in one machine is found on the whole training set.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.data.dataset import Dataset
from fedgg.data.transforms import Scaling, scaling
from fedgg.errors import UserError
from fedgg.files import open_regular, write_atomically
from fedgg.lab.build import load_data, split_of, with_given_clients
from fedgg.lab.client_data import Positions, holdings, names_of
from fedgg.lab.config import Experiment
from fedgg.lab.torch_settings import DTYPES
from fedgg.output_files import writing_to

FORMAT = 1
PRIVATE = 0o600
Arrays = dict[str, NDArray[Any]]
_SCALES = {"shift", "scale"}


@dataclass(frozen=True, eq=False)
class Examples:
    """Some examples and their labels."""

    x: Tensor
    y: Tensor

    def fingerprint(self) -> str:
        """A hash of every value."""
        digest = hashlib.sha256()
        for tensor in (self.x, self.y):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ClientFile:
    """All that a node knows of the data."""

    client: int
    train: Examples
    held_out: Examples
    classes: tuple[str, ...]
    scaling: Scaling


@dataclass(frozen=True)
class Holding:
    """What a client's file holds: how many examples to train on and kept back, and a hash of all of them."""

    examples: int
    held_out: int
    fingerprint: str


@dataclass(frozen=True, eq=False)
class ServerFile:
    """All that the server knows of the data."""

    clients: int
    test: Examples
    proxy: Examples
    classes: tuple[str, ...]
    scaling: Scaling
    split: dict[str, str]  # `scheme` and `hash`, where the file tells them
    client_names: tuple[str, ...] | None = None  # by client, where the data give them names
    holdings: tuple[Holding, ...] | None = None  # by client, where the file was divided with theirs


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Only its owner may read it."""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, format=FORMAT, **arrays)
    write_atomically(path, content.getvalue(), PRIVATE)


def scales(scaling: Scaling) -> Arrays:
    return {"shift": scaling.shift.cpu().numpy(), "scale": scaling.scale.cpu().numpy()}


def read_client(path: Path, experiment: Experiment) -> ClientFile:
    arrays = _read(path, "x", "y", "classes")
    classes = _names(path, arrays)
    train = _examples(path, arrays, "x", "y", classes, may_be_none=True)  # split.allow_empty
    held_out = _examples(path, arrays, "x_held_out", "y_held_out", classes, like=train)
    client = int(arrays["client"]) if "client" in arrays else -1
    return ClientFile(client, train, held_out, classes, _scaling(path, arrays, experiment, train))


def read_server(path: Path, experiment: Experiment) -> ServerFile:
    arrays = _read(path, "x_test", "y_test", "classes")
    classes = _names(path, arrays)
    test = _examples(path, arrays, "x_test", "y_test", classes)
    proxy = _examples(path, arrays, "x_proxy", "y_proxy", classes, like=test)
    clients = int(arrays["clients"]) if "clients" in arrays else experiment.split.clients
    split = {key: str(arrays[f"split_{key}"]) for key in ("scheme", "hash") if f"split_{key}" in arrays}
    names = tuple(str(name) for name in arrays["client_names"]) if "client_names" in arrays else None
    if names is not None and len(names) != clients:
        raise UserError(f"{path}: client_names has {len(names)} names for {clients} clients")
    scaling, holdings = _scaling(path, arrays, experiment, test), _holdings(path, arrays, clients)
    return ServerFile(clients, test, proxy, classes, scaling, split, names, holdings)


def _holdings(path: Path, arrays: Arrays, clients: int) -> tuple[Holding, ...] | None:
    if not arrays.keys() >= {"sizes", "fingerprints"}:
        return None
    sizes, fingerprints = arrays["sizes"], arrays["fingerprints"]
    if sizes.shape != (clients, 2) or sizes.dtype.kind not in "ui" or fingerprints.shape != (clients,):
        raise UserError(f"{path}: sizes must be whole numbers [{clients}, 2], and fingerprints [{clients}]")
    return tuple(
        Holding(int(own), int(kept), str(digest))
        for (own, kept), digest in zip(sizes.tolist(), fingerprints.tolist(), strict=True)
    )


def _read(path: Path, *needed: str) -> Arrays:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise UserError(
            f"there is no file {path}: `fedgg flower divide` writes it, or give its place as `data`"
        ) from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as .npz ({' '.join(str(error).split())})") from error
    for name in needed:
        if name not in arrays:
            raise UserError(f"{path}: there is no array {name!r} in it; it needs {', '.join(needed)}")
    if int(arrays.get("format", np.array(FORMAT))) != FORMAT:
        raise UserError(f"{path} has format {int(arrays['format'])}; this fedgg reads {FORMAT}")
    return arrays


def _names(path: Path, arrays: Arrays) -> tuple[str, ...]:
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
    like: Examples | None = None,
    *,
    may_be_none: bool = False,
) -> Examples:
    """Checked as every data set is; where the arrays may be absent, `like` says what they would look like."""
    if like is not None and len(arrays.get(x, ())) == 0:
        return Examples(like.x[:0], like.y[:0])
    for name in (x, y):
        if name not in arrays or arrays[name].dtype.kind not in "uif":
            raise UserError(f"{path}: {name} must be there, and be numbers")
    found = Examples(torch.from_numpy(arrays[x]), torch.from_numpy(arrays[y].astype(np.int64)))
    if len(found.y) or not may_be_none:
        Dataset(f"{path} ({x})", found.x, found.y, found.x[:1], found.y[:1], classes)
    if like is not None and (found.x.dtype != like.x.dtype or found.x.shape[1:] != like.x.shape[1:]):
        raise UserError(f"{path}: {x} holds other examples than the first array, in type or in shape")
    return found


def _scaling(path: Path, arrays: Arrays, experiment: Experiment, examples: Examples) -> Scaling:
    dtype, kind = DTYPES[experiment.engine.precision], experiment.data.normalise
    if arrays.keys() >= _SCALES:
        return Scaling(*(torch.from_numpy(arrays[name]).to(dtype) for name in ("shift", "scale")))
    if kind == "standard":
        raise UserError(
            f"{path}: data.normalise = 'standard' needs the arrays shift and scale, the same in every file: "
            f"add them, or take 'unit' or 'none'"
        )
    peak = 255.0 if kind == "unit" and examples.x.dtype == torch.uint8 else 1.0
    return Scaling(torch.zeros(1, dtype=dtype), torch.full((1,), 1 / peak, dtype=dtype))


def divide(experiment: Experiment, folder: Path, data_folder: Path | None = None) -> list[Path]:
    """Write `server.npz` and `client-0.npz`, `client-1.npz` ..., by the experiment's own split; their paths."""
    dataset = load_data(experiment.data.source, data_folder)
    experiment = with_given_clients(experiment, dataset)
    split = split_of(experiment, dataset)
    held = holdings(experiment, split)
    names = names_of(split, dataset)
    everybody = list(zip(held.clients, held.held_out, strict=True))
    shared = {
        "classes": np.array(dataset.classes, dtype=np.str_),
        **scales(scaling(experiment.data.normalise, dataset, torch.float64)),
    }
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        server = folder / "server.npz"
        write_arrays(
            server,
            {
                "clients": len(held.clients),
                "x_test": dataset.x_test.numpy(),
                "y_test": dataset.y_test.numpy(),
                **_named("proxy", dataset, held.proxy),
                "sizes": np.array([[len(own), len(kept)] for own, kept in everybody], np.int64),
                "fingerprints": np.array([fingerprint(dataset, own, kept) for own, kept in everybody], np.str_),
                "split_scheme": split.scheme,
                "split_hash": split.hash(),
                **({} if names is None else {"client_names": np.array(names, dtype=np.str_)}),
                **shared,
            },
        )
        written = [server]
        for client, (own, kept) in enumerate(everybody):
            path = folder / f"client-{client}.npz"
            mine = {"x": dataset.x_train[own].numpy(), "y": dataset.y_train[own].numpy()}
            write_arrays(path, {"client": client, **mine, **_named("held_out", dataset, kept), **shared})
            written.append(path)
    return written


def fingerprint(dataset: Dataset, own: Positions, kept: Positions) -> str:
    """Of a client's file: what its node says of it."""
    where = torch.from_numpy(np.concatenate([own, kept]))
    return Examples(dataset.x_train[where], dataset.y_train[where]).fingerprint()


def _named(name: str, dataset: Dataset, where: Positions) -> dict[str, object]:
    return {f"x_{name}": dataset.x_train[where].numpy(), f"y_{name}": dataset.y_train[where].numpy()}
