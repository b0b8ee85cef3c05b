"""Readers of the data sets: CIFAR-10 and CIFAR-100 and SVHN in their publishers' formats, and scikit-learn's digits."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.core.random_choices import stream
from fedgg.data.catalog import (
    CIFAR10,
    CIFAR100,
    CIFAR100_SUPERCLASSES,
    SVHN,
    Publication,
    check_published,
    places_to_look,
)
from fedgg.data.dataset import Dataset
from fedgg.data.dataset_cache import cached
from fedgg.data.safe_pickle import load_pickle
from fedgg.errors import UserError
from fedgg.files import LARGE, open_regular, read_bytes

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class CifarForm:
    """One form in which CIFAR is published; `labels` and `names` are keyed by the granularity of the classes."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    labels: Mapping[str, str | int]  # a pickle's key, or a column of the bytes before the pixels
    names: Mapping[str, tuple[str, str | None]]  # the file with the class names, and its key where it is a pickle


CIFAR_FORMS: Mapping[str, tuple[CifarForm, ...]] = {
    "cifar10": (
        CifarForm(
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            train=tuple(f"data_batch_{i}" for i in range(1, 6)),
            test="test_batch",
            labels={"fine": "labels"},
            names={"fine": ("batches.meta", "label_names")},
        ),
        CifarForm(
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            test="test_batch.bin",
            labels={"fine": 0},
            names={"fine": ("batches.meta.txt", None)},
        ),
    ),
    "cifar100": (
        CifarForm(
            folder="cifar-100-python",
            archive="cifar-100-python.tar.gz",
            train=("train",),
            test="test",
            labels={"fine": "fine_labels", "coarse": "coarse_labels"},
            names={"fine": ("meta", "fine_label_names"), "coarse": ("meta", "coarse_label_names")},
        ),
        CifarForm(
            folder="cifar-100-binary",
            archive="cifar-100-binary.tar.gz",
            train=("train.bin",),
            test="test.bin",
            labels={"coarse": 0, "fine": 1},
            names={"fine": ("fine_label_names.txt", None), "coarse": ("coarse_label_names.txt", None)},
        ),
    ),
}


def load_cifar10(folder: str | Path, publication: Publication = CIFAR10) -> Dataset:
    """CIFAR-10, 60,000 images 3x32x32 in 10 classes; a download of 170 MB.

    From `folder` or one level below; an archive must have the publication's checksum.
    """
    return _load(Path(folder), publication, "fine")


def load_cifar100(
    folder: str | Path,
    labels: Annotated[str, "fine, or coarse: the 20 superclasses"] = "fine",
    publication: Publication = CIFAR100,
) -> Dataset:
    """CIFAR-100, 60,000 images 3x32x32 in 100 classes; a download of 169 MB.

    From `folder` or one level below, with its 100 "fine" classes or its 20 "coarse" ones.
    """
    if labels not in ("fine", "coarse"):
        raise UserError(f'cifar100: labels={labels!r} is unknown, choose "fine" (100 classes) or "coarse" (20)')
    return _load(Path(folder), publication, labels)


def _load(folder: Path, publication: Publication, labels: str) -> Dataset:
    copies = find_copies(folder, publication)
    if not copies:
        forms = CIFAR_FORMS[publication.name]
        wanted = ", ".join([*(f"{form.folder}/" for form in forms), *(form.archive for form in forms)])
        raise UserError(
            f"{publication.name}: found none of {wanted} in {folder} or one level below; "
            f"run `fedgg data fetch {publication.name}` or say with --data-folder or FEDGG_DATA which folder holds one"
        )
    copy = copies[0]

    def read() -> Dataset:
        copy.check_archive()
        return copy.read(labels)

    return cached(copy.path, copy.sources(labels), __file__, (publication, labels), read)


def find_copies(folder: Path, publication: Publication) -> list[Copy]:
    """Every copy in `folder` or one level below, extracted ones first, in the order of preference."""
    try:
        places = places_to_look(folder)
        forms = CIFAR_FORMS[publication.name]
        extracted = [
            Copy(path, form, publication)
            for form in forms
            for path in [folder, *(place / form.folder for place in places)]
            if path.is_dir() and (path != folder or _is_extracted(folder, form))
        ]
        archives = [
            Copy(place / form.archive, form, publication)
            for form in forms
            for place in places
            if (place / form.archive).is_file()
        ]
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); choose another folder or its rights") from error
    return extracted + archives


def _is_extracted(folder: Path, form: CifarForm) -> bool:
    return folder.name == form.folder or all((folder / name).is_file() for name in (*form.train, form.test))


