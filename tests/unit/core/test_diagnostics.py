"""Diagnostics of an algorithm: names that a client's record already has, and shapes other than one number a row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

import fedgg
from fedgg.core.local import RECORDED

SMALL = {"rounds": 1, "split": {"clients": 2}, "local": {"epochs": 1}, "model": {"name": "linear"}}


@dataclass(frozen=True)
class Recording(fedgg.Algorithm):
    """FedAvg with one more diagnostic."""

    name: str = fedgg.setting("norm", "name of the diagnostic", "this test")
    whole: bool = fedgg.setting(False, "whether it is the whole model", "this test")

    def diagnostics(self, w: Tensor, client: fedgg.Client) -> fedgg.Rows:
        return super().diagnostics(w, client) | {self.name: w if self.whole else fedgg.length(w)}


def test_a_diagnostic_is_in_the_clients_record() -> None:
    record = fedgg.run(SMALL, algorithm=Recording()).rounds[0]
    assert {"loss", "drift", "norm"} <= record["clients"][0].keys()
    assert record["clients"][0].keys() & RECORDED == record["clients"][0].keys() - {"drift", "norm"}


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_name_of_the_record_is_refused(name: str) -> None:
    """It would replace the value of the record."""
    with pytest.raises(fedgg.UserError, match=rf"Recording\.diagnostics\(\) returns '{name}'.*choose another name"):
        fedgg.run(SMALL, algorithm=Recording(name=name))


def test_a_vector_is_refused_by_name() -> None:
    with pytest.raises(fedgg.UserError, match=r"Recording\.diagnostics\(\) returns 'norm' of shape .*make it \[1, 1\]"):
        fedgg.run(SMALL, algorithm=Recording(whole=True))
