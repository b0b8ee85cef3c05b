"""Experiment trackers: rounds and summaries of runs in progress, sent to TensorBoard, Weights & Biases or MLflow.

A tracker is an observer. Where it fails it warns once and tracks no more: the run and its folder do not depend on it.
Projects, servers and offline modes are set as the trackers' own documentation says, by environment variables.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedgg.errors import UserError, missing_extra
from fedgg.lab.name_resolution import part_named
from fedgg.lab.observer import Observer, Observers
from fedgg.registry import Registry
from fedgg.runfolder.record_types import flat
from fedgg.runfolder.tensorboard_events import event_classes, safe_name, scalars_of
from fedgg.runfolder.validation import is_number

if TYPE_CHECKING:
    from fedgg.lab.config import Experiment

PROJECT = "fedgg"
UNNAMED = "run"  # of an experiment without a name


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


class Tracker(Observer):
    """Interface: one tracked run for each run, with the round as the step.

    `folder` is for what the tracker writes on this machine, where it writes anything. `warn` is called at most once.
    """

    name: ClassVar[str]
    subfolder: ClassVar[str] = ""  # of a run's folder, for `--track`

    def __init__(self, folder: str | os.PathLike[str] = ".", warn: Callable[[str], None] = _warn):
        self.folder, self.warn = Path(folder), warn
        self.has_failed = False
        self._experiments: dict[str, Experiment] = {}
        self._runs: dict[str, Any] = {}
        try:
            self.check()
        except ImportError as error:
            raise missing_extra(error) or error from error
        atexit.register(self.close)

    @abstractmethod
    def check(self) -> None:
        """Import the package, before anything is trained."""

    @abstractmethod
    def open(self, run: str, experiment: Experiment, rounds_done: int) -> Any:
        """Start a tracked run; what is returned is passed to the other methods."""

    @abstractmethod
    def log(self, tracked: Any, step: int, values: dict[str, float]) -> None:
        """Record the numbers of one round; `step` is the round, from 1."""

    @abstractmethod
    def end(self, tracked: Any, status: str, summary: dict[str, float]) -> None:
        """`status`: that of the summary, or "unfinished" where the run was interrupted."""

    def close(self) -> None:
        """End the tracking of runs that have not ended."""
        while self._runs:
            _, tracked = self._runs.popitem()
            self._try(self.end, tracked, "unfinished", {})

    def _try(self, action: Callable[..., Any], *arguments: Any) -> Any:
        if self.has_failed:
            return None
        try:
            return action(*arguments)
        except Exception as error:  # of a network, a full disk, or the tracker's own
            self.has_failed = True
            reason = " ".join(str(error).split())[:300]
            name = getattr(self, "name", type(self).__name__)
            self.warn(f"{name} failed and tracks no more, the run continues: {type(error).__name__}: {reason}")
            return None

    def on_experiment(self, run: str, experiment: Experiment) -> None:
        self._experiments[run] = experiment

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        tracked = self._try(self.open, run or UNNAMED, self._experiments.pop(run), rounds_done)
        if not self.has_failed:
            self._runs[run] = tracked

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        if run in self._runs:
            self._try(self.log, self._runs[run], record["round"], scalars_of(record))

    def on_end(self, run: str, summary: dict[str, Any]) -> None:
        if run in self._runs:
            numbers = {key: float(value) for key, value in summary.items() if is_number(value)}
            self._try(self.end, self._runs.pop(run), str(summary["status"]), numbers)


class TensorBoardTracker(Tracker):
    """Event files that TensorBoard shows while the run is going on: one folder for each run."""

    name = subfolder = "tensorboard"

    def check(self) -> None:
        event_classes("--track tensorboard")

    def open(self, run: str, experiment: Experiment, rounds_done: int) -> Any:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        writer_class, event, _ = event_classes("--track tensorboard")
        writer = writer_class(str(self.folder / safe_name(run)))
        # TensorBoard drops earlier events from this step on: rounds after the last checkpoint are trained again.
        begins = SessionLog(status=SessionLog.START)
        writer.add_event(event(wall_time=time.time(), step=rounds_done + 1, session_log=begins))
        return writer

    def log(self, tracked: Any, step: int, values: dict[str, float]) -> None:
        _, event, summary = event_classes("--track tensorboard")
        scalars = [summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        tracked.add_event(event(wall_time=time.time(), step=step, summary=summary(value=scalars)))
        tracked.flush()  # to be seen at once

    def end(self, tracked: Any, status: str, summary: dict[str, float]) -> None:
        tracked.close()


class WandbTracker(Tracker):
    """Weights & Biases: a run in the project $WANDB_PROJECT, by default fedgg; offline with WANDB_MODE=offline."""

    name = "wandb"

    def check(self) -> None:
        import wandb  # noqa: F401

    def open(self, run: str, experiment: Experiment, rounds_done: int) -> Any:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run,
            group=experiment.trajectory()[:12],  # of the parts of a run that was interrupted and resumed
            dir=str(self.folder),
            config=_settings(experiment) | {"resumed_after_round": rounds_done},
            reinit="create_new",  # runs of a study are tracked side by side
        )

    def log(self, tracked: Any, step: int, values: dict[str, float]) -> None:
        tracked.log(values, step=step)

    def end(self, tracked: Any, status: str, summary: dict[str, float]) -> None:
        tracked.summary.update({"status": status, **summary})
        tracked.finish(exit_code=0 if status not in ("diverged", "unfinished") else 1)


class MLflowTracker(Tracker):
    """MLflow: a run in the experiment $MLFLOW_EXPERIMENT_NAME, by default fedgg, at $MLFLOW_TRACKING_URI."""

    name = "mlflow"

    def check(self) -> None:
        import mlflow  # noqa: F401

    def open(self, run: str, experiment: Experiment, rounds_done: int) -> Any:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient()
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = client.get_experiment_by_name(project)
        number = client.create_experiment(project) if known is None else known.experiment_id
        tracked = client.create_run(number, run_name=run, tags={"fedgg.trajectory": experiment.trajectory()[:12]})
        settings = _settings(experiment) | {"resumed_after_round": rounds_done}
        parameters = [Param(key, str(value)) for key, value in settings.items() if str(value)]
        client.log_batch(tracked.info.run_id, params=parameters)
        return client, tracked.info.run_id

    def log(self, tracked: Any, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        client, number = tracked
        now = int(1000 * time.time())
        client.log_batch(number, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    def end(self, tracked: Any, status: str, summary: dict[str, float]) -> None:
        client, number = tracked
        for key, value in summary.items():
            client.log_metric(number, f"summary/{key}", value)
        client.set_tag(number, "fedgg.status", status)
        states = {"diverged": "FAILED", "unfinished": "KILLED"}
        client.set_terminated(number, states.get(status, "FINISHED"))


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker", {"tensorboard": TensorBoardTracker, "wandb": WandbTracker, "mlflow": MLflowTracker}, code="CLASS"
)


def trackers(names: Iterable[str], folder: Path, warn: Callable[[str], None] = _warn) -> list[Tracker]:
    """Trackers by name, which write below the folder of a run or study if they write files."""
    chosen = []
    for name in dict.fromkeys(names):
        kind = part_named(TRACKERS, name)
        if not (isinstance(kind, type) and issubclass(kind, Tracker)):
            raise UserError(f"--track {name}: it must be a class that extends fedgg.Tracker")
        chosen.append(kind(folder / kind.subfolder, warn))
    return chosen


@contextmanager
def tracked_by(
    names: Iterable[str], observer: Observer, folder: Path, warn: Callable[[str], None] = _warn
) -> Iterator[Observer]:
    """The observer together with trackers, as `trackers` makes them, which are closed at the end."""
    chosen = trackers(names, folder, warn)
    try:
        yield Observers([observer, *chosen]) if chosen else observer
    finally:
        for tracker in chosen:
            tracker.close()


def _settings(experiment: Experiment) -> dict[str, Any]:
    """The experiment by dotted keys."""
    return flat(experiment.model_dump(mode="json", exclude_none=True))
