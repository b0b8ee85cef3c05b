"""A comparison over several data sets or splits, taken apart: rows are measured against the reference of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedgg.report.folders import StudyRecord
from fedgg.report.settings import OWN, differing, flat

WHERE = ("data.", "split.")  # settings that say what is learned from, rather than how


@dataclass(frozen=True, eq=False)
class Part:
    """Rows that learn from the same; `title` says from what, where there are several parts."""

    title: str
    study: StudyRecord


def parts_of(study: StudyRecord) -> list[Part]:
    """One part, unless algorithms are compared on several splits, each of them with several rows.

    The reference of another part is the row that differs from the study's in nothing but where it learns; without one,
    rows cannot be measured there, and the study stays whole.
    """
    whole = [Part("", study)]
    if any(not runs for runs in study.runs.values()):
        return whole  # a row that has not begun says nothing of its settings
    settings = {label: flat(next(iter(by_seed.values())).config) for label, by_seed in study.runs.items()}
    keys = differing(settings.values())
    where = [key for key in keys if key.startswith(WHERE)]
    if not where or "algorithm.name" not in keys:
        return whole
    labels: dict[str, list[str]] = {}
    for label, own in settings.items():
        labels.setdefault(", ".join(f"{key} = {own.get(key)}" for key in where), []).append(label)
    references = {title: _reference(study.reference, some, settings) for title, some in labels.items()}
    if min(map(len, labels.values())) < 2 or None in references.values():
        return whole
    return [Part(title, _only(study, some, str(references[title]))) for title, some in labels.items()]


def _reference(whole: str, labels: list[str], settings: Mapping[str, Mapping[str, Any]]) -> str | None:
    same = (label for label in labels if _how(settings[label]) == _how(settings[whole]))
    return whole if whole in labels else next(same, None)


def _how(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in OWN and not key.startswith(WHERE)}


def _only(study: StudyRecord, labels: list[str], reference: str) -> StudyRecord:
    runs = {label: study.runs[label] for label in labels}
    unreadable = tuple((label, seed) for label, seed in study.unreadable if label in labels)
    seeds = tuple(seed for seed in study.seeds if any(seed in study.seeds_of(label) for label in labels))
    return replace(study, labels=tuple(labels), seeds=seeds, reference=reference, runs=runs, unreadable=unreadable)
