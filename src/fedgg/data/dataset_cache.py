"""Decoded data sets in files that are mapped into memory, so that a data set is read and decoded once per machine.

A cache file belongs to one copy of a data set and one choice of settings. It is used only if its identity is still the
same: path, size, inode and times of change of every source file, the settings, the source code of the reader and the
version of this format. Files whose sources were changed within the last two seconds are not written, since another
change within the resolution of a file system's clock would not be seen.

A file is 16 bytes of magic, the SHA-256 of all that follows, the length of the header, the header (JSON) and the
tensors at aligned places. The checksum is verified whenever a file is opened. The fingerprint of the data set is in the
header and thus bound to the content. Tensors share the mapping, which is copied on write: processes share its pages,
and a write is seen by the writing process only.

Whatever is wrong with a cache file or its folder, the data set is read from its sources, without a message.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgg.data.dataset import Dataset
from fedgg.errors import UserError
from fedgg.files import file_name, make_folder, open_regular, parse_json, read_bytes, replacing
from fedgg.older_python import file_digest

VARIABLE = "FEDGG_CACHE"
OFF = "off"
MAGIC = b"fedgg decoded 1\n"
DIGEST = 32  # bytes of a SHA-256
ALIGNED = 64  # bytes, like torch's allocations
LONGEST_HEADER = 64 << 20  # bytes
RESERVE = 1 << 30  # bytes that stay free on the disk
SETTLED = 2 * 10**9  # nanoseconds since the last change of a source: the coarsest clock of a file system
TENSORS = ("x_train", "y_train", "x_test", "y_test", "owners")
DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.int64, torch.float32, torch.float64)}
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, UserError)


def cache_folder() -> Path | None:
    """The folder of cache files: that of the variable FEDGG_CACHE, else in the user's cache folder; None: no cache."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() == OFF:
        return None
    if chosen:
        return Path(chosen).expanduser()
    places = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local")}
    base = os.environ.get("XDG_CACHE_HOME") or places.get(sys.platform, "~/.cache")
    try:
        return Path(base).expanduser() / "fedgg" / "decoded"
    except RuntimeError:  # there is no home folder
        return None


def describe_cache() -> str:
    """A sentence for the user on where decoded copies are."""
    folder = cache_folder()
    if folder is None:
        return f"decoded copies are switched off ({VARIABLE}={OFF})"
    return f"a decoded copy is written by the first run, into {folder} ({VARIABLE} names another folder; {OFF}: none)"


_switched_off = ContextVar("switched off", default=False)


@contextmanager
def without_cache() -> Iterator[None]:
    """Data sets that are loaded within are read from their sources, and not written into the cache."""
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)


def cached(
    copy: Path, sources: Iterable[Path], reader: str, settings: tuple[object, ...], read: Callable[[], Dataset]
) -> Dataset:
    """What `read` returns, from the cache if it is there; else it is read and written into the cache.

    `copy`: the file or folder on disk; `sources`: every file that `read` reads, or would read if it were there;
    `reader`: the file of its code; `settings`: all else that it depends on, as objects with a reproducible `repr`.
    """
    folder, paths = None if _switched_off.get() else cache_folder(), list(sources)
    before = _identity(paths, reader, settings) if folder is not None else None
    if folder is None or before is None:
        return read()
    identity, is_settled = before
    place = hashlib.sha256(repr((str(copy.absolute()), settings)).encode("utf-8", "replace")).hexdigest()[:16]
    path = folder / f"{file_name(copy.name)}-{place}.cache"
    dataset = _opened(path, identity)
    if dataset is None:
        dataset = read()
        if is_settled and _identity(paths, reader, settings) == before:
            with suppress(OSError):
                _write(path, identity, dataset)
    return dataset


