"""The report page: one HTML file with charts and their data, and static tables for browsers without JavaScript."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedgg.analysis.collect import Group, Problem, RunCollection
from fedgg.errors import UserError
from fedgg.output_files import write_text
from fedgg.report.figure_style import COLOURS, COLOURS_ON_DARK
from fedgg.report.html import asset, document, html_notes, html_table
from fedgg.report.page_data import Data, PageGroup, page_group, page_groups, runs_data
from fedgg.report.tables import VERDICTS, comparison_tables

SCRIPTS = (
    "elements",
    "series",
    "charts",
    "curves",
    "results",
    "split",
    "clients",
    "diagnostics",
    "sweep",
    "events",
    "settings",
    "live",
    "page",
)


def write_page(
    paths: Sequence[Path],
    file: Path,
    beside: Mapping[str, str] | None = None,
    doing: Callable[[str], None] = lambda what: None,
) -> RunCollection:
    """Write the page of these folders; the runs that were read for it. UserError where there is nothing to report."""
    collection = RunCollection(list(paths))
    collection.refresh()
    if not any(any(group.study.runs.values()) for group in collection.groups):
        why = "; ".join(f"{problem.path}: {problem.why}" for problem in collection.problems)
        named = ", ".join(map(str, collection.paths))
        raise UserError(f"there is nothing to report: {why or f'none of the runs of {named} has started'}")
    doing("writing the page")
    write_text(file, report_html(collection, beside))
    return collection


def report_html(collection: RunCollection, beside: Mapping[str, str] | None = None) -> str:
    """The page of all groups; `beside` are files in the same folder to link to, with the text of the link."""
    groups, problems = page_groups(collection.groups, _with_runs)
    return page_html(groups, [*collection.problems, *problems], {"groups": [shown.data for shown in groups]}, beside)


def _with_runs(group: Group) -> PageGroup:
    shown = page_group(group)
    return replace(shown, data=shown.data | {"runs": runs_data(group)})


def page_html(
    groups: Sequence[PageGroup],
    problems: Sequence[Problem],
    data: Data,
    beside: Mapping[str, str] | None = None,
    live: bool = False,
) -> str:
    """The page of some groups; `data` is what its scripts draw, in the same order."""
    content: dict[str, Any] = {
        **data,
        "live": live,
        "problems": [vars(problem) for problem in problems],
        "palette": {"light": COLOURS, "dark": COLOURS_ON_DARK},
        "verdicts": VERDICTS,
    }
    title = groups[0].data["title"] if groups else "No run yet"
    return document(
        f"{title}: fedgg",
        _body(groups, problems, beside or {}),
        scripts=(_plotly(), script()),
        data=content,
        live=live,
    )


@cache
def script() -> str:
    """The page's own script, made of all its files."""
    return "\n".join(asset(f"{name}.js") for name in SCRIPTS)


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # takes a quarter of a second, so not at import

    return str(get_plotlyjs())


def _body(groups: Sequence[PageGroup], problems: Sequence[Problem], beside: Mapping[str, str]) -> str:
    """The elements that the script fills, and the static content shown without JavaScript."""
    static = "".join(map(_static, groups))
    links = "".join(f'<p><a href="{escape(quote(file))}">{escape(text)}</a></p>\n' for file, text in beside.items())
    troubles = html_notes([f"{problem.path} {problem.what}: {problem.why}" for problem in problems])
    return (
        '<a class="skip" href="#results">Skip to the results</a>\n'
        '<header id="head" hidden>\n<div class="top"><div id="groups" class="controls"></div>\n'
        '<div class="controls"><span id="live" class="soft pulse" role="status" hidden></span>'
        '<button type="button" id="theme" hidden>Theme: auto</button></div></div>\n'
        '<h1 id="title"></h1>\n<p id="about" class="soft"></p>\n<p id="answer" class="answer"></p>\n'
        '<p id="method" class="soft"></p>\n<div id="troubles" class="notice" role="alert" hidden></div>\n'
        '<nav aria-label="Contents"><ul id="contents"></ul></nav>\n</header>\n'
        f'{links}<main id="app">\n</main>\n'
        f'<div id="static">\n{static}{troubles}<noscript><p class="notice">Charts, sorting and targets need '
        "JavaScript, which is disabled. All scripts are in this file; nothing is loaded from elsewhere.</p></noscript>"
        "\n</div>\n"
    )


def _static(shown: PageGroup) -> str:
    data = shown.data
    head = f'<h1>{escape(data["title"])}</h1>\n<p class="soft">{escape(data["about"])}</p>\n'
    answer, method = (escape(data["answer"][key]) for key in ("text", "method"))
    tables = "".join(html_table(table) for table in comparison_tables(shown.comparison))
    return f'<section>\n{head}<p class="answer">{answer}</p>\n<p class="soft">{method}</p>\n{tables}</section>\n'
