"""Files that a job left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote

from msgspec import Struct

from penstock.api.container.answers import answer
from penstock.api.container.jobs import absent
from penstock.api.container.views import Absent
from penstock.api.operation import Operation
from penstock.api.ranges import Part, part_of
from penstock.api.reply import AnyReply, Headers, Reply, StreamReply
from penstock.core.errors import NotFound
from penstock.workloads.container.job import Artifact
from penstock.workloads.container.store import ContainerApi

if TYPE_CHECKING:
    from penstock.api.call import Call

_PART = 256 << 10
_LISTED = "/jobs/{job_id}/artifacts lists what there is"


class Artifacts(Struct, frozen=True):
    job_id: str
    artifacts: tuple[Artifact, ...]
    skipped: tuple[str, ...]
    """What lay in the output folder and was not collected, each with its reason."""


class ArtifactReading:
    def __init__(self, api: ContainerApi) -> None:
        self._api = api

    async def list_artifacts(self, call: Call) -> Reply:
        job_id = call.params["job_id"]
        record = await self._api.get(job_id)
        if record is None:
            return absent(job_id)
        return answer(Artifacts(job_id, record.artifacts, record.skipped))

    async def get_artifact(self, call: Call) -> AnyReply:
        found = await self._api.artifact(call.params["job_id"], call.params["path"])
        if found is None:
            raise NotFound("there is no such artifact", hint=_LISTED)
        artifact, file = found
        try:
            part = part_of(call.headers, artifact.size, _etag(artifact))
            is_bare = part.status == 304 or call.scope["method"] == "HEAD"
            sent = Part(part.status, 0, 0) if is_bare else part
            content = _read(file, sent)
            await anext(content)  # from here on it closes the file, however it ends
        except BaseException:
            file.close()
            raise
        headers = _headers(artifact, part)
        return StreamReply(content, headers, part.status, length=part.length)


async def _read(file: BinaryIO, part: Part) -> AsyncGenerator[bytes, None]:
    with file:
        yield b""
        left = part.length
        if part.start:
            await asyncio.to_thread(file.seek, part.start)
        while left:
            piece = await asyncio.to_thread(file.read, min(_PART, left))
            if not piece:
                raise NotFound("the artifact is shorter than it was")
            left -= len(piece)
            yield piece


def _etag(artifact: Artifact) -> bytes:
    return b'"%b"' % artifact.sha256.encode("ascii")


def _headers(artifact: Artifact, part: Part) -> Headers:
    """What a job made may be anything: a browser shall not show it as if it came from us."""
    name = quote(artifact.path.rpartition("/")[2], safe="", errors="replace")
    length = () if part.status == 304 else ((b"content-length", b"%d" % part.length),)
    return (
        (b"content-type", b"application/octet-stream"),
        (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode("ascii")),
        (b"content-security-policy", b"default-src 'none'; sandbox"),
        (b"cache-control", b"private, no-cache"),
        (b"accept-ranges", b"bytes"),
        (b"etag", _etag(artifact)),
        *part.headers,
        *length,
    )


def operations(api: ContainerApi) -> tuple[Operation, ...]:
    these = ArtifactReading(api)
    return (
        Operation(
            "GET",
            "/jobs/{job_id}/artifacts",
            these.list_artifacts,
            answer=Artifacts,
            others={404: Absent},
            summary="List a job's artifacts",
            description="The files that it left in its output folder; none before it has ended.",
        ),
        Operation(
            "GET",
            "/jobs/{job_id}/artifacts/{path...}",
            these.get_artifact,
            answer=bytes,
            answer_type="application/octet-stream",
            others={206: bytes, 304: None},
            refusals=(404, 416),
            summary="Download an artifact",
            description=(
                "By its path, as the list has it. In parts with `Range`; the `ETag` is its "
                "SHA-256, and `If-None-Match` answers 304."
            ),
        ),
    )
