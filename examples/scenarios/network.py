"""Tenants, and events that a reader can take up where it left off."""

from __future__ import annotations

import asyncio

import penstock
from scenarios.scenario import Scenario, Stage, Story, expect


async def tenants(stage: Stage) -> Story:
    acme, globex = stage.people["acme"], stage.people["globex"]
    job = await acme.asubmit("job.text.shout", {"text": "ours"})
    await job.aresult(10)
    theirs = await _refusal(globex, job.job_id)
    nobody_s = await _refusal(globex, "no-such-job")
    same = theirs.replace(job.job_id, "X") == nobody_s.replace("no-such-job", "X")
    expect(same, "another tenant can tell that it is there")
    expect(await globex.ajobs() == [], "another tenant sees it in a listing")
    return Story(job, f"tenant {(await job.arefresh()).request.tenant}'s; for globex: no job …")


async def _refusal(client: penstock.Client, job_id: str) -> str:
    try:
        await client.aget(job_id)
    except penstock.NotFound as error:
        return str(error)
    raise AssertionError("another tenant sees it")


async def events(stage: Stage) -> Story:
    """Read until it runs, hang up, come back with the last cursor."""
    olga = stage.people["olga"]
    job = await olga.asubmit("job.slow.render", {"frames": 6})
    before, cursor = await _read(olga, job.job_id, 0, "RUNNING")
    rest, _ = await _read(olga, job.job_id, cursor, "SUCCEEDED")
    history = [entry.n for entry in await job.ahistory()]
    expect(before + rest == history, f"read {before} and {rest} of {history}")
    return Story(job, f"{len(before)} events read, hung up, resumed: {len(rest)} more, none twice")


async def _read(
    client: penstock.Client, job_id: str, after: int, state: str
) -> tuple[list[int], int]:
    """The numbers of a job's events after a cursor, up to a state, and the cursor there."""
    seen: list[int] = []
    stream = client.aevents(after)
    try:
        async with asyncio.timeout(10):
            async for batch in stream:
                for event in batch.events:
                    if event.transition.job_id == job_id:
                        seen.append(event.transition.n)
                        if event.transition.after == state:
                            return seen, event.cursor
    finally:
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator, in fact
    raise AssertionError(f"the stream ended before {state}")


SCENARIOS = [
    Scenario("another tenant's", "job.text.shout", "SUCCEEDED", tenants),
    Scenario("events, resumed", "job.slow.render", "SUCCEEDED", events),
]
