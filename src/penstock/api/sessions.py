"""Browser sessions: signing in with a key or a one-time link, and what a signed-in page must send.

A session is a cookie: HttpOnly, SameSite=Strict, Secure under TLS. Its name has the server's port,
because browsers send a host's cookies to every port. Pages of another port of the same host are
of the same site, so SameSite alone does not keep them out: with a cookie, whatever is not a GET
needs the session's CSRF token in a header and must come from a page of this very server.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hmac import compare_digest
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from penstock.api.decoding import read_json
from penstock.api.operation import PUBLIC, route
from penstock.api.problems import Refused, malformed
from penstock.api.reply import NO_STORE, Headers, Reply, json_reply, page_headers
from penstock.api.table import bound
from penstock.core.errors import InvalidRequest, NotAuthenticated, NotPermitted, TooMany
from penstock.dashboard.files import HOME
from penstock.dashboard.pages import sign_in_page
from penstock.ports.engine_api import Authenticator, Caller, KeyRole, SignedIn, SignInLink

if TYPE_CHECKING:
    from penstock.api.call import Call

CSRF_HEADER = b"x-csrf-token"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_LARGEST = 4096
"""Maximum bytes of a sign-in, which is not authenticated yet."""


# -- cookies ----------------------------------------------------------------------


def cookie_name(scope: Mapping[str, Any]) -> str:
    server = scope.get("server")
    return f"penstock_session_{server[1]}" if server and server[1] else "penstock_session"


def token_of(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str:
    """The session's token; empty without one, and if the request has an API key."""
    cookies = headers.get(b"cookie")
    if cookies is None or b"authorization" in headers or b"x-api-key" in headers:
        return ""
    wanted = cookie_name(scope)
    for cookie in cookies.decode("latin-1").split(";"):
        name, _, value = cookie.strip().partition("=")
        if name == wanted:
            return value
    return ""


def _cookie(scope: Mapping[str, Any], token: str, max_age: float) -> tuple[bytes, bytes]:
    secure = "; Secure" if scope["scheme"] == "https" else ""
    value = f"{cookie_name(scope)}={token}; Path=/; Max-Age={max_age:.0f}; HttpOnly"
    return b"set-cookie", f"{value}; SameSite=Strict{secure}".encode()


# -- what a page must send --------------------------------------------------------


def csrf_token(token: str) -> str:
    """Derived from the session's token, without revealing it."""
    return hashlib.sha256(b"csrf " + token.encode("latin-1")).hexdigest()[:32]


def check_page(method: str, headers: Mapping[bytes, bytes], token: str) -> None:
    """Refuse a request with a session's cookie unless one of our own pages sent it."""
    if method in _SAFE:
        return
    given = headers.get(CSRF_HEADER, b"")
    if not _is_own_page(headers, absent=False) or not compare_digest(
        given, csrf_token(token).encode()
    ):
        raise Refused(
            403,
            "CSRF",
            "the request does not come from a page of this server with a valid CSRF token",
            hint="send X-CSRF-Token with the csrf_token of GET /v1/me, from a page of this server",
        )


def _is_own_page(headers: Mapping[bytes, bytes], *, absent: bool) -> bool:
    """Whether a page of this server sent it; `absent`: the answer if no header tells."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site == b"same-origin"
    if origin is None:
        return absent
    return urlsplit(origin.decode("latin-1")).netloc.encode("latin-1") == headers.get(b"host")


class FailedSignIns:
    """Counts failed attempts by address; after too many, all attempts of it wait."""

    def __init__(self, now: Callable[[], float], *, most: int = 10, window: float = 60.0) -> None:
        self._now, self._most, self._window = now, most, window
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Since when, and how many. The oldest are forgotten first."""

    def check(self, address: str) -> None:
        since, count = self._failed.get(address, (0.0, 0))
        wait = since + self._window - self._now()
        if count >= self._most and wait > 0:
            raise TooMany(
                "too many failed sign-ins", retry_after=wait, hint=f"wait {wait:.0f} s, then retry"
            )

    def count(self, address: str) -> None:
        now = self._now()
        since, count = self._failed.pop(address, (now, 0))
        if now - since > self._window:
            since, count = now, 0
        self._failed[address] = (since, count + 1)
        if len(self._failed) > 10_000:
            self._failed.popitem(last=False)


# -- signing in and out -----------------------------------------------------------


class SignInBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of the two."""

    key: str = ""
    link: str = ""
    """The token of a one-time link."""


class Me(Struct, frozen=True, kw_only=True):
    """Who is calling, and what they may do."""

    name: str
    roles: tuple[KeyRole, ...]
    tenant: str | None
    """The only tenant whose things they see; null: every tenant's."""
    key_id: str
    """Empty for the owner."""
    allowed: tuple[str, ...]
    """The ids of the operations (see the OpenAPI document) that this caller may call."""
    csrf_token: str | None
    """To be sent as X-CSRF-Token with everything that is not a GET; null without a session."""


