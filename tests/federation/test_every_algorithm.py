"""Every algorithm of the library on a federation of real processes over TLS has the bits of the engine `fused`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from federations import assert_as_embedded, lost, start

from fedgg.algorithms import ALGORITHMS
from fedgg.lab.config import Experiment


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_as_embedded(tmp_path: Path, name: str) -> None:
    """Three rounds, so that what is remembered is used; what clients hold back is scored by them."""
    experiment = Experiment(
        rounds=3,
        algorithm={"name": name},
        data={"proxy": 40 if ALGORITHMS[name].needs_proxy else 0, "holdout": 0.2},
        model={"name": "mlp", "hidden": 8},
        split={"clients": 2, "beta": 0.5},
        local={"epochs": 1},
        engine={"precision": "fp64"},
    )
    up = start(experiment, tmp_path / "run")
    try:
        said = up.wait()
        assert up.process.returncode == 0, said
    finally:
        up.stop()
    assert lost(up.out) == {}
    assert_as_embedded(experiment, up.out, tmp_path)
