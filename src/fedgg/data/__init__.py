"""Data sets and how their examples are split over clients.

A data set is a function that returns a `fedgg.data.dataset.Dataset`; one with a parameter `folder` is given the folder
of data files. A split is a function of `labels` and `clients` (`fedgg.data.partition` says what it may return).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedgg.registry import Registry

if TYPE_CHECKING:
    from fedgg.data.dataset import Dataset

DATASETS: Registry[Callable[..., Dataset]] = Registry(
    "data set",
    {
        "digits": "fedgg.data.readers:load_digits",
        "cifar10": "fedgg.data.readers:load_cifar10",
        "cifar100": "fedgg.data.readers:load_cifar100",
        "svhn": "fedgg.data.readers:load_svhn",
        "npz:FILE": "fedgg.data.user_arrays:load_npz",
    },
    code="FUNCTION",
)

SPLITS: Registry[Callable[..., Any]] = Registry(
    "split",
    {
        "dirichlet": "fedgg.data.split_schemes:dirichlet",
        "dirichlet_unbalanced": "fedgg.data.split_schemes:dirichlet_unbalanced",
        "dirichlet_client": "fedgg.data.split_schemes:dirichlet_client",
        "dirichlet_repeated": "fedgg.data.split_schemes:dirichlet_repeated",
        "iid": "fedgg.data.split_schemes:iid",
        "shards": "fedgg.data.split_schemes:shards",
        "k_labels": "fedgg.data.split_schemes:k_labels",
        "quantity": "fedgg.data.split_schemes:quantity",
        "domains": "fedgg.data.split_schemes:domains",
        "given": "fedgg.data.split_schemes:given",
    },
    code="FUNCTION",
)
