"""What people hand to `fedgg.run`: forgiving where the meaning is plain, one clear line where it is not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observers import Callbacks
from safetensors.torch import load_file
from torch import Tensor, nn

import fedgg
from fedgg.errors import UserError
from fedgg.lab.observer import Observer
from fedgg.lab.study import Study, run_study

SMALL: dict[str, Any] = {"rounds": 2, "split": {"clients": 3, "beta": 1.0}, "local": {"epochs": 1, "batch": 16}}


def table(classes: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    y = np.arange(160) % classes
    x = numbers.normal(size=(160, 7)) * 3 + 50 + y[:, None]
    return x[:120], y[:120], x[120:], y[120:]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))


@dataclass(frozen=True)
class Unchecked(fedgg.FedProx):
    """Differs from FedProx: its own `__post_init__` checks nothing."""

    def __post_init__(self) -> None:
        pass


@pytest.mark.parametrize("algorithm", ["fedprox", fedgg.FedProx, fedgg.FedProx()])
def test_an_algorithm_by_name_class_or_instance(algorithm: Any) -> None:
    done = fedgg.run(SMALL, model=model, data=table(), algorithm=algorithm)
    assert done.experiment.algorithm.name == "fedprox"
    assert done.status == "finished"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"algorithm": 3}, "fedgg.FedGG"),
        ({"algorithm": Unchecked(mu=-1.0)}, "algorithm.mu = -1.0"),
        ({"algorithm": "fedgb"}, "did you mean 'fedgg'"),
        ({"data": table()[:3]}, "x_train, y_train, x_test, y_test"),
        ({"data": "digits"}, "goes into the experiment"),
    ],
)
def test_mistakes_in_one_line(given: dict[str, Any], word: str) -> None:
    usual: dict[str, Any] = {"model": model, "data": table()}
    with pytest.raises(UserError, match=word) as caught:
        fedgg.run(SMALL, **(usual | given))
    assert "\n" not in str(caught.value)


def test_an_infinite_setting_is_what_runs(tmp_path: Path) -> None:
    """FedExP at its neutral setting is FedAvg: in a folder, taken up again, and in a study."""
    skewed = SMALL | {"rounds": 4, "split": {"clients": 6, "beta": 0.1, "min_examples": 1}}
    skewed |= {"local": {"epochs": 4, "batch": 8, "lr": 0.1}}
    usual: dict[str, Any] = {"model": model, "data": table()}
    fedavg = fedgg.run(skewed, **usual, algorithm="fedavg").weights
    extrapolated = fedgg.run(skewed, **usual, algorithm="fedexp").weights
    assert not all(torch.equal(extrapolated[name], rows) for name, rows in fedavg.items())
    neutral = fedgg.FedExP().neutral()
    fedgg.run(skewed | {"rounds": 2}, **usual, algorithm=neutral, out=tmp_path / "run")
    assert "epsilon = inf\n" in (tmp_path / "run" / "config.toml").read_text()
    resumed = fedgg.run(skewed, **usual, algorithm=neutral, out=tmp_path / "run").weights
    rows = {"as object": neutral, "as settings": {"algorithm.name": "fedexp", "algorithm.epsilon": float("inf")}}
    fedgg.compare(rows, skewed, seeds=[0], **usual, out=tmp_path / "study")
    written = [load_file(file) for file in (tmp_path / "study").glob("*/*/model.safetensors")]
    assert len(written) == 2
    for weights in (resumed, *written):
        assert all(torch.equal(weights[name], rows) for name, rows in fedavg.items())


def test_clients_that_are_given(tmp_path: Path) -> None:
    """People's own clients, with a split from the data, whatever their sizes; and again from the folder."""
    names = np.array(["ann"] * 70 + ["bob"] * 48 + ["eve"] * 2)
    short: dict[str, Any] = {"rounds": 2, "local": SMALL["local"]}
    done = fedgg.run(short, model=model, data=(*table(), names), out=tmp_path)
    assert (done.experiment.split.scheme, done.experiment.split.clients) == ("given", 3)
    told = json.loads((tmp_path / "partition.json").read_text())
    assert (told["scheme"], [sum(counts) for counts in told["counts"]]) == ("given", [70, 48, 2])
    assert told["names"] == ["ann", "bob", "eve"]
    assert fedgg.run(short, model=model, data=(*table(), names), out=tmp_path).rounds == done.rounds
    with pytest.raises(UserError, match=r"data names the clients, and split\.scheme = 'iid'"):
        fedgg.run(short | {"split": {"scheme": "iid"}}, model=model, data=(*table(), names))
    with pytest.raises(UserError, match="set it to 3"):
        fedgg.run(short | {"split": {"clients": 5}}, model=model, data=(*table(), names))
    with pytest.raises(UserError, match="does not say which client holds what"):
        fedgg.run(short | {"split": {"scheme": "given"}}, model=model, data=table())
    domains = short | {"split": {"scheme": "domains", "clients": 6, "min_examples": 1}}
    run = fedgg.run(domains, model=model, data=(*table(), names), out=tmp_path / "domains")
    told = json.loads((tmp_path / "domains" / "partition.json").read_text())
    assert (told["scheme"], len(run.rounds[0]["clients"])) == ("domains", 6)


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x)}


