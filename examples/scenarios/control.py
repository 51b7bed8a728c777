"""Jobs that somebody stops."""

from __future__ import annotations

from scenarios import jobs
from scenarios.scenario import Scenario, Stage, Story, expect, running


async def cancel(stage: Stage) -> Story:
    job = await jobs.render.asubmit(10_000)
    await running(job)
    answer = await job.acancel("not needed any more")
    expect(answer.ended, "the work had not ended when the cancel was answered")
    return Story(job, "cancelled as it ran; answered when the work had ended")


SCENARIOS = [Scenario("cancelled by a user", "job.slow.render", "CANCELLED", cancel)]
