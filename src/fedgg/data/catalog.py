"""The published data sets: addresses, checksums, sizes, contents, and where their files lie on this machine.

The University of Toronto redirects the addresses below to another host; the files, and so the checksums, are the same.
The SHA-256 of MNIST, Fashion-MNIST and EMNIST are those that TensorFlow Datasets records, that of mnist.npz is Keras'.
Stanford publishes no checksum of Tiny-ImageNet: the one below is what several public projects recorded.
"""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedgg.data import registered_name
from fedgg.errors import UserError
from fedgg.files import open_regular
from fedgg.older_python import file_digest
from fedgg.registry import suggestion

if TYPE_CHECKING:
    from torch import Tensor

    from fedgg.data.dataset import Dataset


@dataclass(frozen=True)
class PublishedFile:
    """One file as its publisher offers it."""

    name: str
    url: str
    sha256: str
    size: int  # bytes
    members: Mapping[str, str] = field(default_factory=dict)  # MD5 of the files within an archive, where known


class PublishedCopy(Protocol):
    """A published data set on this machine."""

    @property
    def path(self) -> Path: ...
    def is_original(self) -> bool | None:
        """Whether the bytes are the publisher's; None where the files have no checksum on record."""

    def read(self) -> Dataset:
        """The content, checked against the published numbers."""


@dataclass(frozen=True)
class Publication:
    """One data set: where it comes from and what a complete copy holds."""

    name: str
    homepage: str
    files: tuple[PublishedFile, ...]  # what is fetched
    alternatives: tuple[PublishedFile, ...]  # read where somebody has them, never fetched
    classes: tuple[str, ...]
    train_counts: tuple[int, ...]  # examples of each class; one number: of all, where the former are not on record
    test_counts: tuple[int, ...]
    shape: tuple[int, ...] = (3, 32, 32)  # of one example
    folder: str = ""  # below the folder of data sets, for files whose names others use too; as torchvision names it

    def file(self, name: str) -> PublishedFile:
        """The facts about one of this publication's files."""
        return next(file for file in (*self.files, *self.alternatives) if file.name == name)


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

_IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx_files(address: str, sizes_and_checksums: tuple[tuple[int, str], ...]) -> tuple[PublishedFile, ...]:
    return tuple(
        PublishedFile(name, address + name, sha256, size)
        for name, (size, sha256) in zip(_IDX, sizes_and_checksums, strict=True)
    )


