"""`make demo OPEN=1`: its link opens the dashboard, with every kind of job behind it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

DEMO = Path("examples/demo.py").resolve()
OPTIONAL = {
    "a container, out of memory": ("containers", ["OOM_KILLED", "137", "MiB"]),
    "a folder is the queue": ("spools", ["READY", "DONE1 job"]),
    "a model over two nodes": ("models", ["SmolLM2 over nodes", "COMPLETE", "layers-2"]),
}
"""Pages of what a machine may lack, by the scenario that the demo then says it skipped."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: the engine's socket lies in it."""
    with tempfile.TemporaryDirectory(prefix="demo-") as made:
        yield Path(made)


@pytest.fixture
def demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(DEMO), "--open"],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.mark.timeout(300)
def test_the_link_of_the_demo_opens_its_jobs_and_ctrl_c_ends_it(
    browser: Browser, demo: subprocess.Popen[str], folder: Path
) -> None:
    said = _until_link(demo)
    assert "ended as they should" in "".join(said)
    page = browser.new_page()
    page.goto(said[-1].strip())
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.locator(".needs")).to_contain_text("1 job awaits approval")
    for path, text in (
        ("jobs?state=RUNNING", "job.slow.render"),
        ("jobs?q=out+of+reach", "job.flow.fetch"),
        ("approvals", "job.ship.release"),
        ("schedules", "heartbeat"),
        ("pipelines", "news"),
    ):
        _shows(page, path, text)
    lacks = {name for name in OPTIONAL if re.search(rf"{name} +skipped", "".join(said))}
    for path, texts in (OPTIONAL[name] for name in OPTIONAL.keys() - lacks):
        _shows(page, path, *texts)
    page.close()
    demo.send_signal(signal.SIGINT)
    rest, _ = demo.communicate(timeout=60)
    assert (demo.returncode, rest) == (0, "")
    assert not list(folder.glob("penstock-demo-*")), "it takes its folder with it"


def _until_link(demo: subprocess.Popen[str]) -> list[str]:
    assert demo.stdout is not None
    said: list[str] = []
    for line in demo.stdout:
        said.append(line)
        if "/sign-in?link=" in line:
            return said
    raise AssertionError("".join(said))


def _shows(page: Page, path: str, *texts: str) -> None:
    page.goto(f"{page.url.partition('/dashboard/')[0]}/dashboard/{path}")
    for text in texts:
        expect(page.locator("main")).to_contain_text(text)
