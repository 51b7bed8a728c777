"""TLS 1.3 between machines: certificates, contexts, and TLS over bytes that someone else carries.

asyncio and uvloop have TLS of their own. With this one the peer is always told why it is refused,
a connection can be ended during its handshake, and both loops behave the same.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import secrets
import ssl
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

# For ever, so that no clock has to be right: what is not to be valid any more is revoked.
ALWAYS = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
FOREVER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class Tls:
    """One side of one connection. Whatever it is asked may leave bytes to be `taken` and sent;
    ssl.SSLError leaves the alert that tells the peer."""

    def __init__(
        self, context: ssl.SSLContext, *, server_side: bool, hostname: str | None = None
    ) -> None:
        """`hostname`: the name that the server's certificate must have, if the context checks."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=hostname
        )
        self.ready = False
        """Whether the handshake is over."""
        self.over = False
        """Whether the peer said that nothing more will come."""

    def shake(self) -> bool:
        """Go on with the handshake; whether it is over."""
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.ready = True
        return self.ready

    def feed(self, data: bytes | memoryview) -> None:
        self._incoming.write(data)

    def read(self, into: memoryview) -> int:
        """How many bytes were put there: 0 if there are none, or only a part of a record."""
        # To ask is much cheaper than SSLWantReadError.
        if not self._incoming.pending and not self._tls.pending():
            return 0
        try:
            # With a buffer it is a number; typeshed knows only the other form.
            count = cast(int, self._tls.read(len(into), into))
        except ssl.SSLWantReadError:
            return 0
        self.over = count == 0
        return count

    def write(self, data: bytes | memoryview) -> None:
        self._tls.write(data)

    def finish(self) -> None:
        """Nothing more will be written."""
        # It would wait for the peer to say the same, and need not.
        with suppress(ssl.SSLError):
            self._tls.unwrap()

    def take(self) -> bytes:
        """What is to be sent."""
        return self._outgoing.read()

    @property
    def peer(self) -> bytes | None:
        """The peer's certificate (DER), which was verified; None if it has shown none."""
        return self._tls.getpeercert(binary_form=True)


PEER_CERTIFICATE = "peer_certificate"
"""What `get_extra_info` of a SecureTransport calls it: DER, or None."""
_READ = 256 << 10
_PIECE = 256 << 10
"""How much of a large message is encrypted before it is handed on."""
_LINGER = 1.0
"""Seconds in which the peer of a failed connection can read why."""


class SecureTransport(asyncio.Protocol):
    """TLS between a socket and a protocol: to the socket it is the protocol, to that the transport.

    The protocol is connected from the start, so that it can end the handshake; it must not write
    before `secured`.
    """

    def __init__(self, protocol: asyncio.Protocol, tls: Tls, *, server_side: bool) -> None:
        self._protocol, self._tls, self._server_side = protocol, tls, server_side
        self._raw: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(_READ))
        self._is_finished = False
        """Whether nothing more is read or written."""
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self.secured: asyncio.Future[None] = self._loop.create_future()
        """Done when the handshake is over; the error if it failed."""
        self.gone = asyncio.Event()
        """Set when the socket is closed: after a failure, a moment later than the protocol is told
        of it."""

    @property
    def is_secured(self) -> bool:
        return self._tls.ready

    # -- what the socket's transport calls -----------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._protocol.connection_made(cast(asyncio.Transport, self))
        if not self._server_side:
            self._tls.shake()
            self._flush()

    def data_received(self, data: bytes) -> None:
        if self._is_finished:
            return  # read only so that the peer gets to what it was told
        try:
            self._tls.feed(data)
            if not self._tls.ready:
                is_ready = self._tls.shake()
                self._flush()
                if not is_ready:
                    return
                if not self.secured.done():
                    self.secured.set_result(None)
            while not self.is_closing() and (count := self._tls.read(self._buffer)):
                self._protocol.data_received(bytes(self._buffer[:count]))
        except ssl.SSLError as error:
            self._fail(error)
        else:
            if self._tls.over:
                self.close()

    def _fail(self, error: ssl.SSLError) -> None:
        """The peer is told, and has a moment to read it."""
        self._flush()
        self._end(error)
        self._half_close()
        if self._raw is not None:
            self._loop.call_later(_LINGER, self._raw.abort)

    def _end(self, error: Exception | None) -> None:
        """The protocol is told, once."""
        if self._is_over:
            return
        self._is_over = self._is_finished = True
        if not self.secured.done():
            self.secured.set_exception(error or ConnectionError("end of stream"))
            self.secured.exception()  # perhaps nobody waits for it
        self._protocol.connection_lost(error)

    def _half_close(self) -> None:
        if self._raw is not None:
            with suppress(OSError, RuntimeError):
                self._raw.write_eof()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
        self._end(error)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def _flush(self) -> None:
        if self._raw is not None and (data := self._tls.take()):
            self._raw.write(data)

    # -- what the protocol calls ---------------------------------------------------------------

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            self._tls.write(view[start : start + _PIECE])
            self._flush()

    def is_closing(self) -> bool:
        return self._is_finished or self._raw is None or self._raw.is_closing()

    def close(self) -> None:
        if self._raw is not None and not self._raw.is_closing():
            if self._tls.ready:
                self._tls.finish()
                self._flush()
            self._raw.close()

    def finish(self) -> None:
        """Nothing more is written. The socket is left open for the peer to read what was, and to
        close it: closed with bytes unread, the system would drop what is still under way."""
        self._is_finished = True
        self._tls.finish()
        self._flush()
        self._half_close()

    def abort(self) -> None:
        if self._raw is not None:
            self._raw.abort()

    def get_write_buffer_size(self) -> int:
        return 0 if self._raw is None else self._raw.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int) -> None:
        if self._raw is not None:
            self._raw.set_write_buffer_limits(high=high)

    def get_extra_info(self, name: str) -> Any:
        if name == PEER_CERTIFICATE:
            return self._tls.peer if self._tls.ready else None
        return None if self._raw is None else self._raw.get_extra_info(name)


