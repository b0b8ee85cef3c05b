"""From an experiment to a federation: data, split, model, algorithm, engine, and notices on what may surprise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm, arithmetic_beside_fedavg
from fedgg.core.net import Net, head_of
from fedgg.core.sampling import Work
from fedgg.data.arrays import from_arrays
from fedgg.data.client_batches import CHUNK, Feed
from fedgg.data.dataset import Dataset
from fedgg.data.load import are_own_arrays, call_loader, load
from fedgg.data.partition import Partition, partition
from fedgg.data.transforms import Scaling, scaling
from fedgg.engines.fused.cpu_step import fused_net
from fedgg.engines.module_equivalence import embeds
from fedgg.errors import UserError
from fedgg.lab.aggregation import Aggregation, aggregation_of
from fedgg.lab.config import Experiment
from fedgg.lab.engine_choice import Choice, channels_last, choose, products
from fedgg.lab.federation import Federation, Origin, WholeData, described_split, holdings
from fedgg.lab.name_resolution import (
    build_algorithm,
    build_model,
    check_needs,
    data_function,
    engine_class,
    load_start,
    split_function,
)
from fedgg.lab.torch_settings import DTYPES
from fedgg.registry import accepted_settings, names_code


def check_batches(experiment: Experiment, work: Work, sizes: list[int], names: Sequence[str]) -> list[str]:
    """What is worth knowing of clients that are empty or smaller than a batch; UserError where the latter are refused,
    or all are."""
    empty = sizes.count(0)
    notices = [f"{empty} of {len(sizes)} clients hold no examples and never take part"] if empty else []
    if work.batch is None:
        return notices
    small = [client for client, size in enumerate(sizes) if 0 < size < work.batch]
    if len(small) + empty == len(sizes):
        raise UserError(
            f"local.batch = {work.batch} is larger than every client (the largest holds {max(sizes)} examples): "
            f"take a smaller batch or fewer clients"
        )
    if small and experiment.local.small_clients == "refuse":
        first = small[0]
        raise UserError(
            f"local.batch = {work.batch} is larger than client {names[first]}, which holds {sizes[first]} examples: "
            f"take a smaller batch, a larger split.min_examples, or local.small_clients = 'whole'"
        )
    if small:
        notices.append(
            f"{len(small)} of {len(sizes)} clients hold less than a batch of {work.batch}: they train on all they have"
        )
    return notices


def check_single_scores(net: Net, tested: int, held_out: list[int], names: Sequence[str], chunk: int) -> None:
    """UserError where a model that cannot take one example would be scored on one."""
    if not net.needs_two_in_evaluation:
        return
    sizes = {"the test set": tested} | {
        f"the hold-out of client {names[client]}": size for client, size in enumerate(held_out)
    }
    for what, size in sizes.items():
        if size % chunk == 1:
            raise UserError(
                f"{what} has {size} examples and is scored {chunk} at a time, so that the last one is alone, which the "
                f"model cannot take in evaluation mode: leave one out"
            )


def check_single_examples(net: Net, work: Work, sizes: list[int], names: Sequence[str]) -> None:
    """UserError where a client's last batch has one example and the model cannot take that."""
    if not net.needs_two_examples:
        return
    for client, size in enumerate(sizes):
        last = size if work.batch is None else (size - 1) % work.batch + 1
        if size and last == 1:
            raise UserError(
                f"client {names[client]} holds {size} examples, so its last batch has one, which the model cannot take "
                f"(batch statistics need two): take another local.batch, a larger split.min_examples or "
                f"model.statistics = 'frozen'"
            )


ModelGiven = nn.Module | Callable[..., nn.Module]
LARGE_INPUTS = 30.0  # root mean square of a feature, above which a usual learning rate may be too much
DataGiven = Dataset | tuple[Any, Any, Any, Any] | tuple[Any, Any, Any, Any, Any]


