"""Jobs that do harm: each is held within its limits, its end is told, and nothing is left."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.container.leftovers import settled
from tests.support.container.serving import Served, code_of, new_id
from tests.workloads.container.live.conftest import GRACE, MIB

from penstock.testing.container_engine import processes_with

HUGE = 1_000_000_000


def test_a_fork_bomb_stays_within_its_limit_and_all_of_it_ends(served: Served, mark: str) -> None:
    name, limit = new_id(), 40
    script = f"b() {{ b & b & sleep 60; }}; b & exec sleep 60; : {mark}"
    limits = {"pids": limit, "max_runtime_seconds": 2, "memory_mb": 64}
    assert served.submit(name, "sh", "-c", script, limits=limits)[0] == 202
    most = 0
    while served.ask("GET", f"/jobs/{name}")[1]["state"] in ("queued", "running"):
        most = max(most, len(processes_with(mark)))
        time.sleep(0.02)
    record = served.ended(name)
    assert (code_of(record), "can't fork" in record["stderr"]) == ("TIMEOUT", True)
    assert 1 < most <= limit + 5  # and those that start it


@pytest.mark.parametrize(
    "script",
    [
        "x=a; while :; do x=$x$x; done",
        "head -c 200000000 /dev/zero | tail",
        "head -c 60000000 /dev/zero > /tmp/a",
    ],
)
def test_a_memory_bomb_is_killed_and_told_as_one(served: Served, mark: str, script: str) -> None:
    limits = {"memory_mb": 32, "tmp_mb": 200, "max_runtime_seconds": 50}
    record = served.shell(f": {mark}; {script}", limits=limits)
    assert code_of(record) == "OOM_KILLED", record
    assert record["usage"]["peak_memory_bytes"] <= 33 * MIB


def test_memory_is_not_to_be_had_by_way_of_tmp(served: Served, mark: str) -> None:
    script = f"head -c 20000000 /dev/zero > /tmp/a || echo full; wc -c < /tmp/a; : {mark}"
    record = served.shell(script, limits={"memory_mb": 128, "tmp_mb": 8})
    assert (code_of(record), record["stdout"]) == ("finished", f"full\n{8 * MIB}\n")


@pytest.mark.seed("003", "5.5", "6.12")
@pytest.mark.parametrize(
    "script",
    [
        "head -c 50000000 /dev/zero > /output/f; sleep 30",
        "i=0; while :; do i=$((i+1)); head -c 100000 /dev/zero > /output/$i; done",
        "exec truncate -s 1000000000 /output/f",
        "cd /output; seq 20000 | xargs mkdir; sleep 30",
    ],
)
def test_a_disk_filler_is_stopped_at_its_limit(served: Served, mark: str, script: str) -> None:
    before = served.disk_use()
    limits = {"max_artifact_bytes": MIB, "max_runtime_seconds": 40}
    record = served.shell(f": {mark}; {script}", outputs=True, limits=limits)
    assert code_of(record) == "OUTPUT_LIMIT", record
    assert sum(one["size"] for one in record["artifacts"]) <= MIB
    assert not settled(lambda: served.disk_use() > before + 3 * MIB)


@pytest.mark.seed("003", "10.4")
def test_nothing_but_memory_and_the_output_can_be_written(served: Served, mark: str) -> None:
    places = "/ /bin /etc /input /dev /proc /sys /sys/fs/cgroup /run /tmp /output /dev/shm"
    script = f"for p in {places}; do (echo x > $p/{mark}) 2>/dev/null && echo $p; done; exit 0"
    inputs = [{"path": "a", "text": "a"}]
    record = served.shell(script, inputs=inputs, outputs=True)
    assert code_of(record) == "finished"
    assert record["stdout"].split() == ["/tmp", "/output", "/dev/shm"]


STUBBORN = "trap '' TERM INT HUP; (trap '' TERM; while :; do sleep 1; done) & "


@pytest.mark.seed("003", "9.2")
def test_a_process_that_ignores_term_is_killed_at_its_limit(served: Served, mark: str) -> None:
    script = f"{STUBBORN} while :; do sleep 1; done; : {mark}"
    before = time.monotonic()
    record = served.shell(script, limits={"max_runtime_seconds": 0.5})
    assert (code_of(record), record["exit_code"]) == ("TIMEOUT", None)
    assert time.monotonic() - before < 0.5 + GRACE + 10


@pytest.mark.seed("003", "9.1")
def test_a_process_that_ignores_term_is_killed_by_a_cancel(served: Served, mark: str) -> None:
    name = served.begin(f"{STUBBORN} echo up; while :; do sleep 1; done; : {mark}")
    before = time.monotonic()
    served.cancel(name)
    assert time.monotonic() - before < GRACE + 10
    assert code_of(served.ended(name)) == "CANCELLED"
    assert processes_with(mark) == []


def test_output_that_is_no_text_is_told_in_text_and_kept_in_bytes(
    served: Served, mark: str
) -> None:
    printed = r"\377\376a\300\200b\342\202c\355\240\200\000\033[31m\342\202"
    data = b"\xff\xfea\xc0\x80b\xe2\x82c\xed\xa0\x80\0\x1b[31m\xe2\x82"
    record = served.shell(f"printf '{printed}'; printf '{printed}' >&2; : {mark}")
    name = record["job_id"]
    assert record["stdout"] == record["stderr"] == data.decode("utf-8", "replace")
    assert served.send("GET", f"/jobs/{name}/logs?stream=stdout&raw=1") == (200, data)
    assert served.send("GET", f"/jobs/{name}/logs?stream=stderr&raw=1") == (200, data)


@pytest.mark.seed("003", "10.6")
@pytest.mark.timeout(240)
def test_a_gigabyte_of_output_costs_no_memory(served: Served, mark: str) -> None:
    before = served.peak_memory()
    name = new_id()
    limits = {"max_runtime_seconds": 200, "max_output_bytes": MIB}
    script = f"head -c {HUGE} /dev/zero; echo {mark}"
    assert served.submit(name, "sh", "-c", script, limits=limits, stdin="none")[0] == 202
    until = time.monotonic() + 200
    while True:
        record = served.ask("GET", f"/jobs/{name}?wait=40")[1]
        if record["state"] != "running" or time.monotonic() > until:
            break
    assert code_of(record) == "finished", record["error"]
    assert record["stdout_bytes"] == HUGE + len(mark) + 1
    assert record["stdout_truncated"]
    assert record["stdout"].endswith(f"{mark}\n")
    assert len(record["stdout"]) < 2 * MIB
    assert served.peak_memory() - before < 64 * MIB


@contextmanager
def stalled_reader(served: Served, name: str) -> Iterator[None]:
    """Somebody who asks for a job's output, and takes nothing of it."""
    with served.connection() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"GET /jobs/{name}/logs?follow=sse HTTP/1.1\r\nHost: localhost\r\n\r\n"
        line.sendall(head.encode())
        assert line.recv(12) == b"HTTP/1.1 200"
        yield


def test_a_reader_that_stands_still_holds_up_no_job(served: Served, mark: str) -> None:
    name = served.begin(f"echo up; sleep 0.3; head -c 50000000 /dev/zero; : {mark}")
    with stalled_reader(served, name):
        record = served.ended(name)
        assert (code_of(record), record["stdout_bytes"]) == ("finished", 50_000_003)


@pytest.mark.seed("003", "10.6")
def test_a_reader_that_stands_still_holds_up_no_cancel(served: Served, mark: str) -> None:
    name = served.begin(f"echo up; yes {mark}")
    with stalled_reader(served, name), stalled_reader(served, name):
        time.sleep(0.3)  # until all that lies between is full
        before = time.monotonic()
        served.cancel(name)
        assert time.monotonic() - before < GRACE + 10
    assert code_of(served.ended(name)) == "CANCELLED"
