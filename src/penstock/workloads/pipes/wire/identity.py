"""Who belongs to a network: whoever has its key.

The key makes a certificate authority, the same in every process that has it, and that signs a
certificate for each process with the node's id as its name. Both sides of a connection ask for
one. So whoever lacks the key can neither join nor listen, and what a node says its id is can be
checked; nodes with the key trust each other.
"""

from __future__ import annotations

import base64
import datetime
import os
import re
import secrets
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.core.errors import Misconfigured

_KEY_BYTES = 32
_KEY = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
# For ever, so that no clock has to be right: who is no longer to belong gets no new key.
_FROM = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def new_key() -> str:
    """A key for a new network: 32 random bytes as URL-safe text."""
    return secrets.token_urlsafe(_KEY_BYTES)


def check_node_id(node_id: str) -> str:
    if not _NODE_ID.fullmatch(node_id):
        raise Misconfigured(
            f"{node_id!r} can't be a node's id",
            hint="up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        )
    return node_id


@dataclass(frozen=True)
class Identity:
    """What a process shows of itself, and how it looks at others."""

    node_id: str
    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def make(cls, key: str, node_id: str) -> Identity:
        """Raises Misconfigured for a key or an id that can't be one."""
        check_node_id(node_id)
        authority_key = _authority_key(_key_bytes(key))
        authority = _authority(authority_key)
        leaf_key = Ed25519PrivateKey.generate()
        leaf = _leaf(authority, authority_key, leaf_key, node_id)
        server, client = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
        # A resumed session would gain nothing, and is one thing more to think about.
        server.num_tickets = 0
        trusted = authority.public_bytes(serialization.Encoding.PEM).decode()
        for context in (server, client):
            context.load_verify_locations(cadata=trusted)
        _load(leaf, leaf_key, server, client)
        return cls(node_id, server, client)


def node_id_of(tls: ssl.SSLObject | ssl.SSLSocket) -> str:
    """The node id in the peer's certificate, which was verified; "" if there is none."""
    shown = tls.getpeercert(binary_form=True)
    if shown is None:
        return ""
    names = x509.load_der_x509_certificate(shown).subject
    return "".join(str(name.value) for name in names.get_attributes_for_oid(NameOID.COMMON_NAME))


def _key_bytes(key: str) -> bytes:
    if not _KEY.fullmatch(key.strip()):
        raise Misconfigured("this is no network key", hint="`penstock pipe key` makes one")
    return base64.urlsafe_b64decode(key.strip() + "=")


def _authority_key(key: bytes) -> Ed25519PrivateKey:
    seed = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=b"penstock pipes: authority").derive(
        key
    )
    return Ed25519PrivateKey.from_private_bytes(seed)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: str, serial: int) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("penstock network"))
        .serial_number(serial)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(key: Ed25519PrivateKey) -> x509.Certificate:
    return (
        _builder("penstock network", serial=1)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )


def _leaf(
    authority: x509.Certificate,
    authority_key: Ed25519PrivateKey,
    key: Ed25519PrivateKey,
    node_id: str,
) -> x509.Certificate:
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())  # type: ignore[arg-type]
    return (
        _builder(node_id, serial=x509.random_serial_number())
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, None)
    )


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A node has no host name of its own; its id is compared instead (see `connection`).
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_TICKET
    return context


def _load(certificate: x509.Certificate, key: Ed25519PrivateKey, *contexts: ssl.SSLContext) -> None:
    """`ssl` reads these from a file only. What lies there for a moment is of no use to anyone:
    it is encrypted with a password that nobody is told."""
    password = secrets.token_bytes(24).hex().encode()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        file = Path(folder) / "node.pem"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(pem + certificate.public_bytes(serialization.Encoding.PEM))
        for context in contexts:
            context.load_cert_chain(file, password=password)
