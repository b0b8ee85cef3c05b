"""The private network of a federation: its processes reach each other there, other processes do not."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr")

from fedgg.flower.local.namespaces import PrivateNetwork, Unavailable, private_network
from fedgg.flower.local.setup import Listening, free_ports

HOSTS = ["127.0.0.1", "::1"]
ANSWER = """
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
print("listening", flush=True)
while True:
    server.accept()[0].close()
"""
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()"


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((request.param, 0))
        except OSError:
            pytest.skip(f"this machine has no {request.param}")
    return str(request.param)


@pytest.fixture
def network(host: str) -> Iterator[PrivateNetwork]:
    with private_network(host) as network:
        if isinstance(network, Unavailable):
            pytest.skip(f"this system has no network namespaces: {network.why}")
        yield network


def calls(host: str, port: int, network: PrivateNetwork | None) -> bool:
    """Whether another process reaches this port, in the network or outside it."""
    words = [sys.executable, "-c", CALL, host, str(port)]
    command = words if network is None else network.inside(words)
    descriptors = () if network is None else network.descriptors
    return subprocess.run(command, pass_fds=descriptors, stderr=subprocess.DEVNULL, timeout=30).returncode == 0


def listener(host: str, port: int, network: PrivateNetwork | None) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ANSWER, host, str(port)]
    command = words if network is None else network.inside(words)
    descriptors = () if network is None else network.descriptors
    process = subprocess.Popen(command, pass_fds=descriptors, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_processes_outside_do_not_reach_it(host: str, network: PrivateNetwork) -> None:
    (port,) = free_ports(host, 1)
    server = listener(host, port, network)
    try:
        assert calls(host, port, network)
        assert not calls(host, port, None)
    finally:
        ended(server)


def test_processes_inside_do_not_reach_others(host: str, network: PrivateNetwork) -> None:
    (port,) = free_ports(host, 1)
    server = listener(host, port, None)
    try:
        assert calls(host, port, None)
        assert not calls(host, port, network)
    finally:
        ended(server)


def test_it_exists_while_its_descriptors_are_open(network: PrivateNetwork) -> None:
    seen = ["sh", "-c", "readlink /proc/self/ns/net"]
    first = subprocess.run(network.inside(seen), pass_fds=network.descriptors, capture_output=True, check=True)
    time.sleep(0.2)
    again = subprocess.run(network.inside(seen), pass_fds=network.descriptors, capture_output=True, check=True)
    ours = subprocess.run(seen, capture_output=True, check=True)
    assert first.stdout == again.stdout != ours.stdout


def test_an_address_that_is_not_local_has_a_reason() -> None:
    """As on systems without network namespaces."""
    with private_network("203.0.113.9") as network:
        assert isinstance(network, Unavailable)
        assert network.why


def test_when_a_private_network_is_used() -> None:
    assert Listening().may_be_private
    assert Listening("::1").may_be_private
    assert not Listening(shared_network=True).may_be_private
    assert not Listening("0.0.0.0").may_be_private