def test_a_model_that_returns_no_tensor_is_told_so() -> None:
    with pytest.raises(UserError, match="returned a dict, not a tensor"):
        fedgg.run(SMALL, model=Dictionary, data=table())


def test_lazy_layers_are_told_so() -> None:
    with pytest.raises(UserError, match="lazy layers"):
        fedgg.run(SMALL, model=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), data=table())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x[:, :, None])[0][:, -1])  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_stacked_says_so_and_runs() -> None:
    said: list[str] = []
    observer = Callbacks(notice=said.append)
    weights = []
    for engine in ("stacked", "fused"):
        settings = SMALL | {"engine": {"name": engine}}
        weights.append(fedgg.run(settings, model=Recurrent, data=table(), observer=observer).weights)
    assert any("cannot be stacked" in sentence for sentence in said)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_classes_without_an_example_are_mentioned() -> None:
    x_train, y_train, x_test, y_test = table()
    said: list[str] = []
    observer = Callbacks(notice=said.append)
    wide = nn.Linear(7, 6)
    fedgg.run(SMALL, model=wide, data=(x_train, y_train * 2 + 1, x_test, y_test * 2 + 1), observer=observer)
    assert any("no training example has the class 0, 2, 4" in sentence for sentence in said)


def test_the_saved_model_and_its_inputs_give_the_accuracy_of_the_run(tmp_path: Path) -> None:
    data = table()
    settings = SMALL | {"rounds": 6, "data": {"normalise": "standard"}}
    done = fedgg.run(settings, model=model, data=data, out=tmp_path)
    module = model()
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    expects = json.loads((tmp_path / "inputs.json").read_text())
    x = (torch.tensor(data[2]) - torch.tensor(expects["shift"])) * torch.tensor(expects["scale"])
    right = (module(x.float()).argmax(1).numpy() == data[3]).mean()
    assert right == pytest.approx(done.test_accuracy[-1])
    assert expects["shape"] == [7]


def test_a_folder_says_in_what_it_differs(tmp_path: Path) -> None:
    fedgg.run(SMALL, model=model, data=table(), out=tmp_path)
    with pytest.raises(UserError, match=r"local\.lr = 0\.01 there, 0\.5 here"):
        fedgg.run(SMALL | {"local": SMALL["local"] | {"lr": 0.5}}, model=model, data=table(), out=tmp_path)


def test_a_study_leaves_another_alone(tmp_path: Path) -> None:
    base = fedgg.Experiment(**SMALL, model={"name": "linear"})
    first = Study(base, {"A": {"algorithm.name": "fedavg"}}, (0,), "A")
    other = Study(base.changed({"local.lr": 0.5}), {"A": {"algorithm.name": "fedavg"}}, (0,), "A")
    run_study(first, tmp_path / "study", processes=1, observer=Observer())
    before = (tmp_path / "study" / "study.json").read_bytes()
    with pytest.raises(UserError, match=r"local\.lr = 0\.01 there, 0\.5 here"):
        run_study(other, tmp_path / "study", processes=1, observer=Observer())
    assert (tmp_path / "study" / "study.json").read_bytes() == before
    assert first.hash() != other.hash()
    with pytest.raises(UserError, match="holds a comparison"):
        fedgg.run(SMALL, model=model, data=table(), out=tmp_path / "study")
    with pytest.raises(UserError, match="holds a single run"):
        run_study(first, tmp_path / "study" / "a" / "seed-0", processes=1, observer=Observer())


def test_a_run_shows_itself_in_a_line_and_names_can_be_completed() -> None:
    done = fedgg.run(SMALL, model=model, data=table())
    assert "tensor" not in repr(done)
    assert {"run", "Experiment", "FedGG"} <= set(dir(fedgg))


def test_the_users_own_torch_settings_come_back() -> None:
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic, torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        fedgg.run(SMALL, model=model, data=table())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before[0])
    assert torch.backends.cudnn.deterministic == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_run_can_be_followed_further(tmp_path: Path) -> None:
    """Two rounds, then four: the same as four at once, though it was looked at in other rounds."""
    longer = SMALL | {"rounds": 4}
    straight = fedgg.run(longer, model=model, data=table(), out=tmp_path / "straight")
    fedgg.run(SMALL, model=model, data=table(), out=tmp_path / "further")
    further = fedgg.run(longer, model=model, data=table(), out=tmp_path / "further")
    assert further.summary["rounds_done"] == 4
    assert json.loads((tmp_path / "further" / "summary.json").read_text())["rounds_done"] == 4
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "further")]
    assert files[0] == files[1]
    assert all(torch.equal(straight.weights[name], further.weights[name]) for name in straight.weights)
    with pytest.raises(UserError, match="4 rounds, more than the 2 asked for"):
        fedgg.run(SMALL, model=model, data=table(), out=tmp_path / "further")


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.spare = nn.Linear(7, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x)
        return outputs


