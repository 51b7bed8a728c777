"""Jobs that go wrong, and what is done about it."""

from __future__ import annotations

import penstock
from scenarios import jobs
from scenarios.scenario import Scenario, Stage, Story, expect


async def failure(stage: Stage) -> Story:
    job = await jobs.divide.asubmit(1, 0)
    record = await job.await_end()
    return Story(job, _error(record))


async def retry(stage: Stage) -> Story:
    job = await jobs.fetch.asubmit("a-slow-server")
    result = await job
    return Story(job, f"tried again after a backoff; result: {result}")


async def retry_when_told(stage: Stage) -> Story:
    job = await jobs.poll.asubmit(17)
    result = await job
    first = await job.arefresh()
    again = await stage.ps.aget(first.successor or "")
    waited = (again.record.started_at or 0) - (first.finished_at or 0)
    expect(waited >= 0.4, f"it was tried again after {waited:.2f} s")
    return Story(job, f"raised Retry(after=0.4); result: {result}")


async def timeout(stage: Stage) -> Story:
    job = await jobs.wait_for_ever.asubmit()
    return Story(job, _error(await job.await_end()))


async def killed_process(stage: Stage) -> Story:
    job = await jobs.crash.asubmit()
    record = await job.await_end()
    expect(record.result is not None and record.result.error_code == "KILLED", _error(record))
    return Story(job, "its own process, killed by SIGKILL; nothing else was harmed")


def _error(record: penstock.Job) -> str:
    assert record.result is not None
    return f"{record.result.error_code}: {record.result.error_message}"


SCENARIOS = [
    Scenario("failure", "job.math.divide", "FAILED", failure),
    Scenario("failure, then retry", "job.net.fetch", "SUCCEEDED", retry),
    Scenario("asks for a retry", "job.net.poll", "SUCCEEDED", retry_when_told),
    Scenario("runs too long", "job.slow.wait", "TIMEOUT", timeout),
    Scenario("process killed", "job.native.crash", "FAILED", killed_process),
]
