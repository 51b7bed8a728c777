"""A real browser before a real engine. Without Chromium these are skipped, and in CI they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.support.browser.world import World, fill, world

from penstock.core.job import Job

Open = Callable[..., Page]
expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole session: while Playwright is there, its event loop runs in this thread, and
    `asyncio.run` fails in the tests of other folders."""
    chromium = shutil.which("chromium")
    if chromium is None:
        why = "Chromium is not installed (tests/support/install.sh installs it)"
        if os.environ.get("CI"):
            pytest.fail(f"in CI the browser must be there: {why}")
        pytest.skip(why)
    with sync_playwright() as playwright:
        # As root there is no sandbox; it only opens pages of the engine under test.
        one = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("engine")) as one:
        yield one


@pytest.fixture(scope="module")
def jobs(engine: World) -> dict[str, Job]:
    return fill(engine)


@pytest.fixture
def open_page(browser: Browser, engine: World) -> Iterator[Open]:
    """Opens a path of the dashboard, signed in; a test fails on any error in the console."""
    contexts, problems = [], []

    def note(kind: str, text: str) -> None:
        # An answer that is no success, or none at all, is the engine's; the page shows it.
        if kind in ("error", "script") and not text.startswith("Failed to load resource"):
            problems.append(f"{kind}: {text}")

    def open_(path: str = "", key: str | None = "", **options: Any) -> Page:
        """`key` None: not signed in; empty: as the owner."""
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda told: note(told.type, told.text))
        page.on("pageerror", lambda error: note("script", str(error)))
        if key is not None:
            answer = context.request.post(
                f"{engine.url}/v1/session", data={"key": key or engine.token}
            )
            assert answer.ok, answer.text()
        page.goto(f"{engine.url}/dashboard/{path}")
        if key is not None:
            page.locator("main h1").wait_for()
        return page

    open_.problems = problems  # type: ignore[attr-defined]
    yield open_
    for context in contexts:
        context.close()
    assert problems == []
