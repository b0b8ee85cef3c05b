"""What a run folder and a comparison folder hold, as plain records; settings under dotted keys.

`fedgg.runfolder.read` makes them from folders, `fedgg.runfolder.archive_file` from an archive.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgg.errors import UserError
from fedgg.runfolder.damage import Fault, history_faults
from fedgg.runfolder.measure import ACCURACY, LOSS, Measure, metrics_in, recorded_measures
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
    def where(self) -> str:
        """Node, device and shard that it was last computed on, where it recorded them; else empty."""
        places = [event.get("where") for event in (self.versions or {}, *self.resumes)]
        place = next((place for place in reversed(places) if isinstance(place, dict)), {})
        words = {key: " ".join(str(value).split())[:80] for key, value in place.items()}
        node = f"{words.get('node', '')} ({words['ray_node']})" if "ray_node" in words else words.get("node", "")
        shard = f"shard {words['shard']}" if "shard" in words else ""
        return ", ".join(filter(None, (node.strip(), words.get("device", ""), shard)))

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

    @cached_property
    def metrics(self) -> tuple[Measure, ...]:
        """Its metrics on the test set, the primary one first."""
        return metrics_in(self.versions)

    @cached_property
    def measures(self) -> dict[str, Measure]:
        """Everything it can be compared by, by key: what at least one of its rounds has."""
        return recorded_measures(self.metrics, self.rounds)

    def defines(self, measure: Measure) -> bool:
        """Whether it has this metric, with the same direction and unit."""
        plain = replace(measure, where="test", over=None)
        return any(
            (metric.metric, metric.percent) == (plain.metric, plain.percent)
            and (measure.over == "spread" or metric.higher_is_better == plain.higher_is_better)
            for metric in (*self.metrics, LOSS)
        )

    def scores(self, measure: Measure) -> tuple[Ints, Floats]:
        """The rounds that have a value of the measure, and these values."""
        if measure not in self._scores:
            pairs = [(line["round"], measure.at(line)) for line in self.rounds] if self.defines(measure) else []
            known = [(number, value) for number, value in pairs if value is not None]
            rounds = np.array([number for number, _ in known], dtype=np.int64)
            self._scores[measure] = (rounds, np.array([value for _, value in known], dtype=np.float64))
        return self._scores[measure]

    @cached_property
    def _scores(self) -> dict[Measure, tuple[Ints, Floats]]:
        return {}

    def accuracy(self) -> tuple[Ints, Floats]:
        """The evaluated rounds and their test accuracies."""
        return self.scores(ACCURACY)

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

    def megabytes(self, ways: tuple[str, ...] = ("up", "down"), measure: Measure = ACCURACY) -> Floats:
        """Sent and received by all clients together up to each round with a value, in MB of 10^6 bytes."""
        per_round = [sum(int(line.get(f"bytes_{way}") or 0) for way in ways) for line in self.rounds]
        return self._until(np.array(per_round, dtype=np.float64), measure) / BYTES_PER_MEGABYTE

    def seconds_until(self, measure: Measure) -> Floats:
        """The time from the start of the first round to each round with a value."""
        per_round = [
            sum(line["seconds"].values()) if isinstance(line.get("seconds"), dict) else 0.0 for line in self.rounds
        ]
        return self._until(np.array(per_round, dtype=np.float64), measure)

    def _until(self, per_round: Floats, measure: Measure) -> Floats:
        with_value = np.isin([line["round"] for line in self.rounds], self.scores(measure)[0])
        so_far: Floats = np.cumsum(per_round)[with_value]
        return so_far

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
    waiting: dict[tuple[str, int], str] = field(default_factory=dict)  # by (label, seed): what a run waits for

    @property
    def records(self) -> list[RunRecord]:
        """All runs that have started, in the order of labels and seeds."""
        return [record for by_seed in self.runs.values() for record in by_seed.values()]

    @cached_property
    def measures(self) -> dict[str, Measure]:
        """Everything its runs can be compared by, by key; as the reference defines it, where runs differ in that."""
        measures: dict[str, Measure] = {}
        for run in (*self.runs[self.reference].values(), *self.records):
            measures = measures | {key: one for key, one in run.measures.items() if key not in measures}
        return measures

    @property
    def primary(self) -> Measure:
        """The first metric of the reference that all runs have; where they share none, its first.

        On the test set; by personal models where no run has a global one; by the models that clients use where some
        runs have a global model and others have none.
        """
        runs = [*self.runs[self.reference].values(), *self.records]
        metrics = runs[0].metrics if runs else (ACCURACY,)
        metric = next((metric for metric in metrics if all(run.defines(metric) for run in runs)), metrics[0])
        personal, of_clients = replace(metric, where="personal"), replace(metric, where="client")
        if personal.key not in self.measures:
            return metric
        if metric.key not in self.measures:
            return personal
        with_rounds = [run for run in self.records if run.rounds]
        have_both = all(metric.key in run.measures for run in with_rounds)
        have_clients = all(any(of_clients.at(line) is not None for line in run.rounds) for run in with_rounds)
        return of_clients if not have_both and have_clients else metric

    def measure(self, name: str | None = None) -> Measure:
        """The measure of this name, or the primary one; UserError if none of the runs has recorded it."""
        if name is None or name == self.primary.key:
            return self.primary
        if name not in self.measures:
            raise UserError(unknown_measure(name, self.measures))
        return self.measures[name]

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


def unknown_measure(name: str, measures: Iterable[str]) -> str:
    """A sentence on a measure that the runs do not have, with the way to have it."""
    known = list(measures)
    if not known:
        return "the runs have recorded no score"
    if f"test_{name}" in known:
        return f"the runs do not record {name!r}: did you mean 'test_{name}'?"
    if longer := [key for key in known if key.startswith(name)]:
        return f"the runs do not record {name!r}: did you mean {longer[0]!r}?"
    metric = name.removeprefix("test_").removeprefix("holdout_")
    is_recorded = any(key.endswith(f"_{metric}") for key in known)  # elsewhere: of the personal models, for instance
    of_others = "" if name == metric or is_recorded else f", or let runs record it (--set metrics=accuracy,{metric})"
    return f"the runs do not record {name!r}: choose from {', '.join(known)}{of_others}"


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


def unseen_in(partition: dict[str, Any]) -> list[int]:
    """The clients that never train, in a partition.json; of earlier versions none are named."""
    unseen, clients = partition.get("unseen"), partition.get("counts")
    if not isinstance(unseen, list) or not isinstance(clients, list):
        return []
    return [client for client in unseen if type(client) is int and 0 <= client < len(clients)]


def names_in(partition: dict[str, Any]) -> tuple[str, ...] | None:
    """The names of the clients in a partition.json, where it has one for each client."""
    names, clients = partition.get("names"), partition.get("counts") or partition.get("sizes")
    if not isinstance(names, list) or not isinstance(clients, list) or len(names) != len(clients):
        return None
    return tuple(str(name) for name in names)
