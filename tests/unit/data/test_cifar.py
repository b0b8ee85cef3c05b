"""CIFAR in its eight published forms, written small on the spot, whole and broken."""

from __future__ import annotations

import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedgg.data.catalog import CIFAR10, CIFAR100, CIFAR100_SUPERCLASSES, Publication
from fedgg.data.dataset import Dataset, load
from fedgg.data.download import check
from fedgg.data.readers import load_cifar10, load_cifar100
from fedgg.errors import UserError

Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]  # pixels, fine labels, coarse labels
ROWS = 20
WORDS10 = [f"class{i}" for i in range(10)]
WORDS100 = [f"fine{i}" for i in range(100)]
WORDS20 = [f"coarse{i}" for i in range(20)]


def batch(seed: int, classes: int) -> Batch:
    draw = np.random.default_rng(seed)
    return (
        draw.integers(0, 256, (ROWS, 3072), dtype=np.uint8),
        draw.integers(0, classes, ROWS, dtype=np.uint8),
        draw.integers(0, 20, ROWS, dtype=np.uint8),
    )


def files(folder: str) -> dict[str, bytes]:
    """The files of one form, by name."""
    ten = {**{f"data_batch_{i}": batch(i, 10) for i in range(1, 6)}, "test_batch": batch(6, 10)}
    hundred = {"train": batch(1, 100), "test": batch(2, 100)}

    def dump(content: object) -> bytes:
        return pickle.dumps(content, protocol=2)

    def names(words: list[str]) -> list[bytes]:
        return [word.encode() for word in words]

    match folder:
        case "cifar-10-batches-py":
            rows = {name: dump({b"data": x, b"labels": fine.tolist()}) for name, (x, fine, _) in ten.items()}
            return {**rows, "batches.meta": dump({b"label_names": names(WORDS10)})}
        case "cifar-10-batches-bin":
            rows = {f"{name}.bin": np.column_stack([fine, x]).tobytes() for name, (x, fine, _) in ten.items()}
            return {**rows, "batches.meta.txt": "\n".join([*WORDS10, "\n"]).encode()}
        case "cifar-100-python":
            rows = {
                name: dump({b"data": x, b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()})
                for name, (x, fine, coarse) in hundred.items()
            }
            meta = {b"fine_label_names": names(WORDS100), b"coarse_label_names": names(WORDS20)}
            return {**rows, "meta": dump(meta)}
        case _:
            rows = {f"{name}.bin": np.column_stack([c, fine, x]).tobytes() for name, (x, fine, c) in hundred.items()}
            texts = {"fine_label_names.txt": WORDS100, "coarse_label_names.txt": WORDS20}
            return {**rows, **{name: "\n".join(words).encode() for name, words in texts.items()}}


def extract(where: Path, folder: str, changes: dict[str, bytes | None] | None = None) -> Path:
    target = where / folder
    target.mkdir(parents=True)
    for name, raw in {**files(folder), **(changes or {})}.items():
        if raw is not None:
            (target / name).write_bytes(raw)
    return target


def pack(folder: str, prefix: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, raw in files(folder).items():
            entry = tarfile.TarInfo(f"{prefix}{folder}/{name}")
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))
    return buffer.getvalue()


def expecting(publication: Publication, archive: str, raw: bytes) -> Publication:
    """The publication with the checksum of these bytes for one of its archives."""
    sha256 = hashlib.sha256(raw).hexdigest()

    def change(group: str) -> Any:
        found = getattr(publication, group)
        return tuple(replace(file, sha256=sha256) if file.name == archive else file for file in found)

    return replace(publication, files=change("files"), alternatives=change("alternatives"))


def assert_ten(data: Dataset) -> None:
    train, test = [batch(i, 10) for i in range(1, 6)], batch(6, 10)
    assert data.x_train.shape == (5 * ROWS, 3, 32, 32)
    assert data.x_train.dtype == torch.uint8
    np.testing.assert_array_equal(data.x_train.reshape(-1, 3072).numpy(), np.concatenate([x for x, _, _ in train]))
    np.testing.assert_array_equal(data.y_train.numpy(), np.concatenate([y for _, y, _ in train]))
    np.testing.assert_array_equal(data.x_test.reshape(-1, 3072).numpy(), test[0])
    np.testing.assert_array_equal(data.y_test.numpy(), test[1])
    assert (data.name, data.peak, data.classes) == ("cifar10", 255.0, tuple(WORDS10))


ARCHIVES10 = [
    ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
]
ARCHIVES100 = [("cifar-100-python", "cifar-100-python.tar.gz"), ("cifar-100-binary", "cifar-100-binary.tar.gz")]


