"""The stacked engine: several experiments as one, sizes of stacks, and models that cannot be stacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from observers import Events
from step_cases import RULES, named, played, proxy_for

from fedgg.data.readers import load_digits
from fedgg.data.user_arrays import from_arrays
from fedgg.engines import Fused, Loop, Stacked
from fedgg.engines.base import Precision
from fedgg.engines.gpu.cuda_graphs import prefix_sizes
from fedgg.engines.gpu.stacked import stack_bytes
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic
from fedgg.lab.one_round import begin, close, next_job
from fedgg.lab.parallel_runs import run_together
from fedgg.lab.run_processes import Job
from fedgg.lab.runner import play_round, run

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")),
]


def experiment(rule: dict[str, Any], device: str, cohort: int | None, **more: Any) -> Experiment:
    settings: dict[str, Any] = {
        "data": {"proxy": proxy_for(rule)},
        "split": {"clients": 6, "beta": 0.2, "min_examples": 3},
        "model": {"name": "mlp", "hidden": 12},
        "local": {"epochs": 2, "batch": 16, "lr": 0.05, "weight_decay": 0.001},
        "server": {"cohort": cohort},
        "engine": {"precision": "fp64", "device": device},
    }
    return Experiment(rounds=3, algorithm=rule, **(settings | more))


@pytest.mark.parametrize("device", DEVICES)
def test_experiments_with_other_seeds_and_numbers_train_as_one(device: str) -> None:
    dataset = load_digits().to(torch.device(device))
    rules = [({"name": "fedgg", "mu": mu}, seed) for mu in (0.01, 1.0) for seed in (0, 1)]
    rules += [({"name": "fedavg"}, 0)]
    chosen = [experiment(rule, device, None).changed({"seed": seed}) for rule, seed in rules]
    federations = [build(one, data=dataset) for one in chosen]
    states = [begin(federation) for federation in federations]
    engine = Stacked()
    for _ in range(3):
        jobs = [next_job(federation, state) for federation, state in zip(federations, states, strict=True)]
        answers = engine.train_together(jobs)
        states = [
            close(state, job, federation.examples, ends)[0]
            for state, job, federation, ends in zip(states, jobs, federations, answers, strict=True)
        ]
    for federation, state in zip(federations, states, strict=True):
        alone = played(federation, Loop())
        torch.testing.assert_close(state.server.w, alone.server.w, rtol=0, atol=1e-10)


def test_a_diverging_experiment_does_not_touch_its_neighbours(tmp_path: Path) -> None:
    calm = experiment({"name": "fedavg"}, "cpu", None)
    wild = calm.changed({"local.lr": 1e30})
    told: list[Any] = []
    jobs = [Job("calm", calm, tmp_path / "calm", None), Job("wild", wild, tmp_path / "wild", None)]
    run_together(jobs, Events(lambda run, kind, what: told.append((run, kind, what))))
    ended = {name: what for name, kind, what in told if kind == "ended"}
    assert ended["wild"]["status"] == "diverged"
    assert ended["calm"]["status"] == "finished"
    assert ended["calm"]["final_test_accuracy"] == run(calm).test_accuracy[-1]


def with_statistics() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))


def test_models_that_cannot_be_stacked_go_to_the_fused_step() -> None:
    chosen = experiment({"name": "fedavg"}, "cpu", None, model={}, local={"epochs": 1, "batch": 13})
    fused, stacked = (played(build(chosen, model=with_statistics), engine) for engine in (Fused(), Stacked()))
    assert torch.equal(fused.server.w, stacked.server.w)


def test_what_a_client_keeps_does_not_hold_the_stack_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgg.engines.gpu.stacked.LONG", 1)
    federation = build(experiment({"name": "scaffold"}, "cpu", 3))
    ends = dict(Stacked().train(next_job(federation, begin(federation))))
    for end in ends.values():
        assert end.memory["variate"].untyped_storage().nbytes() == end.memory["variate"].nbytes


def test_prefix_sizes_hold_everybody_and_waste_little() -> None:
    lengths = tuple(sorted(range(5, 800, 7), reverse=True))
    sizes = prefix_sizes(lengths, 12)
    assert len(sizes) <= 12
    assert max(sizes) == len(lengths)
    at_work = [sum(length > step for length in lengths) for step in range(lengths[0])]
    spent = sum(min(size for size in sizes if size >= rows) for rows in at_work)
    assert spent < 1.1 * sum(lengths)
    assert list(sizes) == sorted(sizes)
    assert prefix_sizes((9, 9, 9), 12) == (3,)
    assert prefix_sizes((5, 1), 1) == (2,)


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_does_not_depend_on_the_rounds_an_engine_has_seen(device: str) -> None:
    """Half of the clients a round: a fresh engine, as after a resume, must repeat the bits of one that went on."""
    federation = build(experiment({"name": "scaffold"}, device, 3).changed({"engine.precision": "fp32"}))
    used = Stacked()
    state = begin(federation)
    for _ in range(6):
        fresh, _ = play_round(federation, state, Stacked())
        state, _ = play_round(federation, state, used)
        assert torch.equal(fresh.server.w, state.server.w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("rule", RULES, ids=named)
@pytest.mark.parametrize("cohort", [None, 3])
def test_our_own_kernels_train_what_the_loop_trains(rule: dict[str, Any], cohort: int | None) -> None:
    """A convolutional model in fp32: rounding differs, so the gap is compared with that of a loop in float64."""
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (300, 3, 20, 20), dtype=torch.uint8), torch.arange(300) % 10
    images[torch.arange(300), 0, labels, labels] = 255
    data = from_arrays(images, labels, images[:50], labels[:50])
    settings: dict[str, Any] = {
        "data": {"augment": "crop_flip", "proxy": 20 if rule["name"] == "fedcl" else 0},
        "model": {"name": "cnn"},
        "split": {"clients": 5, "beta": 0.5},
        "local": {"epochs": 1, "batch": 16, "lr": 0.02},
    }
    ends = {}
    for precision, engine in (("fp64", Loop()), ("fp32", Loop()), ("fp32 stacked", Stacked("fp32"))):
        chosen = experiment(rule, "cuda", cohort, **settings).changed({"engine.precision": precision[:4]})
        with arithmetic(chosen):
            ends[precision] = played(build(chosen, data=data), engine, 2).server.w.double()
    moved = float((ends["fp64"] - begin(build(chosen, data=data)).server.w).norm())
    gap = {name: float((ends[name] - ends["fp64"]).norm()) for name in ("fp32", "fp32 stacked")}
    assert moved > 0.001
    assert gap["fp32 stacked"] < 5 * gap["fp32"] + 1e-4 * moved


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_algorithms_side_by_side_have_the_bits_they_have_alone(precision: Precision) -> None:
    """Long after the others, one client of each is still at work: many graphs of a single row, all replayed at once."""
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (3200, 3, 32, 32), dtype=torch.uint8), torch.arange(3200) % 10
    dataset = from_arrays(images, labels, images[:50], labels[:50]).to(torch.device("cuda"))
    settings: dict[str, Any] = {
        "model": {"name": "cnn"},
        "split": {"scheme": "dirichlet_unbalanced", "clients": 4, "beta": 0.3, "min_examples": 64},
        "local": {"epochs": 4, "batch": 64},
    }
    changes = {"engine.precision": precision, "data.proxy": 20, "seed": 2}  # a seed that makes one client the largest
    chosen = [experiment(rule, "cuda", None, **settings).changed(changes) for rule in RULES]
    with arithmetic(chosen[0]):
        federations = [build(one, data=dataset) for one in chosen]
        together = Stacked(precision)
        for _ in range(3):  # a race does not show every time
            jobs = [next_job(federation, begin(federation)) for federation in federations]
            for job, ends in zip(jobs, together.train_together(jobs), strict=True):
                alone = dict(Stacked(precision).train(job))
                for client, end in alone.items():
                    for name, rows in end.up.items():
                        assert torch.equal(ends[client].up[name], rows), (job.algorithm, client, name)


def test_a_sweep_is_cut_into_stacks_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one and a half of them, runs go one after another, and nothing else changes."""
    chosen = [
        experiment({"name": "fedavg"}, "cpu", None).changed({"engine.name": "stacked", "seed": s}) for s in (0, 1)
    ]
    federation = build(chosen[0])
    one = stack_bytes(federation.net, federation.work.batch, federation.cohort_size)
    ends = {}
    for name, free in (("together", float("inf")), ("cut", 1.5 * one)):
        monkeypatch.setattr("fedgg.lab.parallel_runs.room", lambda _, free=free: free)
        told: list[tuple[str, str, Any]] = []

        def heard(run: str, kind: str, what: Any, told: list[tuple[str, str, Any]] = told) -> None:
            told.append((run, kind, what))

        jobs = [Job(f"seed {e.seed}", e, tmp_path / name / str(e.seed), None) for e in chosen]
        run_together(jobs, Events(heard))
        ends[name] = {who: what["final_test_accuracy"] for who, kind, what in told if kind == "ended"}
        waits = [what for _, kind, what in told if kind == "notice" and "waiting" in what]
        assert len(waits) == (1 if name == "cut" else 0)
    assert ends["cut"] == ends["together"]
    assert len(ends["cut"]) == 2
