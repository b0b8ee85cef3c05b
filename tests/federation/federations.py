"""A federation of real processes under test: started as a person would, watched through its run folder, and hurt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from fedgg.core.evaluation import Score
from fedgg.core.local import LocalEnd
from fedgg.core.server import Lost
from fedgg.engines import Fused, RoundJob
from fedgg.engines.base import Look
from fedgg.flower.local.processes import MARK, is_running
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.observer import Observer
from fedgg.lab.run_session import opened
from fedgg.lab.runner import run_rounds

PATIENCE = 240.0  # seconds for anything that is waited for; nothing is said about how long it may take


@dataclass
class Up:
    """`fedgg flower up` at work."""

    out: Path
    process: subprocess.Popen[bytes]

    def wait(self) -> str:
        """To its end; what it said."""
        said, _ = self.process.communicate(timeout=PATIENCE)
        return said.decode()

    def until(self, condition: Callable[[], Any]) -> Any:
        """What the condition gives, once it is something; the federation must not end before."""
        end = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.wait()}"
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.05)
        return found

    def rounds(self) -> list[dict[str, Any]]:
        return history(self.out)

    def until_round(self, number: int) -> None:
        self.until(lambda: len(self.rounds()) >= number)

    def find(self, part: str, program: str) -> list[Any]:
        return [process for process in members(self.out, part) if is_running(process, program)]

    def hurt(self, part: str, program: str, sign: signal.Signals) -> None:
        """Send a signal to this program of that part, as soon as it is there."""
        for process in self.until(lambda: self.find(part, program)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(sign)

    def next_client_app(self, part: str) -> Any:
        """The process in which a node answers its next message, just started: it is in the middle of a round."""
        before = {process.pid for process in self.find(part, "flwr-clientapp")}
        return self.until(lambda: [new for new in self.find(part, "flwr-clientapp") if new.pid not in before])[0]

    def stop(self) -> None:
        """After a test, however it ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        end = time.monotonic() + 20
        while members(self.out) and time.monotonic() < end:
            time.sleep(0.05)


def start(experiment: Experiment, out: Path, *words: str, again: Sequence[str] | None = None) -> Up:
    """`again`: another command than `flower up` for the same folder."""
    file = out.with_suffix(".toml")
    file.write_text(experiment.to_toml())
    command = again or ("flower", "up", str(file), "--out", str(out), *words)
    process = subprocess.Popen(
        [sys.executable, "-m", "fedgg", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    return Up(out, process)


def members(out: Path, part: str = "") -> list[Any]:
    """Every living process of the federation in this folder, or of one part of it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            theirs = process.environ()
            here = theirs.get("FLWR_HOME", "").startswith(f"{out}{os.sep}")
            if here and theirs.get(MARK, "").endswith(f"/{part}" if part else ""):
                found.append(process)
    return found


def history(out: Path) -> list[dict[str, Any]]:
    """The finished rounds, without what differs from one life to the next."""
    file = out / "rounds.jsonl"
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    return [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines]


def lost(out: Path) -> dict[tuple[int, int], str]:
    """By round and client: why it was left out."""
    return {(line["round"], gone["client"]): gone["why"] for line in history(out) for gone in line["lost"]}


def events(out: Path) -> list[str]:
    file = out / "federation" / "events.jsonl"
    told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [f"{event['who']}: {event['what']}" for event in told]


@dataclass(frozen=True)
class Losing:
    """The reference engine, where the clients named are lost in the rounds named, for the same reasons."""

    gone: dict[tuple[int, int], str]
    engine: Fused

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd | Lost]]:
        for client, end in self.engine.train(job):
            why = self.gone.get((job.round + 1, client))
            yield client, end if why is None else Lost(client, why)

    def score(self, looks: Sequence[Look]) -> list[Score]:
        return self.engine.score(looks)


def assert_as_embedded(experiment: Experiment, out: Path, tmp_path: Path) -> None:
    """The run in the folder has the history and the bits of the reference engine, given who was lost when."""
    reference = tmp_path / "reference"
    with arithmetic(experiment), opened(partial(build, experiment), experiment, reference, Observer()) as session:
        run_rounds(session, Losing(lost(out), Fused()))
        session.finish()
    assert history(out) == history(reference)
    ours, theirs = load_file(out / "model.safetensors"), load_file(reference / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
