"""One run from start, or from where it was killed, to its end."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from fedgg.algorithms import ALGORITHMS
from fedgg.core.algorithm import Algorithm
from fedgg.core.evaluate import Score
from fedgg.core.rows import Rows
from fedgg.engines import Engine, Fused, Loop, RoundJob, Stacked, Streams
from fedgg.engines.base import Look, Scorer, score_here
from fedgg.errors import UserError
from fedgg.lab.arithmetic import DTYPES, arithmetic
from fedgg.lab.build import DataGiven, Federation, ModelGiven, build, under_fused, with_given_clients
from fedgg.lab.code import structure_of
from fedgg.lab.config import Experiment
from fedgg.lab.losses import NamedOnce, by_reason, client_name
from fedgg.lab.moving import moved
from fedgg.lab.parts import build_model, given_algorithm, load_weights, read_tensors
from fedgg.lab.players import hired, play_alone
from fedgg.lab.predictions import Inputs, Output, RawInputModel, predict
from fedgg.lab.rehearsal import rehearse
from fedgg.lab.shelf import RowsOnDisk
from fedgg.lab.state import (
    Closed,
    Diverged,
    Ends,
    State,
    begin,
    close_before_looking,
    close_without_offender,
    next_job,
    record_of,
    train,
)
from fedgg.lab.store import Store, described_engine
from fedgg.lab.summary import summary_of
from fedgg.wrappers.budget import OLD_ACCOUNTANT


@dataclass(frozen=True)
class Watcher:
    """Who wants to know: of rounds and clients done (so many, of so many), each round's record, and notices."""

    started: Callable[[int, int], None] = field(default=lambda done, of: None)
    client: Callable[[int, int], None] = field(default=lambda done, of: None)
    round: Callable[[dict[str, Any]], None] = field(default=lambda record: None)
    notice: Callable[[str], None] = field(default=lambda sentence: None)


@dataclass(frozen=True)
class Run:
    """A finished run: its history, its weights, and the model they make."""

    experiment: Experiment
    folder: Path | None
    rounds: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any]
    weights: Rows = field(repr=False)  # the final model under the module's own names, for inputs scaled as in the run
    inputs: Inputs = field(repr=False)  # the shape of an example, its scaling, the classes
    _module: Callable[[], nn.Module] = field(repr=False)  # a new copy of the trained module

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: ModelGiven | None = None) -> Run:
        """A finished run from its folder.

        `model` is needed for `model()` and `predict()` of a run that was given a module from Python: the same module,
        or what makes it. Models that the experiment names are built from their names.
        """
        store = Store(Path(folder))
        if (store.folder / "study.json").exists():
            first = next((path.parent for path in sorted(store.folder.glob("*/seed-*/config.toml"))), None)
            example = f": load one of its runs, for instance {first}" if first else ""
            raise UserError(f"{store.folder} holds a comparison{example}")
        experiment, summary = store.experiment(), store.summary()
        if summary is None:
            raise UserError(f"the run in {store.folder} is not finished: go on with fedgg resume {store.folder}")
        inputs = store.inputs(DTYPES[experiment.engine.precision])
        store.check_final("model.safetensors")
        weights = read_tensors(store.folder / "model.safetensors")
        rebuild = partial(_rebuilt, store, experiment, inputs, weights, model)
        return cls(experiment, store.folder, store.finished_rounds(), summary, weights, inputs, rebuild)

    def model(self) -> nn.Module:
        """The trained model, a new copy in evaluation mode on the CPU, which takes inputs as the data had them.

        Their scaling (`data.normalise`) is inside, as the buffers `shift` and `scale`; `.module` is the bare module.
        """
        return RawInputModel(self._module(), self.inputs).eval()

    def predict(
        self, x: Any, *, output: Output = "labels", chunk: int = 1024, device: str | torch.device = "cpu"
    ) -> NDArray[Any]:
        """The labels of examples as the data had them, in the data's own terms: words where those were words.

        `output` may be "probabilities" or "logits" [N, classes] instead. `chunk` examples are computed at a time.
        """
        return predict(self.model(), self.inputs, x, output, chunk, device)

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def test_accuracy(self) -> list[float]:
        """On the server's test set, at each evaluated round."""
        return [record["test_accuracy"] for record in self.rounds if "test_accuracy" in record]


