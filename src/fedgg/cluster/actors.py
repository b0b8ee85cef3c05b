"""The clients of a run spread over Ray actors: the engine `devices` with actors in the place of child processes.

The driver deals out the clients of a round, aggregates, scores and writes the run folder. An actor keeps the data, the
model and the engine of its share, and computes one share at a time. What does not change from round to round goes once
into Ray's object store, and from there once to each node, where actors map the data into their memory. An actor that
dies is replaced; its share is given to the next actor that is free, with the same bits.
"""

from __future__ import annotations

import math
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedgg.child_process import end_with
from fedgg.cluster.connect import (
    OwnNodeDied,
    RayAddress,
    Resources,
    amounts,
    check_can_run,
    check_own_node,
    connected,
    describe,
    shown,
    what_waits,
)
from fedgg.cluster.memory_estimate import CUDA, built, bytes_of_runs, with_memory
from fedgg.cluster.study_on_ray import ANSWER, WAITING, driver_info_of, in_one_line, shown_place, task_options
from fedgg.cluster.task import DriverInfo, check_node, in_folder, place_of_worker
from fedgg.engines.devices import Devices
from fedgg.engines.workers.pool import DEATHS, Abandoned, CannotBeSent, TaskResult, Ticket
from fedgg.engines.workers.process import (
    PackedObject,
    SharedObjects,
    TensorsApart,
    TorchSettings,
    keep_freed_memory,
    pack,
    result_of,
    unpack,
    unpacked,
)
from fedgg.errors import UserError
from fedgg.lab.build import Federation
from fedgg.lab.engine_setup import Choice, arithmetic, build_engine, choose
from fedgg.lab.observer import Observer
from fedgg.lab.run_processes import Job
from fedgg.lab.run_result import Run
from fedgg.lab.run_session import opened
from fedgg.lab.runner import run_rounds_on_devices
from fedgg.lab.trusted_code import inherit

REMEDY = "ask for more with --resources, or set engine.lost_clients = 'leave_out' to drop such clients"


# In the actor ---------------------------------------------------------------------------------------------------------


class ClientActor:
    """Trains shares of a round, in a process of its own on some node."""

    def __init__(self, driver_info: DriverInfo, settings: TorchSettings):
        end_with(os.getppid())  # Ray lets a busy worker outlive its raylet
        self._driver_info, self._settings = driver_info, settings
        self._shared = SharedObjects()
        self._in_folder = ExitStack()

    def begin(self) -> tuple[Mapping[str, str], str | None] | UserError:
        """Where it is, with a notice or none; or why this node cannot take part."""
        warnings.filterwarnings(
            "ignore", message="The given buffer is not writable"
        )  # the library does not write there
        torch.set_num_threads(1)
        keep_freed_memory()
        try:
            self._in_folder.enter_context(in_folder(self._driver_info.working_folder))
            place = place_of_worker()
            notice = check_node(self._driver_info, place)
            inherit(self._driver_info.trusted)
            self._settings.apply()
        except UserError as error:
            return error
        return place, notice

    def share(self, number: int, packed: PackedObject) -> None:
        self._shared[number] = unpacked(packed, self._shared)

    def unshare(self, number: int) -> None:
        self._shared.pop(number, None)

    def do(self, packed: PackedObject) -> tuple[str, PackedObject]:
        kind, result = result_of(packed, self._shared)
        return kind, _for_ray(pack(result, in_file=False))


def _for_ray(packed: PackedObject) -> PackedObject:
    """Ray sends arrays apart from the pickle, and maps them into memory where they arrive."""
    return replace(packed, inline=np.frombuffer(packed.inline, np.uint8))


# In the driver --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Actor:
    place: int  # the share it has in an undisturbed round
    handle: Any
    awaited: Any  # a reference: to the answer of `begin`, or to the result of its task; None: it is idle
    started: float
    where: str = ""  # once it has begun
    ticket: Ticket | None = None
    holds: set[int] = field(default_factory=set)  # numbers of the shared objects it has received


