"""The driver of a benchmark: starts each contender as a process and times their rounds in turns (A B C, A B C, ...).

Taking turns spreads noise of the machine over all contenders. The results are written to `bench.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from fedgg.bench import kit
from fedgg.bench.contenders import REFERENCE, Contender, Device
from fedgg.bench.machine import code, load, machine
from fedgg.bench.process_tree import (
    MARK,
    SECONDS_TO_END,
    PeakMemory,
    busy_seconds,
    end_tree,
    memory_kind,
    processor_seconds,
    psutil,
)
from fedgg.bench.workload import Source, WorkloadDescription, write_workload
from fedgg.errors import UserError
from fedgg.files import open_log, write_json, writing_to

SECONDS_TO_QUIT = 20.0  # Ray takes several
LOG_LINES = 3  # of the log in the error message of a contender


class ContenderFailed(Exception):
    """One contender has failed; the others are still measured."""


class ContenderProcess:
    """A started contender."""

    def __init__(self, contender: Contender, workload: Path, device: str, log: Path, scratch: Path):
        self.contender, self._log, self._mark = contender, log, uuid.uuid4().hex
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.perf_counter()
        with open_log(log) as output:
            try:
                self._process = subprocess.Popen(
                    contender.words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    bufsize=1,
                    cwd=scratch,
                    env=_environment(contender, workload, device, self._mark),
                    start_new_session=True,  # on Ctrl-C the driver ends it
                )
            except OSError as error:
                raise ContenderFailed(f"cannot be started: {error}") from error
        self.peak = PeakMemory(self._process.pid)
        self._processor_seconds, self._idle_since = 0.0, time.perf_counter()
        self._idle_processor_seconds = self._idle_seconds = 0.0
        self.others = 0.0  # cores used by other programs during its last round
        self._reader = threading.Thread(target=self._read_replies, daemon=True)
        self._reader.start()

    def wait_until_ready(self, timeout: float) -> tuple[float, dict[str, str]]:
        """Seconds from its start until it is ready for the first round, and the versions of its packages."""
        versions = json.loads(self._receive("ready", timeout))
        seconds = time.perf_counter() - self._started
        self._begin_idle()
        return seconds, versions

    def run_round(self, timeout: float) -> float:
        """Seconds for one round, by the driver's clock."""
        self._end_idle()
        machine_before, tree_before = busy_seconds(), processor_seconds(self._process.pid)
        started = time.perf_counter()
        self._send("round")
        self._receive("done", timeout)
        seconds = time.perf_counter() - started
        self._begin_idle()
        tree_seconds = self._processor_seconds - tree_before
        self.others = max((busy_seconds() - machine_before - tree_seconds) / seconds, 0.0)
        return seconds

    def score(self, timeout: float) -> float:
        """Test accuracy of its global model as it is now."""
        self._end_idle()
        self._send("score")
        accuracy = float(self._receive("accuracy", timeout))
        self._begin_idle()
        return accuracy

    @property
    def idle_share(self) -> float:
        """Processor time used between its turns, as a share of that time: 1.0 is one busy core."""
        return self._idle_processor_seconds / self._idle_seconds if self._idle_seconds else 0.0

    def end(self) -> None:
        """Let it quit, then end its whole process tree."""
        with contextlib.suppress(ContenderFailed, OSError, subprocess.TimeoutExpired):
            self._send("quit")
            self._process.wait(SECONDS_TO_QUIT)
        self.kill()

    def kill(self) -> None:
        end_tree(self._process.pid, self._mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        self._reader.join(SECONDS_TO_END)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unwritten data for a process that has ended
                if pipe is not None:
                    pipe.close()

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line.strip())
        self._replies.put(None)

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
        except OSError as error:
            raise ContenderFailed(self._exit_reason()) from error

    def _receive(self, word: str, timeout: float) -> str:
        """The rest of its next line, which must begin with this word."""
        try:
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise ContenderFailed(f"no reply within {timeout:.0f} s") from None
        if line is None:
            raise ContenderFailed(self._exit_reason())
        first, _, rest = line.partition(" ")
        if first != word:
            raise ContenderFailed(f"replied {line!r}, expected {word!r}")
        return rest

    def _exit_reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()]
        quoted = " | ".join([line for line in lines if line][-LOG_LINES:]) or "its log is empty"
        return f"ended with code {self._process.returncode}: {quoted}"

    def _begin_idle(self) -> None:
        self._processor_seconds, self._idle_since = processor_seconds(self._process.pid), time.perf_counter()

    def _end_idle(self) -> None:
        self._idle_processor_seconds += max(processor_seconds(self._process.pid) - self._processor_seconds, 0.0)
        self._idle_seconds += time.perf_counter() - self._idle_since


def _environment(contender: Contender, workload: Path, device: str, mark: str) -> dict[str, str]:
    threads = str(contender.threads)
    inherited = dict(os.environ)
    if contender.folder is not None:  # another framework has the kit and its own packages, and not fedgg
        inherited["PYTHONPATH"] = str(Path(kit.__file__).parent)
        inherited.pop("PYTHONSAFEPATH", None)  # its script imports modules beside it
    return inherited | {
        "FEDGG_BENCH_WORKLOAD": str(workload),
        "FEDGG_BENCH_DEVICE": device,
        "FEDGG_BENCH_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        MARK: mark,
    }


FORMAT = 1
SCORED_AFTER = 3  # rounds: enough to see whether a contender learns
START_TIMEOUT, ROUND_TIMEOUT = 300.0, 1800.0  # seconds

Tell = Callable[[str, Contender, str], None]  # event ("starting", "round", "failed", "absent"), contender, text


