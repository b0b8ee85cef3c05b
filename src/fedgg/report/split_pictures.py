"""Each split of a study as a picture of its own: one a seed, or more where rows are split differently."""

from __future__ import annotations

import re
from collections.abc import Iterator

from matplotlib.figure import Figure

from fedgg.report.figures import split_figure
from fedgg.report.folders import RunRecord, StudyRecord


def split_pictures(study: StudyRecord) -> Iterator[tuple[str, Figure]]:
    """By the name of their files: `split-seed-N`, and `split-seed-N-LABEL` for what another row has instead."""
    seen: dict[int, set[str]] = {}
    for label, by_seed in study.runs.items():
        for seed, record in by_seed.items():
            split = record.partition or {}
            if not (split.get("counts") and split.get("classes")) or split.get("hash") in seen.get(seed, set()):
                continue
            name = f"split-seed-{seed}" + (f"-{_slug(label)}" if seen.get(seed) else "")
            seen.setdefault(seed, set()).add(split["hash"])
            yield name, _drawn(record, split)


def _drawn(record: RunRecord, split: dict[str, object]) -> Figure:
    return split_figure(split["counts"], split["classes"], record.split_title())  # type: ignore[arg-type]


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9.=]+", "-", label.lower()).strip("-.")[:60]
