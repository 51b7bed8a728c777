"""CORS: which web pages may call the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from penstock.api.problems import Refused
from penstock.api.reply import Headers

_METHODS = b"GET,HEAD,PUT,PATCH,POST,DELETE"
_EXPOSED = (
    b"ETag,Retry-After,Content-Disposition,Location,X-Request-Id,X-Penstock-Job,X-Penstock-Warning"
)
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_ANY = "*"


class Cors(Struct, frozen=True):
    origins: frozenset[str] = frozenset()
    """As `http://localhost:10000`; `*` is any. None: no page from elsewhere may call."""
    may_change: bool = True
    """Whether they may also change something: where a token is needed, which no page can guess."""
    checks: bool = True
    """Whether other pages are refused what would change something: where no token is needed."""

    @classmethod
    def of(cls, origins: Iterable[str], **more: bool) -> Cors:
        return cls(frozenset(origin.lower().rstrip("/") for origin in origins), **more)

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what a page from elsewhere would change.

        A browser sends a plain POST without asking first; without this, whatever page is open
        on this machine could do so.
        """
        origin = headers.get(b"origin") if self.checks else None
        if origin is None or method in _HARMLESS or self._lets(origin, headers):
            return
        raise Refused(
            403,
            "ORIGIN_NOT_ALLOWED",
            "pages from elsewhere may only read from this worker",
            hint="give the worker a token, and add the page's origin to cors",
        )

    def headers(self, given: Mapping[bytes, bytes]) -> Headers:
        """CORS headers of a reply; more of them for a preflight request."""
        if not self.origins:
            return ()
        origin = given.get(b"origin")
        anybody = _ANY in self.origins
        if not anybody and (origin is None or _text(origin) not in self.origins):
            return (_VARY,)
        found = [(b"access-control-allow-origin", b"*" if anybody else origin or b"")]
        if not anybody:
            found.append(_VARY)
        if b"access-control-request-method" in given:
            methods = _METHODS if self.may_change or origin is None else b"GET,HEAD"
            found.append((b"access-control-allow-methods", methods))
            wanted = given.get(b"access-control-request-headers")
            if wanted:
                found.append((b"vary", b"Access-Control-Request-Headers"))
                found.append((b"access-control-allow-headers", wanted))
        else:
            found.append((b"access-control-expose-headers", _EXPOSED))
        return found

    def _lets(self, origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
        named = _text(origin)
        if self.may_change and (named in self.origins or _ANY in self.origins):
            return True
        own = named.partition("://")[2]
        return bool(own) and own == _text(headers.get(b"host", b""))


_VARY = (b"vary", b"Origin")


def _text(value: bytes) -> str:
    return value.decode("latin-1").lower()
