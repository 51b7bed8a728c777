"""API keys: who may use the network APIs, and as whom.

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
from contextlib import AbstractContextManager
from typing import Annotated

import msgspec
from msgspec.structs import replace

from penstock.control.guard import Guard
from penstock.control.ledger import Ledger
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
from penstock.ports.engine_api import OWNER, Caller, KeyRole, KeyView, NewKey

log = logging.getLogger(__name__)

PREFIX = "pst"
_FACTS = "key/"
_NOBODY = "0" * 64
"""Compared with when a key does not exist; no known secret has this hash."""


class _Stored(msgspec.Struct, frozen=True):
    """A key as it is stored."""

    key: KeyView
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

    def __repr__(self) -> str:
        return f"_Stored({self.key!r})"

    @property
    def caller(self) -> Caller:
        key = self.key
        return Caller(key.name, frozenset(key.roles), key.tenant, key.key_id)

    def is_valid(self, now: float) -> bool:
        key = self.key
        return key.revoked_at is None and (key.expires_at is None or now < key.expires_at)


class KeyRegistry:
    """All keys, in memory."""

    def __init__(self, store: Ledger, clock: Clock, owner_token: str) -> None:
        if not owner_token:
            raise Misconfigured(
                "the engine's own token is empty",
                hint="remove its token file and start again: a new token is created",
            )
        self.store, self.clock = store, clock
        self.known: dict[str, _Stored] = {}
        self._owner = _digest(owner_token)

    async def load(self) -> None:
        """Load the stored keys."""
        facts = await self.store.recall_all(_FACTS)
        self.known = {}
        for name, value in facts.items():
            try:
                known = msgspec.json.decode(value, type=_Stored)
            except msgspec.DecodeError:
                raise StoreCorrupt(f"the stored {name} can't be read") from None
            self.known[known.key.key_id] = known

    def authenticate(self, token: str) -> Caller:
        """The caller of a token. Raises NotAuthenticated."""
        key_id, secret = _parts(token)
        known = self.known.get(key_id)
        is_owner = hmac.compare_digest(_digest(token), self._owner)
        is_key = hmac.compare_digest(_digest(secret), known.sha256 if known else _NOBODY)
        if is_owner:
            return OWNER
        if is_key and known is not None and known.is_valid(self.clock.now()):
            return known.caller
        raise NotAuthenticated(
            "this key is not valid",
            hint="ask whoever runs the engine for one: penstock keys create",
        )

    def is_current(self, caller: Caller) -> bool:
        """Whether the key of a caller that was authenticated before is still valid."""
        if caller is OWNER:
            return True
        known = self.known.get(caller.key_id)
        return known is not None and known.is_valid(self.clock.now())

    def meant(self, name: str) -> _Stored:
        """The key of this id, or the only valid one of this name."""
        if (known := self.known.get(name)) is not None:
            return known
        now = self.clock.now()
        named = [known for known in self.known.values() if known.key.name == name]
        valid = [known for known in named if known.is_valid(now)]
        if len(valid) > 1:
            ids = ", ".join(known.key.key_id for known in valid)
            raise Conflict(f"{len(valid)} valid keys are named {name}", hint=f"use the id: {ids}")
        if not valid:
            raise NotFound(
                f"no {'valid ' if named else ''}key has the id or name {name!r}",
                hint="penstock keys list shows them",
            )
        return valid[0]

    async def remember(self, known: _Stored) -> None:
        await self.store.remember(_FACTS + known.key.key_id, msgspec.json.encode(known))


class KeyService:
    """See `penstock.ports.engine_api.Keys`."""

    def __init__(self, registry: KeyRegistry, guard: Guard) -> None:
        self._registry, self._guard = registry, guard

    async def create(
        self,
        name: str,
        roles: Iterable[KeyRole],
        *,
        tenant: str | None = None,
        expires_in: float | None = None,
    ) -> NewKey:
        """Create a key. The answer has its token, which is not stored."""
        roles, registry = tuple(roles), self._registry
        detail = f"roles {', '.join(roles)}" + (f", tenant {tenant}" if tenant else "")
        with self._doing("key.create", name, detail):
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
            while (key_id := secrets.token_hex(6)) in registry.known:
                pass
            now, secret = registry.clock.now(), secrets.token_urlsafe(32)
            key = KeyView(
                key_id=key_id,
                name=name,
                roles=chosen,
                tenant=tenant,
                created_at=now,
                expires_at=None if expires_in is None else now + expires_in,
            )
            known = _Stored(key, _digest(secret))
            await registry.remember(known)
            registry.known[key_id] = known
            log.info("key %s (%s) was created by %s", key_id, name, self._guard.by)
            return NewKey(key, f"{PREFIX}_{key_id}_{secret}")

    async def list(self) -> builtins.list[KeyView]:
        """Every key, revoked and expired ones too, oldest first."""
        self._guard.require_everywhere(KeyRole.ADMIN, "key.list")
        keys = [known.key for known in self._registry.known.values()]
        return sorted(keys, key=lambda key: (key.created_at, key.key_id))

    async def revoke(self, key_id: str) -> KeyView:
        """Refuse a key from now on.

        It is refused before that is stored: should storing fail, the caller gets the error and
        the key stays refused for as long as this engine runs.
        """
        registry = self._registry
        with self._doing("key.revoke", key_id):
            _check_no_token("key_id", key_id)
            known = registry.meant(key_id)
            if known.key.revoked_at is None:
                known = replace(known, key=replace(known.key, revoked_at=registry.clock.now()))
                registry.known[known.key.key_id] = known
            await registry.remember(known)
            log.info(
                "key %s (%s) was revoked by %s", known.key.key_id, known.key.name, self._guard.by
            )
            return known.key

    def _doing(self, action: str, name: str, detail: str = "") -> AbstractContextManager[None]:
        # Somebody may have pasted a token where a name belongs: the log must not have it.
        named = "(a token)" if name.startswith(f"{PREFIX}_") else name[:128]
        return self._guard.doing(action, named, role=KeyRole.ADMIN, everywhere=True, detail=detail)


def _parts(token: str) -> tuple[str, str]:
    """The key_id and the secret of a token; for anything else, an id that no key has."""
    prefix, _, rest = token.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == PREFIX else ("", token)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _check_principal(name: str) -> None:
    _check_no_token("name", name)
    check_name("name", name)
    if name.casefold() == OWNER.principal:
        raise InvalidRequest(
            "name", f"{name!r} is reserved", hint="it is the principal of the engine's own token"
        )


def _check_no_token(field: str, value: str) -> None:
    """Refuse a token given as a name, before it can end up in a log."""
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
        raise InvalidRequest("roles", str(error), hint=f"known are {allowed}") from None
    if not chosen:
        raise InvalidRequest("roles", "is empty", hint=f"one or more of {allowed}")
    return tuple(role for role in KeyRole if role in chosen)
