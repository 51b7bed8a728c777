"""Join tokens, and the certificates of workers on other machines.

Only the SHA-256 of a token's secret is kept. A worker that joins makes a key and sends a request
for a certificate; what is kept of it is its serial number. A worker whose answer was lost may send
the same request with the same token again.
"""

from __future__ import annotations

import asyncio
import builtins
import datetime
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.control.guard import Guard
from penstock.control.ledger import Ledger
from penstock.core.check import DAY, MAX_WAIT, check_name, check_number
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    StoreCorrupt,
)
from penstock.ports.clock import Clock
from penstock.ports.credentials import (
    Credentials,
    CredentialView,
    JoinToken,
    JoinTokenView,
    NewJoinToken,
)
from penstock.ports.tls import (
    Authority,
    common_name,
    fingerprint,
    is_signed_by,
    key_digest,
    pem_of,
    requested_key,
    serial_of,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

log = logging.getLogger(__name__)

T = TypeVar("T")
_TOKENS, _CREDENTIALS = "join_token/", "credential/"
_NOBODY = "0" * 64
_MAX_TOKENS = 10_000
_KEPT = 7 * DAY
"""Seconds for which a token is still listed after it has expired."""
_LOCAL = "local-"
"""How ids of workers inside an engine begin."""

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Token(Struct, frozen=True):
    info: JoinTokenView
    sha256: Digest
    joined: tuple[tuple[str, str], ...] = ()
    """(worker_id, SHA-256 of its key) of those that have used it."""

    def is_valid(self, now: float) -> bool:
        return self.info.revoked_at is None and now < self.info.expires_at


class _Credential(Struct, frozen=True):
    info: CredentialView
    previous: str = ""
    """The serial number before the last renewal, which the worker may not have received."""
    revoked: tuple[str, ...] = ()
    """Serial numbers of certificates from elsewhere that were revoked."""


@dataclass(frozen=True)
class Listener:
    """Where and as whom the engine listens for other machines."""

    own: Authority
    """Signs the certificates of workers."""
    trusted: bytes
    """The authority (PEM) of the engine's own certificate, by which workers know it."""
    check_hostname: bool
    address: str
    lifetime: float
    """Seconds for which a worker's certificate is valid."""


class CredentialRegistry:
    """All of them, in memory."""

    def __init__(self, store: Ledger, clock: Clock) -> None:
        self.store, self.clock = store, clock
        self.tokens: dict[str, _Token] = {}
        self.known: dict[str, _Credential] = {}
        self.listener: Listener | None = None
        """None while the engine does not listen for other machines."""
        self.on_revoked: Callable[[], None] = lambda: None
        """Ends connections that are not valid any more."""
        self._joining = asyncio.Lock()
        self._noting: set[asyncio.Task[None]] = set()

    async def load(self) -> bool:
        """Whether credentials have changed."""
        tokens, known = {}, {}
        for name, value in (await self.store.home.recall_all(_TOKENS)).items():
            token = _decode(name, value, _Token)
            tokens[token.info.token_id] = token
        for name, value in (await self.store.home.recall_all(_CREDENTIALS)).items():
            credential = _decode(name, value, _Credential)
            known[credential.info.worker_id] = credential
        before, self.tokens, self.known = self.known, tokens, known
        return known != before

    # -- who connects ------------------------------------------------------------------------

    def worker_of(self, certificate: bytes) -> tuple[str, Callable[[], bool]]:
        """The worker of a certificate (DER) that TLS has verified, and what tells whether it is
        still valid. Raises NotAuthenticated."""
        assert self.listener is not None
        worker_id, serial = common_name(certificate), serial_of(certificate)
        is_own = is_signed_by(certificate, self.listener.own.pem)
        if not is_own:
            _check_worker_id(worker_id)
            self._note(worker_id, serial)

        def is_valid() -> bool:
            return self._is_valid(worker_id, serial, is_own)

        if not is_valid():
            raise NotAuthenticated(
                f"the certificate of worker {worker_id} was revoked, or has expired",
                hint="join again with a new token: 'penstock worker token create' makes one",
            )
        return worker_id, is_valid

    def _is_valid(self, worker_id: str, serial: str, is_own: bool) -> bool:
        known = self.known.get(worker_id)
        if not is_own:
            return known is None or serial not in known.revoked
        if known is None or known.info.revoked_at is not None or not known.info.token_id:
            return False
        expires_at = known.info.expires_at
        is_late = expires_at is not None and self.clock.now() >= expires_at
        return serial in (known.info.serial, known.previous) and not is_late

    def _note(self, worker_id: str, serial: str) -> None:
        """Remember a certificate of somebody else's authority, so that it can be revoked."""
        if self.store.home is not self.store:
            return  # shard 0 does that when the worker connects there
        known = self.known.get(worker_id)
        if known is None or (not known.info.token_id and known.info.serial != serial):
            view = CredentialView(
                worker_id=worker_id,
                serial=serial,
                token_id="",
                created_at=self.clock.now(),
                expires_at=None,
            )
            noted = _Credential(view, revoked=known.revoked if known else ())
            self.known[worker_id] = noted
            task = asyncio.ensure_future(self._remember(noted))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    # -- who joins ---------------------------------------------------------------------------

    async def join(self, token_id: str, secret: str, worker_id: str, request: bytes) -> bytes:
        """A certificate (PEM). Raises NotAuthenticated, NotPermitted, Conflict, InvalidRequest."""
        async with self._joining:
            token = self._checked(token_id, secret)
            _check_worker_id(worker_id)
            digest = _digest_of(request)
            only = token.info.worker_id
            if only not in (None, worker_id):
                raise NotPermitted(f"this join token is for the worker {only}, not for {worker_id}")
            known = self.known.get(worker_id)
            if (worker_id, digest) in token.joined:  # its answer was lost
                if known is None or known.info.revoked_at is not None:
                    raise _invalid()
            elif token.info.used >= token.info.uses:
                raise _invalid()
            elif known is not None and known.info.revoked_at is None and only is None:
                raise Conflict(
                    f"a worker {worker_id} has joined already",
                    hint="choose another name with --id, or replace it: "
                    f"'penstock worker token create --id {worker_id}'",
                )
            else:
                used = replace(token.info, used=token.info.used + 1)
                token = replace(token, info=used, joined=(*token.joined, (worker_id, digest)))
            certificate, credential = self._issue(worker_id, request, token_id)
            facts = {_TOKENS + token_id: _encode(token), **_fact(credential)}
            await self.store.home.remember_all(facts)
            self.tokens[token_id], self.known[worker_id] = token, credential
            self.on_revoked()  # an earlier certificate of the same worker
            log.info("worker %s has joined with token %s", worker_id, token_id)
            return certificate

    async def renew(self, worker_id: str, request: bytes) -> bytes:
        """The next certificate of a connected worker."""
        async with self._joining:
            known = self.known.get(worker_id)
            if known is None or known.info.revoked_at is not None or not known.info.token_id:
                raise NotPermitted("the engine did not sign this worker's certificate")
            certificate, credential = self._issue(worker_id, request, known.info.token_id)
            credential = replace(credential, previous=known.info.serial)
            await self._remember(credential)
            self.known[worker_id] = credential
            return certificate

    def _issue(self, worker_id: str, request: bytes, token_id: str) -> tuple[bytes, _Credential]:
        assert self.listener is not None
        now = self.clock.now()
        until = now + self.listener.lifetime
        signed = self.listener.own.sign(
            _key_of(request),
            worker_id,
            server=False,
            client=True,
            until=datetime.datetime.fromtimestamp(until, datetime.UTC),
        )
        view = CredentialView(
            worker_id=worker_id,
            serial=f"{signed.serial_number:x}",
            token_id=token_id,
            created_at=now,
            expires_at=until,
        )
        return pem_of(signed), _Credential(view)

    def _checked(self, token_id: str, secret: str) -> _Token:
        token = self.tokens.get(token_id)
        is_same = hmac.compare_digest(_sha256(secret), token.sha256 if token else _NOBODY)
        if token is None or not is_same or not token.is_valid(self.clock.now()):
            raise _invalid()
        return token

    async def _remember(self, credential: _Credential) -> None:
        await self.store.home.remember_all(_fact(credential))

    async def revoke(self, worker_id: str) -> CredentialView:
        known = self.known.get(worker_id)
        if known is None:
            raise NotFound(
                f"no worker {worker_id!r} has a certificate",
                hint="'penstock worker credential list' lists those that have",
            )
        if known.info.revoked_at is None:
            info = replace(known.info, revoked_at=self.clock.now())
            revoked = known.revoked if info.token_id else (*known.revoked, info.serial)
            known = self.known[worker_id] = replace(known, info=info, revoked=revoked)
            self.on_revoked()
        await self._remember(known)
        return known.info


class CredentialService:
    """See `penstock.ports.credentials.Credentials`."""

    def __init__(self, registry: CredentialRegistry, guard: Guard) -> None:
        self._registry, self._guard = registry, guard

    async def create_token(
        self, *, worker_id: str | None = None, uses: int = 1, expires_in: float = 3600.0
    ) -> NewJoinToken:
        registry, listener = self._registry, self._registry.listener
        detail = f"{uses} uses" + (f", for {worker_id}" if worker_id else "")
        token_id = secrets.token_hex(4)
        with self._guard.doing(Credentials.create_token, token_id, detail=detail):
            if worker_id is not None:
                _check_worker_id(worker_id)
            check_number("uses", uses, 1, 10_000)
            check_number("expires_in", expires_in, 1, MAX_WAIT)
            if listener is None:
                raise Conflict(
                    "the engine does not listen for other machines",
                    hint="start it with 'penstock up --link HOST:PORT', as 0.0.0.0:7480",
                )
            await self._drop_old()
            now, secret = registry.clock.now(), secrets.token_urlsafe(24)
            info = JoinTokenView(
                token_id=token_id,
                worker_id=worker_id,
                uses=uses,
                used=0,
                created_at=now,
                expires_at=now + expires_in,
            )
            token = _Token(info, _sha256(secret))
            await registry.store.home.remember(_TOKENS + token_id, _encode(token))
            registry.tokens[token_id] = token
            trusted, checks = fingerprint(listener.trusted), listener.check_hostname
            text = str(JoinToken(token_id, secret, trusted, checks, listener.address))
            return NewJoinToken(info, text, listener.address)

    async def _drop_old(self) -> None:
        registry = self._registry
        before = registry.clock.now() - _KEPT
        for token_id, token in [*registry.tokens.items()]:
            if token.info.expires_at < before:
                await registry.store.home.forget(_TOKENS + token_id)
                del registry.tokens[token_id]
        if len(registry.tokens) >= _MAX_TOKENS:
            raise Conflict(f"there are {_MAX_TOKENS} join tokens already")

    async def tokens(self) -> builtins.list[JoinTokenView]:
        self._guard.require(Credentials.tokens)
        found = [token.info for token in self._registry.tokens.values()]
        return sorted(found, key=lambda one: (one.created_at, one.token_id))

    async def revoke_token(self, token_id: str) -> JoinTokenView:
        registry = self._registry
        with self._guard.doing(Credentials.revoke_token, token_id[:64]):
            if (token := registry.tokens.get(token_id)) is None:
                raise NotFound(
                    f"no join token {token_id[:64]!r}",
                    hint="'penstock worker token list' lists them by id",
                )
            if token.info.revoked_at is None:
                info = replace(token.info, revoked_at=registry.clock.now())
                token = registry.tokens[token_id] = replace(token, info=info)
            await registry.store.home.remember(_TOKENS + token_id, _encode(token))
            return token.info

    async def list(self) -> builtins.list[CredentialView]:
        self._guard.require(Credentials.list)
        found = [known.info for known in self._registry.known.values()]
        return sorted(found, key=lambda one: (one.created_at, one.worker_id))

    async def revoke(self, worker_id: str) -> CredentialView:
        with self._guard.doing(Credentials.revoke, worker_id[:128]):
            return await self._registry.revoke(worker_id)


def _check_worker_id(worker_id: str) -> None:
    check_name("worker_id", worker_id)
    if worker_id.startswith(_LOCAL):
        raise InvalidRequest("worker_id", f"{_LOCAL} begins the ids of workers inside an engine")


def _key_of(request: bytes) -> Ed25519PublicKey:
    try:
        return requested_key(request)
    except ValueError as error:
        raise InvalidRequest("request", f"no valid certificate request: {error}") from None


def _digest_of(request: bytes) -> str:
    return key_digest(_key_of(request))


def _invalid() -> NotAuthenticated:
    return NotAuthenticated(
        "the join token was used already, has expired, was revoked or never existed",
        hint="'penstock worker token create' makes another",
    )


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _encode(value: Struct) -> bytes:
    return msgspec.json.encode(value)


def _fact(credential: _Credential) -> dict[str, bytes]:
    return {_CREDENTIALS + credential.info.worker_id: _encode(credential)}


def _decode(name: str, value: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError:
        raise StoreCorrupt(f"the stored {name} can't be read") from None
