"""The data of a federation: loaded, split over the clients, and described for the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedgg.core.layout import InputPart
from fedgg.core.random_choices import stream
from fedgg.core.tasks import TASKS, Targets
from fedgg.data import DATASETS, SPLITS
from fedgg.data.batch_preparation import Scaling
from fedgg.data.catalog import data_folder
from fedgg.data.dataset import Dataset, load
from fedgg.data.feature_skew import with_feature_skew
from fedgg.data.partition import Partition, partition
from fedgg.data.user_arrays import from_arrays
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import DataConfig
from fedgg.lab.name_resolution import check_data_settings, data_function, split_function
from fedgg.models import IMAGE_MODELS
from fedgg.registry import accepted_settings, names_code

LARGE_INPUTS = 30.0  # root mean square of a feature, above which a usual learning rate may be too much
Positions = NDArray[np.int64]
DataGiven = Dataset | tuple[Any, Any, Any, Any] | tuple[Any, Any, Any, Any, Any]


# Loading -------------------------------------------------------------------------------------------------------------


def load_data(data: DataConfig, folder: Path | None = None, targets: Targets = "classes") -> Dataset:
    """The data set that `data.source` names: a registered one, or what a function of user code returns."""
    source, arguments = data.source, data.settings
    if source in DATASETS or not names_code(source):
        if arguments:
            check_data_settings(data)
        return load(source, folder, targets, **arguments)
    function = data_function(data)
    try:
        if "folder" in accepted_settings(function):
            arguments["folder"] = data_folder(folder)
        return dataset_of(function(**arguments), source.rpartition(":")[2], targets)
    except UserError as error:
        raise UserError(f"data.source = {source!r}: {error}") from error
    except Exception as error:  # user code can raise anything
        raise UserError(f"data.source = {source!r} cannot be loaded: {type(error).__name__}: {error}") from error


def dataset_of(data: DataGiven, name: str = "arrays", targets: Targets = "classes") -> Dataset:
    """A data set as it was handed in from Python, or returned by user code."""
    if isinstance(data, Dataset):
        return data
    if not isinstance(data, tuple | list) or len(data) not in (4, 5):
        raise UserError(
            "data must be (x_train, y_train, x_test, y_test), and fifth, if you like, the client of each training "
            "example; a data set's name goes into the experiment"
        )
    return from_arrays(*data[:4], name=name, clients=data[4] if len(data) == 5 else None, targets=targets)


def targets_of(experiment: Experiment) -> Targets:
    """The targets that the experiment's task needs."""
    task = experiment.task.name
    return TASKS[task].targets if task in TASKS else "any"


def data_of(experiment: Experiment, data: DataGiven | None = None, data_folder: Path | None = None) -> Dataset:
    """The data set of an experiment, with targets as its task needs them, or as it was handed in."""
    targets = targets_of(experiment)
    dataset = load_data(experiment.data, data_folder, targets) if data is None else dataset_of(data, targets=targets)
    if targets not in ("any", dataset.targets):
        raise UserError(
            f"task.name = {experiment.task.name!r} needs targets that are {targets}; those of {dataset.name} are "
            f"{dataset.targets}{_remedy(dataset.targets)}"
        )
    if dataset.x_train.dtype == torch.int64 and experiment.data.normalise != "none":
        if dataset.parts:
            raise UserError(f"data.normalise = {experiment.data.normalise!r}: several inputs need 'none'")
        dataset = dataset.in_floating_point
    wants_images = experiment.data.images or experiment.data.augment != "none" or experiment.model.name in IMAGE_MODELS
    return dataset.as_images if wants_images and len(dataset.shape) == 2 and not dataset.parts else dataset


def _remedy(targets: Targets) -> str:
    names = [repr(name) for name, task in TASKS.items() if task.targets == targets]
    return f": set task.name = {names[0]}" if names else ""


