"""Everybody in turns, round by round (A B C, A B C, ...), so that noise hits all alike; and the record of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from fedgg.bench.contenders import REFERENCE, Contender, Device
from fedgg.bench.entrant import Entrant, Failed
from fedgg.bench.machine import code, load, machine
from fedgg.bench.processes import memory_kind, psutil
from fedgg.bench.workload import Described, Source, write_workload
from fedgg.errors import UserError
from fedgg.lab.files import write_json, writing_to

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
