"""A worker on another machine: two network namespaces, and everything that can happen to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.machines import Machines, may_make_machines, two_machines
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.skipif(
        not may_make_machines() and not os.environ.get("CI"), reason="needs root, ip and iptables"
    ),
    pytest.mark.timeout(180),
]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with two_machines(tmp_path) as made:
        yield made


def test_a_worker_joins_with_a_token_and_later_without(machines: Machines) -> None:
    machines.engine()
    worker = machines.worker("--join", machines.token())
    machines.ready()
    assert machines.shout("hello") == '"HELLO!"'
    worker.terminate()
    assert worker.wait(30) == 0
    eventually(lambda: machines.status() == "")
    machines.worker()
    machines.ready()
    assert machines.shout("again") == '"AGAIN!"'


def test_a_worker_may_come_before_its_engine(machines: Machines) -> None:
    engine = machines.engine()
    token = machines.token()
    engine.terminate()
    engine.wait(30)
    machines.worker("--join", token)
    machines.there.says("w1.log", f"waiting for an engine at {machines.address}")
    machines.engine()
    machines.ready()
    assert machines.shout("late") == '"LATE!"'


def test_a_job_goes_on_while_its_engine_is_killed_and_started_again(machines: Machines) -> None:
    engine = machines.engine()
    machines.worker("--join", machines.token())
    machines.ready()
    gate = machines.waiting_job("survivor")
    engine.kill()
    engine.wait()
    machines.engine()
    machines.ready()
    gate.touch()
    ended = machines.ends("survivor")
    assert (ended["attempt"], machines.starts("survivor")) == (1, 1)


def test_a_killed_worker_is_replaced_by_the_next_process_of_its_name(machines: Machines) -> None:
    machines.engine()
    worker = machines.worker("--join", machines.token())
    machines.ready()
    gate = machines.waiting_job("moved")
    _kill(worker)
    machines.worker()
    eventually(lambda: machines.starts("moved") == 2)
    gate.touch()
    assert machines.ends("moved")["attempt"] == 2


def test_engine_and_worker_killed_together_find_each_other_again(machines: Machines) -> None:
    engine = machines.engine()
    worker = machines.worker("--join", machines.token())
    machines.ready()
    gate = machines.waiting_job("both")
    engine.kill()
    _kill(worker)
    engine.wait()
    machines.worker()
    machines.engine()
    eventually(lambda: machines.starts("both") == 2, machines.there.log("w1.log"))
    gate.touch()
    machines.ends("both")
    assert "here already" not in machines.there.log("w1.log")


def test_a_machine_without_power_is_replaced_before_its_connection_is_missed(
    machines: Machines,
) -> None:
    """Its old connection is still open for the engine, which must not refuse the new process."""
    machines.engine()
    worker = machines.worker("--join", machines.token())
    machines.ready()
    machines.cut()
    _kill(worker)
    time.sleep(1)  # what the system sends for a killed process is lost
    machines.mend()
    machines.worker()
    eventually(lambda: "in pool default" in machines.there.log("w1.log").split("joined", 1)[-1])
    machines.ready()
    assert machines.shout("back") == '"BACK!"'
    assert "here already" not in machines.there.log("w1.log")


def test_a_short_partition_changes_nothing(machines: Machines) -> None:
    machines.engine()
    machines.worker("--join", machines.token())
    machines.ready()
    gate = machines.waiting_job("patient")
    machines.cut()
    time.sleep(4)  # the lease is 15 s
    machines.mend()
    gate.touch()
    ended = machines.ends("patient")
    assert (ended["attempt"], machines.starts("patient")) == (1, 1)


def test_a_revoked_worker_is_ended_and_its_job_goes_to_another(machines: Machines) -> None:
    machines.engine()
    token = machines.token("--uses", "2")
    first = machines.worker("--join", token)
    machines.ready()
    gate = machines.waiting_job("handed-on")
    machines.worker("--join", token, name="w2")
    machines.ready("w2")
    machines.here.penstock("worker", "credential", "delete", "w1")
    assert first.wait(30) != 0
    machines.there.says("w1.log", "revoked")
    eventually(lambda: machines.starts("handed-on") == 2)
    gate.touch()
    assert machines.ends("handed-on")["result"]["worker_id"] == "w2"
    again = machines.worker()
    assert again.wait(30) != 0
    assert machines.shout("w2 stays") == '"W2 STAYS!"'


def test_a_revoked_worker_ends_although_a_thread_of_it_does_not(machines: Machines) -> None:
    (machines.there.folder / "penstock.toml").write_text("[timeouts]\nkill_grace = 0.5\n")
    machines.engine()
    worker = machines.worker("--join", machines.token())
    machines.ready()
    machines.here.penstock("submit", "job.stubborn", "--input", '{"name": "stubborn"}')
    eventually(lambda: machines.starts("stubborn") == 1)
    machines.here.penstock("worker", "credential", "delete", "w1")
    assert worker.wait(40) != 0
    machines.there.says("w1.log", "revoked")


def test_a_worker_is_drained_from_anywhere(machines: Machines) -> None:
    machines.engine()
    worker = machines.worker("--join", machines.token())
    machines.ready()
    gate = machines.waiting_job("last")
    key = machines.here.penstock("key", "create", "ops", "--role", "operate")
    (machines.there.folder / "ops.key").write_text(key)
    pem = (machines.here.folder / "data" / "link" / "authority.pem").read_bytes()
    (machines.there.folder / "engine.pem").write_bytes(pem)
    (machines.there.folder / "penstock.toml").write_text('[link]\nca = "engine.pem"\n')
    elsewhere = ("--connect", machines.address, "--token", "@ops.key")
    assert "is draining" in machines.there.penstock("worker", "drain", "w1", *elsewhere)
    gate.touch()
    assert worker.wait(40) == 0
    machines.ends("last")


def test_large_inputs_and_results_need_no_shared_folder(machines: Machines) -> None:
    for machine in (machines.here, machines.there):
        limits = "max_input = 200_000_000\nmax_result = 200_000_000\n"
        (machine.folder / "penstock.toml").write_text(f"[limits]\n{limits}")
    machines.engine()
    machines.worker("--join", machines.token())
    machines.ready()
    given = machines.here.folder / "large.json"
    given.write_bytes(msgspec.json.encode({"text": "ab" * 50_000_000}))
    words = ("submit", "job.text.turn", "--input", "@large.json", "--wait", "--wait-timeout", "60s")
    assert machines.here.penstock(*words) == '"' + "ba" * 50_000_000 + '"'


def _kill(process: object) -> None:
    process.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
    process.wait()  # type: ignore[attr-defined]


def test_after_a_long_partition_a_job_ends_once(machines: Machines) -> None:
    """No other worker could take it meanwhile: the one that comes back goes on with it."""
    machines.engine()
    machines.worker("--join", machines.token())
    machines.ready()
    gate = machines.waiting_job("moved")
    machines.cut()
    eventually(lambda: machines.status() == "", "the engine has given the worker up")
    machines.mend()
    machines.ready()
    gate.touch()
    ended = machines.ends("moved")
    assert ended["state"] == "SUCCEEDED"
    assert machines.starts("moved") == ended["attempt"] == 1
    assert machines.shout("still here") == '"STILL HERE!"'
