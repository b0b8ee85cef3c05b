"""Splits of an experiment: settings by name, examples held by several clients or by none, clients chosen by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedgg import Experiment, run
from fedgg.core.random_choices import stream
from fedgg.data.readers import load_digits
from fedgg.errors import UserError
from fedgg.lab.federated_data import Holdings, holdings, split_of
from fedgg.lab.store import Store

DIGITS = load_digits()
REPEATED: dict[str, Any] = {
    "seed": 3,
    "rounds": 2,
    "split": {"scheme": "dirichlet_repeated", "beta": 0.1, "clients": 6},
}


def held_under(**data: Any) -> Holdings:
    experiment = Experiment(**REPEATED, data=data)
    return holdings(experiment, split_of(experiment, DIGITS))


def test_repeated_examples_are_held_out_or_trained_on_but_not_both() -> None:
    whole, parts = held_under(), held_under(holdout=0.25, proxy=50)
    train, held_out = np.concatenate(parts.clients), np.concatenate(parts.held_out)
    assert len(np.unique(train)) < len(train)  # examples repeat
    assert not set(train) & set(held_out)
    assert not set(parts.proxy) & {*train, *held_out}
    assert len(set(parts.proxy)) == 50
    for before, after, out in zip(whole.clients, parts.clients, parts.held_out, strict=True):
        rest = before[~np.isin(before, parts.proxy)]
        assert np.array_equal(after, rest[~np.isin(rest, out)])
        assert np.array_equal(out, np.unique(out))
        assert len(out) / len(np.unique(rest)) == pytest.approx(0.25, abs=0.15)
    assert len(np.unique(held_out)) / len(np.unique(np.concatenate([train, held_out]))) == pytest.approx(0.25, abs=0.01)


def test_clients_keep_their_smallest_size_when_the_server_takes_repeated_examples() -> None:
    experiment = Experiment(**REPEATED | {"data": {"proxy": 20}}).changed({"split.min_examples": 225})
    sizes = [len(held) for held in holdings(experiment, split_of(experiment, DIGITS)).clients]
    assert min(sizes) >= 225
    with pytest.raises(UserError, match=r"data\.proxy = 1000 is more than"):
        holdings(experiment.changed({"data.proxy": 1000}), split_of(experiment, DIGITS))


def test_a_run_on_repeated_examples(tmp_path: Path) -> None:
    """The run folder records every copy; the partition's counts are those of the copies."""
    experiment = Experiment(**REPEATED)
    run(experiment, out=tmp_path / "run")
    split = split_of(experiment, DIGITS)
    with np.load(tmp_path / "run" / "partition.npz") as arrays:
        assert np.array_equal(arrays["examples"], np.concatenate(split.indices))
    described = Store(tmp_path / "run").read_json("partition.json")
    assert np.array(described["counts"]).sum() == len(DIGITS.y_train)
    assert described["hash"] == split.hash()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy.noise": 1.0}, "privacy and split.scheme = 'dirichlet_repeated': epsilon is for clients"),
        ({"split.feature_noise": 0.1}, "split.feature_noise and split.scheme = 'dirichlet_repeated'"),
        ({"split.feature_rotation": 9.0}, "split.feature_rotation and split.scheme = 'dirichlet_repeated'"),
    ],
)
def test_what_rests_on_examples_of_one_client_each_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        run(Experiment(**REPEATED).changed(changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"scheme": "k_labels", "labels_per_client": "two"}, "split.labels_per_client = 'two'"),
        ({"scheme": "quantity", "sizes": "cubic"}, "split.sizes = 'cubic'"),
        ({"scheme": "given", "choose": "best"}, "split.choose = 'best'"),
        ({"scheme": "domains"}, "digits does not say which domain an example is of"),
        ({"scheme": "iid", "labels_per_client": 2}, "labels_per_client"),
        ({"scheme": "iid", "examples": 2}, "examples"),
        ({"feature_noise": -1.0}, "split.feature_noise"),
    ],
)
def test_settings_of_splits_are_checked(split: dict[str, Any], words: str) -> None:
    owners = np.arange(len(DIGITS.y_train)) % 12
    data = (DIGITS.x_train, DIGITS.y_train, DIGITS.x_test, DIGITS.y_test, owners) if "choose" in split else None
    with pytest.raises(UserError) as caught:
        run({"rounds": 1, "split": split}, data=data)
    assert words in str(caught.value)


@pytest.mark.parametrize("names", [True, False])
def test_chosen_clients_keep_the_names_of_the_data(names: bool) -> None:
    sizes = [300, 5, 400, 250, 60]
    owners = stream(0, "owners").permutation(np.repeat(np.arange(5), sizes))
    x, y = DIGITS.x_train[: len(owners)], DIGITS.y_train[: len(owners)]
    ids = np.array(["ann", "bob", "eve", "joe", "kim"])[owners] if names else owners
    experiment: dict[str, Any] = {
        "rounds": 1,
        "data": {"holdout": 0.2},
        "split": {"scheme": "given", "choose": "largest", "clients": 3},
    }
    seen: list[str] = []
    finished = run(experiment, data=(x, y, DIGITS.x_test, DIGITS.y_test, ids))
    assert [client["examples"] for client in finished.rounds[0]["clients"]] == [240, 320, 200]
    from fedgg.lab.build import build
    from fedgg.lab.runner import with_names

    data = (x, y, DIGITS.x_test, DIGITS.y_test, ids)
    seen += build(with_names(Experiment(**experiment), None, data, None), data=data).origin.client_names or ()
    assert seen == (["ann", "eve", "joe"] if names else ["0", "2", "3"])
