"""Keys: who is let in, as whom, and what is never told."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from tests.support.rows import every

from penstock.adapters.memory.store import MemoryStore
from penstock.control import keys
from penstock.control.keys import KeyRing
from penstock.core.caller import OWNER, Caller, KeyRole
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    NotAuthenticated,
    NotFound,
    StoreCorrupt,
    StoreFailed,
)
from penstock.ports.keys import NewKey
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock

OWNERS = "the-owners_own-token"
SUBMIT, OPERATE, APPROVE, ADMIN = KeyRole


class Facts(MemoryStore):
    """A store whose disk can be full."""

    full = False

    async def remember(self, name: str, value: bytes) -> None:
        if self.full:
            raise StoreFailed("the disk is full")
        await super().remember(name, value)


class Door:
    """A key ring with everything that it needs."""

    def __init__(self) -> None:
        self.store, self.clock = Facts(), VirtualClock()
        self.ring = KeyRing(self.store, self.clock, OWNERS)

    async def create(self, name: str = "ci", roles: Any = (SUBMIT,), **options: Any) -> NewKey:
        return await self.ring.create(name, roles, **options, by="owner")

    async def restarted(self) -> KeyRing:
        ring = KeyRing(self.store, self.clock, OWNERS)
        await ring.load()
        return ring

    def refusal(self, token: str) -> str:
        with pytest.raises(NotAuthenticated) as refused:
            self.ring.authenticate(token)
        return f"{refused.value.code} {refused.value} {refused.value.facts}"


def wrong_secret(new: NewKey) -> str:
    last = "A" if new.token[-1] != "A" else "B"
    return new.token[:-1] + last


# -- coming in ----------------------------------------------------------------------


@run_async
async def test_a_key_makes_its_holder_the_principal_of_its_name_with_its_roles() -> None:
    door = Door()
    new = await door.create("ci", (APPROVE, SUBMIT), tenant="acme")
    assert door.ring.authenticate(new.token) == Caller(
        "ci", frozenset({SUBMIT, APPROVE}), "acme", new.key.key_id
    )


def test_the_engines_own_token_makes_its_holder_the_owner() -> None:
    assert Door().ring.authenticate(OWNERS) is OWNER


@run_async
async def test_an_owners_token_that_looks_like_a_keys_is_still_the_owners() -> None:
    door = Door()
    new = await door.create()
    ring = KeyRing(door.store, door.clock, f"pst_{new.key.key_id}_mine")
    assert ring.authenticate(f"pst_{new.key.key_id}_mine") is OWNER


def test_a_ring_without_an_owners_token_is_refused_and_lets_nobody_in_for_free() -> None:
    with pytest.raises(Misconfigured, match="token is empty"):
        KeyRing(MemoryStore(), VirtualClock(), "")


@run_async
async def test_a_token_names_its_key_and_keeps_256_bits_to_itself() -> None:
    new = await Door().create()
    prefix, key_id, secret = new.token.split("_", 2)
    assert (prefix, key_id) == ("pst", new.key.key_id)
    assert len(secret) == 43


@run_async
async def test_every_refusal_reads_the_same() -> None:
    door = Door()
    good, revoked = await door.create("good"), await door.create("revoked")
    expired = await door.create("expired", expires_in=60)
    await door.ring.revoke("revoked", by="owner")
    door.clock.advance(60)
    tokens = [
        *("", "_", "pst", "pst_", "pst__", "nonsense", "pst_0123456789ab_secret", OWNERS + "x"),
        *(f"pst_{good.key.key_id}", f"pst_{good.key.key_id}_", f" {good.token}", "\ud800", "\0"),
        *(wrong_secret(good), good.token.upper(), good.token.replace("pst", "PST", 1)),
        *(revoked.token, expired.token),
    ]
    assert len({door.refusal(token) for token in tokens}) == 1
    assert door.ring.authenticate(good.token).principal == "good"


@run_async
async def test_one_keys_secret_does_not_open_anothers_door() -> None:
    door = Door()
    one, other = await door.create("one"), await door.create("other")
    secret = one.token.split("_", 2)[2]
    door.refusal(f"pst_{other.key.key_id}_{secret}")


@run_async
async def test_every_token_costs_the_same_comparisons_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = Door()
    good, revoked = await door.create("good"), await door.create("revoked")
    await door.ring.revoke("revoked", by="owner")
    compared: list[tuple[int, int]] = []

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return hmac_compare(a, b)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", watched)  # type: ignore[attr-defined]
    tokens = (OWNERS, good.token, revoked.token, wrong_secret(good), "pst_0_no", "no", "")
    work: set[tuple[tuple[int, int], ...]] = set()
    for token in tokens:
        compared.clear()
        with suppress(NotAuthenticated):
            door.ring.authenticate(token)
        work.add(tuple(compared))
    assert work == {((32, 32), (32, 32))}


# -- the end of a key ---------------------------------------------------------------


@run_async
async def test_a_revoked_key_is_refused_at_once_and_after_a_restart() -> None:
    door = Door()
    new = await door.create()
    door.ring.authenticate(new.token)
    door.clock.advance(5)
    view = await door.ring.revoke(new.key.key_id, by="owner")
    assert view.revoked_at == door.clock.now()
    door.refusal(new.token)
    with pytest.raises(NotAuthenticated):
        (await door.restarted()).authenticate(new.token)


@run_async
async def test_a_key_works_up_to_its_expiry_and_not_a_moment_longer() -> None:
    door = Door()
    new = await door.create(expires_in=3600)
    door.clock.advance(3599)
    door.ring.authenticate(new.token)
    door.clock.advance(1)
    door.refusal(new.token)


@run_async
async def test_who_is_in_by_a_good_key_or_as_the_owner_stays_in() -> None:
    door = Door()
    one, other = await door.create("one"), await door.create("other")
    caller = door.ring.authenticate(one.token)
    await door.ring.revoke(other.key.key_id, by="owner")
    assert door.ring.authenticate(one.token) == caller
    door.refusal(other.token)


@run_async
async def test_a_revocation_that_cant_be_stored_says_so_and_holds_all_the_same() -> None:
    door = Door()
    new = await door.create()
    door.store.full = True
    with pytest.raises(StoreFailed):
        await door.ring.revoke("ci", by="owner")
    door.refusal(new.token)
    door.store.full = False
    await door.ring.revoke(new.key.key_id, by="owner")
    with pytest.raises(NotAuthenticated):
        (await door.restarted()).authenticate(new.token)


@run_async
async def test_revoking_twice_keeps_the_first_time() -> None:
    door = Door()
    new = await door.create()
    first = await door.ring.revoke("ci", by="owner")
    door.clock.advance(5)
    assert await door.ring.revoke(new.key.key_id, by="owner") == first


@run_async
async def test_a_name_that_several_valid_keys_have_is_no_way_to_revoke_one() -> None:
    door = Door()
    old, new = await door.create(), await door.create()
    with pytest.raises(Conflict) as refused:
        await door.ring.revoke("ci", by="owner")
    assert old.key.key_id in str(refused.value)
    assert new.key.key_id in str(refused.value)
    await door.ring.revoke(old.key.key_id, by="owner")
    assert (await door.ring.revoke("ci", by="owner")).key_id == new.key.key_id


@run_async
async def test_an_id_goes_before_a_name() -> None:
    door = Door()
    one = await door.create("one")
    other = await door.create(one.key.key_id)
    assert (await door.ring.revoke(one.key.key_id, by="owner")).name == "one"
    assert door.ring.authenticate(other.token).principal == one.key.key_id


@run_async
async def test_revoking_what_does_not_exist_is_not_found() -> None:
    door = Door()
    await door.create()
    await door.ring.revoke("ci", by="owner")
    for name in ("ci", "nobody", ""):
        with pytest.raises(NotFound, match="keys list"):
            await door.ring.revoke(name, by="owner")


# -- making keys --------------------------------------------------------------------


@run_async
async def test_keys_survive_a_restart_and_are_listed_oldest_first() -> None:
    door = Door()
    made = []
    for name in ("b", "c", "a"):
        made.append(await door.create(name, (OPERATE,), tenant="acme", expires_in=60))
        door.clock.advance(1)
    revoked = await door.ring.revoke("c", by="owner")
    ring = await door.restarted()
    assert await ring.list() == [made[0].key, revoked, made[2].key]
    assert ring.authenticate(made[2].token) == door.ring.authenticate(made[2].token)


@run_async
async def test_a_key_that_cant_be_stored_is_not_made() -> None:
    door = Door()
    door.store.full = True
    with pytest.raises(StoreFailed):
        await door.create()
    assert await door.ring.list() == []


@run_async
async def test_roles_are_kept_once_each_and_may_be_given_as_words() -> None:
    new = await Door().create(roles=["approve", "submit", "approve"])
    assert new.key.roles == (SUBMIT, APPROVE)


@every(
    "field, change",
    [
        ("name", {"name": "has a space"}),
        ("name", {"name": ""}),
        ("name", {"name": "line\nbreak"}),
        ("name", {"name": "owner"}),
        ("name", {"name": "Owner"}),
        ("name", {"name": "pst_0123456789ab_secret"}),
        ("roles", {"roles": ()}),
        ("roles", {"roles": ("root",)}),
        ("tenant", {"tenant": "a/b"}),
        ("tenant", {"tenant": "acme", "roles": (SUBMIT, ADMIN)}),
        ("expires_in", {"expires_in": 0}),
        ("expires_in", {"expires_in": -5}),
        ("expires_in", {"expires_in": float("nan")}),
        ("expires_in", {"expires_in": 1e12}),
    ],
)
@run_async
async def test_a_key_that_should_not_be_is_refused_by_the_name_of_its_field(
    field: str, change: dict[str, Any]
) -> None:
    door = Door()
    with pytest.raises(InvalidRequest) as refused:
        await door.create(**change)
    assert refused.value.field == field
    assert refused.value.hint or field == "expires_in"
    assert await door.ring.list() == []
    assert await door.store.recall_all("key/") == {}


@run_async
async def test_a_damaged_key_is_named_and_lets_nobody_in() -> None:
    door = Door()
    for damage in (b"{}", b"\xff", b'{"key":{},"sha256":"00"}'):
        await door.store.remember("key/0123456789ab", damage)
        with pytest.raises(StoreCorrupt, match="key/0123456789ab"):
            await door.restarted()


# -- what is never told -------------------------------------------------------------


def told(door: Door, caplog: pytest.LogCaptureFixture, *values: object) -> str:
    return " ".join([caplog.text, *map(repr, values), *map(repr, vars(door.ring).values())])


@run_async
async def test_no_secret_is_in_the_store_a_repr_or_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    door = Door()
    new = await door.create()
    listed = await door.ring.list()
    caller = door.ring.authenticate(new.token)
    await door.ring.revoke("ci", by="owner")
    secret = new.token.split("_", 2)[2]
    facts = b"".join((await door.store.recall_all("key/")).values()).decode()
    everything = told(door, caplog, door.ring, new, listed, caller) + facts
    assert new.key.key_id in everything
    assert secret not in everything
    assert OWNERS not in everything


@run_async
async def test_no_error_repeats_a_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    door = Door()
    new = await door.create()
    await door.ring.revoke("ci", by="owner")
    secret = new.token.split("_", 2)[2]
    errors = []
    for attempt in (
        lambda: door.ring.revoke(new.token, by="owner"),
        lambda: door.create(new.token),
    ):
        with pytest.raises(InvalidRequest, match="as tokens do") as refused:
            await attempt()
        errors.append(refused.value)
    assert secret not in told(door, caplog, *(_details(e) for e in errors))
    assert secret not in door.refusal(new.token)


def _details(error: InvalidRequest) -> Iterable[object]:
    return [error, str(error), error.facts, error.hint]
