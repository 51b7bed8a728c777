"""An application with a job of every kind, for the pages to show."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import penstock
from penstock import Pipeline, RetryPolicy

app = penstock.App()

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAYAAACNMs+9AAAAFUlEQVR42mNk+M9Qz0AEYBxVSF+FABJADveWkH6o"
    "AAAAAElFTkSuQmCC"
)
"""A small PNG."""


@app.job("job.text.shout", ctx=True)
async def shout(ctx: penstock.Context, text: str, times: int = 1, loud: bool = True) -> str:
    """Repeat a text, in capitals if it is to be loud."""
    ctx.log(f"shouting {text}")
    return " ".join([text.upper() if loud else text] * times)


@app.job("job.text.echo", ctx=True)
async def echo(ctx: penstock.Context, text: str) -> dict[str, str]:
    """Say everywhere what it is given."""
    ctx.log(text)
    ctx.progress(0.5, text)
    return {"text": text, text[:100]: "key"}


@app.job("job.slow.count", idempotent=True, ctx=True)
async def count(ctx: penstock.Context, to: int, pause: float = 0.1) -> int:
    """Count slowly."""
    for n in range(1, to + 1):
        ctx.progress(n / to, f"{n} of {to}")
        ctx.log(f"counted {n}")
        await asyncio.sleep(pause)
    return to


@app.job("job.math.divide", retries=RetryPolicy(retries=1, delay=0.2, jitter=0.0))
async def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


@app.job("job.text.fail")
async def fail(text: str) -> None:
    """Fail with a text."""
    raise ValueError(text)


@app.job("job.mail.send")
async def send(to: str, subject: str = "hello") -> str:
    """Send a mail: a rule wants a person's approval."""
    return f"sent {subject} to {to}"


@app.job("job.shell.run")
async def run(line: str) -> None:
    """Never runs: a rule denies it."""


@app.job("job.picture.draw", ctx=True)
async def draw(ctx: penstock.Context) -> str:
    """Leave a picture."""
    await ctx.artifact("plots/dot.png", PIXEL)
    await ctx.artifact("notes.txt", b"one dot")
    return "a dot"


@app.job("job.site.page")
async def page(n: int) -> int:
    """One page of a site."""
    await asyncio.sleep(0.05)
    return n * n


@app.job("job.site.crawl")
async def crawl(pages: int) -> int:
    """Read a site, each page as a job of its own."""
    handles = [await page.asubmit(n) for n in range(pages)]
    return sum([await handle.aresult() for handle in handles])


shop = Pipeline("shop", doc="Prices in euros.", single_flight=False)
PRICES = {"tea": "3.50", "milk": "1.20", "ghost": "priceless", "bread": "2.80"}


@shop.map(over=lambda config, ctx: sorted(PRICES), concurrency=2)
async def price(name: str, ctx: Any) -> dict[str, object]:
    await asyncio.sleep(0.05)
    return {"name": name, "euros": float(PRICES[name])}


@shop.map(over=price)
def label(item: dict[str, Any], ctx: Any) -> str:
    return f"{item['name']}: {item['euros']:.2f}"


@shop.step()
async def receipt(results: Any, ctx: Any) -> list[str]:
    return [line async for line in results]


app.add(shop)

RULES = """
default = "allow"

[[rules]]
id = "ask-before-mail"
decision = "require_approval"
topics = ["job.mail.*"]
reason = "mail leaves the house"
approval = { needed = 1, expires = "1h", self_approval = true }

[[rules]]
id = "no-shell"
decision = "deny"
topics = ["job.shell.*"]
reason = "nobody runs a shell here"
"""
