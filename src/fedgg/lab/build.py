"""From an experiment to a federation that is ready to run: data, model, algorithm, engine, and notices for the user."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm, arithmetic_beside_fedavg
from fedgg.core.layout import InputPart
from fedgg.core.model import NeedsFloatingPoint, Net, head_of
from fedgg.core.random_choices import Work
from fedgg.core.tasks import task_name
from fedgg.data.batch_preparation import CHUNK, Feed, Scaling, scaling
from fedgg.data.dataset import Dataset
from fedgg.engines import ENGINES
from fedgg.engines.fused.net import fused_net
from fedgg.errors import UserError
from fedgg.lab.aggregation import PLAIN_AGGREGATION, Aggregation, aggregation_of
from fedgg.lab.config import Experiment
from fedgg.lab.config_sections import OptimiserConfig, ScheduleConfig, TaskConfig
from fedgg.lab.engine_setup import DTYPES, Choice, choose, chosen_device
from fedgg.lab.federated_data import DataGiven, Origin, WholeData, data_of, holdings, notices_on_data, split_of
from fedgg.lab.local_optimiser import check_optimiser, server_rates
from fedgg.lab.name_resolution import build_algorithm, build_model, check_needs, engine_class
from fedgg.lab.personal_parts import personal_settings, unseen_clients, with_personal_parts
from fedgg.lab.task_and_metrics import NAMED_OBJECTIVE, Objective, metrics_of, task_of
from fedgg.lab.weight_files import load_start, share_frozen
from fedgg.registry import names_code

ModelGiven = nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True)
class Population:
    """The clients that hold examples, which are those that can be drawn."""

    clients: int
    examples: int  # all of theirs


@dataclass(frozen=True, eq=False)
class Federation:
    """A server, its clients and their data, ready to run."""

    experiment: Experiment
    algorithm: Algorithm
    net: Net
    feed: Feed
    origin: Origin
    work: Work
    choice: Choice  # of the engine, and why
    notices: tuple[str, ...]
    aggregation: Aggregation = PLAIN_AGGREGATION  # privacy, robust rule and attack
    # Computed once: a round must not cost more where there are more clients.
    engine: str = field(init=False)  # the name of the engine that trains
    examples: list[int] = field(init=False)  # how many each client trains on
    filled: NDArray[np.int64] = field(init=False)  # the clients that have training examples
    population: Population = field(init=False)
    cohort_size: int = field(init=False)
    tested: list[int] = field(init=False)  # the clients that train and hold examples out
    unseen: list[int] = field(init=False)  # the clients that hold examples out and never train
    personal_settings: dict[str, Any] = field(init=False)  # of [personal], for every round
    scores_clients_models: bool = field(init=False)  # whether there are personal models or unseen clients
    last_round: int = field(init=False)  # an earlier one than the experiment's where privacy allows no more

    def __post_init__(self) -> None:
        examples = [len(client) for client in self.feed.clients]
        unseen = unseen_clients(self.experiment, self.feed)
        filled = np.setdiff1d(np.flatnonzero(examples), unseen)
        rounds, budget = self.experiment.rounds, self.aggregation.budget
        has_personal, is_here = self.experiment.personal is not None, self.origin.keeper == "here"
        computed: dict[str, Any] = {
            "engine": "devices" if self.choice.spread else self.choice.name,
            "examples": examples,
            "filled": filled,
            "population": Population(len(filled), int(np.take(examples, filled).sum())),
            "cohort_size": self.experiment.cohort_of(len(filled)),
            "tested": [c for c, held_out in enumerate(self.feed.held_out) if len(held_out) and c not in unseen],
            "unseen": unseen,
            "personal_settings": personal_settings(self.experiment, self.work) if has_personal and is_here else {},
            "scores_clients_models": has_personal or bool(unseen),
            "last_round": rounds if budget is None else budget.affordable(rounds),
        }
        for key, value in computed.items():
            object.__setattr__(self, key, value)

    def named(self, client: int) -> dict[str, Any]:
        """A client as the history writes it: its number, and its name where it has one."""
        names = self.origin.client_names
        return {"client": client} | ({} if names is None else {"name": names[client]})


# Building ------------------------------------------------------------------------------------------------------------


def build(
    experiment: Experiment,
    *,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    algorithm: Algorithm | None = None,
    objective: Objective = NAMED_OBJECTIVE,
    data_folder: Path | None = None,
    engine_reason: str | None = None,
) -> Federation:
    """Objects handed in take the place of those the experiment names.

    `engine_reason`: why the experiment names the engine it names, where a study chose it in the place of `auto`.
    """
    dataset = data_of(experiment, data, data_folder)
    split = split_of(experiment, dataset)
    held = holdings(experiment, split)
    device, dtype = chosen_device(experiment), DTYPES[experiment.engine.precision]
    target_type = dtype if dataset.y_train.is_floating_point() else dataset.y_train.dtype
    is_skewed = experiment.split.feature_noise or experiment.split.feature_rotation
    inputs = held.skewed_inputs(experiment, dataset) if is_skewed else dataset
    feed = Feed(
        x=inputs.x_train.to(device),
        y=dataset.y_train.to(device, target_type),
        x_test=inputs.x_test.to(device),
        y_test=dataset.y_test.to(device, target_type),
        clients=held.clients,
        held_out=held.held_out,
        scaling=scaling(experiment.data.normalise, dataset, dtype, device),
        augmentation=experiment.data.augment,
        proxy=held.proxy,
    )
    origin = WholeData(dataset, split, held.proxy)
    parts: dict[str, Any] = {"model": model, "algorithm": algorithm, "objective": objective}
    try:
        federation = assemble(experiment, feed, origin, **parts, engine_reason=engine_reason)
    except NeedsFloatingPoint:
        federation = build(experiment, data=dataset.in_floating_point, **parts, engine_reason=engine_reason)
        notice = "the inputs are whole numbers, and the model takes floating point numbers: they are converted"
        return replace(federation, notices=(notice, *federation.notices))
    if federation.net.embeds:
        try_the_largest_inputs(federation.net.module, dataset, feed.scaling)
    notices = notices_on_data(experiment, dataset, feed.scaling, federation.net.embeds)
    return replace(federation, notices=(*notices, *federation.notices))


def assemble(
    experiment: Experiment,
    feed: Feed,
    origin: Origin,
    *,
    model: ModelGiven | None = None,
    algorithm: Algorithm | None = None,
    objective: Objective = NAMED_OBJECTIVE,
    engine_reason: str | None = None,
) -> Federation:
    """A federation around these examples, wherever those of the clients are."""
    if algorithm is None:
        algorithm = build_algorithm(experiment.algorithm.name, experiment.algorithm.settings)
    sizes = [len(client) for client in feed.clients]
    x, y = feed.unseen(None, 0)
    unseen = unseen_clients(experiment, feed)
    examined = examine(experiment, algorithm, sizes, origin, (x[:2], y[:2]), model, objective, unseen)
    net, work, notices = examined.net, examined.work, [*examined.notices_on_batches]
    if net.task.examples_differ:
        feed = replace(feed, weights=net.task.weights)
        if not bool((net.task.weights(feed.y_test) > 0).any()):
            raise UserError(f"no target of the test set of {origin.name} counts: all of them are padding")
    if net.needs_two_in_evaluation:
        check_single_scores(feed, origin.client_names)
    if net.freezes:
        notices.append(
            "model.statistics = 'frozen': normalisation layers use their starting statistics, in training as in "
            "evaluation"
        )
    elif net.keeps_statistics is False and experiment.model.statistics != "average":
        notices.append(f"model.statistics = {experiment.model.statistics!r} has no effect: the model keeps none")
    if warning := algorithm.warning(sizes):
        notices.append(f"{type(algorithm).__name__}: {warning}")
    if algorithm.step_passes or algorithm.look_passes:
        times = arithmetic_beside_fedavg(algorithm, work.examples_trained(sizes) / sum(sizes))
        notices.append(f"{type(algorithm).__name__} takes about {times:.2f} times FedAvg's arithmetic")
    choice = choose(experiment, net, work, sizes, engine_reason)
    if choice.name not in ENGINES:
        engine_class(choice.name)  # user code must be an engine, before anything is written
    # Tensor cores are fastest where the channels of a pixel are neighbours in memory.
    coarse = experiment.engine.precision in ("tf32", "bf16")
    net.channels_last = choice.name == "streams" and coarse and net.personal is None
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
    notices += examined.notices_on_aggregation
    return Federation(experiment, algorithm, net, feed, origin, work, choice, tuple(notices), examined.aggregation)


@dataclass(frozen=True, eq=False)
class Examined:
    """What an experiment comes to with clients of certain sizes."""

    net: Net
    work: Work
    aggregation: Aggregation
    notices_on_batches: list[str]
    notices_on_aggregation: list[str]


def examine(
    experiment: Experiment,
    algorithm: Algorithm,
    sizes: list[int],
    origin: Origin,
    sample: tuple[Tensor, Tensor],
    model: ModelGiven | None,
    objective: Objective = NAMED_OBJECTIVE,
    unseen: Sequence[int] = (),
) -> Examined:
    """UserError where model, clients, batches, and privacy, robust rule or attack do not fit each other."""
    augment, shape = experiment.data.augment, origin.shape
    if augment != "none" and len(shape) != 3:
        raise UserError(
            f"data.augment = {augment!r} needs images [C, H, W], but examples of {origin.name} have shape {shape}"
        )
    if algorithm.needs_proxy:
        check_needs(algorithm, experiment)
    if experiment.optimiser != OptimiserConfig() or experiment.schedule != ScheduleConfig():
        check_optimiser(experiment, algorithm)
    local = experiment.local
    work = algorithm.work(local.work())
    notices = check_batches(experiment, work, sizes, origin.client_names) if min(sizes) < (work.batch or 1) else []
    net = examined_net(experiment, algorithm, shape, len(origin.classes), sample, model, objective, origin.parts)
    if net.needs_two_examples:
        check_single_examples(work, sizes, origin.client_names)
    aggregation, on_aggregation = PLAIN_AGGREGATION, list[str]()
    if experiment.privacy is not None or experiment.robust is not None or experiment.attack is not None:
        training = np.setdiff1d(np.flatnonzero(sizes), unseen)
        aggregation, on_aggregation = aggregation_of(experiment, algorithm, net, training)
    if (experiment.server.lr, experiment.server.lr_decay, experiment.server_schedule) != (1, 1, ScheduleConfig()):
        aggregation = replace(aggregation, server_rates=server_rates(experiment, algorithm))
    return Examined(net, work, aggregation, notices, on_aggregation)


def examined_net(
    experiment: Experiment,
    algorithm: Algorithm,
    shape: tuple[int, ...],
    classes: int,
    sample: tuple[Tensor, Tensor],
    model: ModelGiven | None = None,
    objective: Objective = NAMED_OBJECTIVE,
    parts: tuple[InputPart, ...] = (),
) -> Net:
    """The experiment's model with its initial weights, traced with two examples and their targets."""
    config, engine = experiment.model, experiment.engine
    module = build_model(config.name if model is None else model, config.settings, shape, classes, experiment.seed)
    if config.start is not None:
        load_start(module, Path(config.start))
    device, dtype = chosen_device(experiment), DTYPES[engine.precision]
    # As module.to(device, dtype), which would make complex constants real: these keep their type.
    module._apply(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype))
    if any(not parameter.requires_grad for parameter in module.parameters()):
        share_frozen(module)
    products = torch.bfloat16 if engine.precision == "bf16" else None
    net = Net(module, frozen_statistics=config.statistics == "frozen", products=products)
    is_plain = experiment.task == TaskConfig() and not experiment.metrics and experiment.stop is None
    if not is_plain or objective != NAMED_OBJECTIVE:
        task = task_of(experiment, objective.loss)
        net.set_task(task, metrics_of(experiment, task, objective.metrics))
    net.parts = parts
    net.examine(sample[0], classes, sample[1])
    if algorithm.needs_classes and net.task.targets != "classes":
        raise UserError(
            f"{type(algorithm).__name__} needs a class for each example, and the task {task_name(net.task)} has none: "
            f"take the task classification, or another algorithm"
        )
    if algorithm.needs_representation:
        net.head = head_of(net, sample[0], one_vector=True)
    if experiment.personal is not None:
        net = with_personal_parts(experiment, algorithm, net, sample[0])
    # Engines of user code get the model that the reference engine has.
    return net if engine.name == "loop" or names_code(engine.name) else fused_net(net)


