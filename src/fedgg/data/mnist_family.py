"""MNIST, Fashion-MNIST and EMNIST: images of 28 x 28 grey pixels in IDX files, packed or not, and Keras' mnist.npz."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.data.catalog import (
    EMNIST,
    FASHION_MNIST,
    MNIST,
    Publication,
    check_published,
    count_gaps,
    file_hash,
    missing_data,
    places_to_look,
)
from fedgg.data.dataset import Dataset
from fedgg.data.dataset_cache import cached
from fedgg.errors import UserError
from fedgg.files import open_regular

KERAS = "mnist.npz"
_DAMAGED = (OSError, EOFError, zlib.error, zipfile.BadZipFile, KeyError, ValueError, NotImplementedError)


def load_mnist(folder: str | Path, publication: Publication = MNIST) -> Dataset:
    """MNIST, 70,000 handwritten digits 1x28x28 in 10 classes; a download of 12 MB, not tried against the publisher.

    From IDX files, packed or not, in `folder`, below it as torchvision and Keras leave them, or from Keras' mnist.npz.
    """
    return _load(folder, publication)


def load_fashion_mnist(folder: str | Path, publication: Publication = FASHION_MNIST) -> Dataset:
    """Fashion-MNIST, 70,000 articles 1x28x28 in 10 classes; a download of 31 MB, not tried against the publisher."""
    return _load(folder, publication)


def load_emnist_balanced(folder: str | Path, publication: Publication = EMNIST["emnist-balanced"]) -> Dataset:
    """EMNIST Balanced, 131,600 characters 1x28x28 in 47 classes; a download of 562 MB, not tried against the publisher.

    Letters whose capital looks the same share a class. In NIST's files images are transposed; here they are upright.
    """
    return _load(folder, publication)


def load_emnist_byclass(folder: str | Path, publication: Publication = EMNIST["emnist-byclass"]) -> Dataset:
    """EMNIST ByClass, 814,255 characters 1x28x28 in 62 classes; a download of 562 MB, not tried against the publisher.

    Digits, capitals and small letters have a class each.
    """
    return _load(folder, publication)


def load_emnist_bymerge(folder: str | Path, publication: Publication = EMNIST["emnist-bymerge"]) -> Dataset:
    """EMNIST ByMerge, 814,255 characters 1x28x28 in 47 classes; a download of 562 MB, not tried against the publisher.

    Letters whose capital looks the same share a class.
    """
    return _load(folder, publication)


def load_emnist_digits(folder: str | Path, publication: Publication = EMNIST["emnist-digits"]) -> Dataset:
    """EMNIST Digits, 280,000 digits 1x28x28 in 10 classes; a download of 562 MB, not tried against the publisher."""
    return _load(folder, publication)


def load_emnist_letters(folder: str | Path, publication: Publication = EMNIST["emnist-letters"]) -> Dataset:
    """EMNIST Letters, 145,600 letters 1x28x28 in 26 classes; a download of 562 MB, not tried against the publisher.

    Capitals and small letters share a class. NIST numbers the classes from 1, here they are numbered from 0.
    """
    return _load(folder, publication)


def _load(folder: str | Path, publication: Publication) -> Dataset:
    copies = find_idx_copies(Path(folder), publication)
    if not copies:
        raise missing_data(publication, f"{_stems(publication)[0]} (or .gz)", Path(folder))
    return cached(copies[0].path, copies[0].sources(), __file__, (publication,), copies[0].read)


def find_idx_copies(folder: Path, publication: Publication) -> list[IdxCopy]:
    """Every copy in `folder` or below, unpacked files first.

    MNIST and Fashion-MNIST have the same file names, so that folders below count where they have the data set's name.
    """
    top = publication.folder.partition("/")[0]
    try:
        places = places_to_look(folder)
        named = [place / name for place in places for name in dict.fromkeys((top, top.lower(), publication.name))]
        within = [place / inner for place in (*named, folder) for inner in ("raw", "gzip", "")]
        within += places if publication.name in EMNIST else []
        packed = [place / file.name for file in publication.files for place in within if file.name.endswith(".zip")]
        packed += [place / KERAS for file in publication.alternatives for place in places if file.name == KERAS]
        folders = [place for place in within if _path(place, _stems(publication)[0]) is not None]
        paths = dict.fromkeys([*folders, *(path for path in packed if path.is_file())])
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); choose another folder or its rights") from error
    return [IdxCopy(path, publication) for path in paths]


def _stems(publication: Publication) -> tuple[str, str, str, str]:
    """The names of training images and labels and of test images and labels, unpacked."""
    train, test = "train", "t10k"
    if publication.name in EMNIST:
        train, test = f"{publication.name}-train", f"{publication.name}-test"
    images, labels = "images-idx3-ubyte", "labels-idx1-ubyte"
    return f"{train}-{images}", f"{train}-{labels}", f"{test}-{images}", f"{test}-{labels}"


def _path(folder: Path, stem: str) -> Path | None:
    """The file in one of its spellings; some programs unpack it with a dot."""
    paths = (folder / name for name in (stem, stem.replace("-idx", ".idx"), f"{stem}.gz"))
    return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True)
class IdxCopy:
    """A data set on disk: a folder of IDX files, NIST's archive of them, or Keras' arrays."""

    path: Path
    publication: Publication

    def is_original(self) -> bool | None:
        """Whether the bytes are the publisher's; None where the files have no checksum on record."""
        files = [self.path] if self.path.is_file() else [_path(self.path, stem) for stem in _stems(self.publication)]
        published = {file.name: file.sha256 for file in (*self.publication.files, *self.publication.alternatives)}
        if any(file is None or file.name not in published for file in files):
            return None
        return all(file is not None and file_hash(file) == published[file.name] for file in files)

    def sources(self) -> list[Path]:
        """The files that `read` reads."""
        if self.path.is_file():
            return [self.path]
        return [_path(self.path, stem) or self.path / stem for stem in _stems(self.publication)]

    def read(self) -> Dataset:
        """The content; the number of images of each class must be the published one."""
        published, side = self.publication, self.publication.shape[1:]
        train, test = sum(published.train_counts), sum(published.test_counts)
        x_train, y_train, x_test, y_test = self._arrays([(train, *side), (train,), (test, *side), (test,)])
        if published.name in EMNIST:
            x_train, x_test = x_train.transpose(0, 2, 1), x_test.transpose(0, 2, 1)
        first = 1 if published.name == "emnist-letters" else 0
        labels = [torch.from_numpy(numbers.astype(np.int64) - first) for numbers in (y_train, y_test)]
        gaps = count_gaps("training", labels[0], published.train_counts)
        if gaps := gaps + count_gaps("test", labels[1], published.test_counts):
            raise UserError(f"{self.path}: {gaps[0]}; is this {published.name}? `fedgg data fetch {published.name}`")
        return Dataset(
            published.name, _images(x_train), labels[0], _images(x_test), labels[1], published.classes, peak=255.0
        )

    def _arrays(self, shapes: list[tuple[int, ...]]) -> list[NDArray[np.uint8]]:
        if self.path.name == KERAS:
            return self._keras_arrays(shapes)
        if self.path.is_file():
            check_published(self.path, self.publication)
        arrays = []
        for stem, shape in zip(_stems(self.publication), shapes, strict=True):
            where = f"{self.path}/{stem}"
            try:
                with self._opened(stem) as file:
                    arrays.append(_idx_array(file, shape, where))
            except _DAMAGED as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                again = f"unpack it again or `fedgg data fetch {self.publication.name}`"
                raise UserError(f"{where}: damaged or unreadable ({reason}); {again}") from error
        return arrays

    @contextmanager
    def _opened(self, stem: str) -> Iterator[IO[bytes] | gzip.GzipFile]:
        """The unpacked content of one file. Archives are read in memory: nothing they name is ever written."""
        if self.path.is_file():
            with (
                open_regular(self.path) as file,
                zipfile.ZipFile(file) as archive,
                archive.open(f"gzip/{stem}.gz") as packed,
                gzip.open(packed) as content,
            ):
                yield content
            return
        path = _path(self.path, stem)
        if path is None:
            raise FileNotFoundError("missing")
        if path.suffix == ".gz" and path.name in {file.name for file in self.publication.files}:
            check_published(path, self.publication)
        with open_regular(path) as file:
            if path.suffix != ".gz":
                yield file
                return
            with gzip.open(file) as content:
                yield content

    def _keras_arrays(self, shapes: list[tuple[int, ...]]) -> list[NDArray[np.uint8]]:
        check_published(self.path, self.publication)
        with open_regular(self.path) as file, np.load(file, allow_pickle=False) as content:
            arrays: list[NDArray[np.uint8]] = [content[key] for key in ("x_train", "y_train", "x_test", "y_test")]
        if [array.shape for array in arrays] != shapes or any(array.dtype != np.uint8 for array in arrays):
            raise UserError(f"{self.path}: its arrays are not MNIST's images and labels; `fedgg data fetch mnist`")
        return arrays


