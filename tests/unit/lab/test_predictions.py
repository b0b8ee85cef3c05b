"""What a finished run predicts: its model takes the inputs as the user has them, from memory and from the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from earlier_folders import without_checksums
from numpy.typing import NDArray
from observers import Callbacks
from safetensors.torch import load_file
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import fedgg
from fedgg.errors import UserError
from fedgg.lab.config import Experiment

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
SETTINGS: dict[str, Any] = {"rounds": 4, "split": {"clients": 4}, "local": {"batch": 16, "epochs": 1}}
STANDARD = SETTINGS | {"data": {"normalise": "standard"}}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))


def raw() -> Arrays:
    """Thirty features whose scales lie between 0.003 and 600."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order[:455]], y[order[:455]], x[order[455:]], y[order[455:]]


def accuracy_of(module: nn.Module, x: NDArray[Any], y: NDArray[Any]) -> float:
    with torch.no_grad():
        return float((module.eval()(torch.tensor(x).float()).argmax(1).numpy() == y).mean())


def test_own_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    """The weights alone, in the user's own module on his own data, score what the run reports."""
    x, y, x_test, y_test = raw()
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    source = fedgg.Experiment(**SETTINGS | {"data": {"source": f"npz:{tmp_path / 'mine.npz'}"}})
    runs = [
        fedgg.run(SETTINGS, model=network, data=(x, y, x_test, y_test), algorithm="fedavg"),
        fedgg.run(source, model=network, algorithm="fedavg"),
    ]
    for run in runs:
        assert run.experiment.data.normalise == "none"
        module = network()
        module.load_state_dict(run.weights)
        assert accuracy_of(module, x_test, y_test) == pytest.approx(run.test_accuracy[-1])


def test_the_default_follows_the_data_and_a_named_kind_stays() -> None:
    """Hashes of experiments on the data sets with names are what they were when `standard` was the default."""
    assert Experiment().data.normalise == "standard"
    assert Experiment().hash() == "efacc91555c4ad187adbc2c5acf9b19df9d1f021a64af06d86a7dd7ec2142371"
    assert Experiment().trajectory() == "6c85a70c1891d0b9266d77d975e59192aed58bcfafb9665a5830da71b2f11594"
    for start in (Experiment(), Experiment(data={"normalise": "auto"})):
        own = start.changed({"local.lr": 0.1}).changed({"data.source": "npz:mine.npz"})
        assert own.data.normalise == "none"
        assert own.changed({"data.source": "cifar10"}).data.normalise == "standard"
        assert own.changed({"data.normalise": "unit"}).changed({"data.source": "digits"}).data.normalise == "unit"
        assert own.changed({"data": {"source": "npz:other.npz", "normalise": "standard"}}).data.normalise == "standard"
    assert Experiment(data={"source": "python:arrays"}).data.normalise == "none"
    named = Experiment(data={"normalise": "standard"}).changed({"data.source": "npz:mine.npz"})
    assert 'normalise = "standard"' in named.to_toml()  # an older folder says it so, and keeps its meaning
    assert 'normalise = "none"' in named.changed({"data.normalise": "auto"}).to_toml()


def test_inputs_far_from_unit_scale_are_mentioned_once() -> None:
    said: list[str] = []
    observer = Callbacks(notice=said.append)
    fedgg.run(SETTINGS, model=network, data=raw(), algorithm="fedavg", observer=observer)
    (about,) = [sentence for sentence in said if "normalise" in sentence]
    assert "data.normalise = 'standard'" in about
    said.clear()
    fedgg.run(STANDARD, model=network, data=raw(), algorithm="fedavg", observer=observer)
    fedgg.run(SETTINGS | {"rounds": 1}, algorithm="fedavg", observer=observer)
    assert not [sentence for sentence in said if "normalise" in sentence]


def test_the_model_of_a_run_takes_raw_inputs(tmp_path: Path) -> None:
    x, y, x_test, y_test = raw()
    run = fedgg.run(STANDARD, model=network, data=(x, y, x_test, y_test), algorithm="fedavg", out=tmp_path)
    bare = network()
    bare.load_state_dict(run.weights)
    assert accuracy_of(bare, x_test, y_test) < run.test_accuracy[-1] - 0.2  # what scaling is for
    loaded = fedgg.Run.load(tmp_path, model=network)
    for done in (run, loaded):
        module = done.model()
        assert not module.training
        assert accuracy_of(module, x_test, y_test) == pytest.approx(run.test_accuracy[-1])
        assert {"shift", "scale"} <= set(dict(module.named_buffers()))
        assert (done.predict(x_test) == y_test).mean() == pytest.approx(run.test_accuracy[-1])
        logits = done.predict(x_test, output="logits", chunk=7)
        torch.testing.assert_close(torch.from_numpy(logits), module(torch.tensor(x_test)).detach())
        chances = done.predict(x_test, output="probabilities")
        assert chances.shape == (114, 2)
        np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-5)
    assert torch.equal(run.model()(torch.tensor(x_test)), loaded.model()(torch.tensor(x_test)))
    with torch.no_grad():
        next(run.model().parameters()).fill_(9.0)
    assert (run.predict(x_test) == loaded.predict(x_test)).all()  # each model is a copy