def build(
    experiment: Experiment,
    *,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    algorithm: Algorithm | None = None,
    data_folder: Path | None = None,
    engine_reason: str | None = None,
) -> Federation:
    """Objects handed in take the place of those the experiment names.

    `engine_reason`: why the experiment names the engine it names, where a study chose it in the place of `auto`.
    """
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
    federation = assemble(experiment, feed, origin, model=model, algorithm=algorithm, engine_reason=engine_reason)
    _try_the_largest_inputs(federation.net.module, dataset, feed.scaling)
    notices = (
        *_threads_of_workers(experiment),
        *_empty_classes(dataset),
        *_unused_owners(experiment, dataset),
        *_about_scale(experiment, dataset, feed.scaling, federation.net.module),
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
    engine_reason: str | None = None,
) -> Federation:
    """A federation around these examples, wherever those of the clients are."""
    if algorithm is None:
        algorithm = build_algorithm(experiment.algorithm.name, experiment.algorithm.settings)
    sizes = [len(client) for client in feed.clients]
    first, _ = next(iter(feed.test_chunks()))
    names = origin.client_names
    found = examined(experiment, algorithm, sizes, origin.shape, len(origin.classes), first[:2], model, names)
    net, work, notices = found.net, found.work, [*found.batches]
    shown_names = names or [str(client) for client in range(len(sizes))]
    check_single_scores(net, len(feed.x_test), [len(client) for client in feed.held_out], shown_names, CHUNK)
    if net.freezes:
        notices.append(
            "model.statistics = 'frozen': normalisation layers use their starting statistics, in training as in "
            "evaluation"
        )
    elif net.keeps_statistics is False and experiment.model.statistics != "average":
        notices.append(f"model.statistics = {experiment.model.statistics!r} has no effect: the model keeps none")
    notices += _extra_arithmetic(algorithm, work)
    choice = choose(experiment, net, work.epochs * sum(sizes), engine_reason)
    engine_class(choice.name)  # user code must be an engine, before anything is written
    net.channels_last = channels_last(experiment, choice)
    if choice.notice is not None and origin.keeper == "here":  # else the clients' nodes train
        notices.append(choice.notice)
    if net.keeps_statistics:
        notices.append(
            f"the model keeps batch statistics: model.statistics = {experiment.model.statistics!r} "
            f"(others: average, local, frozen)"
        )
    if net.mixes_in_evaluation:
        notices.append(
            f"the model mixes the examples of a batch in evaluation mode too: it is scored in batches of {CHUNK}, and "
            f"scores depend on which examples share one"
        )
    notices += found.about
    return Federation(experiment, algorithm, net, feed, origin, work, choice, tuple(notices), found.aggregation)


@dataclass(frozen=True, eq=False)
class Examined:
    """What an experiment comes to with clients of certain sizes, and what is worth knowing of it."""

    net: Net
    work: Work
    aggregation: Aggregation
    batches: list[str]
    about: list[str]  # notices on privacy, robust rule and attack


def examined(
    experiment: Experiment,
    algorithm: Algorithm,
    sizes: list[int],
    shape: tuple[int, ...],
    classes: int,
    sample: Tensor,
    model: ModelGiven | None,
    names: Sequence[str] | None = None,
) -> Examined:
    """UserError where model, clients, batches and what is around them do not fit each other."""
    check_needs(algorithm, experiment)
    work = work_of(algorithm, experiment)
    names = names or [str(client) for client in range(len(sizes))]
    batches = check_batches(experiment, work, sizes, names)
    net = examined_net(experiment, algorithm, shape, classes, sample, model)
    check_single_examples(net, work, sizes, names)
    aggregation, about = aggregation_of(experiment, algorithm, net, np.flatnonzero(sizes))
    return Examined(net, work, aggregation, batches, about)


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
    module = _converted(module, chosen_device(experiment), DTYPES[experiment.engine.precision])
    net = Net(module, frozen_statistics=choice.statistics == "frozen", products=products(experiment))
    net.examine(sample, classes)
    if algorithm.needs_representation:
        net.head = head_of(net, sample)
    # Engines of user code get the model that the reference engine has.
    return net if experiment.engine.name == "loop" or names_code(experiment.engine.name) else fused_net(net)