def tls_context(protocol: int) -> ssl.SSLContext:
    """TLS 1.3 with certificates on both sides; names of hosts are not checked."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # A resumed session would gain nothing, and is one thing more to think about.
        context.num_tickets = 0
    return context


def load_leaf(
    certificate: x509.Certificate, key: Ed25519PrivateKey, *contexts: ssl.SSLContext
) -> None:
    """`ssl` reads these from a file only. What lies there for a moment is of no use to anyone:
    it is encrypted with a password that nobody is told."""
    from cryptography.hazmat.primitives import serialization

    password = secrets.token_bytes(24).hex().encode()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        file = Path(folder) / "leaf.pem"
        write_private(file, pem + pem_of(certificate))
        for context in contexts:
            context.load_cert_chain(file, password=password)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # its mode is 0600
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


# -- certificates -----------------------------------------------------------------------------


def new_private_key() -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate()


def pem_of(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: Ed25519PrivateKey) -> bytes:
    """Not encrypted: for a file that only its owner can read."""
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def fingerprint(pem: bytes) -> bytes:
    """SHA-256 of a certificate: the first one of the file, if there are several."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    return x509.load_pem_x509_certificates(pem)[0].fingerprint(hashes.SHA256())


def common_name(certificate: bytes) -> str:
    """The common name in a certificate (DER); "" if there is none."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    names = x509.load_der_x509_certificate(certificate).subject
    return "".join(str(name.value) for name in names.get_attributes_for_oid(NameOID.COMMON_NAME))


def serial_of(certificate: bytes) -> str:
    """The serial number of a certificate (DER), as hexadecimal digits."""
    from cryptography import x509

    return f"{x509.load_der_x509_certificate(certificate).serial_number:x}"


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    """Whether a certificate (DER) is of this authority (PEM) itself."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    signer = x509.load_pem_x509_certificate(authority)
    try:
        x509.load_der_x509_certificate(certificate).verify_directly_issued_by(signer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


class Authority:
    """Signs certificates: its own, and those of members."""

    def __init__(self, key: Ed25519PrivateKey, name: str) -> None:
        self._key, self._name = key, name
        self.pem = pem_of(self._self_signed())
        """Its own certificate: always the same for a key and a name."""

    def _self_signed(self) -> x509.Certificate:
        from cryptography import x509

        public = self._key.public_key()
        return (
            self._builder(self._name, 1, FOREVER)
            .public_key(public)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, None)
        )

    def sign(
        self,
        public: Ed25519PublicKey,
        name: str,
        *,
        server: bool,
        client: bool,
        until: datetime.datetime = FOREVER,
    ) -> x509.Certificate:
        """A certificate of `name`, good for a server, for a client or for both."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        purposes: Sequence[x509.ObjectIdentifier] = [
            *([ExtendedKeyUsageOID.SERVER_AUTH] if server else []),
            *([ExtendedKeyUsageOID.CLIENT_AUTH] if client else []),
        ]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            self._builder(name, x509.random_serial_number(), until)
            .public_key(public)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, None)
        )

    def _builder(
        self, subject: str, serial: int, until: datetime.datetime
    ) -> x509.CertificateBuilder:
        from cryptography import x509

        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(self._name))
            .serial_number(serial)
            .not_valid_before(ALWAYS)
            .not_valid_after(until)
        )


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

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


def new_request(key: Ed25519PrivateKey, name: str) -> bytes:
    """A request for a certificate (DER)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
    return builder.sign(key, None).public_bytes(serialization.Encoding.DER)


def requested_key(request: bytes) -> Ed25519PublicKey:
    """The key in a request that was signed with it. Raises ValueError for any other bytes."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        asked = x509.load_der_x509_csr(request)
        public = asked.public_key()
        valid = asked.is_signature_valid and isinstance(public, Ed25519PublicKey)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not valid:
        raise ValueError("the request is not signed by an Ed25519 key")
    return cast("Ed25519PublicKey", public)


def key_digest(public: Ed25519PublicKey) -> str:
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()
