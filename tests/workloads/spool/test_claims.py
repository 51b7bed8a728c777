"""Who has a job, and who is alive."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import StoreFailed
from penstock.testing.clock import VirtualClock
from penstock.workloads.spool.disk.peers import Claims, Holder, Peer, Peers, returning

LEASE = 30.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def entered(private: Path) -> Claims:
    private.mkdir(exist_ok=True)
    claims = Claims(private)
    claims.enter()
    return claims


def look(private: Path, clock: VirtualClock) -> list[Peer]:
    return Peers(private, LEASE, clock).look()


@pytest.mark.seed("004", "13.5")
def test_a_claim_is_taken_once_and_seen_by_others(tmp_path: Path, clock: VirtualClock) -> None:
    claims = entered(tmp_path)
    assert claims.take("1_1")
    assert not claims.take("1_1")
    assert claims.holds("1_1")
    [seen] = look(tmp_path, clock)
    assert seen.alive
    assert seen.claims == {"1_1"}
    claims.drop("1_1")
    claims.drop("1_1")
    assert not claims.holds("1_1")
    claims.leave()
    assert look(tmp_path, clock) == []


def test_a_server_without_its_lock_is_dead_on_this_machine(
    tmp_path: Path, clock: VirtualClock
) -> None:
    claims = entered(tmp_path)
    claims.take("1_1")
    assert claims._lock is not None
    os.close(claims._lock)  # as the kernel does when it dies
    [seen] = look(tmp_path, clock)
    assert not seen.alive
    assert seen.claims == {"1_1"}


def test_looking_does_not_disturb_another_who_looks(tmp_path: Path, clock: VirtualClock) -> None:
    claims = entered(tmp_path)
    for _ in range(2):
        assert [seen.alive for seen in look(tmp_path, clock)] == [True]
    assert claims.touch()
    claims.leave()
    assert not claims.touch()


def test_a_lock_that_is_held_for_too_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workloads.spool.disk.peers._PATIENCE", 0.02)
    with (
        returning(tmp_path),
        pytest.raises(StoreFailed, match=r"returning\.lock"),
        returning(tmp_path),
    ):
        raise AssertionError("two have it")
    with returning(tmp_path):
        pass


def test_a_server_can_enter_again(tmp_path: Path, clock: VirtualClock) -> None:
    claims = entered(tmp_path)
    claims.take("1_1")
    shutil.rmtree(claims.folder)
    assert not claims.touch()
    claims.enter()
    assert claims.touch()
    assert not claims.holds("1_1")
    assert [seen.alive for seen in look(tmp_path, clock)] == [True]
    claims.leave()


def elsewhere(private: Path, clock: VirtualClock) -> Path:
    """The lock of a server on another machine, touched now."""
    lock = private / "servers" / "7-abc" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_bytes(msgspec.json.encode(Holder(host="another", pid=7)))
    os.utime(lock, (clock.now(), clock.now()))
    return lock


def test_one_on_another_machine_is_dead_after_its_lease(
    tmp_path: Path, clock: VirtualClock
) -> None:
    lock = elsewhere(tmp_path, clock)
    peers = Peers(tmp_path, LEASE, clock)
    for _ in range(4):
        assert peers.look()[0].alive
        clock.advance(LEASE - 1)
        assert peers.look()[0].alive
        os.utime(lock, (clock.now(), clock.now()))
    assert peers.look()[0].alive
    clock.advance(LEASE + 1)
    assert not peers.look()[0].alive


def test_clocks_that_differ_make_nobody_dead_who_gives_signs_of_life(
    tmp_path: Path, clock: VirtualClock
) -> None:
    lock = elsewhere(tmp_path, clock)
    peers = Peers(tmp_path, LEASE, clock)
    for _ in range(20):
        behind = clock.now() - 10_000
        os.utime(lock, (behind, behind))
        assert peers.look()[0].alive
        clock.advance(LEASE / 10)
        assert peers.look()[0].alive


def test_one_that_was_silent_long_before_is_watched_for_a_part_of_the_lease_only(
    tmp_path: Path, clock: VirtualClock
) -> None:
    elsewhere(tmp_path, clock)
    clock.advance(10 * LEASE)
    peers = Peers(tmp_path, LEASE, clock)
    assert peers.look()[0].alive
    clock.advance(LEASE / 4)
    assert not peers.look()[0].alive
