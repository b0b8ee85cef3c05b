"""File locks: exclusive use of a folder among processes, checked again before each write.

A lock is held on an open file, not on its name: after the folder was removed and made again, the file of that name is
another one, which another process can lock. `LockFile.check` compares the two.
"""

from __future__ import annotations

import errno
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from fedgg.errors import UserError
from fedgg.files import check_in_place, writing_to

SHORT = 0.25  # seconds; longer than `is_held_elsewhere` of another process holds a lock
FOREVER = -1.0  # as a timeout
PAGE_TIMEOUT = 600.0  # seconds; the page of a large study takes one minute
POLL = 0.02  # seconds between two attempts
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class InUse(UserError):
    """Another process holds the lock."""


class LockLost(UserError):
    """The locked file is no longer the one in the folder."""


class LockFile:
    """One lock file. The lock is released when its process ends, even by a kill; the file itself stays."""

    def __init__(self, path: Path, mode: int | None = None):
        self.path = path
        # Not thread-local: a run may be closed by another thread than the one that opened it.
        if mode is None:
            self._lock = FileLock(path, thread_local=False)
        else:
            self._lock = FileLock(path, mode=mode, thread_local=False)

    def acquire(self, timeout: float = SHORT) -> bool:
        """Whether it is held now; waits up to so many seconds for another holder."""
        check_in_place(self.path)
        while True:
            try:
                self._lock.acquire(timeout=timeout, poll_interval=POLL)
            except Timeout:
                return False
            try:
                self.check()
                return True
            except LockLost:
                self._lock.release()  # the file was replaced while it was being locked

    def release(self) -> None:
        self._lock.release()

    def check(self) -> None:
        """LockLost if it is not held, or the folder was removed or replaced since. Costs two system calls."""
        descriptor = self._lock._context.lock_file_fd
        try:
            is_current = descriptor is not None and os.path.samestat(os.fstat(descriptor), self.path.stat())
        except OSError as error:
            if error.errno not in GONE:
                raise
            is_current = False
        if not is_current:
            raise LockLost(
                f"{self.path.parent} was removed or replaced while this process worked in it, so nothing more is "
                f"written there: start again, in a folder that no other process removes"
            )

    def is_held_elsewhere(self) -> bool:
        """Whether another process holds it; tested by acquiring it for a moment."""
        if not self.path.exists():
            return False
        if not self.acquire(timeout=0):
            return True
        self.release()
        return False


def check_locking(folder: Path) -> None:
    """UserError where the file system has no locks, so that two processes could work on the same run."""
    path = folder / f".lock-test-{secrets.token_hex(8)}"
    first, second = LockFile(path), LockFile(path)
    try:
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of filelock, which takes the existence of the file for the lock
            is_locked = first.acquire() and not second.acquire(timeout=0)
        reason = "" if is_locked and not isinstance(first._lock, SoftFileLock) else "flock is not supported"
    except NotImplementedError:  # of a filelock that does not take the existence of the file for the lock
        reason = "flock is not supported"
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        reason = error.strerror or str(error)
    finally:
        for lock in (second, first):
            with suppress(OSError):
                lock.release()
        with suppress(OSError):
            path.unlink(missing_ok=True)
    if reason:
        raise UserError(
            f"{folder} cannot be shared by several jobs: its file system has no file locks ({reason}); choose a folder "
            f"on another one"
        )


@contextmanager
def writing_pages(folder: Path, notice: Callable[[str], None] = lambda sentence: None) -> Iterator[None]:
    """Lets one process at a time read the runs of a folder and write its tables and page: the last one includes all."""
    lock = LockFile(folder / "report.lock")
    with suppress(OSError):  # where nothing can be written, writing the page fails with its own message
        if folder.is_dir() and not lock.acquire(SHORT):
            notice(f"another process is writing the tables and the page of {folder}; waiting for it")
            if not lock.acquire(PAGE_TIMEOUT):
                raise InUse(
                    f"another process has held {lock.path} for {PAGE_TIMEOUT:.0f} s: stop it, then call this again"
                )
    try:
        yield
    finally:
        lock.release()