def test_a_parameter_that_is_never_used_stays_as_it_is() -> None:
    """In every engine the same: its gradient is zero."""
    ends = [
        fedgg.run(SMALL | {"engine": {"name": name}}, model=Unused, data=table(), algorithm="fedgg")
        for name in ("loop", "stacked")
    ]
    assert ends[0].test_accuracy == ends[1].test_accuracy
    assert ends[0].status == "finished"


def test_numbers_beyond_the_precision_are_divergence() -> None:
    """FedGG's factors are computed in float64; the rows they are made for are not."""
    done = fedgg.run({"rounds": 3, "split": {"clients": 3}, "local": {"epochs": 1, "lr": 1e6}}, algorithm="fedgg")
    assert done.status in ("finished", "diverged")


def test_mistakes_in_a_study_are_found_before_anything_is_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a variant cannot set seed; a study has seeds"):
        Study(fedgg.Experiment(), {"a": {"seed": 3}}, (0,), "a")
    sources = {"a": {"data.source": "digits"}, "b": {"data.source": "svhn"}}
    with pytest.raises(UserError, match="svhn"):
        run_study(
            Study(fedgg.Experiment(**SMALL), sources, (0,), "a"),
            tmp_path / "other",
            processes=1,
            observer=Observer(),
            data_folder=tmp_path,
        )
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match="unknown model 'cnm'"):
        Study(fedgg.Experiment(), {"a": {}, "b": {"model.name": "cnm"}}, (0,), "a")


class Tokens(nn.Module):
    def __init__(self, vocabulary: int = 60) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x.long()).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_token_ids_reach_an_embedding_unscaled(kind: type[np.generic]) -> None:
    numbers = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = (numbers.integers(1, 25, (120, 6)) + 30 * y[:, None]).astype(kind)
    said: list[str] = []
    observer = Callbacks(notice=said.append)
    settings = SMALL | {"rounds": 4, "local": {"epochs": 3, "batch": 8, "lr": 0.5}}
    done = fedgg.run(settings, model=Tokens, data=(x, y, x, y), observer=observer)
    assert done.test_accuracy[-1] > 0.9
    assert (done.predict(x) == y).mean() == pytest.approx(done.test_accuracy[-1])
    assert not any("normalise" in sentence for sentence in said)
    with pytest.raises(UserError, match=r"index out of range.*data\.normalise = 'none'") as caught:
        fedgg.run(SMALL | {"data": {"normalise": "standard"}}, model=Tokens, data=(x, y, x, y))
    assert "\n" not in str(caught.value)
    fedgg.run(SMALL | {"data": {"normalise": "unit"}}, model=Tokens, data=(x, y, x, y), observer=observer)
    becomes_fractions = kind is np.uint8  # whole numbers that are no bytes have no brightest pixel
    assert any("token ids need data.normalise = 'none'" in sentence for sentence in said) is becomes_fractions


def test_token_ids_beyond_the_embedding_are_told_before_the_first_round(tmp_path: Path) -> None:
    """The first examples, with which a model is tried out, need not hold the largest id."""
    x, y = np.zeros((120, 6), np.int64), np.arange(120) % 2
    x[77, 3] = 59
    for train, test in ((x, x[:9]), (x[:70], x)):
        data = (train, y[: len(train)], test, y[: len(test)])
        with pytest.raises(UserError, match=r"index out of range.*the inputs lie between 0 and 59"):
            fedgg.run(SMALL, model=lambda: Tokens(10), data=data, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_lost_clients_are_called_by_their_names(tmp_path: Path) -> None:
    x, y, x_test, y_test = table()
    x[70:] = 3e38  # after the first step the outputs of their client are not finite
    owners = np.array(["charite"] * 70 + ["mayo"] * 50)
    said: list[str] = []
    settings: dict[str, Any] = {"rounds": 2, "local": {"epochs": 1, "batch": 16}}
    data = (x, y, x_test, y_test, owners)
    observer = Callbacks(notice=said.append)
    done = fedgg.run(settings, model=nn.Linear(7, 3), data=data, out=tmp_path, observer=observer)
    (lost,) = done.rounds[0]["lost"]
    assert (lost["client"], lost["name"]) == (1, "mayo")
    (about,) = [sentence for sentence in said if "dropped" in sentence]
    assert "client mayo dropped" in about
    x[:] = 3e38
    assert "client charite, mayo: " in fedgg.run(settings, model=nn.Linear(7, 3), data=data).summary["why"]
    refuse = {"rounds": 1, "local": {"batch": 16, "small_clients": "refuse"}}
    with pytest.raises(UserError, match="larger than client eve, which holds 2 examples"):
        fedgg.run(refuse, model=model, data=(*table(), np.array(["ann"] * 118 + ["eve"] * 2)))


class Sized(nn.Linear):
    """A module with a length, which is 0 at first: it counts as false."""

    def __len__(self) -> int:
        return 0


def test_a_model_that_counts_as_false_is_used(tmp_path: Path) -> None:
    run = fedgg.run(SMALL, model=Sized(7, 3), data=table(), out=tmp_path)
    assert isinstance(run.model().module, Sized)
    assert isinstance(fedgg.Run.load(tmp_path, model=Sized(7, 3)).model().module, Sized)
