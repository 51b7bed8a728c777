"""Several shards of one database: each has one owner, and the jobs of its own tenants."""

from __future__ import annotations

import copy
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.chaos.engines import Cluster, ended_at_last
from tests.support.cli.commands import Penstock, stop
from tests.support.postgres import PostgresServer
from tests.support.waiting import eventually

import penstock
from penstock.app.application import Session
from penstock.core.errors import Misconfigured, NotFound, WrongShard
from penstock.core.shards import shard_of

TAKEOVER = 5.0
"""Seconds within which a killed owner is replaced."""
KNOWN = 1.0
"""Seconds within which all engines know a change."""


def tenant_of(shard: int, shards: int) -> str:
    return next(name for n in range(1000) if shard_of(name := f"t{n}", shards) == shard)


def test_a_tenant_is_always_in_the_same_shard() -> None:
    """Its jobs are there: another function would lose them."""
    assert [shard_of(name, 4) for name in ("default", "acme", "zoë", "")] == [0, 3, 2, 0]


class Shards(Cluster):
    """Engines on a database of several shards."""

    def __init__(self, folder: Path, url: str, count: int) -> None:
        super().__init__(folder, url)
        self.count = count
        self.tenants = [tenant_of(shard, count) for shard in range(count)]
        self.ports: dict[str, int] = {}
        self.command("a").out("db", "migrate", "--shards", str(count))

    def begin(self, *names: str, settled: bool = True) -> None:
        for name in names:
            self.ports[name] = _ports_in_a_row(self.count)
            self.start(name, "--http", f"127.0.0.1:{self.ports[name]}")
            for shard in range(self.count):  # each is ready by itself
                eventually((self.at(name, shard).data / "penstock.sock").exists)
        if settled:
            eventually(lambda: {*self.owners()} == {*names}, within=30)

    def at(self, name: str, shard: int) -> Penstock:
        """The command line where an engine has its part of a shard."""
        part = copy.copy(self.command(name))
        part.data = part.data / f"shard-{shard}" if shard else part.data
        part.env = {**part.env, "PENSTOCK_DATA_DIR": str(part.data)}
        return part

    def work(self, name: str) -> None:
        """A worker for each shard, at one engine."""
        for shard in range(self.count):
            process = self.command(name).start(
                *("worker", "start", "--app", "jobs:app", "--shard", str(shard)),
                stderr=subprocess.STDOUT,
            )
            self._processes.enter_context(ended_at_last(process))
        for shard in range(self.count):
            eventually(partial(self.at(name, shard).json, "worker", "list"))

    def owners(self) -> list[str]:
        """The name of the engine that owns each; empty if nobody does."""
        status = self.command("a").json("db", "status")
        pids = {str(process.pid): name for name, process in self.engines.items()}
        return [
            pids.get(one["owner"].rpartition(":")[2], "?") if one["owned"] else ""
            for one in status["shards"]
        ]

    def key(self, tenant: str) -> str:
        roles = ("--role", "submit", "--role", "operate")
        made = self.command("a").json("key", "create", f"of-{tenant}", *roles, "--tenant", tenant)
        return str(made["token"])

    def client(self, name: str, key: str, shard: int = 0) -> Session:
        url = f"http://127.0.0.1:{self.ports[name] + shard}"
        return penstock.connect(url, token=key)

    @contextmanager
    def submitting(self, name: str, shard: int) -> Iterator[list[tuple[float, str]]]:
        """A client that submits one job after another: times and ids of those accepted."""
        accepted: list[tuple[float, str]] = []
        errors: list[Exception] = []
        ended = threading.Event()
        where = f"unix:{self.at(name, shard).data / 'penstock.sock'}"

        def submit() -> None:
            try:
                with penstock.connect(where) as client:
                    while not ended.is_set():
                        job = client.submit(
                            "job.text.shout", {"text": "x"}, tenant=self.tenants[shard]
                        )
                        accepted.append((time.monotonic(), job.job_id))
                        time.sleep(0.01)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=submit)
        thread.start()
        try:
            yield accepted
        finally:
            ended.set()
            thread.join(60)
            assert not thread.is_alive()
            assert not errors, errors

    def all_succeed(self, name: str, shard: int, accepted: list[tuple[float, str]]) -> None:
        with penstock.connect(f"unix:{self.at(name, shard).data / 'penstock.sock'}") as client:
            handles = [client.get(job_id) for _, job_id in accepted]
            assert penstock.gather(*handles, timeout=60) == ["X!"] * len(accepted)


