"""Contenders run in turns, round by round (A B C, A B C, ...), so that noise hits all alike; each is a process."""

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
from fedgg.bench.processes import MARK, PATIENCE, Peak, busy_seconds, end_family, memory_kind, processor_seconds, psutil
from fedgg.bench.workload import Described, Source, write_workload
from fedgg.errors import UserError
from fedgg.files import open_log
from fedgg.output_files import write_json, writing_to

GRACE = 20.0  # seconds to leave when asked: Ray takes its time
LAST_WORDS = 3  # lines of its log that are quoted when it fails


class Failed(Exception):
    """A contender that cannot go on; the others do."""


class Entrant:
    """A started contender."""

    def __init__(self, contender: Contender, workload: Path, device: str, log: Path, scratch: Path):
        self.contender, self._log, self._mark = contender, log, uuid.uuid4().hex
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
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
                    start_new_session=True,  # Ctrl-C is the driver's business: it ends everyone in order
                )
            except OSError as error:
                raise Failed(f"cannot be started: {error}") from error
        self.peak = Peak(self._process.pid)
        self._busy, self._slept_since, self._idle_used = 0.0, time.perf_counter(), 0.0
        self._idle_seconds = 0.0
        self.others = 0.0  # cores that were busy with something else during its last round
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def wait_until_ready(self, patience: float) -> tuple[float, dict[str, str]]:
        """Seconds from its start until its first round may begin, and the versions it runs."""
        versions = json.loads(self._answer("ready", patience))
        seconds = time.perf_counter() - self._started
        self._fall_asleep()
        return seconds, versions

    def play_round(self, patience: float) -> float:
        """Seconds for one round, by the driver's clock."""
        self._wake_up()
        everyone, own = busy_seconds(), processor_seconds(self._process.pid)
        started = time.perf_counter()
        self._ask("round")
        self._answer("done", patience)
        seconds = time.perf_counter() - started
        self._fall_asleep()
        self.others = max((busy_seconds() - everyone - (self._busy - own)) / seconds, 0.0)
        return seconds

    def score(self, patience: float) -> float:
        """Test accuracy of its global model as it is now."""
        self._wake_up()
        self._ask("score")
        accuracy = float(self._answer("accuracy", patience))
        self._fall_asleep()
        return accuracy

    @property
    def idle_share(self) -> float:
        """Processor time used between its turns, as a share of that time: 1.0 is one core kept busy for nothing."""
        return self._idle_used / self._idle_seconds if self._idle_seconds else 0.0

    def end(self) -> None:
        """Let it leave, and see to it that nobody of its family stays."""
        with contextlib.suppress(Failed, OSError, subprocess.TimeoutExpired):
            self._ask("quit")
            self._process.wait(GRACE)
        self.kill()

    def kill(self) -> None:
        end_family(self._process.pid, self._mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        self._listener.join(PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was written last has no reader any more
                if pipe is not None:
                    pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line.strip())
        self._answers.put(None)

    def _ask(self, wish: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(wish + "\n")
        except OSError as error:
            raise Failed(self._last_words()) from error

    def _answer(self, word: str, patience: float) -> str:
        """What follows the word it must say next."""
        try:
            line = self._answers.get(timeout=patience)
        except queue.Empty:
            raise Failed(f"said nothing for {patience:.0f} s") from None
        if line is None:
            raise Failed(self._last_words())
        first, _, rest = line.partition(" ")
        if first != word:
            raise Failed(f"said {line!r} where {word!r} was due")
        return rest

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()]
        quoted = " | ".join([line for line in lines if line][-LAST_WORDS:]) or "it left no word"
        return f"ended with code {self._process.returncode}: {quoted}"

    def _fall_asleep(self) -> None:
        self._busy, self._slept_since = processor_seconds(self._process.pid), time.perf_counter()

    def _wake_up(self) -> None:
        self._idle_used += max(processor_seconds(self._process.pid) - self._busy, 0.0)
        self._idle_seconds += time.perf_counter() - self._slept_since


def _environment(contender: Contender, workload: Path, device: str, mark: str) -> dict[str, str]:
    threads = str(contender.threads)
    own = dict(os.environ)
    if contender.folder is not None:  # a peer finds the kit and its own packages, and nothing of fedgg's
        own["PYTHONPATH"] = str(Path(kit.__file__).parent)
        own.pop("PYTHONSAFEPATH", None)  # its script has modules beside it
    return own | {
        "FEDGG_BENCH_WORKLOAD": str(workload),
        "FEDGG_BENCH_DEVICE": device,
        "FEDGG_BENCH_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        MARK: mark,
    }


FORMAT = 1
SCORED_AFTER = 3  # rounds: long enough to see that everyone really trains
FEWEST_REPEATS = SCORED_AFTER - 1
START_PATIENCE, ROUND_PATIENCE = 300.0, 1800.0  # seconds without a word after which a contender has failed

Tell = Callable[[str, Contender, str], None]  # what happened ("starting", "round", "failed", ...), to whom, in words


@dataclass
class Result:
    """What is known of one contender so far; the shape of its entry in the record."""

    name: str
    label: str
    kind: str
    threads: int
    status: Literal["not measured", "measured", "absent", "failed"] = "not measured"
    why: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    start_seconds: float | None = None  # until its first round may begin
    first_round_seconds: float | None = None  # not among those that count
    round_seconds: list[float | None] = field(default_factory=list)  # one for each turn; None: it had failed
    accuracy: float | None = None
    peak_memory_bytes: int | None = None
    idle_processor_share: float | None = None  # of a core, between its turns
    others_cores: list[float] = field(default_factory=list)  # busy with something else, in each timed round


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    repeat: int
    device: Device
    source: Source = "auto"
    data_folder: Path | None = None
    quick: bool = False


class Contest:
    """One measurement from start to end. `hold` may be interrupted at any time: what was measured is on disk."""

    def __init__(self, contenders: Sequence[Contender], plan: Plan, out: Path, tell: Tell):
        psutil()  # before anything is started: without it nobody can be ended for sure
        if plan.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no CUDA device on this machine; take --device cpu")
        self._contenders, self._plan, self._out, self._tell = contenders, plan, out, tell
        self._results = {c.name: Result(c.name, c.label, c.kind, c.threads) for c in contenders}
        self._entrants: dict[str, Entrant] = {}
        self._before = load()
        self._workload: Described | None = None

    @property
    def record_file(self) -> Path:
        return self._out / "bench.json"

    def hold(self) -> None:
        with tempfile.TemporaryDirectory(prefix="fedgg-bench-") as scratch, writing_to(self._out):
            file = Path(scratch) / "workload.npz"
            self._workload = write_workload(file, self._plan.source, self._plan.data_folder, self._plan.quick)
            finished = False
            try:
                for contender in self._contenders:
                    self._start(contender, file, Path(scratch))
                for turn in range(1 + self._plan.repeat):
                    self._take_turns(turn)
                    self._write(finished)  # after each turn: a killed driver leaves what was measured
                finished = True
            finally:
                for entrant in self._entrants.values():
                    entrant.end() if finished else entrant.kill()
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
            entrant = self._entrants[contender.name] = Entrant(contender, workload, self._plan.device, log, scratch)
            seconds, result.versions = entrant.wait_until_ready(START_PATIENCE)
            result.start_seconds = round(seconds, 3)
        except Failed as failure:
            self._fail(contender, failure)

    def _take_turns(self, turn: int) -> None:
        for contender in self._contenders:
            entrant, result = self._entrants.get(contender.name), self._results[contender.name]
            if entrant is None:
                result.round_seconds += [None] * (turn > 0)
                continue
            self._tell("round", contender, "warming up" if turn == 0 else f"turn {turn} of {self._plan.repeat}")
            try:
                self._play(entrant, result, turn)
            except Failed as failure:
                result.round_seconds += [None] * (turn > 0)
                self._fail(contender, failure)
        if turn + 1 == SCORED_AFTER:
            self._score_all()

    def _play(self, entrant: Entrant, result: Result, turn: int) -> None:
        """The first round warms up and is watched; the others are timed and looked at only when they are over."""
        if turn == 0:
            with entrant.peak.watching():
                result.first_round_seconds = round(entrant.play_round(ROUND_PATIENCE), 4)
        else:
            result.round_seconds.append(round(entrant.play_round(ROUND_PATIENCE), 4))
            result.others_cores.append(round(entrant.others, 3))
            result.status = "measured"
            entrant.peak.look()
        result.peak_memory_bytes = entrant.peak.bytes
        result.idle_processor_share = round(entrant.idle_share, 4)

    def _score_all(self) -> None:
        for contender in self._contenders:
            if entrant := self._entrants.get(contender.name):
                try:
                    self._results[contender.name].accuracy = entrant.score(ROUND_PATIENCE)
                except Failed as failure:
                    self._fail(contender, failure)

    def _fail(self, contender: Contender, failure: Failed) -> None:
        result = self._results[contender.name]
        result.status, result.why = "failed", str(failure)
        self._tell("failed", contender, str(failure))
        if entrant := self._entrants.pop(contender.name, None):
            entrant.kill()

    def _write(self, finished: bool) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        write_json(self.record_file, self._record(finished))

    def _record(self, finished: bool) -> dict[str, Any]:
        assert self._workload is not None
        return {
            "format": FORMAT,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "finished": finished,
            "machine": machine(self._plan.device),
            "code": code(),
            "workload": asdict(self._workload) | {"title": self._workload.title, "sentence": self._workload.sentence},
            "conditions": {
                "device": self._plan.device,
                "repeat": self._plan.repeat,
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