def _identity(paths: list[Path], reader: str, settings: tuple[object, ...]) -> tuple[str, bool] | None:
    """A hash of all that the decoded data depend on, and whether no source was changed just now."""
    entries: list[object] = []
    newest = 0
    try:
        code = hashlib.sha256(read_bytes(Path(reader))).hexdigest()
        for path in paths:
            try:
                status = path.stat()
            except FileNotFoundError:
                entries.append((str(path.absolute()), None))
                continue
            times = (status.st_mtime_ns, status.st_ctime_ns)
            newest = max(newest, *times)
            entries.append((str(path.absolute()), status.st_size, status.st_ino, *times))
    except (OSError, KeyError):  # KeyError: the reader's code is not in a .py file
        return None
    whole = repr((MAGIC, code, settings, entries)).encode("utf-8", "replace")
    return hashlib.sha256(whole).hexdigest(), time.time_ns() - newest >= SETTLED


def _opened(path: Path, identity: str) -> Dataset | None:
    """The data set of a cache file; None if there is none, or another one, or a damaged one."""
    try:
        with open_regular(path) as file:
            if os.name != "nt" and os.fstat(file.fileno()).st_uid not in (os.geteuid(), 0):
                return None  # somebody else's file in a shared folder
            start = file.read(len(MAGIC) + DIGEST + 8)
            length = int.from_bytes(start[-8:], "little")
            if not start.startswith(MAGIC) or length > LONGEST_HEADER:
                return None
            header = parse_json(file.read(length))
            if header["identity"] != identity:
                return None
            file.seek(len(MAGIC) + DIGEST)
            if file_digest(file).digest() != start[len(MAGIC) : -8]:
                return None
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return _dataset(header, content, len(start) + length)
    except _DAMAGED:
        return None


def _dataset(header: dict[str, Any], content: mmap.mmap, start: int) -> Dataset:
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in header["tensors"]:
        tensor = torch.empty(0, dtype=DTYPES[dtype])
        count = 1
        for side in shape:
            if type(side) is not int or side < 1:
                raise ValueError("a side of a tensor is not a positive number")
            count *= side
        size = count * tensor.element_size()
        if start + size > len(content):
            raise ValueError("a tensor is longer than the file")
        tensors[name] = torch.frombuffer(content, dtype=tensor.dtype, count=count, offset=start).view(shape)
        start += _padded(size)
    names = header["client_names"]
    dataset = Dataset(
        name=header["name"],
        x_train=tensors["x_train"],
        y_train=tensors["y_train"],
        x_test=tensors["x_test"],
        y_test=tensors["y_test"],
        classes=tuple(header["classes"]),
        peak=header["peak"],
        owners=tensors.get("owners"),
        client_names=None if names is None else tuple(names),
        targets=header["targets"],
    )
    vars(dataset)["fingerprint"] = header["fingerprint"]  # where the cached property keeps its value
    return dataset


def _write(path: Path, identity: str, dataset: Dataset) -> None:
    """OSError if there is no place for it; not written if the data set has what the format does not hold."""
    tensors = {name: tensor for name in TENSORS if (tensor := getattr(dataset, name)) is not None}
    if dataset.parts or dataset.words or any(str(one.dtype) not in DTYPES or not len(one) for one in tensors.values()):
        return
    header: dict[str, Any] = {
        "identity": identity,
        "fingerprint": dataset.fingerprint,
        "tensors": [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()],
        **{key: getattr(dataset, key) for key in ("name", "classes", "peak", "client_names", "targets")},
    }
    text = json.dumps(header).encode()
    length = _padded(len(MAGIC) + DIGEST + 8 + len(text)) - (len(MAGIC) + DIGEST + 8)
    pieces: list[Any] = [length.to_bytes(8, "little"), text.ljust(length)]
    for tensor in tensors.values():
        values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        pieces += [values, bytes(_padded(len(values)) - len(values))]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    make_folder(path.parent, path.parent, 0o700)
    if shutil.disk_usage(path.parent).free < RESERVE + sum(map(len, pieces)):
        return
    with replacing(path, 0o600) as file:
        for piece in (MAGIC, digest.digest(), *pieces):
            file.write(piece)


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