@pytest.fixture
def two(tmp_path: Path, url: str) -> Iterator[Shards]:
    made = Shards(tmp_path, url, 2)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def four(tmp_path: Path, url: str) -> Iterator[Shards]:
    made = Shards(tmp_path, url, 4)
    try:
        yield made
    finally:
        made.close()


def _ports_in_a_row(count: int) -> int:
    """The first of some that are free, and that the system gives to nobody by itself."""
    for first in random.sample(range(20_000, 32_000, 10), 100):
        with ExitStack() as bound, suppress(OSError):
            for port in range(first, first + count):
                bound.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def test_each_shard_has_its_owner_and_tenants_get_to_theirs_from_anywhere(two: Shards) -> None:
    two.begin("a", "b")
    two.work("a")
    assert sorted(two.owners()) == ["a", "b"]
    keys = [two.key(tenant) for tenant in two.tenants]
    time.sleep(KNOWN)
    ids: list[set[str]] = [set(), set()]
    for shard, key in enumerate(keys):
        for name in ("a", "b"):
            for door in (0, 1):
                with two.client(name, key, door) as client:
                    job = client.submit("job.text.shout", {"text": name})
                    assert job.result(timeout=30) == f"{name.upper()}!"
                    ids[shard].add(job.job_id)
                    assert {one.job_id for one in client.jobs()} == ids[shard]
    with two.client("b", keys[0]) as client, pytest.raises(NotFound):
        client.get(min(ids[1]))
    for shard in (0, 1):
        listed = two.at("b", shard).json("ps", "--all")
        assert {one["request"]["job_id"] for one in listed} == ids[shard]


def test_what_is_of_all_tenants_is_changed_in_shard_0_and_known_to_all(two: Shards) -> None:
    two.begin("a", "b")
    zero, one = two.at("a", 0), two.at("a", 1)
    two.work("a")
    for words in (("key", "create", "k", "--role", "submit"), ("pool", "pause", "default")):
        assert "changed in shard 0" in one.err(*words, code=4)
    zero.out("limit", "create", "shared", "--concurrency", "5")
    zero.out("limit", "create", "each", "--concurrency", "1", "--per", "tenant")
    assert "must be at least 2" in zero.err("limit", "create", "small", "--rate", "1/m", code=2)
    zero.out("pool", "pause", "default")
    limits = eventually(lambda: one.json("limit", "list"), within=10)
    assert {view["limit"]["name"] for view in limits} == {"shared", "each"}
    eventually(lambda: one.json("pool", "list")[0]["paused"], within=10)
    job_id = one.submit("job.text.shout", {"text": "x"}, "--tenant", two.tenants[1])
    assert "paused" in one.out("show", job_id)
    zero.out("pool", "resume", "default")
    assert one.out("result", job_id, "--timeout", "30s") == '"X!"'
    zero.out("limit", "delete", "each")
    gates = [one.folder / f"gate{n}" for n in range(3)]
    for gate in gates:
        one.submit("job.wait.file", {"path": str(gate)}, "--tenant", two.tenants[1])
    eventually(lambda: sum(Path(f"{gate}.started").exists() for gate in gates) == 2)
    time.sleep(0.5)  # half of five, and not more
    assert sum(Path(f"{gate}.started").exists() for gate in gates) == 2
    for gate in gates:
        gate.touch()
    key = two.key(two.tenants[1])
    time.sleep(KNOWN)
    with two.client("b", key, 1) as client:
        assert client.submit("job.text.shout", {"text": "k"}).result(timeout=30) == "K!"
        zero.out("key", "delete", f"of-{two.tenants[1]}")
        time.sleep(KNOWN)
        with pytest.raises(penstock.NotAuthenticated):
            client.submit("job.text.shout", {"text": "k"})


def test_a_job_of_a_tenant_of_another_shard_is_refused(
    two: Shards, url: str, tmp_path: Path, server: PostgresServer
) -> None:
    two.begin("a")
    two.work("a")
    where = f"unix:{two.at('a', 1).data / 'penstock.sock'}"
    with penstock.connect(where) as client:
        with pytest.raises(WrongShard, match="is in shard 0, and this is shard 1 of 2"):
            client.submit("job.text.shout", {"text": "x"}, tenant=two.tenants[0])
        with pytest.raises(WrongShard):
            client.jobs(tenant=two.tenants[0])
        assert client.jobs() == []
    # With SQL, it finds its shard.
    schema = url.partition("schema=")[2]
    for shard, tenant in enumerate(two.tenants):
        given = f"'job.text.shout', '{{\"text\": \"sql\"}}', 'sql-{shard}', '{tenant}'"
        server.sql(f"SELECT {schema}.submit({given})")
        here = two.at("a", shard)
        eventually(partial(here.json, "ps", "--all"))
        assert here.out("result", f"sql-{shard}", "--timeout", "30s") == '"SQL!"'


