"""Executed notebooks as pages of the site: Markdown, with their pictures as files beside it."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.exceptions import PluginError
from repository_links import DOCS, ROOT

NOTEBOOKS = ROOT / DOCS / "notebooks"


def notebook_paths() -> list[Path]:
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The page's Markdown, and the pictures it shows by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        if cell.execution_count is None:
            raise PluginError(f"{path.name} is not executed: python docs/site_build/execute_notebooks.py {path.stem}")
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            parts.append(_shown(output, f"{path.stem}-{len(pictures)}.png", pictures))
    parts[0] += f"\n\n*A notebook, `docs/notebooks/{path.name}`; the outputs are those of its last run.*"
    return "\n\n".join(parts) + "\n", pictures


def _shown(output: Any, picture: str, pictures: dict[str, bytes]) -> str:
    """One output as Markdown; a picture is added to `pictures` under this name."""
    if output.output_type == "stream":
        return _text(output.text)
    if output.output_type == "error":
        raise PluginError(f"a cell ended with {output.ename}: {output.evalue}")
    data = output.data
    if "image/png" in data:
        pictures[picture] = base64.b64decode(data["image/png"])
        return f"![Output of the cell above]({picture})"
    if "text/markdown" in data:
        return f'<div class="output" markdown>\n\n{data["text/markdown"]}\n\n</div>'
    if "text/html" in data:  # a table of pandas, in the style of the site
        table = re.sub(r"<style.*?</style>|(?<=<table)[^>]*", "", data["text/html"], flags=re.S)
        return re.sub(r"^\s+", "", table, flags=re.M)
    return _text(data["text/plain"])


def _text(text: str) -> str:
    return f"``` {{ .text .output }}\n{text.rstrip()}\n```"


def notebooks_index() -> str:
    """A list of the notebooks with the first sentence of each."""
    lines = [
        "# Notebooks",
        "",
        "Each runs in some seconds on one CPU core, on the embedded digits; the tests execute them.",
        "",
    ]
    for path in notebook_paths():
        first = nbformat.read(path, as_version=4).cells[0].source.strip().split("\n")
        about = " ".join(" ".join(first[1:]).split()).partition(". ")[0].rstrip(".")
        lines.append(f"- [{first[0].removeprefix('# ')}]({path.stem}.md): {about[:1].lower() + about[1:]}.")
    return "\n".join(lines) + "\n"
