"""A network that only the processes of one federation are in: a network namespace with a loopback interface.

Flower's control API asks no one who submits an app for a password, so that on a shared loopback interface every account
of the machine can run code as the owner of the federation. In a namespace of its own, other accounts do not reach the
port. Linux only, and where the system allows user namespaces (or the user is root).

    python private_network.py make HOST                     makes one, says so, and waits until its input is closed
    python private_network.py join DESCRIPTORS -- COMMAND   runs a command in it

This file is run by its path and needs nothing but Python.
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

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # unshare(2)
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # netdevice(7)
READY = "ready"
PATIENCE = 20.0  # seconds to make one


@dataclass(frozen=True)
class PrivateNetwork:
    """Its namespaces, held open: they exist as long as a process is in them or this one lives."""

    descriptors: tuple[int, ...]  # of the user namespace, where it has one of its own, and of the network namespace

    def inside(self, command: list[str]) -> list[str]:
        """The command that runs there; the descriptors must be passed on to it (`pass_fds`)."""
        words = ",".join(map(str, self.descriptors))
        return [sys.executable, str(Path(__file__)), "join", words, "--", *command]


@dataclass(frozen=True)
class Unavailable:
    """There is no private network, and why."""

    why: str


@contextmanager
def private_network(host: str) -> Iterator[PrivateNetwork | Unavailable]:
    """A network in which this address of the loopback interface can be listened on, if the system gives one."""
    if sys.platform != "linux":
        yield Unavailable(f"{sys.platform} has no network namespaces")
        return
    maker = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "make", host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    descriptors: list[int] = []
    try:
        assert maker.stdout is not None
        answer = maker.stdout.readline().strip()
        if answer.partition(" ")[0] == READY:
            for kind in answer.split()[1:]:
                descriptors.append(os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
            network: PrivateNetwork | Unavailable = PrivateNetwork(tuple(descriptors))
        else:
            network = Unavailable(answer or "it ended without a word")
    except OSError as error:
        network = Unavailable(str(error.strerror or error))
    finally:
        try:
            maker.communicate(timeout=PATIENCE)  # closes its input, which is what it waits for
        except subprocess.TimeoutExpired:
            maker.kill()
            maker.communicate()
    try:
        yield network
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _make(host: str) -> None:
    """From here on this process is in a network of its own; says which namespaces that takes."""
    import fcntl  # not everywhere

    kinds = ["net"]
    try:
        _unshare(NEW_NETWORK)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        _unshare(NEW_USER | NEW_NETWORK)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        kinds = ["user", "net"]  # in this order they are joined
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


def _unshare(namespaces: int) -> None:
    _must(ctypes.CDLL(None, use_errno=True).unshare(namespaces))


def _join(descriptors: list[int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in descriptors:
        _must(libc.setns(descriptor, 0))
        os.close(descriptor)


def _must(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))  # PermissionError where it is one


def main() -> None:
    if sys.argv[1] == "make":
        try:
            _make(sys.argv[2])
        except OSError as error:
            reasons = {errno.EPERM: "it allows no network namespace", errno.ENOSPC: "it allows no more namespaces"}
            print(reasons.get(error.errno or 0, str(error.strerror or error)), flush=True)
        return
    dashes = sys.argv.index("--")
    _join([int(descriptor) for descriptor in sys.argv[2].split(",")])
    command = sys.argv[dashes + 1 :]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
