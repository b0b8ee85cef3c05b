"""Certificates and keys as those who check them see them: a TLS handshake, Flower's own reader, the file system."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.supernode.register import try_load_public_key

from fedgg.flower.local.certificates import Certificates, make_certificates, make_node_key


def handshake(files: Certificates, trusted: Path, name: str) -> str | None:
    """What the client says of the server it meets; None if it is content."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(files.certificate, files.key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        try:
            served.wrap_socket(connection, server_side=True).close()
        except OSError:
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=10) as plain:
            ssl.create_default_context(cafile=trusted).wrap_socket(plain, server_hostname=name).close()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        thread.join()
        listener.close()
    return None


def test_a_client_trusts_the_server_under_its_names_alone(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, ["127.0.0.1", "localhost"])
    assert files.complete
    assert handshake(files, files.authority, "127.0.0.1") is None
    assert handshake(files, files.authority, "localhost") is None
    assert "mismatch" in str(handshake(files, files.authority, "127.0.0.2"))


def test_another_authority_does_not_vouch_for_it(tmp_path: Path) -> None:
    ours = make_certificates(tmp_path / "ours", ["127.0.0.1"])
    theirs = make_certificates(tmp_path / "theirs", ["127.0.0.1"])
    assert handshake(ours, theirs.authority, "127.0.0.1") is not None


def test_secrets_are_their_owners(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certificates", ["127.0.0.1"])
    key = tmp_path / "key"
    key.write_text("an old one, open to all")
    key.chmod(0o666)
    make_node_key(key, tmp_path / "key.pub")
    assert [stat.S_IMODE(file.stat().st_mode) for file in (files.key, key)] == [0o600, 0o600]
    assert sorted(file.name for file in files.key.parent.iterdir()) == ["ca.pem", "server.key", "server.pem"]


def test_flower_reads_the_keys(tmp_path: Path) -> None:
    private, public = tmp_path / "key", tmp_path / "key.pub"
    make_node_key(private, public)
    mine = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(mine, ec.EllipticCurvePrivateKey)
    assert isinstance(mine.curve, ec.SECP384R1)
    assert load_ssh_public_key(public.read_bytes()) == mine.public_key()
    assert try_load_public_key(public)
