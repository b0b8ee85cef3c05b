"""From an experiment to everything a run needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm, arithmetic_beside_fedavg
from fedgg.core.net import Net
from fedgg.core.plan import Work
from fedgg.core.representation import head_of
from fedgg.data.arrays import from_arrays
from fedgg.data.dataset import Dataset
from fedgg.data.feed import Feed
from fedgg.data.normalise import scaling
from fedgg.data.partition import Partition, given_partition, partition
from fedgg.data.sources import load
from fedgg.errors import UserError
from fedgg.lab.arithmetic import DTYPES
from fedgg.lab.batches import check_batches, check_single_examples
from fedgg.lab.choice import EngineName, channels_last, choose, products
from fedgg.lab.config import Experiment
from fedgg.lab.holdings import holdings
from fedgg.lab.origin import Origin, WholeData, described_split
from fedgg.lab.parts import build_algorithm, build_model, check_needs, load_start
from fedgg.lab.wrapping import NOTHING, Wrappers, wrappers_of

ModelGiven = nn.Module | Callable[..., nn.Module]
DataGiven = Dataset | tuple[Any, Any, Any, Any] | tuple[Any, Any, Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Federation:
    """A server, its clients and their data, ready to run."""

    experiment: Experiment
    algorithm: Algorithm
    net: Net
    feed: Feed
    origin: Origin
    work: Work
    engine: EngineName  # who trains it
    notices: tuple[str, ...]
    wrappers: Wrappers = NOTHING  # what happens between clients and algorithm

    @property
    def cohort_size(self) -> int:
        return self.experiment.cohort_of(self.experiment.split.clients)

    @cached_property
    def last_round(self) -> int:
        """The one asked for, or an earlier one where privacy allows no more."""
        rounds, budget = self.experiment.rounds, self.wrappers.budget
        return rounds if budget is None else budget.affordable(rounds)

    # Counted once: a round asks for its cohort's alone, and must not cost more where the population is larger.

    @cached_property
    def examples(self) -> list[int]:
        """How many each client trains on."""
        return [len(client) for client in self.feed.clients]

    @cached_property
    def all_examples(self) -> int:
        return sum(self.examples)

    @cached_property
    def filled(self) -> NDArray[np.int64]:
        """The clients that have any."""
        return np.flatnonzero(self.examples)

    @cached_property
    def tested(self) -> list[int]:
        """The clients that keep examples back."""
        return [client for client, kept in enumerate(self.feed.held_out) if len(kept)]


def build(
    experiment: Experiment,
    *,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    algorithm: Algorithm | None = None,
    data_folder: Path | None = None,
) -> Federation:
    """Objects handed in take the place of those the experiment names."""
    dtype = DTYPES[experiment.engine.precision]
    dataset = dataset_for(experiment, data, data_folder)
    split = split_of(experiment, dataset)
    held = holdings(experiment, split)
    feed = Feed.of(
        dataset,
        held.clients,
        held.held_out,
        scaling(experiment.data.normalise, dataset, dtype),
        experiment.data.augment,
        chosen_device(experiment),
        held.proxy,
    )
    origin = WholeData(dataset, split, held.proxy)
    federation = assemble(experiment, feed, origin, model=model, algorithm=algorithm)
    notices = (
        *_empty_classes(dataset),
        *_unused_owners(experiment, dataset),
        *_without_effect(experiment),
        *federation.notices,
    )
    return replace(federation, notices=notices)


def assemble(
    experiment: Experiment,
    feed: Feed,
    origin: Origin,
    *,
    model: ModelGiven | None = None,
    algorithm: Algorithm | None = None,
) -> Federation:
    """A federation around these examples, wherever those of the clients are."""
    if algorithm is None:
        algorithm = build_algorithm(experiment.algorithm.name, experiment.algorithm.settings)
    sizes = [len(client) for client in feed.clients]
    first, _ = next(iter(feed.test_chunks()))
    found = examined(experiment, algorithm, sizes, origin.shape, len(origin.classes), first[:2], model)
    net, work, notices = found.net, found.work, [*found.batches]
    if net.keeps_statistics is False and experiment.model.statistics != "average":
        notices.append(f"model.statistics = {experiment.model.statistics!r} has no effect: the model keeps none")
    notices += _extra_arithmetic(algorithm, work)
    choice = choose(experiment, net, work.epochs * sum(sizes))
    net.channels_last = channels_last(experiment, choice)
    if choice.notice is not None:
        notices.append(choice.notice)
    if net.keeps_statistics:
        notices.append(
            f"the model keeps batch statistics: model.statistics = {experiment.model.statistics!r} "
            f"(others: average, local, frozen)"
        )
    notices += found.about
    return Federation(experiment, algorithm, net, feed, origin, work, choice.name, tuple(notices), found.wrappers)


@dataclass(frozen=True, eq=False)
class Examined:
    """What an experiment comes to with clients of certain sizes, and what is worth knowing of it."""

    net: Net
    work: Work
    wrappers: Wrappers
    batches: list[str]
    about: list[str]  # the wrappers


def examined(
    experiment: Experiment,
    algorithm: Algorithm,
    sizes: list[int],
    shape: tuple[int, ...],
    classes: int,
    sample: Tensor,
    model: ModelGiven | None,
) -> Examined:
    """UserError where model, clients, batches and what is around them do not fit each other."""
    check_needs(algorithm, experiment)
    work = work_of(algorithm, experiment)
    batches = check_batches(experiment, work, sizes)
    net = examined_net(experiment, algorithm, shape, classes, sample, model)
    check_single_examples(net, work, sizes)
    filled = sum(size > 0 for size in sizes)
    wrappers, about = wrappers_of(experiment, algorithm, net, filled, experiment.cohort_of(filled))
    return Examined(net, work, wrappers, batches, about)


def work_of(algorithm: Algorithm, experiment: Experiment) -> Work:
    """What one client does in a round."""
    return algorithm.work(Work(experiment.local.epochs, experiment.local.batch))


def examined_net(
    experiment: Experiment,
    algorithm: Algorithm,
    shape: tuple[int, ...],
    classes: int,
    sample: Tensor,
    given: ModelGiven | None = None,
) -> Net:
    """The experiment's model at its start, looked at with two examples."""
    choice = experiment.model
    module = build_model(given or choice.name, choice.settings, shape, classes, experiment.seed)
    if choice.start is not None:
        load_start(module, Path(choice.start))
    module = module.to(device=chosen_device(experiment), dtype=DTYPES[experiment.engine.precision])
    net = Net(module, frozen_statistics=choice.statistics == "frozen", products=products(experiment))
    net.examine(sample, classes)
    if algorithm.needs_representation:
        net.head = head_of(net, sample)
    return net