def check_batches(experiment: Experiment, work: Work, sizes: list[int], names: Sequence[str] | None) -> list[str]:
    """Notices on clients that are empty or smaller than a batch; UserError where all are, or small ones are refused."""
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
            f"local.batch = {work.batch} is larger than client {names[first] if names else first}, which holds "
            f"{sizes[first]} examples: take a smaller batch, a larger split.min_examples, or local.small_clients = "
            f"'whole'"
        )
    if small:
        fewer = f"{len(small)} of {len(sizes)} clients hold less than a batch of {work.batch}"
        notices.append(f"{fewer}: they train on all they have")
    return notices


def check_single_examples(work: Work, sizes: list[int], names: Sequence[str] | None) -> None:
    """UserError where a client's last batch has one example, of a model that cannot take that."""
    if work.batch == 1:
        raise UserError(
            "local.batch = 1: every batch has one example, which the model cannot take (batch statistics need two): "
            "take a larger one, or model.statistics = 'frozen'"
        )
    for client, size in enumerate(sizes):
        if size and work.last_batch(size) == 1 and work.steps(size) >= work.batches(size):
            way_out = "a larger split.min_examples" if size == 1 else "local.drop_last = true, another local.batch"
            raise UserError(
                f"client {names[client] if names else client} holds {size} example{'s' * (size > 1)}, so its last "
                f"batch has one, which the model cannot take (batch statistics need two): take {way_out} or "
                f"model.statistics = 'frozen'"
            )


