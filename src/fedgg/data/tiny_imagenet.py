"""Tiny-ImageNet: 200 classes of 64 x 64 pixels as JPEG files, in the publisher's zip file or folder."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgg.data.catalog import (
    TINY_IMAGENET,
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
from fedgg.files import MEGABYTE, open_regular, read_bytes

FOLDER = "tiny-imagenet-200"
ANNOTATIONS = "val/val_annotations.txt"
_DECODERS = 8  # threads; Pillow decodes without the interpreter's lock


def load_tiny_imagenet(folder: str | Path, publication: Publication = TINY_IMAGENET) -> Dataset:
    """Tiny-ImageNet, 110,000 images 3x64x64 in 200 classes; a download of 248 MB, not tried against the publisher.

    From tiny-imagenet-200.zip or the folder in it. The test set is the publisher's validation set: the labels of the
    test images are not published. Classes are in the order of their WordNet ids, images in that of their file names.
    """
    copies = find_tiny_imagenet(Path(folder), publication)
    if not copies:
        raise missing_data(publication, f"{FOLDER}/ or {FOLDER}.zip", Path(folder))
    pillow = version("pillow") if find_spec("PIL") else None  # its JPEG library decides on the pixels
    return cached(copies[0].path, copies[0].sources(), __file__, (publication, pillow), copies[0].read)


def find_tiny_imagenet(folder: Path, publication: Publication) -> list[TinyImageNetCopy]:
    """Every copy in `folder` or one level below, extracted ones first."""
    try:
        places = places_to_look(folder)
        extracted = [path for path in (folder, *(place / FOLDER for place in places)) if (path / "train").is_dir()]
        extracted = [path for path in extracted if path != folder or (path / "wnids.txt").is_file()]
        archives = [place / f"{FOLDER}.zip" for place in places if (place / f"{FOLDER}.zip").is_file()]
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); choose another folder or its rights") from error
    return [TinyImageNetCopy(path, publication) for path in dict.fromkeys([*extracted, *archives])]


@dataclass(frozen=True)
class TinyImageNetCopy:
    """The data set on disk: the publisher's zip file, or its folder."""

    path: Path
    publication: Publication

    def is_original(self) -> bool | None:
        """Whether the archive is the publisher's; single files have no checksums on record."""
        return file_hash(self.path) == self.publication.files[0].sha256 if self.path.is_file() else None

    def sources(self) -> list[Path]:
        """The files that `read` may read: all of the folder."""
        if self.path.is_file():
            return [self.path]
        return sorted(Path(folder, name) for folder, _, names in os.walk(self.path) for name in names)

    def read(self) -> Dataset:
        """The content; every class must have the published number of images."""
        try:
            if not self.path.is_file():
                names = [str(path.relative_to(self.path).as_posix()) for path in self.path.rglob("*") if path.is_file()]
                return self._read(names, lambda name: read_bytes(self.path / name, 16 * MEGABYTE))
            check_published(self.path, self.publication)
            with open_regular(self.path) as file, zipfile.ZipFile(file) as archive:
                top = f"{FOLDER}/"
                names = [name.removeprefix(top) for name in archive.namelist() if name.startswith(top)]
                return self._read(names, lambda name: archive.read(top + name))
        except (OSError, zlib.error, zipfile.BadZipFile, EOFError, KeyError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{self.path}: damaged or unreadable ({reason}); extract or fetch it again") from error

    def _read(self, names: Iterable[str], content: Callable[[str], bytes]) -> Dataset:
        files, published = sorted(names), self.publication
        train = {name: name.split("/")[1] for name in files if name.startswith("train/") and _is_image(name)}
        ids = sorted(set(train.values()))
        if len(ids) != (expected := len(published.classes)):
            raise UserError(f"{self.path}: {len(ids)} classes in train, published are {expected}; extract it again")
        if ANNOTATIONS in files:
            lines = [line.split("\t") for line in content(ANNOTATIONS).decode("utf-8", "replace").splitlines()]
            test = {f"val/images/{line[0]}": line[1] for line in lines if len(line) > 1}
        else:  # as people sort it, one folder for each class
            test = {name: name.split("/")[1] for name in files if name.startswith("val/") and _is_image(name)}
        numbers = {class_id: number for number, class_id in enumerate(ids)}
        if strange := [class_id for class_id in test.values() if class_id not in numbers]:
            raise UserError(f"{self.path}: {strange[0]!r} in val is none of the classes in train; extract it again")
        y_train, y_test = (torch.tensor([numbers[one] for one in part.values()]) for part in (train, test))
        gaps = count_gaps("training", y_train, published.train_counts)
        if gaps := gaps + count_gaps("test", y_test, published.test_counts):
            raise UserError(f"{self.path}: {gaps[0]}; extract or fetch it again")
        words = content("words.txt").decode("utf-8", "replace") if "words.txt" in files else ""
        x_train, x_test = (self._images(part, content) for part in (train, test))
        return Dataset(published.name, x_train, y_train, x_test, y_test, _class_names(ids, words), peak=255.0)

    def _images(self, names: Mapping[str, str], content: Callable[[str], bytes]) -> Tensor:
        """In the order of their names, grey ones as three equal channels."""
        shape = self.publication.shape
        pixels = np.empty((len(names), *shape), np.uint8)

        def place(number: int, name: str, raw: bytes) -> None:
            pixels[number] = _decoded(raw, shape, f"{self.path}/{name}")

        with ThreadPoolExecutor(_DECODERS) as pool:
            numbered = list(enumerate(names))
            for start in range(0, len(names), 4096):  # so that few packed images wait in memory
                part = [(number, name, content(name)) for number, name in numbered[start : start + 4096]]
                list(pool.map(lambda one: place(*one), part))
        return torch.from_numpy(pixels)


def _is_image(name: str) -> bool:
    return name.lower().endswith((".jpeg", ".jpg", ".png"))


def _decoded(raw: bytes, shape: tuple[int, ...], where: str) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(raw), formats=("JPEG", "PNG")) as image:
            if image.size != (shape[2], shape[1]):
                size = "x".join(map(str, image.size))
                raise UserError(f"{where}: {size} pixels instead of {shape[2]}x{shape[1]}; extract it again")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{where}: not an image ({' '.join(str(error).split())}); extract it again") from error


def _class_names(ids: list[str], words: str) -> tuple[str, ...]:
    """The first of the words for each class; the WordNet id where there is none or two classes have the same."""
    known = dict(line.split("\t", 1) for line in words.splitlines() if "\t" in line)
    first = [known.get(one, one).partition(",")[0].strip() for one in ids]
    return tuple(word if word and first.count(word) == 1 else one for one, word in zip(ids, first, strict=True))
