"""Tables and figures as HTML that needs no script, and a page of them: for the paper's tables beside ours."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure

from fedgg.report.document import document
from fedgg.report.html_tables import html_notes, html_table
from fedgg.report.style import house_style
from fedgg.report.tables import Table


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


def page(title: str, lead: Sequence[str], sections: Sequence[Section], beside: Mapping[str, str] | None = None) -> str:
    """The whole page; `beside` are files that lie in the same folder, and what they are."""
    beside = beside or {}
    links = "".join(f'<li><a href="#{escape(s.name)}">{escape(s.heading)}</a></li>\n' for s in sections)
    paragraphs = "".join(f'<p class="lead">{escape(text)}</p>\n' for text in lead)
    body = "".join(map(_section, sections))
    see_also = "".join(f'<li><a href="{escape(file)}">{escape(says)}</a></li>\n' for file, says in beside.items())
    return document(
        title,
        f'<header>\n<h1>{escape(title)}</h1>\n{paragraphs}<nav aria-label="Contents">\n<ul>\n{links}{see_also}</ul>\n'
        f"</nav>\n</header>\n<main>\n{body}</main>\n",
    )


def inline_svg(picture: Picture, name: str) -> str:
    """The drawing itself, its identifiers prefixed so that several drawings can stand on one page."""
    file = io.StringIO()
    with house_style():
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
