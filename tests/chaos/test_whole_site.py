"""Three engines, six workers, PostgreSQL with a replica and a NATS cluster on five machines."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from tests.support import postgres
from tests.support.chaos.site import HOSTS, LEASE, Site, site
from tests.support.machines import may_make_machines

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
