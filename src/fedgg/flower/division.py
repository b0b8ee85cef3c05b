"""A data set divided into files, so that every machine gets its own and nothing of another's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedgg.data.dataset import Dataset
from fedgg.data.normalise import scaling
from fedgg.data.sources import load
from fedgg.flower.files import Examples, scales, write_arrays
from fedgg.lab.build import split_of, with_given_clients
from fedgg.lab.config import Experiment
from fedgg.lab.files import writing_to
from fedgg.lab.holdings import Positions, holdings
from fedgg.lab.origin import names_of


def divide(experiment: Experiment, folder: Path, data_folder: Path | None = None) -> list[Path]:
    """Write `server.npz` and `client-0.npz`, `client-1.npz` ..., by the experiment's own split; their paths."""
    dataset = load(experiment.data.source, data_folder)
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
