"""Five machines: three with an engine, two workers and a NATS server each, two with PostgreSQL."""

from __future__ import annotations

import itertools
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex

from tests.support.chaos.cluster import HERE, judge, marks_in, stored_in
from tests.support.machines import Machine, some_machines
from tests.support.nats import make_tls_files, program
from tests.support.postgres import PostgresServer
from tests.support.waiting import eventually

import penstock
from penstock.adapters.postgres.store import PostgresBackend
from penstock.lifecycles.canonical import TERMINAL

HOSTS = ("one", "two", "three")
WORKERS = 2
"""On each of them."""
LEASE = 4
SETTINGS = """
store = "postgresql://test@{primary}:5432,{replica}:5433/postgres"
concurrency = 8

[storage]
blobs = "{shared}/blobs"

[bus]
url = "{bus}"
ca = "{shared}/ca.pem"

[timeouts]
lease = {lease}
kill_grace = 1

[limits]
max_attempts = 20
"""


class Site:
    """The machines, what runs on them, and what clients were told."""

    def __init__(
        self,
        folder: Path,
        machines: Sequence[Machine],
        databases: Sequence[PostgresServer],
        observer: Machine,
    ) -> None:
        self.folder, self.hosts = folder, machines
        self.primary, self.replica = databases
        self.observer = observer
        """A machine that nothing happens to."""
        self.engines: dict[str, subprocess.Popen[str]] = {}
        self.workers: dict[str, subprocess.Popen[str]] = {}
        self.servers: dict[str, subprocess.Popen[str]] = {}
        self.marks = folder / "marks"
        self.marks.touch()
        self.acknowledged: list[str] = []
        self.bus = ",".join(f"tls://{host.address}:4222" for host in machines)

    # -- what runs -----------------------------------------------------------------

    def host(self, name: str) -> Machine:
        return self.hosts[HOSTS.index(name)]

    def prepare(self) -> None:
        tls = make_tls_files(self.folder, *(host.address for host in self.hosts))
        routes = ", ".join(f"nats://{host.address}:6222" for host in self.hosts)
        settings = SETTINGS.format(
            primary=self.primary.host,
            replica=self.replica.host,
            shared=self.folder,
            bus=self.bus,
            lease=LEASE,
        )
        (self.observer.folder / "penstock.toml").write_text(settings)
        token = token_hex(16)
        for name, host in zip(HOSTS, self.hosts, strict=True):
            (host.folder / "nats.conf").write_text(
                f'server_name: {name}\nhost: "{host.address}"\nport: 4222\n{tls}'
                f'cluster {{ name: chaos, listen: "{host.address}:6222", routes: [{routes}] }}\n'
            )
            (host.folder / "penstock.toml").write_text(settings)
            data = host.folder / "data"
            data.mkdir(0o700)
            (data / "token").write_text(token)
            host.env = {
                "PYTHONPATH": str(HERE),
                "PENSTOCK_TOKEN": token,
                "PENSTOCK_X_MARKS": str(self.marks),
            }

    def start_server(self, name: str) -> None:
        """A NATS server."""
        host = self.host(name)
        with (host.folder / "nats.log").open("ab") as log:
            argv = [*host.inside, str(program()), "-c", str(host.folder / "nats.conf")]
            self.servers[name] = subprocess.Popen(argv, stdout=log, stderr=log, text=True)
        host.processes.append(self.servers[name])

    def start_engine(self, name: str) -> None:
        host = self.host(name)
        (host.folder / "up.log").unlink(missing_ok=True)
        self.engines[name] = host.start("up", "--no-worker", "--no-http", log="up.log")
        host.says("up.log", "ready")

    def start_worker(self, name: str, number: int) -> None:
        worker, host = f"{name}-{number}", self.host(name)
        words = ("worker", "start", "--bus", self.bus, "--app", "jobs:app", "--id", worker)
        self.workers[worker] = host.start(*words, log=f"{worker}.log")

    def owner(self) -> str:
        """The host whose engine owns the database."""
        found: str = self.observer.json("db", "status")["owner"]
        return next((n for n, p in self.engines.items() if found.endswith(f":{p.pid}")), "")

    def becomes_owner_other_than(self, name: str) -> None:
        eventually(lambda: self.owner() not in (name, ""), f"another than {name} owns the database")

    # -- what clients do -----------------------------------------------------------

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """A client of each engine, which goes on after every error."""
        stop, numbers = threading.Event(), itertools.count()
        threads = [
            threading.Thread(target=self._submit, args=(host, stop, numbers), daemon=True)
            for host in self.hosts
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(80)
            assert not any(thread.is_alive() for thread in threads)

    def _submit(self, host: Machine, stop: threading.Event, numbers: Iterator[int]) -> None:
        address = f"unix:{host.folder / 'data' / 'penstock.sock'}"
        while not stop.is_set():
            try:
                with penstock.connect(address) as client:
                    while not stop.is_set():
                        n = next(numbers)
                        topic = "job.chaos.child" if n % 4 == 0 else "job.chaos.short"
                        job = client.submit(topic, {"n": n * 10})
                        self.acknowledged.append(job.job_id)
                        time.sleep(0.15)
            except penstock.PenstockError:
                time.sleep(0.1)

    def goes_on(self, what: str) -> None:
        """Jobs are accepted and end, whatever happened."""
        before = len(self.acknowledged)
        eventually(lambda: len(self.acknowledged) >= before + 5, f"jobs are accepted: {what}")
        chosen = self.acknowledged[-1]
        eventually(
            lambda: any(mark[:2] == ("end", chosen) for mark in marks_in(self.marks)),
            f"{chosen} ends: {what}",
        )
        print(f"{time.strftime('%X')} {len(self.acknowledged)} jobs: {what}")  # if it fails

    def check(self) -> None:
        """All that was acknowledged ends, and the history of the whole run breaks no promise."""
        url = f"postgresql://test@/postgres?host={self.replica.data}&port={self.replica.port}"
        with penstock.connect(f"unix:{self.hosts[0].folder / 'data' / 'penstock.sock'}") as client:
            for job_id in self.acknowledged:
                job = client.get(job_id)
                eventually(lambda job=job: job.refresh().state in TERMINAL, job_id)  # type: ignore[misc]
        judge(marks_in(self.marks), self.acknowledged, *stored_in(PostgresBackend(url)))


@contextmanager
def site(folder: Path, databases: Path) -> Iterator[Site]:
    """`databases`: a folder that is not below one which only its own user can enter."""
    databases.chmod(0o711)
    with ExitStack() as stack:
        machines = stack.enter_context(some_machines(folder, *HOSTS, "db1", "db2"))
        hosts, (first, second) = machines[:3], machines[3:]
        options = ("listen_addresses=*", "wal_keep_size=64MB")
        servers: list[PostgresServer] = []
        for number, machine in enumerate((first, second)):
            place = databases / machine.folder.name
            place.mkdir()
            made = PostgresServer(
                place,
                *options,
                copy_of=servers[0] if number else None,
                port=5432 + number,  # a copy has the lock of the other's socket
                inside=machine.inside,
                host=machine.address,
            )
            stack.callback(made.stop)
            servers.append(made)
            if not number:
                with (made.data / "pg_hba.conf").open("a") as access:
                    access.write("host all all 10.99.0.0/24 trust\n")
                    access.write("host replication all 10.99.0.0/24 trust\n")
                made.sql("SELECT pg_reload_conf()")
        # An acknowledged commit is on both.
        servers[0].sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        servers[0].sql("SELECT pg_reload_conf()")
        made_site = Site(folder, hosts, servers, second)
        made_site.prepare()
        for name in HOSTS:
            made_site.start_server(name)
        for name in HOSTS:
            made_site.start_engine(name)
        for name in HOSTS:
            for number in range(WORKERS):
                made_site.start_worker(name, number)
        yield made_site
