"""Damaged run folders: no number changes without a word, in the report or after a resume, no traceback, no wait."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoint_timing import written_at_once
from damage import damage_one_file
from observers import Callbacks
from odd import Hang, patience

from fedgg.analysis.chart_data import run_columns
from fedgg.analysis.collect import RunCollection
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.run_result import Run
from fedgg.lab.run_session import Session
from fedgg.lab.runner import run
from fedgg.lab.store import Store
from fedgg.runfolder.record_types import RunRecord

ROUNDS, STOPPED = 6, 4
SECONDS = 60.0  # nothing here takes one


class Stop(Exception):
    pass


@dataclass(frozen=True)
class Reference:
    """An undamaged run folder, what the report shows of it, and what its run ends with."""

    folder: Path
    shown: dict[str, Any]
    settled: int  # rounds that a checkpoint or a summary covers
    ended: dict[str, Any]


def experiment(checkpoint_every: int, memory_limit_mb: int) -> Experiment:
    return Experiment(
        rounds=ROUNDS,
        seed=3,
        data={"holdout": 0.2},
        split={"clients": 3, "beta": 0.5},
        model={"name": "linear"},
        algorithm={"name": "scaffold"},
        local={"epochs": 1, "batch": 64},
        server={"checkpoint_every": checkpoint_every, "memory_limit_mb": memory_limit_mb},
        attack={"kind": "sign_flip", "clients": 1} if checkpoint_every == 1 else None,
    )


def _stopped(wish: Experiment, folder: Path, after: int) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["round"] == after:
            raise Stop

    with pytest.MonkeyPatch.context() as patched, written_at_once():
        patched.setattr(Session, "keep", lambda session: None)  # as kill -9 leaves it
        with pytest.raises(Stop):
            run(wish, out=folder, observer=Callbacks(round=stop))


def _reference(folder: Path, checkpoint_every: int, memory_limit_mb: int, *, finished: bool) -> Reference:
    wish = experiment(checkpoint_every, memory_limit_mb)
    straight = run(wish)
    if finished:
        run(wish.changed({"rounds": STOPPED}), out=folder)
        run(wish, out=folder)
    else:
        _stopped(wish, folder, 2)
        _stopped(wish, folder, STOPPED + 1 if checkpoint_every > 1 else STOPPED)
    record, problems = looked(folder)
    assert record is not None
    assert not problems
    return Reference(folder, shown(record), ROUNDS if finished else STOPPED, ended(straight))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    above = tmp_path_factory.mktemp("references")
    return [
        _reference(above / "finished", 1, 0, finished=True),
        _reference(above / "unfinished", 1, 512, finished=False),
        _reference(above / "between-checkpoints", 2, 0, finished=False),
    ]


def looked(folder: Path) -> tuple[RunRecord | None, list[str]]:
    """As the report reads it."""
    collection = RunCollection([folder])
    collection.refresh()
    records = [record for group in collection.groups for by in group.study.runs.values() for record in by.values()]
    return next(iter(records), None), [f"{problem.what}: {problem.why}" for problem in collection.problems]


def shown(record: RunRecord) -> dict[str, Any]:
    """Every number that the page has of a run."""
    data = run_columns(record)
    data |= {
        "config": record.config,
        "summary": record.summary,
        "versions": record.versions,
        "counts": record.partition,
    }
    del data["path"], data["faults"]
    return json.loads(json.dumps(data))  # type: ignore[no-any-return]


def ended(done: Run) -> dict[str, Any]:
    """What a run ends with, but for the time it took."""
    rounds = [{key: value for key, value in record.items() if key != "seconds"} for record in done.rounds]
    summary = {key: value for key, value in done.summary.items() if key != "seconds"}
    weights = {name: values.tolist() for name, values in done.weights.items()}
    return {"rounds": rounds, "summary": summary, "weights": weights}


def silent_in_the_report(folder: Path, reference: Reference, changed: str) -> str | None:
    """What the report shows otherwise without a word."""
    record, problems = looked(folder)
    for problem in problems:
        assert "\n" not in problem
    if record is None:
        return None if problems else "neither shown nor named"
    if not record.sound:
        return None if any("excluded from the averages" in problem for problem in problems) else "excluded, not named"
    data, expected = shown(record), dict(reference.shown)
    if changed == "summary.json" and data["status"] == "unfinished":
        data |= {"summary": expected["summary"], "status": expected["status"]}  # a run that is to be resumed
    if not problems and len(data["round"]) >= reference.settled:
        data, expected = _as_far_as(data, expected), _as_far_as(expected, data)  # as if killed earlier
    different = [key for key in expected if data[key] != expected[key]]
    unnamed = [key for key in different if not any(_file_of(key) in problem for problem in problems)]
    return f"{', '.join(unnamed)} changed; named: {problems}" if unnamed else None


def _as_far_as(data: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The same for the rounds that the other one has."""
    rounds = len(other["round"])

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(inner) for key, inner in value.items()}
        return value[:rounds] if isinstance(value, list) and len(value) == len(data["round"]) else value

    fixed = ("config", "summary", "versions", "counts", "resumes", "clients")
    return {key: value if key in fixed else cut(value) for key, value in data.items() if key != "clients"}


