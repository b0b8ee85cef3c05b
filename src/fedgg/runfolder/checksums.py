"""Checksums of the files in a run folder, so that damage is noticed when a file is read. They are not signatures.

checksums.json               SHA-256 of config.toml and of the files that are written once, as `sha256sum` prints it
rounds.jsonl, resumes.jsonl  every line ends with "checksum", the first digits of the SHA-256 of the file up to there,
                             so writing or checking a line takes time in proportion to the line alone;
                             so do lines of federation/events.jsonl, whose number is not recorded
summary.json, study.json, flower.json, checksums.json
                             "checksum", the first digits of the SHA-256 of the rest of the content
checkpoint/*.safetensors     "checksums" in the metadata: SHA-256 of rounds.jsonl up to that round and of the files of
                             checksums.json; summary.json has the same, with the final model

A folder of an earlier version has none of these, and is read without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedgg.files import (
    MEGABYTE,
    append_line,
    indented_json,
    open_in_place,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
)
from fedgg.older_python import file_digest

FILE = "checksums.json"
FORMAT = 1
KEY = "checksum"
DIGITS = 16
HISTORY = "rounds.jsonl"
LARGEST_HEADER = 100 * MEGABYTE  # of a safetensors file, by its own definition

_BEFORE = f', "{KEY}": "'.encode()  # the bytes before the digits at the end of a line
_AFTER = DIGITS + len('"}\n')


class Mismatch(ValueError):
    """Content that does not match its checksum, or is not of the expected form."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file of any size."""
    with open_regular(file) as content:
        return file_digest(content).hexdigest()


# Objects --------------------------------------------------------------------------------------------------------------


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    compact = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return {**content, KEY: sha256(compact)[:DIGITS]}


def without_checksum(content: Any, *, required: bool = False) -> dict[str, Any]:
    """The object without its checksum. Mismatch if that does not fit, or, with `required`, if there is none."""
    if not isinstance(content, dict):
        raise Mismatch("it does not hold one JSON object")
    rest = {key: value for key, value in content.items() if key != KEY}
    if KEY not in content and not required:
        return rest
    if content.get(KEY) != with_checksum(rest)[KEY]:
        raise Mismatch("its content does not fit its checksum" if KEY in content else "it has no checksum")
    return rest


# Lines ----------------------------------------------------------------------------------------------------------------


class LineChecksums:
    """The running checksum of a file to which JSON objects are appended, one for each line."""

    def __init__(self, content: bytes = b"", *, required: bool = False):
        """`content`: the start of the file, not to be checked; `required`: lines without a checksum are damaged."""
        self.present = required
        self.complaint: str | None = None  # about the first line that does not fit; later lines cannot fit either
        self._lines = content.count(b"\n")
        self.sha256 = hashlib.sha256(content)  # of all bytes so far

    def next_line(self, record: Mapping[str, Any]) -> bytes:
        """The record as the next line to write; call `add` once it is written."""
        head = json.dumps(record)[:-1].encode() + _BEFORE
        running = self.sha256.copy()
        running.update(head)
        return head + running.hexdigest()[:DIGITS].encode() + b'"}\n'

    def add(self, line: bytes) -> None:
        self._lines += 1
        self.sha256.update(line)

    def check(self, line: bytes) -> None:
        """Check a line that was read, newline included, and add it."""
        if self.complaint is None:
            self.complaint = self._complaint(line)
        self.add(line)

    def check_all(self, lines: bytes) -> None:
        for line in lines.split(b"\n")[:-1]:
            self.check(line + b"\n")

    def _complaint(self, line: bytes) -> str | None:
        head, digits = line[:-_AFTER], line[-_AFTER:-3]
        if not head.endswith(_BEFORE) or not line.endswith(b'"}\n'):
            return f"line {self._lines + 1} has no checksum" if self.present and line.strip() else None
        if self._lines and not self.present:
            return f"line {self._lines + 1} has a checksum, and the lines before it have none"
        self.present = True
        running = self.sha256.copy()
        running.update(head)
        fits = running.hexdigest()[:DIGITS].encode() == digits
        return None if fits else f"line {self._lines + 1} does not fit its checksum"