@pytest.mark.parametrize("folder", ["cifar-10-batches-py", "cifar-10-batches-bin"])
def test_extracted_folders_wherever_they_are(tmp_path: Path, folder: str) -> None:
    target = extract(tmp_path / "below", folder)
    assert_ten(load_cifar10(target))
    assert_ten(load_cifar10(tmp_path / "below"))
    assert_ten(load_cifar10(tmp_path))
    assert_ten(load_cifar10(target.rename(tmp_path / "renamed")))


@pytest.mark.parametrize(("folder", "archive"), ARCHIVES10)
@pytest.mark.parametrize("below", ["", "below"])
@pytest.mark.parametrize("prefix", ["", "./"])
def test_archives_are_read_where_they_lie(tmp_path: Path, folder: str, archive: str, below: str, prefix: str) -> None:
    raw = pack(folder, prefix)
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / below / archive).write_bytes(raw)
    assert_ten(load_cifar10(tmp_path, expecting(CIFAR10, archive, raw)))
    assert [path.name for path in (tmp_path / below).iterdir()] == [archive]  # nothing was extracted


@pytest.mark.parametrize(("folder", "archive"), ARCHIVES100)
@pytest.mark.parametrize("packed", [True, False])
def test_the_hundred_and_the_twenty(tmp_path: Path, folder: str, archive: str, packed: bool) -> None:
    raw = pack(folder)
    if packed:
        (tmp_path / archive).write_bytes(raw)
    else:
        extract(tmp_path, folder)
    known = expecting(CIFAR100, archive, raw)
    pixels, fine, coarse = batch(1, 100)
    for labels, wanted, words in (("fine", fine, WORDS100), ("coarse", coarse, WORDS20)):
        data = load_cifar100(tmp_path, labels, known)
        np.testing.assert_array_equal(data.x_train.reshape(-1, 3072).numpy(), pixels)
        np.testing.assert_array_equal(data.y_train.numpy(), wanted)
        assert data.classes == tuple(words)
    with pytest.raises(UserError, match="labels='superfine' is unknown"):
        load_cifar100(tmp_path, "superfine", known)


def test_without_a_meta_file_the_names_are_the_published_ones(tmp_path: Path) -> None:
    extract(tmp_path, "cifar-10-batches-py", {"batches.meta": None})
    extract(tmp_path, "cifar-100-binary", {"fine_label_names.txt": None, "coarse_label_names.txt": None})
    assert load_cifar10(tmp_path).classes == CIFAR10.classes
    assert load_cifar100(tmp_path).classes == CIFAR100.classes
    assert load_cifar100(tmp_path, "coarse").classes == CIFAR100_SUPERCLASSES
    assert (len(set(CIFAR100.classes)), len(set(CIFAR100_SUPERCLASSES))) == (100, 20)
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)


def test_batches_that_python_3_wrote_with_text_keys(tmp_path: Path) -> None:
    x, fine, _ = batch(6, 10)
    extract(tmp_path, "cifar-10-batches-py", {"test_batch": pickle.dumps({"data": x, "labels": fine}, protocol=4)})
    np.testing.assert_array_equal(load_cifar10(tmp_path).y_test.numpy(), fine)


def test_missing_data_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_cifar10(tmp_path / "nowhere")
    for word in (
        *(word for pair in ARCHIVES10 for word in pair),
        str(tmp_path / "nowhere"),
        "fedgg data fetch cifar10",
    ):
        assert word in str(caught.value)


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    raw = pack("cifar-10-batches-py")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(raw)
    with pytest.raises(UserError) as caught:
        load_cifar10(tmp_path)
    assert hashlib.sha256(raw).hexdigest() in str(caught.value)
    assert CIFAR10.files[0].sha256 in str(caught.value)
    assert "extract it yourself" in str(caught.value)


