"""What `fedgg list` says of algorithms is true of them, and every one of them says it."""

from __future__ import annotations

import pytest

from fedgg.algorithms import ALGORITHMS, SCAFFOLD, FedACG, FedAdam, FedAvg, FedCM, FedDyn, FedExP, FedGG, FedNova
from fedgg.check.traffic import Traffic, traffic
from fedgg.cli.listing import _when


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_says_how_it_differs_and_when_to_use_it(name: str) -> None:
    kind = ALGORITHMS[name]
    assert (kind.__doc__ or "").startswith("Differs from FedAvg: ")
    assert _when(kind).startswith("Use it ")
    assert _when(kind).endswith(".")


def test_what_travels_and_what_is_kept() -> None:
    assert traffic(FedAvg()) == Traffic((), (), (), ())
    assert traffic(SCAFFOLD()) == Traffic(("variate",), ("variate_change",), ("variate",), ("variate",))
    assert traffic(FedGG()) == Traffic((), (), (), ("received",))
    assert traffic(FedGG(direction="sent")) == Traffic(("update",), (), ("update",), ())
    assert traffic(FedAdam()) == Traffic((), (), ("momentum", "squares"), ())
    assert traffic(FedCM()) == Traffic(("pace",), ("reach (a number)",), ("pace",), ())
    assert traffic(FedExP()) == Traffic((), (), (), ())
    assert traffic(FedACG()) == Traffic((), (), ("velocity",), ())
    assert traffic(FedDyn()) == Traffic((), (), ("moved",), ("moved",))
    assert traffic(FedNova()) == Traffic((), ("worth (a number)",), (), ())
