"""An engine that vanishes without a word: nobody hangs, and every timeout is kept.

A proxy stands for the network. When it swallows what is sent, no end of a connection hears that
the other is gone, as when a machine loses its power.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.black_hole import BlackHole, black_hole
from tests.support.waiting import eventually, soon

import penstock
from penstock import JobState, StreamKind, StreamQuery
from penstock.adapters.http import connection as http
from penstock.adapters.http import engine_api
from penstock.adapters.link import blocking, renewal
from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.testing.aio import run_async

WAYS = ["unix", "tcp", "http"]
TIMEOUT = 1.0
LIMIT = 8.0
"""Seconds within which every call has ended, on a slow machine, too."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is missed after a second, not after half a minute."""
    for module in (renewal, http):
        monkeypatch.setattr(module, "_LATE", 0.5)
        monkeypatch.setattr(module, "_LEAST_SILENCE", TIMEOUT)
    monkeypatch.setattr(http, "_SILENCE", TIMEOUT)
    monkeypatch.setattr(engine_api, "_POLL", TIMEOUT)
    for module in (renewal, blocking):
        monkeypatch.setattr(module, "PING_INTERVAL", TIMEOUT / 3)


class Network:
    """An engine in this process, and three ways to it that can be cut."""

    def __init__(self, here: penstock.Client, token: str, holes: dict[str, BlackHole]) -> None:
        self.here, self.token, self.holes = here, token, holes
        self.gate = threading.Event()
        """What its jobs wait for."""
        self.addresses = {
            "unix": f"unix:{holes['unix'].path}",
            "tcp": f"tcp://127.0.0.1:{holes['tcp'].port}",
            "http": f"http://127.0.0.1:{holes['http'].port}",
        }

    def connect(self, way: str, reconnect_timeout: float = TIMEOUT) -> penstock.Session:
        return penstock.connect(
            self.addresses[way], token=self.token, reconnect_timeout=reconnect_timeout
        )

    def link(self) -> Link:
        """As a worker has it."""
        port = self.holes["tcp"].port
        address = Address(host="127.0.0.1", port=port)
        return Link(address, token=self.token, reconnect_timeout=None)

    def cut(self) -> None:
        for hole in self.holes.values():
            hole.swallow()

    def heal(self) -> None:
        """For new connections."""
        for hole in self.holes.values():
            hole.heal()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    app, data = penstock.App(), tmp_path / "data"
    tcp, web = free_port(), free_port()
    ways = f"unix:,tcp://127.0.0.1:{tcp}"
    made: list[Network] = []

    @app.job("job.wait")
    def wait() -> str:
        print("begun")  # in its log: a follower who comes late is told this, and no moves before
        assert made[0].gate.wait(60)
        return "done"

    with (
        app.run(data, listen=ways, http__listen=f"127.0.0.1:{web}") as here,
        black_hole(data / "penstock.sock", tmp_path / "hole") as first,
        black_hole(tcp) as second,
        black_hole(web) as third,
    ):
        token = (data / "token").read_text().strip()
        made.append(Network(here, token, {"unix": first, "tcp": second, "http": third}))
        try:
            yield made[0]
        finally:
            made[0].gate.set()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ended_by(call: Callable[[], object]) -> tuple[str, bool]:
    """The name of the error that a call raised, and whether it took no longer than it may."""
    began = time.monotonic()
    try:
        call()
    except penstock.PenstockError as error:
        return type(error).__name__, time.monotonic() - began < LIMIT
    raise AssertionError("nobody could have answered")


