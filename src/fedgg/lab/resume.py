"""Resuming a run from its folder: what must not have changed, the newest checkpoint that can be trusted, the history.

Nothing is written before the checks have passed. Rounds after the checkpoint are dropped and trained again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fedgg.aggregation.privacy import OLD_ACCOUNTANT
from fedgg.errors import UserError
from fedgg.files import LARGE, append_line, read_bytes
from fedgg.lab.build import Federation
from fedgg.lab.checkpoint import BadCheckpoint, pin, read_checkpoint
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import State, begin
from fedgg.lab.provenance import behaves_differently, versions_of
from fedgg.lab.round_record import early_stop
from fedgg.lab.store import RESTORE, ChangedConfig, Store
from fedgg.runfolder import checksums
from fedgg.runfolder.checksums import HISTORY, LineChecksums, Manifest, checkpoints_in, known_checksums
from fedgg.runfolder.read_rounds import IntactRounds


def resume(
    store: Store, federation: Federation, notice: Callable[[str], None]
) -> tuple[State, list[dict[str, Any]], dict[str, Any] | None]:
    """The state to start from, the rounds that led to it, and the summary of a run that has ended."""
    versions = versions_of(federation)
    notices = _check_same(store, federation, versions)
    state, refused = newest_state(store, federation.experiment, federation.net.start.device)
    state = state or begin(federation)
    _check_client_state(store, federation, state)
    _check_epsilon(federation, state.rounds_done, store.summary())  # before the folder has the new settings
    notices += _update_settings(store, federation)
    if federation.origin.keeper == "nodes" and (why := _forget_divergence(store)) is not None:
        notices.append(f"the run had diverged ({why}): it is resumed after round {state.rounds_done}")
    rounds = _cut_history(store, state.rounds_done)
    notices += [*refused, *_another_accountant(federation, rounds)]
    for sentence in notices:
        notice(sentence)
    summary = store.summary()
    if summary is None:
        _note_resume(
            store, state.rounds_done, notices, {key: versions[key] for key in ("engine", "where") if key in versions}
        )
    return state, rounds, summary


# Checks ---------------------------------------------------------------------------------------------------------------


def _check_same(store: Store, federation: Federation, now: dict[str, Any]) -> list[str]:
    """UserError where settings, data or split differ from those of the folder; a sentence for each other change."""
    folder, experiment, origin = store.folder, federation.experiment, federation.origin
    keys = ("experiment", "data", "model", "fedgg", "torch", "machine", "device")
    then = store.read_json("versions.json", *keys)
    store.refuse_another(experiment)
    for name in ("partition.npz", "inputs.json", "attackers.json"):  # others are checked as they are read
        if (folder / name).exists():
            store.check_content(name, store.read(name, LARGE))
    if then["experiment"] not in experiment.trajectories():
        raise UserError(f"{folder / 'config.toml'} was changed since the run began: it is another experiment now")
    if then["model"] != now["model"]:
        raise UserError(f"{folder} was started with a model of other parameters: choose another folder")
    keeper = then.get("keeper", "here")
    if keeper != origin.keeper:  # without the clients' state the run would compute something else
        if keeper == "nodes":
            way_out = "on Flower's nodes: go on there, with the same app"
        else:
            way_out = "in it: go on with fedgg resume, without Flower"
        raise UserError(f"the clients of {folder} keep their memory {way_out}")
    if then["data"] != origin.fingerprint:
        raise UserError(f"{folder} was started on other data than {origin.name} holds now")
    if store.read_json("partition.json", "hash")["hash"] != origin.split_hash():
        raise UserError(f"{folder} was started on another split of the data than this fedgg draws")
    # Models of this library are identified by its version; torch of another version may print layers differently.
    if ":" in experiment.model.name and then["torch"] == now["torch"]:
        if then.get("structure") not in (None, now["structure"]):
            raise UserError(f"{folder} was started with a model of other layers: choose another folder")
        if then["device"] == now["device"] and behaves_differently(then, now, "model"):
            raise UserError(
                f"{folder} was started with a model that gives other outputs with the same initial weights: its "
                f"settings or its code have changed; choose another folder"
            )
    code_then = then.get("code", {})
    for part, word in (("task", "loss"), ("metrics", "metrics")):
        if now["code"].get(part) and code_then.get(part) not in (None, now["code"][part]):
            raise UserError(
                f"the code of the {word} has changed since the run in {folder} began, and its rounds so far are of the "
                f"old code: choose another folder"
            )
        if behaves_differently(then, now, word):
            raise UserError(
                f"the {word} of the run in {folder} had other values than now for the same outputs: a constant, a "
                f"setting or a function that the code uses has changed since its first round; choose another folder"
            )
    changed_code = [
        f"the code of the {part} has changed since this run began, and its rounds so far are of the old code: choose "
        f"another folder to start over"
        for part, code in now["code"].items()
        if code is not None and code_then.get(part) not in (None, code)
    ]
    surroundings = [
        f"started under {key} {then[key]}, goes on under {now[key]}: bits may differ"
        for key in ("fedgg", "torch", "machine", "device")
        if then[key] != now[key]
    ]
    return [*changed_code, *surroundings]


def _check_client_state(store: Store, federation: Federation, state: State) -> None:
    """UserError where an earlier version began the run, and clients it has not met would keep more than the others."""
    if federation.cohort_size == len(federation.filled) or not state.memory:
        return
    kept = next(iter(state.memory.values())).keys()
    if missing := federation.algorithm.client_memory(state.server.w).keys() - kept:
        raise UserError(
            f"clients' state in {store.folder} has no {', '.join(map(repr, sorted(missing)))}, which the algorithm "
            f"{federation.experiment.algorithm.name!r} keeps now: an earlier version of fedgg began the run; choose "
            f"another folder to start over"
        )


def _check_epsilon(federation: Federation, rounds_done: int, summary: dict[str, Any] | None) -> None:
    """UserError if the rounds so far have spent more than the limit on epsilon allows."""
    budget = federation.aggregation.budget
    if budget is None or budget.limit is None:
        return
    recorded = (summary or {}).get("epsilon")
    if recorded is not None and recorded <= budget.limit and rounds_done >= federation.last_round:
        return  # it has ended within its limit, by the accountant of its time
    if budget.epsilon(rounds_done) > budget.limit:
        raise UserError(
            f"this run has spent epsilon {budget.epsilon(rounds_done):.2f} in {rounds_done} rounds, more than "
            f"privacy.epsilon_limit = {budget.limit:g}: what is spent cannot be taken back; give a larger limit"
        )


def _another_accountant(federation: Federation, rounds: list[dict[str, Any]]) -> list[str]:
    """That epsilon is bounded in another way from now on, where the history has it by an older accountant."""
    budget, rounds_done = federation.aggregation.budget, len(rounds)
    if budget is None or not rounds or rounds[-1].get("epsilon") is None or rounds_done >= federation.last_round:
        return []
    before, now = rounds[-1].get("accountant", OLD_ACCOUNTANT), budget.accountant(rounds_done)
    if before == now:
        return []
    return [
        f"epsilon of rounds 1 to {rounds_done} was recorded by the accountant {before!r}, "
        f"{rounds[-1]['epsilon']:.2f} so far; from round {rounds_done + 1} on it is that of all rounds by {now!r}, by "
        f"which those {rounds_done} spent {budget.epsilon(rounds_done):.2f}"
    ]


# Checkpoints and history ----------------------------------------------------------------------------------------------


def newest_state(store: Store, experiment: Experiment, device: torch.device) -> tuple[State | None, list[str]]:
    """The newest state that can be trusted and that the history leads to, and a sentence on each that cannot."""
    refused: list[str] = []
    paths, history, known = checkpoints_in(store.folder), store.history(), known_checksums(store.folder)
    if known is None and history.has_checksums:
        raise UserError(f"{store.folder / checksums.FILE} is missing: {RESTORE}")
    for number, path in reversed(list(enumerate(paths))):
        try:
            state = read_checkpoint(path, experiment.trajectories(), device)
            if known is not None:
                _check_history(history, path, state.rounds_done, known)
            pin(state, {int(older.stem): older for older in paths[:number]})
            return state, refused
        except BadCheckpoint as reason:
            refused.append(f"checkpoint {path.name} is refused: {reason}")
    if refused and (history.rounds or known is not None):
        raise UserError(
            f"{store.folder}: {'; '.join(refused)}. None is left: put back what is damaged, or start anew in "
            f"another folder"
        )
    return None, refused


def _check_history(history: IntactRounds, checkpoint: Path, rounds: int, known: Manifest) -> None:
    """BadCheckpoint if the history does not lead to it, or other files are not those it was written with."""
    if len(history.rounds) < rounds:
        damage = history.damage or f"it ends at round {len(history.rounds)}"
        raise BadCheckpoint(f"{HISTORY} is damaged ({damage})")
    try:
        recorded = checksums.checkpoint_checksums(checkpoint)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(str(error)) from error
    if recorded.get(HISTORY) != history.sha256(rounds):
        raise BadCheckpoint(f"{HISTORY} has other rounds than those that led to it")
    for name in recorded.keys() & known.files.keys() - {"config.toml"}:  # that one may be changed
        if recorded[name] != known.files[name]:
            raise BadCheckpoint(f"it was written beside another {name}")


def _cut_history(store: Store, rounds: int) -> list[dict[str, Any]]:
    """Drop the rounds after the checkpoint: they are trained again, and the run has not ended."""
    history = store.history()
    if len(history.rounds) < rounds:
        damage = history.damage or f"it has {len(history.rounds)} rounds, the checkpoint {rounds}"
        raise UserError(f"{store.folder / HISTORY} is damaged ({damage}): history was lost; {RESTORE}")
    summary = store.summary()
    with store.writing():
        if summary is not None and summary["rounds_done"] > rounds:
            (store.folder / "summary.json").unlink()
        for path in checkpoints_in(store.folder):
            if int(path.stem) > rounds:  # it was refused: under its name, later than the history, it counts as damage
                path.replace(path.with_name(f"{path.name}.refused"))
        store.replace_file(HISTORY, history.up_to(rounds))
    store.lines = None if store.manifest is None else LineChecksums(history.up_to(rounds))
    return history.rounds[:rounds]


# Settings -------------------------------------------------------------------------------------------------------------


def _update_settings(store: Store, federation: Federation) -> list[str]:
    """Write changed settings, such as more rounds; a finished run with rounds to do is then no longer finished.

    Nor is one whose privacy allows more rounds by a better accountant than that of its time, nor one that had stopped
    early and would not by the new settings. Returns a sentence for each file that had to be written again.
    """
    experiment, known = federation.experiment, known_checksums(store.folder)
    store.manifest, notices = known, []
    if known is not None and known.fault is not None:
        # checksums.json is missing or damaged: written again, from the copy in a checkpoint or the summary.
        resumes = store.folder / "resumes.jsonl"
        lines = read_bytes(resumes).count(b"\n") if resumes.exists() else 0
        store.manifest = replace(known, fault=None, resumes=lines)
        with store.writing():
            store.write_manifest()
        unusable = f"{checksums.FILE} could not be used ({known.fault})"
        notices.append(f"{unusable} and is written again: the other files are unchanged")
    try:
        changed = experiment.hash() != store.experiment().hash()
    except ChangedConfig as damage:
        changed = True
        notices.append(f"config.toml is written again with the settings that were given: {damage}")
    summary = store.summary()
    with store.writing():
        if changed:
            _write_config(store, experiment.to_toml().encode())
        ended = summary and summary["status"] in ("finished", "spent")
        if summary and summary["status"] == "stopped_early":
            ended = changed and early_stop(experiment, federation.net.metrics, store.history().rounds) is None
        if summary and ended and summary["rounds_done"] < (experiment.rounds if changed else federation.last_round):
            (store.folder / "summary.json").unlink()
    return notices


def _write_config(store: Store, content: bytes) -> None:
    """A kill at any time leaves a config.toml that fits checksums.json."""
    if store.manifest is None:
        store.replace_file("config.toml", content)
        return
    store.manifest = store.manifest.with_config(content)
    store.write_manifest()
    store.replace_file("config.toml", content)
    store.manifest = replace(store.manifest, replaced=None)
    store.write_manifest()


def _forget_divergence(store: Store) -> str | None:
    """Why a run diverged, if it did; it is then unfinished again. For runs whose clients may send other numbers."""
    summary = store.summary()
    if summary is None or summary["status"] != "diverged":
        return None
    with store.writing():
        (store.folder / "summary.json").unlink()
    return str(summary["why"])


def _note_resume(store: Store, rounds_done: int, notices: list[str], conditions: dict[str, Any]) -> None:
    """Add a line to resumes.jsonl: after which round, when, by which engine and where, and the notices."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    line = {"after_round": rounds_done, "when": now, "notes": notices, **conditions}
    file = store.folder / "resumes.jsonl"
    with store.writing():
        if store.manifest is None:
            append_line(file, json.dumps(line), store.check_lock)
            return
        store.manifest = replace(store.manifest, resumes=checksums.append_checked(file, line, store.check_lock))
        store.write_manifest()
