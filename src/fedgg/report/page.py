"""The report: one file with charts and data, and static tables for browsers without JavaScript."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedgg.analysis.collect import Gathering, Group, Problem
from fedgg.analysis.compare import compare
from fedgg.errors import UserError
from fedgg.output_files import write_text
from fedgg.report.html import asset, document, html_notes, html_table
from fedgg.report.page_data import Data, group_data, runs_data, shown
from fedgg.report.style import COLOURS, COLOURS_ON_DARK
from fedgg.report.tables import VERDICTS, comparison_tables

SCRIPTS = (
    "text",
    "series",
    "charts",
    "curves",
    "results",
    "split",
    "clients",
    "diagnostics",
    "sweep",
    "facts",
    "live",
    "page",
)


def write_page(
    paths: Sequence[Path],
    file: Path,
    beside: Mapping[str, str] | None = None,
    doing: Callable[[str], None] = lambda what: None,
) -> Gathering:
    """The page of these folders as a file, and what was read for it; UserError where there is nothing to report."""
    gathering = Gathering(list(paths))
    gathering.look()
    if not any(any(group.study.runs.values()) for group in gathering.groups):
        why = "; ".join(f"{problem.path}: {problem.why}" for problem in gathering.problems)
        named = ", ".join(map(str, gathering.paths))
        raise UserError(f"there is nothing to report: {why or f'none of the runs of {named} has begun'}")
    doing("writing the page")
    write_text(file, report_html(gathering, beside))
    return gathering


def report_html(gathering: Gathering, beside: Mapping[str, str] | None = None) -> str:
    """The page of all groups; `beside` are files in the same folder to link to, and what they are."""
    groups, data, problems = shown(gathering.groups, lambda group: group_data(group) | {"runs": runs_data(group)})
    return page_of(groups, [*gathering.problems, *problems], {"groups": data}, beside)


def page_of(
    groups: Sequence[Group],
    problems: Sequence[Problem],
    data: Data,
    beside: Mapping[str, str] | None = None,
    live: bool = False,
) -> str:
    content: dict[str, Any] = {
        **data,
        "live": live,
        "problems": [vars(problem) for problem in problems],
        "palette": {"light": COLOURS, "dark": COLOURS_ON_DARK},
        "verdicts": VERDICTS,
    }
    title = data["groups"][0]["title"] if data["groups"] else "No run yet"
    return document(
        f"{title}: fedgg",
        _body(groups, problems, data, beside or {}),
        scripts=(_plotly(), script()),
        data=content,
        live=live,
    )


@cache
def script() -> str:
    """Our own script, its parts one behind the other."""
    return "\n".join(asset(f"{name}.js") for name in SCRIPTS)


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # takes a quarter of a second, so not at import

    return str(get_plotlyjs())


def _body(groups: Sequence[Group], problems: Sequence[Problem], data: Data, beside: Mapping[str, str]) -> str:
    """The frame that the script fills, and the static content shown without JavaScript."""
    static = "".join(_static(group, content) for group, content in zip(groups, data["groups"], strict=True))
    links = "".join(f'<p><a href="{escape(quote(file))}">{escape(says)}</a></p>\n' for file, says in beside.items())
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


def _static(group: Group, content: Data) -> str:
    found = content["answer"]
    said = f'<p class="answer">{escape(found["said"])}</p>\n<p class="soft">{escape(found["method"])}</p>\n'
    tables = "".join(html_table(table) for table in comparison_tables(compare(group.study)))
    head = f'<h1>{escape(content["title"])}</h1>\n<p class="soft">{escape(content["about"])}</p>\n'
    return f"<section>\n{head}{said}{tables}</section>\n"