@dataclass
class ContenderResult:
    """Measurements of one contender; its entry in `bench.json`."""

    name: str
    label: str
    kind: str
    threads: int
    status: Literal["not measured", "measured", "absent", "failed"] = "not measured"
    why: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    start_seconds: float | None = None  # until it was ready for its first round
    first_round_seconds: float | None = None  # the warm-up round
    round_seconds: list[float | None] = field(default_factory=list)  # one per turn; None after a failure
    accuracy: float | None = None
    peak_memory_bytes: int | None = None
    idle_processor_share: float | None = None  # of a core, between its turns
    others_cores: list[float] = field(default_factory=list)  # used by other programs, in each timed round


@dataclass(frozen=True)
class BenchOptions:
    """The options of `fedgg bench`."""

    repeat: int
    device: Device
    source: Source = "auto"
    data_folder: Path | None = None
    quick: bool = False


class BenchDriver:
    """One measurement. `run` may be interrupted: the turns that were finished are on disk."""

    def __init__(self, contenders: Sequence[Contender], options: BenchOptions, out: Path, tell: Tell):
        psutil()  # fail before anything is started
        if options.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no CUDA device on this machine; take --device cpu")
        self._contenders, self._options, self._out, self._tell = contenders, options, out, tell
        self._results = {c.name: ContenderResult(c.name, c.label, c.kind, c.threads) for c in contenders}
        self._processes: dict[str, ContenderProcess] = {}
        self._before = load()
        self._workload: WorkloadDescription | None = None

    @property
    def record_file(self) -> Path:
        return self._out / "bench.json"

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="fedgg-bench-") as scratch, writing_to(self._out):
            file = Path(scratch) / "workload.npz"
            self._workload = write_workload(file, self._options.source, self._options.data_folder, self._options.quick)
            finished = False
            try:
                for contender in self._contenders:
                    self._start(contender, file, Path(scratch))
                for turn in range(1 + self._options.repeat):
                    self._run_turn(turn)
                    self._write(finished)  # after each turn, so that a killed driver leaves its measurements
                finished = True
            finally:
                for process in self._processes.values():
                    process.end() if finished else process.kill()
                self._write(finished)

    def _start(self, contender: Contender, workload: Path, scratch: Path) -> None:
        result = self._results[contender.name]
        if contender.absent:
            result.status, result.why = "absent", contender.absent
            self._tell("absent", contender, contender.absent)
            return
        self._tell("starting", contender, "")
        try:
            log = self._out / "logs" / f"{contender.name}.log"
            process = self._processes[contender.name] = ContenderProcess(
                contender, workload, self._options.device, log, scratch
            )
            seconds, result.versions = process.wait_until_ready(START_TIMEOUT)
            result.start_seconds = round(seconds, 3)
        except ContenderFailed as failure:
            self._fail(contender, failure)

    def _run_turn(self, turn: int) -> None:
        for contender in self._contenders:
            process, result = self._processes.get(contender.name), self._results[contender.name]
            if process is None:
                result.round_seconds += [None] * (turn > 0)
                continue
            self._tell("round", contender, "warming up" if turn == 0 else f"turn {turn} of {self._options.repeat}")
            try:
                self._measure(process, result, turn)
            except ContenderFailed as failure:
                result.round_seconds += [None] * (turn > 0)
                self._fail(contender, failure)
        if turn + 1 == SCORED_AFTER:
            self._score_all()

    def _measure(self, process: ContenderProcess, result: ContenderResult, turn: int) -> None:
        """Memory is polled during the warm-up round, and measured once after each timed round."""
        if turn == 0:
            with process.peak.polling():
                result.first_round_seconds = round(process.run_round(ROUND_TIMEOUT), 4)
        else:
            result.round_seconds.append(round(process.run_round(ROUND_TIMEOUT), 4))
            result.others_cores.append(round(process.others, 3))
            result.status = "measured"
            process.peak.measure()
        result.peak_memory_bytes = process.peak.bytes
        result.idle_processor_share = round(process.idle_share, 4)

    def _score_all(self) -> None:
        for contender in self._contenders:
            if process := self._processes.get(contender.name):
                try:
                    self._results[contender.name].accuracy = process.score(ROUND_TIMEOUT)
                except ContenderFailed as failure:
                    self._fail(contender, failure)

    def _fail(self, contender: Contender, failure: ContenderFailed) -> None:
        result = self._results[contender.name]
        result.status, result.why = "failed", str(failure)
        self._tell("failed", contender, str(failure))
        if process := self._processes.pop(contender.name, None):
            process.kill()

    def _write(self, finished: bool) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        write_json(self.record_file, self._record(finished))

    def _record(self, finished: bool) -> dict[str, Any]:
        assert self._workload is not None
        return {
            "format": FORMAT,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "finished": finished,
            "machine": machine(self._options.device),
            "code": code(),
            "workload": asdict(self._workload) | {"title": self._workload.title, "sentence": self._workload.sentence},
            "conditions": {
                "device": self._options.device,
                "repeat": self._options.repeat,
                "load_before": self._before,
                "order": "in turns, round by round; one warm-up round each is not counted",
                "clock": "the driver's, from asking for a round until the answer",
                "memory": f"{memory_kind()} summed over all processes of a contender; ten times a second during the "
                "warm-up round, then once after each round",
                "accuracy": f"on the test set, after {SCORED_AFTER} rounds",
                "scored_after": SCORED_AFTER,
            },
            "reference": REFERENCE,
            "contenders": [asdict(result) for result in self._results.values()],
        }