UNAVAILABLE = ("EngineUnavailable", True)


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_ends_with_its_own_timeout(network: Network, way: str) -> None:
    with network.connect(way, reconnect_timeout=60) as ps, ThreadPoolExecutor(16) as threads:
        job = ps.submit("job.wait")
        network.cut()

        def first(jobs: Any) -> object:
            return next(iter(jobs))

        async def first_async(jobs: Any) -> object:
            return await anext(aiter(jobs))

        calls: list[Callable[[], object]] = [
            lambda: job.result(TIMEOUT),
            lambda: job.wait(TIMEOUT),
            lambda: job.cancel(timeout=TIMEOUT),
            lambda: penstock.gather(job, timeout=TIMEOUT),
            lambda: penstock.first_completed(job, timeout=TIMEOUT),
            lambda: first(penstock.as_completed([job], timeout=TIMEOUT)),
            lambda: asyncio.run(job.aresult(TIMEOUT)),
            lambda: asyncio.run(penstock.agather(job, timeout=TIMEOUT)),
            lambda: asyncio.run(first_async(penstock.as_completed([job], timeout=TIMEOUT))),
        ]
        ends = list(threads.map(ended_by, calls))
        assert ends == [UNAVAILABLE] * len(calls)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_without_a_timeout_ends_with_that_of_the_client(network: Network, way: str) -> None:
    with network.connect(way) as ps, ThreadPoolExecutor(16) as threads:
        job = ps.submit("job.wait")
        updates = job.follow()
        next(updates)
        network.cut()
        calls: list[Callable[[], object]] = [
            lambda: ps.submit("job.wait"),
            lambda: ps.submit_many("job.wait", [{}] * 3),
            lambda: ps.submit("job.wait", {"text": "a" * (8 << 20)}),
            lambda: asyncio.run(ps.asubmit("job.wait")),
            lambda: ps.get(job.job_id),
            lambda: ps.jobs(),
            lambda: list(updates),
            lambda: list(job.follow()),
            job.retry,
        ]
        ends = list(threads.map(ended_by, calls))
        assert ends == [UNAVAILABLE] * len(calls)


@pytest.mark.parametrize("way", WAYS)
def test_calls_go_on_when_the_network_is_back(network: Network, way: str) -> None:
    with network.connect(way, reconnect_timeout=6) as ps, ThreadPoolExecutor(16) as threads:
        job = ps.submit("job.wait")
        updates = job.follow()
        next(updates)
        network.cut()
        submitted = threads.submit(ps.submit, "job.wait")
        asubmitted = threads.submit(lambda: asyncio.run(ps.asubmit("job.wait")))
        result, gathered = threads.submit(job.result), threads.submit(penstock.gather, job)
        followed = threads.submit(list, updates)
        time.sleep(TIMEOUT / 2)
        network.heal()
        jobs = {job, submitted.result(LIMIT), asubmitted.result(LIMIT)}
        assert set(network.here.jobs()) == jobs
        network.gate.set()
        assert result.result(LIMIT) == "done"
        assert gathered.result(LIMIT) == ["done"]
        assert getattr(followed.result(LIMIT)[-1], "transition").after == "SUCCEEDED"  # noqa: B009


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_tells_of_the_end_that_came_while_its_engine_was_lost(
    network: Network, way: str
) -> None:
    here = network.here.submit("job.wait")
    eventually(lambda: here.refresh().state is JobState.RUNNING and here.logs(), "it has begun")
    with network.connect(way, reconnect_timeout=6) as ps, ThreadPoolExecutor(1) as threads:
        updates = ps.get(here.job_id).follow()
        next(updates)  # its log; no move comes before it is cut off
        followed = threads.submit(list, updates)
        network.cut()
        network.gate.set()
        here.result(LIMIT)
        network.heal()
        assert getattr(followed.result(LIMIT)[-1], "transition").after == "SUCCEEDED"  # noqa: B009


