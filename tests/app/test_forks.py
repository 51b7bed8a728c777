"""Clients and engines that were made before a fork, used by the child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import eventually

import penstock

SETUP = """
import asyncio, multiprocessing, os, sys, time, penstock
app = penstock.App()

@app.job("job.text.shout")
def shout(text: str) -> str:
    return text.upper()

def shouted(text):
    return shout.submit(text).result(timeout=20)

def forked(work):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    try:
        print("child:", work(), flush=True)
    except BaseException as error:
        print("child:", type(error).__name__, error, flush=True)
        os._exit(0 if isinstance(error, penstock.PenstockError) else 1)
    os._exit(0)
"""


def run(script: str, *words: object) -> list[str]:
    """What the script printed; it must not hang."""
    done = subprocess.run(
        [sys.executable, "-c", SETUP + script, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


EMBEDDED = """
with app.run(sys.argv[1]) as ps:
    job = shout.submit("one")
    assert job.result(timeout=20) == "ONE"
    updates = job.follow()
    for work in (
        lambda: shout.submit("two").result(timeout=3),
        lambda: job.result(timeout=3),
        lambda: asyncio.run(job.aresult(timeout=3)),
        lambda: list(updates),
        lambda: ps.status(),
    ):
        began = time.monotonic()
        forked(work)
        assert time.monotonic() - began < 3
    def connected():
        with app.connect(data=sys.argv[1]):
            return shout.submit("three").result(timeout=20)
    forked(connected)
    print("parent:", shout.submit("four").result(timeout=20))
"""


def test_an_embedded_engine_is_not_used_by_a_forked_child(tmp_path: Path) -> None:
    *refused, connected, parent = run(EMBEDDED, tmp_path)
    assert len(refused) == 5
    for line in refused:
        assert line.startswith("child: EngineUnavailable this client was made in another process")
        assert "app.connect()" in line
    assert connected == "child: THREE"
    assert parent == "parent: FOUR"


CONNECTED = """
data, address = sys.argv[1:]
with app.run(data, listen="unix:,tcp://127.0.0.1:0", http__listen="127.0.0.1:0") as ps:
    token = open(data + "/token").read().strip()
    address = {"http": ps.url, "unix": f"unix:{data}/penstock.sock"}[address]
    if os.fork() == 0:
        with app.connect(address, token=token) as client:
            job = shout.submit("one")
            assert job.result(timeout=20) == "ONE"
            forked(lambda: shout.submit("two").result(timeout=20))
            forked(lambda: asyncio.run(shout.submit("three").aresult(timeout=20)))
            forked(lambda: (job.result(timeout=20), len(list(job.follow())), len(client.jobs())))
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print("pool:", *pool.map(shouted, "abcd"), flush=True)
            print("parent:", shout.submit("four").result(timeout=20), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
    assert shout.submit("five").result(timeout=20) == "FIVE"
"""


@pytest.mark.parametrize("address", ["unix", "http"])
def test_a_connected_client_connects_again_in_a_forked_child(tmp_path: Path, address: str) -> None:
    assert run(CONNECTED, tmp_path, address) == [
        "child: TWO",
        "child: THREE",
        "child: ('ONE', 0, 3)",
        "pool: A B C D",
        "parent: FOUR",
    ]


LEFT = """
with app.run(sys.argv[1], http__listen=sys.argv[2]) as ps:
    assert shout.submit("one").result(timeout=20) == "ONE"
    with penstock.connect(ps.url, token=open(sys.argv[1] + "/token").read().strip()) as client:
        client.status()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, ps.url, flush=True)
        time.sleep(60)
"""


def test_a_forked_child_keeps_nothing_of_an_engine_that_was_killed(tmp_path: Path) -> None:
    """Neither its lock nor its ports, nor the connections of those who wait for it."""
    words = [sys.executable, "-c", SETUP + LEFT, str(tmp_path), "127.0.0.1:0"]
    engine = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    child, url = engine.stdout.readline().split()
    try:
        with penstock.connect(data=tmp_path, reconnect_timeout=0.5) as client:
            client.status()
            engine.send_signal(signal.SIGKILL)
            engine.wait()
            with pytest.raises(penstock.EngineUnavailable, match="could not be made again"):
                client.status()
        os.kill(int(child), 0)  # it is still there
        with penstock.App().run(tmp_path, http__listen=url.removeprefix("http://")) as ps:
            assert ps.url == url
            assert ps.status().pid == os.getpid()
    finally:
        os.kill(int(child), signal.SIGKILL)
        engine.stdout.close()
    eventually(lambda: engine.poll() is not None, "the engine is gone")


LEAVING = """
with app.run(sys.argv[1]) as ps:
    for session in (None, app.connect(data=sys.argv[1])):
        with session or app.connect(data=sys.argv[1]) as client:
            pid = os.fork()
            if pid == 0:
                if session is not None:
                    assert client.submit("job.text.shout", {"text": "one"}).result(20) == "ONE"
                sys.exit(7)  # through both blocks
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            assert shout.submit("two").result(timeout=20) == "TWO"
    print(shout.submit("three").result(timeout=20))
"""


def test_a_forked_child_leaves_what_its_parent_has_entered(tmp_path: Path) -> None:
    assert run(LEAVING, tmp_path) == ["THREE"]
