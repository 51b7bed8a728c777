"""Who a caller is and what they may do: API keys, rights, and the audit log of what was done.

A key's token is `pst_<key_id>_<secret>`. It is shown once, when it is made; only the SHA-256
of its secret is kept (256 random bits need no slow hash). Every token costs the same two
comparisons, whether it is the owner's, valid, revoked, expired or nobody's, and every refusal
reads the same, so that neither time nor text reveals which it was.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from penstock.control.ledger import Ledger
from penstock.control.sessions import BrowserSessions
from penstock.core.check import MAX_WAIT, check_name, check_number
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    PenstockError,
    StoreCorrupt,
    UnreadablePointer,
)
from penstock.core.job import Job, JobRequest
from penstock.ports.clock import Clock
from penstock.ports.engine_api import (
    OWNER,
    Audit,
    Caller,
    KeyRole,
    Keys,
    KeyView,
    NewKey,
    SignInLink,
)
from penstock.ports.operations import Binding, Method, binding_of
from penstock.ports.store import AuditEntry, AuditQuery, JobQuery


class Guard:
    """Checks the rights of one caller, for the EngineApi that is bound to them."""

    def __init__(self, caller: Caller, store: Ledger, clock: Clock) -> None:
        self.caller = caller
        self.may_submit_anything = caller.may(KeyRole.SUBMIT) and caller.tenant is None
        self._store, self._clock = store, clock

    @property
    def by(self) -> str:
        return self.caller.principal

    # -- rights -------------------------------------------------------------------

    @contextmanager
    def doing(
        self, operation: Method, subject: str = "", *, detail: str = "", **values: Any
    ) -> Generator[None]:
        """Check the role, run the body, and write to the audit log what was done or refused.

        `operation` is a method of the engine's API; `values` tell its routes apart.
        """
        binding = binding_of(operation, **values)
        action = binding.action
        try:
            self._check(binding)
            yield
        except PenstockError as error:
            if isinstance(error, NotPermitted):
                self._write(action, subject, f"{error.code}: {error.message}", "refused")
            raise
        self._write(action, subject, detail, "done")

    def require(self, operation: Method) -> None:
        """Check the role that the table of operations asks for. Raises NotPermitted."""
        self._check(binding_of(operation))

    def _check(self, binding: Binding) -> None:
        if binding.role is not None:
            self.require_role(binding.role, binding.action)
        if binding.all_tenants and self.caller.tenant is not None:
            raise NotPermitted(
                f"{self.by} is not permitted to do this ({binding.action})",
                hint="it affects all tenants, and the key is bound to one",
            )

    def require_role(self, role: KeyRole, action: str) -> None:
        if not self.caller.may(role):
            raise NotPermitted(
                f"{self.by} is not permitted to do this ({action})",
                hint=f"requires a key with the role {role}",
            )

    def admit(self, role: KeyRole, action: str, subject: str = "") -> None:
        """Like `require_role`, but a refusal is written to the audit log."""
        try:
            self.require_role(role, action)
        except NotPermitted as error:
            self._write(action, subject, f"{error.code}: {error.message}", "refused")
            raise

    def _write(self, action: str, subject: str, detail: str, outcome: str) -> None:
        entry = AuditEntry(
            at=self._clock.now(),
            principal=self.by,
            action=action,
            subject=subject,
            tenant=self.caller.tenant,
            detail=detail[:500],
            outcome=outcome,
        )
        self._store.write_audit([entry])

    # -- visibility --------------------------------------------------------------------

    def shown(self, job: Job | None, job_id: str) -> Job:
        """The job. NotFound if it does not exist or belongs to another tenant."""
        if job is None or self.caller.tenant not in (None, job.request.tenant):
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        return job

    def narrowed(self, query: JobQuery) -> JobQuery | None:
        """The query limited to the caller's tenant; None if it excludes it. Raises WrongShard."""
        self._store.shard.check(query.tenant)
        mine = self.caller.tenant
        if mine is None or query.tenant == mine:
            return query
        return replace(query, tenant=mine) if query.tenant is None else None

    def stamped(self, request: JobRequest) -> JobRequest:
        """The request with the caller's tenant, which they may omit."""
        mine = self.caller.tenant
        if mine is None or request.tenant == mine:
            return request
        if request.tenant != _UNNAMED:
            raise NotPermitted(
                f"tenant: {self.by} may not submit for {request.tenant!r}",
                hint=f"leave it out, or use {mine!r}",
            )
        return replace(request, tenant=mine)

    def tenant(self, named: str) -> str:
        """The tenant that is meant: the caller's own if none was named."""
        mine = self.caller.tenant
        if mine is None:
            return named
        return mine if named in (mine, _UNNAMED) else named


_UNNAMED = "default"


class AuditService:
    """See `penstock.ports.engine_api.Audit`."""

    def __init__(self, store: Ledger, guard: Guard) -> None:
        self._guard, self._store = guard, store

    async def read(self, query: AuditQuery) -> list[AuditEntry]:
        self._guard.require(Audit.read)
        await self._store.apply([])  # entries ride with a commit: see this one through
        return await self._store.read_audit(query)


# -- blobs ------------------------------------------------------------------------

UPLOADS = "blob/"
_BLOB = "blob:"


