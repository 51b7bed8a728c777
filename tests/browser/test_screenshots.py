"""Takes the pictures of the documentation, as a part of the tests.

`make screenshots` runs this file with PENSTOCK_SCREENSHOTS=1: then the pictures that pages show go
to docs/images, and one of every page, phone and desktop, light and dark, to docs/images/dashboard,
for people to look at; git ignores those. Without it, only those that pages show are taken, into a
folder of the test, to see that they can be.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, expect
from tests.support.browser.world import World, fill, world

from penstock.core.job import Job

KEEP = bool(os.environ.get("PENSTOCK_SCREENSHOTS"))
PAGES = ("", "jobs", "approvals", "pipelines", "schedules", "submit", "chat", "workers", "models")
MORE = ("containers", "spools", "policy", "keys", "audit")
JOBS = ("shout", "failed", "mail", "running", "picture", "crawl", "pipeline", "container", "split")
SIZES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 860}},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
SHOWN = {
    "overview-desktop-light": "dashboard-overview.png",
    "overview-desktop-dark": "dashboard-overview-dark.png",
    "job-mail-desktop-light": "dashboard-job.png",
    "jobs-desktop-light": "dashboard-jobs.png",
    "jobs-phone-dark": "dashboard-phone.png",
}
"""Those in the documentation, and their names there. They show what a window shows, not more."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """It began an hour ago, by its clock."""
    with world(tmp_path_factory.mktemp("engine"), behind=3600.0) as one:
        yield one


@pytest.fixture(scope="module")
def jobs(engine: World) -> dict[str, Job]:
    """An hour of real jobs first, with the engine's clock stepped, then one of every kind."""
    chance = random.Random(1)
    for minute in range(55, 0, -1):
        engine.clock.behind = minute * 60.0
        wave = 4 + round(3 * math.sin(minute / 6)) + chance.randrange(3)
        for n in range(wave):
            engine.submit("job.text.shout", {"text": f"number {n}"})
            engine.submit("job.site.page", {"n": n})
        if minute % 7 == 0:
            engine.submit("job.pipeline.shop")
            engine.submit("job.text.fail", {"text": "the disk is full"})
        last = engine.submit("job.text.shout", {"text": "the last of this minute"})
        engine.wait(last)
        time.sleep(0.15)  # so that slower ones end in the same minute
    engine.clock.behind = 0.0
    return fill(engine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = Path("docs/images") if KEEP else tmp_path
    (folder / "dashboard").mkdir(exist_ok=True)
    return folder


@pytest.mark.timeout(600)
def test_pictures_of_the_documentation_are_taken(
    browser: Browser, engine: World, jobs: dict[str, Job], folder: Path
) -> None:
    for look, context in _contexts(browser, engine):
        for path, label in _paths(jobs):
            if KEEP or f"{label}-{look}" in SHOWN:
                _take(context, f"{engine.url}/dashboard/{path}", f"{label}-{look}", folder)
        context.close()
    for picture in SHOWN.values():
        taken, kept = (folder / picture).read_bytes(), Path("docs/images", picture).read_bytes()
        assert taken[16:24] == kept[16:24], f"{picture}: its width and height"


def test_pages_show_all_pictures_of_the_dashboard_and_no_others() -> None:
    pages = [Path("README.md"), *Path("docs").rglob("*.md")]
    named = re.findall(
        r"images/(dashboard[\w/-]*\.png)", "".join(one.read_text("utf-8") for one in pages)
    )
    assert set(named) == set(SHOWN.values())
    assert "images/dashboard-" in Path("README.md").read_text("utf-8")


def _contexts(browser: Browser, engine: World) -> Iterator[tuple[str, BrowserContext]]:
    for size, options in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(**options, color_scheme=scheme, reduced_motion="reduce")
            context.request.post(f"{engine.url}/v1/session", data={"key": engine.token})
            yield f"{size}-{scheme}", context


def _paths(jobs: dict[str, Job]) -> Iterator[tuple[str, str]]:
    for path in (*PAGES, *MORE):
        yield path, path or "overview"
    for name in JOBS:
        yield f"jobs/{jobs[name].job_id}", f"job-{name}"


def _take(context: BrowserContext, url: str, name: str, folder: Path) -> None:
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#live")).to_have_text("Live")
    page.wait_for_timeout(600)  # until the first events have come
    page.screenshot(path=folder / "dashboard" / f"{name}.png", full_page=True)
    if name in SHOWN:
        page.screenshot(path=folder / SHOWN[name])
    page.close()
