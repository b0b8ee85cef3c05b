"""`hf:NAME` with the real package `datasets`, on folders that the test writes; the Hub itself is not reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgg
from fedgg.data.dataset import load
from fedgg.data.download import check
from fedgg.errors import UserError

datasets: Any = pytest.importorskip("datasets", reason="the package `datasets` is not installed")
HEIGHT, WIDTH = 6, 5


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def pixels(count: int, seed: int, channels: int = 0) -> np.ndarray[Any, Any]:
    shape = (count, HEIGHT, WIDTH, channels) if channels else (count, HEIGHT, WIDTH)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def rows(images: Any, labels: Any, **columns: Any) -> Any:
    """A table with images and classes, as image data sets on the Hub have them."""
    from PIL import Image

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee", "cat"])}
    features |= {
        name: datasets.Value("string" if isinstance(value[0], str) else "int64") for name, value in columns.items()
    }
    content = {"image": [Image.fromarray(one) for one in images], "label": list(labels), **columns}
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def save(folder: str = "mine", **splits: Any) -> None:
    datasets.DatasetDict(splits).save_to_disk(folder)


@pytest.mark.parametrize("channels", [0, 3])
def test_images_and_classes_are_found_by_type(channels: int) -> None:
    train, test = pixels(7, 0, channels), pixels(4, 1, channels)
    save(train=rows(train, [0, 1, 2, 0, 1, 2, 0], number=range(7)), test=rows(test, [0, 1, 2, 0], number=range(4)))
    dataset = load("hf:./mine")
    expected = train.transpose(0, 3, 1, 2) if channels else train[:, None]
    assert dataset.x_train.dtype == torch.uint8
    assert np.array_equal(dataset.x_train.numpy(), expected)
    assert dataset.x_test.shape == (4, channels or 1, HEIGHT, WIDTH)
    assert dataset.y_train.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert dataset.classes == ("ant", "bee", "cat")
    assert dataset.peak == 255
    assert dataset.name == "mine"
    (finding,) = check("hf:./mine", Path())
    assert finding.ok
    assert "7 training and 4 test images" in finding.what


def test_one_image_in_colour_makes_all_of_them_so() -> None:
    grey, colour = pixels(3, 0), pixels(2, 1, 3)
    save(train=rows([*grey], [0, 1, 2]), test=rows([*colour], [0, 1]))
    dataset = load("hf:./mine")
    assert np.array_equal(dataset.x_train.numpy(), np.stack([grey] * 3, 1))
    assert np.array_equal(dataset.x_test.numpy(), colour.transpose(0, 3, 1, 2))


def test_a_folder_of_images() -> None:
    from PIL import Image

    for part, seed in (("train", 0), ("test", 1)):
        for number, image in enumerate(pixels(4, seed)):
            path = Path("photos", part, ("bird", "dog")[number % 2], f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    dataset = load("hf:./photos")
    assert dataset.classes == ("bird", "dog")
    assert sorted(dataset.x_train.flatten(1).tolist()) == sorted(pixels(4, 0).reshape(4, -1).tolist())


def test_clients_and_a_tenth_of_each_as_test_set() -> None:
    images, writers = pixels(43, 0), ["w2"] * 20 + ["w1"] * 22 + ["w3"]
    save(train=rows(images, np.arange(43) % 3, writer_id=writers))
    dataset = load("hf:./mine", client="writer_id")
    assert dataset.client_names == ("w1", "w2", "w3")
    assert dataset.owners is not None
    assert dataset.owners.bincount().tolist() == [20, 18, 1]
    both = torch.cat([dataset.x_train, dataset.x_test]).flatten(1).tolist()
    assert sorted(both) == sorted(images.reshape(43, -1).tolist())
    assert load("hf:./mine", client="writer_id").fingerprint == dataset.fingerprint
    assert len(load("hf:./mine").x_test) == 4


def test_named_columns_and_splits() -> None:
    table = rows(pixels(6, 0), [0, 1, 2] * 2, kind=["x", "y"] * 3, thumb=range(6))
    table = table.add_column("coarse", [0, 1] * 3).cast_column("coarse", datasets.ClassLabel(names=["warm", "cold"]))
    save(fit=table, valid=table.select(range(2)))
    with pytest.raises(UserError, match=r"several columns of classes: label, coarse; set data\.label to one of image"):
        load("hf:./mine", train="fit")
    dataset = load("hf:./mine", train="fit", test="valid", label="coarse")
    assert dataset.classes == ("warm", "cold")
    assert len(dataset.x_test) == 2
    words = load("hf:./mine", train="fit", test="valid", label="kind")
    assert words.classes == ("x", "y")
    for settings, complaint in (
        ({}, r"no split 'train'; set data\.train to one of fit, valid"),
        ({"train": "fit", "test": "tset"}, r"no split 'tset'; set data\.test to one of fit, valid"),
        ({"train": "fit", "test": "fit"}, "is the training set"),
        ({"train": "fit", "label": "lable"}, r"data\.label = 'lable' is none of its columns: image, label, kind"),
        ({"train": "fit", "label": "coarse", "client": "who"}, r"data\.client = 'who' is none of its columns"),
        ({"train": "fit", "label": "coarse", "size": -1}, r"data\.size = -1"),
        ({"train": "fit", "label": "coarse", "input": "thumb", "size": 8}, "resizes images, and 'thumb' has none"),
    ):
        with pytest.raises(UserError, match=complaint):
            load("hf:./mine", **settings)


def test_images_of_several_sizes() -> None:
    images = [*pixels(3, 0), pixels(1, 1)[0][:, :4]]
    save(train=rows(images, [0, 1, 2, 0]), test=rows(pixels(1, 2), [0]))
    with pytest.raises(UserError, match=r"different shapes, 6x5 and 6x4; data\.size = 64"):
        load("hf:./mine")
    assert load("hf:./mine", size=8).shape == (1, 8, 8)


def test_numbers_instead_of_images() -> None:
    values = np.random.default_rng(0).random((6, 4)).astype(np.float32)
    table = datasets.Dataset.from_dict({"features": values.tolist(), "label": [0, 1] * 3})
    save(train=table, test=table)
    dataset = load("hf:./mine", input="features")
    assert np.allclose(dataset.x_train.numpy(), values)
    with pytest.raises(UserError, match=r"no column of images; set data\.input to one of features, label"):
        load("hf:./mine")


def test_configurations() -> None:
    for name, count in (("small", 3), ("large", 6)):
        Path("both", name).mkdir(parents=True)
        for part in ("train", "test"):
            rows(pixels(count, 0), np.arange(count) % 3).to_parquet(f"both/{name}/{part}-0.parquet")
    lines = []
    for name in ("small", "large"):
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [f"  - split: {part}\n    path: {name}/{part}-*" for part in ("train", "test")]
    Path("both/README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]))
    assert [len(load("hf:./both", config=name).x_train) for name in ("small", "large")] == [3, 6]
    with pytest.raises(UserError, match=r"\['small', 'large'\].*; set data\.config"):
        load("hf:./both")


def test_what_cannot_be_loaded_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="there is no folder nowhere"):
        load("hf:./nowhere")
    Path("empty").mkdir()
    with pytest.raises(UserError, match=r"hf:\./empty: cannot be loaded") as caught:
        load("hf:./empty")
    assert "\n" not in str(caught.value)


def test_a_run_by_client() -> None:
    labels = np.arange(60) % 3
    save(train=rows(pixels(60, 0), labels, who=["a", "b"] * 30), test=rows(pixels(6, 1), labels[:6], who=["a"] * 6))
    experiment = fedgg.Experiment(
        rounds=1,
        data={"source": "hf:./mine", "client": "who"},
        split={"scheme": "given"},
        model={"name": "linear"},
        local={"epochs": 1, "batch": 8},
    )
    assert fedgg.run(experiment).experiment.split.clients == 2
