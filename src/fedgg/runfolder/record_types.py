"""What a run folder and a comparison folder hold, as plain records; settings under dotted keys.

`fedgg.runfolder.read` makes them from folders, `fedgg.runfolder.archive_file` from an archive.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgg.runfolder.damage import Fault, history_faults
from fedgg.runfolder.validation import is_number

PER_RUN = ("name", "seed")  # keys that differ between runs of the same row


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    dotted: dict[str, Any] = {}
    for key, value in content.items():
        dotted |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return dotted


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in dotted.items():
        *path, last = key.split(".")
        place: Any = content
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):  # a value and a table of the same name: not a setting of fedgg
                place, last = content, key
                break
        place[last] = value
    return content


def common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that all of them have with the same value."""
    if not settings:
        return {}
    first, *others = settings
    return {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}


def differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys with different values, or that only some have, in the order of their first appearance."""
    all_settings = list(settings)
    shared = common(all_settings)
    keys = dict.fromkeys(key for one in all_settings for key in one)
    return [key for key in keys if key not in shared and key not in PER_RUN]


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

UNFINISHED = "unfinished"  # running, or killed: its folder does not say which
OLD_ACCOUNTANT = "rdp"  # of rounds that have an epsilon and name no accountant: docs/run-folder.md
BYTES_PER_MEGABYTE = 1_000_000


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run: the content of its folder."""

    path: Path
    config: dict[str, Any]
    rounds: list[dict[str, Any]]
    partition: dict[str, Any] | None
    summary: dict[str, Any] | None
    versions: dict[str, Any] | None = None
    resumes: tuple[dict[str, Any], ...] = ()  # the lines of resumes.jsonl
    processes: tuple[dict[str, Any], ...] = ()  # of a federation of processes: which of them ended, after which round
    file_faults: tuple[Fault, ...] = ()  # found while its files were read

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """Everything wrong with a folder that can still be shown."""
        return (*self.file_faults, *history_faults(self.rounds, self.summary))

    @cached_property
    def status(self) -> str:
        """The status in the summary ("finished", "diverged", "spent", "stopped_early"); "unfinished" without one.

        A run with a fault that damages its numbers is "damaged" instead, unless it diverged.
        """
        status = UNFINISHED if self.summary is None else str(self.summary.get("status", UNFINISHED))
        return "damaged" if status != "diverged" and self.damaged else status

    @property
    def damaged(self) -> bool:
        """Whether its numbers cannot be trusted to be those of a whole run."""
        return any(fault.damages for fault in self.faults)

    @property
    def complete(self) -> bool:
        """Whether it has all its rounds, or all that its privacy budget or early stopping allows."""
        return self.status in ("finished", "spent", "stopped_early")

    @property
    def sound(self) -> bool:
        """Whether its rounds so far can be averaged with those of other runs."""
        return self.status not in ("diverged", "damaged")

    @property
    def client_names(self) -> tuple[str, ...] | None:
        """The names of the clients, where the data have them."""
        return names_in(self.partition or {})

    def split_title(self) -> str:
        """How the data were split, in a few words."""
        source, split = self.config.get("data", {}).get("source", ""), split_words(self.config.get("split", {}))
        return f"{source}: {split}, seed {self.config.get('seed')}"

    def accuracy(self) -> tuple[Ints, Floats]:
        """The evaluated rounds and their test accuracies."""
        evaluated = [line for line in self.rounds if _evaluated(line)]
        rounds = np.array([line["round"] for line in evaluated], dtype=np.int64)
        return rounds, np.array([line["test_accuracy"] for line in evaluated], dtype=np.float64)

    @property
    def seconds(self) -> float:
        """The time of its rounds, training and evaluation."""
        by_round = [sum(line["seconds"].values()) for line in self.rounds if isinstance(line.get("seconds"), dict)]
        return float(sum(by_round)) if by_round else float((self.summary or {}).get("seconds") or 0.0)

    @property
    def epsilon(self) -> float | None:
        """The privacy spent by the end or so far; infinite without noise, None where the run is not private."""
        epsilons = [place["epsilon"] for place in self._privacy()]
        return max((float(one) if is_number(one) else math.inf for one in epsilons), default=None)

    @property
    def delta(self) -> float | None:
        """The delta that `epsilon` holds for."""
        return next((float(place["delta"]) for place in self._privacy() if is_number(place.get("delta"))), None)

    @property
    def accountant(self) -> str | None:
        """The accountant that bounds `epsilon`; None where the run is not private, or epsilon is infinite."""
        places = [place for place in self._privacy() if is_number(place["epsilon"])]
        return str(places[-1].get("accountant", OLD_ACCOUNTANT)) if places else None

    def _privacy(self) -> list[dict[str, Any]]:
        """The last round and the summary, as far as they have an epsilon: rounds may be missing at the end."""
        return [place for place in (*self.rounds[-1:], self.summary or {}) if "epsilon" in place]

    def megabytes(self, ways: tuple[str, ...] = ("up", "down")) -> Floats:
        """Sent and received by all clients together up to each evaluated round, in MB of 10^6 bytes."""
        per_round = [sum(int(line.get(f"bytes_{way}") or 0) for way in ways) for line in self.rounds]
        so_far = np.cumsum(np.array(per_round, dtype=np.float64)) / BYTES_PER_MEGABYTE
        at_evaluation: Floats = so_far[np.array([_evaluated(line) for line in self.rounds], dtype=bool)]
        return at_evaluation

    def diagnostic(self, name: str) -> tuple[Ints, Floats]:
        """The rounds that have this diagnostic of the algorithm, and its mean over clients."""
        lines = [line for line in self.rounds if is_number((line.get("readings") or {}).get(name))]
        rounds = np.array([line["round"] for line in lines], dtype=np.int64)
        return rounds, np.array([line["readings"][name] for line in lines], dtype=np.float64)

    def numbers(self, key: str) -> tuple[Ints, Floats]:
        """The rounds that have a number under `key` ("train_loss", "holdout_accuracy", ...), and those numbers."""
        lines = [line for line in self.rounds if is_number(line.get(key))]
        rounds = np.array([line["round"] for line in lines], dtype=np.int64)
        return rounds, np.array([line[key] for line in lines], dtype=np.float64)


