"""`app.start()` and `app.close()`: from any thread, after a fork, at the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.waiting import eventually

import penstock
from penstock.app.engine import Engine
from penstock.core.errors import AlreadyRunning, Misconfigured, Unavailable
from penstock.testing.aio import run_async


def an_app() -> penstock.App:
    app = penstock.App()

    @app.job("job.double", idempotent=True)
    async def double(n: int) -> int:
        return 2 * n

    return app


def double(app: penstock.App, n: int) -> int:
    return int(app.functions["job.double"].submit(n).result(timeout=30))


def test_start_and_close_may_be_called_again(tmp_path: Path) -> None:
    app = an_app()
    app.close()
    client = app.start(tmp_path)
    assert app.start() is app.start(tmp_path) is client
    assert double(app, 2) == 4
    app.close()
    app.close()
    assert not app.is_running
    with pytest.raises(Misconfigured, match="not running"):
        double(app, 2)
    with pytest.raises(Unavailable, match="closed"):
        client.status()
    app.start(tmp_path)
    assert double(app, 3) == 6
    app.close()


def test_other_settings_are_refused_while_it_runs(tmp_path: Path) -> None:
    app = an_app()
    app.start(tmp_path)
    with pytest.raises(Misconfigured, match="runs already"):
        app.start(tmp_path / "other")
    with pytest.raises(Misconfigured, match="runs already"):
        app.start(tmp_path, concurrency=1)
    assert double(app, 2) == 4
    app.close()


def test_threads_that_start_at_once_get_the_same_client(tmp_path: Path) -> None:
    app = an_app()
    with ThreadPoolExecutor(16) as threads:
        clients = set(threads.map(lambda _: app.start(tmp_path), range(16)))
        assert len(clients) == 1
        list(threads.map(lambda _: app.close(), range(16)))
    assert not app.is_running


@run_async
async def test_the_async_twins_do_not_block_the_event_loop(tmp_path: Path) -> None:
    app = an_app()
    client = await app.astart(tmp_path)
    assert await app.astart() is client
    assert await (await app.functions["job.double"].asubmit(4)) == 8
    await app.aclose()
    await app.aclose()
    assert not app.is_running


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    app = an_app()
    (tmp_path / "bad.toml").write_text("this is not TOML")
    for _ in range(2):
        with pytest.raises(penstock.PenstockError):
            app.start(tmp_path, rules=str(tmp_path / "bad.toml"))
        assert not app.is_running
    app.start(tmp_path)
    assert double(app, 2) == 4
    app.close()


# -- sharing ------------------------------------------------------------------------------


def test_a_second_application_joins_the_engine_that_runs(tmp_path: Path) -> None:
    first, second = an_app(), penstock.App()

    @second.job("job.triple")
    def triple(n: int) -> int:
        return 3 * n

    with first.run(tmp_path), second.run(tmp_path) as client:
        assert triple.submit(3).result(timeout=30) == 9
        assert client.submit("job.double", {"n": 3}).result(timeout=30) == 6
        assert len(client.workers()) == 2


def test_who_joined_takes_the_engine_over_when_its_owner_leaves(tmp_path: Path) -> None:
    first, second, third = an_app(), an_app(), an_app()
    first.start(tmp_path)
    second.start(tmp_path)
    third.start(tmp_path)
    kept = second.client().submit("job.double", {"n": 1}, delay=3600)
    first.close()
    assert double(second, 2) == double(third, 2) == 4
    second.close()
    assert double(third, 2) == 4
    assert third.client().get(kept.job_id).state in ("PENDING", "SCHEDULED")
    third.close()


def test_who_could_not_take_the_engine_over_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = an_app(), an_app()
    first.start(tmp_path)
    second.start(tmp_path)
    start, failures = Engine.start, [OSError("Address already in use")]

    async def refused_once(engine: Engine) -> None:
        if failures:
            raise failures.pop()
        await start(engine)

    monkeypatch.setattr(Engine, "start", refused_once)
    first.close()
    assert double(second, 2) == 4
    assert not failures
    second.close()


def test_sharing_can_be_forbidden(tmp_path: Path) -> None:
    first, second = an_app(), an_app()
    with first.run(tmp_path):
        with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}"):
            second.start(tmp_path, share=False)
        with pytest.raises(AlreadyRunning), second.run(tmp_path, share=False):
            pass


def test_an_engine_that_never_answers_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.adapters.sqlite.database import WriterLock
    from penstock.app import application

    monkeypatch.setattr(application, "_JOIN_TIMEOUT", 0.2)
    lock = WriterLock(tmp_path / "penstock.lock")
    with pytest.raises(penstock.PenstockError, match="owns"):
        an_app().start(tmp_path)
    lock.close()


# -- other processes ----------------------------------------------------------------------

APP = """
import os, signal, sys, time
import penstock
app = penstock.App()