def run(
    experiment: Experiment | dict[str, Any] | None = None,
    *,
    model: ModelGiven | None = None,
    data: DataGiven | None = None,
    algorithm: Algorithm | type[Algorithm] | str | None = None,
    out: str | os.PathLike[str] | None = None,
    data_folder: Path | None = None,
    watcher: Watcher | None = None,
) -> Run:
    """Run an experiment, or go on with it if `out` already holds a part of it.

    `model` (a module, or anything that makes one), `data` (x_train, y_train, x_test, y_test) and `algorithm` take the
    place of those the experiment names. A fifth array in `data` names the client that holds each training example, and
    is the split then. Without `out` nothing is written.
    """
    return run_under(
        None,
        experiment,
        model=model,
        data=data,
        algorithm=algorithm,
        out=out,
        data_folder=data_folder,
        watcher=watcher,
    )


def run_under(
    engine_reason: str | None,
    experiment: Experiment | dict[str, Any] | None,
    *,
    model: ModelGiven | None,
    data: DataGiven | None,
    algorithm: Algorithm | type[Algorithm] | str | None,
    out: str | os.PathLike[str] | None,
    data_folder: Path | None,
    watcher: Watcher | None,
) -> Run:
    """The same where a study has chosen the engine that the experiment names, for this reason."""
    if isinstance(experiment, dict):
        experiment = Experiment(**experiment)
    algorithm = given_algorithm(algorithm) if algorithm is not None else None
    experiment = with_names(experiment or Experiment(), model, data, algorithm)
    experiment = with_given_clients(experiment, data, data_folder)
    build_it = partial(
        build,
        experiment,
        model=model,
        data=data,
        algorithm=algorithm,
        data_folder=data_folder,
        engine_reason=engine_reason,
    )
    folder, watcher = Path(out) if out is not None else None, watcher or Watcher()
    with arithmetic(experiment), opened(build_it, experiment, folder, watcher) as session:
        play(session)
        return session.finish()


def play(session: Session) -> None:
    """One run to its end."""
    if session.federation.engine == "workers":
        play_alone(session)
        return
    play_with(session, make_engine(session.federation))


def play_with(session: Session, engine: Engine) -> None:
    """The same under an engine of the caller's."""
    while not session.over:
        job, started = session.next_job(), time.perf_counter()
        ends = train(job, engine, session.watcher.client)
        session.close_round(job, ends, time.perf_counter() - started, engine.score)


def make_engine(federation: Federation) -> Engine:
    """The engine that trains it; `Workers` ends its processes when it is closed."""
    engine = federation.experiment.engine
    match federation.engine:
        case "stacked":
            return Stacked(engine.precision)
        case "streams":
            return Streams()
        case "workers":
            return hired(engine)
        case "fused":
            return Fused()
        case "loop":
            return Loop()


@contextmanager
def opened(
    build_it: Callable[[], Federation], experiment: Experiment, folder: Path | None, watcher: Watcher
) -> Iterator[Session]:
    """A run at its beginning, or where it was left, with its folder locked."""
    store = Store(folder) if folder else None
    with ExitStack() as locks:
        known = store is not None and store.lock_file.exists()
        if store is not None and known:
            locks.enter_context(store.locked())  # before anything is built for a run that another process works on
        if store is not None and store.holds_a_run():
            store.check_format()
        federation = build_it()  # before a new folder: a mistake leaves nothing behind
        if store is not None and store.as_begun(federation.experiment) != federation.experiment:
            federation = under_fused(federation, "the rounds of this folder were trained by the fused step")
        experiment = federation.experiment
        rehearse(federation)
        if store is not None and not known:
            locks.enter_context(store.locked())
        for sentence in federation.notices:
            watcher.notice(sentence)
        state, rounds = _open(store, federation, watcher)
        watcher.started(state.rounds_done, experiment.rounds)
        session = Session(experiment, federation, store, watcher, state, rounds)
        try:
            yield session
        except BaseException:
            session.keep()
            raise
        finally:
            session.close_files()


