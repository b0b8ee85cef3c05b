"""Nobody of a federation outlives it: also who is detached, deaf, or left by a kill -9; and nobody reads along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedgg.flower.local import sandbox as cell
from fedgg.flower.local.processes import Part, end, is_running, marked, surroundings, tail, watched_over

# A parent that starts a child which is detached and deaf, as some of Flower's are, and then sleeps itself.
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True)
time.sleep(600)
"""


def part(folder: Path, word: str, name: str = "parent", code: str = PARENT) -> Part:
    return Part(word, name, [sys.executable, "-c", code], dict(os.environ), folder / f"{name}.log")


def wait_for(count: int, word: str) -> None:
    for _ in range(200):
        if len(marked(word)) == count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(marked(word))} processes bear the mark, not {count}")


def test_a_part_ends_with_everything_it_started(tmp_path: Path) -> None:
    word = f"test-{os.getpid()}-parts"
    with watched_over(word) as start:
        first, second = start(part(tmp_path, word, "first")), start(part(tmp_path, word, "second"))
        wait_for(4, word)
        assert len(first.family()) == 2
        assert first.process.poll() is None
        first.end()
        assert first.ended == -signal.SIGTERM
        assert first.family() == []
        assert len(second.family()) == 2
    assert marked(word) == []


def test_a_name_is_not_another_that_begins_like_it(tmp_path: Path) -> None:
    word = f"test-{os.getpid()}-names"
    with watched_over(word) as start:
        start(part(tmp_path, word, "client-1", DEAF))
        start(part(tmp_path, word, "client-11", DEAF))
        wait_for(2, word)
        end(f"{word}/client-1")
        assert len(marked(f"{word}/client-11")) == 1


HOLDER = """
import os, sys, time
from pathlib import Path
from fedgg.flower.local.processes import Part, watched_over
word, log, code = sys.argv[1:]
with watched_over(word) as start:
    start(Part(word, "held", [sys.executable, "-c", code], dict(os.environ), Path(log)))
    time.sleep(600)
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_holder_leaves_nobody(tmp_path: Path, sign: signal.Signals) -> None:
    word = f"test-{os.getpid()}-{sign.name}"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, word, str(tmp_path / "log"), PARENT])
    try:
        wait_for(2, word)
        holder.send_signal(sign)
        holder.wait()
        wait_for(0, word)
    finally:
        holder.kill()
        holder.wait()
        end(word)


def test_the_end_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {n}\n\n" for n in range(50)))
    assert tail(tmp_path / "log", 2) == "line 48\nline 49"
    assert "no log" in tail(tmp_path / "other")


def test_what_processes_inherit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGG_FEDERATION", "another/part")
    monkeypatch.setenv("NO_PROXY", "example.org")
    given = surroundings(tmp_path, "127.0.0.1")
    assert "FEDGG_FEDERATION" not in given
    assert given["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert given["FLWR_HOME"] == str(tmp_path)
    assert given["FLWR_TELEMETRY_ENABLED"] == "0"
    assert given["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_programs_are_told_apart(tmp_path: Path) -> None:
    word = f"test-{os.getpid()}-programs"
    with watched_over(word) as start:
        running = start(part(tmp_path, word, "one", DEAF))
        wait_for(1, word)
        (process,) = running.family()
        assert is_running(process, Path(sys.executable).name)
        assert not is_running(process, "flwr-serverapp")


LOOK = """
import os, sys
from pathlib import Path
print(sorted(str(file.relative_to(sys.argv[1])) for file in Path(sys.argv[1]).rglob("*")))
"""


def seen(hidden: Path, *own: Path) -> str:
    command = [
        sys.executable,
        cell.__file__,
        str(hidden),
        *map(str, own),
        "--",
        sys.executable,
        "-c",
        LOOK,
        str(hidden),
    ]
    looked = subprocess.run(command, capture_output=True, text=True, check=True)
    if cell.REFUSED in looked.stderr:
        pytest.skip(looked.stderr)
    return looked.stdout.strip()


def test_a_cell_shows_its_own_folder_alone(tmp_path: Path) -> None:
    for name in ("client-0", "client-1"):
        (tmp_path / "nodes" / name).mkdir(parents=True)
        (tmp_path / "nodes" / name / "data.npz").write_text(name)
    (tmp_path / "rounds.jsonl").touch()
    assert seen(tmp_path, tmp_path / "nodes" / "client-1") == "['nodes', 'nodes/client-1', 'nodes/client-1/data.npz']"
    assert seen(tmp_path / "nodes") == "[]"
    assert (tmp_path / "nodes" / "client-0" / "data.npz").read_text() == "client-0"


def test_what_is_written_in_a_cell_stays(tmp_path: Path) -> None:
    own = tmp_path / "nodes" / "client-0"
    own.mkdir(parents=True)
    code = f"from pathlib import Path; Path({str(own / 'memory')!r}).write_text('kept')"
    subprocess.run([sys.executable, cell.__file__, tmp_path, own, "--", sys.executable, "-c", code], check=True)
    assert (own / "memory").read_text() == "kept"
