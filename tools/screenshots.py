"""Screenshots of the dashboard, phone and desktop, light and dark (`make screenshots`).

All of them go to build/screenshots, for people to look at. Those that pages of the documentation
show go to docs/images as well.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright
from tests.support.browser.world import World, fill, world

from penstock.core.job import Job

ALL, DOCS = Path("build/screenshots"), Path("docs/images")
PAGES = ("", "jobs", "approvals", "pipelines", "schedules", "submit", "chat", "workers", "models")
MORE = ("containers", "spools", "policy", "keys", "audit")
JOBS = ("shout", "failed", "mail", "running", "picture", "crawl", "pipeline", "container")
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


def main() -> None:
    ALL.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        world(Path(folder)) as one,
        sync_playwright() as playwright,
    ):
        jobs = fill(one)
        _keep_busy(one)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, options, context in _contexts(browser, one):
            for path, label in _paths(jobs):
                _take(context, one.url, path, f"{label}-{name}", options)
            context.close()
        browser.close()
    print(f"{len(list(ALL.glob('*.png')))} screenshots in {ALL}, {len(SHOWN)} of them in {DOCS}")


def _keep_busy(one: World) -> None:
    """Some traffic, so that the charts have something to show."""
    for n in range(40):
        one.submit("job.text.shout", {"text": f"number {n}"})
        one.submit("job.site.page", {"n": n})
        if n % 8 == 0:
            one.submit("job.text.fail", {"text": "the disk is full"})
        time.sleep(0.02)


def _contexts(browser: Browser, one: World) -> Iterator[tuple[str, Any, BrowserContext]]:
    for size, options in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(**options, color_scheme=scheme, reduced_motion="reduce")
            context.request.post(f"{one.url}/v1/session", data={"key": one.token})
            yield f"{size}-{scheme}", options, context


def _paths(jobs: dict[str, Job]) -> Iterator[tuple[str, str]]:
    for path in (*PAGES, *MORE):
        yield path, path or "overview"
    for name in JOBS:
        yield f"jobs/{jobs[name].job_id}", f"job-{name}"


def _take(context: BrowserContext, url: str, path: str, name: str, options: Any) -> None:
    page = context.new_page()
    page.goto(f"{url}/dashboard/{path}")
    expect(page.locator("#live")).to_have_text("Live")
    page.wait_for_timeout(600)
    page.screenshot(path=ALL / f"{name}.png", full_page=True)
    if name in SHOWN:
        DOCS.mkdir(exist_ok=True)
        page.screenshot(path=DOCS / SHOWN[name])
    page.close()


if __name__ == "__main__":
    main()
