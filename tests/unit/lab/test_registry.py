"""From names to objects, with a clear word where that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedgg.algorithms import FedGG, FedProx
from fedgg.errors import UserError
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import algorithm_class, build_algorithm, build_model, find_object, given_algorithm
from fedgg.lab.runner import run
from fedgg.lab.trusted_code import trust
from fedgg.lab.weight_files import load_start, share_frozen


def test_algorithms_by_name() -> None:
    assert build_algorithm("fedprox", {"mu": 0.5}) == FedProx(0.5)
    assert build_algorithm("fedgg", {"mu": 0, "scope": "layer"}) == FedGG(mu=0, scope="layer")
    assert type(vars(build_algorithm("fedgg", {"mu": 1}))["mu"]) is float  # a column of its own, not another program
    assert type(vars(given_algorithm(FedGG(mu=1)))["mu"]) is float


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("fedgb", {}, ("unknown algorithm 'fedgb'", "did you mean 'fedgg'")),
        ("zzzzzz", {}, ("choose from", "scaffold")),
        ("fedadam", {"tau": 0.0}, ("algorithm.tau = 0.0", "above zero")),
        ("feddyn", {"alpha": 0.0}, ("algorithm.alpha = 0.0", "above zero")),
        ("moon", {"temperature": 0}, ("algorithm.temperature = 0", "above zero")),
        ("fedgg", {"my": 1}, ("no setting 'my'", "'algorithm.mu'")),
        ("fedavg", {"mu": 1}, ("no setting 'mu'", "it has none", "elsewhere: 'algorithm.mu' of fedprox, ")),
        ("fedgg", {"server_lr": 1}, ("choose from algorithm.mu, ", "elsewhere: 'algorithm.server_lr' of fedavgm, ")),
        (
            "fedgg",
            {"lr": 1},
            ("choose from algorithm.mu, ", "elsewhere: 'local.lr' (learning rate of the clients' optimiser)"),
        ),
        ("fedgg", {"mu": -1}, ("algorithm.mu = -1", "zero or more")),
        ("fedgg", {"mu": float("nan")}, ("algorithm.mu",)),
        ("fedgg", {"mu": float("inf")}, ("algorithm.mu = inf", "finite")),
        ("fedexp", {"epsilon": float("-inf")}, ("algorithm.epsilon = -inf", "above zero")),
        ("fedgg", {"mu": "a lot"}, ("algorithm.mu",)),
        ("fedgg", {"mu": True}, ("algorithm.mu",)),
        ("fedgg", {"mu": None}, ("algorithm.mu",)),
        ("fedgg", {"weight": "adaptiv"}, ("algorithm.weight", "adaptive, fixed")),
        ("fedgg", {"weight": 1}, ("algorithm.weight",)),
        ("fedgg", {"weight": ["fixed"]}, ("algorithm.weight",)),
        ("nosuchmodule:Thing", {}, ("nosuchmodule", "cannot be imported")),
        ("nosuch.py:Thing", {}, ("no file nosuch.py",)),
        ("fedgg.algorithms:FedGB", {}, ("no 'FedGB'", "'FedGG'")),
        ("fedgg.algorithms:ALGORITHMS", {}, ("not an algorithm",)),
        ("fedgg.models:MODELS", {}, ("not an algorithm",)),
        (":", {}, ()),
        ("a:", {}, ()),
        (":b", {}, ()),
    ],
)
def test_mistakes(name: str, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        build_algorithm(name, settings)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_does_not_parse_or_raises(tmp_path: Path) -> None:
    for content in ("def (", "1 / 0", "raise KeyError"):
        path = tmp_path / "own.py"
        path.write_text(content)
        trust(path)
        with pytest.raises(UserError, match="cannot be imported"):
            find_object(f"{path}:Own")


def test_a_users_own_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom fedgg import Algorithm, setting\n\n\n"
        "@dataclass(frozen=True)\nclass Own(Algorithm):\n    '''Own.'''\n    depth: int = setting(3, 'a', 'b')\n"
        "    loud: bool = setting(False, 'a', 'b')\n"
    )
    trust(path)
    assert algorithm_class(f"{path}:Own").__name__ == "Own"
    assert build_algorithm(f"{path}:Own", {"depth": 2, "loud": True}) is not None
    for wrong in ({"depth": 1.5}, {"depth": True}, {"loud": 1}):
        with pytest.raises(UserError):
            build_algorithm(f"{path}:Own", wrong)


def test_two_files_of_the_same_name_are_two_modules(tmp_path: Path) -> None:
    """`a/own.py:Own` and `b/own.py:Own` in one comparison."""
    found = []
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(f"VALUE = {value}\n")
        trust(tmp_path / folder / "own.py")
        found.append(find_object(f"{tmp_path / folder / 'own.py'}:VALUE"))
    assert found == [1, 2]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("mpl", {}, ("unknown model 'mpl'", "'mlp'")),
        ("mlp", {"hiden": 3}, ("no setting 'hiden'", "'model.hidden'")),
        ("mlp", {"hidden": -3}, ("hidden = -3",)),
        ("mlp", {"hidden": 0}, ("hidden = 0",)),
        ("mlp", {"hidden": "many"}, ("model.hidden", "whole number")),
        ("mlp", {"hidden": 1.5}, ("model.hidden", "whole number")),
        ("mlp", {"classes": 3}, ()),
        ("linear", {"hidden": 3}, ("no setting 'hidden'", "it has none")),
        ("cnn", {}, ("16 x 16", "mlp")),
        ("vgg16", {}, ("32 x 32",)),
        ("torch.nn:nosuch", {}, ("no 'nosuch'",)),
        ("math:pi", {}, ("part of Python",)),
        ("builtins:dict", {}, ("part of Python",)),
        ("torch.hub:load", {}, ("subclass of torch.nn.Module",)),
        ("torch:Tensor", {}, ("subclass of torch.nn.Module",)),
        ("torch.nn:functional", {}, ("subclass of torch.nn.Module",)),
    ],
)
def test_model_mistakes(name: str, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    trust("torch")
    with pytest.raises(UserError) as caught:
        build_model(name, settings, (1, 8, 8), 10, 0)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_starting_weights_are_a_function_of_the_seed() -> None:
    torch.manual_seed(0)
    a = build_model("mlp", {"hidden": 4}, (1, 8, 8), 10, 3)
    torch.manual_seed(1)
    b = build_model("mlp", {"hidden": 4}, (1, 8, 8), 10, 3)
    c = build_model("mlp", {"hidden": 4}, (1, 8, 8), 10, 4)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(c.parameters()))


def test_start_weights_fit_or_do_not(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    fits = {name: torch.full_like(tensor, 2) for name, tensor in module.state_dict().items()}
    path = tmp_path / "start.safetensors"
    save_file(fits, path)
    load_start(module, path)
    assert all(bool((tensor == 2).all()) for tensor in module.state_dict().values())
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({k: v for k, v in fits.items() if k != "0.bias"}, r"missing \['0.bias'\]"),
        ({**fits, "9.weight": torch.zeros(1)}, r"unknown \['9.weight'\]"),
        ({**fits, "0.bias": torch.zeros(4)}, r"\(4,\), the model needs \(3,\)"),
    ]
    for content, word in wrong:
        save_file(content, path)
        with pytest.raises(UserError, match=word):
            load_start(module, path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="not a readable"):
        load_start(module, path)
    with pytest.raises(UserError, match="no file"):
        load_start(module, tmp_path / "none")
    with pytest.raises(UserError):
        load_start(module, tmp_path)


def test_start_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 3)
    path = tmp_path / "start.safetensors"
    save_file({"weight": torch.full((3, 2), float("nan")), "bias": torch.zeros(3)}, path)
    with pytest.raises(UserError):
        load_start(module, path)


class Tied(nn.Module):
    """Two names for one weight, a frozen layer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x.flatten(1)).tanh()) * self.scale)  # type: ignore[no-any-return]


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind", [Tied, Frozen, lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))]
)
def test_the_final_model_can_be_loaded_into_the_module_it_came_from(kind: Any, tmp_path: Path) -> None:
    """`model.safetensors: the final model under the module's own names`, and a start for the next run."""
    experiment = Experiment(rounds=1, split={"clients": 2}, local={"epochs": 1}, algorithm={"name": "fedavg"})
    run(experiment, model=kind, out=tmp_path / "run")
    load_start(kind(), tmp_path / "run" / "model.safetensors")


