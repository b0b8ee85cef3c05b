"""Early stopping: the same round as a transcription finds, also after a kill; and settings that cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observers import Callbacks
from torch import Tensor

from fedgg import Experiment, run, trust
from fedgg.core.metrics import METRICS
from fedgg.errors import UserError
from fedgg.lab.round_record import early_stop
from fedgg.runfolder.read import read_run

METRICS_OF_RUN = (METRICS["accuracy"]("accuracy"),)
SMALL: dict[str, Any] = {
    "rounds": 12,
    "data": {"holdout": 0.2},
    "split": {"clients": 4, "beta": 0.3},
    "model": {"name": "linear"},
    "local": {"epochs": 1, "lr": 0.3},
}


def records(scores: list[float | None], metric: str, every: int = 1) -> list[dict[str, Any]]:
    return [
        {"round": number} | ({metric: scores[number // every - 1]} if number % every == 0 else {})
        for number in range(1, every * len(scores) + 1)
    ]


@settings(max_examples=150, deadline=None)
@given(
    scores=st.lists(st.one_of(st.none(), st.integers(0, 8).map(lambda n: n / 8)), min_size=1, max_size=20),
    patience=st.integers(1, 5),
    min_delta=st.sampled_from([0.0, 0.125, 0.3]),
    metric=st.sampled_from(["test_accuracy", "test_loss"]),
    every=st.integers(1, 3),
)
def test_patience_as_keras_counts_it(
    scores: list[float | None], patience: int, min_delta: float, metric: str, every: int
) -> None:
    """A counter that an improvement by more than min_delta over the best sets back to zero."""
    sign = 1 if metric == "test_accuracy" else -1
    best: float | None = None
    wait, expected = 0, None
    for number, score in enumerate(scores, start=1):
        wait += 1
        if score is not None and (best is None or sign * score - min_delta > sign * best):
            best, wait = score, 0
        if wait >= patience:
            expected = number * every
            break
    experiment = Experiment(
        rounds=1000,
        server={"evaluate_every": every},
        stop={"metric": metric, "patience": patience, "min_delta": min_delta},
    )
    lines = records(scores, metric, every)
    first = next(
        (n for n in range(1, len(lines) + 1) if early_stop(experiment, METRICS_OF_RUN, lines[:n]) is not None), None
    )
    assert first == expected


def test_targets_in_both_directions() -> None:
    def stops(metric: str, target: float, scores: list[float | None]) -> str | None:
        return early_stop(
            Experiment(stop={"metric": metric, "target": target}), METRICS_OF_RUN, records(scores, metric)
        )

    assert stops("test_accuracy", 0.8, [0.5, 0.79, None]) is None
    reason = "test_accuracy 0.8 after round 3 has reached stop.target = 0.8"
    assert stops("test_accuracy", 0.8, [0.5, 0.79, 0.8, 0.7]) == reason
    assert stops("test_loss", 0.5, [0.9, 0.6, None]) is None
    assert stops("test_loss", 0.5, [0.9, 0.4]) == "test_loss 0.4 after round 2 has reached stop.target = 0.5"


def test_an_evaluation_at_the_end_of_a_shorter_run_does_not_count() -> None:
    """Round 5 was evaluated because a run of five rounds ended there; a run of more rounds has no score of it."""
    experiment = Experiment(
        rounds=20,
        server={"evaluate_every": 2},
        stop={"metric": "test_accuracy", "patience": 2},
    )
    lines = [{"round": n, "test_accuracy": 0.5} for n in (2, 4, 5)]
    assert early_stop(experiment, METRICS_OF_RUN, lines) is None
    assert early_stop(experiment, METRICS_OF_RUN, [*lines, {"round": 6, "test_accuracy": 0.5}]) is not None


def stopping(metric: str, **stop: Any) -> Experiment:
    return Experiment(**SMALL, stop={"metric": metric, **stop})


@pytest.mark.parametrize("engine", ["loop", "fused", "stacked", "workers"])
def test_a_run_is_the_beginning_of_the_one_without(engine: str, tmp_path: Path) -> None:
    whole = run(Experiment(**SMALL).changed({"engine.name": "loop"}))
    values = [line["holdout_accuracy"] for line in whole.rounds]
    experiment = stopping("holdout_accuracy", target=values[3]).changed({"engine.name": engine, "engine.workers": 1})
    finished = run(experiment, out=tmp_path / "run")
    first = next(n for n, value in enumerate(values, start=1) if value >= values[3])
    assert finished.summary["status"] == "stopped_early"
    assert finished.summary["rounds_done"] == len(finished.rounds) == first
    assert f"after round {first} has reached stop.target" in finished.summary["why"]
    if engine == "loop":
        assert [line["test_loss"] for line in finished.rounds] == [line["test_loss"] for line in whole.rounds[:first]]
    record = read_run(tmp_path / "run")
    assert record.complete
    assert record.status == "stopped_early"
    assert not record.faults


class Killed(BaseException):
    pass


def test_killed_and_resumed_it_stops_after_the_same_round(tmp_path: Path) -> None:
    experiment = stopping("test_loss", patience=1, min_delta=0.05).changed({"server.checkpoint_every": 3})
    straight = run(experiment, out=tmp_path / "straight")
    assert straight.status == "stopped_early"
    assert 2 < straight.summary["rounds_done"] < 12

    def kill_at(number: int) -> Callbacks:
        def stop(record: dict[str, Any]) -> None:
            if record["round"] == number:
                raise Killed

        return Callbacks(round=stop)

    # Also right after the round that decided it, before the summary was written.
    for last in (1, 2, straight.summary["rounds_done"]):
        with pytest.raises(Killed):
            run(experiment, out=tmp_path / "killed", observer=kill_at(last))
    resumed = run(experiment, out=tmp_path / "killed")
    for name in ("model.safetensors", "partition.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    timed = ("seconds",)
    assert {k: v for k, v in resumed.summary.items() if k not in timed} == {
        k: v for k, v in straight.summary.items() if k not in timed
    }
    again = run(experiment, out=tmp_path / "killed")  # an ended run stays as it is
    assert again.summary == resumed.summary


def test_without_the_section_or_with_more_patience_it_continues_to_the_same_bits(tmp_path: Path) -> None:
    experiment = stopping("test_loss", patience=1, min_delta=0.05)
    stopped_after = run(experiment, out=tmp_path / "run").summary["rounds_done"]
    more = experiment.changed({"rounds": 14})
    assert run(more, out=tmp_path / "run").summary["rounds_done"] == stopped_after
    longer = run(more.changed({"stop": None}), out=tmp_path / "run")
    assert longer.status == "finished"
    assert longer.summary["rounds_done"] == 14
    assert "[stop]" not in (tmp_path / "run" / "config.toml").read_text()
    run(Experiment(**SMALL | {"rounds": 14}), out=tmp_path / "plain")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()
    # A section that comes later does not shorten what has been trained.
    assert run(more, out=tmp_path / "plain").status == "finished"


def test_a_stop_in_the_last_round_is_a_whole_run() -> None:
    losses = [line["train_loss"] for line in run(Experiment(**SMALL)).rounds]
    assert min(losses[:-1]) > losses[-1]
    assert run(stopping("train_loss", target=losses[-1])).status == "finished"


def test_a_run_that_stops_early_under_a_privacy_limit_has_not_spent_it() -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    experiment = stopping("test_accuracy", target=0.0).changed({"privacy.noise": 2.0, "privacy.epsilon_limit": 1000.0})
    assert run(experiment).status == "stopped_early"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop.metric": "test_accuracy"}, "stop needs stop.patience or stop.target"),
        ({"stop.metric": "accuracy", "stop.patience": 2}, "did you mean 'test_accuracy'?"),
        ({"stop.metric": "gap", "stop.patience": 2}, "say where it is measured: test_gap, holdout_gap,"),
        ({"stop.patience": 2}, "stop.metric"),
        ({"stop.metric": "test_loss", "stop.patience": 0}, "stop.patience"),
        ({"stop.metric": "test_loss", "stop.patience": 2, "stop.min_delta": -1.0}, "stop.min_delta"),
        (
            {"stop.metric": "holdout_accuracy", "stop.patience": 2},
            "stop.metric = 'holdout_accuracy' needs clients that hold examples out: data.holdout",
        ),
        # Scores that no round would record: the run would end as if they had not improved.
        ({"stop.metric": "train_accuracy", "stop.patience": 2}, "stop.metric = 'train_accuracy': did you mean"),
        ({"stop.metric": "personal_accuracy", "stop.patience": 2}, "needs personal models: [personal]"),
        ({"stop.metric": "unseen_accuracy", "stop.patience": 2}, "needs clients that never train: split.unseen"),
        (
            {"stop.metric": "test_loss", "stop.patience": 2, "personal.method": "fedper", "data.holdout": 0.2},
            "needs a whole global model: stop by personal_ scores",
        ),
        (
            {"stop.metric": "holdout_accuracy", "stop.patience": 2, "personal.method": "local", "data.holdout": 0.2},
            "needs a whole global model: stop by personal_ scores",
        ),
        (
            {"stop.metric": "test_loss", "stop.patience": 2, "server.evaluate_every": 100},
            "server.evaluate_every = 100, so that the only evaluation is at its end (rounds = 100)",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Experiment().changed(changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("metric", ["test_rmse", "holdout_loss", "test_acuracy"])
def test_a_metric_that_the_run_does_not_have_is_refused_before_anything_is_written(tmp_path: Path, metric: str) -> None:
    experiment = Experiment(**SMALL).changed({"stop.metric": metric, "stop.patience": 2, "data.holdout": 0.2})
    with pytest.raises(
        UserError, match=rf"^stop\.metric = '{metric}': did you mean '(test|holdout)_(loss|accuracy)'\?$"
    ):
        run(experiment, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("metric", "changes"),
    [
        ("test_loss", {}),
        ("test_rmse", {"task.name": "regression"}),
        ("holdout_mae", {"task.name": "regression", "data.holdout": 0.2}),
        ("holdout_loss", {"metrics": ["accuracy", "loss"], "data.holdout": 0.2}),
        ("test_accuracy", {"personal.method": "ditto", "data.holdout": 0.2}),
        ("personal_accuracy", {"personal.method": "fedper", "data.holdout": 0.2, "model.name": "mlp"}),
        ("unseen_accuracy", {"split.unseen": 2, "data.holdout": 0.2}),
    ],
)
def test_a_run_may_stop_by_any_score_that_it_records(metric: str, changes: dict[str, Any]) -> None:
    target = {"stop.metric": metric, "stop.target": -1e9 if metric.endswith("accuracy") else 1e9}
    experiment = Experiment(**SMALL).changed({**changes, **target, "split.scheme": "iid"})
    data = None
    if "task.name" in changes:
        x = np.random.default_rng(0).normal(size=(600, 5)).astype(np.float32)
        data = (x, x[:, 0], x[:50], x[:50, 0])
    finished = run(experiment, data=data)
    assert finished.status == "stopped_early"
    assert len(finished.rounds) == 1
    assert metric in finished.rounds[0]


def test_a_metric_of_user_code_is_named_as_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("import fedgg.core.metrics\nclass Half(fedgg.core.metrics.Accuracy):\n    pass\n")
    trust("own.py")
    experiment = Experiment(**SMALL).changed({"metrics": "own.py:Half", "stop.metric": "test_half", "stop.target": 0.0})
    finished = run(experiment)
    assert (finished.status, "test_half" in finished.rounds[0]) == ("stopped_early", True)
    with pytest.raises(UserError, match=r"stop\.metric = 'test_Half': did you mean 'test_half'\?"):
        run(experiment.changed({"stop.metric": "test_Half"}))


def test_a_metric_from_python_can_stop_a_run() -> None:
    def certain(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.softmax(1).amax(1) > 0.5).float()

    finished = run({**SMALL, "stop": {"metric": "test_certain", "target": 0.0}}, metrics=[certain])
    assert (finished.status, len(finished.rounds)) == ("stopped_early", 1)
    assert 0 <= finished.rounds[0]["test_certain"] <= 1


def test_a_target_in_percent_is_refused() -> None:
    with pytest.raises(UserError, match=r"stop\.target = 95: test_accuracy is from 0 to 1, write 0\.95"):
        run(stopping("test_accuracy", target=95.0))
    run(stopping("test_loss", target=95.0))


def test_stop_says_how_far_a_path_is_followed_and_not_which() -> None:
    plain, stop = Experiment(**SMALL), stopping("test_accuracy", patience=3)
    assert stop.trajectory() == plain.trajectory()
    assert stop.hash() != plain.hash()
    assert stop.changed({"stop.metric": "none"}) == plain
    assert json.loads(json.dumps(stop.model_dump(mode="json")))["stop"]["patience"] == 3
