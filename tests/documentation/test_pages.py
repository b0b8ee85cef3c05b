"""The pages of the site: every one is in the navigation, links lead somewhere, code blocks run, named tests exist."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_notebooks import site_build

from fedgg.older_python import tomllib

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
links = site_build("repository_links")
GUIDES = sorted((DOCS / "guides").glob("*.md"))
RUN = ["tutorial.md", "tasks.md", "personal.md", "coming-from.md", *(f"guides/{path.name}" for path in GUIDES)]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads mkdocs.yml without making the objects that its tags name."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def navigation() -> set[str]:
    def pages(entry: Any) -> set[str]:
        if isinstance(entry, dict):
            return set().union(*map(pages, entry.values()))
        return set().union(*map(pages, entry)) if isinstance(entry, list) else {entry}

    return pages(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"])


def test_every_page_is_in_the_navigation() -> None:
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    written |= {f"notebooks/{path.stem}.md" for path in (DOCS / "notebooks").glob("*.ipynb")}
    written |= set(links.OUTSIDE.values())
    assert written - navigation() == set(), "add it to `nav` in mkdocs.yml"
    generated = {page for page in navigation() if page.startswith("reference/") or page.endswith("/index.md")}
    assert navigation() - written - generated - {"clusters.md"} == set()


SHORTER = {  # by page: what takes minutes and is no different in seconds
    "tutorial.md": {"rounds=10,": "rounds=2,", '"epochs": 5': '"epochs": 1', '{"rounds": 12}': '{"rounds": 3}'},
    "guides/private-run.md": {"rounds=5,": "rounds=2,", '"epochs": 5': '"epochs": 1', '"rounds": 40': '"rounds": 12'},
}


@pytest.mark.parametrize("page", RUN)
@pytest.mark.filterwarnings("default")
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("matplotlib", *(["dp_accounting"] if "private" in page else [])):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    code = "\n".join(block for block in blocks if not block.startswith(("# FedLab", "# Flower")))
    assert "fedgg." in code
    for written, shorter in SHORTER.get(page, {}).items():
        assert code.count(written) == 1, written
        code = code.replace(written, shorter)
    module = types.ModuleType("page_of_the_documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, str(DOCS / page), "exec"), vars(module))


@pytest.mark.parametrize("name", ["FedProx", "Follow", "TopK"])
def test_an_algorithm_of_the_page_is_complete_and_keeps_its_properties(name: str) -> None:
    from fedgg.check import PROPERTIES, Skipped

    text = (DOCS / "add-an-algorithm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    places: dict[str, Any] = {}
    exec(next(block for block in blocks if f"class {name}" in block), places)
    for checked in ("fields are documented settings", "arguments are not modified", "clients with AdamW"):
        with contextlib.suppress(Skipped):
            PROPERTIES[checked](places[name]())


def test_tests_that_are_named_as_evidence_exist() -> None:
    text = (DOCS / "bugs-we-test-for.md").read_text(encoding="utf-8")
    named = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", text)
    assert len(named) > 40
    assert text.count("`test_") == len(named) + text.count("`test_`") + text.count("`test_accuracy`")
    for name, place in named:
        functions = [
            node.name for node in ast.parse((ROOT / place).read_text(encoding="utf-8")).body if hasattr(node, "name")
        ]
        assert name in functions, f"{place} has no {name}"
    for row in re.findall(r"^\| (?!fault|---).*$", text, re.M):
        assert "`test_" in row, f"no test holds this: {row}"


def test_threads_are_named_as_their_links() -> None:
    text = (DOCS / "bugs-we-test-for.md").read_text(encoding="utf-8")
    for name, number, link in re.findall(r"\[([\w./-]+)#(\d+)\]\((\S+)\)", text):
        assert re.fullmatch(rf"https://github\.com/{re.escape(name)}/(issues|pull)/{number}", link), link


def test_links_lead_to_pages_and_files() -> None:
    assert links.site_links("[a](../src/fedgg/files.py)", "docs/x.md", "x.md") == "[a](source/src/fedgg/files_py.md)"
    assert links.site_links("[a](docs/engines.md#speed)", "README.md", "index.md") == "[a](engines.md#speed)"
    assert links.site_links("[a](../README.md)", "docs/x.md", "guides/x.md") == "[a](../index.md)"
    assert links.site_links("[a](https://example.org/x.md)", "docs/x.md", "x.md") == "[a](https://example.org/x.md)"
    fenced = "```\n[a](../README.md)\n```\n"
    assert links.site_links(fenced, "docs/x.md", "x.md") == fenced
    assert links.site_links("[a](no-such-file.md)", "docs/x.md", "x.md") == "[a](no-such-file.md)"


def anchors(text: str) -> set[str]:
    """Of the headings of a Markdown file, as a code host and the site name them, and those that it names itself."""
    named, found = set(re.findall(r'<a id="([^"]+)"', text)), list[str]()
    for heading in re.findall(r"^#+ (.+?)\s*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", shown).replace(" ", "-"))
    return named | {f"{name}-{found[:place].count(name)}".removesuffix("-0") for place, name in enumerate(found)}


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ROADMAP.md", "SECURITY.md", "docs"])
def test_every_link_between_files_has_a_target(page: str) -> None:
    wrong = []
    for path in [ROOT / page] if page.endswith(".md") else sorted((ROOT / page).rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http", "mailto:")):
                continue
            name, _, anchor = target.partition("#")
            place = (path.parent / name).resolve() if name else path
            inside = place.relative_to(ROOT).as_posix()
            if place.suffix == ".png":
                is_there = place.is_file()
            else:
                is_there = place.exists() and links.page_of(inside) is not None
            if is_there and anchor and place.suffix == ".md":
                is_there = anchor in anchors(place.read_text(encoding="utf-8"))
            if not is_there:
                wrong.append(f"{path.relative_to(ROOT)}: {target}")
    assert not wrong


def test_the_version_is_in_one_place_and_the_citation_has_it() -> None:
    import fedgg

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == fedgg.__version__


def test_packages_of_the_documentation_are_pinned_once() -> None:
    pins = {
        name: {line.split("==")[0].lower() for line in (ROOT / name).read_text().splitlines() if "==" in line}
        for name in ("constraints.txt", "constraints-docs.txt")
    }
    assert pins["constraints.txt"] & pins["constraints-docs.txt"] == set()
    assert {"mkdocs", "mkdocs-material", "mkdocstrings", "nbclient", "build", "twine"} <= pins["constraints-docs.txt"]
