"""Checking data sets on disk against what their publishers wrote: checksums, and the content read to the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pooch
from torch import Tensor

from fedgg.data import cifar, svhn
from fedgg.data.catalog import PUBLICATIONS, Publication
from fedgg.data.dataset import Dataset
from fedgg.data.sources import check_name, load
from fedgg.errors import UserError


@dataclass(frozen=True)
class Finding:
    """What was found out about one file or folder, in a sentence."""

    file: str
    ok: bool
    what: str


_REWRITTEN = (
    "the bytes are not the publisher's: the files were written anew, so that counts and labels are checked and pixels "
    "are not; `fedgg data fetch {}` brings the original"
)


def check(
    name: str, folder: str | Path, strict: bool = False, publications: Mapping[str, Publication] = PUBLICATIONS
) -> list[Finding]:
    """One finding per copy of the data set `name` in `folder`.

    A complete copy whose bytes are not the publisher's (rewritten, restored) is in order unless `strict`; an archive
    with another checksum never is, because it is refused on loading as well.
    """
    check_name(name)
    folder = Path(folder)
    if name not in publications:
        return [_check_source(name)]
    publication = publications[name]
    findings = list((_check_svhn if name == "svhn" else _check_cifar)(folder, publication, strict))
    return findings or [Finding(str(folder), False, f"no copy of {name} here; run `fedgg data fetch {name}`")]


def _check_source(name: str) -> Finding:
    """A source without a publisher is in order when it can be read."""
    file = "scikit-learn" if name == "digits" else name.removeprefix("npz:")
    try:
        return Finding(file, True, _summary(load(name)))
    except UserError as error:
        return Finding(file, False, str(error))


def _check_cifar(folder: Path, publication: Publication, strict: bool) -> Iterator[Finding]:
    for copy in cifar.find_copies(folder, publication):
        try:
            copy.check_archive()
            dataset = copy.read("fine")
        except UserError as error:
            yield Finding(str(copy.path), False, str(error))
            continue
        gaps = _gaps("training", dataset.y_train, publication.train_counts)
        gaps += _gaps("test", dataset.y_test, publication.test_counts)
        members = publication.file(copy.form.archive).members
        original = copy.archived or (
            bool(members) and all(_hash(copy.path / member, "md5") == md5 for member, md5 in members.items())
        )
        # Toronto publishes no checksums of single files, and those of the binary version are not on record.
        doubt = _REWRITTEN.format(publication.name) if members else "single files of this version have no checksums"
        yield _judge(copy.path, _summary(dataset), gaps, original, doubt, strict)


def _check_svhn(folder: Path, publication: Publication, strict: bool) -> Iterator[Finding]:
    present = svhn.find_files(folder)
    counts = {svhn.TRAIN: publication.train_counts, svhn.TEST: publication.test_counts}
    for name, path in present.items():
        try:
            images, labels = svhn.read_split(path)
        except UserError as error:
            yield Finding(str(path), False, str(error))
            continue
        gaps = _gaps("training" if name == svhn.TRAIN else "test", labels, counts[name])
        summary = f"{len(images):,} images {_shape(images)}"
        original = _hash(path, "sha256") == publication.file(name).sha256
        yield _judge(path, summary, gaps, original, _REWRITTEN.format(publication.name), strict)
    for name in counts.keys() - present.keys() if present else ():
        yield Finding(str(folder / name), False, "missing; run `fedgg data fetch svhn`")


def _judge(path: Path, summary: str, gaps: list[str], original: bool, doubt: str, strict: bool) -> Finding:
    if gaps:
        return Finding(str(path), False, f"{summary}; incomplete: {'; '.join(gaps)}")
    if original:
        return Finding(str(path), True, f"{summary}; the publisher's own bytes")
    return Finding(str(path), not strict, f"{summary}; content complete, but {doubt}")


def _gaps(split: str, labels: Tensor, published: tuple[int, ...]) -> list[str]:
    """How the number of images, and that of each class, departs from the published ones."""
    found = labels.bincount(minlength=len(published)).tolist()
    if len(labels) != sum(published):
        return [f"{len(labels):,} {split} images, published are {sum(published):,}"]
    return [
        f"class {label} has {there:,} {split} images, published are {expected:,}"
        for label, (there, expected) in enumerate(zip(found, published, strict=True))
        if there != expected
    ][:1]


def _summary(dataset: Dataset) -> str:
    return (
        f"{len(dataset.x_train):,} training and {len(dataset.x_test):,} test images {_shape(dataset.x_train)}, "
        f"{len(dataset.classes)} classes"
    )


def _shape(images: Tensor) -> str:
    return "x".join(str(side) for side in images.shape[1:])


def _hash(path: Path, kind: str) -> str:
    return str(pooch.file_hash(str(path), alg=kind)) if path.is_file() else ""
