"""What `fedgg list` says of algorithms is true of them, every one of them says it, and it fits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from fedgg.algorithms import ALGORITHMS, MOON, SCAFFOLD, FedACG, FedAdam, FedAvg, FedCL, FedCM, FedCurv, FedDyn, FedGG
from fedgg.check.price import Price, price
from fedgg.cli import screen
from fedgg.cli.listing import list_parts
from fedgg.engines import Loop
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.state import begin, play_round


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_says_how_it_differs_and_when_to_use_it(name: str) -> None:
    kind = ALGORITHMS[name]
    assert (kind.__doc__ or "").startswith("Differs from FedAvg: ")
    assert 20 < len(kind.when) < 90
    assert "\n" not in (kind.__doc__ or "") + kind.when


def test_what_travels_and_what_is_kept() -> None:
    variate, pair = ("variate",), ("curvature", "weighted")
    assert price(FedAvg()) == Price((), (), (), (), 1, 1)
    assert price(SCAFFOLD()) == Price(variate, ("variate_change",), variate, variate, 2, 1)
    assert price(FedGG()) == Price((), (), ("received",), (), 1, 1)
    assert price(FedGG(direction="sent")) == Price(("update",), (), (), ("update",), 1.5, 1)
    assert price(FedAdam()) == Price((), (), (), ("momentum", "squares"), 1, 1)
    assert price(FedCM()) == Price(("pace",), ("reach (number)",), (), ("pace",), 1.5, 1)
    assert price(FedACG()) == Price((), (), (), ("velocity",), 1, 1)
    assert price(FedDyn()) == Price((), (), ("moved",), ("moved",), 1, 1)
    assert price(FedCL()) == Price(("fisher",), (), (), (), 1.5, 1)
    assert price(MOON()) == Price((), (), ("previous",), (), 1, 1 + 2 / 3)
    kept = ("curvature", "until (number)", "weighted")
    assert price(FedCurv()) == Price(pair, pair, kept, pair, 3, 1.2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_bytes_are_those_a_run_counts(name: str) -> None:
    def counted(algorithm: str) -> float:
        proxy = 20 if ALGORITHMS[name].needs_proxy else 0
        given: dict[str, Any] = {"split": {"clients": 3}, "model": {"name": "mlp", "hidden": 8}}
        federation = build(Experiment(algorithm={"name": algorithm}, data={"proxy": proxy}, **given))
        _, record = play_round(federation, begin(federation), Loop())
        return float(record["bytes_down"] + record["bytes_up"])

    assert counted(name) / counted("fedavg") == pytest.approx(price(ALGORITHMS[name]()).bytes, abs=0.01)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(screen, "console", Console(file=text, width=columns, highlight=False))
    list_parts()
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    head = next(line.split() for line in lines if line.split()[-2:] == ["bytes", "work"])  # nothing is cut off
    assert head[0] == "name"
    assert [line.split()[-2:] for line in lines if line.split()[:1] == ["moon"]][-1] == ["1", "1.67"]