def _file_of(key: str) -> str:
    files = {"versions": "versions.json", "summary": "summary.json", "status": "summary.json", "why": "summary.json",
             "resumes": "resumes.jsonl", "counts": "partition.json", "split": "partition.json"}  # fmt: skip
    return files.get(key, "\0")


def silent_in_a_resume(folder: Path, reference: Reference) -> str | None:
    """What a resumed run ends with otherwise; being refused in one line is fine."""
    notices: list[str] = []
    started: list[int] = []
    times = dict(zip(reference.shown["round"], reference.shown["seconds"], strict=True))
    observer = Callbacks(started=lambda done, of: started.append(done), notice=notices.append)
    try:
        done = run(Store(folder).experiment(), out=folder, observer=observer)
    except UserError as error:
        line = str(error)
        return None if str(folder) in line and "\n" not in line else f"refused without its name: {line}"
    found = ended(done)
    different = [key for key, value in reference.ended.items() if found[key] != value]
    if different:
        return f"{', '.join(different)} changed by a resume; notices: {notices}"
    record, problems = looked(folder)
    if record is None or not record.sound:
        return None if problems else "after the resume neither shown nor named"
    data = shown(record)
    for number, seconds in zip(data["round"], data["seconds"], strict=True):
        if number <= min(started[0], len(times)) and seconds != times[number]:
            return f"seconds of round {number} changed; notices: {notices}"
    return None


def through(seed: int, count: int, references: list[Reference], above: Path, resume_every: int = 1) -> None:
    """Damaged folders one after another: each is read by the report, and some or all of them are resumed."""
    chance, wrong = random.Random(seed), []
    for number in range(count):
        reference = chance.choice(references)
        folder = above / f"damaged-{number}"
        shutil.copytree(reference.folder, folder)
        changed = damage_one_file(folder, chance)
        if changed is None:
            changed = ("", "not damaged")
        try:
            with patience(SECONDS):
                silent = silent_in_the_report(folder, reference, changed[0])
                if silent is None and number % resume_every == 0:
                    silent = silent_in_a_resume(folder, reference)
        except (Exception, Hang) as error:
            silent = f"{type(error).__name__}: {error}"
        if silent is None:
            shutil.rmtree(folder)
        else:
            wrong.append(f"{number} ({reference.folder.name}, {' '.join(changed)}): {silent[:600]}")
    assert not wrong, f"{len(wrong)} of {count} with seed {seed}:\n" + "\n".join(wrong[:20])


def test_damaged_folders(references: list[Reference], tmp_path: Path) -> None:
    through(0, 40, references, tmp_path, resume_every=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_thousand_damaged_folders(seed: int, references: list[Reference], tmp_path: Path) -> None:
    through(seed, 200, references, tmp_path)


def flips_accepted(folder: Path, every: int) -> list[str]:
    """Bits of config.toml without which `fedgg resume` would go on."""
    file = folder / "config.toml"
    content = file.read_bytes()
    accepted = []
    for bit in range(0, 8 * len(content), every):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            Store(folder).experiment()
        except UserError as error:
            if "config.toml" in str(error) and "\n" not in str(error):
                continue
        accepted.append(f"bit {bit % 8} of byte {bit // 8}: {bytes(changed[bit // 8 - 20 : bit // 8 + 8])!r}")
    file.write_bytes(content)
    return accepted


def test_flipped_bits_of_the_settings(references: list[Reference], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(references[1].folder, tmp_path / "run"))
    assert flips_accepted(folder, every=41) == []


@pytest.mark.slow
def test_every_flipped_bit_of_the_settings(references: list[Reference], tmp_path: Path) -> None:
    for reference in references:
        folder = Path(shutil.copytree(reference.folder, tmp_path / reference.folder.name))
        assert flips_accepted(folder, every=1) == []
