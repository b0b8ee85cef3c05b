"""The report: one file that opens from disk, with its charts, its data and, for readers without script, its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from typing import Any
from urllib.parse import quote

from fedgg.report.compare import compare
from fedgg.report.document import asset, document
from fedgg.report.gathering import Gathering, Group, Problem
from fedgg.report.html_tables import html_notes, html_table
from fedgg.report.page_data import Data, group_data, runs_data, shown
from fedgg.report.style import COLOURS, COLOURS_ON_DARK
from fedgg.report.tables import comparison_tables

SCRIPTS = (
    "text",
    "series",
    "charts",
    "curves",
    "results",
    "split",
    "clients",
    "readings",
    "sweep",
    "facts",
    "live",
    "page",
)


def report_html(gathering: Gathering, beside: Mapping[str, str] | None = None) -> str:
    """The page of everything gathered; `beside` are files that lie in the same folder, and what they are."""
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
    from plotly.offline import get_plotlyjs  # a quarter of a second, which only a page has to wait for

    return str(get_plotlyjs())


def _body(groups: Sequence[Group], problems: Sequence[Problem], data: Data, beside: Mapping[str, str]) -> str:
    """The frame that the script fills, and what stands in its place without one."""
    static = "".join(_static(group, content) for group, content in zip(groups, data["groups"], strict=True))
    links = "".join(f'<p><a href="{escape(quote(file))}">{escape(says)}</a></p>\n' for file, says in beside.items())
    troubles = html_notes([f"{problem.path} {problem.what}: {problem.why}" for problem in problems])
    return (
        '<a class="skip" href="#results">To the results</a>\n'
        '<header id="head" hidden>\n<div class="top"><div id="groups" class="controls"></div>\n'
        '<div class="controls"><span id="live" class="soft pulse" role="status" hidden></span>'
        '<button type="button" id="theme" hidden>Colours: auto</button></div></div>\n'
        '<h1 id="title"></h1>\n<p id="about" class="soft"></p>\n<p id="answer" class="answer"></p>\n'
        '<p id="method" class="soft"></p>\n<div id="troubles" class="notice" role="alert" hidden></div>\n'
        '<nav aria-label="Contents"><ul id="contents"></ul></nav>\n</header>\n'
        f'{links}<main id="app">\n</main>\n'
        f'<div id="static">\n{static}{troubles}<noscript><p class="notice">Charts, sorting and the target need '
        "JavaScript, which is off here; nothing of it comes from anywhere but this file.</p></noscript>\n</div>\n"
    )


def _static(group: Group, content: Data) -> str:
    found = content["answer"]
    said = f'<p class="answer">{escape(found["said"])}</p>\n<p class="soft">{escape(found["method"])}</p>\n'
    tables = "".join(html_table(table) for table in comparison_tables(compare(group.study)))
    head = f'<h1>{escape(content["title"])}</h1>\n<p class="soft">{escape(content["about"])}</p>\n'
    return f"<section>\n{head}{said}{tables}</section>\n"
