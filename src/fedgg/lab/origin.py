"""Where the examples of a federation come from, and what a run folder says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedgg.data.dataset import Dataset
from fedgg.data.partition import Partition

Keeper = Literal["here", "nodes"]


class Origin(Protocol):
    """As much as this process knows: everything, or, where clients have machines of their own, what they say."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def labels_are_words(self) -> bool: ...
    @property
    def client_names(self) -> tuple[str, ...] | None:
        """By client, where the data give them names and the split is theirs."""

    @property
    def fingerprint(self) -> str:
        """A hash of the data, so that a resumed run notices others."""

    @property
    def keeper(self) -> Keeper:
        """Who holds what clients keep between rounds: this run's folder, or nodes of their own."""

    def split_hash(self) -> str: ...
    def described(self) -> dict[str, Any]:
        """What partition.json says."""

    def positions(self) -> dict[str, NDArray[np.int64]]:
        """What partition.npz holds."""


@dataclass(frozen=True, eq=False)
class WholeData:
    """A data set and its split, both in this process."""

    dataset: Dataset
    partition: Partition
    proxy: NDArray[np.int64]  # what the server took out of the split
    keeper: Keeper = "here"

    @property
    def name(self) -> str:
        return self.dataset.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dataset.shape

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def labels_are_words(self) -> bool:
        return self.dataset.words

    @property
    def client_names(self) -> tuple[str, ...] | None:
        return names_of(self.partition, self.dataset)

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def split_hash(self) -> str:
        return self.partition.hash()

    def described(self) -> dict[str, Any]:
        return described_split(self.partition, self.dataset) | self._described_proxy()

    def positions(self) -> dict[str, NDArray[np.int64]]:
        split = self.partition
        return {"examples": np.concatenate(split.indices), "sizes": split.sizes, "proxy": self.proxy}

    def _described_proxy(self) -> dict[str, Any]:
        """How many of each class the server has, where it has any."""
        labels = self.dataset.y_train.cpu()[torch.from_numpy(self.proxy)]
        return {"proxy": labels.bincount(minlength=len(self.classes)).tolist()} if len(self.proxy) else {}


def names_of(split: Partition, dataset: Dataset) -> tuple[str, ...] | None:
    """The clients' names; those of another split than the data's own have none."""
    return dataset.client_names if split.scheme == "given" else None


def described_split(split: Partition, dataset: Dataset) -> dict[str, Any]:
    """Who holds how many of which class."""
    counts = split.counts(dataset.y_train.cpu().numpy(), len(dataset.classes))
    names = names_of(split, dataset)
    return {
        "scheme": split.scheme,
        "hash": split.hash(),
        "classes": list(dataset.classes),
        "counts": counts.tolist(),
        **({} if names is None else {"names": list(names)}),
    }