@pytest.mark.parametrize(("folder", "archive"), ARCHIVES100)
def test_a_truncated_archive_is_a_user_error(tmp_path: Path, folder: str, archive: str) -> None:
    whole = pack(folder)
    for length in [0, 1, 10, 100, 600, *range(1000, len(whole), len(whole) // 12), len(whole) - 9, len(whole) - 1]:
        raw = whole[:length]
        (tmp_path / archive).write_bytes(raw)
        with pytest.raises(UserError, match=archive) as caught:
            load_cifar100(tmp_path, publication=expecting(CIFAR100, archive, raw))
        assert "\n" not in str(caught.value)


def test_an_archive_that_climbs_out_of_its_folder_writes_nothing(tmp_path: Path) -> None:
    raw = pack("cifar-10-batches-py", prefix="../")
    home = tmp_path / "home"
    home.mkdir()
    (home / "cifar-10-python.tar.gz").write_bytes(raw)
    with pytest.raises(UserError, match="data_batch_1: missing"):
        load_cifar10(home, expecting(CIFAR10, "cifar-10-python.tar.gz", raw))
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "cifar-10-python.tar.gz"]


X, FINE, _ = batch(3, 10)


def pickled(**entries: Any) -> bytes:
    return pickle.dumps({key.encode(): entry for key, entry in entries.items()}, protocol=2)


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
SHARED: list[object] = [0] * 10
for _depth in range(30):
    SHARED = [SHARED] * 10  # 10**30 numbers in a few hundred bytes


@pytest.mark.parametrize(
    ("name", "raw", "complaint"),
    [
        ("data_batch_3", None, "data_batch_3: missing"),
        ("data_batch_3", pickled(data=X, labels=FINE.tolist())[:-500], "damaged"),
        ("data_batch_3", b"<html>", "damaged"),
        ("data_batch_3", b"cposix\nsystem\n(S'true'\ntR.", r"refused, it asks for posix\.system"),
        ("data_batch_3", pickled(data=X), "no entry 'labels'"),
        ("data_batch_3", pickle.dumps([1, 2]), "no entry 'data'"),
        ("data_batch_3", pickled(data=X[:, :3000], labels=FINE.tolist()), r"shape \(20, 3000\), expected uint8"),
        ("data_batch_3", pickled(data=X.astype(float), labels=FINE.tolist()), "float64"),
        ("data_batch_3", pickled(data=X, labels=FINE.tolist()[:-1]), r"20 images but labels of shape \(19,\)"),
        ("data_batch_3", pickled(data=X, labels=[0.5] * ROWS), "labels of shape"),
        ("data_batch_3", pickled(data=X, labels=[[1], [1, 2]]), "no arrays"),
        ("data_batch_3", pickled(data=ENDLESS, labels=FINE.tolist()), "no arrays"),
        ("data_batch_3", pickled(data=X, labels=ENDLESS), "no arrays"),
        ("data_batch_3", pickled(data=SHARED, labels=FINE.tolist()), "no arrays"),
        ("batches.meta", pickled(label_names=[SHARED] * 10), "no list of class names"),
        ("data_batch_3", pickled(data=X, labels=[10] * ROWS), "label 10 is outside 0 to 9"),
        ("data_batch_3", pickled(data=X, labels=[-1] * ROWS), "label -1 is outside 0 to 9"),
        ("batches.meta", pickled(label_names=[b"a"]), "names 1 classes, expected 10"),
        ("batches.meta", pickled(label_names=7), "no list of class names"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, raw: bytes | None, complaint: str) -> None:
    extract(tmp_path, "cifar-10-batches-py", {name: raw})
    with pytest.raises(UserError, match=rf"/{name}: .*{complaint}" if ":" not in complaint else complaint):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("cut", [1, 3072, 3073 * ROWS])
def test_a_binary_file_cut_short_is_named(tmp_path: Path, cut: int) -> None:
    raw = files("cifar-10-batches-bin")["test_batch.bin"]
    extract(tmp_path, "cifar-10-batches-bin", {"test_batch.bin": raw[:-cut]})
    with pytest.raises(UserError, match=r"test_batch\.bin: .* not rows of 3073"):
        load_cifar10(tmp_path)


@pytest.fixture(scope="session")
def restored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real CIFAR-10 and SVHN, where the checkout has a neighbour that can restore them."""
    script = Path(__file__).parents[4] / "shared" / "data" / "restore.py"
    if not script.exists():
        pytest.skip("the real data sets are not here: no ../shared/data/restore.py beside the repository")
    out = tmp_path_factory.mktemp("restored")
    subprocess.run([sys.executable, str(script), str(out), "cifar10", "svhn"], check=True, capture_output=True)
    return out


@pytest.mark.slow
def test_the_real_data_sets(restored: Path) -> None:
    for name, train, test in (("cifar10", 50_000, 10_000), ("svhn", 73_257, 26_032)):
        data = load(name, restored)
        assert data.x_train.shape == (train, 3, 32, 32)
        assert data.x_test.shape == (test, 3, 32, 32)
        assert (int(data.x_train.min()), int(data.x_train.max()), data.peak) == (0, 255, 255.0)
        assert len(data.classes) == len(set(data.y_train.tolist())) == len(set(data.y_test.tolist())) == 10
        assert all(finding.ok for finding in check(name, restored))
        assert not any(finding.ok for finding in check(name, restored, strict=True))  # restored, hence other bytes
