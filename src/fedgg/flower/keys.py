"""Keys by which nodes prove who they are: ECDSA on P-384, as `ssh-keygen -t ecdsa -b 384` makes them."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedgg.files import write_atomically

PRIVATE = 0o600  # from its first moment on, never readable by others


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def make_node_key(private: Path, public: Path) -> None:
    """The private half for its owner's eyes only; the public half is what the server is told."""
    key = new_key()
    write_atomically(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), PRIVATE)
    write_atomically(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return content
