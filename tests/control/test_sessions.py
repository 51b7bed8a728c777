"""Browser sessions: when they end, and how many there may be."""

from __future__ import annotations

import pytest
from tests.support.ledgers import MemoryLedger

from penstock.control import sessions
from penstock.control.guard import Guard, KeyRegistry, KeyService
from penstock.core.errors import NotAuthenticated, TooMany
from penstock.ports.engine_api import OWNER, KeyRole
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock


class Bench:
    def __init__(self) -> None:
        self.store, self.clock = MemoryLedger(), VirtualClock()
        self.keys = KeyRegistry(self.store, self.clock, "the-owners-token")
        self.sessions = self.keys.sessions

    def is_open(self, token: str) -> bool:
        try:
            self.sessions.authenticate(token)
        except NotAuthenticated:
            return False
        return True

    async def restart(self) -> None:
        self.keys = KeyRegistry(self.store, self.clock, "the-owners-token")
        await self.keys.load()
        self.sessions = self.keys.sessions


@run_async
async def test_a_session_ends_when_it_is_idle_or_old() -> None:
    bench = Bench()
    used, idle = await bench.sessions.open(OWNER), await bench.sessions.open(OWNER)
    for _ in range(int(sessions.LIFETIME / (sessions.IDLE / 2))):
        bench.clock.advance(sessions.IDLE / 2)
        assert bench.is_open(used.token)
    assert not bench.is_open(idle.token)
    bench.clock.advance(60)
    assert not bench.is_open(used.token)


@run_async
async def test_its_last_use_survives_a_restart() -> None:
    bench = Bench()
    used, idle = await bench.sessions.open(OWNER), await bench.sessions.open(OWNER)
    bench.clock.advance(sessions.IDLE - 60)
    assert bench.is_open(used.token)
    await bench.store.apply([])  # what is stored by the way goes with a commit
    bench.clock.advance(120)
    await bench.restart()
    assert bench.is_open(used.token)
    assert not bench.is_open(idle.token)
    assert len(await bench.store.recall_all("session/")) == 1


@run_async
async def test_one_key_has_so_many_sessions_and_the_least_used_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_PER_KEY", 2)
    bench = Bench()
    made = await KeyService(bench.keys, Guard(OWNER, bench.store, bench.clock)).create(
        "ada", (KeyRole.SUBMIT,)
    )
    ada = bench.keys.authenticate(made.token)
    mine = await bench.sessions.open(OWNER)
    tokens = []
    for _ in range(3):
        bench.clock.advance(1)
        tokens.append((await bench.sessions.open(ada)).token)
        bench.clock.advance(1)
        bench.is_open(tokens[0])
    assert [bench.is_open(token) for token in tokens] == [True, False, True]
    assert bench.is_open(mine.token)


@run_async
async def test_a_link_expires_and_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_LINKS", 2)
    bench = Bench()
    link = bench.sessions.create_link(OWNER)
    bench.sessions.create_link(OWNER)
    with pytest.raises(TooMany):
        bench.sessions.create_link(OWNER)
    bench.clock.advance(sessions.LINK_LIFETIME)
    with pytest.raises(NotAuthenticated):
        bench.sessions.use_link(link.token)
    assert bench.sessions.use_link(bench.sessions.create_link(OWNER).token) is OWNER