def under_fused(federation: Federation, reason: str) -> Federation:
    """The same federation, trained by the fused step in place of the engine that its experiment names."""
    experiment = federation.experiment.changed({"engine.name": "fused"})
    choice = Choice("fused", reason, f"engine: fused ({reason})")
    notices = (*federation.notices, f"engine: fused ({reason})")
    return replace(federation, experiment=experiment, net=fused_net(federation.net), choice=choice, notices=notices)


def _converted(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """As `module.to(device, dtype)`, which would make complex constants real: these keep their type."""
    module._apply(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype))
    return module


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
    dataset = load_data(experiment.data.source, folder) if given is None else dataset_of(given)
    if experiment.data.augment != "none" and len(dataset.shape) != 3:
        raise UserError(
            f"data.augment = {experiment.data.augment!r} needs images [C, H, W], "
            f"but examples of {dataset.name} have shape {dataset.shape}"
        )
    return dataset


def load_data(source: str, folder: Path | None = None) -> Dataset:
    """The data set that `data.source` names: a registered one, or what a function of user code returns."""
    if not names_code(source):
        return load(source, folder)
    function = data_function(source)
    try:
        return dataset_of(call_loader(function, folder), source.rpartition(":")[2])
    except UserError as error:
        raise UserError(f"data.source = {source!r}: {error}") from error
    except Exception as error:  # user code can raise anything
        raise UserError(f"data.source = {source!r} cannot be loaded: {type(error).__name__}: {error}") from error


def dataset_of(given: DataGiven, name: str = "arrays") -> Dataset:
    """A data set as it was handed in from Python, or returned by user code."""
    if isinstance(given, Dataset):
        return given
    if not isinstance(given, tuple | list) or len(given) not in (4, 5):
        raise UserError(
            "data must be (x_train, y_train, x_test, y_test), and fifth, if you like, the client of each training "
            "example; a data set's name goes into the experiment"
        )
    return from_arrays(*given[:4], name=name, clients=given[4] if len(given) == 5 else None)


def with_given_clients(
    experiment: Experiment, given: DataGiven | None = None, data_folder: Path | None = None
) -> Experiment:
    """Under split.scheme = 'given' the data say how many clients there are, where split.clients does not."""
    if experiment.clients_are_known:
        return experiment
    dataset = load_data(experiment.data.source, data_folder) if given is None else dataset_of(given)
    if dataset.owners is None:
        return experiment  # the split says what is missing
    return experiment.changed({"split.clients": int(dataset.owners.max()) + 1})


def split_of(experiment: Experiment, dataset: Dataset) -> Partition:
    """Which example goes to which client."""
    split = experiment.split
    if split.scheme == "given" and dataset.owners is None:
        raise UserError(
            f"split.scheme = 'given': {dataset.name} does not say which client holds what; put an array `clients` "
            f"beside y_train into the .npz file, or hand it in as the fifth of data=(...)"
        )
    try:
        return partition(
            split.scheme,
            dataset.y_train.cpu().numpy(),
            split.clients,
            experiment.seed,
            min_examples=split.min_examples,
            allow_empty=split.allow_empty,
            owners=None if dataset.owners is None else dataset.owners.numpy(),
            function=split_function(split),
            **split.scheme_settings,
        )
    except Exception as error:
        if isinstance(error, UserError) or not names_code(split.scheme):
            raise
        # User code can raise anything.
        raise UserError(f"split.scheme = {split.scheme!r} failed: {type(error).__name__}: {error}") from error


