"""HTTP to an engine over its Unix socket.

Whatever goes wrong on the way is `EngineUnavailable`: no connection, one that breaks, no answer in
time, an answer that makes no sense. What the engine itself refuses is `Refused`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from yarl import URL

from penstock.workloads.container.engine import (
    CommandNotFound,
    CommandNotRunnable,
    ContainerNotFound,
    EngineError,
    EngineUnavailable,
    ImageNotFound,
    PullFailed,
    Unsupported,
)
from penstock.workloads.container.engines.docker.answers import Progress, Refusal, Version

T = TypeVar("T")
Query = Mapping[str, str | int]
Body = bytes | AsyncIterable[bytes]

MOST_BYTES = 64 << 20
"""An answer longer than this is nonsense."""
_LONGEST_LINE = 4 << 20
_UNCHANGED = 304
VERSION_PATH = "/version"
"""Which versions an engine speaks is asked without one."""
NEWEST = (1, 44)
"""The newest version of the API that this was written for."""
_NO_LIMIT = aiohttp.ClientTimeout(total=None)


class Refused(EngineError):
    """The engine said no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Api:
    """One engine. Connections are kept and used again; as many as are needed."""

    def __init__(self, socket: str, timeout: float) -> None:
        self.socket = socket
        self.timeout = timeout
        self.version: Version | None = None
        self.prefix = ""
        """`/v1.41`, once the engine's version is known."""
        self._session: aiohttp.ClientSession | None = None
        self._answers: set[aiohttp.ClientResponse] = set()
        self._limits: set[asyncio.Timeout] = set()

    async def greeted(self) -> Version:
        """Who the engine is; asked once, before the first request."""
        return self.version or await self.greet()

    async def greet(self) -> Version:
        """Ask, and speak that version from now on."""
        version = await self.ask(Version, "GET", VERSION_PATH)
        ours = min(NEWEST, self._numbers(version.api_version))
        if version.min_api_version:
            ours = max(ours, self._numbers(version.min_api_version))
        self.prefix, self.version = f"/v{ours[0]}.{ours[1]}", version
        return version

    def _numbers(self, text: str) -> tuple[int, int]:
        major, _, minor = text.partition(".")
        if not (major.isdigit() and minor.isdigit()):
            raise self.nonsense(f"{text!r} as its version")
        return int(major), int(minor)

    async def ask(
        self,
        kind: type[T],
        method: str,
        path: str,
        query: Query | None = None,
        body: object = None,
        *,
        timeout: float | None = None,
    ) -> T:
        """A request whose answer is JSON of that kind."""
        data = None if body is None else msgspec.json.encode(body)
        return self.decoded(kind, await self.tell(method, path, query, data, timeout=timeout))

    async def tell(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> bytes:
        """A request whose answer may be anything."""
        async with self.open(method, path, query, body, timeout=timeout) as answer:
            return await self._whole(answer, timeout)

    async def wait(
        self, kind: type[T], path: str, query: Query | None = None, *, patient: bool = False
    ) -> T:
        """A request whose answer may take for ever; its head comes at once, if not `patient`."""
        async with self.open("POST", path, query, patient=patient) as answer:
            with self.sane():
                return self.decoded(kind, await _body(answer))

    @asynccontextmanager
    async def progress(
        self,
        path: str,
        query: Query,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[AsyncIterator[Progress]]:
        """A request that reports while it works, for as long as it takes."""
        async with self.open("POST", path, query, body, patient=True, headers=headers) as answer:
            yield self._lines(answer)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Body | None = None,
        *,
        timeout: float | None = None,
        patient: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose head has come, and is no refusal."""
        limit = None if patient else timeout or self.timeout
        if path != VERSION_PATH:
            await self.greeted()
        prefix = self.prefix if path != VERSION_PATH else ""
        async with self._within(limit):
            answer = await self._opened().request(
                method,
                URL(f"http://engine{prefix}{path}{_suffix(query)}", encoded=True),
                data=body,
                headers={**_headers(body), **(headers or {})},
                timeout=_NO_LIMIT,
                allow_redirects=False,
            )
        self._answers.add(answer)
        try:
            if answer.status >= 400:
                raise self.refusal(answer.status, await self._whole(answer, timeout))
            if answer.status >= 300 and answer.status != _UNCHANGED:
                raise self.nonsense(f"status {answer.status}")
            yield answer
        finally:
            self._answers.discard(answer)
            answer.release() if answer.content.is_eof() else answer.close()

    def refusal(self, status: int, body: bytes) -> EngineError:
        return Refused(status, self.decoded(Refusal, body).message.strip())

    def decoded(self, kind: type[T], body: bytes) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.nonsense(f"{error}: {body[:100]!r}") from None

    def nonsense(self, what: str) -> EngineUnavailable:
        return EngineUnavailable(f"the engine at {self.socket} answers nonsense: {what}")

    async def close(self) -> None:
        """Whoever still waits for an answer is told that none will come."""
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
        for answer in self._answers:
            answer.content.set_exception(aiohttp.ClientConnectionError("it was closed"))
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self.socket, limit=0, keepalive_timeout=30),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    async def _whole(self, answer: aiohttp.ClientResponse, timeout: float | None) -> bytes:
        async with self._within(timeout or self.timeout):
            return await _body(answer)

    async def _lines(self, answer: aiohttp.ClientResponse) -> AsyncIterator[Progress]:
        rest = b""
        with self.sane():
            async for data in answer.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield self.decoded(Progress, line)
                if len(rest) > _LONGEST_LINE:
                    raise self.nonsense("a line without an end")
        if rest.strip():
            yield self.decoded(Progress, rest)

    @asynccontextmanager
    async def _within(self, seconds: float | None) -> AsyncIterator[None]:
        """For that long, or until it is closed."""
        with self.sane():
            async with asyncio.timeout(seconds) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)

    @contextmanager
    def sane(self) -> Iterator[None]:
        """Whatever the connection does becomes EngineUnavailable."""
        try:
            yield
        except TimeoutError:
            why = f"the engine at {self.socket} does not answer"
            raise EngineUnavailable(why) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            what = str(error) or type(error).__name__
            why = f"the engine at {self.socket} can't be reached: {what}"
            raise EngineUnavailable(why) from error


def container(name: str, action: str = "") -> str:
    """The path of a container, whose name can't lead anywhere else."""
    return f"/containers/{quote(name, safe='')}{action}"


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise ValueError("the answer has no end")
    return b"".join(parts)


def _suffix(query: Query | None) -> str:
    return f"?{urlencode(query)}" if query else ""


def _headers(body: Any) -> dict[str, str]:
    if body is None:
        return {}
    kind = "application/json" if isinstance(body, bytes) else "application/x-tar"
    return {"Content-Type": kind}


NOT_FOUND = 404
CONFLICT = 409

_NO_COMMAND = ("no command specified", "no command or entrypoint", "no cmd or entrypoint")
_GPU = ("could not select device driver", "nvidia-container-cli", "unresolvable cdi devices")
_RUNTIME = ("unknown or invalid runtime", "invalid runtime name", "unknown runtime")
_MISSING = ("executable file not found", "no such file or directory", "not found in $path")
_NOT_RUNNABLE = ("permission denied", "exec format error", "is a directory")
_INITS = ("docker-init", "podman-init", "catatonit", "tini")
_NO_SUCH_IMAGE = (
    "manifest unknown",
    "not found",
    "does not exist",
    "name unknown",
    "no such image",
    "repository name not known",
)


def of_create(refused: Refused) -> EngineError:
    words = refused.message.lower()
    if refused.status == NOT_FOUND and "image" in words:
        return ImageNotFound(refused.message)
    if any(text in words for text in _NO_COMMAND):
        return CommandNotFound(refused.message)
    if any(text in words for text in (*_RUNTIME, *_GPU)):
        return Unsupported(refused.message)
    return refused


def means_no_init(refused: Refused) -> bool:
    """Podman looks for its init program when a container is made."""
    return "container-init binary not found" in refused.message


def of_container(refused: Refused) -> EngineError:
    return ContainerNotFound(refused.message) if refused.status == NOT_FOUND else refused


def of_start(refused: Refused) -> EngineError:
    words = refused.message.lower()
    if refused.status == NOT_FOUND and "no such container" in words:
        return of_container(refused)
    if any(text in words for text in _NO_COMMAND):
        return CommandNotFound(refused.message)
    if any(text in words for text in _GPU):
        return Unsupported(f"the container can't have GPUs: {refused.message}")
    if "exec" in words and not any(name in words for name in _INITS):
        if any(text in words for text in _MISSING):
            return CommandNotFound(refused.message)
        if any(text in words for text in _NOT_RUNNABLE):
            return CommandNotRunnable(refused.message)
    return refused


def means_that_nothing_runs(refused: Refused) -> bool:
    """Of a signal: there is no such container, or it has ended. Podman has no status for that."""
    words = refused.message.lower()
    return refused.status in (NOT_FOUND, CONFLICT) or "can only kill running" in words


def of_pull(words: str) -> EngineError:
    """Registries that know no such image say so, in one of these ways."""
    lower = words.lower()
    if any(text in lower for text in _NO_SUCH_IMAGE) and "no such host" not in lower:
        return ImageNotFound(words)
    return PullFailed(words)
