"""The measuring scripts run, refuse what they cannot do, and compute what they say. Their figures are not looked at."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedgg.data.batch_preparation import MARGIN
from fedgg.errors import UserError

SCRIPTS = Path(__file__).parents[3] / "benchmarks"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("engine", "algorithms"), [("fused", "guided"), ("fused", "neighbours"), ("stacked", "guided")]
)
def test_steps_of_all_algorithms_are_compared(
    engine: str, algorithms: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_cost = script("step_cost", monkeypatch)
    out = tmp_path / "step-cost.json"
    words = f"--models small --engines {engine} --steps 2 --turns 2 --warm-up 2 --runs 2 --out {out}"
    step_cost.main([*words.split(), "--algorithms", algorithms])
    content = json.loads(out.read_text(encoding="utf-8"))
    assert [line["algorithm"] for line in content["measured"]] == list(step_cost.ALGORITHMS[algorithms])
    for line in content["measured"]:
        assert line["engine"] == engine
        assert line["client_steps"] == 2 * line["clients"]
        assert len(line["round_seconds"]) == 2
    assert content["conditions"]["versions"]["torch"] == torch.__version__


def test_ratios_are_taken_within_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    step_cost = script("step_cost", monkeypatch)
    fedavg, fedprox = step_cost.compared({"FedAvg": [1.0, 10.0, 2.0], "FedProx": [2.0, 10.0, 3.0]}, 100)
    assert fedavg["to_fedavg"] == 1.0
    assert fedprox["to_fedavg"] == 1.5  # of 2, 1 and 1.5; the medians' ratio is 1.5 too, the means' less
    assert fedprox["to_fedavg_range"] == [1.0, 2.0]
    assert fedprox["step_ms"] == pytest.approx(30.0)


def test_everybody_has_as_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    step_cost = script("step_cost", monkeypatch)
    called: list[str] = []

    def clock(name: str) -> float:
        called.append(name)
        return float(len(called))

    taken = step_cost.take_turns({name: lambda name=name: clock(name) for name in "abc"}, 4)
    assert [len(times) for times in taken.values()] == [4, 4, 4]
    assert all(sorted(called[i : i + 3]) == ["a", "b", "c"] for i in range(0, 12, 3))


@pytest.mark.slow
def test_rounds_of_vgg_beside_the_eager_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vgg = script("vgg", monkeypatch)
    out = tmp_path / "vgg.json"
    vgg.main(["--tiny", "--eager-steps", "1", "--out", str(out)])
    content = json.loads(out.read_text(encoding="utf-8"))
    eager, ours = content["measured"]
    assert (eager["who"], ours["who"]) == ("eager loop", "fedgg fused")
    assert ours["eager_to_this"] == pytest.approx(eager["round"] / ours["round"])
    steps = content["work"]["steps"]
    assert eager["round"] == pytest.approx(steps * eager["step_ms"] / 1000 + eager["copies_and_average_seconds"])


@pytest.mark.slow
def test_rounds_of_large_models_with_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large_models = script("large_models", monkeypatch)
    out = tmp_path / "large.json"
    large_models.main([*["--tiny", "--workloads", "resnet18", "--algorithm", "fedlesam", "--clip", "--out"], str(out)])
    content = json.loads(out.read_text(encoding="utf-8"))
    assert (content["algorithm"], content["clip"]) == ("fedlesam", True)
    assert len(content["workloads"]["resnet18"]["round_seconds"]["stacked"]) == 1


@pytest.mark.slow
def test_devices_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = script("devices", monkeypatch)
    out = tmp_path / "devices.json"
    devices.main(["--tiny", "--rounds", "2", "--turns", "1", "--out", str(out)])
    content = json.loads(out.read_text(encoding="utf-8"))
    study, single = content["study"], content["single"]
    assert study["runs"] == 24
    assert all(one["same_bits"] for one in study["to_processes"]["stacks in turn"].values())
    assert all(one["weights"] < 1e-5 for one in study["to_processes"]["one stack"].values())
    assert single["difference"]["same_bits"]
    assert single["engines"]["spread"].startswith("devices: fused in a process on each of cpu, cpu")


@pytest.mark.slow
def test_a_study_on_ray_beside_the_local_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    overhead = script("ray_overhead", monkeypatch)
    out = tmp_path / "ray-overhead.json"
    overhead.main(["--tiny", "--out", str(out)])
    (turn,) = json.loads(out.read_text(encoding="utf-8"))["turns"]
    assert turn["ray"]["runs"] == turn["local"]["runs"] == 4
    assert turn["ratio"] == pytest.approx(turn["ray"]["seconds"] / turn["local"]["seconds"], abs=0.001)


@pytest.mark.parametrize(
    ("name", "words", "complaint"),
    [
        ("step_cost", "--models cnm", "--models cnm: choose from cnn"),
        ("step_cost", "--engines workers", "--engines workers: choose from loop"),
        ("step_cost", "--turns 0", "--turns 0: at least 1"),
        ("vgg", "--precisions bf16", "--precisions bf16: choose from fp32"),
        ("vgg", "--eager-precision tf32", "--eager-precision tf32: choose from default"),
        ("vgg", "--rounds 0", "--rounds 0: at least 1"),
    ],
)
def test_refusals(name: str, words: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=complaint):
        script(name, monkeypatch).main(words.split())


def test_crops_of_the_eager_loop_are_windows_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = script("eager", monkeypatch)
    image = torch.arange(1, 2 * 6 * 6 + 1, dtype=torch.float32).view(1, 2, 6, 6)
    padded = torch.nn.functional.pad(image[0], (MARGIN,) * 4)
    windows = [padded[:, i : i + 6, j : j + 6] for i in range(2 * MARGIN + 1) for j in range(2 * MARGIN + 1)]
    windows += [window.flip(-1) for window in windows]
    seen = set()
    for moved in eager._cropped_and_flipped(image.expand(200, -1, -1, -1)):
        (which,) = [number for number, window in enumerate(windows) if torch.equal(window, moved)] or [-1]
        assert which >= 0
        seen.add(which)
    assert len(seen) > 50
