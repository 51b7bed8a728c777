"""How a container worker listens, and what its callers must have."""

from __future__ import annotations

from msgspec import Struct

from penstock.api.cors import Cors
from penstock.api.options import HttpOptions
from penstock.core.errors import Misconfigured


class ContainerHttpOptions(Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 9000
    """0 takes a free one."""
    token: str = ""
    """What callers send as `Authorization: Bearer`; empty means nothing, on loopback only."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may call; `*` is any, which without a token may only read."""
    hosts: tuple[str, ...] = ()
    """Names by which it may be called. None: on loopback its own names, else any."""
    max_body: int = 1 << 20
    """Bytes of a submission that brings no files."""
    max_upload: int = 384 << 20
    """Bytes of one that does; files in base64 are a third longer than they are."""
    compat_strict: bool = False
    """Only the protocol's own keys and codes are answered."""
    limits: HttpOptions = HttpOptions(max_streams_per_key=1500, max_waiting_per_key=4096)
    """Times, sizes and numbers that a client is held to; its address is not used."""

    @property
    def is_open_to_pages(self) -> bool:
        """Whether any web page that has the token may call: then a name that points here by a
        trick gains nothing."""
        return "*" in self.cors and bool(self.token)

    @property
    def origins(self) -> Cors:
        origins = frozenset(origin.lower().rstrip("/") for origin in self.cors)
        return Cors(origins, any_may_change=bool(self.token))

    def http(self) -> HttpOptions:
        """The same for the machinery."""
        limits = {name: getattr(self.limits, name) for name in HttpOptions.__struct_fields__}
        limits |= {
            "host": self.host,
            "port": self.port,
            "insecure": True,  # the protocol has no TLS; `check` asks for a token instead
            "allowed_hosts": self.hosts,
            "checks_hosts": not self.is_open_to_pages,
            "max_body": self.max_body,
            "max_upload": max(self.max_body, self.max_upload),
            "passes_over": self.compat_strict,
        }
        return HttpOptions(**limits)

    def check(self) -> None:
        """Raise Misconfigured for what would be dangerous."""
        http = self.http()
        if not (self.token or http.is_local):
            raise Misconfigured(
                f"a worker that listens at {self.host} without a token would run anybody's jobs",
                hint="set token (and send it as Authorization: Bearer ...), or listen at 127.0.0.1",
            )
        http.check()