# The author's page no longer offers the files: they come from the mirror of the PyTorch project.
MNIST = Publication(
    name="mnist",
    homepage="http://yann.lecun.com/exdb/mnist/",
    files=_idx_files(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    alternatives=(
        PublishedFile(
            name="mnist.npz",
            url="https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
            sha256="731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
            size=11_490_434,
        ),
    ),
    classes=tuple(string.digits),
    train_counts=(5_923, 6_742, 5_958, 6_131, 5_842, 5_421, 5_918, 6_265, 5_851, 5_949),
    test_counts=(980, 1_135, 1_032, 1_010, 982, 892, 958, 1_028, 974, 1_009),
    shape=(1, 28, 28),
    folder="MNIST/raw",
)

FASHION_MNIST = Publication(
    name="fashion-mnist",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    files=_idx_files(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
    alternatives=(),
    classes=("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    train_counts=(6_000,) * 10,
    test_counts=(1_000,) * 10,
    shape=(1, 28, 28),
    folder="FashionMNIST/raw",
)

_EMNIST_ZIP = PublishedFile(
    name="gzip.zip",
    url="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    sha256="fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    size=561_753_746,
)
_ALL_CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_MERGED_CHARACTERS = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")  # the others look like capitals
EMNIST: Mapping[str, Publication] = {
    f"emnist-{split}": Publication(
        name=f"emnist-{split}",
        homepage="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        files=(_EMNIST_ZIP,),
        alternatives=(),
        classes=classes,
        train_counts=train,
        test_counts=test,
        shape=(1, 28, 28),
        folder="EMNIST/raw",
    )
    for split, classes, train, test in (
        ("balanced", _MERGED_CHARACTERS, (2_400,) * 47, (400,) * 47),
        ("byclass", _ALL_CHARACTERS, (697_932,), (116_323,)),
        ("bymerge", _MERGED_CHARACTERS, (697_932,), (116_323,)),
        ("digits", tuple(string.digits), (24_000,) * 10, (4_000,) * 10),
        ("letters", tuple(string.ascii_uppercase), (4_800,) * 26, (800,) * 26),
    )
}

TINY_IMAGENET = Publication(
    name="tiny-imagenet",
    homepage="http://cs231n.stanford.edu/",
    files=(
        PublishedFile(
            name="tiny-imagenet-200.zip",
            url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            sha256="6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            size=248_100_043,
        ),
    ),
    alternatives=(),
    classes=tuple(map(str, range(200))),  # their names are in words.txt
    train_counts=(500,) * 200,
    test_counts=(50,) * 200,
    shape=(3, 64, 64),
)

SHAKESPEARE = Publication(
    name="shakespeare",
    homepage="https://github.com/karpathy/char-rnn",
    files=(
        PublishedFile(
            name="input.txt",
            url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            size=1_115_394,
        ),
    ),
    alternatives=(),
    classes=("\\n", *" !$&',-.3:;?", *string.ascii_uppercase, *string.ascii_lowercase),
    train_counts=(10_005,),  # sequences of 80 characters
    test_counts=(2_485,),
    shape=(80,),
    folder="shakespeare",
)

_PUBLISHED = (CIFAR10, CIFAR100, SVHN, MNIST, FASHION_MNIST, *EMNIST.values(), TINY_IMAGENET, SHAKESPEARE)
PUBLICATIONS: Mapping[str, Publication] = {published.name: published for published in _PUBLISHED}

NOT_FETCHED = {
    "digits": "they are a part of scikit-learn",
    "femnist": "run data/femnist/preprocess.sh of LEAF, or set data.source = 'hf:flwrlabs/femnist' and data.client = "
    "'writer_id'",
    "hf:NAME": "the package `datasets` downloads it when it is first used",
}


def find_publication(name: str, publications: Mapping[str, Publication] = PUBLICATIONS) -> Publication:
    """The publication called `name`."""
    if name not in publications:
        if registered_name(name) in NOT_FETCHED:
            raise UserError(f"{name!r} is not published as files: {NOT_FETCHED[registered_name(name)]}")
        raise UserError(f"{name!r} is not published as files: {suggestion(name, publications)}")
    return publications[name]


def file_hash(path: Path, kind: str = "sha256") -> str:
    """The checksum of a file in hexadecimal digits."""
    with open_regular(path) as file:
        return file_digest(file, kind).hexdigest()


def check_published(path: Path, publication: Publication) -> None:
    """Refuse a file with the name of one of the publisher's and another content."""
    expected, digest = publication.file(path.name).sha256, file_hash(path)
    if digest != expected:
        raise UserError(
            f"{path}: SHA-256 {digest} is not the publisher's {expected}; delete it and fetch again "
            f"(`fedgg data fetch {publication.name}`), or extract it yourself if you made it on purpose"
        )


def count_gaps(split: str, labels: Tensor, published: tuple[int, ...]) -> list[str]:
    """How the number of examples, and that of each class, departs from the published ones; at most one difference."""
    if len(labels) != sum(published):
        return [f"{len(labels):,} {split} images, published are {sum(published):,}"]
    if len(published) == 1:
        return []
    counts = labels.clamp_min(0).bincount(minlength=len(published)).tolist()
    return [
        f"class {label} has {count:,} {split} images, published are {expected:,}"
        for label, (count, expected) in enumerate(zip(counts, published, strict=False))
        if count != expected
    ][:1]


def missing_data(publication: Publication, wanted: str, folder: Path) -> UserError:
    return UserError(
        f"{publication.name}: found no {wanted} in {folder} or below; run `fedgg data fetch {publication.name}` "
        f"or say with --data-folder or FEDGG_DATA which folder holds it"
    )


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