def splits_alone(experiments: Sequence[Experiment], data_folder: Path | None = None) -> list[dict[str, Any]]:
    """The splits of experiments on one data set, without anything else of them."""
    dataset = load_data(experiments[0].data.source, data_folder)
    return [described_split(split_of(experiment, dataset), dataset) for experiment in experiments]


def check_data(source: str, data_folder: Path | None = None) -> None:
    """Complain now about a data set that is not there, rather than hours later."""
    load_data(source, data_folder)


def _unused_owners(experiment: Experiment, dataset: Dataset) -> list[str]:
    if dataset.owners is None or experiment.split.scheme == "given":
        return []
    return ["the data name the client of each example, and are split anew: split.scheme = 'given' keeps their clients"]


def _try_the_largest_inputs(module: nn.Module, dataset: Dataset, scaling: Scaling) -> None:
    """An Embedding fails on ids beyond its size, which the first examples need not have: told before the first round.

    On the CPU, where that is an error one can recover from.
    """
    if not embeds(module):
        return
    chosen = []
    for x in (dataset.x_train, dataset.x_test):
        chosen += [x[int(x.flatten(1).amin(1).argmin())], x[int(x.flatten(1).amax(1).argmax())]]
    extremes, here = torch.stack(chosen).cpu(), torch.device("cpu")
    try:
        with torch.no_grad():
            copy.deepcopy(module).to(here).eval()(scaling.to(here)(extremes))
    except IndexError as error:
        raise UserError(
            f"{type(module).__name__} cannot take all examples: {error}; the inputs lie between {extremes.min():g} and "
            f"{extremes.max():g}, and token ids must be less than the size of their Embedding"
        ) from error
    except Exception:
        return  # a module that is made for another device, for instance: where it trains is what counts


def _about_scale(experiment: Experiment, dataset: Dataset, scaling: Scaling, module: nn.Module) -> list[str]:
    """Own arrays reach the model as they are: where that may surprise it, how to have them scaled."""
    if not are_own_arrays(experiment.data.source):
        return []
    is_scaled = bool((scaling.shift != 0).any() or (scaling.scale != 1).any())
    if is_scaled:
        whole = embeds(module) and all(bool((x == x.round()).all()) for x in dataset.x_train.split(8192))
        scaled = f"data.normalise = {experiment.data.normalise!r} scales them before the model sees them"
        return [f"the inputs are whole numbers, and {scaled}: token ids need data.normalise = 'none'"] if whole else []
    mean, deviation = dataset.moments
    largest = float((mean.square() + deviation.square()).sqrt().max())
    if embeds(module) or largest < LARGE_INPUTS:
        return []
    return [
        f"the inputs reach the model as they are, with a root mean square of up to {largest:.3g} in a feature: "
        f"data.normalise = 'standard' would give each feature mean 0 and deviation 1"
    ]


def _without_effect(experiment: Experiment) -> list[str]:
    """Settings of the split that its scheme does not read, where they are not left as they come."""
    split, default = experiment.split, type(experiment.split)()
    accepted = accepted_settings(split_function(split))
    return [
        f"split.{key} = {value} has no effect under split.scheme = {split.scheme!r}"
        for key, value in split.scheme_settings.items()
        if key not in accepted and value != default.scheme_settings.get(key)
    ]


def _threads_of_workers(experiment: Experiment) -> list[str]:
    engine = experiment.engine
    if engine.threads == engine.threads_in_use:
        return []
    return [f"engine.threads = {engine.threads} has no effect under engine 'workers': each of its processes has one"]


def _empty_classes(dataset: Dataset) -> list[str]:
    counts = dataset.y_train.bincount(minlength=len(dataset.classes))
    empty = [name for name, count in zip(dataset.classes, counts.tolist(), strict=True) if not count]
    shown = f"{', '.join(empty[:5])}{' ...' if len(empty) > 5 else ''}"
    return [f"no training example has the class {shown}"] if empty else []