@dataclass
class Session:
    """A run in progress: the only thing in the library that changes as it goes."""

    experiment: Experiment
    federation: Federation
    store: Store | None
    watcher: Watcher
    state: State
    rounds: list[dict[str, Any]]
    diverged: str | None = None
    closed: Closed | None = None  # a round that has been aggregated but not looked at
    lost: NamedOnce = field(default_factory=NamedOnce)
    saved: int = field(init=False)  # rounds done at the last checkpoint
    whole: bool = field(init=False, default=True)  # whether state and history are of the same round

    def __post_init__(self) -> None:
        self.saved = self.state.rounds_done
        known = self.store.summary() if self.store else None
        if known is not None and known["status"] == "diverged":
            self.diverged = known["why"]  # the same numbers would come again

    @property
    def over(self) -> bool:
        return self.diverged is not None or self.state.rounds_done >= self.federation.last_round

    def next_job(self) -> RoundJob:
        return next_job(self.federation, self.state)

    def close_round(self, job: RoundJob, ends: Ends, seconds: float, score: Scorer = score_here) -> None:
        """Aggregate, look at the new model in this process, write down."""
        looks = self.aggregate(job, ends, seconds)
        if looks is not None:
            self.write_down(score(looks), score=score)

    def aggregate(self, job: RoundJob, ends: Ends, seconds: float) -> tuple[Look, ...] | None:
        """The looks to be taken at the new model; None if the run has left the finite numbers and is over."""
        try:
            self.closed = close_before_looking(self.federation, self.state, job, ends, seconds)
        except Diverged as end:
            self._end(end)
            return None
        return self.closed.looks

    def write_down(self, scores: list[Score], seconds: float | None = None, score: Scorer = score_here) -> None:
        """The round is done: what it was goes into the history, and its state into a checkpoint."""
        assert self.closed is not None
        closed, self.closed = self.closed, None
        try:
            record = record_of(self.federation, closed, scores, seconds)
        except Diverged as end:
            again = close_without_offender(self.federation, self.state, closed, score)
            if again is None:
                self._end(end)
                return
            closed = again[0]
            record = record_of(self.federation, closed, again[1], seconds)
        self.whole = False
        if self.store:
            self.store.check_lock()  # the clients' state may go to a new file
        cohort, clients = closed.job.cohort, len(self.federation.examples)
        folder = self.store.checkpoint_folder if self.store else None
        self.state = moved(closed.state, cohort, clients, self.experiment.server, folder)
        self.rounds.append(record)
        for sentence in self.lost.sentences(record["round"], record["lost"]):
            self.watcher.notice(sentence)
        for note in record.get("notes", ()):
            self.watcher.notice(f"round {record['round']}: client {client_name(note)}: {note['what']}")
        if self.store:
            self.store.append(record)
        self.whole = True
        if self.state.rounds_done % self.experiment.server.checkpoint_every == 0 or self.over:
            self._save()
        self.watcher.round(record)

    def _save(self) -> None:
        if self.store is not None and self.state.rounds_done > self.saved:
            self.store.save(self.state, self.experiment)
            self.saved = self.state.rounds_done

    def keep(self) -> None:
        """Stopped between two checkpoints: what is in the history already need not be played again."""
        if self.whole:
            with suppress(Exception):  # why it was stopped is what people should hear of
                self._save()

    def _end(self, end: Diverged) -> None:
        lost = [{**self.federation.named(gone.client), "why": gone.why} for gone in end.lost]
        names = "; ".join(f"client {', '.join(who)}: {why}" for why, who in by_reason(lost).items())
        self.diverged = f"{end}" + (f" ({names})" if names else "")
        self._save()  # the history up to here stands, and so does its model

    def close_files(self) -> None:
        for rows in (self.state.memory, self.state.kept_buffers):
            if isinstance(rows, RowsOnDisk):
                rows.shelf.file.close()

    def finish(self) -> Run:
        federation = self.federation
        weights, unsaved = _weights(federation, self.state), _unsaved_buffers(federation, self.state)
        summary = summary_of(federation, self.rounds, self.diverged)
        known = self.store.summary() if self.store else None
        if known is not None and self._is_written(summary, unsaved):
            summary = known  # what was recorded stands, epsilon by an older accountant included
        elif self.store:
            self.store.finish(weights, unsaved, summary)
        inputs = Inputs.of(federation.origin, self.experiment.data.normalise, federation.feed.scaling)
        trained = partial(_trained, federation.net.module, weights, unsaved)
        folder = self.store.folder if self.store else None
        return Run(self.experiment, folder, self.rounds, summary, weights, inputs, trained)

    def _is_written(self, summary: dict[str, Any], unsaved: Rows) -> bool:
        """Whether the folder has the end of the run; a summary of fewer rounds is older than the wish for more."""
        assert self.store is not None
        known = self.store.summary()
        if known is None or known["rounds_done"] != summary["rounds_done"]:
            return False
        names = ["model.safetensors", *(["buffers.safetensors"] if unsaved else [])]
        damaged = [damage for name in names if (damage := self.store.damage_of_final(name)) is not None]
        for damage in damaged:
            self.watcher.notice(f"{damage}, and is written again")
        return not damaged