def test_a_run_starts_from_given_weights(tmp_path: Path) -> None:
    base = Experiment(
        rounds=1, split={"clients": 2}, local={"epochs": 1}, algorithm={"name": "fedavg"}, model={"name": "linear"}
    )
    run(base, out=tmp_path / "first")
    path = tmp_path / "first" / "model.safetensors"
    federation = build(base.changed({"model.start": str(path)}))
    expected = load_file(path)
    for name, rows in federation.net.layout.unflatten(federation.net.start).items():
        assert torch.equal(rows[0], expected[name])


def test_a_failure_of_the_library_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong before the model's own code is called keeps its own name."""

    def broken(*_: Any) -> int:
        raise TypeError("ufunc 'right_shift' not supported for the input types")

    monkeypatch.setattr("fedgg.core.random_choices.torch_seed", broken)
    with pytest.raises(TypeError, match="right_shift"):
        build_model("mlp", {}, (3,), 2, 0)


def test_frozen_parameters_of_runs_of_a_process_share_their_memory() -> None:
    def half_frozen() -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 3))
        module[0].requires_grad_(False)
        return module

    def place(module: nn.Module, layer: int) -> int:
        return module.get_parameter(f"{layer}.weight").data_ptr()

    first, second, other = (half_frozen() for _ in range(3))
    with torch.no_grad():
        other.get_parameter("0.weight").add_(1)
    for module in (first, second, other):
        share_frozen(module)
    assert place(first, 0) == place(second, 0)
    assert place(first, 1) != place(second, 1)
    assert place(first, 0) != place(other, 0)