class ActorPool:
    """Tasks done by actors: what `Pool` is for child processes."""

    def __init__(
        self,
        ray: ModuleType,
        text: str,
        count: int,
        options: Mapping[str, Any],
        driver_info: DriverInfo,
        notice: Callable[[str], None],
    ):
        self._ray, self._text, self._count, self._notice = ray, text, count, notice
        self._options, self._driver_info = dict(options), ray.put(driver_info)
        self._packer = _packer_by_value()
        self._actors: dict[int, _Actor] = {}  # by place
        self._queue: list[Ticket] = []
        self._shared: dict[int, tuple[object, Any]] = {}
        self._numbers: dict[int, int] = {}  # of shared objects, by their id
        self._next_number = 0
        self._failed_starts = 0
        self._noticed = set[str]()
        self._own_node_died = False

    def share_all(self, constant: Sequence[object], shared: object) -> tuple[int, ...]:
        """What tasks refer to, as numbers for their tickets; the last of `constant`, the data, is mapped."""
        try:
            return tuple(self._share(part, part is constant[-1]) for part in (*constant, shared))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            raise CannotBeSent(str(error)) from error
        except self._ray.exceptions.RayError as error:
            raise UserError(f"--on {self._text}: {in_one_line(error)}") from error

    def _share(self, value: object, mapped: bool) -> int:
        if id(value) not in self._numbers:
            self._next_number += 1
            packed = pack(value, self._numbers, shared=mapped, in_file=False, packer=self._packer)
            self._shared[self._next_number] = (value, self._ray.put(_for_ray(packed)))
            self._numbers[id(value)] = self._next_number
        return self._numbers[id(value)]

    def unshare(self, value: object) -> None:
        number = self._numbers.pop(id(value))
        del self._shared[number]
        for actor in self._actors.values():
            if number in actor.holds:
                actor.holds.remove(number)
                actor.handle.unshare.remote(number)

    def submit(self, ticket: Ticket) -> None:
        self._queue.append(ticket)

    def next_result(self) -> tuple[Ticket, TaskResult]:
        """The next finished task and its result; an exception in a task is raised here."""
        while True:
            self._start_missing()
            self._assign_tasks()
            awaited = {actor.awaited: actor for actor in self._actors.values() if actor.awaited is not None}
            done, _ = self._ray.wait(list(awaited), timeout=ANSWER)
            if not done:
                self._check_own_node()
            self._say_what_waits()
            for reference in done:
                actor, reference = awaited[reference], None
                try:
                    answer = self._ray.get(actor.awaited)
                except self._ray.exceptions.RayTaskError as error:
                    raise UserError(f"--on {self._text}: {in_one_line(error)}") from error
                except self._ray.exceptions.RayError as error:
                    if (abandoned := self._on_death(actor, error)) is not None:
                        return abandoned
                    continue
                actor.awaited = None
                if actor.ticket is None:
                    self._on_begin(actor, answer)
                    continue
                ticket, actor.ticket = actor.ticket, None
                kind, packed = answer
                result = unpack(packed)
                if kind == "failed":
                    raise result
                return ticket, result

    def _start_missing(self) -> None:
        for place in range(self._count):
            if place not in self._actors:
                settings = TorchSettings.of_this_process()
                handle = self._ray.remote(ClientActor).options(**self._options).remote(self._driver_info, settings)
                self._actors[place] = _Actor(place, handle, handle.begin.remote(), time.monotonic())

    def _on_begin(self, actor: _Actor, answer: tuple[Mapping[str, str], str | None] | UserError) -> None:
        if isinstance(answer, UserError):
            raise UserError(f"--on {self._text}: {answer} (on a node of the cluster)")
        place, notice = answer
        actor.where, self._failed_starts = shown_place(place), 0
        if notice is not None:
            self._notice_once(notice)

    def _assign_tasks(self) -> None:
        """A share goes to the actor of its place; where that has not begun, to any that is idle."""
        for actor in self._actors.values():
            if not actor.where or actor.ticket is not None:
                continue
            suits = [ticket for ticket in self._queue if ticket.place == actor.place]
            suits += [ticket for ticket in self._queue if not self._actors[ticket.place or 0].where]
            if suits:
                self._queue.remove(suits[0])
                self._send_task(actor, suits[0])

    def _send_task(self, actor: _Actor, ticket: Ticket) -> None:
        for number in ticket.needs:
            if number not in actor.holds:
                actor.handle.share.remote(number, self._shared[number][1])
                actor.holds.add(number)
        packed = pack(ticket.task, self._numbers, in_file=False, packer=self._packer)
        actor.ticket, actor.awaited = ticket, actor.handle.do.remote(_for_ray(packed))

    def _on_death(self, actor: _Actor, error: Exception) -> tuple[Ticket, TaskResult] | None:
        """Removes a dead actor; its task returns to the queue or is abandoned."""
        del self._actors[actor.place]
        with suppress(Exception):  # it lives where only the answer was lost with a node
            self._ray.kill(actor.handle)
        ticket, reason = actor.ticket, in_one_line(error).partition(". ")[0]
        if ticket is None:
            self._check_own_node()
            self._failed_starts += 1
            if self._failed_starts >= DEATHS * self._count:
                raise UserError(f"--on {self._text}: the actors of this run cannot start ({reason})")
            return None
        ticket.deaths += 1
        if ticket.deaths >= DEATHS:
            return ticket, Abandoned(f"its actor died {DEATHS} times ({reason})")
        ticket.notice(f"{ticket.task}: its actor on the node {actor.where} has died; another actor repeats it")
        self._queue.append(ticket)
        return None

    def _say_what_waits(self) -> None:
        starting = [actor for actor in self._actors.values() if not actor.where]
        late = [actor for actor in starting if time.monotonic() - actor.started > WAITING]
        if late:
            others = len(self._actors) - len(starting)
            what = what_waits(self._ray, amounts(self._options))
            self._notice_once(
                f"{len(starting)} of {self._count} actors {'have' if len(starting) > 1 else 'has'} not started, {what}"
                f"{'; the others train its clients' if others else ''}"
            )

    def _check_own_node(self) -> None:
        try:
            check_own_node(self._ray, self._text)
        except OwnNodeDied:
            self._own_node_died = True
            raise

    def _notice_once(self, sentence: str) -> None:
        if sentence not in self._noticed:
            self._noticed.add(sentence)
            self._notice(sentence)

    def close(self) -> None:
        """Ends all actors, also in the middle of a share."""
        for actor in self._actors.values():
            if not self._own_node_died:  # they end with their driver then, and Ray would wait
                with suppress(Exception):
                    self._ray.kill(actor.handle)
        self._actors, self._shared, self._numbers, self._queue = {}, {}, {}, []


