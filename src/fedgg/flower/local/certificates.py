"""TLS certificates and node keys (ECDSA, P-384) for a federation on one machine.

They are created for each start of the federation. The key of the certificate authority is not written to disk, so no
other certificate can be signed with it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedgg.files import write_atomically

PRIVATE = 0o600  # set when the file is created, so that it is at no time readable by others


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def make_node_key(private: Path, public: Path) -> None:
    """The private key, readable by its owner alone, and the public key for the server."""
    key = _new_key()
    write_atomically(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), PRIVATE)
    write_atomically(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return content


VALID_FOR = timedelta(days=365)
BEFORE_NOW = timedelta(minutes=5)  # for clocks of other machines that are slow


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority's certificate, which each node gets, and the server's certificate and key."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def within(cls, folder: Path) -> Certificates:
        return cls(folder / "ca.pem", folder / "server.pem", folder / "server.key")

    @property
    def complete(self) -> bool:
        return all(file.is_file() for file in (self.authority, self.certificate, self.key))


def make_certificates(folder: Path, addresses: Sequence[str]) -> Certificates:
    """For a server that is reached under these host names and IP addresses."""
    files = Certificates.within(folder)
    authority_key, server_key = _new_key(), _new_key()
    authority = _authority(authority_key)
    server = (
        _builder("fedgg federation", server_key)
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName([_general_name(address) for address in addresses]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA384())
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(files.authority, _pem(authority))
    write_atomically(files.certificate, _pem(server))
    write_atomically(files.key, _private_pem(server_key), PRIVATE)
    return files


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    may_sign = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder("fedgg authority", key)
        .issuer_name(_name("fedgg authority"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(may_sign, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _builder(name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEFORE_NOW)
        .not_valid_after(now + VALID_FOR)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(address: str) -> x509.GeneralName:
    """An IP address or else a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _pem(certificate: x509.Certificate) -> bytes:
    content: bytes = certificate.public_bytes(Encoding.PEM)
    return content
