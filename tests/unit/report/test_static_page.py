"""The page stands alone, says what its tables and pictures are, and shows nobody's angle brackets as markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from matplotlib.figure import Figure

from fedgg.report.figure_style import blank, styled
from fedgg.report.page import Picture, Section, page
from fedgg.report.tables import Table

VOID = {"meta", "br", "link", "img", "input"}


class Outline(HTMLParser):
    """Tags in order, with their attributes, and whether they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@styled
def drawing() -> Figure:
    figure = blank(3, 2)
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4])
    axes.fill_between([1, 2], [1, 2], [3, 4])
    return figure


TABLE = Table("Of <numbers>", ("who", "what", "how much"), (("a", "x", "1.0"), ("a", "y", "2.0 ± 0.1")), ("5 < 6",))
PICTURE = Picture(drawing(), "A line that goes up", "Up.")
SECTIONS = [
    Section("one", "Of <numbers>", tables=(TABLE,)),
    Section("two", "Drawn", pictures=(PICTURE, PICTURE), notes=("a note",)),
]
TEXT = page("Title & more", ["First <b>."], SECTIONS)


def outline() -> Outline:
    reader = Outline()
    reader.feed(TEXT)
    assert reader.open == []
    return reader


def test_nothing_is_asked_of_anybody() -> None:
    tags = outline().tags
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    for _, attributes in tags:
        for key in ("src", "href", "xlink:href"):
            assert (attributes.get(key) or "#").startswith("#")
    assert "@import" not in TEXT
    assert not re.findall(r"url\((?!#)", TEXT)


def test_tables_say_what_they_are() -> None:
    tags = outline().tags
    assert [tag for tag, _ in tags].count("caption") == 1
    heads = [attributes["scope"] for tag, attributes in tags if tag == "th"]
    assert heads == ["col"] * 3 + ["row"] * 4  # the first column alone does not tell the rows apart
    assert "<td>2.0 ± 0.1</td>" in TEXT
    assert [attributes.get("aria-label") for tag, attributes in tags if tag == "svg"] == [PICTURE.shows] * 2


def test_what_people_wrote_is_text() -> None:
    assert "Of &lt;numbers&gt;" in TEXT
    assert "<b>" not in TEXT
    assert "5 &lt; 6" in TEXT


def test_identifiers_are_each_used_once_and_references_hit() -> None:
    found = re.findall(r'\bid="([^"]+)"', TEXT)
    assert len(found) == len(set(found))
    referred = set(re.findall(r'(?:href="|url\()#([^")]+)', TEXT))
    assert referred <= set(found)
    assert any("two-1-" in name for name in referred)


def test_light_and_dark() -> None:
    assert "prefers-color-scheme: dark" in TEXT
    assert page("Title & more", ["First <b>."], SECTIONS) == TEXT