def check_single_scores(feed: Feed, names: Sequence[str] | None) -> None:
    """UserError where a model that cannot take one example would be scored on one."""
    sizes = {"the test set": len(feed.x_test)}
    for client, held_out in enumerate(feed.held_out):
        sizes[f"the hold-out of client {names[client] if names else client}"] = len(held_out)
    for examples, size in sizes.items():
        if size % CHUNK == 1:
            raise UserError(
                f"{examples} has {size} examples and is scored {CHUNK} at a time, so that the last one is alone, which "
                f"the model cannot take in evaluation mode: leave one out"
            )


def try_the_largest_inputs(module: nn.Module, dataset: Dataset, scaling: Scaling) -> None:
    """UserError where an Embedding has no row for a token id, which the first examples need not have.

    On the CPU, where that is an error one can recover from.
    """
    chosen = []
    for x in (dataset.x_train, dataset.x_test):
        chosen += [x[int(x.flatten(1).amin(1).argmin())], x[int(x.flatten(1).amax(1).argmax())]]
    extremes, cpu = torch.stack(chosen).cpu(), torch.device("cpu")
    try:
        with torch.no_grad():
            copy.deepcopy(module).to(cpu).eval()(scaling.to(cpu)(extremes))
    except IndexError as error:
        raise UserError(
            f"{type(module).__name__} cannot take all examples: {error}; the inputs lie between {extremes.min():g} and "
            f"{extremes.max():g}, and token ids must be less than the size of their Embedding"
        ) from error
    except Exception:
        return  # a module made for another device, for instance: it is tried where it trains
