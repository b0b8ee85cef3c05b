"""The cases on which every way to take local steps is held against `core.local.local_step`, in float64.

Used for the engines (`unit/engines/test_every_engine.py`), for clients over Flower's messages
(`unit/flower/test_same_numbers.py`) and for Flower apps under `guided` (`unit/flower/test_existing_app.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgg.algorithms import ALGORITHMS
from fedgg.core.algorithm import Algorithm
from fedgg.engines import Engine, Loop
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.one_round import State, begin
from fedgg.lab.runner import play_round

Rule = dict[str, Any]

BATCH = 60

RULES: list[Rule] = [
    {"name": "fedavg"},
    {"name": "fedsgd"},
    {"name": "fedavgm"},
    {"name": "fedprox", "mu": 0.1},
    {"name": "fednova"},
    {"name": "fedadagrad"},
    {"name": "fedadam"},
    {"name": "fedyogi"},
    {"name": "fedcm"},
    {"name": "fedexp"},
    {"name": "fedacg", "mu": 0.1},
    {"name": "feddyn", "alpha": 0.1},
    {"name": "scaffold", "correction": "exact"},
    {"name": "scaffold", "correction": "after", "variate_mean": "uniform"},
    {"name": "fedcl", "lam": 5.0},
    {"name": "fedcurv", "lam": 2.0},
    {"name": "moon", "mu": 2.0},
    {"name": "fedsam", "rho": 0.3},
    {"name": "mofedsam", "alpha": 0.3},
    {"name": "fedlesam", "rho": 0.3},
    {"name": "fedlesam", "direction": "sent"},
    {"name": "fedwmsam", "rho": 0.3, "adapt": 0.3},
    {"name": "fedspeed", "alpha": 0.2},
    {"name": "ghbm", "tau": 1},
    {"name": "fedhbm", "tau": 2.0},
    {"name": "fedntd", "beta": 2.0},
    {"name": "fedlc", "tau": 0.5},
    {"name": "fedgg", "mu": 0.5},
    {"name": "fedgg", "weight": "fixed", "first_step": "epsilon"},
    {"name": "fedgg", "mu": 0.5, "scope": "layer"},
    {"name": "fedgg", "first_step": "relative_push"},
    {"name": "fedgg", "first_step": "relative_push", "scope": "layer", "direction": "sent"},
]
assert {rule["name"] for rule in RULES} == set(ALGORITHMS)


def named(rule: Rule) -> str:
    return "-".join(map(str, rule.values()))


def proxy_for(rule: Rule) -> int:
    """How many examples the server keeps: some where the algorithm measures on them."""
    return 20 if ALGORITHMS[rule["name"]].needs_proxy else 0


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 10))


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def with_pooling() -> nn.Module:
    few = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*few, nn.Conv2d(4, 12, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 10))


def with_noise() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.RReLU(), nn.Linear(16, 10))


@dataclass(frozen=True, eq=False)
class StepCase:
    name: str
    experiment: Experiment  # under the engine `loop`
    model: Callable[[], nn.Module] | None = None  # in place of the one that the experiment names

    def on(self, device: str) -> StepCase:
        return StepCase(f"{self.name} on {device}", self.experiment.changed({"engine.device": device}), self.model)

    def federation(self) -> Federation:
        return build(self.experiment, model=self.model)

    def __str__(self) -> str:
        return self.name


def case(name: str, rule: Rule, model: Callable[[], nn.Module] | None = None, **changes: Any) -> StepCase:
    """`changes`: settings by their keys, with __ for the dot. Clients take three to six steps a round.

    The second round begins from what the first left with clients and server, and what the second leaves is compared;
    where clients miss rounds, the third is the first from a state of two rounds before.
    """
    settings: dict[str, Any] = {
        "data": {"proxy": proxy_for(rule)},
        "split": {"clients": 6, "beta": 0.3, "min_examples": 5},
        "model": {"name": "mlp", "hidden": 12} if model is None else {},
        "local": {"epochs": 1, "batch": BATCH, "lr": 0.05, "weight_decay": 0.001},
        "engine": {"name": "loop", "precision": "fp64"},
    }
    experiment = Experiment(rounds=3 if "server__cohort" in changes else 2, algorithm=rule, **settings)
    return StepCase(name, experiment.changed({key.replace("__", "."): value for key, value in changes.items()}), model)


def personal(method: str, rule: Rule, model: Callable[[], nn.Module] | None = None, **changes: Any) -> StepCase:
    """With a personal part, and clients that hold examples out for their scores."""
    title = f"{method}, {named(rule)}{'' if model is None else f', {model.__name__}'}"
    return case(title, rule, model, personal__method=method, data__holdout=0.2, **changes)


FEDSAM: Rule = {"name": "fedsam", "rho": 0.3}
FEDLESAM: Rule = {"name": "fedlesam", "rho": 0.3}
FEDWMSAM: Rule = {"name": "fedwmsam", "rho": 0.3}
FEDCM: Rule = {"name": "fedcm"}
FEDAVG, FEDPROX, FEDNOVA, SCAFFOLD, FEDGG = (
    {"name": name} for name in ("fedavg", "fedprox", "fednova", "scaffold", "fedgg")
)
CASES = [
    *(case(named(rule), rule) for rule in RULES),
    *(case(f"{named(rule)}, three of six", rule, server__cohort=3) for rule in RULES),
    *(case(f"{rule['name']}, dropout", rule, with_dropout) for rule in (FEDAVG, FEDGG, FEDSAM, FEDLESAM)),
    *(case(f"{rule['name']}, batch statistics", rule, with_statistics) for rule in (FEDGG, SCAFFOLD, FEDSAM, FEDLESAM)),
    case("fedgg, own statistics", FEDGG, with_statistics, model__statistics="local", server__cohort=3),
    *(case(f"{name}, pooling", {"name": name}, with_pooling) for name in ("fedgg", "fedcurv", "moon")),
    *(case(f"{rule['name']}, pooling", rule, with_pooling) for rule in (FEDSAM, FEDLESAM)),
    *(case(f"{rule['name']}, noise", rule, with_noise) for rule in (FEDAVG, FEDSAM)),
    *(
        case(f"{rule['name']}, clipped", rule, optimiser__clip_norm=0.5)
        for rule in (FEDAVG, SCAFFOLD, FEDGG, FEDCM, FEDSAM, FEDLESAM, FEDWMSAM)
    ),
    case("fedsam, adamw", FEDSAM, optimiser__name="adamw", optimiser__state="kept", local__lr=0.01),
    *(case(f"{rule['name']}, no momentum", rule, local__momentum=0.0) for rule in (FEDPROX, SCAFFOLD, FEDGG)),
    *(case(f"{r['name']}, plain", r, local__momentum=0.0, local__weight_decay=0.0) for r in (FEDAVG, FEDGG)),
    case(
        "fedgg, resnet20, two of six", FEDGG, model__name="resnet20", model__width=2, server__cohort=2, local__batch=90
    ),
    *(
        case(f"{rule['name']}, steps, a part of them", rule, local__steps=3, local__part=0.3, server__cohort=4)
        for rule in (FEDNOVA, SCAFFOLD, FEDGG)
    ),
    case("fednova, a part of two epochs, crops", FEDNOVA, local__part=0.1, local__epochs=2, data__augment="crop_flip"),
    case("scaffold, batch statistics, without short batches", SCAFFOLD, with_statistics, local__drop_last=True),
    case("fednova, without short batches, four of six", FEDNOVA, local__drop_last=True, server__cohort=4),
    case("fedcurv, more steps than an epoch has", {"name": "fedcurv", "lam": 2.0}, local__steps=11),
    case(
        "fedgg, server rate", FEDGG, server__lr=0.7, server__lr_decay=0.8, server_schedule__warmup=1, server__cohort=4
    ),
    case("fedgg, crops, decay, two epochs", FEDGG, data__augment="crop_flip", local__lr_decay=0.9, local__epochs=2),
]
PERSONAL = [
    personal("fedper", SCAFFOLD, split__unseen=1),
    personal("fedper", {"name": "fedcurv", "lam": 2.0}, with_pooling),
    personal("fedper", {"name": "moon", "mu": 2.0}),
    personal("fedrep", FEDGG, server__cohort=3, local__epochs=3, personal__head_epochs=1),
    personal("fedrep", FEDSAM, server__cohort=3, local__epochs=3, personal__head_epochs=1),
    personal("fedper", FEDLESAM, split__unseen=1),
    personal("fedbn", FEDSAM, with_statistics, split__unseen=1, server__cohort=3),
    personal("fedbn", FEDPROX, with_statistics, split__unseen=1, server__cohort=3),
    personal("lg_fedavg", FEDAVG, with_dropout),
    personal("ditto", FEDGG, with_statistics, server__cohort=3),
    personal("ditto", FEDPROX, optimiser__name="adam", optimiser__state="kept"),
    personal("local", FEDAVG, with_pooling, split__unseen=2),
]


def thinned(
    cases: Iterable[StepCase], hooks: Sequence[str] = ("client_memory",), all_clients: bool = True
) -> list[Any]:
    """Parameters for pytest: an algorithm with three of six clients, and with all of them, is marked slow in one.

    That a client misses a round changes a step by what the client has kept. An algorithm that keeps nothing (that has
    none of these hooks) is in the fast suite with all clients; with three of six FedAvg stands for it. Without
    `all_clients`, one that keeps something is there with three of six, which repeats rounds of clients as all do.
    """

    def is_slow(case: StepCase) -> bool:
        kind = ALGORITHMS[case.experiment.algorithm.name]
        keeps = any(getattr(kind, hook) is not getattr(Algorithm, hook) for hook in hooks)
        if kind is ALGORITHMS["fedavg"]:
            return False
        if case.name.endswith("three of six"):
            return not keeps
        return keeps and not all_clients and case.name in {named(rule) for rule in RULES}

    return [pytest.param(case, marks=pytest.mark.slow if is_slow(case) else [], id=str(case)) for case in cases]


def played(federation: Federation, engine: Engine, rounds: int | None = None) -> State:
    return played_and_recorded(federation, engine, rounds)[0]


def played_and_recorded(
    federation: Federation, engine: Engine, rounds: int | None = None
) -> tuple[State, list[dict[str, Any]]]:
    """The state after so many rounds, and their records but for the time they took; scored by the engine too."""
    state, records = begin(federation), []
    for _ in range(rounds or federation.experiment.rounds):
        state, record = play_round(federation, state, engine, engine.score)
        records.append({key: value for key, value in record.items() if key != "seconds"})
    return state, records


@cache
def reference(case: StepCase) -> tuple[State, list[dict[str, Any]]]:
    """The case by the engine `loop`."""
    return played_and_recorded(case.federation(), Loop())


def assert_as_reference(case: StepCase, state: State, records: list[dict[str, Any]] | None = None) -> None:
    """To rounding in another order: the model and statistics to 1e-10, what clients and server keep to 1e-8."""
    wanted, wanted_records = reference(case)
    torch.testing.assert_close(state.server.w, wanted.server.w, rtol=0, atol=1e-10)
    _assert_close(state.server.buffers, wanted.server.buffers, 1e-10)
    _assert_close(state.server.memory, wanted.server.memory, 1e-8)
    for clients, wanted_clients in ((state.memory, wanted.memory), (state.kept_buffers, wanted.kept_buffers)):
        assert clients.keys() == wanted_clients.keys()
        for client in wanted_clients:
            _assert_close(clients[client], wanted_clients[client], 1e-8)
    if records is not None:
        torch.testing.assert_close(_numbers(records), _numbers(wanted_records), rtol=1e-8, atol=1e-8)


def assert_weights_as_reference(case: StepCase, weights: Mapping[str, Tensor]) -> None:
    row = case.federation().net.layout.flatten(weights)
    torch.testing.assert_close(row, reference(case)[0].server.w, rtol=0, atol=1e-10)


def _assert_close(rows: Mapping[str, Tensor], wanted: Mapping[str, Tensor], atol: float) -> None:
    assert rows.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(rows[name], wanted[name], rtol=0, atol=atol)


def _numbers(value: Any) -> list[float]:
    """Every number of a record, in its order: losses, diagnostics, scores, bytes."""
    if isinstance(value, Mapping):
        return [number for key in value for number in _numbers(value[key])]
    if isinstance(value, list | tuple):
        return [number for one in value for number in _numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []
