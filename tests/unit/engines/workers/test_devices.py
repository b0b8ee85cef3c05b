"""The engine `devices`, with CPUs in the place of GPUs: the same code in the same processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Callbacks
from sent_models import Deadly, Raising, WithALambda
from step_cases import CASES, PERSONAL, StepCase, assert_as_reference, played, played_and_recorded
from torch import nn
from typer.testing import CliRunner

import fedgg
from fedgg.cli import app
from fedgg.engines import Engine, Fused, Stacked, Streams
from fedgg.engines.devices import Devices, dealt
from fedgg.engines.workers.process import VISIBLE, see_only
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import begin, next_job
from fedgg.lab.runner import run

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
IN_PROCESSES = [case for case in [*CASES, *PERSONAL] if case.model is None and not case.name.endswith("three of six")]


@pytest.fixture(scope="module", params=["fused", "stacked"])
def devices(request: pytest.FixtureRequest) -> Iterator[Devices]:
    each = Fused if request.param == "fused" else partial(Stacked, "fp64")
    with Devices("cpu,cpu", each, notice=lambda sentence: pytest.fail(sentence)) as engine:
        yield engine


@pytest.mark.parametrize("case", IN_PROCESSES, ids=str)
def test_clients_spread_over_devices_take_the_reference_steps(case: StepCase, devices: Devices) -> None:
    assert_as_reference(case, *played_and_recorded(case.federation(), devices))


def experiment(**changes: Any) -> Experiment:
    base = Experiment(
        rounds=3,
        split={"clients": 5},
        model={"name": "linear"},
        algorithm={"name": "scaffold"},
        local={"epochs": 2},
        engine={"device": "cpu,cpu"},
    )
    return base.changed(changes)


def alone(**changes: Any) -> fedgg.Run:
    return run(experiment(**changes, **{"engine.device": "cpu"}))


def assert_same(a: fedgg.Run, b: fedgg.Run) -> None:
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in b.weights)
    assert a.test_accuracy == b.test_accuracy
    assert [record["clients"] for record in a.rounds] == [record["clients"] for record in b.rounds]


OWN = """
from fedgg.engines import Fused

class Own(Fused):
    def __init__(self, device: str, precision: str):
        assert (device, precision) == ("cpu", "fp32")
"""


def test_an_engine_of_a_file_in_each_process(tmp_path: Path) -> None:
    """It is told the kind of its device, which is the only one that its process sees."""
    (tmp_path / "own.py").write_text(OWN)
    words = ["run", "--model", "linear", "--rounds", "2", "--device", "cpu,cpu", "--set", "engine.name=own.py:Own"]
    command = [sys.executable, "-m", "fedgg", *words, "--out", "mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "own.py:Own in a process on each of cpu, cpu" in done.stdout + done.stderr
    assert "cannot be sent" not in done.stdout + done.stderr
    assert json.loads((tmp_path / "mine" / "versions.json").read_text())["engine"]["name"] == "devices"


# What a run has to be whatever the devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 7])
def test_bits_do_not_depend_on_the_number_of_devices(count: int) -> None:
    """Seven for five clients: two have nothing to do."""
    before = set(multiprocessing.active_children())
    seen: list[tuple[int, int]] = []
    several = {"engine.device": ",".join(["cpu"] * count), "server.cohort": 4}
    ours = run(experiment(**several), observer=Callbacks(client=lambda done, of: seen.append((done, of))))
    assert_same(ours, alone(**{"server.cohort": 4}))
    assert seen == [(done, 4) for _ in range(3) for done in range(1, 5)]
    assert set(multiprocessing.active_children()) <= before


def test_threads_of_a_process_are_those_of_the_run() -> None:
    several = {"engine.threads": 2, "model.name": "mlp", "local.batch": 200, "local.epochs": 1, "rounds": 1}
    assert_same(run(experiment(**several)), alone(**several))


def test_clients_are_dealt_out_by_steps() -> None:
    federation = build(experiment(**{"split.clients": 20, "server.cohort": 12, "split.beta": 0.1}))
    job = next_job(federation, begin(federation))
    steps = {client: job.work.steps(federation.examples[client]) for client in job.cohort}
    for count in (1, 2, 3, 12, 20):
        shares = dealt(job, count)
        assert sorted(client for share in shares for client in share) == sorted(job.cohort)
        assert all(share == [client for client in job.cohort if client in share] for share in shares)
        totals = [sum(steps[client] for client in share) for share in shares]
        assert max(totals) - min(totals) <= max(steps.values())


def test_a_run_is_continued_on_other_devices(tmp_path: Path) -> None:
    """On a CPU the devices are not part of an experiment's identity: the bits are the same."""
    run(experiment(rounds=1), out=tmp_path)
    ours = run(experiment(**{"engine.device": "cpu"}), out=tmp_path)
    assert_same(ours, alone())
    assert len((tmp_path / "resumes.jsonl").read_text().splitlines()) == 1
    assert experiment().trajectory() == experiment(**{"engine.device": "cpu", "engine.name": "fused"}).trajectory()
    named = experiment(**{"engine.name": "devices"})
    assert named.trajectory() == experiment().trajectory()
    on_gpus = experiment(**{"engine.device": "cuda:0,1", "engine.name": "devices"})
    assert on_gpus.trajectory() == experiment(**{"engine.device": "cuda:0,cuda:1"}).trajectory()
    assert on_gpus.trajectory() != experiment(**{"engine.device": "cuda"}).trajectory()


