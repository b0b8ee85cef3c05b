"""Which engine trains what: `auto` by size and by what the model does, everybody else as asked where that works."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Callbacks
from torch import nn

from fedgg.analysis.run_environment import conditions
from fedgg.core.model import Net
from fedgg.core.random_choices import Work
from fedgg.errors import UserError
from fedgg.lab import parallel_runs
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic, choose
from fedgg.lab.observer import Observer
from fedgg.lab.run_processes import Job
from fedgg.lab.runner import run
from fedgg.lab.study import Study, run_study
from fedgg.models.paper_models import cnn, mlp, vgg16
from fedgg.runfolder.read import read_run

IMAGE = (3, 32, 32)
WORK = Work(epochs=1, batch=64)


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3072), nn.Linear(3072, 10))


def with_noise() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(3600, 10))


def recurrent() -> nn.Module:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.LSTM(32, 8, batch_first=True), nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.outer(self.inner(x.flatten(1, 2))[0][:, -1])
            return outputs

    return Reader()


def examined(module: nn.Module) -> Net:
    net = Net(module)
    net.examine(torch.randn(2, *IMAGE), 10)
    return net


@pytest.mark.parametrize(
    ("module", "engine", "word"),
    [
        (lambda: cnn(IMAGE, 10), "stacked", "small model"),
        (lambda: mlp(IMAGE, 10), "stacked", "small model"),
        (lambda: vgg16(IMAGE, 10), "streams", "large model"),
        (with_statistics, "streams", "batch statistics"),
        (recurrent, "streams", "no rule"),
        (with_noise, "fused", "random numbers"),
    ],
)
def test_auto_on_a_gpu(module: Callable[[], nn.Module], engine: str, word: str) -> None:
    choice = choose(Experiment(engine={"device": "cuda"}), examined(module()), WORK, [50_000])
    assert choice.name == engine
    assert choice.notice is not None
    assert word in choice.notice


def test_auto_on_a_cpu_starts_processes_for_long_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    net = examined(cnn(IMAGE, 10))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert choose(Experiment(rounds=100), net, WORK, [250_000]).name == "workers"
    assert choose(Experiment(rounds=1), net, WORK, [1_000]).name == "fused"
    assert choose(Experiment(rounds=100, engine={"threads": 4}), net, WORK, [250_000]).name == "fused"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert choose(Experiment(rounds=100), net, WORK, [250_000]).name == "fused"


def test_a_study_under_auto_keeps_the_threads_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have one thread each: with fewer runs than cores they are taken where that is what was asked for."""
    taken: list[str] = []
    for way in ("run_jobs", "run_interleaved"):

        def taken_by(jobs: list[Job], processes: int, observer: object, way: str = way) -> list[Job]:
            taken.append(way)
            return []

        monkeypatch.setattr(parallel_runs, way, taken_by)
    for threads in (1, 2):
        jobs = [Job(name, Experiment(engine={"threads": threads}), Path(name), None) for name in "ab"]
        parallel_runs.run_all(jobs, 3, Observer())
    assert taken == ["run_interleaved", "run_jobs"]


def test_threads_have_no_effect_under_workers_and_that_is_said() -> None:
    experiment = Experiment(engine={"name": "workers", "threads": 3})
    assert any(notice.startswith("engine.threads = 3 has no effect") for notice in build(experiment).notices)
    with arithmetic(experiment):
        assert torch.get_num_threads() == 1


def test_what_was_named_and_cannot_be_is_said() -> None:
    stacked = Experiment(engine={"device": "cuda", "name": "stacked"})
    for module, instead in ((with_statistics, "streams"), (with_noise, "fused")):
        choice = choose(stacked, examined(module()), WORK, [1])
        assert choice.name == instead
        assert choice.notice is not None
        assert "cannot be stacked" in choice.notice
    assert choose(stacked, examined(cnn(IMAGE, 10)), WORK, [1]).notice is None


@pytest.mark.parametrize("engine", [{"precision": "bf16"}, {"precision": "tf32"}, {"name": "streams"}])
def test_what_needs_a_gpu_says_so(engine: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"^engine[ .].*needs a GPU: set engine.device = 'cuda'"):
        Experiment(engine=engine)


def test_on_a_cpu_the_engines_with_the_same_bits_are_one_experiment() -> None:
    names = ("auto", "fused", "workers")
    assert len({Experiment(engine={"name": name}).hash() for name in names}) == 1
    assert len({Experiment(engine={"name": name}).trajectory() for name in names}) == 1
    apart = {Experiment(engine={"name": name}).hash() for name in ("auto", "loop", "stacked")}
    assert len(apart) == 3
    named = ("loop", "fused", "stacked", "streams")
    assert len({Experiment(engine={"name": name, "device": "cuda"}).hash() for name in named}) == 4


def test_auto_says_on_a_cpu_too_what_it_chose_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    net = examined(cnn(IMAGE, 10))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    cases = {
        "engine: workers (2 cores, and a longer run)": (Experiment(), 250_000),
        "engine: fused (a short run: processes would save little)": (Experiment(rounds=1), 1_000),
        "engine: fused (engine.threads = 4 in one process)": (Experiment(engine={"threads": 4}), 250_000),
    }
    for notice, (experiment, examples) in cases.items():
        choice = choose(experiment, net, WORK, [examples])
        assert choice.notice == notice
        assert choice.reason in notice
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert choose(Experiment(), net, WORK, [250_000]).notice == "engine: fused (one core)"
    named = choose(Experiment(engine={"name": "loop"}), net, WORK, [250_000])
    assert (named.notice, named.reason) == (None, "named in the experiment")


def test_the_run_folder_says_who_trained_it(tmp_path: Path) -> None:
    """A run alone, and runs of a study, where the study chooses for `auto`."""
    settings: dict[str, Any] = {"rounds": 1, "split": {"clients": 3}, "model": {"name": "linear"}}
    said: list[str] = []
    run(Experiment(**settings), out=tmp_path / "one", observer=Callbacks(notice=said.append))
    (line,) = [sentence for sentence in said if sentence.startswith("engine: ")]
    told = json.loads((tmp_path / "one" / "versions.json").read_text())["engine"]
    assert (told["name"], told["precision"]) == ("fused", "fp32")
    assert line == f"engine: fused ({told['reason']})"

    study = Study(Experiment(**settings), {"a": {"algorithm.name": "fedavg"}, "b": {}, "c": {}}, (0,), "a")
    heard: list[str] = []

    run_study(study, tmp_path / "many", processes=1, observer=Callbacks(notice=heard.append))
    assert heard.count("engine: fused (3 runs of a study, one after another)") == 3
    told = json.loads((tmp_path / "many" / "b" / "seed-0" / "versions.json").read_text())["engine"]
    assert told["reason"] == "3 runs of a study, one after another"
    record = read_run(tmp_path / "one")
    assert "engine fused" in conditions([record])[0]
    assert "engine" not in conditions([replace(record, versions={})])[0]  # of a folder that did not record it
