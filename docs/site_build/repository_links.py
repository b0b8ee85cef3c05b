"""Links of the repository's Markdown files, as links of the site.

The Markdown files are read on a code host and in the site, and their links are relative to the repository. In the site,
README.md and other files outside docs/ are pages, notebooks are pages, and a link to a source file leads to a page that
shows it. A target that does not exist is left as it is, and mkdocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = "docs"
# Pages of the site that are Markdown files outside docs/.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "ROADMAP.md": "roadmap.md",
    "benchmarks/README.md": "benchmarks.md",
}
FOLDERS = {"docs/decisions": "decisions/index.md", "docs/notebooks": "notebooks/index.md"}
SHOWN_AS_TEXT = (".py", ".toml", ".json", ".jsonl", ".txt", ".cff", ".yml", ".sh", "")
LONGEST_SHOWN = 200_000  # characters; of longer files the page shows the beginning
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^(```|~~~)", re.M)


def page_of(place: str) -> str | None:
    """The page of the site for a file or folder of the repository, or None if the site has no page for it."""
    path = ROOT / place
    if place in OUTSIDE:
        return OUTSIDE[place]
    if place in FOLDERS:
        return FOLDERS[place]
    if place.startswith(f"{DOCS}/"):
        inside = place.removeprefix(f"{DOCS}/")
        return inside.removesuffix(".ipynb") + ".md" if inside.endswith(".ipynb") else inside
    if path.is_dir() or (path.is_file() and path.suffix in SHOWN_AS_TEXT):
        return source_page(place)
    return None


def source_page(place: str) -> str:
    """The page that shows a file outside docs/, or lists a folder."""
    return f"source/{place.replace('.', '_')}.md"


def site_links(markdown: str, place: str, page: str) -> str:
    """The Markdown of the file `place`, with its links as the site's page `page` needs them."""

    def replaced(match: re.Match[str]) -> str:
        target = _repository_place(match[2], place)
        if target is None:
            return match[0]
        found = page_of(target)
        if found is None or not (ROOT / target).exists():
            return match[0]
        _, hash_, anchor = match[2].partition("#")
        anchor = "" if found.startswith("source/") else hash_ + anchor
        return f"{match[1]}{posixpath.relpath(found, posixpath.dirname(page) or '.')}{anchor}{match[3]}"

    return "".join(part if is_code else LINK.sub(replaced, part) for part, is_code in _parts(markdown))


def line_anchor(place: str, function: str) -> str:
    """The place of a function on the page that shows its file."""
    lines = (ROOT / place).read_text(encoding="utf-8").splitlines() if place.endswith(".py") else []
    numbers = [number for number, line in enumerate(lines, 1) if line.startswith(f"def {function}(")]
    return f"#__codelineno-0-{numbers[0]}" if numbers else ""


def linked_sources(markdown: str, place: str) -> Iterator[str]:
    """Files and folders outside docs/ that are not Markdown, to which the file links."""
    for part, is_code in _parts(markdown):
        for match in () if is_code else LINK.finditer(part):
            target = _repository_place(match[2], place)
            if target is not None and (ROOT / target).exists() and (page_of(target) or "").startswith("source/"):
                yield target


def _repository_place(link: str, place: str) -> str | None:
    """The file of the repository that a link of `place` leads to; None for a link within the page or to the web."""
    target = link.partition("#")[0]
    if not target or re.match(r"[a-z]+:", target) or target.startswith("/"):
        return None
    joined = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    return None if joined.startswith("..") else joined


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it is a fenced block of code."""
    is_code, start = False, 0
    for fence in FENCE.finditer(markdown):
        yield markdown[start : fence.start()], is_code
        is_code, start = not is_code, fence.start()
    yield markdown[start:], is_code
