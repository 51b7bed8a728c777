"""A request answered: whole, or in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.api.openai.bodies import AnyBody, Generating
from penstock.api.openai.endpoints import Endpoint
from penstock.api.openai.errors import job_headers
from penstock.api.openai.model_job import ModelJob, submit
from penstock.api.openai.streaming import events
from penstock.api.openai.voices import Voice
from penstock.api.reply import EVENT_STREAM, JSON_HEADERS, AnyReply, Reply, StreamReply, encode

if TYPE_CHECKING:
    from penstock.api.call import Call


async def answered(call: Call, endpoint: Endpoint) -> AnyReply:
    body = await call.json(endpoint.body)
    job = await submit(call, body)
    if endpoint.voice is not None and isinstance(body, Generating) and body.stream:
        return await _in_parts(call, job, endpoint.voice(body, job.origin))
    return await _whole(call, job, endpoint, body)


async def _whole(call: Call, job: ModelJob, endpoint: Endpoint, body: AnyBody) -> Reply:
    try:
        with call.attending():
            result = await job.answer(endpoint.result)
    finally:
        await job.leave()
    headers = (*JSON_HEADERS, *job_headers(job.origin.job_id))
    return Reply(encode(endpoint.tell(body, job.origin, result)), 200, headers)


async def _in_parts(call: Call, job: ModelJob, voice: Voice) -> StreamReply:
    headers = (*EVENT_STREAM, *job_headers(job.origin.job_id))
    content = events(job, voice)
    try:
        with call.attending():
            await anext(content)
    except BaseException:
        await job.leave()  # what was never begun does not do so itself
        raise
    return StreamReply(content, headers, counted=True, whole=True)
