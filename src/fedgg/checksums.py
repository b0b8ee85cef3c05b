"""Checksums of the files in a run folder: damage is noticed when a file is read. They are no signatures.

checksums.json               SHA-256 of config.toml and of the files that are written once, as `sha256sum` prints it
rounds.jsonl, resumes.jsonl  every line ends with "checksum", the first digits of the SHA-256 of the file up to there:
                             a line is covered from the moment it is written, and costs what it is long;
                             so do lines of federation/events.jsonl, of which nothing says how many there are
summary.json, study.json, flower.json, checksums.json
                             "checksum", the first digits of the SHA-256 of the rest of the content
checkpoint/*.safetensors     "checksums" in the metadata: SHA-256 of the history up to that round and of those files;
                             summary.json has the same, with the final model

A folder of an earlier version has none of these, and is read without.
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
    open_existing,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    write_atomically,
)

FILE = "checksums.json"
FORMAT = 1
KEY = "checksum"
DIGITS = 16
HISTORY = "rounds.jsonl"
LARGEST_HEADER = 100 * MEGABYTE  # of a safetensors file, by its own definition

_BEFORE = f', "{KEY}": "'.encode()  # what stands before the digits at the end of a line
_AFTER = DIGITS + len('"}\n')


class Mismatch(ValueError):
    """Content that is not what was written; the message says so in a few words."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of(file: Path) -> str:
    """Of a file of any size."""
    digest = hashlib.sha256()
    with open_regular(file) as content:
        while chunk := content.read(MEGABYTE):
            digest.update(chunk)
    return digest.hexdigest()


# Objects --------------------------------------------------------------------------------------------------------------


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, KEY: _digits(content)}


def without_checksum(content: Any, *, required: bool = False) -> dict[str, Any]:
    """The content, if it is an object that fits its checksum; `required`: also if it has one. Otherwise Mismatch."""
    if not isinstance(content, dict):
        raise Mismatch("it does not hold one JSON object")
    rest = {key: value for key, value in content.items() if key != KEY}
    if KEY not in content and not required:
        return rest
    if content.get(KEY) != _digits(rest):
        raise Mismatch("its content does not fit its checksum" if KEY in content else "it has no checksum")
    return rest


def _digits(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())[:DIGITS]


# Lines ----------------------------------------------------------------------------------------------------------------


class LineChecksums:
    """The running checksum of a file that grows by a JSON object a line."""

    def __init__(self, content: bytes = b"", *, required: bool = False):
        """`content`: what the file has already and is not checked; `required`: lines without a checksum are damaged."""
        self.present = required
        self.complaint: str | None = None  # of the first line that does not fit; those behind it cannot
        self._lines = content.count(b"\n")
        self._sha256 = hashlib.sha256(content)

    def next_line(self, record: Mapping[str, Any]) -> bytes:
        """The record as the line to be written next; `add` it when it is."""
        head = json.dumps(record)[:-1].encode() + _BEFORE
        return head + self._digits(head).encode() + b'"}\n'

    def add(self, line: bytes) -> None:
        self._lines += 1
        self._sha256.update(line)

    def check(self, line: bytes) -> None:
        """Add a line, with its end, that was read."""
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
        return (
            None
            if self._digits(head) == digits.decode("latin-1")
            else f"line {self._lines + 1} does not fit its checksum"
        )

    def _digits(self, head: bytes) -> str:
        running = self._sha256.copy()
        running.update(head)
        return running.hexdigest()[:DIGITS]

    def hexdigest(self) -> str:
        """SHA-256 of all bytes so far."""
        return self._sha256.hexdigest()


def append_checked(file: Path, record: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> int:
    """Append a line to a file that is short enough to be read each time; how many it has then."""
    content = read_bytes(file) if file.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:  # torn by a kill
        with open_existing(file) as torn:
            torn.truncate(len(whole))
    append_line(file, LineChecksums(whole).next_line(record)[:-1].decode(), check)
    return whole.count(b"\n") + 1


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What checksums.json says, or as much of it as is known from elsewhere."""

    files: dict[str, str] = field(default_factory=dict)  # by name: its SHA-256
    replaced: str | None = None  # the SHA-256 of the config.toml that is being replaced, or that a kill has left there
    resumes: int = 0  # lines of resumes.jsonl, at least
    fault: str | None = None  # why it is not known from checksums.json

    @property
    def source(self) -> str:
        return FILE if self.fault is None else "the latest checkpoint or summary.json"

    def fits(self, name: str, digest: str) -> bool:
        """Whether a file may have this SHA-256; one that is not listed may have any."""
        return digest in (self.files.get(name, digest), self.replaced if name == "config.toml" else None)

    def with_config(self, content: bytes) -> Manifest:
        """To be written before this content becomes config.toml: until then, the present one is right, too."""
        return replace(
            self, files=self.files | {"config.toml": sha256(content)}, replaced=self.files.get("config.toml")
        )

    def write(self, folder: Path) -> None:
        content: dict[str, Any] = {"format": FORMAT, "files": self.files, "resumes": self.resumes}
        if self.replaced is not None:
            content["replaced"] = {"config.toml": self.replaced}
        write_atomically(folder / FILE, (json.dumps(with_checksum(content), indent=2) + "\n").encode())


def known_checksums(folder: Path) -> Manifest | None:
    """From checksums.json; where that is missing or damaged, from the summary or a checkpoint. None: there are none."""
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


def newest_checkpoint(folder: Path) -> int:
    """The round of the newest checkpoint; 0 where there is none."""
    return max((int(path.stem) for path in _checkpoints(folder)), default=0)


def checkpoint_checksums(file: Path) -> dict[str, str]:
    """What the metadata of a checkpoint say of other files; ValueError where that is nothing, or damaged."""
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
    """What other files say, best first."""
    with suppress(OSError, ValueError):
        yield _digests(without_checksum(read_json(folder / "summary.json"), required=True).get("checksums"))
    for file in sorted(_checkpoints(folder), reverse=True):
        with suppress(OSError, ValueError):
            yield checkpoint_checksums(file)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in (folder / "checkpoint").glob("[0-9]*.safetensors") if path.stem.isdecimal()]


def _digests(content: Any) -> dict[str, str]:
    if not isinstance(content, dict) or not all(isinstance(digest, str) for digest in content.values()):
        raise Mismatch("it does not list SHA-256 by file")
    return content
