"""Keys: who may come in by the network, and as whom.

A key's token is `pst_<key_id>_<secret>`. It is shown once, when it is made; only the SHA-256
of its secret is kept (256 random bits need no slow hash). Every token costs the same two
comparisons, whether it is the owner's, valid, revoked, expired or nobody's, and every refusal
reads the same, so that neither time nor text tells which it was.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from penstock.core.caller import OWNER, Caller, KeyRole
from penstock.core.check import MAX_WAIT, check_name, check_number
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    NotAuthenticated,
    NotFound,
    StoreCorrupt,
)
from penstock.ports.clock import Clock
from penstock.ports.keys import KeyView, NewKey
from penstock.ports.store import Store

log = logging.getLogger(__name__)

PREFIX = "pst"
_FACTS = "key/"
_NOBODY = bytes(32)
"""Stands in for the hash of a key that does not exist; no known secret has it."""


class _Kept(msgspec.Struct, frozen=True):
    """A key as it is stored."""

    key: KeyView
    sha256: str

    def __repr__(self) -> str:
        return f"_Kept({self.key!r})"


class _Known(msgspec.Struct, frozen=True):
    """A key as it is asked for at every call."""

    key: KeyView
    digest: bytes
    caller: Caller

    def __repr__(self) -> str:
        return f"_Known({self.key!r})"

    def is_valid(self, now: float) -> bool:
        key = self.key
        return key.revoked_at is None and (key.expires_at is None or now < key.expires_at)


class KeyRing:
    """Every key there is, by heart; what changes is stored before it is told."""

    def __init__(self, store: Store, clock: Clock, owner_token: str) -> None:
        if not owner_token:
            raise Misconfigured(
                "the engine's own token is empty",
                hint="remove its token file and start again: a new one is made",
            )
        self._store, self._clock = store, clock
        self._owner = _digest(owner_token)
        self._known: dict[str, _Known] = {}

    async def load(self) -> None:
        """Learn the stored keys."""
        facts = await self._store.recall_all(_FACTS)
        self._known = {}
        for name, value in facts.items():
            try:
                kept = msgspec.json.decode(value, type=_Kept)
                known = _known(kept.key, bytes.fromhex(kept.sha256))
            except (msgspec.DecodeError, ValueError):
                raise StoreCorrupt(f"the stored {name} can't be read") from None
            self._known[known.key.key_id] = known

    # -- at every call ------------------------------------------------------------------

    def authenticate(self, token: str) -> Caller:
        """Whose token this is. Raises NotAuthenticated."""
        key_id, secret = _parts(token)
        known = self._known.get(key_id)
        is_owner = hmac.compare_digest(_digest(token), self._owner)
        is_key = hmac.compare_digest(_digest(secret), known.digest if known else _NOBODY)
        if is_owner:
            return OWNER
        if is_key and known is not None and known.is_valid(self._clock.now()):
            return known.caller
        raise NotAuthenticated(
            "this key is not valid",
            hint="ask whoever runs the engine for one: penstock keys create",
        )

    # -- the keys themselves ------------------------------------------------------------

    async def create(
        self,
        name: str,
        roles: Iterable[KeyRole],
        tenant: str | None = None,
        expires_in: float | None = None,
        *,
        by: str,
    ) -> NewKey:
        """Make a key. Its token is in the answer, and nowhere else."""
        _check_principal(name)
        chosen = _checked_roles(roles)
        if tenant is not None:
            check_name("tenant", tenant)
            if KeyRole.ADMIN in chosen:
                raise InvalidRequest(
                    "tenant",
                    "a key with the role admin can't be bound to a tenant",
                    hint="keys, rules and pools belong to all tenants;"
                    " give it submit, operate and approve instead",
                )
        if expires_in is not None:
            check_number("expires_in", expires_in, 1, MAX_WAIT)
        now = self._clock.now()
        key = KeyView(
            key_id=self._new_id(),
            name=name,
            roles=chosen,
            tenant=tenant,
            created_at=now,
            expires_at=None if expires_in is None else now + expires_in,
        )
        secret = secrets.token_urlsafe(32)
        known = _known(key, _digest(secret))
        await self._keep(known)
        self._known[key.key_id] = known
        log.info("key %s (%s) was made by %s", key.key_id, name, by)
        return NewKey(key, f"{PREFIX}_{key.key_id}_{secret}")

    async def list(self) -> builtins.list[KeyView]:
        """Every key, revoked and expired ones too, oldest first."""
        keys = [known.key for known in self._known.values()]
        return sorted(keys, key=lambda key: (key.created_at, key.key_id))

    async def revoke(self, key_id: str, *, by: str) -> KeyView:
        """Let a key in no more, from now on; by its id, or its name if one valid key has it.

        It is refused before that is stored: should storing fail, the caller hears of it and
        the key stays refused for as long as this engine runs.
        """
        _check_no_token("key_id", key_id)
        known = self._known.get(key_id) or self._named(key_id)
        if known.key.revoked_at is None:
            known = replace(known, key=replace(known.key, revoked_at=self._clock.now()))
            self._known[known.key.key_id] = known
        await self._keep(known)
        log.info("key %s (%s) was revoked by %s", known.key.key_id, known.key.name, by)
        return known.key

    def _named(self, name: str) -> _Known:
        now = self._clock.now()
        named = [known for known in self._known.values() if known.key.name == name]
        valid = [known for known in named if known.is_valid(now)]
        if len(valid) > 1:
            ids = ", ".join(known.key.key_id for known in valid)
            raise Conflict(f"{len(valid)} valid keys are named {name}", hint=f"say which: {ids}")
        if not valid:
            raise NotFound(
                f"no {'valid ' if named else ''}key has the id or name {name!r}",
                hint="penstock keys list shows them",
            )
        return valid[0]

    async def _keep(self, known: _Known) -> None:
        kept = _Kept(known.key, known.digest.hex())
        await self._store.remember(_FACTS + known.key.key_id, msgspec.json.encode(kept))

    def _new_id(self) -> str:
        while (key_id := secrets.token_hex(6)) in self._known:
            pass
        return key_id


def _known(key: KeyView, digest: bytes) -> _Known:
    return _Known(key, digest, Caller(key.name, frozenset(key.roles), key.tenant, key.key_id))


def _parts(token: str) -> tuple[str, str]:
    """The key_id and the secret in a token; of what is no token, an id that no key has."""
    prefix, _, rest = token.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == PREFIX else ("", token)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _check_principal(name: str) -> None:
    _check_no_token("name", name)
    check_name("name", name)
    if name.casefold() == OWNER.principal:
        raise InvalidRequest(
            "name", f"{name!r} is reserved", hint="it is who holds the engine's own token"
        )


def _check_no_token(field: str, value: str) -> None:
    """Refuse a token where a name belongs, before anything can repeat it."""
    if value.startswith(f"{PREFIX}_"):
        raise InvalidRequest(
            field,
            f"begins with {PREFIX}_, as tokens do",
            hint="a key is named by its id, which is the token's middle part, or by its name",
        )


def _checked_roles(roles: Iterable[KeyRole]) -> tuple[KeyRole, ...]:
    allowed = ", ".join(KeyRole)
    try:
        chosen = {KeyRole(role) for role in roles}
    except ValueError as error:
        raise InvalidRequest("roles", str(error), hint=f"there are: {allowed}") from None
    if not chosen:
        raise InvalidRequest("roles", "is empty", hint=f"one or more of {allowed}")
    return tuple(role for role in KeyRole if role in chosen)
