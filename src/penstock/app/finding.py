"""Jobs as people name them: by a part of an id, or all pages of a list."""

from __future__ import annotations

import sys

from msgspec.structs import replace

from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.job import Job, chain_of
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import JobQuery

_ENOUGH = 5
_SHORTEST = 3
_PAGE = 1000


async def find_job(api: EngineApi, text: str) -> Job:
    """The job with this id, or with one that begins or ends so.

    Raises NotFound, or InvalidRequest if it could be several.
    """
    try:
        return await api.get(text)
    except NotFound:
        found = await _alike(api, text) if len(text) >= _SHORTEST else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"no job {text!r}", hint="'penstock ps' lists the jobs there are")
    some = ", ".join(job.job_id for job in found[:3]) + (", …" if len(found) > 3 else "")
    raise InvalidRequest("job", f"{text!r} could be several jobs: {some}")


async def job_id_of(api: EngineApi, text: str) -> str:
    """The whole id; what was given, if no job has it: it may have been pruned."""
    try:
        return (await find_job(api, text)).job_id
    except NotFound:
        return text


async def _alike(api: EngineApi, text: str) -> list[Job]:
    """Jobs whose id begins or ends so; a few are enough to say that it could be several."""
    plain = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)
    found = {
        job.job_id: job
        for glob in (f"{plain}*", f"*{plain}")
        for job in await api.find(JobQuery(job_id=glob, limit=_ENOUGH))
    }
    return list(found.values())


async def first_try_of(api: EngineApi, text: str) -> str:
    """The first try of a job; what was given, if no job has that id: it may have been pruned."""
    try:
        return chain_of((await find_job(api, text)).request)
    except NotFound:
        return text


async def every_job(api: EngineApi, query: JobQuery) -> list[Job]:
    """All pages. A workflow's steps come in another order, so they are asked for at once."""
    if query.workflow_id is not None:
        return await api.find(replace(query, limit=sys.maxsize))
    jobs: list[Job] = []
    while page := await api.find(replace(query, limit=_PAGE)):
        jobs += page
        query = replace(query, before=page[-1].seq)
        if len(page) < _PAGE:
            break
    return jobs
