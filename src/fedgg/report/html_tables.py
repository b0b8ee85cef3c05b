"""Tables as HTML that says what its cells are, to those who see it and to those who hear it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from fedgg.report.tables import Table


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
