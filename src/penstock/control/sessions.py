"""Browser sessions: who is signed in, and the one-time links that sign somebody in.

A session belongs to the key that opened it and ends with it: when the key is revoked or expires,
or, for the owner, when the engine's token is replaced. Like keys, sessions are stored as hashes of
their tokens, so they survive a restart of the engine; links do not.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.control.ledger import Ledger
from penstock.core.errors import NotAuthenticated, TooMany, Unavailable
from penstock.ports.clock import Clock
from penstock.ports.engine_api import OWNER, Caller, SignedIn, SignInLink

log = logging.getLogger(__name__)

IDLE = 12 * 3600.0
"""Seconds without a request after which a session ends. An open event stream counts as use."""
LIFETIME = 7 * 86_400.0
"""Seconds after which a session ends in any case."""
LINK_LIFETIME = 600.0
_PER_KEY = 50
"""Sessions of one key; one more ends the one that was used least recently."""
_IN_ALL = 2_000
_LINKS = 1_000
_STORE_EVERY = IDLE / 24
"""Seconds after which the time of last use is stored again."""
_FACTS = "session/"


class _Known(msgspec.Struct, frozen=True):
    """A session as it is stored."""

    opened_by: str
    """The id of the key, or the fingerprint of the owner's token."""
    created_at: float
    seen_at: float


class BrowserSessions:
    """All sessions and unused links, in memory; sessions also in the store."""

    def __init__(
        self,
        store: Ledger,
        clock: Clock,
        owner: str,
        caller_of: Callable[[str], Caller | None],
    ) -> None:
        """`owner` is the fingerprint of the owner's token; `caller_of` finds a valid key."""
        self._store, self._clock = store, clock
        self._owner, self._caller_of = owner, caller_of
        self._known: dict[str, _Known] = {}
        """By the hash of the token."""
        self._seen: dict[str, float] = {}
        """When each was last used; stored less often."""
        self._links: dict[str, tuple[str, float]] = {}
        """Unused links by the hash of their token: who made it, and until when it is valid."""
        self.url = ""
        """Where the engine serves HTTP."""

    async def load(self) -> None:
        facts: dict[str, bytes | None] = {**await self._store.recall_all(_FACTS)}
        for name, value in facts.items():
            with suppress(msgspec.DecodeError):
                self._known[name.removeprefix(_FACTS)] = msgspec.json.decode(
                    value or b"", type=_Known
                )
        self._seen = {digest: known.seen_at for digest, known in self._known.items()}
        over = [digest for digest in self._known if self._caller(digest) is None]
        unreadable = facts.keys() - {_FACTS + digest for digest in self._known}
        if over or unreadable:
            await self._store.commit((), facts=self._without(over) | dict.fromkeys(unreadable))

    # -- signing in and out -------------------------------------------------------

    def create_link(self, caller: Caller) -> SignInLink:
        now = self._clock.now()
        self._links = {token: link for token, link in self._links.items() if link[1] > now}
        if len(self._links) >= _LINKS:
            raise TooMany(f"{_LINKS} sign-in links are unused", retry_after=LINK_LIFETIME)
        token = secrets.token_urlsafe(32)
        self._links[_digest(token)] = (self._opener(caller), now + LINK_LIFETIME)
        url = f"{self.url}/sign-in?link={token}" if self.url else ""
        return SignInLink(url=url, token=token, expires_at=now + LINK_LIFETIME)

    def use_link(self, token: str) -> Caller:
        """Spend a link. Raises NotAuthenticated if it was used before, or has expired."""
        opener, until = self._links.pop(_digest(token), ("", 0.0))
        caller = self._find(opener) if self._clock.now() < until else None
        if caller is None:
            raise NotAuthenticated(
                "this sign-in link is not valid: it was used already, or has expired",
                hint="make a new one with 'penstock dashboard'",
            )
        return caller

    async def open(self, caller: Caller) -> SignedIn:
        """Open a session for a caller who has shown a key or a link."""
        now, token, opener = self._clock.now(), secrets.token_urlsafe(32), self._opener(caller)
        known = _Known(opener, now, now)
        oldest_first = sorted(self._known, key=lambda digest: self._seen[digest])
        mine = [digest for digest in oldest_first if self._known[digest].opened_by == opener]
        over = {digest for digest in oldest_first if self._caller(digest) is None}
        over.update(mine[: max(0, len(mine) - _PER_KEY + 1)])
        over.update(oldest_first[: max(0, len(oldest_first) - _IN_ALL + 1)])
        facts = self._without(over)
        digest = _digest(token)
        await self._store.commit((), facts={**facts, _FACTS + digest: msgspec.json.encode(known)})
        self._known[digest], self._seen[digest] = known, now
        return SignedIn(caller, token, now + LIFETIME)

    async def close(self, token: str) -> None:
        """Sign out; harmless if nobody is signed in."""
        if (digest := _digest(token)) in self._known:
            await self._store.commit((), facts=self._without([digest]))

    # -- every request ------------------------------------------------------------

    def authenticate(self, token: str) -> Caller:
        """The caller of a session that is not over. Raises NotAuthenticated."""
        digest = _digest(token)
        caller = self._caller(digest)
        if caller is None:
            raise NotAuthenticated("this session has ended", hint="sign in again")
        now = self._clock.now()
        self._seen[digest] = now
        known = self._known[digest]
        if now - known.seen_at > _STORE_EVERY:
            known = self._known[digest] = replace(known, seen_at=now)
            with suppress(Unavailable):
                stored = self._store.begin((), facts={_FACTS + digest: msgspec.json.encode(known)})
                stored.add_done_callback(_log_failure)
        return caller

    def _caller(self, digest: str) -> Caller | None:
        known = self._known.get(digest)
        if known is None:
            return None
        now = self._clock.now()
        if now - self._seen[digest] > IDLE or now - known.created_at > LIFETIME:
            return None
        return self._find(known.opened_by)

    def _find(self, opener: str) -> Caller | None:
        return OWNER if opener == self._owner else self._caller_of(opener)

    def _opener(self, caller: Caller) -> str:
        return self._owner if caller is OWNER else caller.key_id

    def _without(self, digests: Any) -> dict[str, bytes | None]:
        """Forget these sessions. Returns what that means for the store."""
        for digest in digests:
            self._known.pop(digest, None)
            self._seen.pop(digest, None)
        return {_FACTS + digest: None for digest in digests}


def _log_failure(stored: Any) -> None:
    if not stored.cancelled() and (error := stored.exception()) is not None:
        log.warning("the last use of a session could not be stored: %s", error)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
