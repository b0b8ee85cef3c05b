"""Damage to a run folder is named where it would decide numbers; what the library changes itself is not damage."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from earlier_folders import without_checksums
from observers import Callbacks

import fedgg
from fedgg.analysis.collect import RunCollection
from fedgg.analysis.compare import compare
from fedgg.errors import UserError
from fedgg.files import read_bytes
from fedgg.lab.config import Experiment, load_experiment
from fedgg.lab.run_result import Run
from fedgg.lab.run_session import Session
from fedgg.lab.runner import run
from fedgg.lab.store import Store
from fedgg.runfolder import checksums
from fedgg.runfolder import read as following
from fedgg.runfolder.archive_file import archive_of
from fedgg.runfolder.checksums import LineChecksums, checkpoint_checksums, known_checksums
from fedgg.runfolder.read import FollowedRun, read_run, read_study

pytestmark = pytest.mark.usefixtures("checkpoints_at_once")

ROUNDS, STOPPED = 5, 3


class Stop(Exception):
    pass


def experiment(**changes: Any) -> Experiment:
    small = Experiment(rounds=ROUNDS, split={"clients": 3}, local={"epochs": 1, "batch": 64}, model={"name": "linear"})
    return small.changed(changes)


def stop(record: dict[str, Any]) -> None:
    if record["round"] == STOPPED:
        raise Stop


@pytest.fixture(scope="module")
def straight() -> Run:
    return run(experiment())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    above = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "keep", lambda session: None)
        with pytest.raises(Stop):
            run(experiment(), out=above / "unfinished", observer=Callbacks(round=stop))
    run(experiment(), out=above / "finished")
    return {"unfinished": above / "unfinished", "finished": above / "finished"}


@pytest.fixture
def unfinished(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["unfinished"], tmp_path / "run"))


@pytest.fixture
def finished(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["finished"], tmp_path / "run"))


def resume(folder: Path) -> tuple[Run, list[str], int]:
    notices: list[str] = []
    starts: list[int] = []
    observer = Callbacks(started=lambda done, of: starts.append(done), notice=notices.append)
    return run(Store(folder).experiment(), out=folder, observer=observer), notices, starts[0]


def same(one: Run, other: Run) -> bool:
    a, b = ([record | {"seconds": 0} for record in each.rounds] for each in (one, other))
    return a == b and one.summary | {"seconds": 0} == other.summary | {"seconds": 0}


def replace_in(file: Path, old: str, new: str, line: int = 0) -> None:
    lines = file.read_text().splitlines(keepends=True)
    at = next(number for number, text in enumerate(lines) if old in text and number >= line)
    lines[at] = lines[at].replace(old, new, 1)
    file.write_text("".join(lines))


def problems_of(folder: Path) -> list[str]:
    collection = RunCollection([folder])
    collection.refresh()
    return [f"{problem.what}: {problem.why}" for problem in collection.problems]


# What is written ------------------------------------------------------------------------------------------------------


def test_checksums_are_sha256_of_the_bytes(finished: Path) -> None:
    """So that `sha256sum` can check them."""
    listed = known_checksums(finished)
    assert listed is not None
    assert listed.files.keys() == {"config.toml", "versions.json", "partition.json", "partition.npz", "inputs.json"}
    recorded = json.loads((finished / "summary.json").read_text())["checksums"]
    latest = checkpoint_checksums(finished / "checkpoint" / f"{ROUNDS:06d}.safetensors")
    before = checkpoint_checksums(finished / "checkpoint" / f"{ROUNDS - 1:06d}.safetensors")
    assert (
        recorded.keys()
        == latest.keys() | {"model.safetensors"}
        == listed.files.keys()
        | {
            "rounds.jsonl",
            "model.safetensors",
        }
    )
    for name, digest in (listed.files | latest | recorded).items():
        assert digest == hashlib.sha256((finished / name).read_bytes()).hexdigest()
    lines = (finished / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    assert before["rounds.jsonl"] == hashlib.sha256(b"".join(lines[:-1])).hexdigest()


def test_lines_carry_the_running_checksum() -> None:
    writer, lines = LineChecksums(), []
    for number in range(4):
        lines.append(writer.next_line({"round": number, "why": 'a "quoted" text, "checksum": "x"}'}))
        writer.add(lines[-1])
    reader = LineChecksums()
    reader.check_all(b"".join(lines))
    assert reader.complaint is None
    assert reader.sha256.hexdigest() == writer.sha256.hexdigest()
    last = json.loads(lines[3])
    del last["checksum"]
    assert LineChecksums(b"".join(lines[:3])).next_line(last) == lines[3]
    for wrong in (lines[1:], [lines[1], lines[0], *lines[2:]], [lines[0], *lines], [lines[0], b"\n", *lines[1:]]):
        reader = LineChecksums()
        reader.check_all(b"".join(wrong))
        assert reader.complaint is not None


def test_every_flipped_bit_of_a_line_is_noticed() -> None:
    writer = LineChecksums()
    first = writer.next_line({"round": 1, "test_accuracy": 0.9472})
    writer.add(first)
    content = first + writer.next_line({"round": 2, "test_accuracy": 0.95})
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        reader = LineChecksums(required=True)
        reader.check_all(bytes(changed))
        whole = changed.count(b"\n") == 2  # a line without its end counts as torn
        assert reader.complaint is not None or not whole, bytes(changed)


# A history that was changed -------------------------------------------------------------------------------------------


def test_a_changed_last_round_is_played_again_with_a_word(unfinished: Path, straight: Run) -> None:
    replace_in(unfinished / "rounds.jsonl", '"test_accuracy": 0.', '"test_accuracy": 0.1', line=STOPPED - 1)
    (said,) = problems_of(unfinished)
    assert "excluded from the averages: rounds.jsonl is damaged: line 3" in said
    done, notices, start = resume(unfinished)
    assert start == STOPPED - 1
    assert any(f"{STOPPED:06d}" in said and "line 3 does not fit its checksum" in said for said in notices)
    assert same(done, straight)
    assert problems_of(unfinished) == []


@pytest.mark.parametrize("which", ["unfinished", "finished"])
def test_a_changed_round_before_the_checkpoints_is_refused(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    replace_in(folder / "rounds.jsonl", '"test_accuracy": 0.', '"test_accuracy": 0.1')
    with pytest.raises(UserError, match=r"line 1 does not fit its checksum.*put back what is damaged, or start anew"):
        resume(folder)
    assert read_run(folder).status == "damaged"
    assert any("line 1" in said for said in problems_of(folder))
    if which == "finished":
        with pytest.raises(UserError, match=r"rounds\.jsonl is damaged \(line 1 does not fit its checksum\)"):
            Run.load(folder)


def test_a_finished_run_whose_last_round_is_changed_ends_again(finished: Path, straight: Run) -> None:
    replace_in(finished / "rounds.jsonl", '"bytes_up": ', '"bytes_up": 1', line=ROUNDS - 1)
    done, notices, start = resume(finished)
    assert start == ROUNDS - 1
    assert notices
    assert same(done, straight)
    assert same(Run.load(finished), straight)
    assert problems_of(finished) == []


def test_a_gap_in_the_round_numbers_of_an_earlier_folder(unfinished: Path) -> None:
    file = without_checksums(unfinished) / "rounds.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[2])
    with pytest.raises(UserError, match="line 2 has round 3, where round 2 belongs"):
        resume(unfinished)


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rounds = 5", "rounds = 4"),
        ("checkpoint_seconds = 60", "checkpoint_seconds = 3"),
        ('name = ""', 'name = "mine"'),
    ],
)
def test_edited_settings(old: str, new: str, unfinished: Path, straight: Run) -> None:
    """Refused by `resume`; handed to `run` they are taken over, in a folder that fits its checksums again."""
    file = unfinished / "config.toml"
    replace_in(file, old, new)
    with pytest.raises(UserError, match=r"config\.toml is not as fedgg wrote it.*if you edited it, `fedgg run"):
        resume(unfinished)
    (said,) = problems_of(unfinished)
    assert "excluded from the averages: config.toml was changed after the run wrote it" in said
    wish, notices = load_experiment(file), list[str]()
    done = run(wish, out=unfinished, observer=Callbacks(notice=notices.append))
    assert any("config.toml is written again" in said for said in notices)
    assert Store(unfinished).experiment() == wish
    assert problems_of(unfinished) == []
    assert done.test_accuracy == straight.test_accuracy[: wish.rounds]


def test_settings_of_another_experiment_are_refused(unfinished: Path) -> None:
    replace_in(unfinished / "config.toml", "seed = 0", "seed = 1")
    with pytest.raises(UserError, match=r"config\.toml is not as fedgg wrote it"):
        run(load_experiment(unfinished / "config.toml"), out=unfinished)


def test_a_kill_while_settings_are_replaced(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after config.toml itself is written."""

    class Kill(BaseException):
        pass

    write = Store.replace_file

    def killed(store: Store, name: str, content: bytes) -> None:
        if name == "config.toml":
            if after:
                write(store, name, content)
            raise Kill
        write(store, name, content)

    for after in (False, True):
        with monkeypatch.context() as patched:
            patched.setattr(Store, "replace_file", killed)
            with pytest.raises(Kill):
                run(experiment(rounds=ROUNDS + 1), out=finished)
        assert Store(finished).experiment().rounds == ROUNDS + after
        assert [said for said in problems_of(finished) if "config.toml" in said] == []
    assert run(experiment(rounds=ROUNDS + 1), out=finished).summary["rounds_done"] == ROUNDS + 1
    assert problems_of(finished) == []
    replace_in(finished / "config.toml", f"rounds = {ROUNDS + 1}", f"rounds = {ROUNDS}")  # what it was before
    with pytest.raises(UserError, match=r"config\.toml is not as fedgg wrote it"):
        Store(finished).experiment()


