"""The report: one HTML file with charts and their data, static tables without JavaScript, escaping of all data."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from matplotlib.figure import Figure

from fedgg.analysis.collect import Group, Problem, RunCollection
from fedgg.errors import UserError
from fedgg.files import as_unicode, write_output
from fedgg.report.figure_style import COLOURS, COLOURS_ON_DARK, figure_style
from fedgg.report.page_data import Data, PageGroup, page_group, page_groups, runs_data
from fedgg.report.tables import VERDICTS, Table, comparison_tables

ASSETS = Path(__file__).parent / "assets"


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def document(title: str, body: str, *, scripts: Sequence[str] = (), data: Any = None, live: bool = False) -> str:
    """A whole document, with `data` as JSON in the element `data`; the browser runs only these scripts."""
    block = "" if data is None else f'<script type="application/json" id="data">{as_json(data)}</script>\n'
    code = "".join(f"<script>{script}</script>\n" for script in scripts)
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts, live)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{asset('page.css')}</style>\n</head>\n"
        f"<body>\n{body}{block}{code}</body>\n</html>\n"
    )
    return as_unicode(page)


def as_json(data: Any) -> str:
    """JSON for embedding in a page: no character in it can end the element or start a tag."""
    try:
        text = _compact(data)
    except ValueError:  # JSON has no NaN, though Python writes one
        text = _compact(_finite(data))
    return as_unicode(re.sub("[<>&\u2028\u2029]", lambda character: f"\\u{ord(character[0]):04x}", text))


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def policy(scripts: Sequence[str], live: bool) -> str:
    """The content-security policy: only these scripts run, nothing is loaded; a live page may request its server."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    requests = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {requests}; base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def html_table(table: Table, heading: str = "") -> str:
    """A table with a caption, row and column headings, and its notes below.

    A caption that repeats the heading above the table is hidden, except for screen readers.
    """
    text = [all(_is_text(row[at]) for row in table.rows) for at in range(len(table.columns))]
    head = "".join(_cell("th", name, text[at], ' scope="col"') for at, name in enumerate(table.columns))
    # The first cell of a row is its heading; the first two if the first is not unique.
    heads = 1 if len({row[0] for row in table.rows}) == len(table.rows) else 2
    unseen = ' class="unseen"' if table.title == heading else ""
    rows = []
    for row in table.rows:
        cells = [
            _cell("th", cell, text[at], ' scope="row"') if at < heads else _cell("td", cell, text[at])
            for at, cell in enumerate(row)
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<div class="scroll">\n<table>\n<caption{unseen}>{escape(table.title)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{''.join(rows)}</tbody>\n</table>\n</div>\n{html_notes(table.notes)}"
    )


def html_notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>\n" for note in notes)
    return f'<ul class="notes">\n{items}</ul>\n' if notes else ""


def _cell(tag: str, content: str, is_text: bool, more: str = "") -> str:
    kind = ' class="text"' if is_text else ""
    return f"<{tag}{kind}{more}>{escape(content)}</{tag}>"


def _is_text(cell: str) -> bool:
    """Words, rather than a number with its spread."""
    return bool(re.match(r"[A-Za-z]", cell)) and cell not in ("missing", "never", "reference", "diverged")


@dataclass(frozen=True)
class Picture:
    """A figure with its caption, and a description for screen readers."""

    figure: Figure
    shows: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading with the tables and figures under it; `name` is its fragment in the page's address."""

    name: str
    heading: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()


def page(title: str, lead: Sequence[str], sections: Sequence[Section], beside: Mapping[str, str] | None = None) -> str:
    """A static page; `beside` are files in the same folder to link to, with the text of the link."""
    beside = beside or {}
    links = "".join(f'<li><a href="#{escape(s.name)}">{escape(s.heading)}</a></li>\n' for s in sections)
    paragraphs = "".join(f'<p class="lead">{escape(text)}</p>\n' for text in lead)
    body = "".join(map(_section, sections))
    see_also = "".join(f'<li><a href="{escape(file)}">{escape(text)}</a></li>\n' for file, text in beside.items())
    return document(
        title,
        f'<header>\n<h1>{escape(title)}</h1>\n{paragraphs}<nav aria-label="Contents">\n<ul>\n{links}{see_also}</ul>\n'
        f"</nav>\n</header>\n<main>\n{body}</main>\n",
    )


def inline_svg(picture: Picture, name: str) -> str:
    """The figure as SVG, its identifiers prefixed with `name` so that a page can hold several."""
    file = io.StringIO()
    with figure_style():
        picture.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(picture.shows)}" ', 1)


def _section(section: Section) -> str:
    tables = "".join(html_table(table, section.heading) for table in section.tables)
    pictures = "".join(
        f"<figure>\n{inline_svg(picture, f'{section.name}-{at}')}<figcaption>{escape(picture.caption)}</figcaption>\n"
        "</figure>\n"
        for at, picture in enumerate(section.pictures)
    )
    name, heading = escape(section.name), escape(section.heading)
    notes = html_notes(section.notes)
    return f'<section id="{name}" aria-label="{heading}">\n<h2>{heading}</h2>\n{pictures}{tables}{notes}</section>\n'


SCRIPTS = (
    "elements",
    "series",
    "charts",
    "curves",
    "results",
    "split",
    "clients",
    "classes",
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
    progress: Callable[[str], None] = lambda step: None,
    metric: str | None = None,
) -> RunCollection:
    """Write the page of these folders, and return the runs read for it; UserError if no run has started.

    `metric` names the measure that the page shows first, instead of the primary metric.
    """
    collection = RunCollection(list(paths))
    collection.refresh()
    if not any(any(group.study.runs.values()) for group in collection.groups):
        why = "; ".join(f"{problem.path}: {problem.why}" for problem in collection.problems)
        named = ", ".join(map(str, collection.paths))
        raise UserError(f"there is nothing to report: {why or f'none of the runs of {named} has started'}")
    collection.check_metric(metric)
    progress("writing the page")
    write_output(file, report_html(collection, beside, metric))
    return collection


def report_html(collection: RunCollection, beside: Mapping[str, str] | None = None, metric: str | None = None) -> str:
    """The page of all groups; `beside` are files in the same folder to link to, with the text of the link."""
    groups, problems = page_groups(collection.groups, partial(_with_runs, metric=metric))
    return page_html(groups, [*collection.problems, *problems], {"groups": [shown.data for shown in groups]}, beside)


def _with_runs(group: Group, metric: str | None) -> PageGroup:
    shown = page_group(group, metric)
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
    """The page's script, joined from its files."""
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
    conclusion = data["results"][data["measure"]]["answer"]
    answer, method = (escape(conclusion[key]) for key in ("text", "method"))
    tables = "".join(html_table(table) for table in comparison_tables(shown.comparison))
    return f'<section>\n{head}<p class="answer">{answer}</p>\n<p class="soft">{method}</p>\n{tables}</section>\n'
