"""Where a federation listens, and where it refuses to."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from fedgg.errors import UserError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Listening:
    """The SuperLink's address, and how it is protected."""

    host: str = LOOPBACK
    tls: bool = True
    authentication: bool = True
    unprotected_beyond_loopback: bool = False  # said explicitly
    shared_network: bool = False  # said explicitly: other accounts of this machine reach it, too

    def __post_init__(self) -> None:
        if self.authentication and not self.tls:
            raise UserError("nodes prove who they are over TLS only: with --no-tls say --no-authentication too")
        unprotected = [
            word for word, there in (("TLS", self.tls), ("authentication", self.authentication)) if not there
        ]
        if unprotected and not is_loopback(self.host) and not self.unprotected_beyond_loopback:
            raise UserError(
                f"refused to listen on {self.host} without {' and '.join(unprotected)}: everybody who reaches it could "
                f"join or read along; leave --host at {LOOPBACK}, or say --insecure-beyond-loopback"
            )

    @property
    def may_be_private(self) -> bool:
        """Whether a network of its own is wanted: what is reached from other machines cannot have one."""
        return is_loopback(self.host) and not self.shared_network

    @property
    def reached_at(self) -> str:
        """The address that nodes on this machine use."""
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)

    @property
    def names(self) -> list[str]:
        """Everything the server's certificate must say it is."""
        own = [] if is_loopback(self.host) else [socket.gethostname(), socket.getfqdn()]
        wanted = ["localhost", LOOPBACK, "::1", self.host, *own]
        return list(dict.fromkeys(name for name in wanted if name not in ("0.0.0.0", "::")))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it; a name that is not known is not trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                probe.bind((host, 0))
            except OSError as error:
                raise UserError(f"cannot listen on {host}: {error.strerror}; choose another --host") from error
            ports.append(int(probe.getsockname()[1]))
        return ports
