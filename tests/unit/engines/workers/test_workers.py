"""Workers have the bits of the engine `fused`, whatever is trained, by however many processes, however started."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observers import Callbacks, Events
from sent_models import Raising, WithALambda, WithDropout, WithStatistics
from step_cases import RULES, named, played_and_recorded, proxy_for
from torch import nn

import fedgg
from fedgg.core.server import Lost
from fedgg.engines import Fused, Workers
from fedgg.engines.workers.engine import cores
from fedgg.engines.workers.pool import StartMethod
from fedgg.engines.workers.tasks import Request, RequestStream
from fedgg.errors import UserError
from fedgg.lab.build import Federation, ModelGiven, build
from fedgg.lab.config import Experiment
from fedgg.lab.federated_data import dataset_of
from fedgg.lab.observer import Observer
from fedgg.lab.one_round import State, begin, close, next_job, train
from fedgg.lab.runner import run
from fedgg.lab.study import Study, run_study


def experiment(**changes: Any) -> Experiment:
    base = Experiment(
        rounds=3,
        split={"clients": 6, "beta": 0.2, "min_examples": 3},
        model={"name": "mlp", "hidden": 12},
        algorithm={"name": "fedavg"},
        local={"epochs": 2, "batch": 16, "lr": 0.05, "weight_decay": 0.001},
    )
    return base.changed(changes)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2, notice=lambda sentence: pytest.fail(sentence)) as engine:
        yield engine


def assert_same(a: State, b: State) -> None:
    assert torch.equal(a.server.w, b.server.w)
    assert a.memory.keys() == b.memory.keys()
    assert a.kept_buffers.keys() == b.kept_buffers.keys()
    pairs = [(a.server.memory, b.server.memory), (a.server.buffers, b.server.buffers)]
    pairs += [(a.memory[client], b.memory[client]) for client in a.memory]
    pairs += [(a.kept_buffers[client], b.kept_buffers[client]) for client in a.kept_buffers]
    for mine, other in pairs:
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def assert_as_fused(chosen: Experiment, workers: Workers, model: ModelGiven | None = None) -> None:
    if model is not None:
        chosen = chosen.changed({"model.name": "python"})  # drops the other model's settings
    federation = build(chosen, model=model)
    fused, records = played_and_recorded(federation, Fused())
    ours, our_records = played_and_recorded(federation, workers)
    assert_same(fused, ours)
    assert records == our_records  # losses, readings, scores: every number of the history


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_workers_have_the_bits_of_the_fused_step(rule: dict[str, Any], workers: Workers) -> None:
    changes = {f"algorithm.{key}": value for key, value in rule.items()} | {"data.proxy": proxy_for(rule)}
    assert_as_fused(experiment(**changes, **{"server.cohort": 3}), workers)


@pytest.mark.parametrize("policy", ["average", "local", "frozen"])
@pytest.mark.parametrize("cohort", [None, 3])
def test_batch_statistics(policy: str, cohort: int | None, workers: Workers) -> None:
    chosen = experiment(**{"model.statistics": policy, "server.cohort": cohort, "data.holdout": 0.2})
    assert_as_fused(chosen.changed({"local.batch": 19}), workers, WithStatistics)  # nobody is left with one example


def test_dropout_and_the_generator_of_the_parent(workers: Workers) -> None:
    before = torch.get_rng_state()
    assert_as_fused(experiment(), workers, WithDropout)
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_holdout_and_decay(workers: Workers) -> None:
    assert_as_fused(experiment(**{"data.augment": "crop_flip", "data.holdout": 0.1, "local.lr_decay": 0.9}), workers)


@pytest.mark.parametrize("start", [m for m in multiprocessing.get_all_start_methods() if m != "forkserver"])
def test_every_way_to_start_a_process(start: StartMethod) -> None:
    """The fork server, where there is one, is what the other tests use."""
    if start == "fork" and torch.cuda.is_initialized():
        pytest.skip("a process in which autograd has used a GPU cannot be forked")
    before = set(multiprocessing.active_children())
    with Workers(2, start=start) as engine:
        assert_as_fused(experiment(**{"algorithm.name": "scaffold"}), engine)
    assert set(multiprocessing.active_children()) <= before


def test_more_processes_than_clients() -> None:
    with Workers(5) as engine:
        assert_as_fused(experiment(**{"split.clients": 2}), engine)
        assert len(multiprocessing.active_children()) <= 2 + 2  # these, and those of the module's own


def test_the_number_of_processes_is_that_of_the_cores() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    assert Workers().size == cores()


# A whole run, a whole study -------------------------------------------------------------------------------------------


def test_a_run_from_python_counts_clients_as_they_come_back(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    chosen = experiment(**{"engine.name": "workers", "engine.workers": 2})
    ours = run(chosen, out=tmp_path / "ours", observer=Callbacks(client=lambda done, of: seen.append((done, of))))
    alone = run(experiment())
    assert seen == [(done, 6) for _ in range(3) for done in range(1, 7)]
    assert ours.test_accuracy == alone.test_accuracy
    assert all(torch.equal(ours.weights[name], alone.weights[name]) for name in alone.weights)


def test_a_study_has_the_folders_of_a_study_by_the_loop(tmp_path: Path) -> None:
    """Experiments of different lengths, models and precisions over one pool; one of them diverges."""
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "scaffold": {"algorithm.name": "scaffold", "server.cohort": 2},
        "wild": {"local.lr": 1e30},
        "exact": {"engine.precision": "fp64", "rounds": 5, "server.evaluate_every": 2},
    }
    told: dict[str, list[Any]] = {"fused": [], "workers": []}
    for engine in told:
        base = experiment(**{"engine.name": engine, "engine.workers": 2})
        study = Study(base, variants, (0, 1), "plain")
        run_study(study, tmp_path / engine, processes=1, observer=_writer(told[engine]))
    for label in variants:
        for seed in (0, 1):
            ours, alone = (tmp_path / engine / label / f"seed-{seed}" for engine in ("workers", "fused"))
            assert (ours / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
            assert history(ours) == history(alone)
    ended = {engine: {n: w["status"] for n, k, w in news if k == "ended"} for engine, news in told.items()}
    assert ended["workers"] == ended["fused"]
    assert ended["workers"]["wild, seed 0"] == "diverged"
    assert any(kind == "client" for _, kind, _ in told["workers"])


def _writer(news: list[Any]) -> Observer:
    return Events(lambda run, kind, what: news.append((run, kind, what)))


def history(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rounds.jsonl"  # absent if the first round diverged
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines]


def test_experiments_really_overlap(workers: Workers) -> None:
    """One closes rounds while the other still waits for its clients: nobody stands in line."""
    order: list[str] = []

    def player(name: str, federation: Federation) -> RequestStream:
        state = begin(federation)
        for _ in range(2):
            job = next_job(federation, state)
            trained = yield Request(job, state.rounds_done)
            state, _ = close(state, job, federation.examples, trained.ends)
            order.append(name)

    def with_clients(sizes: list[int], epochs: int) -> Federation:
        federation = build(experiment(**{"local.epochs": epochs, "split.clients": 2}))
        clients = tuple(np.arange(size) for size in sizes)
        return replace(federation, feed=replace(federation.feed, clients=clients))

    slow, quick = with_clients([1200, 3], 15), with_clients([100, 90], 2)
    list(workers.train(next_job(slow, begin(slow))))  # both processes are up
    workers.interleave([player("slow", slow), player("quick", quick)])
    assert sorted(order) == ["quick"] * 2 + ["slow"] * 2
    assert order[0] == "quick"


def test_one_pool_for_all(tmp_path: Path) -> None:
    base = experiment(**{"engine.name": "workers"})
    study = Study(base, {"a": {}, "b": {"engine.workers": 3}}, (0,), "a")
    with pytest.raises(UserError, match=r"b, seed 0: .*engine\.workers"):
        run_study(study, tmp_path, processes=1, observer=Observer())


def test_the_number_of_workers_is_no_other_experiment() -> None:
    base = experiment(**{"engine.name": "workers"})
    for change in ({"engine.workers": 7}, {"engine.lost_clients": "leave_out"}):
        assert base.changed(change).hash() == base.hash()
        assert base.changed(change).trajectory() == base.trajectory()
    with pytest.raises(UserError, match=r"does not work on cuda: set engine\.device = 'cpu'"):
        base.changed({"engine.device": "cuda"})


# What cannot travel ---------------------------------------------------------------------------------------------------


def said_by(chosen: Experiment, **given: Any) -> tuple[list[str], list[float]]:
    said: list[str] = []
    done = run(chosen, observer=Callbacks(notice=said.append), **given)
    return said, done.test_accuracy


def test_a_model_that_cannot_be_pickled_is_trained_by_the_loop() -> None:
    said, accuracy = said_by(experiment(**{"engine.name": "workers", "engine.workers": 2}), model=WithALambda)
    assert len([sentence for sentence in said if "fell back to 'fused'" in sentence and "lambda" in sentence]) == 1
    assert accuracy == said_by(experiment(), model=WithALambda)[1]


def test_a_class_no_other_process_can_import_is_trained_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: pickled by its name here, and unknown there."""
    cell = type("FromACell", (WithDropout,), {"__module__": "__main__", "__qualname__": "FromACell"})
    monkeypatch.setattr(sys.modules["__main__"], "FromACell", cell, raising=False)
    said, accuracy = said_by(experiment(**{"engine.name": "workers", "engine.workers": 2}), model=cell)
    assert len([sentence for sentence in said if "fell back to 'fused'" in sentence and "FromACell" in sentence]) == 1
    assert accuracy == said_by(experiment(), model=WithDropout)[1]


