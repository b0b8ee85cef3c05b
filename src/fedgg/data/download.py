"""Downloading published data sets, and checking the files on disk against checksums and contents."""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pooch
import requests
import urllib3
from filelock import FileLock
from torch import Tensor

from fedgg.data import COPIES, DATASETS, readers, registered_name
from fedgg.data.catalog import PUBLICATIONS, Publication, PublishedFile, count_gaps, find_publication
from fedgg.data.dataset import Dataset, load, unknown_data_set
from fedgg.data.dataset_cache import without_cache
from fedgg.errors import UserError
from fedgg.files import check_in_place, open_in_place

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all where the server says so

_CHUNK = 1 << 16
_TIMEOUT = (15, 60)  # seconds to connect, seconds between two packets


def fetch(
    name: str,
    folder: str | Path,
    progress: Progress | None = None,
    mirror: str | None = None,
    publications: Mapping[str, Publication] = PUBLICATIONS,
) -> list[Path]:
    """Download the files of the data set `name` that are not in `folder` yet, and return where all of them are.

    Files whose names other data sets use too lie in a folder below, where torchvision looks for them.
    A file counts as there when its checksum is right. One with another checksum is replaced, but only once the new one
    is complete and verified. `mirror` is an address that holds the publisher's files under their own names.
    """
    publication = find_publication(name, publications)
    folder = Path(folder) / publication.folder
    paths = [folder / file.name for file in publication.files]
    try:
        missing = [file for file, path in zip(publication.files, paths, strict=True) if not _is_intact(path, file)]
        if missing:
            folder.mkdir(parents=True, exist_ok=True)
            check_in_place(folder / ".fetch.lock")
            with FileLock(folder / ".fetch.lock"):
                for file in missing:
                    url = f"{mirror.rstrip('/')}/{file.name}" if mirror else file.url
                    _retrieve(file, url, folder, progress)
    except OSError as error:
        raise UserError(_disk_trouble(error, folder, publication)) from error
    return paths


def _is_intact(path: Path, file: PublishedFile) -> bool:
    """MD5, which others publish, finds damage; a file made to have the same MD5 it does not find."""
    return path.is_file() and pooch.file_hash(str(path), alg="sha256") == file.sha256


def _retrieve(file: PublishedFile, url: str, folder: Path, progress: Progress | None) -> None:
    # The key keeps what came from one address apart from what comes from another.
    key = hashlib.sha256(f"{url} {file.sha256}".encode()).hexdigest()[:8]
    part = folder / f"{file.name}.{key}.part"
    try:
        with _quiet_pooch():
            download = _ResumingDownload(file, part, progress)
            pooch.retrieve(url, f"sha256:{file.sha256}", fname=file.name, path=folder, downloader=download)
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise UserError(
            f"{file.name}: {_reason(error)} at {url}; call again to resume, or put the file into {folder} by hand"
        ) from error
    for stale in folder.glob(f"{file.name}.*.part"):
        stale.unlink(missing_ok=True)


class _ResumingDownload:
    """The downloader handed to pooch: it grows FILE.part, and hands it over when it is complete and right."""

    def __init__(self, file: PublishedFile, part: Path, progress: Progress | None) -> None:
        self._file, self._part, self._progress = file, part, progress

    def __call__(self, url: str, output_file: str, _pooch: object) -> None:
        if self._received() != self._file.size or not _is_intact(self._part, self._file):
            self._transfer(url)
        digest = pooch.file_hash(str(self._part), alg="sha256")
        if digest != self._file.sha256:
            self._part.unlink()
            raise UserError(
                f"{self._file.name}: {url} sent other bytes, SHA-256 {digest} instead of {self._file.sha256}; "
                "they are deleted, call again or try another mirror"
            )
        self._part.replace(output_file)

    def _received(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _transfer(self, url: str) -> None:
        received = self._received()
        # Plain bytes: a server that announces .tar.gz as an encoding must not have it unpacked on the way.
        headers = {"Accept-Encoding": "identity", "User-Agent": "fedgg"}
        if received:
            headers["Range"] = f"bytes={received}-"
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            status = response.status_code
            continues = status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {received}-")
            unusable = status == 416 or (status == 206 and not continues)
            if not unusable:
                response.raise_for_status()
                self._write(response, received if continues else 0)
        if unusable and received:
            self._part.unlink()
            self._transfer(url)
        elif unusable:
            raise requests.HTTPError(response=response)

    def _write(self, response: requests.Response, received: int) -> None:
        length = response.headers.get("Content-Length", "")
        total = received + int(length) if length.isdecimal() else None
        if not received:
            self._part.unlink(missing_ok=True)
        with open_in_place(self._part, "ab") as sink:
            for chunk in response.raw.stream(_CHUNK, decode_content=False):
                sink.write(chunk)
                received += len(chunk)
                if self._progress:
                    self._progress(self._file.name, received, total)
        if total is None and received < self._file.size:
            raise requests.ConnectionError(f"closed after {received} of {self._file.size} bytes")


@contextmanager
def _quiet_pooch() -> Iterator[None]:
    """Keep pooch's announcements off the terminal, which belongs to the caller."""
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: Exception) -> str:
    if isinstance(error, requests.HTTPError):
        return f"the server answered {error.response.status_code}"
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return "no answer in time"
    if isinstance(error, requests.ConnectionError | urllib3.exceptions.HTTPError):
        return "no connection, or it broke off,"
    return f"cannot download ({type(error).__name__})"


