"""The functions that the demo runs as jobs.

`app` is embedded in the demo's own process; `converter` and `till` are served by worker
processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import penstock

app = penstock.App()
converter = penstock.App()
till = penstock.App()


@app.job("job.text.shout")
async def shout(text: str) -> str:
    """Says a text loudly."""
    return text.upper() + "!"


@app.job("job.text.count", ctx=True)
def count_words(ctx: penstock.Context, lines: list[str]) -> int:
    """A plain function: it runs in a thread, and tells how far it is."""
    words = 0
    for done, line in enumerate(lines, start=1):
        words += len(line.split())
        time.sleep(0.05)
        ctx.progress(done / len(lines), f"line {done} of {len(lines)}")
    ctx.log(f"{words} words")
    return words


@app.job("job.text.book")
async def book(chapters: list[str]) -> str:
    """A parent: each chapter is a job of its own."""
    children = await shout.asubmit_many([(chapter,) for chapter in chapters])
    return " ".join([await child for child in children])


@app.job("job.math.divide")
async def divide(a: float, b: float) -> float:
    """Divides a by b; by 0 it fails."""
    return a / b


@app.job("job.net.fetch", retries=penstock.RetryPolicy(retries=3, delay=0.3), ctx=True)
async def fetch(ctx: penstock.Context, url: str) -> str:
    """The first try fails, as first tries do."""
    if ctx.request.retry_number == 0:
        raise ConnectionError(f"{url} does not answer")
    return f"the page at {url}"


@app.job("job.net.poll", retries=5, ctx=True)
async def poll(ctx: penstock.Context, order: int) -> str:
    """Asks to be tried again when it knows that it makes sense."""
    if ctx.request.retry_number == 0:
        raise penstock.Retry(f"order {order} is not ready", after=0.4)
    return "delivered"


@app.job("job.slow.wait", timeout=0.5)
async def wait_for_ever() -> None:
    """Never ends by itself: its timeout ends it."""
    await asyncio.Event().wait()


@app.job("job.slow.render")
async def render(frames: int) -> int:
    """Takes 50 ms for each frame; long enough to be cancelled."""
    for _ in range(frames):
        await asyncio.sleep(0.05)
    return frames


@app.job("job.mail.send")
async def send_mail(text: str) -> None:
    """Never runs: a safety rule denies mail to everyone."""
    raise AssertionError("the safety kernel let it pass")


@app.job("job.native.crash", mode="process")
def crash() -> None:
    """Dies as native code may, or as the kernel kills what eats all memory."""
    os.kill(os.getpid(), signal.SIGKILL)


# -- for what comes through HTTP --------------------------------------------------

most_at_once = 0
"""How many clips were seen to be encoded at the same time."""
post_office_is_open = asyncio.Event()
_encoding: set[int] = set()


@app.job("job.ship.release")
async def release(version: str) -> str:
    """Runs once a second person has approved it: a rule holds it."""
    return f"{version} is out"


@app.job("job.slow.think", timeout=30)
async def think() -> None:
    """Never ends by itself: a safety rule gives it 0.3 s."""
    await asyncio.Event().wait()


@app.job("job.video.encode")
async def encode(clip: int) -> None:
    """Encodes a clip; a limit lets two run at once."""
    global most_at_once
    _encoding.add(clip)
    most_at_once = max(most_at_once, len(_encoding))
    await asyncio.sleep(0.15)
    _encoding.remove(clip)


@app.job("job.sms.send")
async def send_sms(to: int) -> int:
    """Sends a text message; a rule lets two go in half a second."""
    return to


@app.job("job.paper.print")
async def print_pages(pages: int) -> None:
    """Prints; a limit lets one run and one wait, and refuses more."""
    await asyncio.sleep(0.1 * pages)


@app.job("job.flow.fetch")
async def fetch_thing(what: str) -> str:
    """The first step of a workflow; the moon is out of reach."""
    await asyncio.sleep(0.2)
    if what == "the moon":
        raise LookupError("it is out of reach")
    return what


@app.job("job.flow.mix")
async def mix() -> str:
    """Runs after the steps that fetch, if they succeeded."""
    return "mixed"


@app.job("job.flow.tidy")
async def tidy() -> str:
    """Runs at the end of a workflow, whatever became of the others."""
    return "tidy"


@app.job("job.clock.beat")
async def beat() -> None:
    """Submitted by a schedule, again and again."""


@app.job("job.bill.post")
async def post(bill: int) -> int:
    """Posts a bill; fails while the post office is closed, and is retried in bulk."""
    if not post_office_is_open.is_set():
        raise ConnectionError("the post office is closed")
    return bill


# -- for worker processes ----------------------------------------------------------


@converter.job("job.elsewhere.convert", idempotent=True)
async def convert(pages: int) -> int:
    """Idempotent: when its worker is killed, another one does it again."""
    for _ in range(pages):
        await asyncio.sleep(0.05)
    return pages


@till.job("job.elsewhere.charge")
async def charge(cents: int) -> int:
    """Not idempotent: when its worker is killed, it ends TIMEOUT and is not repeated."""
    await asyncio.sleep(1)
    return cents
