"""The driver with real processes: contenders that train, crash, do not learn or are absent; no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedgg.bench.contender_process import end_tree
from fedgg.bench.contenders import Contender, all_contenders
from fedgg.bench.driver import BenchDriver, BenchOptions
from fedgg.bench.results import bench_figure, bench_table, read_bench
from fedgg.errors import UserError

OPTIONS = BenchOptions(repeat=2, device="cpu", source="stand-in", quick=True)
PROGRAM = """
    import os, sys
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print("a library prints what it likes", flush=True)
    answers.write('ready {"torch": "0"}\\n')
    for number, line in enumerate(sys.stdin):
        if line.strip() == "quit":
            break
        ANSWER
"""


def scripted(folder: Path, name: str, answer: str, **settings: Any) -> Contender:
    """A contender with fixed replies, which trains nothing."""
    script = folder / f"{name}.py"
    script.write_text(textwrap.dedent(PROGRAM).replace("ANSWER", answer))
    return Contender(name, f"the {name} one", (sys.executable, str(script)), "peer", **settings)


def measure(
    contenders: list[Contender], out: Path, options: BenchOptions = OPTIONS
) -> tuple[dict[str, Any], list[str]]:
    events: list[str] = []
    driver = BenchDriver(
        contenders, options, out, lambda kind, contender, what: events.append(f"{kind} {contender.name}")
    )
    driver.run()
    return json.loads(driver.record_file.read_text()), events


def entries(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in record["contenders"]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """One measurement: fedgg's loop and the tight loop train, three others fail in different ways."""
    folder = tmp_path_factory.mktemp("contest")
    everyone = {contender.name: contender for contender in all_contenders()}
    learned = 'answers.write("accuracy 0.1\\n" if line.strip() == "score" else "done\\n")'
    contenders = [
        everyone["fedgg-loop"],
        everyone["tight-1"],
        scripted(folder, "idle", learned),
        scripted(folder, "broken", 'sys.exit("the disk is on fire") if number else answers.write("done\\n")'),
        scripted(folder, "missing", "", absent="not installed; run `fedgg bench setup missing`"),
    ]
    record, events = measure(contenders, folder / "out")
    return folder / "out", record, events


def test_turns_are_taken_round_by_round(measured: tuple[Path, dict[str, Any], list[str]]) -> None:
    _, _, events = measured
    rounds = [line.removeprefix("round ") for line in events if line.startswith("round ")]
    assert rounds[:8] == ["fedgg-loop", "tight-1", "idle", "broken"] * 2
    assert rounds[8:] == ["fedgg-loop", "tight-1", "idle"]
    assert "failed broken" in events
    assert "absent missing" in events


def test_measured_contenders_train(measured: tuple[Path, dict[str, Any], list[str]]) -> None:
    _, record, _ = measured
    assert record["finished"]
    assert record["workload"]["stand_in"]
    assert record["machine"]["cores"] >= 1
    found = entries(record)
    for name in ("fedgg-loop", "tight-1"):
        entry = found[name]
        assert entry["status"] == "measured"
        assert len(entry["round_seconds"]) == 2
        assert entry["accuracy"] > 0.5
        assert entry["peak_memory_bytes"] > 100e6
        assert entry["versions"]["torch"]
        assert entry["start_seconds"] > 0
        assert entry["first_round_seconds"] > 0


def test_failures_are_recorded_and_the_others_are_measured(measured: tuple[Path, dict[str, Any], list[str]]) -> None:
    out, record, _ = measured
    found = entries(record)
    assert found["broken"]["status"] == "failed"
    assert "the disk is on fire" in found["broken"]["why"]
    assert found["broken"]["round_seconds"] == [None, None]
    assert found["missing"]["status"] == "absent"
    assert "library prints" in (out / "logs" / "idle.log").read_text()
    shown = bench_table(read_bench(out / "bench.json"))
    text = "\n".join([shown.title, *(" ".join(row) for row in shown.rows), *shown.notes])
    assert "the idle one: does not learn" in text
    assert "fedgg bench setup missing" in text
    assert "the disk is on fire" in text
    assert "not CIFAR-10" in text
    figure = bench_figure(read_bench(out / "bench.json"))
    assert "not CIFAR-10" in figure.get_suptitle()
    assert len(figure.axes[0].get_yticks()) == 3


def test_missing_and_wrong_replies_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgg.bench.driver.ROUND_TIMEOUT", 1.0)
    silent = scripted(tmp_path, "silent", "pass")
    babbling = scripted(tmp_path, "babbling", 'answers.write("forty-two\\n")')
    nowhere = Contender("nowhere", "nowhere", (str(tmp_path / "no-such-python"),), "peer")
    found = entries(measure([silent, babbling, nowhere], tmp_path / "out")[0])
    assert "no reply within 1 s" in found["silent"]["why"]
    assert "replied 'forty-two', expected 'done'" in found["babbling"]["why"]
    assert "cannot be started" in found["nowhere"]["why"]
    with pytest.raises(UserError, match="no contender was measured"):
        bench_figure(read_bench(tmp_path / "out" / "bench.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use --device cpu"):
        BenchDriver([], BenchOptions(repeat=2, device="cuda"), tmp_path, lambda kind, contender, what: None)


def test_children_end_with_their_contender(tmp_path: Path) -> None:
    """Also a detached one, which has the mark."""
    child = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); "
    fork = scripted(tmp_path, "parent", f'{child}answers.write("done\\n"); os._exit(0)')
    before = {process.pid for process in psutil.process_iter() if process.name() == "sleep"}
    measure([fork], tmp_path / "out")
    left = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "sleep" and p.pid not in before]
    assert not [process for process in left if process.cmdline() == ["sleep", "1000"]]


def bench_command(folder: Path, contenders: Sequence[str]) -> subprocess.Popen[str]:
    words = ["--quick", "--data", "stand-in", "--repeat", "1000"]
    words += [word for contender in contenders for word in ("--only", contender)]
    return subprocess.Popen(
        [sys.executable, "-m", "fedgg", "bench", *words, "--out", str(folder / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )


def contenders_of(folder: Path) -> list[psutil.Process]:
    """Every living process whose workload lies in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FEDGG_BENCH_WORKLOAD", "").startswith(str(folder)):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_for(condition: Any, what: str, seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_process_is_left(tmp_path: Path, how: signal.Signals) -> None:
    contenders = ["tight-1", "fedgg-loop"] if how == signal.SIGINT else ["tight-1"]
    driver = bench_command(tmp_path, contenders)
    record = tmp_path / "out" / "bench.json"
    try:
        wait_for(lambda: record.exists() and all(_seconds(record)), "no turn was finished")
        assert len(contenders_of(tmp_path)) == len(contenders)
        driver.send_signal(how)
        output, _ = driver.communicate(timeout=120)
        wait_for(lambda: not contenders_of(tmp_path), "a contender outlived the driver")
    finally:
        end_tree(driver.pid, "no process has this mark")
        for process in contenders_of(tmp_path):
            process.kill()
    assert all(_seconds(record)), "what was measured is kept"
    if how != signal.SIGKILL:
        assert not list(tmp_path.glob("fedgg-bench-*"))
        assert driver.returncode == 130
        assert "all processes have ended" in output
        assert (tmp_path / "out" / "bench.png").exists()
        assert not json.loads(record.read_text())["finished"]


def _seconds(record: Path) -> list[list[float]]:
    return [entry["round_seconds"] for entry in json.loads(record.read_text())["contenders"]]
