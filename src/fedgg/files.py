"""One reader and one writer of files for the whole library (tests/unit/test_files.py lists the exceptions).

Run folders are sent around, so a file may be anything. Reading follows symbolic links, but the file at their end must
be a regular one of a bounded size: a FIFO would block, a device never end. JSON and TOML are limited in depth and in
the length of integers, and text must be Unicode. Whatever is refused is an `OSError` (`RefusedFile`) or a `ValueError`
whose message is one line.

Writing does not follow symbolic links. A file is written beside its place under an unpredictable name, and renamed:
readers see the old file or the new one, a link in its place is replaced, and a kill leaves the old file as it was.
Files that are appended to or changed in place must not be links at all, hard ones included.
Folders below the one that the user named must be real folders, too (`make_folder`). `writing_to` and `write_output`
turn an `OSError` into a `UserError`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal

from fedgg.errors import UserError
from fedgg.older_python import tomllib

MEGABYTE = 1 << 20
LIMITS = {".toml": MEGABYTE, ".json": 64 * MEGABYTE, ".jsonl": 2048 * MEGABYTE, ".py": 16 * MEGABYTE}
LARGE = 512 * MEGABYTE  # splits of very many clients, archives of many runs
DEPTH = 64  # tables and lists within each other
DIGITS = 40  # of an integer: more than any count has, and every one is a finite float
PAGE = "report.html"
ANOTHER_FOLDER = "choose another folder (--out, or out= in Python)"

_NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)
_NOT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_MANY_DIGITS = re.compile(rf"\d{{{DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class RefusedFile(OSError):
    """A file that is there and is not read or written; `strerror` says why."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path.name} {reason}")
        self.strerror = f"{path.name} {reason}"


# Reading --------------------------------------------------------------------------------------------------------------


def open_regular(path: Path, limit: int | None = None) -> BufferedReader:
    """The file, open for reading; RefusedFile if it is not a regular one, or larger than `limit` bytes."""
    descriptor = os.open(path, os.O_RDONLY | _NOT_WAITING | _COMMON)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedFile(path, f"is {_kind(status.st_mode)}, not a regular file")
        if limit is not None and status.st_size > limit:
            size = f"{status.st_size / MEGABYTE:,.0f} MiB"
            raise RefusedFile(path, f"has {size}, and at most {limit // MEGABYTE:,} MiB of it are read")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        with suppress(OSError):  # fdopen may have closed it
            os.close(descriptor)
        raise


def read_bytes(path: Path, limit: int | None = None, start: int = 0) -> bytes:
    """The content from the byte `start`, as it was when it was opened; by default the limit is that of its suffix."""
    try:
        with open_regular(path, LIMITS[path.suffix] if limit is None else limit) as file:
            file.seek(start)
            return file.read(max(0, os.fstat(file.fileno()).st_size - start))
    except MemoryError:
        raise RefusedFile(path, "does not fit into memory") from None


def read_json(path: Path, limit: int | None = None) -> Any:
    return parse_json(read_bytes(path, limit or LIMITS[".json"]))


def read_toml(path: Path) -> dict[str, Any]:
    return parse_toml(read_bytes(path, LIMITS[".toml"]))


def parse_json(content: bytes | str) -> Any:
    """As json.loads, with limits; every fault is a ValueError. NaN and infinities are let through: runs write them."""
    text = _text(content) if isinstance(content, bytes) else content
    try:
        value = json.loads(text, parse_int=_integer if _MANY_DIGITS.search(text) else None)
        _check_depth(value)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it is nested more than {DEPTH} deep") from None
    except UnicodeEncodeError:
        raise ValueError("it holds text that is not Unicode (half of a surrogate pair)") from None
    return value


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """As tomllib.loads, with limits; every fault is a ValueError."""
    text = _text(content) if isinstance(content, bytes) else content
    try:
        value = tomllib.loads(text)
        _check_depth(value)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEPTH} deep") from None
    if _MANY_DIGITS.search(text):
        _check_integers(value)
    return value


