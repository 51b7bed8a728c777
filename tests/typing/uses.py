"""Right and wrong uses of the Python API, read by type checkers and never run.

A line that ends in `# error` must be refused, and no other line may be. `# is TYPE` after a
`reveal_type` is what the checkers must say. `test_typing.py` compares.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any, reveal_type

import penstock
from penstock import App, Client, Context, JobHandle, testing

app = App()


@dataclass
class Page:
    url: str
    size: int


@app.job("job.web.fetch", retries=3, priority="interactive", mode="async")
async def fetch(url: str, depth: int = 0) -> Page:
    return Page(url, depth)


@app.job("job.web.measure", timeout=dt.timedelta(seconds=3))
def measure(page: Page, *, scale: float = 1.0) -> float:
    return page.size * scale


@app.job("job.web.sum")
def total(pages: list[Page]) -> int:
    return len(pages)


@app.job("job.web.crawl", ctx=True, idempotent=True)
async def crawl(ctx: Context, url: str) -> list[str]:
    ctx.progress(0.5)
    return [url]


@app.job("job.any")
def untyped(value: Any) -> Any:
    return value


penstock.conect()  # error
testing.InMemory(app)  # error
app.job("job.wrong", prioriti="batch")  # error
app.job("job.wrong", priority="urgent")  # error
app.job("job.wrong", mode="fiber")  # error
app.job("job.wrong", retries="three")  # error


@app.job("job.wrong", ctx=True)  # error
def no_context(url: str) -> str:
    return url


def calls() -> None:
    reveal_type(measure(Page("a", 1)))  # is float
    reveal_type([fetch("a")])  # is list[Coroutine[Any, Any, Page]]
    measure("a")  # error
    measure()  # error
    fetch(url=3)  # error
    fetch("a", 1, 2)  # error
    reveal_type([crawl("a")])  # is list[Coroutine[Any, Any, list[str]]]


def submits() -> None:
    page = fetch.submit("a")
    reveal_type(page)  # is JobHandle[Page]
    reveal_type(page.result())  # is Page
    reveal_type(page.result(timeout=3).url)  # is str
    reveal_type(measure.submit(Page("a", 1), scale=2).result())  # is float
    reveal_type(crawl.submit("a"))  # is JobHandle[list[str]]
    reveal_type(untyped.submit("a"))  # is JobHandle[Any]
    untyped.submit()  # error
    fetch.submit(3)  # error
    fetch.submit("a", nope=3)  # error
    fetch.submit()  # error
    crawl.submit("a", "b")  # error
    measure.submit(Page("a", 1), 2.0)  # error
    page.result("soon")  # error
    number: int = page.result()  # error
    print(number)
    print(page.result().nope)  # error


async def awaits() -> None:
    page = await fetch.asubmit("a")
    reveal_type(page)  # is JobHandle[Page]
    reveal_type(await page)  # is Page
    reveal_type(await page.aresult())  # is Page
    reveal_type(await (await measure.asubmit(Page("a", 1))))  # is float
    await fetch.asubmit(3)  # error
    await measure.asubmit()  # error
    async for update in page.afollow():
        reveal_type(update)  # is Moved | Progressed | Logged | Streamed


@app.job("job.web.join")
async def join(a: str, b: int, c: bytes = b"") -> bytes:
    return c


@app.job("job.web.named")
def named(*, only: int) -> int:
    return only


def maps() -> None:
    reveal_type(fetch.map(["a", "b"]))  # is list[JobHandle[Page]]
    reveal_type(measure.map(Page(str(n), n) for n in range(3)))  # is list[JobHandle[float]]
    reveal_type(crawl.options(priority="batch").map(["a"]))  # is list[JobHandle[list[str]]]
    fetch.map([1, 2])  # error
    fetch.map("a", "b")  # error
    join.map(["a"])  # error
    named.map([1])  # error
    reveal_type(join.starmap([("a", 1)]))  # is list[JobHandle[bytes]]
    reveal_type(join.starmap([("a", 1, b"")]))  # is list[JobHandle[bytes]]
    reveal_type(fetch.starmap([("a", 2)]))  # is list[JobHandle[Page]]
    join.starmap([("a", "b")])  # error
    join.starmap([("a",)])  # error


@app.job("job.web.five")
def five(a: str, b: int, c: bytes, d: float, e: bool = True) -> str:
    return a


def five_arguments() -> None:
    reveal_type(five.starmap([("a", 1, b"", 2.0)]))  # is list[JobHandle[str]]
    reveal_type(five.starmap([("a", 1, b"", 2.0, False)]))  # is list[JobHandle[str]]
    five.starmap([("a", 1, b"", 2.0, "no")])  # error
    five.starmap([("a", 1, b"")])  # error


async def amaps() -> None:
    reveal_type(await five.astarmap([("a", 1, b"", 2.0, False)]))  # is list[JobHandle[str]]
    await five.astarmap([("a", 1, b"", "no", False)])  # error
    reveal_type(await fetch.amap(["a"]))  # is list[JobHandle[Page]]
    reveal_type(await join.astarmap([("a", 1)]))  # is list[JobHandle[bytes]]
    await fetch.amap([1])  # error


def gathers() -> None:
    pages = fetch.map(["a", "b"])
    number = measure.submit(Page("a", 1))
    reveal_type(penstock.gather(*pages))  # is list[Page]
    reveal_type(penstock.gather(pages[0], number))  # is tuple[Page, float]
    reveal_type(penstock.gather(*pages, timeout=3))  # is list[Page]
    reveal_type(penstock.gather(*pages, return_exceptions=True))  # is list[Page | JobEnded]
    penstock.gather(pages)  # error
    penstock.gather(*pages, timeout="soon")  # error
    for page in penstock.as_completed(pages):
        reveal_type(page)  # is JobHandle[Page]
    penstock.as_completed(["a"])  # error
    reveal_type(penstock.first_completed(*pages))  # is JobHandle[Page]


async def agathers() -> None:
    pages = await fetch.amap(["a", "b"])
    reveal_type(await penstock.agather(*pages))  # is list[Page]
    reveal_type(await penstock.agather(pages[0], crawl.submit("a")))  # is tuple[Page, list[str]]
    async for page in penstock.as_completed(pages):
        reveal_type(await page)  # is Page
    reveal_type(await penstock.afirst_completed(*pages))  # is JobHandle[Page]


def values() -> None:
    page = fetch.submit("a")
    reveal_type(penstock.value(page))  # is Page
    reveal_type(measure.submit(penstock.value(page)))  # is JobHandle[float]
    total.submit([penstock.value(one) for one in fetch.map(["a"])])
    measure.submit(page)  # error
    fetch.submit(penstock.value(page))  # error
    total.submit(penstock.value(page))  # error


def options() -> None:
    later = fetch.options(delay=dt.timedelta(hours=1), labels={"host": "a"}, priority="batch")
    reveal_type(later.submit("a"))  # is JobHandle[Page]
    later.submit(3)  # error
    fetch.options(lables={"host": "a"})  # error
    fetch.options(timeout="soon")  # error
    fetch.options(priority="urgent")  # error
    fetch.options(after=[later.submit("a"), "job-1"], if_parent_fails="run")
    fetch.options(after=3)  # error
    fetch.options(if_parent_fails="wait")  # error


def handles(client: Client) -> None:
    reveal_type(client.get("job-1"))  # is JobHandle[Any]
    reveal_type(client.submit("job.web.fetch", {"url": "a"}))  # is JobHandle[Any]
    client.submit("job.web.fetch", {"url": "a"}, prioriti="batch")  # error
    client.submit("job.web.fetch", "a")  # error
    reveal_type(client.jobs(topic="job.web.*", limit=3))  # is list[JobHandle[Any]]
    client.jobs(topik="job.web.*")  # error
    client.cancel_many(reason="over", states=(penstock.JobState.PENDING,))
    client.cancel_many(state="PENDING")  # error
    page = fetch.submit("a")
    reveal_type(page.cancel())  # is Cancellation
    page.cancel(childen=True)  # error
    reveal_type(page.wait())  # is Job
    reveal_type(page.wait(3).state)  # is JobState
    page.wait("soon")  # error
    reveal_type(page.retry())  # is JobHandle[Page]
    reveal_type(page.job_id)  # is str
    reveal_type(page.logs())  # is list[LogLine]
    reveal_type(page.why())  # is str
    wider: JobHandle[object] = page
    print(wider)
    narrower: JobHandle[int] = page  # error
    print(narrower)
    app.run("data", concurency=3)  # error
    app.run("data", concurrency="many")  # error
    app.start("data", http__lisen="127.0.0.1:0")  # error
    app.run("data", rules="rules.toml", http__listen="127.0.0.1:0", pools={"gpu": {"capacity": 1}})
    with app.run("data", concurrency=3, timeouts__drain=1) as ps:
        reveal_type(ps)  # is Client


def parts(client: Client) -> None:
    request = client.request("job.web.fetch", {"url": "a"})
    schedule = penstock.Schedule(name="nightly", cron="0 3 * * *", request=request)
    reveal_type(client.schedules.put(schedule))  # is ScheduleView
    reveal_type(client.schedules.list())  # is list[ScheduleView]
    reveal_type(client.schedules.get("nightly").next_at)  # is float | None
    reveal_type(client.schedules.pause("nightly", paused=False))  # is ScheduleView
    reveal_type(client.schedules.fire("nightly", tenant="a"))  # is Job
    client.schedules.put("nightly")  # error
    client.schedules.pause("nightly", "default", False)  # error
    client.schedules.remove("nightly")  # error
    limit = penstock.Limit(name="polite", rate=penstock.Rate(1, 1))
    reveal_type(client.limits.put(limit).uses[0].running)  # is int
    reveal_type(client.limits.delete("polite"))  # is None
    reveal_type(client.limits.get("polite").limit)  # is Limit
    client.limits.put(schedule)  # error
    client.limits.get()  # error
    client.limits.delete(name=3)  # error
    reveal_type(client.keys.create("ci", (penstock.KeyRole.SUBMIT,)).token)  # is str
    client.keys.create("ci", ("submit",))  # error
    client.keys.create("ci", (), expires="soon")  # error
    reveal_type(client.keys.revoke("ci").revoked_at)  # is float | None
    reveal_type(client.policy.current().rules[0].id)  # is str
    reveal_type(client.policy.simulate("", limit=3).changed)  # is int
    reveal_type(client.policy.reload())  # is PolicyView
    client.policy.explain()  # error
    client.policy.simulate(limit=3)  # error
    print(client.policy.current().rulez)  # error
    reveal_type(client.approvals.approve("job-1", reason="checked"))  # is Job
    client.approvals.reject("job-1", "no")  # error
    client.approvals.approve("job-1", snapshot=3)  # error
    reveal_type(client.audit.read(penstock.AuditQuery(limit=3)))  # is list[AuditEntry]
    client.audit.read(limit=3)  # error
    client.audit.read(penstock.RunQuery())  # error
    reveal_type(client.pipelines.start("news", {"feeds": []}))  # is PipelineRecord
    reveal_type(client.pipelines.runs(penstock.RunQuery()))  # is list[PipelineRecord]
    for event in client.pipelines.stream("run-1"):
        reveal_type(event)  # is PipelineEvent
    client.pipelines.start("news", 3)  # error
    client.pipelines.items("run-1")  # error
    reveal_type(client.pipelines.cancel("run-1", timeout=3))  # is CancelAnswer
    reveal_type(client.pipelines.breakers())  # is list[Breaker]
    client.pipelines.cancel("run-1", 3)  # error
    client.pipelines.runs(limit=3)  # error
    reveal_type(client.batches.get("batch-1"))  # is Batch
    client.batches.get(3)  # error
    client.batches.create("file-1")  # error
    reveal_type(client.status().tally)  # is dict[JobState, int]
    reveal_type(client.workers())  # is list[WorkerView]
    reveal_type(client.pools()[0].paused)  # is bool
    reveal_type(client.prune(3600.0))  # is Cleaned
    client.prune("old")  # error
    client.pause_pool()  # error
    client.topics("job.*")  # error


async def async_parts(client: Client) -> None:
    reveal_type(await client.schedules.alist())  # is list[ScheduleView]
    reveal_type(await client.limits.alist())  # is list[LimitView]
    reveal_type(await client.pipelines.aget("run-1"))  # is PipelineRecord
    async for event in client.pipelines.astream("run-1"):
        reveal_type(event)  # is PipelineEvent
    await client.schedules.aget(3)  # error
    await client.keys.arevoke()  # error


def containers() -> None:
    sort = penstock.container("alpine", "sort", memory_mb=64, user="1000:1000", network=False)
    reveal_type(sort.run().exit_code)  # is int | None
    penstock.container("alpine", "sort", memory="64m")  # error
    penstock.container("alpine", pids="many")  # error
    penstock.container("alpine", ["sort"])  # error


def tests(engine: testing.InMemoryEngine) -> None:
    reveal_type(testing.run(fetch, "u", depth=2))  # is Page
    reveal_type(testing.run(crawl, "u"))  # is list[str]
    reveal_type(testing.RecordingContext().run(measure, Page("u", 1), scale=2))  # is float
    testing.run(fetch, 3)  # error
    testing.run(total, [], more=1)  # error
    engine.step(hours=1, minutes=2.5)
    engine.step(years=1)  # error
    engine.step(1)  # error


async def async_tests() -> None:
    reveal_type(await testing.arun(fetch, "u"))  # is Page
    reveal_type(await testing.arun(total, []))  # is int
    async with testing.InMemoryEngine(app, start=dt.datetime(2026, 1, 1, tzinfo=dt.UTC)) as engine:
        reveal_type(engine)  # is InMemoryEngine