@dataclass(frozen=True)
class Copy:
    """A data set on disk: an extracted folder or an archive."""

    path: Path
    form: CifarForm
    publication: Publication

    @property
    def archived(self) -> bool:
        return self.path.is_file()

    def sources(self, labels: str) -> list[Path]:
        """The files that `read` reads, those with class names also where they are missing."""
        if self.archived:
            return [self.path]
        return [self.path / name for name in (*self.form.train, self.form.test, self.form.names[labels][0])]

    def check_archive(self) -> None:
        """Refuse an archive that is not the publisher's; an extracted folder has no checksum of its own."""
        if self.archived:
            check_published(self.path, self.publication)

    def read(self, labels: str) -> Dataset:
        """The content, every row and label checked."""
        form = self.form
        names_file, names_key = form.names[labels]
        files = self._files([*form.train, form.test, names_file])
        classes = self.publication.classes if labels == "fine" else CIFAR100_SUPERCLASSES
        if names_file in files:
            classes = _class_names(files[names_file], names_key, len(classes), f"{self.path}/{names_file}")

        def split(names: Iterable[str]) -> tuple[torch.Tensor, torch.Tensor]:
            batches = []
            for name in names:
                where = f"{self.path}/{name}"
                if name not in files:
                    raise UserError(f"{where}: missing; extract or fetch {self.publication.name} again")
                batches.append(_batch(files.pop(name), form, labels, len(classes), where))
            images = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
            return torch.from_numpy(images), torch.from_numpy(np.concatenate([numbers for _, numbers in batches]))

        x_train, y_train = split(form.train)
        x_test, y_test = split([form.test])
        return Dataset(self.publication.name, x_train, y_train, x_test, y_test, classes, peak=255.0)

    def _files(self, names: list[str]) -> dict[str, bytes]:
        """The content of those files that are there. Archives are read in memory: nothing they name is ever written."""
        wanted = {f"{self.form.folder}/{name}": name for name in names}
        files = {}
        try:
            if not self.archived:
                there = [name for name in names if (self.path / name).is_file()]
                return {name: read_bytes(self.path / name, LARGE) for name in there}
            with (
                open_regular(self.path) as file,
                gzip.open(file) as stream,
                tarfile.open(fileobj=stream, mode="r:") as archive,
            ):
                for member in archive:
                    name = wanted.get(str(PurePosixPath(member.name)))
                    content = archive.extractfile(member) if name and member.isreg() else None
                    if name and content:
                        files[name] = content.read()
                while stream.read(1 << 20):  # to the end, where gzip compares its own checksum
                    pass
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{self.path}: damaged or unreadable ({reason}); fetch or extract it again") from error
        return files


