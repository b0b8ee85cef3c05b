"""The folder of a study: study.json lists the runs of every process that works or has worked in it.

A call adds its rows and seeds to those that are listed, under a lock. What is on disk stays listed; what is listed and
has not begun stays as long as any process that may begin it is alive. A label stands for one experiment with several
seeds.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fedgg.core.algorithm import Algorithm
from fedgg.data.dataset import Dataset
from fedgg.errors import UserError
from fedgg.files import check_folder, read_json, write_json, writing_to
from fedgg.lab.build import Examined
from fedgg.lab.config import Experiment
from fedgg.lab.federated_data import data_of
from fedgg.lab.name_resolution import build_algorithm
from fedgg.lab.preflight_checks import check_split, try_to_build
from fedgg.lab.run_processes import Job
from fedgg.lab.store import Store
from fedgg.runfolder.checksums import with_checksum, without_checksum
from fedgg.runfolder.locks import FOREVER, InUse, LockFile
from fedgg.runfolder.record_types import flat

FORMAT = 1
FILE = "study.json"
PROCESS = ".process-"  # begins the name of a file that a process at work has locked
LONGEST = 80  # name of a folder
PATIENCE = 60.0  # seconds; changing study.json takes milliseconds


@dataclass(frozen=True)
class Index:
    """The rows and seeds of one call."""

    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str


@dataclass
class Listing:
    """What study.json says. Rows may have different seeds."""

    runs: dict[str, dict[int, str]] = field(default_factory=dict)  # by label and seed: the run's folder
    seeds: list[int] = field(default_factory=list)  # of all rows, in the order to be shown
    reference: str = ""
    experiments: dict[str, str] = field(default_factory=dict)  # by label: identity of its experiment but for the seed
    commands: list[str] = field(default_factory=list)  # that were called, the latest last

    @classmethod
    def read(cls, folder: Path) -> Listing:
        """An empty one where there is none that can be read: runs are found on disk too."""
        try:
            content = without_checksum(read_json(folder / FILE))
            runs = {
                str(label): {int(seed): place for seed, place in content["runs"][label].items() if _is_inside(place)}
                for label in content["labels"]
            }
            experiments = content.get("experiments", {})
            commands = content.get("commands", [content["command"]] if "command" in content else [])
            return cls(
                runs,
                [int(seed) for seed in content["seeds"]],
                str(content["reference"]),
                {label: str(experiments[label]) for label in runs if label in experiments},
                [str(command) for command in commands],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "labels": list(self.runs),
            "seeds": self.seeds,
            "reference": self.reference,
            "runs": {
                label: {str(seed): place for seed, place in places.items()} for label, places in self.runs.items()
            },
            "experiments": self.experiments,
            **({"command": self.commands[-1]} if self.commands else {}),
            **({"commands": self.commands} if len(self.commands) > 1 else {}),
        }


@contextmanager
def listed(index: Index, folder: Path, jobs: Sequence[Job], command: str | None = None) -> Iterator[None]:
    """Add these runs to the folder's, once it is sure that all can be built and nothing there is another experiment."""
    if Store(folder).holds_a_run():
        raise UserError(f"{folder} holds a single run: choose another folder (--out, or out= in Python)")
    for job in jobs:
        Store(job.folder).refuse_another(job.experiment)
    by_label = {job.experiment.name: job for job in reversed(jobs)}
    _merged(Listing.read(folder), index, by_label, folder, keep_all=False)  # refuse before anything is built
    build_on_trial(jobs)
    with _at_work(folder) as process:
        with _changing(folder) as lock:
            for job in jobs:
                check_folder(job.folder, folder)
            before = Listing.read(folder)
            listing = _merged(before, index, by_label, folder, keep_all=_others_at_work(process))
            if command is not None:
                listing.commands = [*(known for known in before.commands if known != command), command]
            _write(folder, lock, before, listing)
        yield
        with _changing(folder) as lock:  # a file that was lost meanwhile is written again
            before = Listing.read(folder)
            if any(not set(index.seeds) <= before.runs.get(label, {}).keys() for label in index.labels):
                _write(folder, lock, before, _merged(before, index, by_label, folder, keep_all=True))


@contextmanager
def _changing(folder: Path) -> Iterator[LockFile]:
    """No other process changes study.json within the block."""
    lock = LockFile(folder / "study.lock")
    with writing_to(folder):
        if not lock.acquire(PATIENCE):
            raise InUse(f"another process has held {lock.path} for {PATIENCE:.0f} s: stop it, then call this again")
        try:
            yield lock
        finally:
            lock.release()


