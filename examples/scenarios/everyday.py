"""Jobs that go well."""

from __future__ import annotations

import penstock
from scenarios import jobs
from scenarios.scenario import Scenario, Stage, Story, expect


async def success(stage: Stage) -> Story:
    job = await jobs.shout.asubmit("hello")
    return Story(job, f"result: {await job}")


async def progress(stage: Stage) -> Story:
    job = await jobs.count_words.asubmit(["a penstock leads", "water to", "the wheel"])
    seen = 0
    async for update in job.afollow():
        seen += type(update).__name__ == "Progressed"
    expect(seen > 0, "no progress was seen")
    lines = [line.text for line in await job.alogs()]
    return Story(job, f"in a thread; progress seen {seen} times; its log: {lines[-1]}")


async def delayed(stage: Stage) -> Story:
    job = await jobs.shout.options(delay=0.6).asubmit("later")
    why = await job.awhy()
    await job
    record = await job.arefresh()
    waited = (record.started_at or 0) - record.accepted_at
    expect(waited >= 0.6, f"it started after {waited:.2f} s")
    return Story(job, f"before: {why}")


async def duplicate(stage: Stage) -> Story:
    once = jobs.shout.options(key="order-17")
    first, second = await once.asubmit("once"), await once.asubmit("once")
    expect(first.job_id == second.job_id, "the second submit made a second job")
    await first
    return Story(first, "submitted twice with one key: one job, one answer")


async def children(stage: Stage) -> Story:
    job = await jobs.book.asubmit(["one", "two", "three"])
    text = await job
    made = await stage.ps.ajobs(parent_job_id=job.job_id)
    expect(len(made) == 3, f"it has {len(made)} children")
    return Story(job, f"3 children, linked to it: {text}")


async def bad_argument(stage: Stage) -> Story:
    try:
        job = await jobs.shout.asubmit(3)  # type: ignore[arg-type]
    except penstock.InvalidRequest as error:
        return Story(None, str(error))
    return Story(job)


SCENARIOS = [
    Scenario("success", "job.text.shout", "SUCCEEDED", success),
    Scenario("thread with progress", "job.text.count", "SUCCEEDED", progress),
    Scenario("delayed", "job.text.shout", "SUCCEEDED", delayed),
    Scenario("submitted twice", "job.text.shout", "SUCCEEDED", duplicate),
    Scenario("parent and children", "job.text.book", "SUCCEEDED", children),
    Scenario("wrong argument", "job.text.shout", "refused", bad_argument),
]
