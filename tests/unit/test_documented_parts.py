"""The documents list every registered part: docs/parts.md by generated text, others by name.

python tests/unit/test_documented_parts.py     # writes the tables of docs/parts.md anew
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedgg.aggregation import RULES
from fedgg.algorithms import ALGORITHMS
from fedgg.cli.listing import part_tables
from fedgg.core.metrics import METRICS
from fedgg.core.optimisers import OPTIMISERS, SCHEDULES
from fedgg.core.tasks import TASKS
from fedgg.data import DATASETS, SPLITS
from fedgg.engines import ENGINES
from fedgg.lab.config import described_settings
from fedgg.models import MODELS
from fedgg.registry import NAMED_PARTS, Registry, accepted_settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parts.md"
BEGIN, END = "<!-- parts: begin (this is generated) -->\n", "<!-- parts: end -->\n"
REGISTRIES: dict[str, Registry[Any]] = {
    "task.name": TASKS,
    "metrics": METRICS,
    "model.name": MODELS,
    "algorithm.name": ALGORITHMS,
    "optimiser.name": OPTIMISERS,
    "schedule.name": SCHEDULES,
    "server_schedule.name": SCHEDULES,
    "data.source": DATASETS,
    "split.scheme": SPLITS,
    "robust.rule": RULES,
    "engine.name": ENGINES,
}


def generated() -> str:
    """The tables of `fedgg list` as Markdown."""
    lines = []
    for table in part_tables():
        title, _, setting = table.title.partition(": ")
        lines += ["", f"### {title.capitalize()}: `{setting}`", "", "| name | description |", "| --- | --- |"]
        lines += [f"| `{name}` | {description} |" for name, description in table.rows]
    return "\n".join([*lines, "", ""])


def page_anew() -> str:
    """The page, with what stands between the marks made from the registries."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + generated() + end + after


def test_the_tables_are_those_of_the_registries() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_anew(), "run python tests/unit/test_documented_parts.py"


@pytest.mark.parametrize(
    ("document", "registry"),
    [
        ("docs/aggregation.md", RULES),
        ("docs/engines.md", ENGINES),
        ("README.md", ENGINES),
        ("README.md", TASKS),
        ("docs/parts.md", MODELS),
        ("docs/tasks.md", TASKS),
        ("docs/tasks.md", METRICS),
    ],
)
def test_documents_name_every_part(document: str, registry: Registry[Any]) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert [name for name in registry if not re.search(rf"`{name}`", text)] == []


def test_every_setting_of_a_model_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "parts.md").read_text(encoding="utf-8").partition("## Settings of the models\n")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", text.partition("\n## ")[0], re.M))
    assert list(rows) == list(MODELS)
    for name, cell in rows.items():
        parameters = [one for key, one in accepted_settings(MODELS[name]).items() if key not in ("shape", "classes")]
        defaults = [f"{one.name} = {json.dumps(one.default)}" for one in parameters]
        assert re.findall(r"`(\w+ = [^`]+)`", cell) == defaults


def test_settings_that_may_name_code_are_in_both_documents() -> None:
    """docs/parts.md says what the code defines, docs/trust.md that it needs a permission, and that no other does."""
    parts, trust = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("parts.md", "trust.md"))
    table = parts.partition("## Parts of your own\n")[2].partition("\n\n## ")[0]
    in_table = [
        setting for row in re.findall(r"^\| (`[^|]+) \|", table, re.M) for setting in re.findall(r"`(.+?)`", row)
    ]
    assert set(in_table) == {*REGISTRIES, "task.loss"}
    sentence = trust.partition("These settings may name code")[2].partition("([parts]")[0]
    assert set(re.findall(r"`([a-z_.]+)`", sentence)) == {*REGISTRIES, "task.loss"}
    accepted = re.findall(r"^\| ([\w -]+) \|", trust.partition("| | accepted |")[2].partition("\n\n")[0], re.M)
    assert {kind for kind in accepted if "-" * 3 not in kind} == {registry.kind for registry in REGISTRIES.values()}


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where to go next")[2]
    assert [page.name for page in sorted((ROOT / "docs").glob("*.md")) if f"(docs/{page.name})" not in text] == []


def test_every_part_has_a_description_and_every_setting_its_choices() -> None:
    assert REGISTRIES.keys() == {*NAMED_PARTS, "metrics"}
    meanings = {key: meaning for key, _, meaning in described_settings()}
    for setting, registry in REGISTRIES.items():
        for name, description in registry.descriptions().items():
            assert name in meanings[setting]
            assert len(description) > 10, name
        assert f"FILE.py:{registry.code}" in meanings[setting]


if __name__ == "__main__":
    PAGE.write_text(page_anew(), encoding="utf-8")
