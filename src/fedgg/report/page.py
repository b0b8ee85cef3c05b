"""One self-contained HTML page of tables and figures: no script, no request to anywhere, light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import matplotlib
from matplotlib.figure import Figure

from fedgg.report.style import SETTINGS
from fedgg.report.tables import Table

_CSS = """
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #5f6368; --line: #d9d9de; --ground: #fff; --band: #f6f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ea; --soft: #a5a8ad; --line: #3b3c40; --ground: #17181a; --band: #202124 }
  figure svg { filter: invert(1) hue-rotate(180deg) }
}
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem; color: var(--ink); background: var(--ground);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.2rem; margin: 3rem 0 .5rem }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; padding: 0 }
a { color: inherit }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
th, td { padding: .3rem .75rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
thead th { vertical-align: bottom; white-space: normal } tbody th { font-weight: 500 }
th.text, td.text { text-align: left }
tbody tr:hover { background: var(--band) }
figure { margin: 1rem 0 } figure svg { width: 100%; height: auto; max-width: 70rem }
figcaption, .notes { color: var(--soft); font-size: .85rem } .notes { padding-left: 1.1rem; max-width: 60rem }
.lead { max-width: 50rem }
"""


@dataclass(frozen=True)
class Picture:
    """A figure with what a reader who cannot see it should know."""

    figure: Figure
    shows: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading with the tables and figures under it; `name` is its place in the page's address."""

    name: str
    heading: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()


def page(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole page."""
    links = "".join(f'<li><a href="#{escape(s.name)}">{escape(s.heading)}</a></li>\n' for s in sections)
    paragraphs = "".join(f'<p class="lead">{escape(text)}</p>\n' for text in lead)
    body = "".join(map(_section, sections))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n<header>\n<h1>{escape(title)}</h1>\n{paragraphs}"
        f'<nav aria-label="Contents">\n<ul>\n{links}</ul>\n</nav>\n</header>\n<main>\n{body}</main>\n</body>\n</html>\n'
    )


def html_table(table: Table, heading: str = "") -> str:
    """A table with a caption, headings that say what they head, and its notes below.

    A caption that says what the heading above it says is there for those who hear the page.
    """
    text = [all(_is_text(row[at]) for row in table.rows) for at in range(len(table.columns))]
    head = "".join(_cell("th", name, text[at], ' scope="col"') for at, name in enumerate(table.columns))
    # A row is headed by its first cells up to the last one that is needed to tell it from the others.
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
        f"<tbody>\n{''.join(rows)}</tbody>\n</table>\n</div>\n{_notes(table.notes)}"
    )


def inline_svg(picture: Picture, name: str) -> str:
    """The drawing itself, its identifiers prefixed so that several drawings can stand on one page."""
    file = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
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
    notes = _notes(section.notes)
    return f'<section id="{name}" aria-label="{heading}">\n<h2>{heading}</h2>\n{pictures}{tables}{notes}</section>\n'


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>\n" for note in notes)
    return f'<ul class="notes">\n{items}</ul>\n' if notes else ""


def _cell(tag: str, content: str, is_text: bool, more: str = "") -> str:
    kind = ' class="text"' if is_text else ""
    return f"<{tag}{kind}{more}>{escape(content)}</{tag}>"


def _is_text(cell: str) -> bool:
    """Words, rather than a number with its spread."""
    return bool(re.match(r"[A-Za-z]", cell)) and cell not in ("missing", "never", "reference", "diverged")
