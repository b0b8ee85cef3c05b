"""What docs/algorithms.md says of each algorithm is what its code says of itself."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fedgg.algorithms import ALGORITHMS
from fedgg.check.cost import cost_of
from fedgg.core.algorithm import Algorithm

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def facts(kind: type[Algorithm]) -> list[str]:
    """The table of an algorithm's section, line by line."""
    cost = cost_of(kind())
    work = f", and {cost.arithmetic:.3g} times its arithmetic with 5 local epochs" if cost.arithmetic > 1 else ""
    about = {
        "sent besides model and update": cost.sent,
        "stored besides the server's model": cost.stored,
        "bytes a round": f"{'' if cost.bytes == 1 else f'{cost.bytes:g} times '}FedAvg's{work}",
        "defaults": defaults(kind),
        "neutral": neutral(kind),
        "use it": kind.when,
    }
    return ["| | |", "| --- | --- |", *(f"| {name} | {fact} |" for name, fact in about.items())]


def defaults(kind: type[Algorithm]) -> str:
    shown = (f"`{field.name}` {field.default} ({field.metadata['origin']})" for field in fields(kind))
    return "; ".join(shown) or "no settings"


def neutral(kind: type[Algorithm]) -> str:
    """The settings in which its neutral one differs from its default."""
    algorithm, still = kind(), kind().neutral()
    if still is None:
        return "no such setting"
    pairs = ((field.name, getattr(still, field.name), getattr(algorithm, field.name)) for field in fields(kind))
    return ", ".join(f"`{name}` {value:g}" for name, value, own in pairs if value != own) or "it is FedAvg"


def section(title: str) -> str:
    parts = re.split(r"^#{2,3} (.+)$", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


@pytest.mark.parametrize("kind", ALGORITHMS.values(), ids=ALGORITHMS)
def test_its_section_has_the_facts(kind: type[Algorithm]) -> None:
    missing = [line for line in facts(kind) if line not in section(kind.__name__).splitlines()]
    assert not missing, f"the section {kind.__name__} of docs/algorithms.md lacks:\n" + "\n".join(missing)


@pytest.mark.parametrize("kind", ALGORITHMS.values(), ids=ALGORITHMS)
def test_its_section_has_an_equation_and_says_how_clients_count(kind: type[Algorithm]) -> None:
    words = section(kind.__name__)
    assert re.search(r"^    .*(<-|min_|=)", words, flags=re.MULTILINE)
    assert f"({kind.__module__.rpartition('.')[2]}.py)" in words.replace("../src/fedgg/algorithms/", "")
    assert "*Clients count*" in words
