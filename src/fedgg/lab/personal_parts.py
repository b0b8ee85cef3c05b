"""Personal parts and unseen clients: what stays with a client by [personal], and the scores of clients' own models.

Three names everywhere: `test_*` and `holdout_*` are scores of the global model, `personal_*` of each client's own model
on its own held-out examples, `unseen_*` of the model on held-out examples of clients that never train.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm
from fedgg.core.model import Net, head_of
from fedgg.core.personal import PersonalModel, buffers_in, personal_rows, tensors_of, with_personal_part
from fedgg.core.random_choices import Work, stream
from fedgg.core.tensor_rows import Rows
from fedgg.data.batch_preparation import Feed
from fedgg.engines.base import Look, RoundJob
from fedgg.engines.loop import trained_personal_tensors
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.optional_sections import PersonalConfig

if TYPE_CHECKING:
    from fedgg.lab.build import Federation
    from fedgg.lab.federated_data import Holdings
    from fedgg.lab.one_round import State

NORMALISATION = (
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
DITTO_LAMBDA = 0.1


# From [personal] to a model ------------------------------------------------------------------------------------------


def with_personal_parts(experiment: Experiment, algorithm: Algorithm, net: Net, sample: Tensor) -> Net:
    """The net with the experiment's personal part; UserError where the algorithm has no meaning with it."""
    config = experiment.personal
    assert config is not None
    _check_head_epochs(experiment, algorithm)
    if config.method == "ditto":
        return net
    names = _personal_names(config, net, sample)
    title = type(algorithm).__name__
    if algorithm.needs_proxy:
        raise UserError(
            f"{title} measures the global model on the server's examples, and with [personal] the server has no whole "
            f"model: take another algorithm, or personal.method = 'ditto'"
        )
    if algorithm.needs_representation and any(not name.startswith(f"{net.head}.") for name in names):
        raise UserError(
            f"{title} compares representations of the shared model, and {_shown(names)} of the layers before the head "
            f"{net.head!r} are personal: let the head alone be personal, or take another algorithm"
        )
    if not set(net.layout.names) - names and type(algorithm) is not Algorithm and title != "FedAvg":
        raise UserError(
            f"every parameter is personal and nothing travels, so that {title} has nothing to act on: set "
            f"algorithm.name = 'fedavg'"
        )
    return with_personal_part(net, names)


def _check_head_epochs(experiment: Experiment, algorithm: Algorithm) -> None:
    config, local = experiment.personal, experiment.local
    if config is None or config.method != "fedrep":
        return
    for key, value, remedy in (
        ("steps", local.steps, "leave it out and set local.epochs"),
        ("part", local.part if local.part < 1 else None, "set it to 1"),
    ):
        if value is not None:
            raise UserError(
                f"personal.method = 'fedrep' divides the epochs of a round between head and body, which is not defined "
                f"with local.{key} = {value}: {remedy}, or take personal.method = 'fedper'"
            )
    epochs = algorithm.work(Work(local.epochs, local.batch)).epochs
    if epochs < 2:
        raise UserError(
            f"personal.method = 'fedrep' trains the head in some epochs and the body in others, and there are {epochs} "
            f"in a round: set local.epochs = 2 or more"
        )
    if (config.head_epochs or 0) >= epochs:
        raise UserError(
            f"personal.head_epochs = {config.head_epochs} leaves none of {epochs} epochs for the body: take fewer, or "
            f"a larger local.epochs"
        )


def _personal_names(config: PersonalConfig, net: Net, sample: Tensor) -> set[str]:
    """The names of the personal parameters and buffers."""
    module = net.module
    everything = {*net.layout.names, *net.layout.buffers}
    if config.parameters is not None:
        return {name for pattern in config.parameters for name in _matching(pattern, net, everything)}
    if config.method == "local":
        return everything
    if config.method == "fedbn":
        layers = [name for name, part in module.named_modules() if isinstance(part, NORMALISATION)]
        names = {name for name in everything if name.rpartition(".")[0] in layers}
        if not names:
            raise UserError(
                f"personal.method = 'fedbn': {type(module).__name__} has no normalisation layer with parameters or "
                f"statistics; name what stays with clients in personal.parameters, or take another method"
            )
        return names
    head = net.head or head_of(net, sample)
    in_head = {name for name in everything if name.startswith(f"{head}.")}
    return everything - in_head if config.method == "lg_fedavg" else in_head