def test_settings_replaced_while_the_report_reads(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_bytes

    def read_and_replace(file: Path, *more: Any, **named: Any) -> bytes:
        content = read(file, *more, **named)
        if file.name == "config.toml" and Store(finished).experiment().rounds == ROUNDS:
            run(experiment(rounds=ROUNDS + 1), out=finished)
        return content

    monkeypatch.setattr(following, "read_bytes", read_and_replace)
    followed = FollowedRun(finished)
    followed.refresh()
    followed.refresh()
    assert followed.record is not None
    assert followed.record.faults == ()
    assert followed.record.config["rounds"] == ROUNDS + 1


# Other files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["versions.json", "partition.json", "partition.npz", "inputs.json"])
def test_other_files_are_named(name: str, unfinished: Path) -> None:
    content = bytearray((unfinished / name).read_bytes())
    content[len(content) // 2] ^= 1
    (unfinished / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} is not as fedgg wrote it.*put the file back, or move the"):
        resume(unfinished)


@pytest.mark.parametrize("damage", ["deleted", "changed"])
def test_lost_checksums_are_written_again(damage: str, unfinished: Path, straight: Run) -> None:
    file = unfinished / checksums.FILE
    before = file.read_bytes()
    file.unlink() if damage == "deleted" else file.write_bytes(before.replace(b"config", b"konfig"))
    assert any("checksums.json cannot be used" in said for said in problems_of(unfinished))
    done, notices, _ = resume(unfinished)
    assert any("checksums.json could not be used" in said for said in notices)
    assert same(done, straight)
    assert problems_of(unfinished) == []
    assert json.loads(file.read_bytes())["files"] == json.loads(before)["files"]


def test_lost_checksums_do_not_hide_other_damage(unfinished: Path) -> None:
    (unfinished / checksums.FILE).unlink()
    replace_in(unfinished / "config.toml", "rounds = 5", "rounds = 4")
    with pytest.raises(UserError, match=r"config\.toml is not as fedgg wrote it"):
        resume(unfinished)
    shutil.rmtree(unfinished / "checkpoint")  # nothing is left that knows it, but the history says that it was there
    with pytest.raises(UserError, match=r"checksums\.json is missing"):
        run(experiment(rounds=4), out=unfinished)
    assert read_run(unfinished).status == "damaged"


def test_a_changed_summary_is_not_used(finished: Path) -> None:
    accuracy = read_run(finished).accuracy()[1][-1]
    replace_in(finished / "summary.json", '"highest_test_accuracy": 0.', '"highest_test_accuracy": 0.9')
    for read in (Run.load, resume):
        with pytest.raises(UserError, match=r"summary\.json is broken \(its content does not fit its checksum\)"):
            read(finished)
    (said,) = problems_of(finished)
    assert "summary.json is broken (its content does not fit its checksum)" in said
    (finished / "summary.json").unlink()
    assert resume(finished)[0].summary["final_test_accuracy"] == accuracy


@pytest.mark.parametrize("damage", ["deleted", "changed"])
def test_a_damaged_model_is_written_again(damage: str, finished: Path) -> None:
    file = finished / "model.safetensors"
    before = file.read_bytes()
    file.unlink() if damage == "deleted" else file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(UserError, match=r"model\.safetensors .*: fedgg resume .* writes it again"):
        Run.load(finished)
    _, notices, _ = resume(finished)
    assert any("model.safetensors" in said and "written again" in said for said in notices)
    assert file.read_bytes() == before
    Run.load(finished)


def test_lost_resumes_are_named(unfinished: Path) -> None:
    resume(unfinished)
    file = unfinished / "resumes.jsonl"
    replace_in(file, f'"after_round": {STOPPED}', '"after_round": 1')
    assert any("resumes.jsonl is damaged: line 1 does not fit" in said for said in problems_of(unfinished))
    file.unlink()
    assert any("resumes.jsonl has 0 of 1 lines" in said for said in problems_of(unfinished))


def test_a_changed_flower_json_is_refused(tmp_path: Path) -> None:
    membership = pytest.importorskip("fedgg.flower.membership", exc_type=ImportError).SavedMembership
    membership("0123456789abcdef", {}).write(tmp_path)
    assert membership.read(tmp_path) == membership("0123456789abcdef", {})
    replace_in(tmp_path / "flower.json", "0123", "0133")
    with pytest.raises(UserError, match=r"flower\.json cannot be read \(its content does not fit its checksum\)"):
        membership.read(tmp_path)


# Earlier versions -----------------------------------------------------------------------------------------------------


def test_a_folder_without_checksums_stays_one(unfinished: Path, straight: Run) -> None:
    done, notices, start = resume(without_checksums(unfinished))
    assert start == STOPPED
    assert not any("checksum" in said for said in notices)
    assert same(done, straight)
    assert same(Run.load(unfinished), straight)
    assert problems_of(unfinished) == []
    assert not (unfinished / checksums.FILE).exists()
    assert "checksum" not in (unfinished / "rounds.jsonl").read_text() + (unfinished / "summary.json").read_text()
    assert run(experiment(rounds=ROUNDS + 1), out=unfinished).summary["rounds_done"] == ROUNDS + 1


# Several runs ---------------------------------------------------------------------------------------------------------


def test_a_damaged_run_is_excluded_and_named(tmp_path: Path) -> None:
    rows = {"one": fedgg.FedAvg(), "other": fedgg.FedProx(mu=0.1)}
    fedgg.compare(rows, experiment(rounds=2), seeds=(0, 1), out=tmp_path)
    damaged = tmp_path / "one" / "seed-1"
    replace_in(damaged / "rounds.jsonl", '"test_accuracy": 0.', '"test_accuracy": 0.1')
    study = read_study(tmp_path)
    row = compare(study).rows[0]
    assert (row.label, row.damaged) == ("one", 1)
    assert [said for said in problems_of(tmp_path) if "excluded from the averages: rounds.jsonl" in said]
    records = [record for by_seed in study.runs.values() for record in by_seed.values()]
    archived = archive_of(records)["runs"]
    assert len(archived) == 3
    assert all("checksum" not in json.dumps(one) for one in archived)
    replace_in(tmp_path / "study.json", '"reference": "one"', '"reference": "other"')
    assert any("study.json is broken: its content does not fit its checksum" in said for said in problems_of(tmp_path))