@dataclass(frozen=True)
class StudyPlan:
    """The content of study.json: rows, seeds, and the folder of each run; a row may lack some of the seeds."""

    path: Path
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    places: dict[str, dict[int, Path]]

    @property
    def planned(self) -> dict[str, tuple[int, ...]]:
        """The seeds of each row."""
        return {label: tuple(by_seed) for label, by_seed in self.places.items()}


@dataclass(frozen=True, eq=False)
class StudyRecord:
    """A comparison or sweep: the runs that have started, by label and seed.

    Several calls may have added to it, so rows may have different seeds; `seeds` are all of them.
    """

    path: Path
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    runs: dict[str, dict[int, RunRecord]]
    unreadable: tuple[tuple[str, int], ...] = ()  # the (label, seed) pairs that have started but cannot be read
    planned: dict[str, tuple[int, ...]] | None = None  # the seeds of each label; None: all of `seeds`

    @property
    def records(self) -> list[RunRecord]:
        """All runs that have started, in the order of labels and seeds."""
        return [record for by_seed in self.runs.values() for record in by_seed.values()]

    def seeds_of(self, label: str) -> tuple[int, ...]:
        """The seeds of this row, finished or not."""
        return self.seeds if self.planned is None else self.planned[label]

    @property
    def size(self) -> int:
        """The number of runs, including those that have not started."""
        return sum(len(self.seeds_of(label)) for label in self.labels)

    @property
    def missing(self) -> list[tuple[str, int]]:
        """The (label, seed) pairs that have no run folder yet, or none that can be read."""
        return [(label, seed) for label in self.labels for seed in self.seeds_of(label) if seed not in self.runs[label]]

    def diverged(self, label: str) -> list[int]:
        """The seeds whose run diverged."""
        return self._seeds_with(label, "diverged")

    def damaged(self, label: str) -> list[int]:
        """The seeds whose run is damaged or cannot be read."""
        unreadable = [seed for other, seed in self.unreadable if other == label]
        return sorted([*self._seeds_with(label, "damaged"), *unreadable])

    def _seeds_with(self, label: str, status: str) -> list[int]:
        return [seed for seed, run in self.runs[label].items() if run.status == status]


# Of a split, the setting that says most beside its name, and its default.
_MAIN_SETTINGS: dict[str, tuple[str, Any]] = {
    "k_labels": ("labels_per_client", 2),
    "shards": ("shards_per_client", 2),
    "given": ("choose", ""),
}


def split_words(split: Mapping[str, Any], swept: Collection[str] = ()) -> str:
    """A section [split] in a few words, as "dirichlet 0.1"; without the values of the settings in `swept`."""
    scheme = str(split.get("scheme", "split"))
    key, default = _MAIN_SETTINGS.get(scheme, ("", ""))
    if scheme.startswith("dirichlet") or scheme == "quantity":
        by_formula = scheme == "quantity" and split.get("sizes", "dirichlet") != "dirichlet"
        key = "sizes" if by_formula else "beta"
    value = "" if f"split.{key}" in swept else split.get(key, default)
    words = f"{scheme} {_shown(value)}".rstrip()
    for name, unit in (("noise", ""), ("rotation", " degrees")):
        strength = split.get(f"feature_{name}")
        if strength and f"split.feature_{name}" not in swept:
            words += f", {name} {_shown(strength)}{unit}"
    return words


def _shown(value: Any) -> str:
    return f"{value:g}" if is_number(value) else str(value)


def names_in(partition: dict[str, Any]) -> tuple[str, ...] | None:
    """The names of the clients in a partition.json, where it has one for each client."""
    names, clients = partition.get("names"), partition.get("counts") or partition.get("sizes")
    if not isinstance(names, list) or not isinstance(clients, list) or len(names) != len(clients):
        return None
    return tuple(str(name) for name in names)


def _evaluated(line: dict[str, Any]) -> bool:
    return is_number(line.get("test_accuracy"))
