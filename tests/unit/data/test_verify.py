"""The verdict on data sets on disk: whole, cut, rewritten, broken."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fedgg.data.catalog import CIFAR100, SVHN, Publication
from fedgg.data.download import check
from fedgg.errors import UserError

SPLITS = {"train_32x32.mat": 20, "test_32x32.mat": 10}


def write_svhn(folder: Path, name: str, count: int) -> Path:
    labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
    savemat(folder / name, {"X": np.zeros((32, 32, 3, count), np.uint8), "y": labels}, do_compression=True)
    return folder / name


def small_svhn(folder: Path, genuine: bool) -> dict[str, Publication]:
    """A publication of 20 and 10 images, and its files; with their checksums where they are genuine."""
    paths = [write_svhn(folder, name, count) for name, count in SPLITS.items()]
    files = tuple(
        replace(file, sha256=hashlib.sha256(path.read_bytes()).hexdigest() if genuine else file.sha256)
        for file, path in zip(SVHN.files, paths, strict=True)
    )
    return {"svhn": replace(SVHN, files=files, train_counts=(2,) * 10, test_counts=(1,) * 10)}


def binary_rows(count: int) -> bytes:
    labels = np.arange(count, dtype=np.uint8)[:, None] % 100
    return np.column_stack([labels % 20, labels, np.zeros((count, 3072), np.uint8)]).astype(np.uint8).tobytes()


def small_cifar(sha256: str = "") -> dict[str, Publication]:
    """CIFAR-100 with one image a class and split; the checksum is that of its binary archive."""
    archive = replace(CIFAR100.alternatives[0], sha256=sha256)
    return {"cifar100": replace(CIFAR100, alternatives=(archive,), train_counts=(1,) * 100, test_counts=(1,) * 100)}


def write_cifar(folder: Path, packed: bool, train: int = 100) -> str:
    """The binary version, as a folder or an archive; returns the archive's checksum."""
    files = {"train.bin": binary_rows(train), "test.bin": binary_rows(100)}
    if not packed:
        (folder / "cifar-100-binary").mkdir()
        for name, raw in files.items():
            (folder / "cifar-100-binary" / name).write_bytes(raw)
        return ""
    path = folder / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, raw in files.items():
            entry = tarfile.TarInfo(f"cifar-100-binary/{name}")
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("genuine", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_svhn_whole(tmp_path: Path, genuine: bool, strict: bool) -> None:
    findings = check("svhn", tmp_path, strict, small_svhn(tmp_path, genuine))
    assert [Path(finding.file).name for finding in findings] == list(SPLITS)
    for finding in findings:
        assert finding.ok is (genuine or not strict)
        assert ("the publisher's own bytes" if genuine else "not the publisher's") in finding.what
        assert "images 3x32x32" in finding.what


def test_svhn_cut_broken_missing(tmp_path: Path) -> None:
    known = small_svhn(tmp_path, genuine=True)
    write_svhn(tmp_path, "train_32x32.mat", 19)
    broken = tmp_path / "test_32x32.mat"
    broken.write_bytes(broken.read_bytes()[:200])
    cut, damaged = check("svhn", tmp_path, publications=known)
    assert not cut.ok
    assert "19 training images, published are 20" in cut.what
    assert not damaged.ok
    assert "damaged" in damaged.what or "cut short" in damaged.what
    broken.unlink()
    findings = check("svhn", tmp_path, publications=known)
    assert [(Path(finding.file).name, finding.ok) for finding in findings] == [
        ("train_32x32.mat", False),
        ("test_32x32.mat", False),
    ]
    assert "missing" in findings[1].what


def test_wrong_class_counts_are_named(tmp_path: Path) -> None:
    known = small_svhn(tmp_path, genuine=True)["svhn"]
    shifted = {"svhn": replace(known, train_counts=(1, 3, *known.train_counts[2:]))}
    assert "class 0 has 2 training images, published are 1" in check("svhn", tmp_path, publications=shifted)[0].what


def test_cifar_archive(tmp_path: Path) -> None:
    sha256 = write_cifar(tmp_path, packed=True)
    (right,) = check("cifar100", tmp_path, strict=True, publications=small_cifar(sha256))
    assert right.ok
    assert "100 training and 100 test images 3x32x32, 100 classes; the publisher's own bytes" in right.what
    (wrong,) = check("cifar100", tmp_path, publications=small_cifar("0" * 32))
    assert not wrong.ok
    assert sha256 in wrong.what


def test_cifar_folder(tmp_path: Path) -> None:
    write_cifar(tmp_path, packed=False)
    (finding,) = check("cifar100", tmp_path, publications=small_cifar())
    assert finding.ok
    assert "content complete, but" in finding.what
    assert not check("cifar100", tmp_path, strict=True, publications=small_cifar())[0].ok


def test_every_copy_is_looked_at(tmp_path: Path) -> None:
    sha256 = write_cifar(tmp_path, packed=True)
    write_cifar(tmp_path, packed=False, train=99)
    folder, archive = check("cifar100", tmp_path, publications=small_cifar(sha256))
    assert (folder.ok, archive.ok) == (False, True)
    assert "99 training images, published are 100" in folder.what


def test_nothing_there(tmp_path: Path) -> None:
    for name in ("cifar10", "svhn"):
        (finding,) = check(name, tmp_path)
        assert not finding.ok
        assert f"fedgg data fetch {name}" in finding.what


def test_sources_without_a_publisher(tmp_path: Path) -> None:
    (digits,) = check("digits", tmp_path)
    assert digits.ok
    assert "1,437 training and 360 test images" in digits.what
    (absent,) = check(f"npz:{tmp_path}/absent.npz", tmp_path)
    assert not absent.ok
    with pytest.raises(UserError, match="did you mean 'svhn'"):
        check("svnh", tmp_path)
