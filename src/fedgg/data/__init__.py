"""Data sets and how their examples are split over clients.

A data set is a function that returns a `fedgg.data.dataset.Dataset`; one with a parameter `folder` is given the folder
of data files, and its other parameters are keys of the section [data]. A split is a function of `labels` and `clients`
(`fedgg.data.partition` says what it may return).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedgg.registry import ARRAYS_IN_FILE, HUGGING_FACE, Registry

if TYPE_CHECKING:
    from fedgg.data.catalog import PublishedCopy
    from fedgg.data.dataset import Dataset

DATASETS: Registry[Callable[..., Dataset]] = Registry(
    "data set",
    {
        "digits": "fedgg.data.readers:load_digits",
        "cifar10": "fedgg.data.readers:load_cifar10",
        "cifar100": "fedgg.data.readers:load_cifar100",
        "svhn": "fedgg.data.readers:load_svhn",
        "mnist": "fedgg.data.mnist_family:load_mnist",
        "fashion-mnist": "fedgg.data.mnist_family:load_fashion_mnist",
        "emnist-balanced": "fedgg.data.mnist_family:load_emnist_balanced",
        "emnist-byclass": "fedgg.data.mnist_family:load_emnist_byclass",
        "emnist-bymerge": "fedgg.data.mnist_family:load_emnist_bymerge",
        "emnist-digits": "fedgg.data.mnist_family:load_emnist_digits",
        "emnist-letters": "fedgg.data.mnist_family:load_emnist_letters",
        "tiny-imagenet": "fedgg.data.tiny_imagenet:load_tiny_imagenet",
        "femnist": "fedgg.data.natural_clients:load_femnist",
        "shakespeare": "fedgg.data.natural_clients:load_shakespeare",
        "hf:NAME": "fedgg.data.hugging_face:load_hugging_face",
        "npz:FILE": "fedgg.data.user_arrays:load_npz",
    },
    code="FUNCTION",
)

_IDX_FILES = ("mnist", "fashion-mnist", *(name for name in DATASETS if name.startswith("emnist-")))
# Functions that find the copies of a published data set in a folder, for `fedgg data check`.
COPIES: Registry[Callable[..., Sequence[PublishedCopy]]] = Registry(
    "published data set",
    {
        **dict.fromkeys(_IDX_FILES, "fedgg.data.mnist_family:find_idx_copies"),
        "tiny-imagenet": "fedgg.data.tiny_imagenet:find_tiny_imagenet",
        "shakespeare": "fedgg.data.natural_clients:find_shakespeare",
    },
    code="FUNCTION",
)

NOT_SETTINGS = ("folder", "publication", "path", "name", "targets")  # parameters that are not keys of [data]
NOT_CACHED = ("digits", "hf:NAME", "npz:FILE")  # read anew by every process: see dataset_cache
TEXTS = ("shakespeare",)  # tokens, which are not normalised


def registered_name(source: str) -> str:
    """The entry of `DATASETS` that reads this source; the source itself where it is user code or unknown."""
    prefixes = {ARRAYS_IN_FILE: "npz:FILE", HUGGING_FACE: "hf:NAME"}
    return next((name for prefix, name in prefixes.items() if source.startswith(prefix)), source)


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