def _write(folder: Path, lock: LockFile, before: Listing, listing: Listing) -> None:
    lock.check()
    if listing.content() != before.content():
        write_json(folder / FILE, with_checksum(listing.content()))


def _merged(before: Listing, index: Index, by_label: Mapping[str, Job], folder: Path, *, keep_all: bool) -> Listing:
    """`keep_all`: also what has not begun, since another process may begin it."""
    runs: dict[str, dict[int, str]] = {}
    for label, by_seed in before.runs.items():
        remaining = {seed: place for seed, place in by_seed.items() if keep_all or _has_begun(folder / place)}
        if remaining:
            runs[label] = remaining
    for label, seed, place in _unlisted(
        folder, {place for places in before.runs.values() for place in places.values()}
    ):
        runs.setdefault(label, {})[seed] = place
    identities = {label: before.experiments[label] for label in runs if label in before.experiments}
    for label in index.labels:
        identities[label] = _identity_of(label, by_label[label], runs.get(label, {}), identities.get(label), folder)
        runs[label] = runs.get(label, {}) | {seed: place_of(label, seed) for seed in index.seeds}
    check_folders(list(runs))
    if set(index.labels) >= runs.keys():
        runs = {label: runs[label] for label in index.labels}
    seeds = {seed for by_seed in runs.values() for seed in by_seed}
    in_order = list(index.seeds) if seeds <= set(index.seeds) else sorted(seeds)
    # A single row has nothing to be measured against, so its call does not decide what the others are.
    keeps_reference = len(index.labels) == 1 and before.reference in runs
    return Listing(
        {label: {seed: places[seed] for seed in in_order if seed in places} for label, places in runs.items()},
        in_order,
        before.reference if keeps_reference else index.reference,
        {label: identities[label] for label in runs if label in identities},
        before.commands,
    )


def _identity_of(label: str, job: Job, runs: Mapping[int, str], known: str | None, folder: Path) -> str:
    """The label's identity, if it is that of the runs it has; for a folder of an older version they are asked."""
    identity = _identity(job)
    there = next((Store(folder / place) for place in runs.values() if _has_begun(folder / place)), None)
    if known is None and there is not None and job.given.data is None:
        known = _hashed(there.experiment())
    begun_as_fused = _identity(replace(job, experiment=_fused(job.experiment)))  # which was called `loop` before
    if known in (None, identity, begun_as_fused):
        return known or identity
    here = job.experiment.changed({"seed": there.experiment().seed}) if there else job.experiment
    differences = (there.experiment().differences(here) if there else "") or "other data or settings"
    raise UserError(
        f"{folder} has the row {label!r} already, as another experiment ({differences}): give this one another label, "
        f"or choose another folder (--out, or out= in Python)"
    )


def _fused(experiment: Experiment) -> Experiment:
    return experiment.changed({"engine.name": "fused"}) if experiment.engine.name == "loop" else experiment


def _identity(job: Job) -> str:
    """Of an experiment without its seed, and of the data that were handed in."""
    data = job.given.data
    return _hashed(job.experiment, data.fingerprint if isinstance(data, Dataset) else "")


def _hashed(experiment: Experiment, data: str = "") -> str:
    identity = experiment.model_copy(update={"seed": 0}).trajectory()
    return hashlib.sha256(f"{identity}{data}".encode()).hexdigest()[:16] if data else identity[:16]


def _has_begun(folder: Path) -> bool:
    """Whether it has played a round, or ended before it could."""
    history = folder / "rounds.jsonl"
    played = history.is_file() and history.stat().st_size > 0
    return (folder / "config.toml").exists() and (played or (folder / "summary.json").exists())


def _unlisted(folder: Path, listed_places: set[str]) -> Iterator[tuple[str, int, str]]:
    """Runs that lie where a study puts them and that study.json does not list: label, seed and place."""
    for config in sorted(folder.glob("*/seed-*/config.toml")):
        place = config.parent.relative_to(folder).as_posix()
        if place in listed_places or not _has_begun(config.parent):
            continue
        with suppress(UserError):
            experiment = Store(config.parent).experiment()
            if experiment.name and place == place_of(experiment.name, experiment.seed):
                yield experiment.name, experiment.seed, place


