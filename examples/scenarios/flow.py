"""Jobs that wait for others, come again, or get a second chance."""

from __future__ import annotations

import asyncio

import penstock
from scenarios import jobs
from scenarios.scenario import Scenario, Stage, Story, expect


async def workflow(stage: Stage) -> Story:
    ada = stage.people["ada"]
    parents = [await ada.asubmit("job.flow.fetch", {"what": what}) for what in ("tea", "milk")]
    job = await ada.asubmit("job.flow.mix", after=parents)
    await job.aresult(10)
    record = await job.arefresh()
    ends = [(await parent.arefresh()).finished_at or 0 for parent in parents]
    expect((record.started_at or 0) >= max(ends), "it started before its parents had ended")
    return Story(job, "after 2 others; started when the second had ended")


async def failed_parent(stage: Stage) -> Story:
    ada = stage.people["ada"]
    parent = await ada.asubmit("job.flow.fetch", {"what": "the moon"})
    job = await ada.asubmit("job.flow.mix", after=parent)
    anyway = await ada.asubmit("job.flow.tidy", after=parent, if_parent_fails="run")
    record = await job.await_end(10)
    expect(await anyway.aresult(10) == "tidy", "the one that should run anyway did not")
    assert record.result is not None
    said = str(record.result.error_message).replace(parent.job_id, "…")
    return Story(job, f"{said}; a third, with if_parent_fails=run, ran")


async def schedule(stage: Stage) -> Story:
    olga = stage.people["olga"]
    beat = penstock.JobRequest(job_id="", topic="job.clock.beat")
    put = penstock.Schedule(name="beat", cron="* * * * * *", request=beat)
    await olga.schedules.aput(put)
    async with asyncio.timeout(10):
        while not (view := await olga.schedules.aget("beat")).fired:  # noqa: ASYNC110 the clock makes it
            await asyncio.sleep(0.05)
    await olga.schedules.adelete("beat")
    job = await olga.aget(view.last_job_id or "")
    await job.aresult(10)
    return Story(job, f"cron '{put.cron}': fired by itself, for {job.record.request.schedule!r}")


async def dead_letters(stage: Stage) -> Story:
    olga = stage.people["olga"]
    made = await olga.asubmit_many(
        "job.bill.post", [{"bill": n} for n in range(3)], labels={"batch": "may"}
    )
    for job in made:
        await job.await_end(10)
    jobs.post_office_is_open.set()
    bulk = await olga.aretry_many(labels={"batch": "may"})
    expect((bulk.matched, bulk.done) == (3, 3), f"{bulk.done} of {bulk.matched} were retried")
    for job in made:
        await job.aresult(10)
    return Story(made[0], "one of 3 dead letters, retried in one call")


SCENARIOS = [
    Scenario("waits for two others", "job.flow.mix", "SUCCEEDED", workflow),
    Scenario("its parent failed", "job.flow.mix", "CANCELLED", failed_parent),
    Scenario("scheduled", "job.clock.beat", "SUCCEEDED", schedule),
    Scenario("dead, retried in bulk", "job.bill.post", "SUCCEEDED", dead_letters),
]