def test_a_lambda_that_makes_a_model_may_travel() -> None:
    """It is the module that travels, not what made it."""
    said, _ = said_by(
        experiment(**{"engine.name": "workers", "engine.workers": 2, "rounds": 1}),
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    )
    assert not any("fell back" in sentence for sentence in said)


def test_classes_from_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nimport torch, fedgg\nfrom torch import nn\n"
        "class Model(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
        "@dataclass(frozen=True)\nclass Half(fedgg.Algorithm):\n"
        "    def steer(self, grad, w, client):\n        return grad / 2\n"
    )
    fedgg.trust(file)
    names = {"model.name": f"{file}:Model", "algorithm.name": f"{file}:Half"}
    said, accuracy = said_by(experiment(**names, **{"engine.name": "workers", "engine.workers": 2}))
    assert not [sentence for sentence in said if "fell back" in sentence]
    assert accuracy == said_by(experiment(**names))[1]


@pytest.mark.parametrize("odd", [False, True])
def test_a_mistake_in_an_algorithm_reaches_the_user_with_its_place(odd: bool) -> None:
    chosen = experiment(**{"engine.name": "workers", "engine.workers": 2})
    with pytest.raises(RuntimeError if odd else ZeroDivisionError, match="mistake") as caught:
        run(chosen, algorithm=Raising(odd=odd))
    notes = "\n".join(caught.value.__notes__)
    assert "of round 1" in notes
    assert "sent_models.py" in notes