def _is_inside(place: Any) -> bool:
    return isinstance(place, str) and not PurePosixPath(place).is_absolute() and ".." not in PurePosixPath(place).parts


# Which processes are at work -----------------------------------------------------------------------------------------


@contextmanager
def _at_work(folder: Path) -> Iterator[Path]:
    """Other processes see that this one is alive, by a locked file of its own; a kill releases it."""
    mine = LockFile(folder / f"{PROCESS}{secrets.token_hex(8)}")
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        mine.acquire(FOREVER)
    try:
        yield mine.path
    finally:
        with suppress(OSError):  # the folder may be gone
            mine.path.unlink()
        mine.release()


def _others_at_work(process: Path) -> bool:
    """Whether another process than this one is; files of those that are gone are removed."""
    alive = False
    for path in process.parent.glob(f"{PROCESS}*"):
        lock = LockFile(path)
        if path == process:
            continue
        if lock.acquire(timeout=0):
            path.unlink(missing_ok=True)
            lock.release()
        else:
            alive = True
    return alive


# Names of folders ----------------------------------------------------------------------------------------------------


def check_folders(labels: Sequence[str]) -> None:
    folders = [slug(label) for label in labels]
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise UserError(f"two variants would share the folder {twice!r}: give them different labels")


def slug(label: str) -> str:
    """A folder name for any label; what a folder's name cannot say, or is too long to, tells a few digits apart."""
    plain = re.sub(r"[^a-z0-9.=]+", "-", label.lower()).strip("-.")
    says_it = label.isascii() and "+" not in label and len(plain) <= LONGEST
    digits = "" if says_it else hashlib.sha256(label.encode()).hexdigest()[:6]
    return "-".join(filter(None, (plain[:LONGEST].strip("-."), digits))) or "variant"


def place_of(label: str, seed: int) -> str:
    return f"{slug(label)}/seed-{seed}"


_BUILT = ("data", "split", "model", "privacy", "robust", "attack")  # sections that decide whether a run can be built


def build_on_trial(jobs: Sequence[Job]) -> None:
    """Build one run of each kind on a CPU, without copying its data, and draw the split with each of its other seeds.

    With a single run nothing is done: the run itself comes first.
    """
    kinds: dict[Hashable, dict[int, Job]] = {}
    for job in jobs:
        if not Store(job.folder).rounds():  # else it was built before
            kinds.setdefault(_kind(job), {}).setdefault(job.experiment.seed, job)
    if sum(map(len, kinds.values())) < 2:
        return
    by_data: dict[Hashable, list[list[Job]]] = {}
    for by_seed in kinds.values():
        of_kind = list(by_seed.values())
        by_data.setdefault(of_kind[0].experiment.data.data_set, []).append(of_kind)
    for sharing in by_data.values():
        first = sharing[0][0]
        try:
            dataset = data_of(first.experiment, first.given.data, first.data_folder)
        except UserError:
            if len(kinds) > 1:
                raise
            return  # the data may be on the nodes of a cluster only; where they are nowhere, the first run says so
        for of_kind in sharing:
            _build_one_and_split_all(dataset, of_kind)


def _build_one_and_split_all(dataset: Dataset, jobs: Sequence[Job]) -> None:
    """`jobs`: of one kind, one for each seed."""
    examined: Examined | None = None
    for job in jobs:
        try:
            if examined is None:
                given = job.given
                examined = try_to_build(job.experiment, dataset, given.model, given.algorithm, given.objective)
            else:
                check_split(job.experiment, _algorithm_of(job), dataset, examined)
        except UserError as error:
            raise UserError(f"{job.name}: {error}") from error


def _algorithm_of(job: Job) -> Algorithm:
    chosen = job.experiment.algorithm
    return job.given.algorithm or build_algorithm(chosen.name, chosen.settings)


def _kind(job: Job) -> Hashable:
    """Jobs that are alike in this can be built, or not, alike."""
    settings = flat(job.experiment.model_dump(include={*_BUILT}))
    algorithm, local = _algorithm_of(job), job.experiment.local
    work = algorithm.work(local.work())
    return (
        tuple(sorted((key, repr(value)) for key, value in settings.items())),
        (work.batch, work.drop_last, work.fixed_steps),
        (local.small_clients, algorithm.needs_representation, algorithm.needs_classes),
        repr(algorithm) if job.experiment.privacy is not None else "",  # whether its clients keep state decides epsilon
    )
