"""One contender at work: a process, spoken to line by line (the words are in `kit/bench_kit.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
import uuid
from pathlib import Path

from fedgg.bench import kit
from fedgg.bench.contenders import Contender
from fedgg.bench.processes import MARK, PATIENCE, Peak, busy_seconds, end_family, processor_seconds
from fedgg.files import open_log

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