def _extra_arithmetic(algorithm: Algorithm, work: Work) -> list[str]:
    """What an algorithm computes beside a forward and a backward pass for each example it trains on."""
    times = arithmetic_beside_fedavg(algorithm, work.epochs)
    return [] if times == 1 else [f"{type(algorithm).__name__} takes about {times:.2f} times FedAvg's arithmetic"]


def chosen_device(experiment: Experiment) -> torch.device:
    wanted = experiment.engine.device
    if wanted.startswith("cuda"):
        count = torch.cuda.device_count()
        if int(wanted.partition(":")[2] or 0) >= count:
            raise UserError(
                f"engine.device = {wanted!r}: this machine has {count} CUDA devices; set engine.device = 'cpu'"
            )
    return torch.device(wanted)


def dataset_for(experiment: Experiment, given: DataGiven | None, folder: Path | None) -> Dataset:
    if given is None:
        dataset = load(experiment.data.source, folder)
    elif isinstance(given, Dataset):
        dataset = given
    else:
        dataset = dataset_of(given)
    if experiment.data.augment != "none" and len(dataset.shape) != 3:
        raise UserError(
            f"data.augment = {experiment.data.augment!r} needs images [C, H, W], "
            f"but examples of {dataset.name} have shape {dataset.shape}"
        )
    return dataset


def dataset_of(given: DataGiven) -> Dataset:
    """A data set as it was handed in from Python."""
    if isinstance(given, Dataset):
        return given
    if not isinstance(given, tuple | list) or len(given) not in (4, 5):
        raise UserError(
            "data must be (x_train, y_train, x_test, y_test), and fifth, if you like, the client of each training "
            "example; a data set's name goes into the experiment"
        )
    return from_arrays(*given[:4], clients=given[4] if len(given) == 5 else None)


def split_of(experiment: Experiment, dataset: Dataset) -> Partition:
    """Which example goes to which client."""
    s = experiment.split
    if s.scheme == "given":
        if dataset.owners is None:
            raise UserError(
                f"split.scheme = 'given': {dataset.name} does not say which client holds what; put an array `clients` "
                f"beside y_train into the .npz file, or hand it in as the fifth of data=(...)"
            )
        return given_partition(dataset.owners.numpy(), s.clients)
    return partition(
        s.scheme,
        dataset.y_train.cpu().numpy(),
        s.clients,
        experiment.seed,
        beta=s.beta,
        min_examples=s.min_examples,
        shards_per_client=s.shards_per_client,
        allow_empty=s.allow_empty,
    )


def splits_alone(experiments: Sequence[Experiment], data_folder: Path | None = None) -> list[dict[str, Any]]:
    """The splits of experiments on one data set, without anything else of them."""
    dataset = load(experiments[0].data.source, data_folder)
    return [described_split(split_of(experiment, dataset), dataset) for experiment in experiments]


def check_data(source: str, data_folder: Path | None = None) -> None:
    """Complain now about a data set that is not there, rather than hours later."""
    load(source, data_folder)


def _unused_owners(experiment: Experiment, dataset: Dataset) -> list[str]:
    if dataset.owners is None or experiment.split.scheme == "given":
        return []
    return ["the data name the client of each example, and are split anew: split.scheme = 'given' keeps their clients"]


def _without_effect(experiment: Experiment) -> list[str]:
    """Settings of the split that its scheme does not read, where they are not left as they come."""
    split, usual = experiment.split, type(experiment.split)()
    readers = {"beta": split.scheme.startswith("dirichlet"), "shards_per_client": split.scheme == "shards"}
    return [
        f"split.{key} = {getattr(split, key)} has no effect under split.scheme = {split.scheme!r}"
        for key, read in readers.items()
        if not read and getattr(split, key) != getattr(usual, key)
    ]


def _empty_classes(dataset: Dataset) -> list[str]:
    counts = dataset.y_train.bincount(minlength=len(dataset.classes))
    empty = [name for name, count in zip(dataset.classes, counts.tolist(), strict=True) if not count]
    shown = f"{', '.join(empty[:5])}{' ...' if len(empty) > 5 else ''}"
    return [f"no training example has the class {shown}"] if empty else []
