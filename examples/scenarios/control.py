"""Jobs that somebody, or a rule, stops."""

from __future__ import annotations

from scenarios import jobs
from scenarios.scenario import Scenario, Stage, Story, expect, running


async def cancel(stage: Stage) -> Story:
    job = await jobs.render.asubmit(10_000)
    await running(job)
    answer = await job.acancel("not needed any more")
    expect(answer.ended, "the work had not ended when the cancel was answered")
    return Story(job, "cancelled while it ran; the answer came after the work had ended")


async def denial(stage: Stage) -> Story:
    job = await jobs.send_mail.options(labels={"audience": "everyone"}).asubmit("hello, all")
    record = await job.await_end()
    assert record.result is not None
    return Story(job, f"{record.result.error_message}")


SCENARIOS = [
    Scenario("cancelled by a user", "job.slow.render", "CANCELLED", cancel),
    Scenario("denied by a rule", "job.mail.send", "DENIED", denial),
]
