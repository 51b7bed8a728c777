"""Jobs whose inputs and results are more than JSON; they run in every mode."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import penstock
from penstock import values

app = penstock.App()


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and other.cents == self.cents

    def __hash__(self) -> int:
        return self.cents


values.register(Money, encode=lambda money: money.cents, decode=Money, form=int)


@dataclass
class Page:
    url: str
    fetched: dt.datetime
    links: set[str] = field(default_factory=set)
    price: Money | None = None
    saved: Path = Path("nowhere")


@app.job("job.typed.visit")
async def visit(page: Page, later: dt.timedelta) -> Page:
    return replace(page, fetched=page.fetched + later)


@app.job("job.typed.thread")
def visit_in_thread(page: Page, later: dt.timedelta) -> Page:
    return replace(page, fetched=page.fetched + later)


@app.job("job.typed.process", mode="process")
def visit_in_process(page: Page, later: dt.timedelta) -> Page:
    return replace(page, fetched=page.fetched + later)


@app.job("job.typed.array", mode="process")
def ones(n: int) -> Any:
    import numpy as np

    return np.ones(n)


@app.job("job.typed.liar")
async def liar(pages: int) -> list[Page]:
    honest: list[Any] = [Page("a", dt.datetime.now(dt.UTC)) for _ in range(pages)]
    return [*honest, {"url": "b"}]


@app.job("job.typed.unstorable")
async def unstorable() -> Any:
    return {"rows": [1, object()]}


class LookupFailed(Exception):
    """With a constructor of its own, so that nobody could make it again."""

    def __init__(self, word: str, *, depth: int = 1) -> None:
        super().__init__(word)


def deeper(word: str) -> None:
    try:
        dict[str, str]()[word]
    except KeyError as error:
        raise LookupFailed(word) from error


@app.job("job.typed.fail")
async def fail(word: str) -> None:
    deeper(word)


@app.job("job.typed.fail-thread")
def fail_in_thread(word: str) -> None:
    deeper(word)


@app.job("job.typed.fail-process", mode="process")
def fail_in_process(word: str) -> None:
    deeper(word)
