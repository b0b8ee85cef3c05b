"""Tasks in whole runs: against plain PyTorch, equal in every engine and on Flower nodes, resumed, refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from observers import Callbacks
from torch import Tensor, nn

import fedgg
from fedgg.core.tasks import NextToken
from fedgg.lab.build import build
from fedgg.lab.runner import with_names
from fedgg.lab.task_and_metrics import Objective

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(60, 5))
TOKENS = RNG.integers(0, 7, (60, 6))
NEXT = np.where(RNG.random((60, 6)) < 0.2, -100, np.roll(TOKENS, -1, 1))
BASE: dict[str, Any] = {
    "rounds": 2,
    "split": {"scheme": "iid", "clients": 3},
    "local": {"epochs": 2, "batch": 8, "lr": 0.05, "momentum": 0.5},
    "algorithm": {"name": "fedavg"},
    "engine": {"precision": "fp64"},
}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3 + 5, 2)

    def forward(self, tokens: Tensor, table: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.cat([self.embedding(tokens).mean(1), table], 1))
        return outputs


def linear(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))


def tokens_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


def all_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def one_number(outputs: Tensor, targets: Tensor) -> Any:
    return 1.0


def of_sequences(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(2) == targets).double().mean(1)


def mean_of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def mean_of_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return absolute_error(outputs, targets).mean()


VALUE, VALUES, LABELS, CLASSES = TABLE[:, 0] + 1, TABLE[:, :2], (TABLE[:, :3] > 0).astype(int), TOKENS[:, 0] % 2
# Task, metrics, model, inputs, targets, and the mean loss of a batch in plain PyTorch.
CASES: dict[str, tuple[Any, Any, Any, Any, Any, Any]] = {
    "regression": ("regression", None, lambda: linear(1), TABLE, VALUE, lambda o, t: F.mse_loss(o[:, 0], t)),
    "two values": ("regression", None, lambda: linear(2), TABLE, VALUES, F.mse_loss),
    "multilabel": (
        "multilabel",
        ["f1", "auroc"],
        lambda: linear(3),
        TABLE,
        LABELS,
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.double()),
    ),
    "next token": ("next_token", None, tokens_model, TOKENS, NEXT, mean_of_tokens),
    "own loss": (absolute_error, ["mae"], lambda: linear(1), TABLE, VALUE, mean_of_errors),
    "two inputs": (
        "classification",
        None,
        TwoInputs,
        {"tokens": TOKENS, "table": TABLE},
        CLASSES,
        F.cross_entropy,
    ),
}


def played(case: str, engine: str = "loop", out: Path | None = None, **changes: Any) -> fedgg.Run:
    task, metrics, model, x, y, _ = CASES[case]
    experiment = fedgg.Experiment(**BASE).changed({"engine.name": engine, **changes})
    if isinstance(task, str):
        experiment = experiment.changed({"task.name": task})
    loss = None if isinstance(task, str) else task
    torch.manual_seed(0)
    return fedgg.run(experiment, model=model, data=(x, y, x, y), loss=loss, metrics=metrics, out=out)


def plain_fedavg(case: str) -> dict[str, Tensor]:
    """Two rounds of FedAvg with torch.optim.SGD, on the batches of the run."""
    task, metrics, model, x, y, mean_loss = CASES[case]
    experiment = fedgg.Experiment(**BASE, **({"task": {"name": task}} if isinstance(task, str) else {}))
    objective, data = Objective(None if isinstance(task, str) else task, metrics), (x, y, x, y)
    experiment = with_names(experiment, model, data, None, objective)
    federation = build(experiment, model=model, data=data, objective=objective)
    module: nn.Module = federation.net.module
    current = {name: p.detach().clone() for name, p in module.named_parameters()}
    for round_ in range(2):
        sums: dict[str, Any] = {}
        for client, positions in enumerate(federation.feed.clients):
            module.load_state_dict(current)
            optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
            for batch in federation.feed.batches(0, round_, client, federation.work):
                inputs: Any = batch.x[0]
                parts = (inputs[:, :6].long(), inputs[:, 6:]) if case == "two inputs" else (inputs,)
                optimiser.zero_grad()
                mean_loss(module(*parts), batch.y[0]).backward()
                optimiser.step()
            for name, p in module.named_parameters():
                sums[name] = sums.get(name, 0) + p.detach() * len(positions) / 60
        current = sums
    return current


@pytest.mark.parametrize("case", CASES)
def test_plain_pytorch(case: str) -> None:
    run = played(case)
    for name, expected in plain_fedavg(case).items():
        assert torch.allclose(run.weights[name], expected, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["fused", "workers", "stacked"])
def test_engines_agree(case: str, engine: str) -> None:
    changes: dict[str, Any] = {"data.holdout": 0.2, "algorithm.name": "fedgg"}
    loop, other = played(case, **changes), played(case, engine, **changes)
    for name, expected in loop.weights.items():
        assert torch.allclose(other.weights[name], expected, rtol=1e-9, atol=1e-11), name
    recorded = {key: value for key, value in loop.rounds[-1].items() if key.startswith(("test_", "holdout_"))}
    assert {key for key in recorded if key.startswith("holdout_") and "by_client" not in key}
    for key, value in recorded.items():
        assert other.rounds[-1][key] == pytest.approx(value, rel=1e-9), key


@pytest.mark.parametrize("case", ["next token", "own loss"])
def test_resumed_bit_for_bit(case: str, tmp_path: Path) -> None:
    whole = played(case, rounds=4)
    played(case, out=tmp_path)
    resumed = played(case, out=tmp_path, rounds=4)
    assert all(torch.equal(tensor, resumed.weights[name]) for name, tensor in whole.weights.items())


@pytest.mark.parametrize("case", [case for case in CASES if case != "own loss"])
def test_predictions_have_the_form_of_the_targets(case: str, tmp_path: Path) -> None:
    x, y = CASES[case][3], CASES[case][4]
    run = played(case, out=tmp_path)
    assert run.predict(x).shape == y.shape
    loaded = fedgg.Run.load(tmp_path, model=CASES[case][2])
    assert np.array_equal(loaded.predict(x), run.predict(x))


def test_primary_metric_in_the_summary() -> None:
    run = played("regression")
    curve = [record["test_rmse"] for record in run.rounds]
    assert run.summary["final_test_rmse"] == curve[-1]
    assert run.summary["lowest_test_rmse"] == min(curve)
    assert run.summary["lowest_at_round"] == 1 + curve.index(min(curve))
    assert run.rounds[-1]["test_loss"] == pytest.approx(curve[-1] ** 2)


@pytest.mark.parametrize("changed", ["loss", "metric"])
def test_a_resume_with_other_code_of_the_same_name_is_refused(changed: str, tmp_path: Path) -> None:
    codes = {"loss": "(outputs[:, 0] - targets).abs()", "metric": "(outputs[:, 0] - targets).square()"}

    def play(factor: int) -> None:
        parts: dict[str, Any] = {}
        for name, code in codes.items():
            file = tmp_path / f"{name}.py"
            scale = factor if name == changed else 1
            file.write_text(f"def {name}(outputs, targets):\n    return {scale} * {code}\n")
            parts[name] = f"{file}:{name}"
            fedgg.trust(file)
        settings = {"task.name": parts["loss"], "metrics": [parts["metric"]], "rounds": 1 + factor}
        data = (TABLE, VALUE, TABLE, VALUE)
        fedgg.run(fedgg.Experiment(**BASE).changed(settings), model=lambda: linear(1), data=data, out=tmp_path / "run")

    play(1)
    with pytest.raises(fedgg.UserError, match=f"the code of the {changed}s? has changed since the run"):
        play(2)


def test_a_loss_in_place_of_that_of_a_task_keeps_its_metrics_and_weights() -> None:
    """The task's own loss, given as a function: the same numbers."""
    own = NextToken().losses
    settings = fedgg.Experiment(**BASE).changed({"task.name": "next_token"})
    data = (TOKENS, NEXT, TOKENS, NEXT)
    run = fedgg.run(settings, model=tokens_model, data=data, loss=lambda outputs, targets: own(outputs, targets))
    expected = played("next token").rounds[-1]
    assert {key: run.rounds[-1][key] for key in ("test_accuracy", "test_perplexity", "test_loss")} == {
        key: expected[key] for key in ("test_accuracy", "test_perplexity", "test_loss")
    }
    assert run.experiment.task.name == "next_token"