@route(
    "POST /v1/session",
    role=PUBLIC,
    body=SignInBody,
    answer=Me,
    status=201,
    refusals=(401, 403, 413, 415, 422, 429),
)
async def sign_in(call: Call) -> Reply:
    """Sign a browser in.

    With a key or the token of a one-time link. Sets the session's cookie. With the cookie,
    everything that is not a GET needs the header X-CSRF-Token and must come from a page of this
    server. A session ends after 12 hours without use, after 7 days, by signing out, and with its
    key.
    """
    call.check_type("application/json")
    given = read_json(await _body(call), SignInBody, max_depth=8)
    if bool(given.key) is bool(given.link):
        raise InvalidRequest("key", "either key or link must be given, and not both")
    signed_in = await _open(call, given)
    reply = json_reply(_me(signed_in.caller, signed_in.token), 201)
    return replace(reply, headers=(*reply.headers, *_opened(call, signed_in)))


@route("DELETE /v1/session", status=204)
async def sign_out(call: Call) -> Reply:
    """Sign out.

    Ends the session of the cookie; without one, nothing.
    """
    if token := token_of(call.scope, call.headers):
        await _sign_ins(call).sign_out(token)
    return Reply(b"", 204, (NO_STORE, _cookie(call.scope, "", 0)))


@route("GET /v1/me", answer=Me)
async def get_me(call: Call) -> Reply:
    """Get who is calling.

    Name, roles, tenant, the operations that are allowed, and the CSRF token.
    """
    return json_reply(_me(call.caller, token_of(call.scope, call.headers)))


@bound("create_link", answer=SignInLink)
async def create_link(call: Call) -> Reply:
    link = await call.api.keys.create_link()
    if host := call.header(b"host"):
        url = f"{call.scope['scheme']}://{host}/sign-in?link={link.token}"
        link = SignInLink(url, link.token, link.expires_at)
    return json_reply(link, 201)


def _me(caller: Caller, token: str) -> Me:
    return Me(
        name=caller.principal,
        roles=tuple(role for role in KeyRole if role in caller.roles),
        tenant=caller.tenant,
        key_id=caller.key_id,
        allowed=_allowed(caller),
        csrf_token=csrf_token(token) if token else None,
    )


def _allowed(caller: Caller) -> tuple[str, ...]:
    from penstock.api.operations import OPERATIONS

    return tuple(
        operation.id
        for operation in OPERATIONS
        if (not isinstance(operation.role, KeyRole) or caller.may(operation.role))
        and (caller.tenant is None or not operation.all_tenants)
    )


def _sign_ins(call: Call) -> Authenticator:
    assert call.services.sign_ins is not None
    return call.services.sign_ins


async def _body(call: Call) -> bytes:
    return await call.body(at_most=_LARGEST)


async def _open(call: Call, given: SignInBody) -> SignedIn:
    if not _is_own_page(call.headers, absent=True):
        raise NotPermitted("a page of another server may not sign in here")
    client = call.scope.get("client")
    address, failed = client[0] if client else "", call.services.failed_sign_ins
    failed.check(address)
    try:
        return await _sign_ins(call).sign_in(key=given.key, link=given.link)
    except NotAuthenticated:
        failed.count(address)
        raise


def _opened(call: Call, signed_in: SignedIn) -> Headers:
    lifetime = signed_in.expires_at - call.services.clock.now()
    return (_cookie(call.scope, signed_in.token, lifetime),)


# -- the page ---------------------------------------------------------------------

_PAGE: Headers = (
    *page_headers("self", forms="self"),
    # With no-referrer, browsers would send the form with "Origin: null".
    (b"referrer-policy", b"same-origin"),
)


class SignInQuery(Struct, frozen=True):
    link: str = ""
    """The token of a one-time link. It is not spent until the page's button is pressed."""


@route(
    "GET /sign-in",
    role=PUBLIC,
    query=SignInQuery,
    answer=str,
    answer_type="text/html",
    refusals=(422,),
)
async def get_sign_in(call: Call) -> Reply:
    """Show the sign-in page."""
    return Reply(sign_in_page(call.query(SignInQuery).link), 200, _PAGE)


@route(
    "POST /sign-in",
    role=PUBLIC,
    body=bytes,
    body_type="application/x-www-form-urlencoded",
    answer_type="text/html",
    status=303,
    others={401: str},
    refusals=(403, 413, 415, 429),
)
async def post_sign_in(call: Call) -> Reply:
    """Sign in by the page's form."""
    call.check_type("application/x-www-form-urlencoded")
    try:
        form = parse_qs((await _body(call)).decode("latin-1"), max_num_fields=8)
    except ValueError:
        raise malformed("the form has neither a key nor a link") from None
    given = SignInBody(form.get("key", [""])[0].strip(), form.get("link", [""])[0])
    try:
        signed_in = await _open(call, replace(given, key="") if given.link else given)
    except NotAuthenticated as error:
        return Reply(
            sign_in_page("", f"{error.message[:1].upper()}{error.message[1:]}."), 401, _PAGE
        )
    location = (b"location", HOME.encode())
    return Reply(b"", 303, (*_opened(call, signed_in), location, NO_STORE))