def with_given_clients(
    experiment: Experiment, data: DataGiven | None = None, data_folder: Path | None = None
) -> Experiment:
    """Under split.scheme = 'given' the data say how many clients there are, where split.clients does not."""
    if experiment.clients_are_known:
        return experiment
    dataset = data_of(experiment, data, data_folder)
    if dataset.owners is None:
        return experiment  # the split says what is missing
    return experiment.changed({"split.clients": int(dataset.owners.max()) + 1})


def notices_on_data(experiment: Experiment, dataset: Dataset, scaling: Scaling, embeds: bool) -> list[str]:
    """What may surprise in the data, their split and their scale; `embeds`: whether the model has an Embedding."""
    engine, split, notices = experiment.engine, experiment.split, list[str]()
    if engine.threads != engine.threads_in_use:
        notices.append(
            f"engine.threads = {engine.threads} has no effect under engine 'workers': each of its processes has one"
        )
    counts = dataset.labels.bincount(minlength=len(dataset.label_names)).tolist()
    empty = [name for name, count in zip(dataset.label_names, counts, strict=True) if not count]
    if empty:
        notices.append(f"no training example has the class {', '.join(empty[:5])}{' ...' if len(empty) > 5 else ''}")
    if dataset.owners is not None and split.scheme not in ("given", "domains"):
        notices.append(
            "the data name the client of each example, and are split anew: split.scheme = 'given' keeps their clients"
        )
    if ":" in experiment.data.source:  # the user's own arrays, which by default are not scaled
        notices += _notices_on_scale(experiment, dataset, scaling, embeds)
    default = type(split)().scheme_settings
    changed = {key: value for key, value in split.scheme_settings.items() if value != default.get(key)}
    accepted = accepted_settings(split_function(split)) if changed else {}
    notices += [
        f"split.{key} = {value} has no effect under split.scheme = {split.scheme!r}"
        for key, value in changed.items()
        if key not in accepted
    ]
    return notices


def _notices_on_scale(experiment: Experiment, dataset: Dataset, scaling: Scaling, embeds: bool) -> list[str]:
    """How to have inputs scaled that are large, and that token ids must not be."""
    if bool((scaling.shift != 0).any() or (scaling.scale != 1).any()):
        whole = embeds and all(bool((x == x.round()).all()) for x in dataset.x_train.split(8192))
        scaled = f"data.normalise = {experiment.data.normalise!r} scales them before the model sees them"
        return [f"the inputs are whole numbers, and {scaled}: token ids need data.normalise = 'none'"] if whole else []
    mean, deviation = dataset.moments
    largest = float((mean.square() + deviation.square()).sqrt().max())
    if embeds or largest < LARGE_INPUTS:
        return []
    return [
        f"the inputs reach the model as they are, with a root mean square of up to {largest:.3g} in a feature: "
        f"data.normalise = 'standard' would give each feature mean 0 and deviation 1"
    ]


# Which client holds which examples -----------------------------------------------------------------------------------


