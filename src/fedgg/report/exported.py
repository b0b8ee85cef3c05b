"""A report's figures and tables as files for papers and talks: PNG and SVG; Markdown, LaTeX and CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedgg.report.axes import axes_of
from fedgg.report.compare import compare
from fedgg.report.figures import accuracy_figure
from fedgg.report.gathering import Group
from fedgg.report.more_figures import clients_figure, clients_told, diagnostics_figure, sweep_figure
from fedgg.report.page_data import title
from fedgg.report.split_pictures import split_pictures
from fedgg.report.style import save
from fedgg.report.tables import Table, accuracy_table, as_csv, as_latex, as_markdown, runs_table, target_table
from fedgg.report.writing import file_name, write_text

FORMS = {"md": as_markdown, "tex": as_latex, "csv": as_csv}


def write_figures(groups: Sequence[Group], folder: Path, tell: Callable[[str], None] = lambda what: None) -> list[Path]:
    """accuracy, split-seed-N, diagnostics, clients-seed-N and sweep, as far as there is something to draw."""
    files = []
    for group, place in _places(groups, folder):
        for name, figure in _figures(group):
            tell(f"drawing {name}")
            files += [save(figure, place / f"{name}.{kind}", folder) for kind in ("png", "svg")]
    return files


def write_tables(groups: Sequence[Group], folder: Path) -> list[Path]:
    """accuracy, target and runs, in three forms each."""
    return [
        write_text(place / f"{name}.{kind}", written(table), folder)
        for group, place in _places(groups, folder)
        for name, table in _tables(group).items()
        for kind, written in FORMS.items()
    ]


def _tables(group: Group) -> dict[str, Table]:
    comparison = compare(group.study)
    return {
        "accuracy": accuracy_table(comparison),
        "target": target_table(comparison),
        "runs": runs_table(group.study),
    }


def _figures(group: Group) -> Iterator[tuple[str, Figure]]:
    study = group.study
    records = [record for by_seed in study.runs.values() for record in by_seed.values()]
    if any(len(record.accuracy()[0]) for record in records):
        yield "accuracy", accuracy_figure(study)
    yield from split_pictures(study)
    if any(line.get("readings") for record in records for line in record.rounds):
        yield "diagnostics", diagnostics_figure(study)
    for seed in study.seeds:
        if clients_told(study, seed):
            yield f"clients-seed-{seed}", clients_figure(study, seed)
    axes = axes_of(study)
    if axes is not None and len(axes.values) <= 2:
        yield "sweep", sweep_figure(study, axes)


def _places(groups: Sequence[Group], folder: Path) -> Iterator[tuple[Group, Path]]:
    """One group alone has the folder to itself; several have one below it each."""
    if len(groups) == 1:
        yield groups[0], folder
        return
    for number, group in enumerate(groups, start=1):
        yield group, folder / f"{number}-{file_name(title(group))}"