@app.job("job.pid", idempotent=True)
async def pid() -> int:
    return os.getpid()

def forked(work):
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]
"""


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(APP + text)
    return subprocess.run(
        [sys.executable, "-W", "default::ResourceWarning", "script.py"],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=60,
        env={"PENSTOCK_DATA_DIR": "data", "PENSTOCK_HTTP__LISTEN": ""},
    )


def test_a_process_that_ends_closes_what_it_started(tmp_path: Path) -> None:
    text = """
app.start()
jobs = [pid.submit() for _ in range(100)]
print("submitted")
"""
    done = script(tmp_path, text)
    assert (done.stdout, done.stderr, done.returncode) == ("submitted\n", "", 0)
    assert not (tmp_path / "data" / "penstock.sock").exists()


def test_a_forked_process_starts_anew_and_leaves_its_parents_alone(tmp_path: Path) -> None:
    text = """
app.start()
assert pid.submit().result(timeout=30) == os.getpid()

def in_child():
    for _ in range(20):
        assert pid.submit().result(timeout=30) in (os.getpid(), os.getppid())
    app.close()

assert forked(in_child) == 0
assert forked(app.close) == 0
assert pid.submit().result(timeout=30) == os.getpid()
print("done")
"""
    done = script(tmp_path, text)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_forked_process_has_no_part_in_a_block_that_its_parent_entered(tmp_path: Path) -> None:
    text = """
def in_child():
    try:
        pid.submit()
    except penstock.PenstockError as error:
        assert "another process" in str(error), error
    session.__exit__(None, None, None)
    app.start()
    pid.submit().result(timeout=30)
    app.close()

session = app.run()
with session:
    assert forked(in_child) == 0
    assert pid.submit().result(timeout=30) == os.getpid()
print("done")
"""
    done = script(tmp_path, text)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_children_of_a_killed_process_take_its_engine_over(tmp_path: Path) -> None:
    """As with gunicorn --preload, whose master is killed."""
    text = """
app.start()
pid.submit().result(timeout=30)
parent = os.getpid()
if not os.fork():
    pid.submit().result(timeout=30)
    os.kill(parent, signal.SIGKILL)
    for _ in range(20):
        found = pid.submit().result(timeout=30)
    assert found == os.getpid()
    app.close()
    open("done", "w").close()
    os._exit(0)
time.sleep(60)
"""
    done = script(tmp_path, text)
    assert done.returncode == -signal.SIGKILL
    eventually((tmp_path / "done").exists, "the child goes on")


def test_connections_that_were_never_left_end_with_the_process(tmp_path: Path) -> None:
    text = """
with app.run(http__listen="127.0.0.1:0") as client:
    token = open("data/token").read().strip()
    kept = [penstock.connect(), penstock.connect(client.url, token=token)]
    for session in kept:
        assert session.__enter__().status().pid == os.getpid()
print("done")
"""
    done = script(tmp_path, text)
    assert (done.stdout, "Unclosed client" in done.stderr, done.returncode) == ("done\n", False, 0)


def test_a_job_that_begins_with_the_engine_can_submit_others_at_once(tmp_path: Path) -> None:
    with penstock.App().run(tmp_path, unknown_topics="hold") as client:
        kept = client.submit_many("job.outer", [{"n": n} for n in range(20)])
    app = an_app()

    @app.job("job.outer")
    async def outer(n: int) -> int:
        return int(await (await app.functions["job.double"].asubmit(n)))

    with app.run(tmp_path) as client:
        results = [client.get(job.job_id).result(timeout=30) for job in kept]
    assert results == [2 * n for n in range(20)]