class Uploads:
    """Which blobs a caller may read and point to; a caller without a tenant may use all.

    Blobs are named by their content, so two tenants may have the same one. A tenant may use what
    it uploaded, what its jobs took or gave, and what the items of its pipelines did.
    """

    def __init__(self, store: Ledger, clock: Clock, tenant: str | None) -> None:
        self._store, self._clock, self._tenant = store, clock, tenant

    async def note(self, uri: str) -> None:
        """Record the uploader until a job refers to the blob."""
        if self._tenant is not None and uri.startswith(_BLOB):
            at = repr(self._clock.now()).encode()
            await self._store.remember(f"{UPLOADS}{self._tenant}/{uri}", at)

    async def check(self, uri: str) -> None:
        """Raises UnreadablePointer, as for one that does not exist."""
        if self._tenant is None or not uri or uri.startswith("data:"):
            return
        if uri.startswith(_BLOB):
            if await self._store.refers(self._tenant, uri):
                return
            if await self._store.recall(f"{UPLOADS}{self._tenant}/{uri}") is not None:
                return
        raise UnreadablePointer("pointer", f"there is no {uri!r}")


# -- API keys ------------------------------------------------------------------------

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
        self._owner = digest_of(owner_token)
        self.opens: Callable[[str], bool] = lambda digest: False
        """Whether a digest is of the token of another engine of the same database."""
        self.sessions = BrowserSessions(store, clock, f"owner {self._owner[:16]}", self._holder)

    async def load(self) -> None:
        """Load the stored keys and browser sessions."""
        await self.load_keys()
        await self.sessions.load()

    async def load_keys(self) -> None:
        facts = await self.store.home.recall_all(_FACTS)
        loaded = {}
        for name, value in facts.items():
            try:
                known = msgspec.json.decode(value, type=_Stored)
            except msgspec.DecodeError:
                raise StoreCorrupt(f"the stored {name} can't be read") from None
            loaded[known.key.key_id] = known
        self.known = loaded

    def authenticate(self, token: str) -> Caller:
        """The caller of a token. Raises NotAuthenticated, WrongShard."""
        key_id, secret = _parts(token)
        known = self.known.get(key_id)
        digest = digest_of(token)
        is_owner = self.opens(digest)
        is_owner |= hmac.compare_digest(digest, self._owner)
        is_key = hmac.compare_digest(digest_of(secret), known.sha256 if known else _NOBODY)
        if is_owner:
            return OWNER
        if is_key and known is not None and known.is_valid(self.clock.now()):
            self.store.shard.check(known.key.tenant)
            return known.caller
        raise NotAuthenticated(
            "this key is not valid",
            hint="ask the engine's owner for one: penstock key create",
        )

    def is_current(self, caller: Caller) -> bool:
        """Whether the key of a caller that was authenticated before is still valid."""
        return caller is OWNER or self._holder(caller.key_id) is not None

    def _holder(self, key_id: str) -> Caller | None:
        """Who has the key with this id, if it is valid."""
        known = self.known.get(key_id)
        return known.caller if known is not None and known.is_valid(self.clock.now()) else None

    def is_of_all_tenants(self, principal: str) -> bool:
        """Whether it is the owner, or has a key that is not bound to a tenant."""
        return principal == OWNER.principal or any(
            known.key.name == principal and known.key.tenant is None
            for known in self.known.values()
        )

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
                hint="penstock key list shows them",
            )
        return valid[0]

    async def remember(self, known: _Stored) -> None:
        fact = _FACTS + known.key.key_id
        await self.store.home.remember(fact, msgspec.json.encode(known))


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
        with self._doing(Keys.create, name, detail):
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
            known = _Stored(key, digest_of(secret))
            await registry.remember(known)
            registry.known[key_id] = known
            log.info("key %s (%s) was created by %s", key_id, name, self._guard.by)
            return NewKey(key, f"{PREFIX}_{key_id}_{secret}")

    async def list(self) -> builtins.list[KeyView]:
        """Every key, revoked and expired ones too, oldest first."""
        self._guard.require(Keys.list)
        keys = [known.key for known in self._registry.known.values()]
        return sorted(keys, key=lambda key: (key.created_at, key.key_id))

    async def revoke(self, key_id: str) -> KeyView:
        """Refuse a key from now on.

        It is refused before that is stored: should storing fail, the caller gets the error and
        the key stays refused for as long as this engine runs.
        """
        registry = self._registry
        with self._doing(Keys.revoke, key_id):
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

    async def create_link(self) -> SignInLink:
        """A link that signs a browser in with the caller's own rights, once."""
        with self._guard.doing(Keys.create_link):
            return self._registry.sessions.create_link(self._guard.caller)

    def _doing(
        self, operation: Method, name: str, detail: str = ""
    ) -> AbstractContextManager[None]:
        # Somebody may have pasted a token where a name belongs: the log must not have it.
        named = "(a token)" if name.startswith(f"{PREFIX}_") else name[:128]
        return self._guard.doing(operation, named, detail=detail)


def _parts(token: str) -> tuple[str, str]:
    """The key_id and the secret of a token; for anything else, an id that no key has."""
    prefix, _, rest = token.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == PREFIX else ("", token)


def digest_of(secret: str) -> str:
    """What is kept of a token or of a key's secret."""
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
