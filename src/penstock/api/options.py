"""Address, TLS and limits of the HTTP server."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from msgspec import Struct

from penstock.core.errors import Misconfigured

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


class HttpOptions(Struct, frozen=True, kw_only=True):
    """Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8700
    """0 takes a free one."""
    unix_socket: Path | None = None
    """Listen there, and not at host and port; only its owner can connect."""
    certfile: Path | None = None
    keyfile: Path | None = None
    insecure: bool = False
    """Listen beyond this machine without TLS: keys and jobs can be read on the way."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted Host headers. Empty: on loopback its own names, else any."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may call it with a key; `*` is any."""
    checks_hosts: bool = True
    """False accepts any Host header."""

    max_body: int = 8 << 20
    """Maximum size of a JSON body, and of one line of a stream."""
    max_upload: int = 64 << 20
    """Maximum size of a blob, and of a batch of jobs."""
    max_depth: int = 64
    max_head: int = 64 << 10
    openai_strict: bool = False
    """Whether the OpenAI API refuses fields that it does not know, rather than ignore them."""
    image_sources: tuple[str, ...] = ()
    """URL prefixes, as `https://example.com/`, below which images of requests are fetched."""
    models_dir: Path | None = None
    """Where models are kept that a client pulls; None: nothing can be pulled."""
    spools: tuple[Path, ...] = ()
    """Workspaces of spool servers, whose jobs are counted on request."""
    ignore_unknown: bool = False
    """Whether unknown parameters of a query, and slashes at the end of a path, are ignored."""

    head_timeout: float = 10.0
    """Time limit for a request's head; for the first one from the connection on."""
    body_grace: float = 10.0
    """Time before `min_rate` applies to a body."""
    min_rate: int = 4096
    """Bytes a second."""
    body_timeout: float = 300.0
    keep_alive: float = 75.0
    """How long a connection may idle between two requests."""
    stall: float = 30.0
    """How long a reader may stall."""
    heartbeat: float = 15.0
    """Interval of keep-alive comments in an event stream."""
    idle: float = 300.0
    """Idle timeout of a stream of submissions."""
    grace: float = 5.0
    """Time for open requests to finish when the server closes."""

    max_connections: int = 10_000
    max_streams: int = 2000
    """Open event and submission streams, all keys together."""
    max_streams_per_key: int | None = None
    """None: a quarter of all, so that no key can take them from the others."""
    max_waiting: int = 4096
    """Requests that wait for a job's end, all keys together."""
    max_waiting_per_key: int | None = None
    """None: a quarter of all."""
    rate: float = 0.0
    """Requests a second that a key may make; 0 is no limit."""
    burst: int = 0
    """Burst size; 0: the requests of one second."""

    access_log: bool = False
    """Whether each request is logged, to the logger `penstock.access`."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.unix_socket is not None:
            return True
        name = self.host.strip("[]").lower()
        if name == "localhost":
            return True
        try:
            return ip_address(name).is_loopback
        except ValueError:
            return False

    @property
    def streams_per_key(self) -> int:
        return self.max_streams_per_key or max(1, self.max_streams // 4)

    @property
    def waiting_per_key(self) -> int:
        return self.max_waiting_per_key or max(1, self.max_waiting // 4)

    @property
    def scheme(self) -> str:
        return "http" if self.certfile is None else "https"

    @property
    def own_names(self) -> frozenset[str]:
        """Its host names on this machine."""
        return _LOCAL_NAMES | {self.host.lower()}

    @property
    def hosts(self) -> frozenset[str]:
        """Accepted host names in lower case; empty means any."""
        if not self.checks_hosts or self.unix_socket is not None:
            return frozenset()
        if self.allowed_hosts:
            return frozenset(name.lower() for name in self.allowed_hosts)
        return self.own_names if self.is_local else frozenset()

    def check(self) -> None:
        """Raise Misconfigured for what would be dangerous, or can't work."""
        if self.keyfile is not None and self.certfile is None:
            raise Misconfigured("a TLS key needs a certificate", hint="set http.certificate, too")
        for file in (self.certfile, self.keyfile):
            if file is not None and not file.is_file():
                raise Misconfigured(f"there is no file {file}", hint="check the path")
        if not (self.is_local or self.certfile or self.insecure):
            raise Misconfigured(
                f"listening at {self.host} without TLS would send keys and jobs in the open",
                hint="set http.certificate, listen at 127.0.0.1 behind a proxy that has one, "
                "or set http.insecure if it is meant so",
            )
