"""Processes of a federation end with it, also detached ones and those that ignore SIGTERM; folders can be hidden."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedgg.errors import UserError
from fedgg.flower.local.namespaces import HIDING_UNAVAILABLE, hiding
from fedgg.flower.local.processes import ProcessSpec, end, flower_environment, is_running, marked, supervised, tail

# A parent that starts a detached child which ignores SIGTERM, as some of Flower's do, and then sleeps.
IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {IGNORES_SIGTERM!r}], start_new_session=True)
time.sleep(600)
"""


def spec(folder: Path, word: str, name: str = "parent", code: str = PARENT) -> ProcessSpec:
    return ProcessSpec(word, name, [sys.executable, "-c", code], dict(os.environ), folder / f"{name}.log")


def wait_for(count: int, word: str) -> None:
    for _ in range(200):
        if len(marked(word)) == count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(marked(word))} processes have the mark, not {count}")


def test_a_process_ends_with_its_descendants(tmp_path: Path) -> None:
    word = f"test-{os.getpid()}-parts"
    with supervised(word) as start:
        first, second = start(spec(tmp_path, word, "first")), start(spec(tmp_path, word, "second"))
        wait_for(4, word)
        assert len(first.tree()) == 2
        assert first.process.poll() is None
        first.end()
        assert first.exit_code == -signal.SIGTERM
        assert first.tree() == []
        assert len(second.tree()) == 2
    assert marked(word) == []


def test_a_mark_that_begins_with_another_is_not_the_same(tmp_path: Path) -> None:
    word = f"test-{os.getpid()}-names"
    with supervised(word) as start:
        start(spec(tmp_path, word, "client-1", IGNORES_SIGTERM))
        start(spec(tmp_path, word, "client-11", IGNORES_SIGTERM))
        wait_for(2, word)
        end(f"{word}/client-1")
        assert len(marked(f"{word}/client-11")) == 1


SUPERVISOR = """
import os, sys, time
from pathlib import Path
from fedgg.flower.local.processes import ProcessSpec, supervised
word, log, code = sys.argv[1:]
with supervised(word) as start:
    start(ProcessSpec(word, "child", [sys.executable, "-c", code], dict(os.environ), Path(log)))
    time.sleep(600)
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_after_the_supervisor_is_killed(tmp_path: Path, sign: signal.Signals) -> None:
    word = f"test-{os.getpid()}-{sign.name}"
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, word, str(tmp_path / "log"), PARENT])
    try:
        wait_for(2, word)
        supervisor.send_signal(sign)
        supervisor.wait()
        wait_for(0, word)
    finally:
        supervisor.kill()
        supervisor.wait()
        end(word)


def test_without_a_watchdog_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="watchdog process did not start"), supervised("test"):
        pytest.fail("a federation without a watchdog")


def test_the_end_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {n}\n\n" for n in range(50)))
    assert tail(tmp_path / "log", 2) == "line 48\nline 49"
    assert "no log" in tail(tmp_path / "other")


def test_environment_of_flower_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGG_FEDERATION", "another/part")
    monkeypatch.setenv("NO_PROXY", "example.org")
    environment = flower_environment(tmp_path, "127.0.0.1")
    assert "FEDGG_FEDERATION" not in environment
    assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert environment["FLWR_HOME"] == str(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_is_running(tmp_path: Path) -> None:
    word = f"test-{os.getpid()}-programs"
    with supervised(word) as start:
        running = start(spec(tmp_path, word, "one", IGNORES_SIGTERM))
        wait_for(1, word)
        (process,) = running.tree()
        assert is_running(process, Path(sys.executable).name)
        assert not is_running(process, "flwr-serverapp")


LIST = """
import os, sys
from pathlib import Path
print(sorted(str(file.relative_to(sys.argv[1])) for file in Path(sys.argv[1]).rglob("*")))
"""


def files_seen(hidden: Path, *visible: Path) -> str:
    command = [*hiding(hidden, *visible), sys.executable, "-c", LIST, str(hidden)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    if HIDING_UNAVAILABLE in listed.stderr:
        pytest.skip(listed.stderr)
    return listed.stdout.strip()


def test_only_the_visible_folder_is_seen(tmp_path: Path) -> None:
    for name in ("client-0", "client-1"):
        (tmp_path / "nodes" / name).mkdir(parents=True)
        (tmp_path / "nodes" / name / "data.npz").write_text(name)
    (tmp_path / "rounds.jsonl").touch()
    assert (
        files_seen(tmp_path, tmp_path / "nodes" / "client-1")
        == "['nodes', 'nodes/client-1', 'nodes/client-1/data.npz']"
    )
    assert files_seen(tmp_path / "nodes") == "[]"
    assert (tmp_path / "nodes" / "client-0" / "data.npz").read_text() == "client-0"


def test_files_written_in_the_visible_folder_stay(tmp_path: Path) -> None:
    visible = tmp_path / "nodes" / "client-0"
    visible.mkdir(parents=True)
    code = f"from pathlib import Path; Path({str(visible / 'memory')!r}).write_text('saved')"
    subprocess.run([*hiding(tmp_path, visible), sys.executable, "-c", code], check=True)
    assert (visible / "memory").read_text() == "saved"
