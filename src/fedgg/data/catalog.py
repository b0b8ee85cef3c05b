"""The published image data sets: addresses, checksums, sizes, contents, and where their files lie on this machine.

The University of Toronto redirects the addresses below to another host; the files, and so the checksums, are the same.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedgg.errors import UserError


@dataclass(frozen=True)
class PublishedFile:
    """One file as its publisher offers it."""

    name: str
    url: str
    sha256: str
    size: int  # bytes
    members: Mapping[str, str] = field(default_factory=dict)  # MD5 of the files within an archive, where known


@dataclass(frozen=True)
class Publication:
    """One data set: where it comes from and what a complete copy holds."""

    name: str
    homepage: str
    files: tuple[PublishedFile, ...]  # what is fetched
    alternatives: tuple[PublishedFile, ...]  # read where somebody has them, never fetched
    classes: tuple[str, ...]
    train_counts: tuple[int, ...]  # images of each class
    test_counts: tuple[int, ...]

    def file(self, name: str) -> PublishedFile:
        """The facts about one of this publication's files."""
        return next(file for file in (*self.files, *self.alternatives) if file.name == name)


@dataclass(frozen=True)
class CifarForm:
    """One form in which CIFAR is published; `labels` and `names` are keyed by the granularity of the classes."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    labels: Mapping[str, str | int]  # a pickle's key, or a column of the bytes before the pixels
    names: Mapping[str, tuple[str, str | None]]  # the file with the class names, and its key where it is a pickle


_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CIFAR_FILES = "https://www.cs.toronto.edu/~kriz/"
_SVHN_FILES = "http://ufldl.stanford.edu/housenumbers/"

_CIFAR100_FINE = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_CIFAR100_COARSE = (
    "aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices "
    "household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes "
    "large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees "
    "vehicles_1 vehicles_2"
)
CIFAR100_SUPERCLASSES = tuple(_CIFAR100_COARSE.split())

CIFAR10 = Publication(
    name="cifar10",
    homepage=_CIFAR_PAGE,
    files=(
        PublishedFile(
            name="cifar-10-python.tar.gz",
            url=_CIFAR_FILES + "cifar-10-python.tar.gz",
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            size=170_498_071,
            members={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
            },
        ),
    ),
    alternatives=(
        PublishedFile(
            name="cifar-10-binary.tar.gz",
            url=_CIFAR_FILES + "cifar-10-binary.tar.gz",
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            size=170_052_171,
        ),
    ),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    train_counts=(5_000,) * 10,
    test_counts=(1_000,) * 10,
)

CIFAR100 = Publication(
    name="cifar100",
    homepage=_CIFAR_PAGE,
    files=(
        PublishedFile(
            name="cifar-100-python.tar.gz",
            url=_CIFAR_FILES + "cifar-100-python.tar.gz",
            sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            size=169_001_437,
            members={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        ),
    ),
    alternatives=(
        PublishedFile(
            name="cifar-100-binary.tar.gz",
            url=_CIFAR_FILES + "cifar-100-binary.tar.gz",
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            size=168_513_733,
        ),
    ),
    classes=tuple(_CIFAR100_FINE.split()),
    train_counts=(500,) * 100,
    test_counts=(100,) * 100,
)

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

SVHN = Publication(
    name="svhn",
    homepage=_SVHN_FILES,
    files=(
        PublishedFile(
            name="train_32x32.mat",
            url=_SVHN_FILES + "train_32x32.mat",
            sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            size=182_040_794,
        ),
        PublishedFile(
            name="test_32x32.mat",
            url=_SVHN_FILES + "test_32x32.mat",
            sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            size=64_275_384,
        ),
    ),
    alternatives=(),
    classes=tuple("0123456789"),
    train_counts=(4_948, 13_861, 10_585, 8_497, 7_458, 6_882, 5_727, 5_595, 5_045, 4_659),
    test_counts=(1_744, 5_099, 4_149, 2_882, 2_523, 2_384, 1_977, 2_019, 1_660, 1_595),
)

PUBLICATIONS: Mapping[str, Publication] = {published.name: published for published in (CIFAR10, CIFAR100, SVHN)}


def find_publication(name: str, publications: Mapping[str, Publication] = PUBLICATIONS) -> Publication:
    """The publication called `name`."""
    if name not in publications:
        near = difflib.get_close_matches(name.lower(), publications, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{name!r} is not published as files: {hint}choose from {', '.join(publications)}")
    return publications[name]


VARIABLE = "FEDGG_DATA"


def data_folder(flag: str | Path | None = None) -> Path:
    """The folder for data sets: the argument, else the variable FEDGG_DATA, else the user's cache folder."""
    chosen = flag or os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("fedgg"))


def places_to_look(folder: Path) -> list[Path]:
    """The folder and the folders within it, without those that are closed to us (a shared /tmp is full of them)."""
    if not folder.is_dir():
        return []
    return [folder, *sorted(place for place in folder.iterdir() if os.access(place, os.X_OK) and place.is_dir())]
