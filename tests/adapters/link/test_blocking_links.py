"""Threads call an engine over connections of their own; what they can't have, the link does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.adapters.link.address import Address
from penstock.adapters.link.blocking import BlockingLink, LinkPool
from penstock.adapters.link.proxy import remote_api
from penstock.core.errors import EngineUnavailable, Misconfigured, NotFound, NotRunning
from penstock.core.job import JobRequest
from penstock.ports.engine_api import EngineApi


@contextmanager
def engine(folder: Path) -> Iterator[tuple[penstock.Client, threading.Event]]:
    """An engine in a thread of this process, and what its job waits for."""
    app, gate = penstock.App(), threading.Event()

    @app.job("job.wait")
    def wait() -> str:
        assert gate.wait(20)
        return "done"

    @app.job("job.parent")
    def parent() -> str:
        return str(wait.submit().record.request.parent_job_id)

    with app.run(data=folder) as client:
        yield client, gate
        gate.set()


def test_more_threads_than_connections_wait_at_once(tmp_path: Path) -> None:
    with engine(tmp_path) as (_, gate), penstock.connect(data=tmp_path) as client:
        jobs = [client.submit("job.wait") for _ in range(12)]
        with ThreadPoolExecutor(12) as threads:
            waiting = [threads.submit(job.result, 30) for job in jobs]
            time.sleep(0.2)
            assert client.get(jobs[0].job_id).job_id == jobs[0].job_id  # nobody is in its way
            gate.set()
            assert [one.result() for one in waiting] == ["done"] * 12


def test_a_thread_that_is_interrupted_leaves_no_answer_behind(tmp_path: Path) -> None:
    with engine(tmp_path) as (here, gate):
        pool = LinkPool(Address(path=tmp_path / "penstock.sock"), "")
        job = here.submit("job.wait")

        async def interrupted(api: EngineApi) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pool.run(interrupted)
        gate.set()
        assert pool.run(lambda api: api.wait(job.job_id)).job_id == job.job_id
        pool.close()


def test_a_connection_that_was_lost_is_made_again(tmp_path: Path) -> None:
    pool = LinkPool(Address(path=tmp_path / "penstock.sock"), "", reconnect_timeout=0.2)

    def get_nothing() -> None:
        pool.run(lambda api: api.get("nothing"))

    with pytest.raises(EngineUnavailable, match=r"could not be made again for \d\.\d s"):
        get_nothing()
    for _ in range(2):
        with engine(tmp_path), pytest.raises(NotFound):
            get_nothing()
        with pytest.raises(EngineUnavailable, match="'get' failed"):
            get_nothing()
    pool.close()
    with engine(tmp_path), pytest.raises(NotRunning, match="not connected"):
        get_nothing()


def test_the_token_is_not_sent_to_another_machine() -> None:
    link = BlockingLink(Address(host="192.0.2.1", port=7077), "secret")
    with pytest.raises(Misconfigured, match="without encryption"):
        link.api.status().send(None)  # type: ignore[attr-defined]


def test_what_a_job_submits_is_its_child_from_a_thread_too(tmp_path: Path) -> None:
    with engine(tmp_path) as (here, gate):
        gate.set()
        job = here.submit("job.parent")
        assert job.result(20) == job.job_id


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    api: Any = remote_api(_Silent())
    for wrong in (
        lambda: api.get(),
        lambda: api.get("a", "b"),
        lambda: api.get("a", job_id="b"),
        lambda: api.get(job="a"),
        lambda: api.cancel("a", "reason"),
        lambda: api.schedules.pause(),
    ):
        with pytest.raises(TypeError):
            wrong()
    assert api.cancel("a", reason="r") == ("cancel", {"job_id": "a", "reason": "r"})
    assert api.schedules.get("n") == ("schedules.get", {"name": "n"})
    request = JobRequest(job_id="", topic="job.x")
    assert api.submit([request]) == ("submit", {"requests": [request]})
    assert {name for name in vars(EngineApi) if not name.startswith("_")} <= set(dir(api))


class _Silent:
    """Sends nothing: a call is what would have been sent."""

    def call(self, method: str, decode: Any, params: Any) -> Any:
        return method, dict(params)

    stream = call
