"""Files that a job left behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec import Struct

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.views import Absent, ArtifactView, absent, answer, views_of
from penstock.api.operation import Operation
from penstock.api.ranges import Part, part_of
from penstock.api.reply import AnyReply, Headers, Reply, StreamReply
from penstock.core.artifact import Artifact
from penstock.core.errors import NotFound

if TYPE_CHECKING:
    from penstock.api.call import Call

_PART = 256 << 10
_LISTED = "/jobs/{job_id}/artifacts lists what there is"


class Artifacts(Struct, frozen=True):
    job_id: str
    artifacts: tuple[ArtifactView, ...]
    skipped: tuple[str, ...]
    """What lay in the output folder and was not collected, each with its reason."""


class ArtifactReading:
    def __init__(self, facade: ContainerFacade) -> None:
        self._facade = facade

    async def list_artifacts(self, call: Call) -> Reply:
        job_id = call.params["job_id"]
        record = await self._facade.get(job_id)
        if record is None:
            return absent(job_id)
        skipped = record.result.skipped if record.result is not None else ()
        return answer(Artifacts(job_id, views_of(record.artifacts), skipped))

    async def get_artifact(self, call: Call) -> AnyReply:
        record = await self._facade.get(call.params["job_id"])
        for artifact in record.artifacts if record is not None else ():
            if artifact.name == call.params["path"]:
                break
        else:
            raise NotFound("there is no such artifact", hint=_LISTED)
        part = part_of(call.headers, artifact.size, _etag(artifact))
        is_bare = part.status == 304 or call.scope["method"] == "HEAD"
        content = self._read(artifact, Part(part.status, 0, 0) if is_bare else part)
        return StreamReply(content, _headers(artifact, part), part.status, length=part.length)

    async def _read(self, artifact: Artifact, part: Part) -> AsyncGenerator[bytes, None]:
        at, left = part.start, part.length
        while left:
            piece = await self._facade.read_artifact(artifact, at, min(_PART, left))
            if not piece:
                raise NotFound("the artifact is shorter than it was")
            at, left = at + len(piece), left - len(piece)
            yield piece


def _etag(artifact: Artifact) -> bytes:
    return b'"%b"' % artifact.sha256.encode("ascii")


def _headers(artifact: Artifact, part: Part) -> Headers:
    """What a job made may be anything: a browser shall not show it as if it came from us."""
    name = quote(artifact.name.rpartition("/")[2], safe="", errors="replace")
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


def operations(facade: ContainerFacade) -> tuple[Operation, ...]:
    these = ArtifactReading(facade)
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
