"""Interfaces of an engine elsewhere: every method of a Protocol becomes a call over a link."""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache, cached_property
from hashlib import sha256
from typing import Any, Protocol, TypeVar, cast

import msgspec
from msgspec import Raw

from penstock.core.errors import Unavailable, UnreadablePointer
from penstock.core.pointer import FIELD, check_size, parse_blob
from penstock.ports.blobs import MAX_ARTIFACT, PART, Blobs, BlobStat, BlobUploads
from penstock.ports.engine_api import EngineApi
from penstock.ports.operations import (
    Method,
    bindings_of,
    methods_of,
    parts_of,
    proxy_class,
)
from penstock.ports.shared_state import SharedState
from penstock.workloads.llm.batches import Batches
from penstock.workloads.pipeline.interface import Pipelines

T = TypeVar("T")
Decode = Callable[[Raw], T]

STATE = "state"
"""How the names of calls to the shared state begin."""
BLOBS = "blobs"
"""How those begin that write a blob part by part."""
RENEW = "link.renew"
"""The call by which a worker gets its next certificate."""

_PARTS = parts_of(EngineApi, {"Batches": Batches, "Pipelines": Pipelines})
ONCE = frozenset(
    prefix + name
    for prefix, interface in [("", EngineApi), *((f"{n}.", part) for n, part in _PARTS.items())]
    for name, declared in methods_of(interface)
    if any(binding.once for binding in bindings_of(declared))
)
"""Names of calls that must not be sent again after the answer was lost."""


class Caller(Protocol):
    """What sends a call and decodes its answer."""

    def call(
        self, method: str, decode: Decode[T], params: Mapping[str, object]
    ) -> Awaitable[T]: ...

    def stream(
        self, method: str, decode: Decode[T], params: Mapping[str, object]
    ) -> AsyncIterator[T]: ...


def remote_api(caller: Caller) -> EngineApi:
    """The API of the engine that `caller` calls."""
    return cast(EngineApi, _proxy_class(EngineApi, "", _Engine)(caller))


def remote_state(caller: Caller) -> SharedState:
    """The shared state of the engine that `caller` calls, for workers."""
    return cast(SharedState, _proxy_class(SharedState, f"{STATE}.")(caller))


class _Proxy:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def close(self) -> None:
        """The link is somebody else's."""


def _part(name: str, interface: type) -> cached_property[Any]:
    return cached_property(lambda proxy: _proxy_class(interface, f"{name}.")(proxy._caller))


_Engine = type("_Engine", (_Proxy,), {name: _part(name, part) for name, part in _PARTS.items()})
"""Has the parts of an engine's API, which are made when they are first used."""


@cache
def _proxy_class(interface: type, prefix: str, base: type[_Proxy] = _Proxy) -> type[Any]:
    return proxy_class(interface, base, lambda name, declared: _method(prefix + name, declared))


def _method(name: str, declared: Method) -> Callable[..., Any]:
    signature = inspect.signature(declared)
    parameters = list(signature.parameters.values())[1:]
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = {one.name for one in parameters if one.default is one.empty}
    allowed = {one.name for one in parameters}
    answer = typing.get_type_hints(declared)["return"]
    is_stream = not inspect.iscoroutinefunction(declared)
    decode = msgspec.msgpack.Decoder(typing.get_args(answer)[0] if is_stream else answer).decode

    def call(self: _Proxy, *args: object, **params: object) -> Any:
        if args:
            given = dict(zip(positional, args, strict=False))
            if len(args) > len(positional) or given.keys() & params.keys():
                signature.bind(self, *args, **params)
            params |= given
        if not required <= params.keys() <= allowed:
            signature.bind(self, **params)
        ask = self._caller.stream if is_stream else self._caller.call
        return ask(name, decode, params)

    return call


_WHOLE = 4 << 20
"""Bytes of a payload that are sent at once: other calls of the same connection wait so long."""


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(data), _WHOLE):
        yield bytes(view[start : start + _WHOLE])


class RemoteBlobs(Blobs):
    """Blobs kept by an engine elsewhere; small payloads never leave this side."""

    def __init__(
        self,
        caller: Caller,
        *,
        inline_limit: int = 4096,
        max_size: int = 64 << 20,
        max_artifact: int = MAX_ARTIFACT,
    ) -> None:
        super().__init__(inline_limit=inline_limit, max_size=max_size, max_artifact=max_artifact)
        self._api = remote_api(caller)
        self._uploads = cast(BlobUploads, _proxy_class(BlobUploads, f"{BLOBS}.")(caller))

    async def stream(self, uri: str, chunk: int = PART) -> AsyncIterator[bytes]:
        start = 0
        while piece := await self.read(uri, start, chunk):
            yield piece
            start += len(piece)

    async def read(self, uri: str, start: int, length: int) -> bytes:
        if uri.startswith("data:"):
            return await super().read(uri, start, length)
        return await self._api.read_blob(uri, start, length)

    async def write_part(self, upload: str, start: int, data: bytes) -> None:
        await self._uploads.write_part(upload, start, data)

    async def finish_upload(self, upload: str, digest: str, size: int, media_type: str) -> BlobStat:
        return await self._uploads.finish_upload(upload, digest, size, media_type)

    async def drop_upload(self, upload: str) -> None:
        await self._uploads.drop_upload(upload)

    async def _put(self, data: bytes, media_type: str) -> str:
        if len(data) <= _WHOLE:
            return await self._api.put_blob(data, media_type)
        return (await self.put_stream(_pieces(data), media_type)).uri

    async def _get(self, uri: str) -> bytes:
        if not uri.startswith("blob:"):
            return await self._api.get_blob(uri)
        pieces = [await self._api.read_blob(uri, 0, _WHOLE)]
        while len(pieces[-1]) == _WHOLE:
            check_size(FIELD, len(pieces) * _WHOLE, self.max_size)
            pieces.append(await self._api.read_blob(uri, len(pieces) * _WHOLE, _WHOLE))
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        check_size(FIELD, len(data), self.max_size)
        if sha256(data).hexdigest() != parse_blob(uri).digest:
            raise UnreadablePointer(FIELD, f"the content of {uri!r} is damaged")
        return data

    async def _stat(self, uri: str) -> BlobStat:
        return await self._api.stat_blob(uri)

    async def _collect(self, kept: set[str], older_than: float) -> int:
        raise Unavailable("the engine that keeps the blobs collects them")