def test_a_worker_of_a_pool_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a study may themselves be processes: these must not start others."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    said, accuracy = said_by(experiment(**{"engine.name": "workers"}))
    assert any("itself a worker" in sentence for sentence in said)
    assert accuracy == said_by(experiment())[1]


# What is left behind --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to count files")
def test_long_runs_leave_no_file_open(workers: Workers) -> None:
    """Large enough rows that every one travels in a file: none may stay open, here or there."""
    federation = build(experiment(**{"algorithm.name": "scaffold", "model.hidden": 300, "local.epochs": 1}))
    federation = replace(
        federation, feed=replace(federation.feed, clients=tuple(c[:3] for c in federation.feed.clients))
    )
    state = begin(federation)

    def files() -> list[int]:
        pids = [os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())]
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]

    counts = []
    for _ in range(170):  # a thousand clients
        job = next_job(federation, state)
        state, _ = close(state, job, federation.examples, train(job, workers))
        counts.append(files())
    few = 8  # may be on their way in the moment of counting; a leak would be hundreds
    assert all(late <= early + few for early, late in zip(counts[10], counts[-1], strict=True))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see shared files")
def test_examples_of_several_runs_are_shared_once_and_what_an_ended_run_shared_is_freed() -> None:
    x, y = np.zeros((600, 3, 32, 32), np.uint8), np.arange(600) % 3
    dataset = dataset_of((x, y, x[:30], y[:30]))
    bytes_shared = []
    with Workers(1) as engine:
        federations = []
        for seed in range(3):
            federations.append(build(experiment(**{"seed": seed, "split.scheme": "iid"}), data=dataset))
            train(next_job(federations[-1], begin(federations[-1])), engine)
            bytes_shared.append(shared_bytes())
        assert x.nbytes < bytes_shared[0]
        assert bytes_shared[-1] < 1.5 * x.nbytes + 2 * (bytes_shared[0] - x.nbytes)
        del federations
        dataset = dataset_of((x[:100], y[:100], x[:30], y[:30]))
        last = build(experiment(**{"split.scheme": "iid"}), data=dataset)
        gc.collect()
        train(next_job(last, begin(last)), engine)
        assert shared_bytes() < bytes_shared[0] - 0.8 * x.nbytes


def shared_bytes() -> int:
    """Of the files in memory that this process shares with workers."""
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum(file.stat().st_size for file in files if str(file.readlink()).startswith("/memfd:fedgg"))


def test_healthy_leaves_out_who_was_lost() -> None:
    federation = build(experiment())
    state = begin(federation)
    job = next_job(federation, state)
    ends = {**train(job, Fused()), 2: Lost(2, "gone")}
    _, record = close(state, job, federation.examples, ends)
    assert 2 not in record.included
    assert record.lost == [Lost(2, "gone")]
