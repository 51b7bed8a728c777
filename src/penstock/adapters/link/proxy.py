"""Interfaces of an engine elsewhere: every method of a Protocol becomes a call over a link."""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar, cast

import msgspec
from msgspec import Raw

from penstock.core.errors import Unavailable
from penstock.ports.blobs import MAX_ARTIFACT, PART, Blobs, BlobStat, BlobUploads
from penstock.ports.engine_api import EngineApi
from penstock.ports.shared_state import SharedState
from penstock.workloads.llm.batches import Batches
from penstock.workloads.pipeline.interface import Pipelines

T = TypeVar("T")
Decode = Callable[[Raw], T]

STATE = "state"
"""How the names of calls to the shared state begin."""
BLOBS = "blobs"
"""How those begin that write a blob part by part."""

_WORKLOADS = {"Batches": Batches, "Pipelines": Pipelines}
"""Names in the annotations of EngineApi that its module imports for type checkers only."""


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
    return cast(EngineApi, _proxy_class(EngineApi, "")(caller))


def remote_state(caller: Caller) -> SharedState:
    """The shared state of the engine that `caller` calls, for workers."""
    return cast(SharedState, _proxy_class(SharedState, f"{STATE}.")(caller))


class _Proxy:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def close(self) -> None:
        """The link is somebody else's."""


@cache
def _proxy_class(interface: Any, prefix: str) -> type[_Proxy]:
    members: dict[str, Any] = {}
    for name, declared in vars(interface).items():
        if name.startswith("_") or hasattr(_Proxy, name):
            continue
        if isinstance(declared, property):
            members[name] = _part(
                typing.get_type_hints(declared.fget, None, _WORKLOADS)["return"], name
            )
        elif inspect.isfunction(declared):
            members[name] = _method(prefix + name, declared)
    made = type(f"Remote{interface.__name__}", (_Proxy,), members)
    for name, member in members.items():
        if isinstance(member, cached_property):
            member.__set_name__(made, name)
    return made


def _part(interface: type, name: str) -> cached_property[Any]:
    return cached_property(lambda proxy: _proxy_class(interface, f"{name}.")(proxy._caller))


def _method(name: str, declared: Callable[..., Any]) -> Callable[..., Any]:
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
        return await self._api.put_blob(data, media_type)

    async def _get(self, uri: str) -> bytes:
        return await self._api.get_blob(uri)

    async def _stat(self, uri: str) -> BlobStat:
        return await self._api.stat_blob(uri)

    async def _collect(self, kept: set[str], older_than: float) -> int:
        raise Unavailable("the engine that keeps the blobs collects them")
