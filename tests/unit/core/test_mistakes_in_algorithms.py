"""Common mistakes in an algorithm's methods are named in one line, by every engine and by `fedgg check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import fedgg
from fedgg.check import PROPERTIES
from fedgg.errors import UserError


@dataclass(frozen=True)
class FinishesWithoutMemory(fedgg.Algorithm):
    def finish(self, w: Any, client: fedgg.Client) -> Any:
        return {"delta": w - client.notes["anchor"]}


@dataclass(frozen=True)
class AggregatesWithoutMemory(fedgg.Algorithm):
    def aggregate(self, w: Any, up: Any, share: Any, server: fedgg.Server) -> Any:
        return w


@dataclass(frozen=True)
class DisplacesByATensor(fedgg.Algorithm):
    def displacement(self, client: fedgg.Client) -> Any:
        return client.lr


@dataclass(frozen=True)
class TermsAreATensor(fedgg.Algorithm):
    def terms(self, client: fedgg.Client) -> Any:
        return client.lr


@dataclass(frozen=True)
class DisplacesByWhatItReceived(fedgg.Algorithm):
    def send_down(self, w: Any, server: fedgg.Server) -> Any:
        return {"momentum": w}

    def displacement(self, client: fedgg.Client) -> Any:
        return {"momentum": 0.1}


@dataclass(frozen=True)
class BeginsWithoutAnchor(fedgg.Algorithm):
    def begin(self, w: Any, client: fedgg.Client) -> Any:
        return {"start": w}


@dataclass(frozen=True)
class KeepsUnderAnotherName(fedgg.Algorithm):
    def client_memory(self, w: Any) -> Any:
        return {"last": w}

    def finish(self, w: Any, client: fedgg.Client) -> Any:
        up, _ = super().finish(w, client)
        return up, {"latest": client.memory["last"]}


MISTAKES = {
    FinishesWithoutMemory: r"FinishesWithoutMemory\.finish\(\) returned dict: return a tuple of two, what is sent and",
    AggregatesWithoutMemory: r"AggregatesWithoutMemory\.aggregate\(\) returned Tensor: return a tuple of two",
    DisplacesByATensor: r"DisplacesByATensor\.displacement\(\) returned Tensor: return a dict of factors",
    TermsAreATensor: r"TermsAreATensor\.terms\(\) returned Tensor: return a dict of factors",
    DisplacesByWhatItReceived: r"no vector 'momentum'.*; return client\.down\['momentum'\] from begin\(\), too",
    BeginsWithoutAnchor: r"client\.notes has no 'anchor': it has start, what begin\(\) returned: return super",
    KeepsUnderAnotherName: r"client\.memory has no 'last': it has latest, what client_memory\(\) and then finish\(\)",
}


@pytest.mark.parametrize("engine", ["loop", "fused", "stacked"])
@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_engines_name_them(kind: type[fedgg.Algorithm], engine: str) -> None:
    experiment = {"rounds": 2, "split": {"clients": 3}, "model": {"name": "linear"}, "engine": {"name": engine}}
    with pytest.raises(UserError, match=MISTAKES[kind]):
        fedgg.run(experiment, algorithm=kind())


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_the_conformance_suite_names_them(kind: type[fedgg.Algorithm]) -> None:
    with pytest.raises(UserError, match=MISTAKES[kind]):
        PROPERTIES["repeated calls give the same result"](kind())
