"""The crawl of docs/how-to/crawl.md, with the engine and a worker killed in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.docs.conftest import ROOT, blocks_of
from tests.support.chaos.cluster import Cluster, cluster, kill
from tests.support.waiting import eventually

from penstock import JobState
from penstock.lifecycles.canonical import HELD, WAITING

PAGE = "docs/how-to/crawl.md"
MOST_LINES = 40


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with the two files of the page."""
    folder = tmp_path / "program"
    folder.mkdir()
    for block in blocks_of(ROOT / PAGE):
        if block.mark == "file":
            (folder / block.value).write_text(block.text)
    return folder


@contextmanager
def running(
    *command: object, log: Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program, whose output and errors go to two files; killed at the end."""
    with log.open("wb") as file, log.with_suffix(".errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=errors,
            env=env,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def sent(log: Path) -> Counter[str]:
    """How often each page was sent."""
    *lines, _ = log.read_text().split("\n")  # the last is not complete, or empty
    return Counter(line.removeprefix("sent ") for line in lines if line.startswith("sent "))


def crawler(c: Cluster, name: str) -> subprocess.Popen[bytes]:
    """A worker of the page's application."""
    process = c.start("worker", "--app", "crawl:app", "--id", name)
    eventually(lambda: name in {worker["worker_id"] for worker in c.workers()}, f"{name} joins")
    return process


def finished(c: Cluster) -> set[str]:
    """The pages whose download had an end that is stored."""
    with c.client() as ps:
        jobs = ps.jobs(topic="job.crawl.page", states=(JobState.SUCCEEDED,), limit=1000)
        pointers = [job.record.request.context_ptr for job in jobs]
    return {pointer.partition("://")[2].rstrip('"}') for pointer in pointers}


def test_the_crawl_has_less_than_forty_lines(program: Path) -> None:
    lines = (program / "crawl.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < MOST_LINES


@pytest.mark.timeout(120)
def test_no_download_that_had_finished_is_done_twice(tmp_path: Path, program: Path) -> None:
    pages, output = tmp_path / "pages.log", tmp_path / "crawl.log"
    path = os.pathsep.join(filter(None, (str(program), os.environ.get("PYTHONPATH"))))
    with (
        running(program / "pages.py", "0", log=pages),
        cluster(tmp_path, PYTHONPATH=path) as c,
    ):
        port = eventually(lambda: pages.read_text().strip(), "the server listens")
        kept, dropped = f"127.0.0.1:{port}", f"localhost:{port}"
        engine = c.up("--no-worker", "--no-http")
        worker = crawler(c, "first")
        command = (program / "crawl.py", f"http://{kept}", f"http://{dropped}")
        with running(*command, log=output, env=c.environment) as script:
            eventually(lambda: sum(sent(pages).values()) >= 30, "30 pages are there")
            done = finished(c)
            kill(worker)
            kill(engine)
            c.up("--no-worker", "--no-http")
            crawler(c, "second")
            script.wait(90)
        assert output.with_suffix(".errors").read_text().endswith("reconnecting\n")
        printed = output.read_text().splitlines()
        assert printed == ["half way; cancelled: CANCELLED", "downloaded: 100000 bytes"]
        assert len(done) > 10
        downloads = sent(pages)
        assert {page: downloads[page] for page in done} == dict.fromkeys(done, 1)
        assert {f"{kept}/{n}" for n in range(100)} <= set(downloads)
        assert sum(page.startswith(dropped) for page in downloads) < 100
        with c.client() as ps:
            assert ps.jobs(states=(*WAITING, *HELD)) == []
        c.check_history()
