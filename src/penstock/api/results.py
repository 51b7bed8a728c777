"""A job's result, its artifacts, and blobs; whole or by range."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec import Struct

from penstock.api.operation import Pace, route
from penstock.api.problems import Refused
from penstock.api.ranges import download, part_of
from penstock.api.reply import NO_STORE, NOTHING, AnyReply, Headers, Reply, json_reply
from penstock.api.table import Seconds, bound
from penstock.core.artifact import Artifact
from penstock.core.errors import (
    InvalidRequest,
    NotFound,
    UnreadablePointer,
    WaitTimedOut,
    job_ended,
)
from penstock.core.job import Job
from penstock.core.pointer import (
    BINARY,
    JSON,
    BlobName,
    check_media_type,
    data_media_type,
    decode_data,
    parse_blob,
)
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import newest_try

if TYPE_CHECKING:
    from penstock.api.call import Call

_BARE = re.compile(r"(?:sha256-)?([0-9a-f]{64})")

# What a job made may be anything: a browser shall not run it as if it came from us.
_INERT: Headers = (
    (b"content-security-policy", b"default-src 'none'; sandbox"),
    (b"content-disposition", b"attachment"),
)


class ResultQuery(Struct, frozen=True):
    wait: Seconds = 0.0
    """Seconds to wait for the job's end, at most 60."""


@route(
    "GET /v1/jobs/{job_id}/result",
    query=ResultQuery,
    answer=bytes,
    answer_type="*/*",
    others={204: None, 206: bytes, 304: None},
    refusals=(404, 409, 410, 416, 422),
    pace=Pace.WAITS,
)
async def get_result(call: Call) -> AnyReply:
    """Get a job's result.

    As the job made it, with its own media type; in parts with `Range`. Follows retries. 409
    while the job has not ended, 410 if it ended without a result (the problem says how), 204 if
    it succeeded without one.
    """
    job = await _ended(call, call.params["job_id"], call.query(ResultQuery).wait)
    if job.state is not JobState.SUCCEEDED:
        raise job_ended(job)
    pointer = job.result.result_ptr if job.result else None
    if not pointer:
        return NOTHING
    return await _send(call, pointer)


async def _ended(call: Call, job_id: str, wait: float) -> Job:
    """The final record, following retries."""
    if wait > 0:
        try:
            with call.attending():
                return await call.api.wait(job_id, wait)
        except WaitTimedOut:
            pass
    job = await newest_try(call.api, await call.api.get(job_id))
    if not job.is_final:
        raise Refused(
            409,
            "NOT_ENDED",
            f"job {job.job_id} is {job.state}: it has no result yet",
            hint="ask again later, or with ?wait=SECONDS",
            headers=((b"retry-after", b"1"),),
        )
    return job


# -- artifacts --------------------------------------------------------------------


class ArtifactList(Struct, frozen=True):
    job_id: str
    """The try that left them."""
    artifacts: tuple[Artifact, ...]


@route(
    "GET /v1/jobs/{job_id}/artifacts",
    query=ResultQuery,
    answer=ArtifactList,
    refusals=(404, 409),
    pace=Pace.WAITS,
)
async def list_artifacts(call: Call) -> Reply:
    """List a job's artifacts.

    The files that it left, whatever its end. Follows retries. 409 while the job has not ended.
    """
    job = await _ended(call, call.params["job_id"], call.query(ResultQuery).wait)
    return json_reply(ArtifactList(job.job_id, job.result.artifacts if job.result else ()))


@route(
    "GET /v1/jobs/{job_id}/artifacts/{name...}",
    query=ResultQuery,
    answer=bytes,
    answer_type="*/*",
    others={206: bytes, 304: None},
    refusals=(404, 409, 416),
    pace=Pace.WAITS,
)
async def get_artifact(call: Call) -> AnyReply:
    """Download an artifact.

    By its name. In parts with `Range` and `If-Range`; the `ETag` is its SHA-256, and
    `If-None-Match` answers 304.
    """
    job = await _ended(call, call.params["job_id"], call.query(ResultQuery).wait)
    name = call.params["name"]
    for artifact in job.result.artifacts if job.result else ():
        if artifact.name == name:
            return await _send(call, artifact.pointer, artifact)
    raise NotFound(f"job {job.job_id} left no artifact {name!r}")


# -- blobs ------------------------------------------------------------------------


class BlobView(Struct, frozen=True):
    uri: str
    """To be passed as a job's `context_ptr`. A small one holds the content itself."""
    size: int


@bound("put_blob", body=bytes, body_type="*/*", large=True, answer=BlobView)
async def put_blob(call: Call) -> Reply:
    media_type = call.header(b"content-type").replace(" ", "") or BINARY
    check_media_type(media_type)
    async with call.room():
        data = await call.body()
        return json_reply(BlobView(await call.api.put_blob(data, media_type), len(data)), 201)


@bound("get_blob", answer=bytes, answer_type="*/*", others={206: bytes, 304: None})
async def get_blob(call: Call) -> AnyReply:
    return await _send(call, _uri(call.params["uri"]))


def _uri(text: str) -> str:
    if found := _BARE.fullmatch(text):
        return BlobName(found[1]).uri
    if text.startswith("blob:"):
        return parse_blob(text).uri
    if text.startswith("data:"):
        check_media_type(data_media_type(text))
        return text
    raise InvalidRequest(
        "uri", "is not the URI of a blob", hint="blob:sha256-..., escaped, or the digest alone"
    )


async def _send(call: Call, pointer: str, artifact: Artifact | None = None) -> AnyReply:
    if pointer.startswith("data:"):
        return _send_bytes(call, decode_data(pointer), data_media_type(pointer))
    try:
        stat = await call.api.stat_blob(pointer)
    except (NotFound, UnreadablePointer):
        raise NotFound("there is no such blob", hint="or its retention has passed") from None
    headers = _headers(stat.media_type)
    if artifact is not None:
        # What keeps a browser from running it, and the name to save it under.
        file = quote(artifact.name.rpartition("/")[2], safe="").encode()
        named = (b"content-disposition", b"attachment; filename*=UTF-8''" + file)
        headers = (headers[0], _INERT[0], named)
    etag = b'"%b"' % parse_blob(pointer).digest.encode()
    return download(call, stat.size, etag, headers, partial(call.api.read_blob, pointer))


def _send_bytes(call: Call, data: bytes, media_type: str) -> Reply:
    part = part_of(call.headers, len(data), None)
    body = data[part.start : part.start + part.length]
    headers = (*_headers(media_type), (b"accept-ranges", b"bytes"), NO_STORE, *part.headers)
    return Reply(body, part.status, headers)


def _headers(media_type: str) -> Headers:
    kind = (b"content-type", media_type.encode("ascii", "replace"))
    return (kind,) if media_type == JSON else (kind, *_INERT)
