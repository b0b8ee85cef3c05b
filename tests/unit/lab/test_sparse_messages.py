"""Bytes of an algorithm that says how little of its messages is not zero; the one of docs/add-an-algorithm.md first."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedgg
from fedgg.check import PROPERTIES, Broken
from fedgg.check.cost import cost_of
from fedgg.core.algorithm import Algorithm, Server
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError
from fedgg.lab.name_resolution import find_object

DOCS = Path(__file__).parents[3] / "docs" / "add-an-algorithm.md"
SMALL: dict[str, Any] = {"rounds": 3, "split": {"clients": 4}, "local": {"epochs": 1}, "model": {"hidden": 16}}
PARAMETERS = 64 * 16 + 16 + 16 * 10 + 10
KEPT = math.ceil(0.01 * PARAMETERS)


@pytest.fixture(scope="module")
def top_k(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The class as it is printed in the documentation."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    file = tmp_path_factory.mktemp("docs") / "top_k.py"
    file.write_text(next(block for block in blocks if "class TopK" in block))
    fedgg.trust(file)
    return find_object(f"{file}:TopK")


@pytest.mark.parametrize("engine", ["loop", pytest.param("workers", marks=pytest.mark.slow), "stacked"])
def test_only_what_is_not_zero_is_charged(top_k: Any, engine: str) -> None:
    precise: dict[str, Any] = {"engine": {"name": engine, "precision": "fp64", "workers": 2}}
    done = fedgg.run(SMALL | precise, algorithm=top_k())
    assert [record["bytes_up"] for record in done.rounds] == 3 * [4 * KEPT * (8 + 4)]
    assert [record["bytes_down"] for record in done.rounds] == 3 * [4 * PARAMETERS * 8]
    assert done.summary["bytes"] == 3 * 4 * (KEPT * 12 + PARAMETERS * 8)


def test_in_single_precision_a_position_is_as_large_as_a_value(top_k: Any, tmp_path: Path) -> None:
    fedgg.run(SMALL, algorithm=top_k(), out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert {line["bytes_up"] for line in lines} == {4 * KEPT * 8}
    assert cost_of(top_k()).bytes == pytest.approx((1 + 0.02) / 2)


def test_it_is_never_charged_more_than_the_whole(top_k: Any) -> None:
    done = fedgg.run(SMALL, algorithm=top_k(part=0.9))
    assert done.rounds[0]["bytes_up"] == 4 * PARAMETERS * 4


@pytest.mark.parametrize("what", [*list(PROPERTIES)[:7], "sparse messages are as declared"])
def test_it_passes_the_suite(top_k: Any, what: str) -> None:
    PROPERTIES[what](top_k())


@dataclass(frozen=True)
class Understates(Algorithm):
    """Differs from FedAvg: declares fewer values than it sends."""

    def sparse_up(self, parameters: int) -> dict[str, int]:
        return {"delta": 7}


@dataclass(frozen=True)
class NamesNothing(Algorithm):
    """Differs from FedAvg: declares an entry that it does not send."""

    def sparse_up(self, parameters: int) -> dict[str, int]:
        return {"gradient": 7}


@dataclass(frozen=True)
class NotCounted(Algorithm):
    """Differs from FedAvg: declares a part instead of a number."""

    def sparse_up(self, parameters: int) -> dict[str, int]:
        return {"delta": 0.01 * parameters}  # type: ignore[dict-item]


@dataclass(frozen=True)
class SendsDown(Algorithm):
    """Differs from FedAvg: the server sends a mask beside the model."""

    ones: int = fedgg.setting(5, "how many entries of the mask are set", "ours")

    def send_down(self, w: Tensor, server: Server) -> Rows:
        return {"mask": (torch.arange(w.shape[1]) < self.ones).to(w.dtype)[None]}

    def sparse_down(self, parameters: int) -> dict[str, int]:
        return {"mask": 5}


def test_what_is_sent_down_counts_too() -> None:
    done = fedgg.run(SMALL, algorithm=SendsDown())
    assert done.rounds[0]["bytes_down"] == 4 * (PARAMETERS * 4 + 5 * 8)
    with pytest.raises(UserError, match=r"SendsDown\.sparse_down\(\) declares 5 values of 'mask' .* there are 6"):
        fedgg.run(SMALL, algorithm=SendsDown(ones=6))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Understates, r"Understates\.sparse_up\(\) declares 7 values of 'delta' .* client 0 there are \d+"),
        (NamesNothing, r"NamesNothing\.sparse_up\(\) declares 'gradient', which is not sent: .* delta"),
        (NotCounted, r"NotCounted\.sparse_up\(\) declares 12\.1\d* values of 'delta': .* whole number"),
    ],
)
def test_what_is_declared_is_checked(kind: type[Algorithm], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        fedgg.run(SMALL, algorithm=kind())
    assert "\n" not in str(caught.value)
    with pytest.raises((Broken, UserError), match=rf"{kind.__name__}\.sparse_up\(\) declares"):
        PROPERTIES["sparse messages are as declared"](kind())


@pytest.mark.parametrize("kind", ["sign_flip", "noise", "nan"])
def test_attackers_may_send_more_and_pay_for_it(top_k: Any, kind: str) -> None:
    done = fedgg.run(SMALL | {"rounds": 1, "attack": {"kind": kind}}, algorithm=top_k())
    attacker = {"sign_flip": KEPT * 8, "noise": PARAMETERS * 4, "nan": 0}[kind]  # NaN is left out of the round
    assert done.rounds[0]["bytes_up"] == 3 * KEPT * 8 + attacker
