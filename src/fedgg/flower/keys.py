"""Keys by which nodes prove who they are: ECDSA on P-384, as `ssh-keygen -t ecdsa -b 384` makes them."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def make_node_key(private: Path, public: Path) -> None:
    """The private half for its owner's eyes only; the public half is what the server is told."""
    key = new_key()
    write_private(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return content


def write_private(file: Path, content: bytes) -> None:
    """Never readable by others, not even for the moment between being written and being closed off."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
        handle.write(content)