def parse_lines(content: bytes) -> Iterator[tuple[int, Any | ValueError]]:
    """The number of each line that is not empty, and its JSON value, or what is wrong with it."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                yield number, error


def check_regular(path: Path) -> None:
    """For files that other libraries open by their path; as `open_regular`, and links are followed."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise RefusedFile(path, f"is {_kind(mode)}, not a regular file")


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _integer(digits: str) -> int:
    if (length := len(digits.removeprefix("-"))) > DIGITS:
        raise ValueError(f"it holds an integer of {length} digits, and at most {DIGITS} are read")
    return int(digits)


def _check_integers(value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**DIGITS:
        raise ValueError(f"it holds an integer of more than {DIGITS} digits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(inner)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for outer in level
            if type(outer) in (dict, list)
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEPTH} deep")


# Writing --------------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes, mode: int = 0o666, check: Callable[[], None] = lambda: None) -> None:
    """Replace the file in one move; `mode` as for `os.open`, `check` as in `replacing`."""
    with replacing(path, mode, check) as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, indented_json(content))


def indented_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def write_text(path: Path, content: str, mode: int = 0o666) -> None:
    """UTF-8; what is not Unicode (the name of a file that is not UTF-8) becomes a question mark."""
    write_atomically(path, content.encode("utf-8", "replace"), mode)


