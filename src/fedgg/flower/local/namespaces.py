"""Isolation of the processes of a federation on one machine, with Linux namespaces: own network, hidden folders.

Private network: Flower's control API does not authenticate who submits an app, so on the machine's loopback interface
every account can run code as the owner of the federation. In a network namespace with its own loopback interface, other
accounts do not reach the ports.

Hidden folders: in its own mount namespace, a SuperNode sees the folder of its client and not those of the others, and
the SuperLink sees none of them.

Both need Linux and user namespaces (or root). Without them the federation runs in the machine's network, and file
permissions alone protect the folders.

This file is also a program, run by its path, which imports nothing but the standard library:

    python namespaces.py network HOST                   create a private network, hold it until standard input is closed
    python namespaces.py join DESCRIPTORS -- COMMAND     run a command in a private network
    python namespaces.py hide FOLDER [VISIBLE] -- COMMAND     run a command to which FOLDER is empty except for VISIBLE
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NEW_MOUNTS, NEW_USER, NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000  # unshare(2)
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18  # mount(2)
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # netdevice(7)
DROP_CAPABILITY = 24  # prctl(2)
ESCAPING_CAPABILITIES = (19, 21)  # CAP_SYS_PTRACE and CAP_SYS_ADMIN: trace other processes, and unmount
READY = "ready"
SECONDS_TO_END = 20.0
HIDING_UNAVAILABLE = "fedgg: this system does not allow mount namespaces"


# Private network ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrivateNetwork:
    """A network namespace; it exists while these descriptors are open or a process is in it."""

    descriptors: tuple[int, ...]  # of the user namespace, if a new one was needed, and of the network namespace

    def inside(self, command: list[str]) -> list[str]:
        """The command line that runs a command in this network; pass the descriptors to it with `pass_fds`."""
        return [sys.executable, str(Path(__file__)), "join", ",".join(map(str, self.descriptors)), "--", *command]


@dataclass(frozen=True)
class Unavailable:
    """Why there is no private network."""

    why: str


@contextmanager
def private_network(host: str) -> Iterator[PrivateNetwork | Unavailable]:
    """A private network in which a server can listen on this loopback address."""
    if sys.platform != "linux":
        yield Unavailable(f"{sys.platform} has no network namespaces")
        return
    creator = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "network", host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    descriptors: list[int] = []
    try:
        assert creator.stdout is not None
        output = creator.stdout.readline().strip()
        if output.partition(" ")[0] == READY:
            for kind in output.split()[1:]:
                descriptors.append(os.open(f"/proc/{creator.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
            network: PrivateNetwork | Unavailable = PrivateNetwork(tuple(descriptors))
        else:
            network = Unavailable(output or "the process that creates it ended without output")
    except OSError as error:
        network = Unavailable(str(error.strerror or error))
    finally:
        try:
            creator.communicate(timeout=SECONDS_TO_END)  # closes its standard input, which ends it
        except subprocess.TimeoutExpired:
            creator.kill()
            creator.communicate()
    try:
        yield network
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _create_network(host: str) -> None:
    """Move this process into a new network; print which namespaces were created."""
    import fcntl  # not on every system

    kinds = ["net"]
    try:
        _unshare(NEW_NETWORK)
    except PermissionError:
        _unshare_with_user(NEW_NETWORK)
        kinds = ["user", "net"]  # the order in which they must be joined
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, GET_FLAGS, name))[1]
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", flags | UP))
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as server, socket.socket(family, socket.SOCK_STREAM) as client:
        server.bind(address)
        server.listen()
        client.settimeout(5)
        client.connect(server.getsockname())
    print(READY, *kinds, flush=True)
    sys.stdin.read()


def _join_network(descriptors: list[int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in descriptors:
        _check(libc.setns(descriptor, 0))
        os.close(descriptor)


# Hidden folders -------------------------------------------------------------------------------------------------------


def hiding(folder: Path, visible: Path | None = None) -> list[str]:
    """The beginning of a command line: the command after it sees of `folder` only `visible`, a folder below it."""
    folders = [str(folder)] if visible is None else [str(folder), str(visible)]
    return [sys.executable, str(Path(__file__)), "hide", *folders, "--"]


def hiding_available(folder: Path) -> bool:
    """Whether this system allows mount namespaces."""
    trial = subprocess.run([*hiding(folder), sys.executable, "-c", ""], capture_output=True, text=True)
    return HIDING_UNAVAILABLE not in trial.stderr


def _hide(folder: str, visible: str | None) -> None:
    """Mount an empty file system over `folder`, and `visible` again at its path."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str | None, flags: int) -> None:
        arguments = [None if argument is None else os.fsencode(argument) for argument in (source, target, kind)]
        _check(libc.mount(*arguments, ctypes.c_ulong(flags), None))

    is_root = os.getuid() == 0
    if is_root:
        _unshare(NEW_MOUNTS)
    else:
        _unshare_with_user(NEW_MOUNTS)
    mount("none", "/", None, RECURSIVE | PRIVATE)  # mounts made here do not appear in other namespaces
    descriptor = None if visible is None else os.open(visible, os.O_PATH | os.O_DIRECTORY)
    mount("none", folder, "tmpfs", 0)
    if visible is not None and descriptor is not None:
        Path(visible).mkdir(mode=0o700, parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", visible, None, BIND | RECURSIVE)
        os.close(descriptor)
    if is_root:
        for capability in ESCAPING_CAPABILITIES:
            _check(libc.prctl(DROP_CAPABILITY, capability, 0, 0, 0))


# Namespaces -----------------------------------------------------------------------------------------------------------


def _unshare(namespaces: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).unshare(namespaces))


def _unshare_with_user(namespaces: int) -> None:
    """For an ordinary user: together with a user namespace in which user and group keep their ids."""
    user, group = os.getuid(), os.getgid()
    _unshare(NEW_USER | namespaces)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _check(result: int) -> None:
    """OSError (or its subclass, such as PermissionError) if a system call failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _main(action: str, *arguments: str) -> None:
    if action == "network":
        try:
            _create_network(arguments[0])
        except OSError as error:
            reasons = {errno.EPERM: "network namespaces are not allowed", errno.ENOSPC: "too many namespaces"}
            print(reasons.get(error.errno or 0, str(error.strerror or error)), flush=True)
        return
    separator = arguments.index("--")
    options, command = arguments[:separator], arguments[separator + 1 :]
    if action == "join":
        _join_network([int(descriptor) for descriptor in options[0].split(",")])
    elif sys.platform == "linux":
        try:
            _hide(options[0], options[1] if len(options) > 1 else None)
        except OSError as error:
            print(f"{HIDING_UNAVAILABLE} ({error})", file=sys.stderr)
    else:
        print(HIDING_UNAVAILABLE, file=sys.stderr)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(*sys.argv[1:])
