"""A benchmark: one workload for all contenders, rounds timed in turns (A B C, A B C, ...), results in bench.json.

The workload is one file: images, the split over clients, initial weights, settings of local training. Taking turns
spreads noise of the machine over all contenders.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedgg.bench.bench_kit import MODELS, Settings
from fedgg.bench.contender_process import (
    ContenderFailed,
    ContenderProcess,
    memory_kind,
    psutil,
)
from fedgg.bench.contenders import REFERENCE, Contender, Device
from fedgg.bench.results import FORMAT, code, load_average, machine
from fedgg.core.random_choices import stream, torch_stream
from fedgg.data.batch_preparation import scaling
from fedgg.data.catalog import CIFAR10, data_folder
from fedgg.data.dataset import Dataset, load
from fedgg.data.readers import find_copies
from fedgg.data.user_arrays import from_arrays
from fedgg.errors import UserError
from fedgg.files import replacing, write_json, writing_to

Source = Literal["auto", "cifar10", "stand-in"]
BenchModel = Literal["cnn", "resnet20"]
TITLES = {"cnn": "small CNN", "resnet20": "ResNet-20 with GroupNorm"}
PARTS = {"cnn": 1, "resnet20": 5}  # one image in so many: a round of a larger model takes a quarter of a minute then

# Images per client: drawn once, uniformly from 2,000 to 7,000, and one changed so that the sum is 50,000.
SIZES = (6725, 5126, 5819, 6486, 4892, 5879, 6169, 3126, 2277, 3501)
TEST = 10_000
CLASSES = 10
SETTINGS = Settings(epochs=1, batch=64, lr=0.01, momentum=0.9)
QUICK = 20  # --quick uses one image in QUICK, and smaller batches, for enough steps to learn
QUICK_SETTINGS = Settings(epochs=1, batch=8, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class WorkloadDescription:
    """The workload, for the table and for `bench.json`."""

    source: str  # cifar10 or stand-in
    stand_in: bool
    quick: bool
    sizes: tuple[int, ...]
    steps: int  # of all clients, in a round
    classes: int
    settings: dict[str, Any]

    @property
    def title(self) -> str:
        images = "generated images (a stand-in: not CIFAR-10)" if self.stand_in else "CIFAR-10"
        return f"{images}{', a quick look: figures mean little' if self.quick else ''}"

    @property
    def sentence(self) -> str:
        s = self.settings
        return (
            f"FedAvg, {len(self.sizes)} clients of {min(self.sizes):,} to {max(self.sizes):,} images, "
            f"{TITLES[s.get('model', 'cnn')]}, "
            f"{s['epochs']} local epoch, batch {s['batch']}, SGD lr {s['lr']} momentum {s['momentum']}: "
            f"{self.steps} steps a round"
        )


def write_workload(
    file: Path,
    source: Source = "auto",
    folder: Path | None = None,
    quick: bool = False,
    model: BenchModel = "cnn",
) -> WorkloadDescription:
    """Write the file; `auto` is CIFAR-10 if it is on this machine, otherwise generated images."""
    root = data_folder(folder)
    real = source == "cifar10" or (source == "auto" and bool(find_copies(root, CIFAR10)))
    share = PARTS[model] * (QUICK if quick else 1)
    sizes = tuple(size // share for size in SIZES)
    settings = replace(QUICK_SETTINGS if quick else SETTINGS, model=model)
    dataset = load("cifar10", root) if real else stand_in(sum(sizes), TEST // share)
    members = stream(0, "bench split").permutation(len(dataset.x_train))[: sum(sizes)]
    standard = scaling("standard", dataset, torch.float32)
    with torch_stream(0, "bench model"):
        start = MODELS[model]().state_dict()
    with replacing(file) as sink:
        np.savez(
            sink,
            x_train=dataset.x_train.numpy(),
            y_train=dataset.y_train.numpy(),
            x_test=dataset.x_test[: TEST // share].numpy(),
            y_test=dataset.y_test[: TEST // share].numpy(),
            shift=standard.shift.numpy(),
            scale=standard.scale.numpy(),
            sizes=np.array(sizes),
            members=members,
            settings=np.array(json.dumps(asdict(settings))),
            **{f"start/{name}": value.numpy() for name, value in start.items()},
        )
    steps = settings.epochs * sum(-(-size // settings.batch) for size in sizes)
    name = "cifar10" if real else "stand-in"
    return WorkloadDescription(name, not real, quick, sizes, steps, CLASSES, asdict(settings))


def stand_in(train: int, test: int) -> Dataset:
    """Images of CIFAR-10's shape that can be learned: a coarse pattern for each class, shifted, with noise."""
    draw = stream(0, "bench stand-in")
    patterns = draw.normal(size=(CLASSES, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)

    def images(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        labels = draw.integers(0, CLASSES, count)
        x = np.empty((count, 3, 32, 32), np.uint8)
        for part in np.array_split(np.arange(count), max(count // 1000, 1)):  # in parts, to limit memory
            noise = draw.normal(size=(len(part), 3, 32, 32))
            moved = np.stack([np.roll(patterns[labels[i]], draw.integers(-3, 4, 2), (1, 2)) for i in part])
            x[part] = np.clip(128 + 24 * moved + 40 * noise, 0, 255).astype(np.uint8)
        return x, labels

    (x_train, y_train), (x_test, y_test) = images(train), images(test)
    return from_arrays(x_train, y_train, x_test, y_test, name="stand-in", classes=CLASSES)


SCORED_AFTER = 3  # rounds: enough to see whether a contender learns
START_TIMEOUT, ROUND_TIMEOUT = 300.0, 1800.0  # seconds

Report = Callable[[str, Contender, str], None]  # event ("starting", "round", "failed", "absent"), contender, text


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
    model: BenchModel = "cnn"


class BenchDriver:
    """One measurement. `run` may be interrupted: the turns that were finished are on disk."""

    def __init__(self, contenders: Sequence[Contender], options: BenchOptions, out: Path, report: Report):
        psutil()  # fail before anything is started
        if options.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch finds no CUDA device on this machine; use --device cpu")
        self._contenders, self._options, self._out, self._report = contenders, options, out, report
        self._results = {c.name: ContenderResult(c.name, c.label, c.kind, c.threads) for c in contenders}
        self._processes: dict[str, ContenderProcess] = {}
        self._before = load_average()
        self._workload: WorkloadDescription | None = None

    @property
    def record_file(self) -> Path:
        return self._out / "bench.json"

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="fedgg-bench-") as scratch, writing_to(self._out):
            file = Path(scratch) / "workload.npz"
            options = self._options
            self._workload = write_workload(file, options.source, options.data_folder, options.quick, options.model)
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
            self._report("absent", contender, contender.absent)
            return
        self._report("starting", contender, "")
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
            self._report("round", contender, "warming up" if turn == 0 else f"turn {turn} of {self._options.repeat}")
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
        self._report("failed", contender, str(failure))
        if process := self._processes.pop(contender.name, None):
            process.kill()

    def _write(self, finished: bool) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        write_json(self.record_file, self._record(finished))

    def _record(self, finished: bool) -> dict[str, Any]:
        assert self._workload is not None
        return {
            "format": FORMAT,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
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