def append_checked(file: Path, record: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> int:
    """Append a line to a file short enough to be read each time; the number of its lines afterwards."""
    content = read_bytes(file) if file.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:  # torn by a kill
        with open_in_place(file, "r+b") as torn:
            torn.truncate(len(whole))
    append_line(file, LineChecksums(whole).next_line(record)[:-1].decode(), check)
    return whole.count(b"\n") + 1


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """The content of checksums.json, or the part of it that the summary or a checkpoint repeats."""

    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by file name
    replaced: str | None = None  # SHA-256 of the previous config.toml, valid while it is being replaced
    resumes: int = 0  # the number of lines that resumes.jsonl has at least
    fault: str | None = None  # why checksums.json itself could not be used

    @property
    def source(self) -> str:
        return FILE if self.fault is None else "the latest checkpoint or summary.json"

    def fits(self, name: str, digest: str) -> bool:
        """Whether a file has the listed SHA-256; a file that is not listed always fits."""
        return digest in (self.files.get(name, digest), self.replaced if name == "config.toml" else None)

    def with_config(self, content: bytes) -> Manifest:
        """The manifest to write before config.toml gets this content: until then both versions fit."""
        return replace(
            self, files=self.files | {"config.toml": sha256(content)}, replaced=self.files.get("config.toml")
        )

    def content(self) -> bytes:
        """Of checksums.json."""
        content: dict[str, Any] = {"format": FORMAT, "files": self.files, "resumes": self.resumes}
        if self.replaced is not None:
            content["replaced"] = {"config.toml": self.replaced}
        return indented_json(with_checksum(content))


def known_checksums(folder: Path) -> Manifest | None:
    """From checksums.json; if that is missing or damaged, from the summary or a checkpoint. None: without checksums."""
    try:
        return _listed(read_json(folder / FILE))
    except FileNotFoundError:
        fault = "it is missing"
    except OSError as error:
        fault = str(error.strerror or error)
    except ValueError as error:
        fault = str(error)
    files = next(_recorded(folder), None)
    if files is None:
        return None if fault == "it is missing" else Manifest(fault=fault)
    return Manifest({name: digest for name, digest in files.items() if name != HISTORY}, fault=fault)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, named after their rounds, the newest last."""
    paths = (folder / "checkpoint").glob("[0-9]*.safetensors")
    return sorted((path for path in paths if path.stem.isdecimal()), key=lambda path: (int(path.stem), path.name))


def newest_checkpoint(folder: Path) -> int:
    """The round of the newest checkpoint; 0 where there is none."""
    return max((int(path.stem) for path in checkpoints_in(folder)), default=0)


def checkpoint_checksums(file: Path) -> dict[str, str]:
    """The SHA-256 of other files in the metadata of a checkpoint; ValueError if there are none, or they are damaged."""
    with open_regular(file) as content:
        length = int.from_bytes(content.read(8), "little")
        if length > LARGEST_HEADER:
            raise Mismatch("it is not a safetensors file")
        header = parse_json(content.read(length))
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("checksums"), str):
        raise Mismatch("it has no checksums of other files")
    return _digests(without_checksum(parse_json(metadata["checksums"]), required=True))


def _listed(content: Any) -> Manifest:
    content = without_checksum(content, required=True)
    if content.get("format") != FORMAT:
        raise Mismatch(f"it has format {content.get('format')!r}, and this version reads {FORMAT}")
    resumes = content.get("resumes")
    replaced = _digests(content.get("replaced", {})).get("config.toml")
    return Manifest(_digests(content.get("files")), replaced, resumes if type(resumes) is int else 0)


def _recorded(folder: Path) -> Iterator[dict[str, str]]:
    """The lists of checksums in other files, the most reliable first."""
    with suppress(OSError, ValueError):
        yield _digests(without_checksum(read_json(folder / "summary.json"), required=True).get("checksums"))
    for file in reversed(checkpoints_in(folder)):
        with suppress(OSError, ValueError):
            yield checkpoint_checksums(file)


def _digests(content: Any) -> dict[str, str]:
    if not isinstance(content, dict) or not all(isinstance(digest, str) for digest in content.values()):
        raise Mismatch("it does not list SHA-256 by file")
    return content
