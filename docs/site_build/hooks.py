"""Events of mkdocs: pages from outside docs/, generated pages, and links that work here and on a code host."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))

from notebook_pages import notebook_page, notebook_paths, notebooks_index
from reference_pages import Undocumented, reference_pages
from repository_links import DOCS, OUTSIDE, ROOT, line_anchor, linked_sources, site_links, source_page
from source_pages import decisions_index, source_page_text

_PLACES: dict[str, str] = {}  # the file of the repository behind a page of the site
_SHOWN: dict[str, str] = {}  # the file that the page at an address shows


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not Markdown files of docs/."""
    places = {page: place for place, page in OUTSIDE.items()}
    places |= {one.src_uri: f"{DOCS}/{one.src_uri}" for one in files.documentation_pages()}
    _PLACES.clear()
    _PLACES.update(places)
    for place, page in OUTSIDE.items():
        _add(files, config, page, (ROOT / place).read_text(encoding="utf-8"))
    for path in notebook_paths():
        text, pictures = notebook_page(path)
        _PLACES[f"notebooks/{path.stem}.md"] = f"{DOCS}/notebooks/{path.name}"
        _add(files, config, f"notebooks/{path.stem}.md", text)
        for name, content in pictures.items():
            _add(files, config, f"notebooks/{name}", content)
    _add(files, config, "notebooks/index.md", notebooks_index())
    _add(files, config, "decisions/index.md", decisions_index())
    try:
        generated = reference_pages()
    except Undocumented as error:
        raise PluginError(str(error)) from error
    for page, text in generated.items():
        _add(files, config, page, text)
    sources = {"src/fedgg/runfolder/validation.py"}
    for place in set(_PLACES.values()):
        if place.endswith(".md"):
            sources |= set(linked_sources((ROOT / place).read_text(encoding="utf-8"), place))
    for place in sorted(sources):
        _add(files, config, source_page(place), source_page_text(place))
        _SHOWN[source_page(place).removesuffix(".md") + ".html"] = place
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    place = _PLACES.get(page.file.src_uri)
    return markdown if place is None else site_links(markdown, place, page.file.src_uri)


def on_page_content(html: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links that name a function lead to its line, unknown to mkdocs. Values with ± are not broken in cells."""

    def at_its_line(match: re.Match[str]) -> str:
        place = _SHOWN.get(posixpath.normpath(posixpath.join(posixpath.dirname(page.url), match[1])))
        anchor = line_anchor(place, match[2]) if place else ""
        return f'<a href="{match[1]}{anchor}"><code>{match[2]}</code></a>'

    html = re.sub(r"<td[^>]*>.*?</td>", lambda cell: re.sub(r"(?<=\d) ± (?=\d)", "&nbsp;±&nbsp;", cell[0]), html)
    return re.sub(r'<a href="([^"#]+)"><code>(\w+)</code></a>', at_its_line, html)


def _add(files: Files, config: MkDocsConfig, page: str, content: str | bytes) -> None:
    listed = not page.startswith("source/")  # pages that show a file are reached by links only
    inclusion = InclusionLevel.INCLUDED if listed else InclusionLevel.NOT_IN_NAV
    files.append(File.generated(config, page, content=content, inclusion=inclusion))