def _disk_trouble(error: OSError, folder: Path, publication: Publication) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = sum(file.size for file in publication.files) / 1e6
        return (
            f"{folder}: the disk is full, {publication.name} needs {needed:,.0f} MB; "
            "make room and call again to resume, or choose another folder"
        )
    reason = error.strerror or error
    return f"{error.filename or folder}: cannot be used ({reason}); choose another folder or change its rights"


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
    if registered_name(name) not in DATASETS:
        raise unknown_data_set(name)
    folder = Path(folder)
    if name not in publications:
        return [_check_source(name, folder)]
    publication = publications[name]
    checks = {"svhn": _check_svhn, "cifar10": _check_cifar, "cifar100": _check_cifar}
    findings = list(checks.get(name, _check_copies)(folder, publication, strict))
    return findings or [Finding(str(folder), False, f"no copy of {name} here; run `fedgg data fetch {name}`")]


def _check_source(name: str, folder: Path) -> Finding:
    """A source without published files is in order when it can be read."""
    file = {"digits": "scikit-learn", "femnist": str(folder)}.get(name, name.removeprefix("npz:"))
    try:
        with without_cache():
            return Finding(file, True, _summary(load(name, folder)))
    except UserError as error:
        return Finding(file, False, str(error).removeprefix(f"{file}: "))


def _check_copies(folder: Path, publication: Publication, strict: bool) -> Iterator[Finding]:
    """Of the data sets whose readers verify the number of examples of each class themselves."""
    for copy in COPIES[publication.name](folder, publication):
        try:
            summary, original = _summary(copy.read()), copy.is_original()
        except UserError as error:
            yield Finding(str(copy.path), False, str(error))
            continue
        doubt = "files of this form have no checksums" if original is None else _REWRITTEN.format(publication.name)
        yield _judge(copy.path, summary, [], bool(original), doubt, strict)


def _check_cifar(folder: Path, publication: Publication, strict: bool) -> Iterator[Finding]:
    for copy in readers.find_copies(folder, publication):
        try:
            copy.check_archive()
            dataset = copy.read("fine")
        except UserError as error:
            yield Finding(str(copy.path), False, str(error))
            continue
        gaps = count_gaps("training", dataset.y_train, publication.train_counts)
        gaps += count_gaps("test", dataset.y_test, publication.test_counts)
        members = publication.file(copy.form.archive).members
        original = copy.archived or (
            bool(members) and all(_hash(copy.path / member, "md5") == md5 for member, md5 in members.items())
        )
        # Toronto publishes no checksums of single files, and those of the binary version are not on record.
        doubt = _REWRITTEN.format(publication.name) if members else "single files of this version have no checksums"
        yield _judge(copy.path, _summary(dataset), gaps, original, doubt, strict)


def _check_svhn(folder: Path, publication: Publication, strict: bool) -> Iterator[Finding]:
    present = readers.find_files(folder)
    counts = {readers.TRAIN: publication.train_counts, readers.TEST: publication.test_counts}
    for name, path in present.items():
        try:
            images, labels = readers.read_split(path)
        except UserError as error:
            yield Finding(str(path), False, str(error))
            continue
        gaps = count_gaps("training" if name == readers.TRAIN else "test", labels, counts[name])
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


def _summary(dataset: Dataset) -> str:
    noun = "images" if len(dataset.shape) == 3 else "examples"
    owners = "" if dataset.owners is None else f", {int(dataset.owners.max()) + 1:,} clients"
    return (
        f"{len(dataset.x_train):,} training and {len(dataset.x_test):,} test {noun} {_shape(dataset.x_train)}, "
        f"{len(dataset.classes)} classes{owners}"
    )


def _shape(images: Tensor) -> str:
    return "x".join(str(side) for side in images.shape[1:])


def _hash(path: Path, kind: str) -> str:
    return str(pooch.file_hash(str(path), alg=kind)) if path.is_file() else ""
