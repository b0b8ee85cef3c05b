"""Make the chosen tables and figures, and write them as Markdown, CSV, PNG, SVG and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedgg.files import write_text, writing_to
from fedgg.paper.figures import PaperFigure, paper_figure
from fedgg.paper.find_or_run import Results
from fedgg.paper.items import ITEMS, Item, shown_dataset
from fedgg.paper.plan import ReproductionPlan
from fedgg.paper.tables import Accuracy, paper_table, study_table, titled
from fedgg.report.figure_style import save
from fedgg.report.page import Picture, Section, page
from fedgg.report.tables import Table, as_csv, as_markdown

TITLE = "Global Update Guided Federated Learning: the paper's tables and figures, run again"
TITLE_OF_LITERATURE = "Algorithms in the protocols of other papers"
REPORT = "report.html"  # the page of all runs, which the command writes last
NOTHING = "Not drawn: it has no finished runs."


@dataclass(frozen=True)
class ItemOutput:
    """An item as a table, or as a figure (None if it has no runs)."""

    item: Item
    runs: int  # of those that it needs, how many there are
    table: Table | None = None
    figure: PaperFigure | None = None


def make_items(
    plan: ReproductionPlan, results: Results, accuracy: Accuracy, data_folder: Path | None = None, run: bool = True
) -> list[ItemOutput]:
    outputs = []
    for item in plan.items:
        runs = sum(results.record(method, seed) is not None for method, seed in plan.runs([item]))
        if item.kind == "study":
            outputs.append(ItemOutput(item, runs, table=study_table(plan, item, results)))
        elif item.is_table:
            outputs.append(ItemOutput(item, runs, table=paper_table(plan, item, results, accuracy)))
        else:
            outputs.append(ItemOutput(item, runs, figure=paper_figure(plan, item, results, data_folder, run)))
    return outputs


def write_items(plan: ReproductionPlan, outputs: Sequence[ItemOutput], out: Path) -> list[Path]:
    """Write all files, named by the items."""
    files = []
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        for output in outputs:
            name = output.item.name
            table = output.table or (output.figure.numbers if output.figure else None)
            if table is not None:
                files.append(_written(out / f"{name}.csv", as_csv(table)))
            if output.figure:
                files += [save(output.figure.figure, out / f"{name}.{kind}") for kind in ("png", "svg")]
        files.append(_written(out / f"{page_name(plan)}.md", markdown(plan, outputs)))
        files.append(_written(out / f"{page_name(plan)}.html", html(plan, outputs)))
    return files


def page_name(plan: ReproductionPlan) -> str:
    """`paper` if all of the paper's items are in it; otherwise the items' names, so that a part does not replace it.

    `literature` if it has exactly the items of other papers.
    """
    names = [item.name for item in plan.items]
    whole = {item.name for item in ITEMS.values() if not item.ours} <= set(names)
    if {item.name for item in ITEMS.values() if item.literature} == set(names):
        return "literature"
    return "paper" if whole else "-".join(names)


def markdown(plan: ReproductionPlan, outputs: Sequence[ItemOutput]) -> str:
    parts = [f"# {_title(plan)}\n", *(f"{text}\n" for text in lead(plan))]
    for output in outputs:
        parts.append(f"## {titled(plan, output.item)}\n")
        parts.append(block(output, f"{output.item.name}.png"))
    return "\n".join(parts)


def block(output: ItemOutput, picture: str) -> str:
    """One item as Markdown."""
    if output.table is not None:
        return as_markdown(output.table)
    if output.figure is None:
        return f"{NOTHING}\n"
    parts = [f"![{output.item.title}]({picture})\n", "\n".join(f"- {note}" for note in output.figure.notes) + "\n"]
    parts += [as_markdown(output.figure.summary)] if output.figure.summary else []
    return "\n".join(parts)


def html(plan: ReproductionPlan, outputs: Sequence[ItemOutput]) -> str:
    sections = []
    for output in outputs:
        name, title, figure = output.item.name, titled(plan, output.item), output.figure
        if output.item.ours and len(plan.datasets_of(output.item)) == 1:  # several items may have one title
            title = f"{title}; {shown_dataset(plan.datasets_of(output.item)[0])}"
        if output.table is not None:
            sections.append(Section(name, title, tables=(output.table,)))
        elif figure is None:
            sections.append(Section(name, title, notes=(NOTHING,)))
        else:
            pictures = (Picture(figure.figure, f"{title}. {figure.shows}", figure.shows),)
            tables = (figure.summary,) if figure.summary else ()
            sections.append(Section(name, title, tables, pictures, figure.notes))
    beside = {REPORT: "Every run: curves, clients, settings"} if plan.runs() else {}
    return page(_title(plan), lead(plan), sections, beside)


def _title(plan: ReproductionPlan) -> str:
    return TITLE_OF_LITERATURE if all(item.literature for item in plan.items) else TITLE


def lead(plan: ReproductionPlan) -> list[str]:
    sets = ", ".join(map(shown_dataset, dict.fromkeys(name for item in plan.items for name in plan.datasets_of(item))))
    text = f"{sets}; {plan.rounds()} rounds; seeds {', '.join(map(str, plan.seeds))}."
    if plan.quick:
        return [text, "This is the quick version: small, on other data than the paper's, and not comparable with it."]
    return [text]


def _written(file: Path, content: str) -> Path:
    write_text(file, content)
    return file
