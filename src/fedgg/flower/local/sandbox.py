"""Runs a command in a view of the disk in which one folder is empty but for what lies in another below it.

    python cell.py HIDDEN [OWN] -- COMMAND ...

Each node of a federation on one machine is started so: it sees its own folder and no other node's; and the server is,
which sees none of them. Linux only; a system that does not allow it runs the command as it is, and then the folders'
permissions are all that keeps nodes apart. This file is run by its path and needs nothing but Python.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000  # unshare(2)
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18  # mount(2)
DROP_BOUND = 24  # prctl(2)
REFUSED = "fedgg: this system allows no view of the disk of its own"
UNDO = (19, 21)  # capabilities that could look around the cell: tracing others, and unmounting


def enter(hidden: str, own: str | None) -> None:
    """From here on, `hidden` holds nothing but the way to `own`, if there is one."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def mount(source: str, target: str, kind: str | None, flags: int) -> None:
        words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
        must(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), None))

    user, group = os.getuid(), os.getgid()
    if user == 0:
        must(libc.unshare(NEW_MOUNTS))
    else:
        must(libc.unshare(NEW_USER | NEW_MOUNTS))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    mount("none", "/", None, RECURSIVE | PRIVATE)  # nobody else sees what is mounted here
    held = None if own is None else os.open(own, os.O_PATH | os.O_DIRECTORY)
    mount("none", hidden, "tmpfs", 0)
    if own is not None and held is not None:
        Path(own).mkdir(mode=0o700, parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{held}", own, None, BIND | RECURSIVE)
        os.close(held)
    if user == 0:
        for capability in UNDO:
            must(libc.prctl(DROP_BOUND, capability, 0, 0, 0))


def _write(file: str, content: str) -> None:
    Path(file).write_text(content)


def main() -> None:
    dashes = sys.argv.index("--")
    (hidden, *own), command = sys.argv[1:dashes], sys.argv[dashes + 1 :]
    if sys.platform == "linux":
        try:
            enter(hidden, own[0] if own else None)
        except OSError as error:
            print(f"{REFUSED} ({error})", file=sys.stderr)
    else:
        print(REFUSED, file=sys.stderr)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