def _matching(pattern: str, net: Net, everything: set[str]) -> set[str]:
    """The parameters and buffers that match; one that is tied to another by any of its names."""
    other_names = dict(net.layout.tied)
    names = {name for name in everything if fnmatchcase(name, pattern)}
    names |= {first for name, first in other_names.items() if fnmatchcase(name, pattern) and first in everything}
    if not names:
        raise UserError(
            f"personal.parameters: {pattern!r} matches no trainable parameter or buffer of "
            f"{type(net.module).__name__}, which has {_shown(net.layout.names)}"
        )
    return names


def _shown(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def personal_settings(experiment: Experiment, work: Work) -> dict[str, Any]:
    """What [personal] says of a round, as arguments of a `RoundJob`."""
    config = experiment.personal
    if config is None:
        return {}
    if config.method == "ditto":
        return {"personal_model": PersonalModel(DITTO_LAMBDA if config.ditto_lambda is None else config.ditto_lambda)}
    if config.method != "fedrep":
        return {}
    return {"personal_epochs": work.epochs - 1 if config.head_epochs is None else config.head_epochs}


# Unseen clients ------------------------------------------------------------------------------------------------------


def unseen_clients(experiment: Experiment, data: Feed | Holdings) -> list[int]:
    """The clients that never train, drawn from those that hold examples out; none without `split.unseen`."""
    if not experiment.split.unseen:
        return []
    both = zip(data.clients, data.held_out, strict=True)
    able = [client for client, (examples, held_out) in enumerate(both) if len(examples) and len(held_out)]
    count = experiment.split.unseen
    if count >= len(able):
        raise UserError(
            f"split.unseen = {count}: {len(able)} of {len(data.clients)} clients hold examples to train and to test "
            f"on, and some must train; take fewer"
        )
    return sorted(stream(experiment.seed, "unseen").choice(able, count, replace=False).tolist())


# Scores --------------------------------------------------------------------------------------------------------------


def personal_looks(federation: Federation, job: RoundJob, state: State) -> list[Look]:
    """The clients' own models after a round, and the model of unseen clients, each on its client's hold-out."""
    looks = list[Look]()
    if federation.experiment.personal is not None:
        looks += [_personal_look(federation, state, client) for client in federation.tested]
    return looks + [_unseen_look(federation, job, state, client) for client in federation.unseen]


def _personal_look(federation: Federation, state: State, client: int) -> Look:
    if federation.origin.keeper == "nodes":  # which have the personal part
        return Look(federation.net, federation.feed, state.server.w, state.server.buffers, client, "personal")
    buffers = state.kept_buffers.get(client, state.server.buffers)
    w, buffers = personal_model(federation.net, state.server.w, buffers, state.memory.get(client, {}))
    return Look(federation.net, federation.feed, w, buffers, client, "personal")


def personal_model(net: Net, w: Tensor, buffers: Rows, memory: Rows) -> tuple[Tensor, Rows]:
    """A client's own model: the server's row and buffers with its personal part, or the whole one that it keeps."""
    if net.personal is not None:
        return w, buffers | tensors_of(net, memory)
    _, personal = personal_rows(memory)
    initial = {name: net.start_buffers[name] for name in net.moving}
    return personal.get("w", net.start), buffers | initial | buffers_in(personal)


def _unseen_look(federation: Federation, job: RoundJob, state: State, client: int) -> Look:
    net, server = federation.net, state.server
    look = Look(net, federation.feed, server.w, server.buffers, client, "unseen")
    epochs = unseen_epochs(federation.experiment)
    if net.personal is None or epochs == 0:
        return look
    adapting = unseen_job(job, epochs, client, server.w, server.buffers)
    return replace(look, train_personal=partial(trained_personal_tensors, adapting, client))


def unseen_epochs(experiment: Experiment) -> int:
    config = experiment.personal
    return 1 if config is None or config.unseen_epochs is None else config.unseen_epochs


def unseen_job(job: RoundJob, epochs: int, client: int, w: Tensor, buffers: Rows) -> RoundJob:
    """The training of an unseen client's personal part from its initial values, the shared part as it is."""
    return replace(
        job,
        algorithm=Algorithm(),
        work=replace(job.work, epochs=epochs, fixed_steps=None, part=1.0),
        personal_epochs=epochs,
        cohort=[client],
        w=w,
        buffers=buffers,
        down={},
        memory={},
        kept_buffers={},
    )
