"""The command that makes the same runs again, complete in itself: whoever has the page needs none of the folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from fedgg.analysis.labels import FROM_PYTHON
from fedgg.registry import NAMED_PARTS, names_code
from fedgg.runfolder.read import StudyRecord
from fedgg.runfolder.settings import OWN, common, flat, nested

FILE = "again.toml"
ALLOWED_BY = "Read it first; fedgg asks before it runs it, or takes --trust."


def command_again(study: StudyRecord) -> str | None:
    """For a POSIX shell: a study file written on the spot, and the call; None where parts came from Python."""
    settings = settings_by_label(study)
    if not settings or any(str(v).startswith(FROM_PYTHON) for own in settings.values() for v in own.values()):
        return None
    # ascii() so that no name can end the comment.
    names = {str(own.get(key)) for own in settings.values() for key in NAMED_PARTS}
    code = sorted(name for name in names if names_code(name))
    warning = f"# It runs code from outside fedgg: {', '.join(map(ascii, code))}. {ALLOWED_BY}\n" if code else ""
    shared = tuple(seed for seed in study.seeds if all(seed in study.seeds_of(label) for label in settings))
    rest = {label: tuple(seed for seed in study.seeds_of(label) if seed not in shared) for label in settings}
    if not any(rest.values()):
        return f"{warning}{_written(FILE, study_toml(study, settings, shared))}fedgg compare {FILE}"
    # Rows of different seeds: calls that add up in one folder. The first decides what rows are measured against.
    calls = [study_toml(study, settings, shared)] if shared else []
    for label in sorted(rest, key=lambda label: label != study.reference):
        if rest[label]:
            calls.append(study_toml(study, {label: settings[label]}, rest[label]))
    files = [f"again-{number}.toml" for number in range(1, len(calls) + 1)]
    parts = [f"{_written(file, call)}fedgg compare {file} --out again" for file, call in zip(files, calls, strict=True)]
    return warning + "\n".join(parts)


def _written(file: str, content: str) -> str:
    """TOML escapes line breaks within a name, so that no name can end the document early."""
    return f"cat > {file} <<'END'\n{content}END\n"


def study_toml(study: StudyRecord, settings: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...]) -> str:
    """A study file of these rows."""
    base = common([{**own} for own in settings.values()])
    variants = {label: {key: value for key, value in own.items() if key not in base} for label, own in settings.items()}
    if len(variants) == 1:  # with nothing to tell it from, all is shared
        variants = {label: {} for label in variants}
    reference = study.reference if study.reference in variants else next(iter(variants))
    content: dict[str, Any] = {"seeds": list(seeds), "reference": reference, "experiment": nested(base)}
    return tomli_w.dumps(content | {"variants": {label: nested(own) for label, own in variants.items()}})


def settings_by_label(study: StudyRecord) -> dict[str, dict[str, Any]]:
    """Dotted, without what is a run's own; of the first seed that has begun."""
    begun = {label: next(iter(by_seed.values())) for label, by_seed in study.runs.items() if by_seed}
    return {
        label: {key: value for key, value in flat(run.config).items() if key not in OWN} for label, run in begun.items()
    }
