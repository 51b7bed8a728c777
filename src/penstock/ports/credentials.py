"""How workers on other machines prove who they are: join tokens, and certificates.

A join token is shown to the user once, as text. It carries what a worker needs to find the engine,
to know that it is the right one, and to be let in.
"""

from __future__ import annotations

import builtins
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from penstock.core.errors import Misconfigured
from penstock.ports.operations import KeyRole, about, operation

PREFIX = "pjt_"


class JoinToken(Struct, frozen=True, array_like=True):
    """What the text of a join token says."""

    token_id: str
    secret: str
    authority: bytes
    """SHA-256 of the certificate of the engine's authority."""
    check_hostname: bool
    """Whether the engine's certificate must also name the host: its authority is not its own."""
    address: str = ""
    """Where the engine is, if it knows."""

    def __str__(self) -> str:
        return PREFIX + urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    def __repr__(self) -> str:
        # Values end up in logs and tracebacks; a secret must not.
        return f"JoinToken({self.token_id!r}, ...)"

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Raises Misconfigured."""
        text = text.strip()
        try:
            if not text.startswith(PREFIX):
                raise ValueError
            raw = urlsafe_b64decode(text.removeprefix(PREFIX) + "==")
            return msgspec.msgpack.decode(raw, type=cls)
        except (ValueError, msgspec.MsgspecError):
            raise Misconfigured(
                "this is not a join token",
                hint=f"it begins with {PREFIX}; 'penstock worker token create' makes one",
            ) from None


class JoinTokenView(Struct, frozen=True, kw_only=True):
    """A join token, without its secret."""

    token_id: str
    worker_id: str | None
    """The only worker that can use it; None: any."""
    uses: int
    """How many workers can join with it."""
    used: int
    created_at: float
    expires_at: float
    revoked_at: float | None = None


class NewJoinToken(Struct, frozen=True):
    info: JoinTokenView
    token: str
    """Shown once; only its hash is stored."""
    address: str
    """Where workers connect to, as far as the engine knows."""

    def __repr__(self) -> str:
        return f"NewJoinToken({self.info!r}, token=...)"


class CredentialView(Struct, frozen=True, kw_only=True):
    """The certificate of a worker on another machine."""

    worker_id: str
    serial: str
    """Of the certificate, as hexadecimal digits."""
    token_id: str
    """The token that it joined with; empty: the certificate is not from the engine."""
    created_at: float
    expires_at: float | None
    revoked_at: float | None = None


class Credentials(Protocol):
    @operation(
        "create_join_token",
        "POST /v1/join-tokens",
        "Create a join token",
        "With it workers on other machines join the engine. It is shown once; only its hash is "
        "stored. 409 if the engine does not listen for other machines (setting `link.listen`).",
        action="join_token.create",
        role=KeyRole.ADMIN,
        all_tenants=True,
        once=True,
        status=201,
        refusals=(409, 413, 422),
    )
    async def create_token(
        self,
        *,
        worker_id: Annotated[
            str | None,
            about("The only worker that can use it. It replaces an earlier certificate of it."),
        ] = None,
        uses: Annotated[
            Annotated[int, Meta(ge=1, le=10_000)], about("How many workers can join with it.")
        ] = 1,
        expires_in: Annotated[
            Annotated[float, Meta(gt=0)], about("Seconds after which it is no longer valid.")
        ] = 3600.0,
    ) -> NewJoinToken: ...

    @operation(
        "list_join_tokens",
        "GET /v1/join-tokens",
        "List join tokens",
        "Without their secrets, which are not stored.",
        action="join_token.list",
        role=KeyRole.ADMIN,
        all_tenants=True,
        field="tokens",
    )
    async def tokens(self) -> builtins.list[JoinTokenView]: ...

    @operation(
        "revoke_join_token",
        "DELETE /v1/join-tokens/{token_id}",
        "Revoke a join token",
        "Workers that have joined with it stay.",
        action="join_token.revoke",
        role=KeyRole.ADMIN,
        all_tenants=True,
        once=True,
        refusals=(404, 422),
    )
    async def revoke_token(self, token_id: str) -> JoinTokenView: ...

    @operation(
        "list_credentials",
        "GET /v1/credentials",
        "List the certificates of workers",
        action="credential.list",
        role=KeyRole.ADMIN,
        all_tenants=True,
        field="credentials",
    )
    async def list(self) -> builtins.list[CredentialView]: ...

    @operation(
        "revoke_credential",
        "DELETE /v1/credentials/{worker_id}",
        "Revoke a worker's certificate",
        "Its connection ends at once, and it can't connect again until it joins with a new token.",
        action="credential.revoke",
        role=KeyRole.ADMIN,
        all_tenants=True,
        once=True,
        refusals=(404, 422),
    )
    async def revoke(self, worker_id: str) -> CredentialView: ...
