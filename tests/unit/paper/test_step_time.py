"""The probe behind an estimate runs in every engine, without any data set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fedgg.core.local import LocalEnd
from fedgg.engines import Stacked
from fedgg.engines.base import RoundJob
from fedgg.lab.config import Experiment
from fedgg.paper import find_or_run


@pytest.mark.parametrize(
    ("engine", "runs", "trained"), [("auto", 5, 1), ("stacked", 5, 5), ("stacked", 99, find_or_run.MOST_TOGETHER)]
)
def test_a_step_is_measured(engine: str, runs: int, trained: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    whole = Stacked.train_together

    def watched(self: Stacked, jobs: Sequence[RoundJob]) -> list[dict[int, LocalEnd]]:
        seen.append(len(jobs))
        return whole(self, jobs)

    monkeypatch.setattr(Stacked, "train_together", watched)
    experiment = Experiment(split={"clients": 2}, model={"hidden": 8}, engine={"name": engine})
    assert 0 < find_or_run.seconds_a_step(experiment, runs) < 10
    assert seen == ([trained, trained] if engine == "stacked" else [])


def test_steps_of_a_round() -> None:
    assert find_or_run.steps_a_round(Experiment(data={"source": "cifar10"})) == -(-5 * 50_000 // 64)
    partial = Experiment(data={"source": "cifar10"}, split={"clients": 100}, server={"cohort": 10}, local={"batch": 50})
    assert find_or_run.steps_a_round(partial) == 5 * 100