def test_what_a_run_records(tmp_path: Path) -> None:
    run(experiment(rounds=1), out=tmp_path)
    versions = json.loads((tmp_path / "versions.json").read_text())
    reason = "fused in a process on each of cpu, cpu (one client after another)"
    assert versions["engine"] == {"name": "devices", "precision": "fp32", "reason": reason}
    assert versions["device"] == "cpu"


def test_a_study_runs_one_after_another_on_all_of_them(tmp_path: Path) -> None:
    """A list in the experiment spreads clients; that of `--device` and `on` spreads runs."""
    both = [
        fedgg.compare([fedgg.FedAvg(), fedgg.FedGG()], experiment(**device), seeds=(0, 1), out=tmp_path / name)
        for name, device in (("devices", {}), ("here", {"engine.device": "cpu"}))
    ]
    assert both[0].final == both[1].final
    versions = json.loads(next((tmp_path / "devices").glob("*/seed-1/versions.json")).read_text())
    assert versions["engine"]["name"] == "devices"


@pytest.mark.parametrize(
    ("device", "visible", "left"),
    [("cuda:1", None, "1"), ("cuda:1", "4,7", "7"), ("cuda:0", "GPU-a, GPU-b", "GPU-a"), ("cpu", "4", "4")],
)
def test_a_process_sees_its_own_gpu_alone(
    device: str, visible: str | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted among those that this process may use."""
    monkeypatch.setenv(VISIBLE, visible or "")
    see_only(device)
    assert os.environ[VISIBLE] == left


# Processes that die, objects that cannot be sent ----------------------------------------------------------------------


def test_a_killed_process_is_replaced_and_its_clients_done_again() -> None:
    said: list[str] = []
    count = 0

    def one_more(done: int, of: int) -> None:
        nonlocal count
        count += 1
        if count in (2, 8):
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)
                child.join()

    ours = run(experiment(), observer=Callbacks(client=one_more, notice=said.append))
    assert_same(ours, alone())
    assert any("of round" in sentence and "its process died" in sentence for sentence in said)


def deadly(**changes: Any) -> tuple[Experiment, Deadly, list[int]]:
    """An algorithm that kills the process of one of its clients, and the clients of this process."""
    chosen = experiment(**{"rounds": 2, **changes})
    federation = build(chosen)
    job = next_job(federation, begin(federation))
    sizes = federation.examples
    victim = next(client for client, size in enumerate(sizes) if sizes.count(size) == 1)
    return chosen, Deadly(examples=sizes[victim]), next(share for share in dealt(job, 2) if victim in share)


def test_clients_on_which_all_processes_die_stop_the_run(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    chosen, algorithm, share = deadly()
    where = f"clients {', '.join(map(str, share))} of round 1.*3 times.*engine.device.*fedgg resume {tmp_path}"
    with pytest.raises(UserError, match=where):
        run(chosen, algorithm=algorithm, out=tmp_path)
    assert set(multiprocessing.active_children()) <= before


def test_clients_on_which_all_processes_die_are_left_out() -> None:
    chosen, algorithm, share = deadly(**{"engine.lost_clients": "leave_out"})
    for record in run(chosen, algorithm=algorithm).rounds:
        assert [gone["client"] for gone in record["lost"]] == share


def test_a_model_that_cannot_be_sent_is_trained_on_the_first_device() -> None:
    said: list[str] = []
    ours = run(experiment(), model=WithALambda, observer=Callbacks(notice=said.append))
    assert_same(ours, run(experiment(**{"engine.device": "cpu", "engine.name": "fused"}), model=WithALambda))
    assert len([sentence for sentence in said if "trains on cpu alone: the experiment cannot be sent" in sentence]) == 1


class OfThisProcess(nn.Linear):
    """Found here by its name, and nowhere else."""

    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(process: int) -> nn.Module:
    if os.getpid() != process:
        raise ImportError("another process")
    return OfThisProcess(64, 10)


def _of_this_process() -> nn.Module:
    return nn.Sequential(nn.Flatten(), OfThisProcess(64, 10))


def test_a_model_that_cannot_be_read_is_trained_on_the_first_device() -> None:
    said: list[str] = []
    ours = run(experiment(), model=_of_this_process, observer=Callbacks(notice=said.append))
    here = experiment(**{"engine.device": "cpu", "engine.name": "fused"})
    assert_same(ours, run(here, model=_of_this_process))
    assert len([sentence for sentence in said if "cannot be sent" in sentence]) == 1


def test_an_error_of_a_client_names_its_process() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(experiment(), algorithm=Raising())
    assert any("in the worker process of clients" in note for note in caught.value.__notes__)


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu", "name": "devices"}, "engine 'devices' needs several: set engine.device to a list"),
        ({"device": "cpu,cpu", "name": "workers"}, "engine 'workers' has processes of its own"),
        ({"device": "cpu,cpu", "name": "streams"}, "engine 'streams' needs a GPU"),
        ({"device": "cpu,cpu", "precision": "bf16"}, "needs a GPU"),
        ({"device": "cpu,cuda:0"}, "one kind of device"),
        ({"device": "cuda:0,x"}, "write cuda:all, or a list"),
        ({"device": "gpu"}, "choose cpu, cuda or cuda:N; or a list"),
    ],
)
def test_devices_that_do_not_fit(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Experiment(engine=settings)


def test_a_device_that_does_not_exist(tmp_path: Path) -> None:
    """One line, and no folder."""
    words = ["run", "--device", "cuda:0,cuda:99", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UserError)
    assert "CUDA devices; set engine.device = 'cpu'" in str(result.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_all_of_no_devices() -> None:
    with pytest.raises(UserError, match="'cuda:all': this machine has no CUDA device; set --device cpu"):
        Experiment(engine={"device": "cuda:all"})


def test_a_search_trains_on_one_device() -> None:
    with pytest.raises(UserError, match="a search trains on one device"):
        fedgg.tune([fedgg.FedAvg], experiment(**{"data.holdout": 0.2}), trials=1)


# On a GPU -------------------------------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("each", ["stacked", "streams", "fused"])
@pytest.mark.parametrize("case", IN_PROCESSES[::6], ids=str)
def test_two_processes_on_one_gpu_take_the_reference_steps(case: StepCase, each: str) -> None:
    makers: dict[str, Callable[[], Engine]] = {
        "stacked": partial(Stacked, "fp64"),
        "streams": partial(Streams, 3),
        "fused": Fused,
    }
    on_gpu = case.on("cuda")
    with Devices("cuda:0,cuda:0", makers[each], notice=lambda sentence: pytest.fail(sentence)) as engine:
        assert_as_reference(on_gpu, *played_and_recorded(on_gpu.federation(), engine))


@GPU
def test_the_state_of_a_run_stays_on_its_gpu() -> None:
    chosen = Experiment(rounds=2, algorithm={"name": "scaffold"}, engine={"device": "cuda:0,cuda:0"})
    with Devices("cuda:0,cuda:0", Stacked) as engine:
        state = played(build(chosen), engine)
    rows = [state.server.w, *(row for memory in state.memory.values() for row in memory.values())]
    assert {row.device for row in rows} == {torch.device("cuda:0")}
