"""Trackers: what each has recorded is what the run has, runs are not changed by them, and a failure ends no run."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedgg import Experiment, Observer, Run, TensorBoardTracker, Tracker, compare, run
from fedgg.errors import UserError
from fedgg.lab.trackers import TRACKERS, trackers
from fedgg.runfolder.tensorboard_events import scalars_of

SMALL = Experiment(
    name="FedGG, small",
    rounds=3,
    split={"clients": 3},
    model={"name": "linear"},
    data={"holdout": 0.2},
    local={"epochs": 1},
)


def installed(package: str) -> Any:
    reason = f"{package} is not installed: pip install 'fedgg[{package}]'"
    pytest.importorskip(package, reason=reason)
    return importlib.import_module(package)


def expected(finished: Run) -> dict[int, dict[str, float]]:
    lines = {line["round"]: scalars_of(line) for line in finished.rounds}
    first = lines[1]
    assert {"test_accuracy", "test_loss", "holdout_accuracy", "train_loss", "bytes_up", "seconds/train"} <= first.keys()
    return lines


class Recorder(Tracker):
    """A tracker that keeps what it is given, and fails where it should."""

    name = "recorder"

    def __init__(self, fails_in: str = "", **settings: Any):
        self.fails_in = fails_in
        self.calls: list[tuple[Any, ...]] = []
        super().__init__(**settings)

    def _note(self, method: str, *content: Any) -> None:
        if method == self.fails_in:
            raise OSError("no space\nleft")
        self.calls.append((method, *content))

    def check(self) -> None:
        pass

    def open(self, run: str, experiment: Experiment, rounds_done: int) -> Any:
        self._note("open", run, experiment.rounds, rounds_done)
        return run

    def log(self, tracked: Any, step: int, values: dict[str, float]) -> None:
        self._note("log", tracked, step, values)

    def end(self, tracked: Any, status: str, summary: dict[str, float]) -> None:
        self._note("end", tracked, status, summary["rounds_done"] if summary else None)


def test_a_tracker_that_keeps_what_it_opens_to_itself_and_has_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(Tracker):
        def check(self) -> None:
            pass

        def open(self, run: str, experiment: Experiment, rounds_done: int) -> None:
            print("open", rounds_done)

        def log(self, tracked: Any, step: int, values: dict[str, float]) -> None:
            print("log", tracked, step)

        def end(self, tracked: Any, status: str, summary: dict[str, float]) -> None:
            raise OSError("no space")

    with pytest.warns(UserWarning, match=r"Prints failed and tracks no more.*no space"):
        run(SMALL.changed({"rounds": 2}), observer=Prints())
    assert capsys.readouterr().out.splitlines() == ["open 0", "log None 1", "log None 2"]


@pytest.mark.parametrize("method", ["open", "log", "end"])
def test_a_failing_tracker_warns_once_and_the_run_has_the_same_bits(method: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker = Recorder(method, warn=warnings.append)
    run(SMALL, out=tmp_path / "tracked", observer=[tracker])
    run(SMALL, out=tmp_path / "plain")
    message = "recorder failed and tracks no more, the run continues: OSError: no space left"
    assert warnings == [message]
    assert tracker.has_failed
    for name in ("model.safetensors", "partition.json", "config.toml"):
        assert (tmp_path / "tracked" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_from_python_the_warning_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="recorder failed and tracks no more") as caught:
        run(SMALL, observer=[Recorder("log")])
    assert len(caught) == 1


def test_every_run_of_a_comparison_is_tracked() -> None:
    tracker = Recorder()
    compare({"a": {"local.lr": 0.1}, "b": {"local.lr": 0.2}}, SMALL, observer=[Observer(), tracker])
    labels = ["a, seed 0", "b, seed 0"]
    for label in labels:
        own = [call for call in tracker.calls if call[1] == label]
        assert [call[0] for call in own] == ["open", "log", "log", "log", "end"]
        assert own[0][2:] == (3, 0)
        assert [call[2] for call in own[1:-1]] == [1, 2, 3]
        assert own[-1][2:] == ("finished", 3.0)


def test_a_run_that_is_interrupted_is_ended_as_unfinished(tmp_path: Path) -> None:
    class Interrupt(Observer):
        def on_round(self, run: str, record: dict[str, Any]) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

    tracker = Recorder()
    with pytest.raises(KeyboardInterrupt):
        run(SMALL, out=tmp_path / "run", observer=[tracker, Interrupt()])
    tracker.close()
    assert tracker.calls[-1] == ("end", "FedGG, small", "unfinished", None)
    again = Recorder()
    run(SMALL, out=tmp_path / "run", observer=[again])
    assert again.calls[0] == ("open", "FedGG, small", 3, 2)
    assert [call[2] for call in again.calls if call[0] == "log"] == [3]


def test_trackers_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown tracker 'wandbb': did you mean 'wandb'"):
        trackers(["wandbb"], tmp_path)
    for package in TRACKERS:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=rf"pip install 'fedgg\[{package}\]'"):
            trackers([package], tmp_path)


def events_in(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: values by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    return {tag: {event.step: event.value for event in shown.Scalars(tag)} for tag in shown.Tags()["scalars"]}


def test_tensorboard_has_a_round_while_the_run_is_going_on(tmp_path: Path) -> None:
    installed("tensorboard")
    place, seen = tmp_path / "events" / "FedGG-small", list[list[int]]()

    class Reader(Observer):
        def on_round(self, run: str, record: dict[str, Any]) -> None:
            seen.append(list(events_in(place)["test_loss"]))

    finished = run(SMALL, observer=[TensorBoardTracker(tmp_path / "events"), Reader()])
    assert seen == [[1], [1, 2], [1, 2, 3]]
    shown = events_in(place)
    for step, values in expected(finished).items():
        assert {tag: shown[tag][step] for tag in values} == pytest.approx(values, rel=1e-6)


def test_tensorboard_shows_rounds_that_are_trained_again_once(tmp_path: Path) -> None:
    installed("tensorboard")
    tracker = TensorBoardTracker(tmp_path)
    for rounds_done, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        tracker.on_experiment("a", SMALL)
        tracker.on_start("a", rounds_done, 4)
        for step in steps:
            tracker.on_round("a", {"round": step, "test_loss": 10.0 * rounds_done + step})
        tracker.close()
    assert events_in(tmp_path / "a")["test_loss"] == {1: 1.0, 2: 12.0, 3: 13.0, 4: 14.0}


def records_in(file: Path) -> Iterator[bytes]:
    """The records of a file of W&B: those of a LevelDB log (blocks of 32 KiB; checksum, length, type) after 7 bytes."""
    content, at, record = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of several
            yield record
            record = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    from wandb.proto.wandb_internal_pb2 import Record

    tracker = trackers(["wandb"], tmp_path / "run")[0]
    finished = run(SMALL, out=tmp_path / "run", observer=[tracker])
    assert not tracker.has_failed
    [file] = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    history, config, summary = dict[int, dict[str, Any]](), dict[str, Any](), dict[str, Any]()
    for content in records_in(file):
        record = Record()
        record.ParseFromString(content)
        for items, place in (
            (record.history.item, history.setdefault(record.history.step.num, {})),
            (record.run.config.update, config),
            (record.summary.update, summary),
        ):
            place |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
    for step, values in expected(finished).items():
        assert {key: history[step][key] for key in values} == pytest.approx(values)
    assert config["rounds"] == 3
    assert config["model.name"] == "linear"
    assert summary["status"] == "finished"
    assert summary["final_test_accuracy"] == finished.summary["final_test_accuracy"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of packages that MLflow uses
def test_mlflow_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = installed("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    tracker = trackers(["mlflow"], tmp_path)[0]
    finished = run(SMALL, observer=[tracker])
    run(SMALL, observer=[tracker])  # in the same experiment
    assert not tracker.has_failed
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    _, tracked = client.search_runs([experiment.experiment_id])  # newest first
    assert tracked.info.status == "FINISHED"
    assert tracked.info.run_name == "FedGG, small"
    assert tracked.data.params["model.name"] == "linear"
    assert tracked.data.params["rounds"] == "3"
    assert tracked.data.tags["fedgg.status"] == "finished"
    assert tracked.data.metrics["summary/final_test_accuracy"] == finished.summary["final_test_accuracy"]
    for step, values in expected(finished).items():
        for key, value in values.items():
            points = {point.step: point.value for point in client.get_metric_history(tracked.info.run_id, key)}
            assert points[step] == pytest.approx(value)
