"""Each split of a study as a picture of its own: one a seed, or more where rows are split differently."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from fedgg.report.figures import split_figure
from fedgg.report.folders import RunRecord, StudyRecord
from fedgg.report.writing import file_name


def split_pictures(study: StudyRecord) -> Iterator[tuple[str, Figure]]:
    """By the name of their files: `split-seed-N`, and `split-seed-N-2-LABEL` for what another row has instead."""
    seen: dict[int, list[str]] = {}
    for label, by_seed in study.runs.items():
        for seed, record in by_seed.items():
            split = record.partition or {}
            if not (split.get("counts") and split.get("classes")) or split.get("hash", "") in seen.get(seed, []):
                continue
            seen.setdefault(seed, []).append(split.get("hash", ""))
            which = len(seen[seed])  # two labels may read alike as names of files
            yield f"split-seed-{seed}" + (f"-{which}-{file_name(label)}" if which > 1 else ""), _drawn(record, split)


def _drawn(record: RunRecord, split: dict[str, object]) -> Figure:
    return split_figure(split["counts"], split["classes"], record.split_title(), record.client_names)  # type: ignore[arg-type]