@pytest.mark.parametrize("is_named", [True, False])
def test_a_loss_keeps_classification_where_the_task_is_named(is_named: bool) -> None:
    """Its metrics and predictions; otherwise the loss takes any targets. Also of an experiment with changes."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)

    task = {"task": {"name": "classification"}} if is_named else {}
    settings = fedgg.Experiment(**BASE, **task).changed({"rounds": 2})
    labels = np.arange(60) % 3
    run = fedgg.run(settings, model=lambda: linear(3), data=(TABLE, labels, TABLE, labels), loss=loss)
    assert ("test_accuracy" in run.rounds[-1]) == is_named
    assert run.predict(TABLE).shape == ((60,) if is_named else (60, 3))


def test_clients_that_come_with_the_data_in_a_comparison() -> None:
    clients = np.array(["north", "south", "west"])[np.arange(60) % 3]
    data = (TABLE, VALUE, TABLE, VALUE, clients)
    settings = {key: value for key, value in BASE.items() if key not in ("split", "algorithm")}
    result = fedgg.compare(["fedavg"], settings, seeds=[0], model=lambda: linear(1), data=data, loss=absolute_error)
    assert (
        result.record.runs["FedAvg"][0].config["split"] | {"scheme": "given", "clients": 3}
        == (result.record.runs["FedAvg"][0].config["split"])
    )


class TokenError(fedgg.Metric):
    higher_is_better = False

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        wrong = (outputs.argmax(-1) != targets).double()
        return {"wrong": wrong.sum(), "count": torch.tensor(float(wrong.numel()), dtype=torch.float64)}

    def value(self, sums: Any) -> float:
        return float(sums["wrong"] / sums["count"])


@pytest.mark.parametrize("given", [TokenError, TokenError(), TokenError("token_error")])
def test_a_metric_as_a_class(given: Any) -> None:
    settings = fedgg.Experiment(**BASE).changed({"task.name": "next_token"})
    data = (TOKENS, NEXT, TOKENS, NEXT)
    run = fedgg.run(settings, model=tokens_model, data=data, metrics=[given, "accuracy"])
    assert run.rounds[-1]["test_token_error"] == pytest.approx(1 - run.rounds[-1]["test_accuracy"])
    assert "lowest_test_token_error" in run.summary


def test_a_metric_that_is_not_finite_is_named_once() -> None:
    notices: list[str] = []

    def undefined(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.full((len(targets),), torch.nan)

    run = fedgg.run(
        fedgg.Experiment(**BASE).changed({"rounds": 2}),
        data=(TABLE, CLASSES, TABLE, CLASSES),
        metrics=[undefined],
        observer=Callbacks(notice=notices.append),
    )
    assert [record["test_undefined"] for record in run.rounds] == [None, None]
    told = [sentence for sentence in notices if "undefined" in sentence]
    assert told == ["round 1: test_undefined is not finite and recorded as null"]


@pytest.mark.parametrize(
    ("changes", "arguments", "complaint"),
    [
        ({"task.name": "regresion"}, {}, "did you mean 'regression'"),
        ({"task.name": "next_token", "task.paddin": 1}, {}, "task.paddin"),
        ({"metrics": "accurracy"}, {}, "did you mean 'accuracy'"),
        ({"metrics": "rmse"}, {}, "rmse is not defined for the task classification: choose from accuracy, top5"),
        ({"metrics": ["top5", "top5"]}, {}, "two metrics have the name 'top5'"),
        ({}, {"loss": lambda o, t: F.cross_entropy(o, t)}, r"the loss returned \[\] for 2 examples"),
        ({}, {"loss": lambda o, t: o.no_such}, "the loss cannot take outputs"),
        ({}, {"loss": lambda o, t: F.cross_entropy(o.detach(), t, reduction="none")}, "the loss has no gradient"),
        ({}, {"loss": "focal"}, "loss must be a function of outputs and targets, got 'focal'"),
        ({}, {"metrics": [3]}, "the metric 3 must be a function"),
        ({}, {"metrics": [all_outputs]}, "returned \\[2, 2\\] for 2 examples: return one number for each"),
        ({}, {"metrics": [one_number]}, "returned float for 2 examples"),
        (
            {},
            {"x": TOKENS, "y": NEXT, "model": tokens_model, "loss": NextToken().losses, "metrics": "accuracy"},
            r"accuracy needs outputs \[N, classes\] and targets \[N\], got \[2, 6, 7\]",
        ),
        (
            {"task.name": "next_token"},
            {"x": TOKENS, "y": NEXT, "model": lambda: nn.Sequential(tokens_model(), Turned())},
            r"returned \[2, 7, 6\] .*the task next_token.*return outputs.transpose\(1, 2\)",
        ),
        ({"split.scheme": "dirichlet", "task.name": "regression"}, {"y": VALUE}, "class"),
        (
            {"task.name": "next_token"},
            {"x": TOKENS, "y": NEXT, "model": tokens_model, "metrics": [of_sequences]},
            r"the metric of_sequences cannot take outputs \[12, 7\] and targets \[12\]",
        ),
        ({"data.normalise": "standard"}, {"x": {"a": TOKENS, "b": TOKENS}}, "several inputs need 'none'"),
    ],
)
def test_refused_in_one_line(changes: dict[str, Any], arguments: dict[str, Any], complaint: str) -> None:
    x, y = arguments.pop("x", TABLE), arguments.pop("y", CLASSES)
    with pytest.raises(fedgg.UserError, match=complaint) as caught:
        fedgg.run(fedgg.Experiment(**BASE).changed(changes), data=(x, y, x, y), **arguments)
    assert "\n" not in str(caught.value)


def test_a_setting_of_a_loss_of_ones_own_is_refused() -> None:
    with pytest.raises(fedgg.UserError, match=r"task\.scale: a loss of your own has no settings; leave it out"):
        fedgg.Experiment(**BASE, task={"name": "own.py:loss", "scale": 2.0})


def test_whole_numbers_reach_a_model_that_takes_them_and_are_converted_for_others() -> None:
    kept = played("next token")
    assert kept.inputs.whole
    converted = fedgg.run(BASE, data=(TOKENS, CLASSES, TOKENS, CLASSES))
    as_floats = fedgg.run(BASE, data=(TOKENS.astype(np.float32), CLASSES, TOKENS.astype(np.float32), CLASSES))
    assert not converted.inputs.whole
    assert converted.test_accuracy == as_floats.test_accuracy
    assert np.array_equal(converted.predict(TOKENS), as_floats.predict(TOKENS))


def test_images_of_one_channel_where_asked() -> None:
    x, y = RNG.normal(size=(60, 32, 32)), CLASSES
    shapes = []

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32 * 32, 2)

        def forward(self, images: Tensor) -> Tensor:
            shapes.append(tuple(images.shape[1:]))
            outputs: Tensor = self.head(images.flatten(1))
            return outputs

    for images, shape in ((False, (32, 32)), (True, (1, 32, 32))):
        build(fedgg.Experiment(**BASE, data={"images": images}), model=Seen, data=(x, y, x, y))
        assert shapes[-1] == shape
    assert build(fedgg.Experiment(**BASE, model={"name": "cnn"}), data=(x, y, x, y)).origin.shape == (1, 32, 32)
