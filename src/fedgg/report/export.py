"""Write figures (PNG, SVG), tables (Markdown, LaTeX, CSV) and TensorBoard events of runs to a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedgg.analysis.chart_data import six_digits, sweep_grid
from fedgg.analysis.collect import Group
from fedgg.analysis.compare import compare
from fedgg.errors import UserError
from fedgg.files import file_name, make_folder, write_output
from fedgg.report.data_figures import split_figures
from fedgg.report.figure_style import save
from fedgg.report.page_data import title
from fedgg.report.run_figures import clients_by_label, clients_figure, diagnostics_figure, score_figure, sweep_figure
from fedgg.report.tables import Table, as_csv, as_latex, as_markdown, runs_table, score_table, target_table
from fedgg.runfolder.measure import Measure
from fedgg.runfolder.record_types import RunRecord, StudyRecord
from fedgg.runfolder.tensorboard_events import event_classes, safe_name, scalars_of


def check_tensorboard(folder: Path) -> None:
    """UserError if the package is not installed, or the folder already contains events."""
    event_classes("--tensorboard")
    if folder.exists() and next(folder.rglob("events.out.tfevents.*"), None) is not None:
        raise UserError(f"{folder} already contains event files, and TensorBoard would show both: give an empty folder")


def write_events(groups: Sequence[Group], folder: Path, doing: Callable[[str], None] = lambda what: None) -> int:
    """Write a folder of events for each run, with the round as the step; the number of runs."""
    file_writer, event, summary = event_classes("--tensorboard")
    count = 0
    for number, group in enumerate(groups, start=1):
        safe = {label: safe_name(label) for label in group.study.labels}
        if len(set(safe.values())) < len(safe):  # labels that differ in other characters only
            safe = {label: f"{name}-{at}" for at, (label, name) in enumerate(safe.items(), start=1)}
        for label, by_seed in group.study.runs.items():
            for seed, record in by_seed.items():
                doing(f"writing events of {label}, seed {seed}")
                names = [f"group-{number}"] if len(groups) > 1 else []
                place = folder.joinpath(*names, safe[label], f"seed-{seed}")
                try:
                    make_folder(place, folder)
                    writer = file_writer(str(place))
                except OSError as error:
                    raise UserError(
                        f"{place} cannot be written: {error.strerror or error}; choose another place"
                    ) from error
                for when, step, values in scalars(record):
                    scalar = [summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
                    writer.add_event(event(wall_time=when, step=step, summary=summary(value=scalar)))
                writer.close()
                count += 1
    return count


def scalars(record: RunRecord) -> Iterator[tuple[float, int, dict[str, float]]]:
    """For each round: the seconds since the start, the round, and its numbers."""
    passed = 0.0
    for line in record.rounds:
        passed += sum((line.get("seconds") or {}).values())
        numbers = {key: measure.at(line) for key, measure in record.measures.items()} | scalars_of(line)
        values = {key: six_digits(value) for key, value in numbers.items()}
        yield passed, line["round"], {key: value for key, value in values.items() if value is not None}


FORMS = {"md": as_markdown, "tex": as_latex, "csv": as_csv}


def write_study_figures(study: StudyRecord, folder: Path, metric: str | None = None) -> Path:
    """Write `accuracy.png`, or the same of another measure, and `split-seed-N.png`; where the first is."""
    measure = study.measure(metric)
    curves = folder / f"{measure.file}.png"
    save(score_figure(study, measure), curves)
    for name, figure in split_figures(study):
        save(figure, folder / f"{name}.png")
    return curves


def write_figures(
    groups: Sequence[Group],
    folder: Path,
    doing: Callable[[str], None] = lambda what: None,
    metric: str | None = None,
) -> list[Path]:
    """accuracy, split-seed-N, diagnostics, clients-seed-N and sweep, as far as the runs have their data.

    `metric` names another measure than the primary metric: `test_rmse` instead of `accuracy`.
    """
    files = []
    for group, place in _places(groups, folder):
        for name, figure in _figures(group, group.measure(metric)):
            doing(f"drawing {name}")
            files += [save(figure, place / f"{name}.{kind}", folder) for kind in ("png", "svg")]
    return files


def write_tables(groups: Sequence[Group], folder: Path, metric: str | None = None) -> list[Path]:
    """accuracy (or another measure, as above), target and runs, as Markdown, LaTeX and CSV."""
    return [
        write_output(place / f"{name}.{kind}", written(table), folder)
        for group, place in _places(groups, folder)
        for name, table in _tables(group, group.measure(metric)).items()
        for kind, written in FORMS.items()
    ]


def _tables(group: Group, measure: Measure) -> dict[str, Table]:
    comparison = compare(group.study, measure)
    return {
        measure.file: score_table(comparison),
        "target": target_table(comparison),
        "runs": runs_table(group.study, measure),
    }


def _figures(group: Group, measure: Measure) -> Iterator[tuple[str, Figure]]:
    study = group.study
    records = study.records
    if any(len(record.scores(measure)[0]) for record in records):
        yield measure.file, score_figure(study, measure)
    yield from split_figures(study)
    if any(line.get("readings") for record in records for line in record.rounds):
        yield "diagnostics", diagnostics_figure(study)
    for seed in study.seeds:
        if clients_by_label(study, seed):
            yield f"clients-seed-{seed}", clients_figure(study, seed, measure)
    grid = sweep_grid(study)
    if grid is not None and len(grid.values) <= 2:
        yield "sweep", sweep_figure(study, grid, measure)


def _places(groups: Sequence[Group], folder: Path) -> Iterator[tuple[Group, Path]]:
    """A single group is written to the folder itself, several to a subfolder each."""
    if len(groups) == 1:
        yield groups[0], folder
        return
    for number, group in enumerate(groups, start=1):
        yield group, folder / f"{number}-{file_name(title(group))}"
