"""The page that leads from one process to a cluster, on two machines: network namespaces."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.docs.conftest import ROOT, blocks_of
from tests.examples.test_docs_examples import Reader
from tests.support.machines import Machine, may_make_machines, two_machines
from tests.support.nats import make_tls_files, program
from tests.support.postgres import PostgresServer


def start_nats(machine: Machine, folder: Path) -> None:
    """A server with TLS, as the page says."""
    settings = folder / "nats.conf"
    tls = make_tls_files(folder, machine.address)
    settings.write_text(f'host: "{machine.address}"\nport: 4222\n{tls}')
    with open(folder / "nats.log", "wb") as log:
        argv = [*machine.inside, str(program()), "-c", str(settings)]
        started = subprocess.Popen(argv, stdout=log, stderr=log, text=True)
    machine.processes.append(started)


def start_postgres(machine: Machine, folder: Path) -> PostgresServer:
    options = ("fsync=off", "listen_addresses=*")
    server = PostgresServer(folder, *options, port=5432, inside=machine.inside)
    with (server.data / "pg_hba.conf").open("a") as access:
        access.write("host all all 10.99.0.0/24 trust\n")
    server.sql("CREATE ROLE penstock LOGIN")
    server.sql("CREATE DATABASE penstock OWNER penstock")
    server.sql("SELECT pg_reload_conf()")
    return server


@pytest.mark.skipif(
    not may_make_machines() and not os.environ.get("CI"), reason="needs root, ip and iptables"
)
@pytest.mark.timeout(300)
def test_each_step_from_one_process_to_a_cluster_works(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with ExitStack() as stack:
        machines = stack.enter_context(two_machines(tmp_path))
        # Not below pytest's folder, which only its own user can enter.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-pg-")))
        stack.callback(start_postgres(machines.here, folder).stop)
        start_nats(machines.here, shared)
        (shared / "ca.pem").rename(shared / "nats-ca.pem")
        readers: dict[str, Reader] = {}
        for machine in (machines.here, machines.there):
            (machine.folder / "shared").symlink_to(shared)
            readers[machine.address] = Reader(machine.folder, machine.inside)
            stack.callback(readers[machine.address].close)
        for block in blocks_of(ROOT / "docs/how-to/scale-out.md"):
            if block.mark == "file":
                for reader in readers.values():
                    reader.follow(block)
            else:
                readers[block.value or machines.here.address].follow(block)
