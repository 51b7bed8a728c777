"""Files that a job left behind."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec import Struct

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.views import Absent, ArtifactView, absent, answer, views_of
from penstock.api.operation import route
from penstock.api.ranges import download
from penstock.api.reply import AnyReply, Headers, Reply
from penstock.core.artifact import Artifact
from penstock.core.errors import NotFound

if TYPE_CHECKING:
    from penstock.api.call import Call

_LISTED = "/jobs/{job_id}/artifacts lists what there is"


class Artifacts(Struct, frozen=True):
    job_id: str
    artifacts: tuple[ArtifactView, ...]
    skipped: tuple[str, ...]
    """What lay in the output folder and was not collected, each with its reason."""


class ArtifactReading:
    def __init__(self, facade: ContainerFacade) -> None:
        self._facade = facade

    @route("GET /jobs/{job_id}/artifacts", answer=Artifacts, others={404: Absent})
    async def list_artifacts(self, call: Call) -> Reply:
        """List a job's artifacts.

        The files that it left in its output folder; none before it has ended.
        """
        job_id = call.params["job_id"]
        record = await self._facade.get(job_id)
        if record is None:
            return absent(job_id)
        skipped = record.result.skipped if record.result is not None else ()
        return answer(Artifacts(job_id, views_of(record.artifacts), skipped))

    @route(
        "GET /jobs/{job_id}/artifacts/{path...}",
        answer=bytes,
        answer_type="application/octet-stream",
        others={206: bytes, 304: None},
        refusals=(404, 416),
    )
    async def get_artifact(self, call: Call) -> AnyReply:
        """Download an artifact.

        By its path, as the list has it. In parts with `Range`; the `ETag` is its SHA-256, and
        `If-None-Match` answers 304.
        """
        record = await self._facade.get(call.params["job_id"])
        for artifact in record.artifacts if record is not None else ():
            if artifact.name == call.params["path"]:
                break
        else:
            raise NotFound("there is no such artifact", hint=_LISTED)
        etag = b'"%b"' % artifact.sha256.encode("ascii")
        read = partial(self._facade.read_artifact, artifact)
        return download(call, artifact.size, etag, _headers(artifact), read)


def _headers(artifact: Artifact) -> Headers:
    """What a job made may be anything: a browser shall not show it as if it came from us."""
    name = quote(artifact.name.rpartition("/")[2], safe="", errors="replace")
    return (
        (b"content-type", b"application/octet-stream"),
        (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode("ascii")),
        (b"content-security-policy", b"default-src 'none'; sandbox"),
    )
