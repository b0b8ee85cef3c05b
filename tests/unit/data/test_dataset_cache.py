"""The cache of decoded data sets: the same data with and without it, and whatever is wrong with it, no harm."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedgg import files
from fedgg.data import dataset_cache, readers
from fedgg.data.dataset import Dataset
from fedgg.data.dataset_cache import DIGEST, MAGIC, TENSORS
from fedgg.data.readers import load_svhn


def write_svhn(folder: Path, seed: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    for name, count in ((readers.TRAIN, 40), (readers.TEST, 20)):
        images = random.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
        labels = random.integers(1, 11, (count, 1), dtype=np.uint8)
        savemat(folder / name, {"X": images, "y": labels})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_svhn(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cache files; sources that were written just now are cached too."""
    monkeypatch.setenv("FEDGG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset_cache, "SETTLED", -(10**18))
    return tmp_path / "cache"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were decoded."""
    paths: list[Path] = []
    read = readers.read_split

    def counting(path: Path) -> Any:
        paths.append(path)
        return read(path)

    monkeypatch.setattr(readers, "read_split", counting)
    return paths


def without_cache(source: Path) -> Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGG_CACHE", "OFF")
        return load_svhn(source)


def assert_same(data: Dataset, expected: Dataset) -> None:
    for name in TENSORS:
        one, other = getattr(data, name), getattr(expected, name)
        assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other)), name
    for name in ("name", "classes", "peak", "client_names", "targets", "shape", "fingerprint"):
        assert getattr(data, name) == getattr(expected, name), name


def only_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def test_the_second_load_decodes_nothing(source: Path, cache: Path, decoded: list[Path]) -> None:
    expected = without_cache(source)
    assert not cache.exists()
    assert_same(load_svhn(source), expected)
    assert len(decoded) == 4
    data = load_svhn(source)
    assert len(decoded) == 4
    assert_same(data, expected)
    computed = Dataset(data.name, data.x_train, data.y_train, data.x_test, data.y_test, data.classes, data.peak)
    assert data.fingerprint == computed.fingerprint


def replaced(source: Path) -> None:
    write_svhn(source, seed=1)


def replaced_with_the_same_times(source: Path) -> None:
    """As `cp -p` and archives do; the size is the same too."""
    path = source / readers.TRAIN
    status = path.stat()
    write_svhn(source.parent / "other", seed=1)
    content = (source.parent / "other" / readers.TRAIN).read_bytes()
    assert len(content) == status.st_size
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def renamed_over(source: Path) -> None:
    write_svhn(source.parent / "other", seed=1)
    for name in (readers.TRAIN, readers.TEST):
        (source.parent / "other" / name).replace(source / name)


@pytest.mark.parametrize("change", [replaced, replaced_with_the_same_times, renamed_over])
def test_changed_sources_are_read_anew(source: Path, cache: Path, change: Callable[[Path], None]) -> None:
    before = load_svhn(source)
    change(source)
    data = load_svhn(source)
    assert_same(data, without_cache(source))
    assert data.fingerprint != before.fingerprint
    assert only_file(cache)  # the former file is replaced
    assert_same(load_svhn(source), data)


def test_sources_that_change_while_they_are_read_are_not_cached(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = readers.read_split

    def changing(path: Path) -> Any:
        content = read(path)
        os.utime(path, ns=(1, 1))
        return content

    monkeypatch.setattr(readers, "read_split", changing)
    load_svhn(source)
    assert not cache.exists()


def test_sources_changed_just_now_are_not_cached(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_cache, "SETTLED", 3600 * 10**9)
    load_svhn(source)
    assert not cache.exists()


def test_another_version_of_the_reader_decodes_anew(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[Path]
) -> None:
    load_svhn(source)
    changed = tmp_path / "readers.py"
    changed.write_bytes(Path(readers.__file__).read_bytes() + b"\n# another version\n")
    monkeypatch.setattr(readers, "__file__", str(changed))
    load_svhn(source)
    assert len(decoded) == 4


def test_damage_anywhere_is_found_and_repaired(source: Path, cache: Path, decoded: list[Path]) -> None:
    expected = load_svhn(source)
    path = only_file(cache)
    intact = path.read_bytes()
    header = len(MAGIC) + DIGEST + 8
    places = [0, len(MAGIC), header - 8, header - 1, header + 3, intact.index(b"fingerprint") + 15, len(intact) // 2]
    damaged = [intact[:place] + bytes([intact[place] ^ 1]) + intact[place + 1 :] for place in [*places, -65]]
    damaged += [intact[:end] for end in (0, 5, header - 3, header + 10, len(intact) // 2, len(intact) - 1)]
    damaged += [intact + b"\0", bytes(len(intact)), b"{}"]
    for number, content in enumerate(damaged):
        path.write_bytes(content)
        decoded.clear()
        assert_same(load_svhn(source), expected)
        assert len(decoded) == 2, number
        assert path.read_bytes() == intact, number


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (b'"torch.uint8", [90, ', b'"torch.uint8", [40, '),
        (b'"torch.uint8", [-1, ', b'"torch.uint8", [40, '),
        (b'"torch.uint8", [1.5, ', b'"torch.uint8", [40, '),
        (b'"torch.bool", [40, ', b'"torch.uint8", [40, '),
        (b'"z_train"', b'"x_train"'),
        (b'"classes": 7, "other"', b'"classes"'),
        (b'"targets": "labels"', b'"targets": "classes"'),
    ],
)
def test_a_forged_header_with_a_right_checksum_does_no_harm(
    source: Path, cache: Path, wrong: bytes, right: bytes
) -> None:
    expected = load_svhn(source)
    path = only_file(cache)
    intact = path.read_bytes()
    start = len(MAGIC) + DIGEST + 8
    length = int.from_bytes(intact[start - 8 : start], "little")
    text = intact[start : start + length]
    assert right in text
    text = text.replace(right, wrong, 1).rstrip().ljust(length)
    rest = len(text).to_bytes(8, "little") + text + intact[start + length :]
    path.write_bytes(MAGIC + hashlib.sha256(rest).digest() + rest)
    assert_same(load_svhn(source), expected)
    assert path.read_bytes() == intact


@pytest.mark.parametrize("kind", ["folder", "fifo", "link to nothing", "cache is a file"])
def test_other_things_in_its_place(source: Path, cache: Path, kind: str) -> None:
    expected = load_svhn(source)
    path = only_file(cache)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to(cache / "nothing")
    else:
        cache.rmdir()
        cache.write_text("a file")
    for _ in range(2):
        assert_same(load_svhn(source), expected)


def test_a_cache_that_cannot_be_written(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only folder by its rights, where they apply to this user; a full disk by the error of a write."""
    cache.mkdir()
    cache.chmod(0o500)
    expected = without_cache(source)
    try:
        assert_same(load_svhn(source), expected)
        if os.geteuid() != 0:
            assert not list(cache.iterdir())
    finally:
        cache.chmod(0o700)
    for path in cache.iterdir():
        path.unlink()

    def full(path: Path, mode: int) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_new", full)
        assert_same(load_svhn(source), expected)
    with monkeypatch.context() as patch:
        patch.setattr(dataset_cache, "RESERVE", 1 << 60)
        assert_same(load_svhn(source), expected)
    assert not list(cache.iterdir())


def test_a_read_only_cache_is_read(source: Path, cache: Path, decoded: list[Path]) -> None:
    expected = load_svhn(source)
    only_file(cache).chmod(0o400)
    cache.chmod(0o500)
    try:
        assert_same(load_svhn(source), expected)
    finally:
        cache.chmod(0o700)
    assert len(decoded) == 2


def test_the_file_of_another_user_is_not_used(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[Path]
) -> None:
    load_svhn(source)
    if os.geteuid() == 0:
        os.chown(only_file(cache), 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    load_svhn(source)
    assert len(decoded) == 4


def test_a_write_into_a_tensor_does_not_reach_the_file(source: Path, cache: Path, decoded: list[Path]) -> None:
    expected = load_svhn(source)
    content = only_file(cache).read_bytes()
    data = load_svhn(source)
    for tensor in (data.x_train, data.y_train, data.x_test, data.y_test):
        tensor.zero_()
    assert only_file(cache).read_bytes() == content
    assert_same(load_svhn(source), expected)
    assert len(decoded) == 2


def test_a_file_that_is_deleted_while_it_is_mapped(source: Path, cache: Path) -> None:
    expected = load_svhn(source)
    data = load_svhn(source)
    shutil.rmtree(cache)
    assert_same(data, expected)


WRITER = """
import sys
from pathlib import Path
from fedgg.data import dataset_cache
from fedgg.data.readers import load_svhn
dataset_cache.SETTLED = -(10**18)
for _ in range(20):
    for path in Path(sys.argv[2]).glob("*.cache"):
        path.unlink(missing_ok=True)
    print(load_svhn(Path(sys.argv[1])).fingerprint)
"""


def test_two_processes_at_the_same_time(source: Path, cache: Path) -> None:
    expected = without_cache(source)
    command = [sys.executable, "-c", WRITER, str(source), str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].split() for process in processes]
    assert printed == [[expected.fingerprint] * 20] * 2
    assert_same(load_svhn(source), expected)
    assert only_file(cache).suffix == ".cache"  # nothing half written is left


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDGG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert dataset_cache.cache_folder() == tmp_path / "fedgg" / "decoded"
    assert str(tmp_path) in dataset_cache.describe_cache()
    monkeypatch.setenv("FEDGG_CACHE", "~/elsewhere")
    assert dataset_cache.cache_folder() == Path("~/elsewhere").expanduser()
    monkeypatch.setenv("FEDGG_CACHE", "off")
    assert dataset_cache.cache_folder() is None
    assert "off" in dataset_cache.describe_cache()
