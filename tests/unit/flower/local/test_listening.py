"""The SuperLink does not listen beyond this machine without TLS and authentication unless the user asks for it."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("flwr")

from fedgg.errors import UserError
from fedgg.flower.local.setup import Listening, free_ports, is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
@pytest.mark.parametrize("tls", [True, False])
def test_refuses_to_listen_unprotected_beyond_loopback(host: str, tls: bool) -> None:
    with pytest.raises(UserError, match=f"refused to listen on {host}.*--insecure-beyond-loopback"):
        Listening(host, tls=tls, authentication=False)
    assert Listening(host, tls=tls, authentication=False, unprotected_beyond_loopback=True).host == host
    assert Listening(host).authentication


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_may_be_unprotected(host: str) -> None:
    assert is_loopback(host)
    assert not Listening(host, tls=False, authentication=False).tls


def test_authentication_needs_tls() -> None:
    with pytest.raises(UserError, match="also give --no-authentication"):
        Listening(tls=False)


def test_nodes_here_reach_a_server_that_listens_everywhere() -> None:
    everywhere = Listening("0.0.0.0")
    assert everywhere.reached_at == "127.0.0.1"
    assert "127.0.0.1" in everywhere.names
    assert socket.gethostname() in everywhere.names
    assert "0.0.0.0" not in everywhere.names


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 203\.0\.113\.7"):
        free_ports("203.0.113.7", 1)