def _open(store: Store | None, federation: Federation, watcher: Watcher) -> tuple[State, list[dict[str, Any]]]:
    if store is None:
        return begin(federation), []
    if not store.holds_a_run():
        store.create(federation)
        return begin(federation), []
    changed = store.check_same(federation)
    state, refused = store.latest(federation.experiment, federation.net.start.device)
    state = state or begin(federation)
    _refuse_a_broken_limit(federation, state.rounds_done, store.summary())  # before the folder claims it
    changed += store.update(federation.experiment, federation.last_round)
    if federation.origin.keeper == "nodes" and (why := store.forget_divergence()) is not None:
        changed.append(f"the run had diverged ({why}): it is resumed after round {state.rounds_done}")
    rounds = store.cut_history(state.rounds_done)
    notices = [*changed, *refused, *_another_accountant(federation, rounds)]
    for sentence in notices:
        watcher.notice(sentence)
    if store.summary() is None:
        store.note_resume(state.rounds_done, notices, described_engine(federation))
    return state, rounds


def _another_accountant(federation: Federation, rounds: list[dict[str, Any]]) -> list[str]:
    """That epsilon is bounded in another way from now on, where the history has it by an older accountant."""
    budget, done = federation.wrappers.budget, len(rounds)
    if budget is None or not rounds or rounds[-1].get("epsilon") is None or done >= federation.last_round:
        return []
    before, now = rounds[-1].get("accountant", OLD_ACCOUNTANT), budget.accountant(done)
    if before == now:
        return []
    return [
        f"epsilon of rounds 1 to {done} was recorded by the accountant {before!r}, {rounds[-1]['epsilon']:.2f} so far; "
        f"from round {done + 1} on it is that of all rounds by {now!r}, by which those {done} spent "
        f"{budget.epsilon(done):.2f}"
    ]


def _refuse_a_broken_limit(federation: Federation, rounds_done: int, summary: dict[str, Any] | None) -> None:
    budget = federation.wrappers.budget
    if budget is None or budget.limit is None:
        return
    recorded = (summary or {}).get("epsilon")
    if recorded is not None and recorded <= budget.limit and rounds_done >= federation.last_round:
        return  # it has ended within its limit, by the accountant of its time
    if budget.epsilon(rounds_done) > budget.limit:
        raise UserError(
            f"this run has spent epsilon {budget.epsilon(rounds_done):.2f} in {rounds_done} rounds, more than "
            f"privacy.epsilon_limit = {budget.limit:g}: what is spent cannot be taken back; give a larger limit"
        )


