"""Keys: who is let in, as whom, and what is never told."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from tests.support.ledgers import MemoryLedger
from tests.support.rows import every

from penstock.control import guard
from penstock.control.guard import Guard, KeyRegistry, KeyService
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    NotAuthenticated,
    NotFound,
    StoreCorrupt,
    StoreFailed,
)
from penstock.ports.engine_api import OWNER, Caller, KeyRole, NewKey
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock

OWNERS = "the-owners_own-token"
SUBMIT, OPERATE, APPROVE, ADMIN = KeyRole


class Facts(MemoryLedger):
    """A store whose disk can be full."""

    full = False

    async def remember(self, name: str, value: bytes) -> None:
        if self.full:
            raise StoreFailed("the disk is full")
        await super().remember(name, value)


class KeyBench:
    """A KeyService with everything that it needs."""

    def __init__(self) -> None:
        self.store, self.clock = Facts(), VirtualClock()
        self.registry = KeyRegistry(self.store, self.clock, OWNERS)
        self.keys = KeyService(self.registry, Guard(OWNER, self.store, self.clock))

    async def create(self, name: str = "ci", roles: Any = (SUBMIT,), **options: Any) -> NewKey:
        return await self.keys.create(name, roles, **options)

    async def restarted(self) -> KeyRegistry:
        registry = KeyRegistry(self.store, self.clock, OWNERS)
        await registry.load()
        return registry

    def refusal(self, token: str) -> str:
        with pytest.raises(NotAuthenticated) as refused:
            self.registry.authenticate(token)
        return f"{refused.value.code} {refused.value} {refused.value.facts}"


def wrong_secret(new: NewKey) -> str:
    last = "A" if new.token[-1] != "A" else "B"
    return new.token[:-1] + last


# -- coming in ----------------------------------------------------------------------


@run_async
async def test_a_key_makes_its_holder_the_principal_of_its_name_with_its_roles() -> None:
    bench = KeyBench()
    new = await bench.create("ci", (APPROVE, SUBMIT), tenant="acme")
    assert bench.registry.authenticate(new.token) == Caller(
        "ci", frozenset({SUBMIT, APPROVE}), "acme", new.key.key_id
    )


def test_the_engines_own_token_makes_its_holder_the_owner() -> None:
    assert KeyBench().registry.authenticate(OWNERS) is OWNER


@run_async
async def test_an_owners_token_that_looks_like_a_keys_is_still_the_owners() -> None:
    bench = KeyBench()
    new = await bench.create()
    registry = KeyRegistry(bench.store, bench.clock, f"pst_{new.key.key_id}_mine")
    assert registry.authenticate(f"pst_{new.key.key_id}_mine") is OWNER


def test_a_registry_without_an_owners_token_is_refused_and_lets_nobody_in_for_free() -> None:
    with pytest.raises(Misconfigured, match="token is empty"):
        KeyRegistry(MemoryLedger(), VirtualClock(), "")


@run_async
async def test_a_token_names_its_key_and_keeps_256_bits_to_itself() -> None:
    new = await KeyBench().create()
    prefix, key_id, secret = new.token.split("_", 2)
    assert (prefix, key_id) == ("pst", new.key.key_id)
    assert len(secret) == 43


@run_async
async def test_every_refusal_reads_the_same() -> None:
    bench = KeyBench()
    good, revoked = await bench.create("good"), await bench.create("revoked")
    expired = await bench.create("expired", expires_in=60)
    await bench.keys.revoke("revoked")
    bench.clock.advance(60)
    tokens = [
        *("", "_", "pst", "pst_", "pst__", "nonsense", "pst_0123456789ab_secret", OWNERS + "x"),
        *(f"pst_{good.key.key_id}", f"pst_{good.key.key_id}_", f" {good.token}", "\ud800", "\0"),
        *(wrong_secret(good), good.token.upper(), good.token.replace("pst", "PST", 1)),
        *(revoked.token, expired.token),
    ]
    assert len({bench.refusal(token) for token in tokens}) == 1
    assert bench.registry.authenticate(good.token).principal == "good"


@run_async
async def test_one_keys_secret_does_not_authenticate_another_key() -> None:
    bench = KeyBench()
    one, other = await bench.create("one"), await bench.create("other")
    secret = one.token.split("_", 2)[2]
    bench.refusal(f"pst_{other.key.key_id}_{secret}")


@run_async
async def test_every_token_costs_the_same_comparisons_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = KeyBench()
    good, revoked = await bench.create("good"), await bench.create("revoked")
    await bench.keys.revoke("revoked")
    compared: list[tuple[int, int]] = []

    def watched(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return hmac_compare(a, b)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", watched)  # type: ignore[attr-defined]
    tokens = (OWNERS, good.token, revoked.token, wrong_secret(good), "pst_0_no", "no", "")
    work: set[tuple[tuple[int, int], ...]] = set()
    for token in tokens:
        compared.clear()
        with suppress(NotAuthenticated):
            bench.registry.authenticate(token)
        work.add(tuple(compared))
    assert work == {((64, 64), (64, 64))}


# -- the end of a key ---------------------------------------------------------------


@run_async
async def test_a_revoked_key_is_refused_at_once_and_after_a_restart() -> None:
    bench = KeyBench()
    new = await bench.create()
    bench.registry.authenticate(new.token)
    bench.clock.advance(5)
    view = await bench.keys.revoke(new.key.key_id)
    assert view.revoked_at == bench.clock.now()
    bench.refusal(new.token)
    with pytest.raises(NotAuthenticated):
        (await bench.restarted()).authenticate(new.token)


@run_async
async def test_a_key_works_up_to_its_expiry_and_not_a_moment_longer() -> None:
    bench = KeyBench()
    new = await bench.create(expires_in=3600)
    bench.clock.advance(3599)
    bench.registry.authenticate(new.token)
    bench.clock.advance(1)
    bench.refusal(new.token)


@run_async
async def test_who_is_in_by_a_good_key_or_as_the_owner_stays_in() -> None:
    bench = KeyBench()
    one, other = await bench.create("one"), await bench.create("other")
    caller = bench.registry.authenticate(one.token)
    await bench.keys.revoke(other.key.key_id)
    assert bench.registry.authenticate(one.token) == caller
    bench.refusal(other.token)


@run_async
async def test_a_revocation_that_cant_be_stored_says_so_and_holds_all_the_same() -> None:
    bench = KeyBench()
    new = await bench.create()
    bench.store.full = True
    with pytest.raises(StoreFailed):
        await bench.keys.revoke("ci")
    bench.refusal(new.token)
    bench.store.full = False
    await bench.keys.revoke(new.key.key_id)
    with pytest.raises(NotAuthenticated):
        (await bench.restarted()).authenticate(new.token)


@run_async
async def test_revoking_twice_keeps_the_first_time() -> None:
    bench = KeyBench()
    new = await bench.create()
    first = await bench.keys.revoke("ci")
    bench.clock.advance(5)
    assert await bench.keys.revoke(new.key.key_id) == first


@run_async
async def test_a_name_that_several_valid_keys_have_is_no_way_to_revoke_one() -> None:
    bench = KeyBench()
    old, new = await bench.create(), await bench.create()
    with pytest.raises(Conflict) as refused:
        await bench.keys.revoke("ci")
    assert old.key.key_id in str(refused.value)
    assert new.key.key_id in str(refused.value)
    await bench.keys.revoke(old.key.key_id)
    assert (await bench.keys.revoke("ci")).key_id == new.key.key_id


@run_async
async def test_an_id_goes_before_a_name() -> None:
    bench = KeyBench()
    one = await bench.create("one")
    other = await bench.create(one.key.key_id)
    assert (await bench.keys.revoke(one.key.key_id)).name == "one"
    assert bench.registry.authenticate(other.token).principal == one.key.key_id


@run_async
async def test_revoking_what_does_not_exist_is_not_found() -> None:
    bench = KeyBench()
    await bench.create()
    await bench.keys.revoke("ci")
    for name in ("ci", "nobody", ""):
        with pytest.raises(NotFound, match="key list"):
            await bench.keys.revoke(name)


# -- making keys --------------------------------------------------------------------


@run_async
async def test_keys_survive_a_restart_and_are_listed_oldest_first() -> None:
    bench = KeyBench()
    made = []
    for name in ("b", "c", "a"):
        made.append(await bench.create(name, (OPERATE,), tenant="acme", expires_in=60))
        bench.clock.advance(1)
    revoked = await bench.keys.revoke("c")
    registry = await bench.restarted()
    restarted = KeyService(registry, Guard(OWNER, bench.store, bench.clock))
    assert await restarted.list() == [made[0].key, revoked, made[2].key]
    assert registry.authenticate(made[2].token) == bench.registry.authenticate(made[2].token)


@run_async
async def test_a_key_that_cant_be_stored_is_not_made() -> None:
    bench = KeyBench()
    bench.store.full = True
    with pytest.raises(StoreFailed):
        await bench.create()
    assert await bench.keys.list() == []


@run_async
async def test_roles_are_kept_once_each_and_may_be_given_as_words() -> None:
    new = await KeyBench().create(roles=["approve", "submit", "approve"])
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
    bench = KeyBench()
    with pytest.raises(InvalidRequest) as refused:
        await bench.create(**change)
    assert refused.value.field == field
    assert refused.value.hint or field == "expires_in"
    assert await bench.keys.list() == []
    assert await bench.store.recall_all("key/") == {}


@run_async
async def test_a_damaged_key_is_named_and_lets_nobody_in() -> None:
    bench = KeyBench()
    for damage in (b"{}", b"\xff", b'{"key":{},"sha256":"00"}'):
        await bench.store.remember("key/0123456789ab", damage)
        with pytest.raises(StoreCorrupt, match="key/0123456789ab"):
            await bench.restarted()


# -- what is never told -------------------------------------------------------------


def told(bench: KeyBench, caplog: pytest.LogCaptureFixture, *values: object) -> str:
    return " ".join([caplog.text, *map(repr, values), *map(repr, vars(bench.keys).values())])


@run_async
async def test_no_secret_is_in_the_store_a_repr_or_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    bench = KeyBench()
    new = await bench.create()
    listed = await bench.keys.list()
    caller = bench.registry.authenticate(new.token)
    await bench.keys.revoke("ci")
    secret = new.token.split("_", 2)[2]
    facts = b"".join((await bench.store.recall_all("key/")).values()).decode()
    everything = told(bench, caplog, bench.keys, new, listed, caller) + facts
    assert new.key.key_id in everything
    assert secret not in everything
    assert OWNERS not in everything


@run_async
async def test_no_error_repeats_a_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bench = KeyBench()
    new = await bench.create()
    await bench.keys.revoke("ci")
    secret = new.token.split("_", 2)[2]
    errors = []
    for attempt in (
        lambda: bench.keys.revoke(new.token),
        lambda: bench.create(new.token),
    ):
        with pytest.raises(InvalidRequest, match="as tokens do") as refused:
            await attempt()
        errors.append(refused.value)
    assert secret not in told(bench, caplog, *(_details(e) for e in errors))
    assert secret not in bench.refusal(new.token)


def _details(error: InvalidRequest) -> Iterable[object]:
    return [error, str(error), error.facts, error.hint]
