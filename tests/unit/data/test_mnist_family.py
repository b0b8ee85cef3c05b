"""MNIST, Fashion-MNIST and EMNIST in the layouts people have, written small by the test: whole, broken and mixed up."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedgg.data.catalog import EMNIST, FASHION_MNIST, MNIST, Publication
from fedgg.data.dataset import Dataset, load
from fedgg.data.download import check
from fedgg.data.mnist_family import load_emnist_balanced, load_emnist_letters, load_fashion_mnist, load_mnist
from fedgg.errors import UserError

Arrays = dict[str, np.ndarray[Any, Any]]
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def arrays(classes: int, first: int = 0, seed: int = 0) -> Arrays:
    """Two training images and one test image of each class."""
    draw = np.random.default_rng(seed)
    train, test = (draw.permutation(np.repeat(np.arange(classes), count)) + first for count in (2, 1))
    images = [draw.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8) for labels in (train, test)]
    return dict(zip(NAMES, (images[0], train, images[1], test), strict=True))


def small(publication: Publication, files: dict[str, bytes] | None = None) -> Publication:
    """The publication of such arrays; with the checksums of these files."""

    def with_checksum(file: Any) -> Any:
        return replace(file, sha256=hashlib.sha256((files or {}).get(file.name, b"")).hexdigest())

    classes = len(publication.classes)
    return replace(
        publication,
        files=tuple(map(with_checksum, publication.files)),
        alternatives=tuple(map(with_checksum, publication.alternatives)),
        train_counts=(2,) * classes,
        test_counts=(1,) * classes,
    )


def write(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return files


def unpacked(content: Arrays) -> dict[str, bytes]:
    return {name: idx(array) for name, array in content.items()}


def packed(content: Arrays) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(idx(array)) for name, array in content.items()}


def assert_content(dataset: Dataset, content: Arrays) -> None:
    x_train, y_train, x_test, y_test = content.values()
    assert dataset.x_train.dtype == torch.uint8
    assert np.array_equal(dataset.x_train.numpy(), x_train[:, None])
    assert np.array_equal(dataset.y_train.numpy(), y_train)
    assert np.array_equal(dataset.x_test.numpy(), x_test[:, None])
    assert np.array_equal(dataset.y_test.numpy(), y_test)
    assert dataset.peak == 255


@pytest.mark.parametrize("layout", ["MNIST/raw", "MNIST", "mnist", "mnist/raw", "", "raw", "torchvision/MNIST/raw"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_layouts_of_mnist(tmp_path: Path, layout: str, is_packed: bool) -> None:
    content = arrays(10)
    files = write(tmp_path / layout, packed(content) if is_packed else unpacked(content))
    dataset = load_mnist(tmp_path, small(MNIST, files))
    assert_content(dataset, content)
    assert dataset.classes == tuple("0123456789")


def test_names_with_a_dot(tmp_path: Path) -> None:
    content = arrays(10)
    write(tmp_path, {name.replace("-idx", ".idx"): raw for name, raw in unpacked(content).items()})
    assert_content(load_mnist(tmp_path, small(MNIST)), content)


def test_keras_arrays(tmp_path: Path) -> None:
    content = arrays(10)
    x_train, y_train, x_test, y_test = (array.astype(np.uint8) for array in content.values())
    np.savez(tmp_path / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    published = small(MNIST, {"mnist.npz": (tmp_path / "mnist.npz").read_bytes()})
    assert_content(load_mnist(tmp_path, published), content)
    with pytest.raises(UserError, match=r"mnist\.npz: SHA-256 .* is not the publisher's"):
        load_mnist(tmp_path, small(MNIST))


def test_mnist_and_fashion_mnist_side_by_side(tmp_path: Path) -> None:
    digits, articles = arrays(10, seed=1), arrays(10, seed=2)
    write(tmp_path / "FashionMNIST" / "raw", unpacked(articles))
    with pytest.raises(UserError, match="`fedgg data fetch mnist`"):
        load_mnist(tmp_path, small(MNIST))
    write(tmp_path / "MNIST" / "raw", unpacked(digits))
    assert_content(load_mnist(tmp_path, small(MNIST)), digits)
    assert_content(load_fashion_mnist(tmp_path, small(FASHION_MNIST)), articles)


def test_another_data_set_under_the_same_names(tmp_path: Path) -> None:
    content = arrays(10)
    content["train-labels-idx1-ubyte"][0] = (content["train-labels-idx1-ubyte"][0] + 1) % 10
    write(tmp_path, unpacked(content))
    with pytest.raises(UserError, match=r"class \d has [13] training images, published are 2; is this mnist\?"):
        load_mnist(tmp_path, small(MNIST))


def emnist(content: Arrays, split: str) -> dict[str, bytes]:
    """As NIST writes it: images transposed."""
    names = {
        name: name.replace("train", f"emnist-{split}-train").replace("t10k", f"emnist-{split}-test") for name in content
    }
    return {names[name]: idx(a.transpose(0, 2, 1) if a.ndim == 3 else a) for name, a in content.items()}


@pytest.mark.parametrize("layout", ["EMNIST/raw", "EMNIST/raw/gzip", "gzip", "anything", ""])
def test_layouts_of_emnist(tmp_path: Path, layout: str) -> None:
    content = arrays(47)
    if layout == "EMNIST/raw/gzip":
        tmp_path /= "EMNIST/raw"
        layout = "gzip"
    write(tmp_path / layout, {f"{name}.gz": gzip.compress(raw) for name, raw in emnist(content, "balanced").items()})
    dataset = load_emnist_balanced(tmp_path, small(EMNIST["emnist-balanced"]))
    assert_content(dataset, content)
    assert "".join(dataset.classes) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"


def test_the_archive_of_emnist_and_letters_from_zero(tmp_path: Path) -> None:
    content = arrays(26, first=1)
    path = tmp_path / "EMNIST" / "raw" / "gzip.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in emnist(content, "letters").items():
            archive.writestr(f"gzip/{name}.gz", gzip.compress(raw))
    published = small(EMNIST["emnist-letters"], {"gzip.zip": path.read_bytes()})
    dataset = load_emnist_letters(tmp_path, published)
    labels = {name: array - 1 if array.ndim == 1 else array for name, array in content.items()}
    assert_content(dataset, labels)
    (finding,) = check("emnist-letters", tmp_path, True, {"emnist-letters": published})
    assert finding.ok
    assert "52 training and 26 test images 1x28x28, 26 classes; the publisher's own bytes" in finding.what
    with pytest.raises(UserError, match="is not the publisher's"):
        load_emnist_letters(tmp_path, small(EMNIST["emnist-letters"]))
    with pytest.raises(
        UserError, match=r"gzip\.zip/emnist-balanced-train.*damaged or unreadable"
    ):  # not in the archive
        load_emnist_balanced(tmp_path, small(EMNIST["emnist-balanced"], {"gzip.zip": path.read_bytes()}))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        (NAMES[0], lambda raw: raw[:-1], "less than the 15,680 bytes"),
        (NAMES[0], lambda raw: raw + b"x", "more than the 15,680 bytes"),
        (NAMES[0], lambda raw: b"", "not an IDX file"),
        (NAMES[0], lambda raw: b"\x00\x00\x09" + raw[3:], "not an IDX file"),
        (NAMES[1], lambda raw: raw[:4] + struct.pack(">I", 1 << 31) + raw[8:], "holds 2,147,483,648 bytes"),
        (NAMES[2], lambda raw: idx(np.zeros((10, 27, 28))), "holds 10x27x28 bytes, published are 10x28x28"),
        (NAMES[3], lambda raw: idx(np.full(10, 10)), "class 0 has 0 test images"),
        (NAMES[3], None, "missing"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, change: Any, complaint: str) -> None:
    files = unpacked(arrays(10))
    raw = files.pop(name)
    write(tmp_path, files | ({} if change is None else {name: change(raw)}))
    with pytest.raises(UserError, match=complaint) as caught:
        load_mnist(tmp_path, small(MNIST))
    assert "\n" not in str(caught.value)


def test_packed_files_must_be_the_publishers(tmp_path: Path) -> None:
    files = write(tmp_path, packed(arrays(10)))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(files["t10k-labels-idx1-ubyte.gz"][:-9])
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz: SHA-256 .* is not the publisher's"):
        load_mnist(tmp_path, small(MNIST, files))


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_data_check_says(tmp_path: Path, is_packed: bool) -> None:
    content = arrays(10)
    files = write(tmp_path / "MNIST" / "raw", packed(content) if is_packed else unpacked(content))
    for strict in (False, True):
        (finding,) = check("mnist", tmp_path, strict, {"mnist": small(MNIST, files)})
        assert finding.ok is (is_packed or not strict)
        assert ("the publisher's own bytes" if is_packed else "no checksums") in finding.what
    (tmp_path / "MNIST" / "raw" / (NAMES[0] + ".gz" * is_packed)).write_bytes(b"")
    (finding,) = check("mnist", tmp_path, False, {"mnist": small(MNIST, files)})
    assert not finding.ok


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist-byclass", "emnist-digits"])
def test_without_files_the_way_out_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: found no .* in {tmp_path} or below; run `fedgg data fetch {name}`"):
        load(name, tmp_path)


def test_published_numbers() -> None:
    totals = {
        one.name: (sum(one.train_counts), sum(one.test_counts)) for one in (MNIST, FASHION_MNIST, *EMNIST.values())
    }
    assert totals == {
        "mnist": (60_000, 10_000),
        "fashion-mnist": (60_000, 10_000),
        "emnist-balanced": (112_800, 18_800),
        "emnist-byclass": (697_932, 116_323),
        "emnist-bymerge": (697_932, 116_323),
        "emnist-digits": (240_000, 40_000),
        "emnist-letters": (124_800, 20_800),
    }