def test_the_number_of_shards_is_fixed(two: Shards, url: str, tmp_path: Path) -> None:
    here = two.command("a")
    assert "has 2 shards" in here.err("db", "migrate", "--shards", "3", code=4)
    assert here.out("db", "migrate", "--shards", "2") == "up to date"
    assert here.out("db", "migrate") == "up to date"
    assert "run no jobs themselves" in here.err("up", "--app", "jobs:app", code=2)
    told = "is shard 0 of 2, not shard 0 of 1"
    with pytest.raises(Misconfigured, match=told), penstock.App().run(tmp_path / "e", store=url):
        pass
    assert "shard 1" in here.out("db", "status")


def test_a_database_that_was_used_stays_as_it_is(tmp_path: Path, url: str) -> None:
    with penstock.App().run(tmp_path / "embedded", store=url):
        pass
    here = Penstock(tmp_path)
    assert "has 1 shards" in here.err("db", "migrate", url, "--shards", "2", code=4)


def test_a_spare_engine_replaces_a_killed_owner_and_other_shards_never_pause(two: Shards) -> None:
    two.begin("a", "b")
    two.begin("c", settled=False)
    two.work("c")
    owners = two.owners()
    killed, other = owners[1], owners[0]
    with two.submitting("c", 0) as calm, two.submitting("c", 1) as lost:
        eventually(lambda: min(len(calm), len(lost)) > 20)
        two.engines[killed].kill()
        at, count = time.monotonic(), len(lost)
        eventually(lambda: len(lost) > count + 20, within=30)
        first = next(when for when, _ in lost if when > at + 0.1)
        eventually(lambda: calm[-1][0] > first)
    took = max(b[0] - a[0] for a, b in pairwise(lost))
    pause = max(b[0] - a[0] for a, b in pairwise(calm))
    assert took < TAKEOVER, took
    assert pause < 1.5, pause
    assert two.owners() == [other, "c"]
    two.all_succeed("c", 0, calm)
    two.all_succeed("c", 1, lost)


def test_shards_are_taken_over_and_spread_again(four: Shards) -> None:
    four.begin("a", "b")
    eventually(lambda: sorted(four.owners()) == ["a", "a", "b", "b"], within=40)
    four.engines["b"].kill()
    eventually(lambda: four.owners() == ["a"] * 4, within=20)
    four.begin("c", settled=False)
    four.work("c")
    with ExitStack() as running:
        jobs = [running.enter_context(four.submitting("c", shard)) for shard in range(4)]
        eventually(lambda: sorted(four.owners()) == ["a", "a", "c", "c"], within=50)
        counts = [len(ids) for ids in jobs]
        eventually(lambda: all(len(ids) > n for n, ids in zip(counts, jobs, strict=True)))
        said = stop(four.engines["a"], signal.SIGTERM)
        eventually(lambda: four.owners() == ["c"] * 4, within=20)
    assert "giving shard" in said
    for shard in range(4):
        four.all_succeed("c", shard, jobs[shard])


def test_a_worker_of_another_machine_serves_any_shard(two: Shards, tmp_path: Path) -> None:
    here = two.command("a")
    here.env["PENSTOCK_LINK__LISTEN"] = f"127.0.0.1:{_ports_in_a_row(2)}"
    two.begin("a")
    there = two.command("elsewhere")
    del there.env["PENSTOCK_STORE"]
    token = here.json("worker", "token", "create")["token"]
    address = f"penstock://{here.env['PENSTOCK_LINK__LISTEN']}"
    worker = there.start(
        *("worker", "start", "--app", "jobs:app", "--connect", address, "--join", token),
        *("--shard", "1"),
        stderr=subprocess.STDOUT,
    )
    with ended_at_last(worker):
        one = two.at("a", 1)
        eventually(lambda: one.json("worker", "list"))
        job_id = one.submit("job.text.shout", {"text": "far"}, "--tenant", two.tenants[1])
        assert one.out("result", job_id, "--timeout", "30s") == '"FAR!"'
        assert here.json("worker", "list") == []
        (known,) = here.json("worker", "credential", "list")
        here.out("worker", "credential", "delete", known["worker_id"])
        assert worker.wait(30) != 0