def _weights(federation: Federation, state: State) -> Rows:
    """Under the names of the module's own state_dict: tied weights under both, buffers only if they are persistent."""
    net, server = federation.net, state.server
    current = {name: rows[0] for name, rows in (net.layout.unflatten(server.w) | server.buffers).items()}
    named = [*net.module.named_parameters(), *net.module.named_buffers()]
    name_of = {id(tensor): name for name, tensor in named}
    own = net.module.state_dict(keep_vars=True)
    return {name: current.get(name_of.get(id(tensor), ""), tensor.detach()) for name, tensor in own.items()}


def _unsaved_buffers(federation: Federation, state: State) -> Rows:
    """Buffers that the module's state_dict leaves out, where training changed them."""
    net = federation.net
    saved = net.module.state_dict().keys()
    return {
        name: rows[0]
        for name, rows in state.server.buffers.items()
        if name not in saved and not torch.equal(rows, net.start_buffers[name])
    }


def _trained(module: nn.Module, weights: Rows, unsaved: Rows) -> nn.Module:
    """A copy of the module, on the CPU, with these weights."""
    own = copy.deepcopy(module).cpu()
    own.load_state_dict(weights)
    for name, values in unsaved.items():
        own.get_buffer(name).copy_(values)
    return own


def _rebuilt(
    store: Store, experiment: Experiment, inputs: Inputs, weights: Rows, given: ModelGiven | None
) -> nn.Module:
    """The same from a run folder."""
    name, folder = experiment.model.name, store.folder
    if given is None and name.startswith("python:"):
        raise UserError(
            f"{folder} was run with a module from Python ({name.removeprefix('python:')}): "
            f"load it with fedgg.Run.load({str(folder)!r}, model=...)"
        )
    module = build_model(
        given or name, experiment.model.settings, inputs.shape, len(inputs.classes), experiment.seed
    ).to(device="cpu", dtype=inputs.scaling.shift.dtype)
    file = folder / "model.safetensors"
    load_weights(module, weights, file)
    structure, under = store.structure()
    if ":" in name and under == torch.__version__ and structure not in (None, structure_of(module)):
        raise UserError(f"{file} is of a model of other layers: give the one that was trained")
    if (buffers := folder / "buffers.safetensors").exists():
        store.check_final(buffers.name)
        for buffer, values in read_tensors(buffers).items():
            module.get_buffer(buffer).copy_(values)
    return module


def with_names(
    experiment: Experiment, model: ModelGiven | None, data: DataGiven | None, algorithm: Algorithm | None
) -> Experiment:
    """Say in the experiment what was handed in: by its settings where that is possible, else as `python:...`."""
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model.name"] = f"python:{getattr(model, '__qualname__', type(model).__qualname__)}"
    if data is not None:
        changes["data.source"] = "python:arrays"
        changes |= _scheme_given(experiment, data)
    if algorithm is not None:
        names = [name for name, kind in ALGORITHMS.items() if kind is type(algorithm)]
        changes["algorithm.name"] = names[0] if names else f"python:{type(algorithm).__qualname__}"
        changes |= {f"algorithm.{key}": value for key, value in vars(algorithm).items()}
    return experiment.changed(changes)


def _scheme_given(experiment: Experiment, data: DataGiven) -> dict[str, Any]:
    """Clients that were handed in are the split, unless another one is asked for."""
    if not isinstance(data, tuple | list) or len(data) != 5 or data[4] is None:
        return {}
    if "scheme" in experiment.split.model_fields_set and experiment.split.scheme != "given":
        raise UserError(
            f"data names the clients, and split.scheme = {experiment.split.scheme!r}: leave one of them out"
        )
    is_set = "clients" in experiment.split.model_fields_set
    return {"split.scheme": "given"} | ({"split.clients": experiment.split.clients} if is_set else {})