def _batch(
    raw: bytes, form: CifarForm, labels: str, classes: int, where: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels [N, 3072] and labels [N] of one file."""
    at = form.labels[labels]
    if isinstance(at, int):
        width = len(form.labels) + PIXELS
        if not raw or len(raw) % width:
            raise UserError(f"{where}: {len(raw)} bytes are not rows of {width}; it is cut short, extract it again")
        rows = np.frombuffer(raw, np.uint8).reshape(-1, width)
        pixels, numbers = rows[:, len(form.labels) :], rows[:, at]
    else:
        batch = load_pickle(raw, where)
        pixels, numbers = (_array(_entry(batch, key, where), where) for key in ("data", at))
    if pixels.ndim != 2 or pixels.shape[1] != PIXELS or pixels.dtype != np.uint8:
        raise UserError(f"{where}: images are {pixels.dtype} of shape {pixels.shape}, expected uint8 [N, {PIXELS}]")
    if numbers.shape != pixels.shape[:1] or numbers.dtype.kind not in "iu":
        raise UserError(f"{where}: {len(pixels)} images but labels of shape {numbers.shape} and type {numbers.dtype}")
    wrong = numbers[(numbers < 0) | (numbers >= classes)]
    if len(wrong):
        raise UserError(f"{where}: label {wrong[0]} is outside 0 to {classes - 1}; the file is damaged")
    return pixels, numbers.astype(np.int64)


def _array(value: Any, where: str) -> NDArray[Any]:
    """An array, or a list of numbers: lists within lists may hold each other, and then have no end."""
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if isinstance(value, list) and all(isinstance(one, int | float | np.number) for one in value):
        return np.array(value)
    raise UserError(f"{where}: its images or labels are no arrays; extract it again")


def _entry(batch: Any, key: str, where: str) -> Any:
    """The entry of a pickled dictionary, whose keys are bytes from Python 2 and text from Python 3."""
    for spelling in (key.encode(), key):
        if isinstance(batch, dict) and spelling in batch:
            return batch[spelling]
    raise UserError(f"{where}: no entry {key!r}; this is not a file of CIFAR, extract it again")


def _class_names(raw: bytes, key: str | None, expected: int, where: str) -> tuple[str, ...]:
    words = raw.split() if key is None else _entry(load_pickle(raw, where), key, where)
    if not isinstance(words, list | tuple) or not all(isinstance(word, bytes | str) for word in words):
        raise UserError(f"{where}: holds no list of class names; extract it again or delete it")
    names = tuple(word.decode("utf-8", "replace") if isinstance(word, bytes) else word for word in words)
    if len(names) != expected:
        raise UserError(f"{where}: names {len(names)} classes, expected {expected}; extract it again or delete it")
    return names


TRAIN, TEST = (file.name for file in SVHN.files)


def load_svhn(folder: str | Path) -> Dataset:
    """SVHN, 99,289 house-number digits 3x32x32 in 10 classes; a download of 246 MB.

    From train_32x32.mat and test_32x32.mat in `folder` or one level below.
    """
    files = find_files(Path(folder))
    for name in (TRAIN, TEST):
        if name not in files:
            raise UserError(
                f"svhn: {name} is not in {folder} or one level below; "
                "run `fedgg data fetch svhn` or say with --data-folder or FEDGG_DATA which folder holds it"
            )

    def read() -> Dataset:
        x_train, y_train = read_split(files[TRAIN])
        x_test, y_test = read_split(files[TEST])
        return Dataset("svhn", x_train, y_train, x_test, y_test, SVHN.classes, peak=255.0)

    return cached(files[TRAIN], [files[TRAIN], files[TEST]], __file__, ("svhn",), read)


def find_files(folder: Path) -> dict[str, Path]:
    """Where the two files are, those of the two that are there."""
    try:
        places = places_to_look(folder)
        copies = {name: [place / name for place in places if (place / name).is_file()] for name in (TRAIN, TEST)}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); choose another folder or its rights") from error
    return {name: paths[0] for name, paths in copies.items() if paths}


def read_split(path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] and labels [N] of one file; the publisher labels the digit 0 as 10."""
    from scipy.io import loadmat

    try:
        with open_regular(path) as file:
            content = loadmat(file, variable_names=["X", "y"])
    except Exception as error:  # damaged bytes make scipy fail in any of a dozen ways
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: damaged or not a MATLAB file ({reason}); fetch svhn again") from error
    for key in ("X", "y"):
        if not isinstance(content.get(key), np.ndarray):
            raise UserError(f"{path}: no array {key!r}, it is cut short or not SVHN; fetch svhn again")
    images, labels = content["X"], content["y"].reshape(-1)
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or images.dtype != np.uint8:
        raise UserError(f"{path}: X is {images.dtype} of shape {images.shape}, expected uint8 [32, 32, 3, N]")
    if len(labels) != images.shape[3] or labels.dtype.kind not in "iuf":
        raise UserError(f"{path}: {images.shape[3]} images but {len(labels)} labels of type {labels.dtype}")
    wrong = labels[~np.isin(labels, np.arange(11))]
    if len(wrong):
        raise UserError(f"{path}: label {wrong[0]} is not a digit (1 to 9, and 10 for 0); fetch svhn again")
    pixels = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    return torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64) % 10)


TEST_IMAGES = 360


def load_digits() -> Dataset:
    """Handwritten digits, 1,797 images 1x8x8 in 10 classes; part of scikit-learn, no download.

    Always the same 1,437 training and 360 test images, whatever the seed of a run.

    The split is stratified: every class gives its share of the 360 (rounded by largest remainder), drawn from the
    stream (0, "digits split"), class after class. Within both splits the images keep scikit-learn's order.
    """
    images, labels = _digits_of_sklearn()
    counts = np.bincount(labels)
    share = counts * TEST_IMAGES / len(labels)
    quota = np.floor(share).astype(int)
    quota[np.argsort(quota - share, kind="stable")[: TEST_IMAGES - quota.sum()]] += 1

    draw = stream(0, "digits split")
    in_test = np.zeros(len(labels), bool)
    for label, chosen in enumerate(quota):
        in_test[draw.permutation(np.flatnonzero(labels == label))[:chosen]] = True

    x = torch.from_numpy(images.astype(np.float32).reshape(-1, 1, 8, 8))
    y = torch.from_numpy(labels.astype(np.int64))
    test = torch.from_numpy(in_test)
    return Dataset("digits", x[~test], y[~test], x[test], y[test], tuple("0123456789"), peak=16.0)


def _digits_of_sklearn() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`sklearn.datasets.load_digits(return_X_y=True)`, from the file it reads: sklearn takes a second to import."""
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        with suppress(OSError, EOFError, zlib.error, ValueError):
            file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
            table = np.loadtxt(file, delimiter=",", ndmin=2)
            if table.shape == (1797, 65):
                return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits as read

    images, labels = read(return_X_y=True)
    return images, labels