def _idx_array(file: IO[bytes] | gzip.GzipFile, shape: tuple[int, ...], where: str) -> NDArray[np.uint8]:
    """The bytes of one IDX file: two zeros, 8 for bytes, the number of sides, the sides, the values."""
    head = file.read(4 + 4 * len(shape))
    if len(head) < 4 + 4 * len(shape) or head[:4] != bytes((0, 0, 8, len(shape))):
        raise UserError(f"{where}: not an IDX file of bytes with {len(shape)} sides; fetch it again")
    sides = tuple(np.frombuffer(head[4:], ">u4").tolist())
    if sides != shape:
        shown = ["x".join(f"{side:,}" for side in one) for one in (sides, shape)]
        raise UserError(f"{where}: holds {shown[0]} bytes, published are {shown[1]}; fetch it again")
    size = math.prod(shape)
    raw = file.read(size + 1)  # to the end, where gzip compares its own checksum
    if len(raw) != size:
        amount = "more" if len(raw) > size else "less"
        raise UserError(f"{where}: holds {amount} than the {size:,} bytes that it announces; fetch it again")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _images(pixels: NDArray[np.uint8]) -> Tensor:
    """In a copy of its own, since the bytes that were read cannot be written to."""
    return torch.from_numpy(np.array(pixels[:, None], order="C"))
