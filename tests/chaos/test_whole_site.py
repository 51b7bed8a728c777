"""Three engines, six workers, PostgreSQL with a replica and a NATS cluster on five machines."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from tests.support import postgres
from tests.support.chaos.disks import slow_writes
from tests.support.chaos.site import HOSTS, LEASE, Site, site
from tests.support.machines import may_make_machines
from tests.support.postgres import PostgresServer

pytestmark = [
    pytest.mark.skipif(
        not (may_make_machines() and postgres.programs()) and not os.environ.get("CI"),
        reason="needs root, ip, iptables and PostgreSQL",
    ),
    pytest.mark.timeout(300),
]


def test_no_promise_is_broken_whatever_fails(tmp_path: Path) -> None:
    # Not below pytest's folder, which only its own user can enter.
    with (
        tempfile.TemporaryDirectory(prefix="penstock-pg-") as folder,
        site(tmp_path, Path(folder)) as made,
    ):
        with made.submitting():
            made.goes_on("at the start")
            for hurt in (
                kill_a_worker,
                stop_the_owner_past_its_lease,
                kill_a_nats_server,
                cut_off_the_owner,
                stop_a_worker_past_its_lease,
                slow_down_the_disk_of_the_database,
                fail_over_the_database,
                kill_the_owner,
            ):
                hurt(made)
                made.goes_on(hurt.__name__)
        made.check()


def kill_a_worker(made: Site) -> None:
    made.workers["one-0"].kill()
    made.workers["one-0"].wait()
    made.start_worker("one", 0)


def stop_the_owner_past_its_lease(made: Site) -> None:
    owner = made.owner()
    made.engines[owner].send_signal(signal.SIGSTOP)
    made.becomes_owner_other_than(owner)
    made.engines[owner].send_signal(signal.SIGCONT)


def kill_a_nats_server(made: Site) -> None:
    made.servers["two"].kill()
    made.servers["two"].wait()
    made.goes_on("with two NATS servers")
    made.start_server("two")


def cut_off_the_owner(made: Site) -> None:
    owner = made.owner()
    made.host(owner).cut()
    made.becomes_owner_other_than(owner)
    made.host(owner).mend()


def stop_a_worker_past_its_lease(made: Site) -> None:
    made.workers["three-1"].send_signal(signal.SIGSTOP)
    time.sleep(LEASE + 2)
    made.workers["three-1"].send_signal(signal.SIGCONT)


def slow_down_the_disk_of_the_database(made: Site) -> None:
    primary = made.primary
    with slow_writes(primary.data, primary.pid, a_second=5):
        assert flush_time(primary) > 0.3
        made.goes_on("while each flush of the database lasts half a second")
    with slow_writes(primary.data, primary.pid, a_second=1):
        assert flush_time(primary) > 1
        time.sleep(2 * LEASE)


def flush_time(server: PostgresServer) -> float:
    """Seconds that a commit takes."""
    begin = time.monotonic()
    server.sql("SELECT pg_logical_emit_message(true, 'chaos', 'flushed')")
    return time.monotonic() - begin


def fail_over_the_database(made: Site) -> None:
    made.primary.stop(signal.SIGKILL)
    made.replica.promote()


def kill_the_owner(made: Site) -> None:
    owner = made.owner()
    made.engines[owner].kill()
    made.engines[owner].wait()
    made.becomes_owner_other_than(owner)
    made.start_engine(owner)
    assert set(made.engines) == {*HOSTS}