def _packer_by_value() -> Callable[..., pickle.Pickler]:
    """Classes and functions that no module has, such as those of a notebook, are sent by their code."""
    from ray.cloudpickle import CloudPickler

    class PackerByValue(TensorsApart, CloudPickler):
        def reducer_override(self, value: Any) -> Any:
            made = TensorsApart.reducer_override(self, value)
            others: Callable[..., Any] = super(TensorsApart, self).reducer_override
            return others(value) if made is NotImplemented else made

    return PackerByValue


# A run ----------------------------------------------------------------------------------------------------------------


def run_on_actors(
    job: Job,
    observer: Observer,
    *,
    address: RayAddress,
    actors: int | None = None,
    resources: Resources | None = None,
) -> Run:
    """Run an experiment, or resume it, with the clients of each round spread over Ray actors.

    `actors`: how many; by default one for each device of a list in `engine.device`, else as many as the cluster has
    room for.
    """
    devices = job.experiment.engine.devices
    actors = actors or (len(devices) if len(devices) > 1 else None)
    kind = devices[0].partition(":")[0]
    # The options of a task that has one of the devices to itself.
    alone = job.experiment.changed({"engine.device": kind, "engine.name": "auto"})
    options = task_options(alone, resources or Resources())
    options = {key: value for key, value in options.items() if key != "max_retries"}
    cores = None if actors is None else max(1, math.ceil(actors * options["num_cpus"]))
    with connected(address, cores) as ray:
        notice = partial(observer.on_notice, job.name)
        notice(describe(ray))
        check_can_run(ray, amounts(options), address.text)
        run = _SpreadRun(ray, address.text, job, actors, options, notice)
        with arithmetic(job.experiment), opened(run.build, job.experiment, job.folder, observer, job.name) as session:
            if not session.over:
                driver_info = driver_info_of(Path(), "", [job.experiment])
                pool = ActorPool(ray, address.text, run.count, run.options, driver_info, notice)
                names = ",".join([kind] * run.count)
                engine = build_engine(session.federation.choice, job.experiment.engine, (names, pool))
                assert isinstance(engine, Devices)
                run_rounds_on_devices(session, engine, REMEDY)
            return session.finish()


@dataclass
class _SpreadRun:
    """How many actors a run has, what they ask for, and its federation with the engine of each of them."""

    ray: ModuleType
    text: str
    job: Job
    actors: int | None
    options: dict[str, Any]
    notice: Callable[[str], None]
    count: int = 1

    def build(self) -> Federation:
        job = self.job
        federation = built(job, job.experiment)
        self.count = min(self.actors or self._room(), federation.cohort_size)
        on_gpu = job.experiment.engine.devices[0] != "cpu"
        estimate = bytes_of_runs(federation, share=self.count) + (CUDA if on_gpu else 0)
        self.options = with_memory(self.ray, self.options, estimate, self.notice)
        self.notice(
            f"clients are spread over {self.count} actor{'s' if self.count > 1 else ''}, each asks for "
            f"{shown(amounts(self.options))}"
        )
        self.options |= {"max_restarts": 0, "scheduling_strategy": "SPREAD"}
        choice = self._choice(federation)
        federation.net.channels_last &= choice.name == "streams"
        notices = [notice for notice in federation.notices if notice != federation.choice.notice]
        return replace(federation, choice=choice, notices=(*notices, f"engine: {choice.reason}"))

    def _room(self) -> int:
        """How many actors the nodes have room for now; at least one, which then waits."""
        needs = {name: amount for name, amount in amounts(self.options).items() if name != "memory"}
        if not needs:
            return 1
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        on_nodes = sum(min(int(node.get(name, 0) / amount) for name, amount in needs.items()) for node in nodes)
        free = self.ray.available_resources()
        return max(1, min(on_nodes, *(int(free.get(name, 0) / amount) for name, amount in needs.items())))

    def _choice(self, federation: Federation) -> Choice:
        """The engine that the experiment names, or `auto` would choose, for one device of several."""
        engine = federation.experiment.engine
        on_cpu = engine.devices[0] == "cpu"
        devices = ["cpu"] * max(2, self.count) if on_cpu else [f"cuda:{number}" for number in range(self.count)]
        name = engine.name if engine.name not in ("workers", "devices") else "auto"
        several = federation.experiment.changed({"engine.device": ",".join(devices), "engine.name": name})
        each = choose(several, federation.net, federation.work, federation.examples, of_each=True)
        reason = f"{each.name} in each of {self.count} Ray actors ({each.reason})"
        return Choice(each.name, reason, spread=True)
