"""FEMNIST in the files that LEAF writes, written small by the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgg
from fedgg.data.dataset import load
from fedgg.data.download import check, fetch
from fedgg.data.natural_clients import load_femnist
from fedgg.errors import UserError

Examples = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
SIZES = {"f0002_41": 30, "f0001_41": 20, "f0000_14": 11, "f0003_00": 1}


def examples(writer: str, count: int) -> Examples:
    draw = np.random.default_rng(sum(writer.encode()))
    return draw.integers(0, 256, (count, 784)), draw.integers(0, 62, count)


def everyone() -> dict[str, Examples]:
    return {writer: examples(writer, count) for writer, count in SIZES.items()}


def leaf(content: dict[str, Examples], whole: bool = False) -> dict[str, Any]:
    return {
        "users": list(content),
        "num_samples": [len(labels) for _, labels in content.values()],
        "user_data": {
            writer: {"x": (images if whole else images / 255).tolist(), "y": labels.tolist()}
            for writer, (images, labels) in content.items()
        },
    }


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def part(content: dict[str, Examples], chosen: slice) -> dict[str, Examples]:
    return {writer: (images[chosen], labels[chosen]) for writer, (images, labels) in content.items()}


@pytest.mark.parametrize("layout", ["", "data", "femnist", "femnist/data", "leaf/femnist/data"])
@pytest.mark.parametrize("whole", [False, True])
def test_leafs_own_split(tmp_path: Path, layout: str, whole: bool) -> None:
    content = {writer: one for writer, one in everyone().items() if len(one[1]) > 1}
    for name, chosen in (("train", slice(None, -2)), ("test", slice(-2, None))):
        for number, writer in enumerate(content):  # several files, as LEAF writes them
            file = tmp_path / layout / name / f"all_data_{number}_niid_0_keep_0_{name}_9.json"
            write(file, leaf(part({writer: content[writer]}, chosen), whole))
    dataset = load_femnist(tmp_path)
    names = ("f0000_14", "f0001_41", "f0002_41")
    assert dataset.client_names == names
    assert dataset.x_train.dtype == torch.uint8
    assert dataset.classes == tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    assert dataset.owners is not None
    for number, writer in enumerate(names):
        images, labels = content[writer]
        mine = dataset.owners == number
        assert np.array_equal(dataset.x_train[mine].numpy().reshape(-1, 784), images[:-2])
        assert np.array_equal(dataset.y_train[mine].numpy(), labels[:-2])
    tests = np.concatenate([content[writer][0][-2:] for writer in names])
    assert np.array_equal(dataset.x_test.numpy().reshape(-1, 784), tests)


def test_a_tenth_of_each_writer_is_the_test_set_where_leaf_made_none(tmp_path: Path) -> None:
    content = everyone()
    write(tmp_path / "all_data" / "all_data_0.json", leaf(content))
    dataset = load_femnist(tmp_path)
    assert dataset.owners is not None
    assert dataset.client_names == ("f0000_14", "f0001_41", "f0002_41"), "a writer with one image is left out"
    assert dataset.owners.bincount().tolist() == [10, 18, 27]
    assert len(dataset.x_test) == 1 + 2 + 3
    both = torch.cat([dataset.x_train, dataset.x_test]).flatten(1).tolist()
    assert sorted(both) == sorted(row for writer in dataset.client_names for row in content[writer][0].tolist())
    assert load_femnist(tmp_path).fingerprint == dataset.fingerprint
    write(tmp_path / "sampled_data" / "all_data_0_niid.json", leaf({"f0002_41": content["f0002_41"]}))
    assert load_femnist(tmp_path).client_names == ("f0002_41",), "the last step of LEAF's preprocessing"


def test_fewer_writers(tmp_path: Path) -> None:
    content = everyone()
    write(tmp_path / "train" / "a.json", leaf(part(content, slice(1, None))))
    write(tmp_path / "test" / "a.json", leaf(part(content, slice(None, 1))))
    dataset = load("femnist", tmp_path, writers=2)
    assert dataset.client_names == ("f0000_14", "f0001_41")
    assert len(dataset.x_test) == 2
    for writers, complaint in ((-1, "give a number"), (4, "the files have 3")):
        with pytest.raises(UserError, match=f"data.writers = {writers}.*{complaint}"):
            load_femnist(tmp_path, writers=writers)


def test_test_images_of_other_writers(tmp_path: Path) -> None:
    content = everyone()
    write(tmp_path / "train" / "a.json", leaf({"f0001_41": content["f0001_41"]}))
    write(tmp_path / "test" / "a.json", leaf({"f0002_41": content["f0002_41"]}))
    assert len(load_femnist(tmp_path, writers=1).x_test) == 30


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not a file of LEAF"),
        ("[]", "not a file of LEAF"),
        ('{"users": []}', "KeyError: 'user_data'"),
        ('{"user_data": {}}', "no images"),
        ('{"user_data": {"a": {"x": [[0, 1]], "y": [0]}}}', "have 2 pixels, expected 784"),
        ('{"user_data": {"a": {"x": [[0], [0, 1]], "y": [0]}}}', "not a file of LEAF"),
        ('{"user_data": {"a": {"x": ["' + "a" * 784 + '"], "y": [0]}}}', "not a file of LEAF"),
        (json.dumps({"user_data": {"a": {"x": [[0.001] * 784] * 2, "y": [0, 0]}}}), "not grey values divided by 255"),
        (json.dumps({"user_data": {"a": {"x": [[-0.5] * 784] * 2, "y": [0, 0]}}}), "not grey values divided by 255"),
        (json.dumps({"user_data": {"a": {"x": [[256] * 784] * 2, "y": [0, 0]}}}), "not grey values divided by 255"),
        (json.dumps({"user_data": {"a": {"x": [[float("nan")] * 784] * 2, "y": [0, 0]}}}), "not grey values"),
        (json.dumps({"user_data": {"a": {"x": [[0.0] * 784] * 2, "y": [0, 62]}}}), "labels outside 0 to 61"),
        (json.dumps({"user_data": {"a": {"x": [[0.0] * 784] * 2, "y": [0, 0.5]}}}), "labels outside 0 to 61"),
        (json.dumps({"user_data": {"a": {"x": [[0.0] * 784] * 3, "y": [0, 1]}}}), "3 images and 2 labels"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "all_data").mkdir()
    (tmp_path / "all_data" / "all_data_0.json").write_text(content)
    with pytest.raises(UserError, match=complaint) as caught:
        load_femnist(tmp_path)
    assert "\n" not in str(caught.value)
    (finding,) = check("femnist", tmp_path)
    assert not finding.ok


def test_a_run_by_writer(tmp_path: Path) -> None:
    write(tmp_path / "all_data" / "all_data_0.json", leaf(everyone()))
    (finding,) = check("femnist", tmp_path)
    assert finding.ok
    assert "55 training and 6 test images 1x28x28, 62 classes, 3 clients" in finding.what
    experiment = fedgg.Experiment(
        rounds=1,
        data={"source": "femnist", "writers": 2},
        split={"scheme": "given"},
        model={"name": "linear"},
        local={"epochs": 1, "batch": 4},
    )
    result = fedgg.run(experiment, data_folder=tmp_path)
    assert result.experiment.split.clients == 2


def test_a_writer_in_two_files(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "all_data" / f"all_data_{number}.json", leaf(everyone()))
    with pytest.raises(UserError, match=r"all_data_1\.json: writer 'f0002_41' is in another file too"):
        load_femnist(tmp_path)


def test_where_femnist_comes_from(tmp_path: Path) -> None:
    for attempt in (lambda: load("femnist", tmp_path), lambda: fetch("femnist", tmp_path)):
        with pytest.raises(UserError, match=r"data/femnist/preprocess\.sh.*hf:flwrlabs/femnist"):
            attempt()
