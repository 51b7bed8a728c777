"""How many at once, how fast, how many may wait, and one of a kind."""

from __future__ import annotations

import penstock
from scenarios import jobs
from scenarios.scenario import Scenario, Stage, Story, expect, running


async def concurrency(stage: Stage) -> Story:
    olga = stage.people["olga"]
    limit = penstock.Limit(name="encoders", topics=("job.video.*",), concurrency=2)
    await olga.limits.aput(limit)
    made = await olga.asubmit_many("job.video.encode", [{"clip": n} for n in range(6)])
    for job in made:
        await job.aresult(10)
    expect(jobs.most_at_once == 2, f"{jobs.most_at_once} ran at once")
    return Story(made[-1], "the last of 6: never more than 2 at once, as they counted")


async def throttle(stage: Stage) -> Story:
    made = await stage.people["ada"].asubmit_many("job.sms.send", [{"to": n} for n in range(5)])
    for job in made:
        await job.aresult(10)
    given = sorted([(await job.arefresh()).dispatched_at or 0 for job in made])
    gaps = [later - earlier for earlier, later in zip(given, given[2:], strict=False)]
    expect(min(gaps) >= 0.45, f"3 went within {min(gaps):.2f} s")
    return Story(made[-1], f"the last of 5; rule slowly: 2/500ms; the 3rd after {gaps[0]:.2f} s")


async def queue_cap(stage: Stage) -> Story:
    olga = stage.people["olga"]
    await olga.limits.aput(
        penstock.Limit(name="paper", topics=("job.paper.*",), concurrency=1, max_waiting=1)
    )
    first = await olga.asubmit("job.paper.print", {"pages": 1000})
    await running(first)
    await olga.asubmit("job.paper.print", {"pages": 1})
    try:
        job = await olga.asubmit("job.paper.print", {"pages": 1})
    except penstock.TooMany as error:
        await first.acancel("the demo has seen enough")
        return Story(None, f"429, retry after {error.retry_after:.0f} s: {error.message}")
    return Story(job)


async def unique(stage: Stage) -> Story:
    ada = stage.people["ada"]
    first = await ada.asubmit("job.slow.render", {"frames": 16}, unique="the-film")
    second = await ada.asubmit("job.slow.render", {"frames": 16}, unique="the-film")
    expect(first.job_id == second.job_id, "two jobs with one unique key at once")
    await first.aresult(10)
    third = await ada.asubmit("job.slow.render", {"frames": 1}, unique="the-film")
    expect(third.job_id != first.job_id, "a job that has ended kept another out")
    return Story(first, "while it was there, the same key was answered with it")


SCENARIOS = [
    Scenario("limit: 2 at once", "job.video.encode", "SUCCEEDED", concurrency),
    Scenario("throttled by a rule", "job.sms.send", "SUCCEEDED", throttle),
    Scenario("too many would wait", "job.paper.print", "refused", queue_cap),
    Scenario("unique", "job.slow.render", "SUCCEEDED", unique),
]