def test_labels_in_the_users_own_words(tmp_path: Path) -> None:
    x, y, x_test, y_test = raw()
    for words in (np.array(["malignant", "benign"]), np.array(["0", "1"])):
        named = (x, words[y], x_test, words[y_test])
        folder = tmp_path / words[0]
        run = fedgg.run(STANDARD, model=network, data=named, algorithm="fedavg", out=folder)
        for done in (run, fedgg.Run.load(folder, model=network)):
            assert (done.predict(x_test) == words[y_test]).mean() == pytest.approx(run.test_accuracy[-1])


def test_images_without_a_channel_and_bytes() -> None:
    """Arrays [N, H, W] become [N, 1, H, W] where asked: the model does the same; lists and bytes are inputs too."""
    numbers = np.random.default_rng(0)
    x = numbers.integers(0, 256, (80, 4, 4), dtype=np.uint8)
    y = np.arange(80) % 2
    x[y == 1, :2] //= 8
    settings = SETTINGS | {"data": {"normalise": "unit", "images": True}, "split": {"clients": 2}}
    run = fedgg.run(settings, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), data=(x, y, x, y))
    assert (run.predict(x) == y).mean() == pytest.approx(run.test_accuracy[-1])
    assert (run.predict(x.tolist()) == run.predict(torch.tensor(x)[:, None])).all()
    assert torch.equal(run.model()(torch.tensor(x)), run.model()(torch.tensor(x)[:, None]))
    assert run.predict(x[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("x", "word"),
    [
        (np.zeros((3, 29)), r"shape \(29,\).*\(30,\)"),
        (np.zeros(30), r"shape \(\).*\(30,\)"),
        (np.full((3, 30), np.nan), "NaN or infinity, first in example 0"),
        ([["a"] * 30], "not numbers"),
    ],
)
def test_predict_says_what_is_wrong_with_inputs(x: Any, word: str) -> None:
    run = fedgg.run(SETTINGS | {"rounds": 1}, model=network, data=raw(), algorithm="fedavg")
    with pytest.raises(UserError, match=word) as caught:
        run.predict(x)
    assert "\n" not in str(caught.value)
    for wrong in ({"output": "logit"}, {"chunk": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            run.predict(np.zeros((1, 30)), **wrong)


def test_a_library_model_needs_no_argument(tmp_path: Path) -> None:
    from fedgg.data.readers import load_digits

    digits = load_digits()
    settings = SETTINGS | {"model": {"name": "mlp", "hidden": 8}}
    run = fedgg.run(settings, algorithm="fedavg", out=tmp_path)
    loaded = fedgg.Run.load(str(tmp_path))
    right = (loaded.predict(digits.x_test) == digits.y_test.numpy()).mean()
    assert right == pytest.approx(run.test_accuracy[-1])
    assert (loaded.rounds, loaded.summary, loaded.folder) == (run.rounds, run.summary, tmp_path)
    assert loaded.experiment.hash() == run.experiment.hash()
    assert loaded.weights.keys() == run.weights.keys()
    # A folder written before inputs.json named the kind of labels.
    told = json.loads((without_checksums(tmp_path) / "inputs.json").read_text())
    del told["labels"]
    (tmp_path / "inputs.json").write_text(json.dumps(told))
    assert (fedgg.Run.load(tmp_path).predict(digits.x_test) == run.predict(digits.x_test)).all()


class Counting(nn.Module):
    """Tied weights, a buffer that is not saved and moves in training, and double precision."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(2, width), nn.Linear(2, width)
        self.again.weight = self.first.weight
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre.mul_(0.5).add_(0.5 * x.mean(0))
        return self.again(self.first(x - self.centre))  # type: ignore[no-any-return]


def test_buffers_that_are_not_saved_and_tied_weights(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    y = np.arange(90) % 2
    x = numbers.normal(size=(90, 2)) + 3 + y[:, None]
    settings = SETTINGS | {"engine": {"precision": "fp64"}, "split": {"clients": 2}}
    run = fedgg.run(settings, model=Counting, data=(x, y, x, y), out=tmp_path)
    module = run.model()
    assert float(module.get_buffer("module.centre").abs().max()) > 1
    assert module(torch.tensor(x)).dtype == torch.float64
    assert (run.predict(x) == y).mean() == pytest.approx(run.test_accuracy[-1])
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["first.weight"], weights["again.weight"])
    with pytest.raises(UserError, match=r"fedgg\.Run\.load\(.*model="):
        fedgg.Run.load(tmp_path).model()
    with pytest.raises(UserError, match=r"does not fit|has shape|other layers"):
        fedgg.Run.load(tmp_path, model=lambda: Counting(3)).model()
    with pytest.raises(UserError, match=r"does not fit|other layers"):
        fedgg.Run.load(tmp_path, model=lambda: nn.Linear(2, 2)).model()


def test_folders_that_hold_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        fedgg.Run.load(tmp_path / "nowhere")
    fedgg.run(SETTINGS | {"rounds": 1}, algorithm="fedavg", out=tmp_path / "one")
    (tmp_path / "one" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"not finished.*fedgg resume"):
        fedgg.Run.load(tmp_path / "one")
    fedgg.compare(["fedavg"], SETTINGS | {"rounds": 1}, seeds=[0], out=tmp_path / "study")
    with pytest.raises(UserError, match=r"comparison.*fedavg/seed-0"):
        fedgg.Run.load(tmp_path / "study")


def test_a_loss_from_python_is_not_needed_to_load_and_predict(tmp_path: Path) -> None:
    """With a named task predictions are of that task; without one they are the outputs, loaded or not."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.normal(size=60).astype(np.float32)

    def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - targets).abs()

    def model() -> nn.Module:
        return nn.Linear(4, 1)

    for name, task in (("named", {"task": {"name": "regression"}}), ("own", {})):
        experiment = {"rounds": 1, "split": {"scheme": "iid", "clients": 3}, "local": {"batch": 10}, **task}
        run = fedgg.run(experiment, model=model, data=(x, y, x, y), loss=absolute, out=tmp_path / name)
        assert np.array_equal(fedgg.Run.load(tmp_path / name, model=model).predict(x), run.predict(x))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_image, self.of_context = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        outputs: Tensor = self.of_image(image.flatten(1)) + self.of_context(context)
        return outputs


def two_inputs() -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    random = np.random.default_rng(0)
    image, context = random.normal(size=(40, 2, 3)), random.normal(size=(40, 2))
    return {"image": image.astype("f"), "context": context.astype("f")}, random.integers(0, 3, 40)


def test_a_model_of_several_inputs_takes_them_as_its_module_and_as_the_data() -> None:
    x, y = two_inputs()
    run = fedgg.run(SETTINGS | {"rounds": 1, "local": {"batch": 5}}, model=TwoInputs, data=(x, y, x, y))
    logits, model = run.predict(x, output="logits"), run.model()
    image, context = torch.tensor(x["image"]), torch.tensor(x["context"])
    for outputs in (model(image, context), model(image=image, context=context), model(x), model((image, context))):
        assert outputs.requires_grad
        np.testing.assert_allclose(outputs.detach().numpy(), logits, atol=1e-6)
    for wrong, words in (
        (x["image"], "takes a dict with the inputs image, context; x is of type ndarray"),
        ({"image": x["image"]}, "takes the inputs image, context; x has image"),
        (x | {"age": y}, "takes the inputs image, context; x has image, context, age"),
        (x | {"context": x["context"][:3]}, r"x\['context'\] has shape \(3, 2\), for 40 examples"),
    ):
        with pytest.raises(UserError, match=words):
            run.predict(wrong)
    with pytest.raises(UserError, match="takes the inputs image, context; x has ctx"):
        model(ctx=context)


def test_personal_models_of_several_inputs_and_of_tokens_are_loaded(tmp_path: Path) -> None:
    personal = {"rounds": 1, "data": {"holdout": 0.2}, "personal": {"method": "fedper"}, "local": {"batch": 5}}
    x, y = two_inputs()
    tokens = np.random.default_rng(0).integers(0, 9, (40, 5))
    net = nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.Linear(4, 2))
    split = {"clients": 3, "scheme": "iid"}
    cases: dict[str, dict[str, Any]] = {
        "two": {"model": TwoInputsThenHead, "data": (x, y, x, y)},
        "tokens": {"data": (tokens, np.roll(tokens, -1, 1)) * 2},
        "values": {"model": net, "data": (tokens / 9, y, tokens / 9, y), "loss": lambda out, true: out.sum(1) * true},
    }
    lstm = {"task": {"name": "next_token"}, "model": {"name": "char_lstm", "hidden": 4, "layers": 1}}
    for name, given in cases.items():
        experiment = personal | {"split": split} | (lstm if name == "tokens" else {})
        run = fedgg.run(experiment, **given, out=tmp_path / name)
        in_memory = fedgg.run(experiment, **given).personal_model(1).state_dict()
        for loaded in (run, fedgg.Run.load(tmp_path / name, model=given.get("model"))):
            weights = loaded.personal_model(1).state_dict()
            assert all(torch.equal(weights[key], values) for key, values in in_memory.items()), name


class TwoInputsThenHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = TwoInputs(), nn.Linear(3, 3)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(image, context).relu())
        return outputs


def test_a_model_of_one_input_takes_one() -> None:
    x, y, *_ = raw()
    run = fedgg.run(STANDARD | {"rounds": 1}, model=network, data=raw())
    model, one = run.model(), torch.tensor(x)
    assert torch.equal(model(one), model(x=one))
    with pytest.raises(UserError, match="the model takes one input, got 2"):
        model(one, torch.tensor(y))