@pytest.mark.parametrize("way", WAYS)
def test_the_event_stream_goes_on_where_it_was_cut_off(network: Network, way: str) -> None:
    here = network.here.submit("job.wait")
    eventually(lambda: here.refresh().state is JobState.RUNNING, "it has begun")
    with (
        network.connect(way, reconnect_timeout=6) as ps,
        ThreadPoolExecutor(1) as threads,
        closing(ps.stream(StreamQuery(kinds=(StreamKind.JOB,)))) as batches,  # type: ignore[type-var]
    ):
        next(batches)  # where it begins
        told = threads.submit(lambda: next(one for batch in batches for one in batch.entries))
        network.cut()
        network.gate.set()
        here.result(LIMIT)
        network.heal()
        assert told.result(LIMIT).transition.after == "SUCCEEDED"


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_silent_stream_may_lose_its_engine_again_and_again(network: Network, way: str) -> None:
    with network.connect(way, reconnect_timeout=4) as ps, ThreadPoolExecutor(1) as threads:
        job = ps.submit("job.wait")
        updates = job.follow()
        while getattr(getattr(next(updates), "line", None), "text", "") != "begun":
            pass
        followed = threads.submit(list, updates)
        for _ in range(2):
            network.cut()
            time.sleep(TIMEOUT)
            network.heal()
            time.sleep(4)
            assert not followed.done()
        network.gate.set()
        assert followed.result(LIMIT)


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_try_to_reconnect_that_is_swallowed_is_not_the_last(network: Network, way: str) -> None:
    hole = network.holes[way]
    with network.connect(way, reconnect_timeout=4) as ps, ThreadPoolExecutor(2) as threads:
        updates = ps.submit("job.wait").follow()
        next(updates)
        accepted = hole.accepted
        network.cut()
        followed, submitted = threads.submit(list, updates), threads.submit(ps.submit, "job.wait")
        eventually(lambda: hole.accepted >= accepted + 2, "both try while the network is down")
        network.heal()
        network.gate.set()
        assert submitted.result(LIMIT).result(LIMIT) == "done"
        assert followed.result(LIMIT)


def test_a_client_can_be_closed_while_its_engine_is_gone(network: Network) -> None:
    for way in WAYS:
        began = time.monotonic()
        with network.connect(way, reconnect_timeout=60) as ps:
            ps.status()
            network.cut()
        assert time.monotonic() - began < LIMIT
        network.heal()


@run_async
async def test_the_link_of_a_worker_is_made_again(network: Network) -> None:
    link = network.link()
    await link.connect()
    keeping = asyncio.create_task(link.keep())
    await asyncio.sleep(2 * TIMEOUT)
    assert link.number == 1  # an engine that answers is not lost
    network.cut()
    await asyncio.sleep(TIMEOUT / 2)
    network.heal()
    await soon(lambda: link.number == 2, "the link is made again")
    keeping.cancel()
    await link.close()


def test_the_pulse_of_a_worker_finds_a_new_way(network: Network) -> None:
    hole = network.holes["tcp"]
    address = Address(host="127.0.0.1", port=hole.port)
    pulse = blocking.Pulse(address, "w", token=network.token, interval=0.05)
    pulse.start()
    try:
        eventually(lambda: hole.accepted == 1, "it is connected")
        time.sleep(2 * TIMEOUT)
        assert hole.accepted == 1
        network.cut()
        eventually(lambda: hole.accepted > 1, "it connects again")
    finally:
        pulse.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/net/tcp")
@pytest.mark.parametrize("way", ["tcp", "http"])
def test_the_system_probes_both_ends_of_every_connection(network: Network, way: str) -> None:
    port = network.holes[way].target

    def probed() -> list[bool]:
        return [is_probed for ends, is_probed in connections() if port in ends]

    with penstock.connect(f"{way}://127.0.0.1:{port}", token=network.token) as ps:
        ps.status()
        assert len(probed()) >= 2
        # While something is not acknowledged yet, another timer runs.
        eventually(lambda: all(probed()), "all connections are probed")


def connections() -> Iterator[tuple[set[int], bool]]:
    """The ports of each TCP connection of this machine, and whether it will be probed soon."""
    established, keepalive, soon = "01", "02", 20 * os.sysconf("SC_CLK_TCK")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer, *_ = line.split()
        kind, _, due = timer.partition(":")
        if state == established:
            ports = {int(end.partition(":")[2], 16) for end in (local, remote)}
            yield ports, kind == keepalive and int(due, 16) <= soon
