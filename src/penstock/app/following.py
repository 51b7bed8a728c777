"""What happens to a job and its retries: so far, and as it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from operator import itemgetter

from penstock.app.finding import find_job
from penstock.core.job import Job
from penstock.ports.engine_api import EngineApi, JobUpdate, Logged, Moved
from penstock.ports.store import LogLine


async def tries_of(api: EngineApi, text: str) -> AsyncIterator[Job]:
    """A job and its retries, each once the one before has ended."""
    job = await find_job(api, text)
    while True:
        yield job
        job = await api.get(job.job_id)
        if job.successor is None:
            return
        job = await api.get(job.successor)


async def updates_of(api: EngineApi, job_id: str) -> AsyncIterator[JobUpdate]:
    """Everything that has happened so far, in order, then the updates of `EngineApi.follow`."""
    told, read = 0, 0
    for update in await _past(api, job_id):
        match update:
            case Moved(entry):
                told = entry.n
            case Logged(line):
                read = line.n
        yield update
    async for update in api.follow(job_id, read):
        if isinstance(update, Moved):
            # Moves made before we began to follow are in neither, or in both.
            for entry in (await api.history(job_id))[told : update.transition.n]:
                told = entry.n
                yield Moved(entry)
        else:
            yield update
    for entry in (await api.history(job_id))[told:]:
        yield Moved(entry)


async def _past(api: EngineApi, job_id: str) -> list[JobUpdate]:
    timed: list[tuple[float, JobUpdate]] = [
        (entry.at, Moved(entry)) for entry in await api.history(job_id)
    ]
    timed += [(line.at, Logged(line)) async for line in log_lines(api, job_id)]
    return [update for _, update in sorted(timed, key=itemgetter(0))]


async def log_lines(api: EngineApi, job_id: str) -> AsyncIterator[LogLine]:
    after = 0
    while lines := await api.read_log(job_id, after):
        for line in lines:
            yield line
        after = lines[-1].n


async def log_followed(api: EngineApi, job_id: str) -> AsyncIterator[LogLine]:
    async for update in api.follow(job_id):
        if isinstance(update, Logged):
            yield update.line