def split_of(experiment: Experiment, dataset: Dataset) -> Partition:
    """Which example goes to which client."""
    split = experiment.split
    if split.scheme in ("given", "domains") and dataset.owners is None:
        what = "which client holds what" if split.scheme == "given" else "which domain an example is of"
        raise UserError(
            f"split.scheme = {split.scheme!r}: {dataset.name} does not say {what}; put an array `clients` "
            f"beside y_train into the .npz file, or hand it in as the fifth of data=(...)"
        )
    function = SPLITS.get(split.scheme)
    if function is None or split.settings:
        function = split_function(split)  # of user code, or with settings to be checked
    try:
        return partition(
            split.scheme,
            dataset.y_train.cpu().numpy(),
            split.clients,
            experiment.seed,
            min_examples=split.min_examples,
            allow_empty=split.allow_empty,
            owners=None if dataset.owners is None else dataset.owners.numpy(),
            function=function,
            **split.scheme_settings,
        )
    except Exception as error:
        if isinstance(error, UserError) or not names_code(split.scheme):
            raise
        # User code can raise anything.
        raise UserError(f"split.scheme = {split.scheme!r} failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class Holdings:
    """Positions in the training set; no example is held in two of the three ways, and none is in the test set."""

    clients: tuple[Positions, ...]
    held_out: tuple[Positions, ...]
    proxy: Positions

    def skewed_inputs(self, experiment: Experiment, dataset: Dataset) -> Dataset:
        """The data set with the clients' inputs as `split.feature_noise` and `split.feature_rotation` change them.

        Held-out examples are changed as the client's others, and the server's (`data.proxy`) are not.
        """
        split = experiment.split
        clients = [np.union1d(*both) for both in zip(self.clients, self.held_out, strict=True)]
        return with_feature_skew(dataset, clients, split.feature_noise, split.feature_rotation, experiment.seed)


def holdings(experiment: Experiment, split: Partition) -> Holdings:
    """The split, less what the server takes (`data.proxy`) and what clients hold out (`data.holdout`)."""
    if split.repeats:
        _check_repetition(experiment)
    none = np.empty(0, np.int64)
    clients, held_out, proxy = split.indices, (none,) * len(split.indices), none
    if experiment.data.proxy:
        clients, proxy = _without_proxy(experiment, split)
    if experiment.data.holdout and split.repeats:
        clients, held_out = _hold_out_everywhere(experiment, clients)
    elif experiment.data.holdout:
        clients, held_out = _hold_out(experiment, clients)
    return Holdings(clients, held_out, proxy)


def _check_repetition(experiment: Experiment) -> None:
    """UserError for settings that rest on examples of one client each."""
    scheme, split = experiment.split.scheme, experiment.split
    if experiment.privacy is not None:
        raise UserError(
            f"privacy and split.scheme = {scheme!r}: epsilon is for clients whose examples no other client holds; take "
            f"split.scheme = 'dirichlet_client', which repeats none"
        )
    if split.feature_noise or split.feature_rotation:
        key = "feature_noise" if split.feature_noise else "feature_rotation"
        raise UserError(
            f"split.{key} and split.scheme = {scheme!r}: an example would be changed for several clients; take "
            f"split.scheme = 'dirichlet_client', which repeats none"
        )


def _without_proxy(experiment: Experiment, split: Partition) -> tuple[tuple[Positions, ...], Positions]:
    """The server's examples are drawn from all clients alike, except those that have no more to spare."""
    wanted = experiment.data.proxy
    owners = np.repeat(np.arange(len(split.indices)), split.sizes)
    examples = np.concatenate(split.indices)
    spare = split.sizes - max(experiment.split.min_examples, 1)
    taken: list[int] = []
    for place in stream(experiment.seed, "proxy").permutation(len(examples)):
        if split.repeats:  # every client loses all its copies
            copies = np.bincount(owners[examples == examples[place]], minlength=len(spare))
            if examples[place] not in taken and (spare >= copies).all():
                spare -= copies
                taken.append(int(examples[place]))
        elif spare[owners[place]] > 0:
            spare[owners[place]] -= 1
            taken.append(int(examples[place]))
        if len(taken) == wanted:
            break
    if len(taken) < wanted:
        raise UserError(
            f"data.proxy = {wanted} is more than the {len(taken)} examples clients can spare "
            f"(split.min_examples = {experiment.split.min_examples}): take fewer"
        )
    proxy = np.sort(np.array(taken, dtype=np.int64))
    return tuple(examples[~np.isin(examples, proxy)] for examples in split.indices), proxy


def _hold_out(
    experiment: Experiment, clients: Sequence[Positions]
) -> tuple[tuple[Positions, ...], tuple[Positions, ...]]:
    """Each client's training examples, and those it holds out (at least one where it has two or more)."""
    train, held_out = [], []
    for client, examples in enumerate(clients):
        share = round(experiment.data.holdout * len(examples))
        count = min(max(share, 1), len(examples) - 1) if len(examples) > 1 else 0
        order = stream(experiment.seed, "holdout", client).permutation(len(examples))
        held_out.append(np.sort(examples[order[:count]]))
        train.append(np.sort(examples[order[count:]]))
    return tuple(train), tuple(held_out)


def _hold_out_everywhere(
    experiment: Experiment, clients: Sequence[Positions]
) -> tuple[tuple[Positions, ...], tuple[Positions, ...]]:
    """The same where clients share examples: those held out by one are trained on by none, and count once a client.

    They are drawn from all examples, so that the share of a client is `data.holdout` in the mean only.
    """
    examples = np.unique(np.concatenate(clients))
    order = stream(experiment.seed, "holdout").permutation(len(examples))
    chosen = examples[order[: round(experiment.data.holdout * len(examples))]]
    train = tuple(held[~np.isin(held, chosen)] for held in clients)
    return train, tuple(np.unique(held[np.isin(held, chosen)]) for held in clients)


# What a run folder says of the data ----------------------------------------------------------------------------------

Keeper = Literal["here", "nodes"]


class Origin(Protocol):
    """What this process knows of the data: all of them, or, where clients are on nodes, what these report."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> tuple[InputPart, ...]: ...
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
        """Where client state is kept between rounds: in this run's folder, or on the clients' nodes."""

    def split_hash(self) -> str: ...
    def described(self) -> dict[str, Any]:
        """The content of partition.json."""

    def positions(self) -> dict[str, NDArray[np.int64]]:
        """The content of partition.npz."""


@dataclass(frozen=True, eq=False)
class WholeData:
    """A data set and its split, both in this process."""

    dataset: Dataset
    partition: Partition
    proxy: Positions = field(default_factory=lambda: np.empty(0, np.int64))  # the server's examples
    keeper: Keeper = "here"
    name: str = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    parts: tuple[InputPart, ...] = field(init=False)
    classes: tuple[str, ...] = field(init=False)
    labels_are_words: bool = field(init=False)
    client_names: tuple[str, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        data = self.dataset
        known: dict[str, Any] = {
            "name": data.name,
            "shape": data.shape,
            "parts": data.parts,
            "classes": data.classes,
            "labels_are_words": data.words,
            "client_names": self._names() if self.partition.scheme in ("given", "domains") else None,
        }
        for key, value in known.items():
            object.__setattr__(self, key, value)

    def _names(self) -> tuple[str, ...] | None:
        """Of the data's clients, or of those chosen among them: by what the data call them. Of domains numbered."""
        owners, names, clients = self.dataset.owners, self.dataset.client_names, self.partition.indices
        if owners is None or int(owners.max()) + 1 == len(clients):
            return names
        numbers = [int(owners[held[0]]) if len(held) else -1 for held in clients]
        called = [str(number) if names is None or number < 0 else names[number] for number in numbers]
        if self.partition.scheme == "given":
            return tuple(called)
        return tuple(f"{name} {called[: at + 1].count(name)}" for at, name in enumerate(called))

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint  # computed where it is read: a run without a folder does not need it

    def split_hash(self) -> str:
        return self.partition.hash()

    def described(self) -> dict[str, Any]:
        """How many examples of which class each client has, and the server where it has any."""
        labels, classes, names = self.dataset.labels.cpu().numpy(), self.dataset.label_names, self.client_names
        content = {
            "scheme": self.partition.scheme,
            "hash": self.partition.hash(),
            "classes": list(classes),
            "counts": self.partition.counts(labels, len(classes)).tolist(),
        }
        if names is not None:
            content["names"] = list(names)
        if len(self.proxy):
            content["proxy"] = np.bincount(labels[self.proxy], minlength=len(classes)).tolist()
        return content

    def positions(self) -> dict[str, NDArray[np.int64]]:
        split = self.partition
        return {"examples": np.concatenate(split.indices), "sizes": split.sizes, "proxy": self.proxy}


def splits_alone(experiments: Sequence[Experiment], data_folder: Path | None = None) -> list[dict[str, Any]]:
    """The splits of experiments on one data set, without anything else of them."""
    dataset = data_of(experiments[0], None, data_folder)
    return [WholeData(dataset, split_of(experiment, dataset)).described() for experiment in experiments]