@contextmanager
def replacing(path: Path, mode: int = 0o666, check: Callable[[], None] = lambda: None) -> Iterator[IO[bytes]]:
    """A new file for the block to fill: at its end the file is on the disk and in the place of `path`.

    `check` is called once the new file exists: in a folder that is replaced after that, the rename does not find it.
    """
    # The rename would replace a device or a FIFO; also a link to one, as /dev/stdout is.
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(kind := path.stat().st_mode):
            raise RefusedFile(path, f"is {_kind(kind)}, not a regular file")
    for leftover in path.parent.glob("*.tmp"):
        if leftover.name not in _BEING_WRITTEN and _is_torn(leftover.name):
            with suppress(OSError):
                leftover.unlink()
    beside = path.with_name(f"{path.name}.{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    _BEING_WRITTEN.add(beside.name)
    try:
        with open_new(beside, mode) as file:
            check()
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    finally:
        _BEING_WRITTEN.discard(beside.name)
    sync_folder(path.parent)


def open_new(path: Path, mode: int = 0o666, buffering: int = -1) -> IO[bytes]:
    """A file that is not there yet, for writing and reading; FileExistsError also for a link that leads nowhere."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOT_FOLLOWED | _COMMON
    return os.fdopen(os.open(path, flags, mode), "w+b", buffering)


def open_log(path: Path) -> IO[bytes]:
    """A new file in the place of the last one, for what a process says."""
    path.unlink(missing_ok=True)
    return open_new(path)


def open_in_place(path: Path, mode: Literal["ab", "r+b"], buffering: int = -1) -> IO[bytes]:
    """A regular file without links of any kind: "ab" writes at its end or creates it, "r+b" changes one that exists."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT if mode == "ab" else os.O_RDWR
    try:
        descriptor = os.open(path, flags | _NOT_FOLLOWED | _NOT_WAITING | _COMMON, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # EMLINK on FreeBSD
            raise RefusedFile(path, "is a symbolic link, and nothing is written through one") from error
        if error.errno == errno.ENXIO:  # a FIFO without a reader, a socket
            raise RefusedFile(path, "is not a regular file") from error
        raise
    try:
        check_in_place(path, os.fstat(descriptor))
    except RefusedFile:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, mode, buffering)


def check_in_place(path: Path, status: os.stat_result | None = None) -> None:
    """RefusedFile if the file exists and is not a regular one, or has a second name. `status`: of the open file.

    For lock files, which FileLock opens and creates itself.
    """
    with suppress(FileNotFoundError):
        status = path.lstat() if status is None else status
        if not stat.S_ISREG(status.st_mode):
            raise RefusedFile(path, f"is {_kind(status.st_mode)}, not a regular file")
        if status.st_nlink > 1:
            reason = "is a hard link: the file has another name, too, and is not written (a copy of it is)"
            raise RefusedFile(path, reason)


def append_line(path: Path, line: str, check: Callable[[], None] = lambda: None) -> None:
    """`check` is called once the file is open: a folder that is replaced after that leaves the open file behind."""
    with open_in_place(path, "ab") as file:
        check()
        file.write(line.encode() + b"\n")


def make_folder(folder: Path, within: Path, mode: int = 0o777) -> None:
    """The folder and those above it, as far as they lie below `within`, which the user named and may be a link."""
    within.mkdir(parents=True, exist_ok=True)
    check_folder(folder, within)
    folder.mkdir(mode, parents=True, exist_ok=True)


def check_folder(folder: Path, within: Path) -> None:
    """RefusedFile if one of the folders between `within` and this one is there and is not a real folder."""
    below = within
    for name in folder.relative_to(within).parts:
        below = below / name
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(mode := below.lstat().st_mode):
                raise RefusedFile(below, f"is {_kind(mode)}, and files are written into real folders only")


def refuse_links(folder: Path) -> None:
    """RefusedFile if anything below the folder, or the folder itself, is a link: for what other programs write into."""
    pending = [folder]
    while pending:
        with suppress(FileNotFoundError):
            if pending[-1].is_symlink():
                raise RefusedFile(pending[-1], "is a symbolic link, and files are written into real folders only")
            with os.scandir(pending.pop()) as entries:
                pending += [Path(entry.path) for entry in entries if entry.is_symlink() or entry.is_dir()]


def sync_folder(folder: Path) -> None:
    """Make a rename durable; Windows can neither open folders nor needs to."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY | _COMMON)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:6]  # processes of other machines may share a folder
_BEING_WRITTEN: set[str] = set()  # by this process
_TORN = re.compile(rf".+\.{_HOST}-(\d+)-[0-9a-f]{{8}}\.tmp")


def _is_torn(name: str) -> bool:
    """Whether a killed process of this machine has left the file half written."""
    torn = _TORN.fullmatch(name)
    if os.name == "nt" or torn is None:  # os.kill has another meaning on Windows
        return False
    process = int(torn[1])
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass  # it is alive, and of another user
    return False


def _kind(mode: int) -> str:
    return next((name for is_it, name in _KINDS if is_it(mode)), "no file")


# For the user ---------------------------------------------------------------------------------------------------------


@contextmanager
def writing_to(folder: Path, instead: str = ANOTHER_FOLDER) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into one clear line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
        way_out = {
            errno.ENOSPC: "free some space, then resume it or call the same command again: finished rounds are safe",
            errno.EDQUOT: "free some space, then resume it or call the same command again: finished rounds are safe",
            errno.EFBIG: "the file size limit is too small for this run",
            errno.EMFILE: "allow more open files (ulimit -n)",
        }.get(error.errno or 0, instead)
        raise UserError(f"cannot write to {folder}: {reason}; {way_out}") from error


@contextmanager
def writing_output(file: Path, within: Path | None = None) -> Iterator[None]:
    """Makes the file's folder, and turns an OSError of the block into one line. `within`: the folder the user named."""
    try:
        make_folder(file.parent, within or file.parent)
        yield
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror or error}; choose another place, or make room"
        ) from error


def write_output(file: Path, content: str, within: Path | None = None) -> Path:
    """A page, a table or an archive: `write_text` with `writing_output` around it."""
    with writing_output(file, within):
        write_text(file, content)
    return file


def file_name(words: str) -> str:
    """A title or label as a part of a file's name."""
    return re.sub(r"[^a-z0-9.=]+", "-", words.lower()).strip("-.")[:60]


def as_unicode(text: str) -> str:
    """The name of a folder may be bytes that are not text; a question mark stands for each of them."""
    return text.encode("utf-8", "replace").decode()
