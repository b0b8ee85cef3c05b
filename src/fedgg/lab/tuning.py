"""Search for settings (`fedgg tune`): the same number of trials for every algorithm, proposed by Optuna.

A trial is a run without a folder, scored on the examples that clients hold out (`data.holdout`); the test set is not
evaluated. Every finished trial is a line of trials.jsonl, and Optuna's studies are made anew from the lines. What trial
k of an algorithm tries depends on the seed, the algorithm, k and its earlier trials only, so that a search that was
killed ends as it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tomli_w

from fedgg.errors import UserError
from fedgg.files import parse_lines, read_bytes, read_json, write_json, write_text, writing_to
from fedgg.lab.config import FOLLOW_THE_DATA
from fedgg.lab.name_resolution import code_of_parts
from fedgg.lab.observer import Observer
from fedgg.lab.run_processes import Given
from fedgg.lab.search_space import HOLDOUT, Search
from fedgg.lab.search_trial import SearchTrial, TrialRequest, TrialRunner, check_optuna, measure_of, trial_name
from fedgg.lab.study import Study
from fedgg.registry import names_code
from fedgg.runfolder.checksums import KEY, LineChecksums, append_checked, with_checksum, without_checksum
from fedgg.runfolder.locks import InUse, LockFile

TRIALS, INDEX, STUDY, LOCK = "trials.jsonl", "tuning.json", "winners.toml", "tuning.lock"
RESTORE = "put the file back, or choose another folder"
NOTHING_GIVEN = Given()


def best_of(search: Search, trials: Sequence[SearchTrial]) -> dict[str, SearchTrial]:
    """By label, the finished trial with the best score on hold-out examples, of equal ones the first."""
    finished = {
        label: [trial for trial in trials if trial.algorithm == label and trial.score is not None]
        for label in search.space
    }
    best = max if measure_of(search).higher_is_better else min
    return {label: best(ended, key=lambda trial: trial.last_score) for label, ended in finished.items() if ended}


def final_study(search: Search, trials: Sequence[SearchTrial]) -> Study:
    """The chosen settings with seeds that no trial had; of `data.holdout` what the experiment says, not the trials."""
    study = search.study
    variants = {label: {**study.variants[label], **best.settings} for label, best in best_of(search, trials).items()}
    if not variants:
        raise UserError("no trial finished, so there is nothing to choose from: search smaller learning rates")
    reference = study.reference if study.reference in variants else next(iter(variants))
    return Study(study.base, variants, search.fresh_seeds, reference)


TrialsRunner = Callable[[Callable[[str], TrialRequest | None], Callable[[SearchTrial], None], Observer], None]


def run_search(
    search: Search,
    folder: Path | None,
    *,
    observer: Observer,
    processes: int = 1,
    given: Given = NOTHING_GIVEN,
    data_folder: Path | None = None,
    command: str | None = None,
    trials_runner: TrialsRunner | None = None,
) -> list[SearchTrial]:
    """Run the trials that are missing in the folder, in turns of the algorithms, and write the final study.

    `trials_runner` runs trials elsewhere: it is called with a function that has the next trial of an algorithm and one
    to call with each finished trial.
    """
    check_optuna()
    if search.study.base.data.holdout == 0:
        observer.on_notice("", f"data.holdout = {HOLDOUT:g} in the trials, which are scored on what clients hold out")
    with _journal(search, folder, given) as journal, ExitStack() as pools:

        def next_request(label: str) -> TrialRequest | None:
            earlier = tuple(trial for trial in journal.trials if trial.algorithm == label)
            return TrialRequest(search, label, earlier) if len(earlier) < search.trials else None

        def add(trial: SearchTrial) -> None:
            journal.add(trial)
            name = trial_name(search, trial.algorithm, trial.number)
            observer.on_notice(name, trial.sentence(measure_of(search)))

        for trial in journal.trials:
            if trial.algorithm in search.space and trial.number <= search.trials:
                rounds = search.experiment(trial.algorithm, search.study.seeds[0], {}).rounds
                observer.on_start(trial_name(search, trial.algorithm, trial.number), rounds, rounds)
        if trials_runner is not None:
            trials_runner(next_request, add, observer)
        else:
            here = TrialRunner(given, data_folder, processes, pools)
            while requests := [request for label in search.space if (request := next_request(label)) is not None]:
                add(here.run(min(requests, key=lambda request: request.number), observer))
    trials = [trial for trial in journal.trials if trial.algorithm in search.space and trial.number <= search.trials]
    for label in search.space.keys() - best_of(search, trials).keys():
        observer.on_notice("", f"no trial of {label} finished: it is left out of the final study")
    if folder is not None and given == NOTHING_GIVEN:  # objects from Python have no name in a file
        with writing_to(folder):
            write_text(folder / STUDY, _study_file(search, final_study(search, trials), command))
    return trials


# The folder ----------------------------------------------------------------------------------------------------------


@dataclass
class _Journal:
    file: Path | None
    check: Callable[[], None]
    trials: list[SearchTrial] = field(default_factory=list)

    def add(self, trial: SearchTrial) -> None:
        if self.file is not None:
            with writing_to(self.file.parent):
                append_checked(self.file, asdict(trial), self.check)
        self.trials.append(trial)


@contextmanager
def _journal(search: Search, folder: Path | None, given: Given) -> Iterator[_Journal]:
    """The finished trials of the folder, which no other process works in meanwhile."""
    if folder is None:
        yield _Journal(None, lambda: None)
        return
    lock = LockFile(folder / LOCK)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not lock.acquire():
            raise InUse(f"another process is searching in {folder}: wait for it, or stop it")
    try:
        identities = {
            label: search.identity(label, f"{given.identity}{_code_of(search, label)}") for label in search.space
        }
        known = _identities(folder / INDEX)
        for label, identity in identities.items():
            if known.get(label, identity) != identity:
                raise UserError(
                    f"{folder} holds another search for {label!r} (other settings, code, space, seeds, sampler, "
                    f"pruner or window): choose another folder (--out, or out= in Python)"
                )
        trials = _finished(folder / TRIALS)
        if unknown := [trial.algorithm for trial in trials if trial.algorithm not in known]:
            raise UserError(f"{folder / INDEX} does not list {unknown[0]!r}, of which {TRIALS} has trials: {RESTORE}")
        with writing_to(folder):
            write_json(folder / INDEX, with_checksum({"format": 1, "searches": known | identities}))
        yield _Journal(folder / TRIALS, lock.check, trials)
    finally:
        lock.release()


def _code_of(search: Search, label: str) -> str:
    """The content of the files of code that the experiment of a label names; empty where it names none."""
    files = code_of_parts(search.experiment(label, search.study.seeds[0], {}))
    return "".join(f" {part} {code.sha256}" for part, code in sorted(files.items()))


def _identities(file: Path) -> dict[str, str]:
    try:
        content = without_checksum(read_json(file), required=True)
        return {str(label): str(identity) for label, identity in content["searches"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}; {RESTORE}") from error


def _finished(file: Path) -> list[SearchTrial]:
    """A last line torn by a kill is left out; other damage is a UserError."""
    if not file.exists():
        return []
    try:
        content = read_bytes(file)
        whole = content[: content.rfind(b"\n") + 1]
        checksums = LineChecksums(required=True)
        checksums.check_all(whole)
        if checksums.complaint is not None:
            raise ValueError(checksums.complaint)
        trials, counts = list[SearchTrial](), dict[str, int]()
        for _, record in parse_lines(whole):
            if isinstance(record, ValueError):
                raise record
            record.pop(KEY)
            trial = SearchTrial(**{**record, "scores": {int(key): value for key, value in record["scores"].items()}})
            counts[trial.algorithm] = counts.get(trial.algorithm, 0) + 1
            if trial.number != counts[trial.algorithm]:
                raise ValueError(f"trial {trial.number} of {trial.algorithm} where {counts[trial.algorithm]} belongs")
            trials.append(trial)
        return trials
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {error}; {RESTORE}") from error


def _study_file(search: Search, study: Study, command: str | None) -> str:
    """The final study as TOML, for `fedgg compare`."""
    experiment = study.base.model_dump(mode="json", exclude_none=True)
    for key in FOLLOW_THE_DATA:
        section, _, name = key.partition(".")
        if name not in getattr(study.base, section).model_fields_set:
            del experiment[section][name]
    content = {
        "seeds": list(study.seeds),
        "reference": study.reference,
        "experiment": experiment,
        "variants": study.variants,
    }
    comments = [
        f"# Settings chosen by {measure_of(search).title}{search.shown_window or ','} "
        f"{search.trials} trials for each algorithm.",
        "# No trial had these seeds.",
        *([f"# Written by: {command}"] if command else []),
        f"# To run it: fedgg compare {STUDY}",
    ]
    if any(names_code(str(variant.get("algorithm.name", ""))) for variant in study.variants.values()):
        comments.append("# Files of code that it names are looked for in the folder in which that is called.")
    return "\n".join([*comments, "", tomli_w.dumps(content)])
