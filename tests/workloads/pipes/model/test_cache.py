"""Room for keys and values."""

from __future__ import annotations

import pytest
import torch

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.model.cache import CacheFull, JobCache, KvPool, Layout

LAYOUT = Layout(2, 8, 2, 8)
TOKEN = 4 * LAYOUT.values
"""Bytes of a token in one layer."""


def pool_of(blocks: int) -> KvPool:
    """With room for so many blocks of 8 tokens in one layer."""
    return KvPool(dict.fromkeys(range(4), LAYOUT), 1000, blocks * 8 * TOKEN, torch.float32, block=8)


def test_room_is_counted_in_whole_blocks_for_each_layer() -> None:
    pool = pool_of(10)
    cache = pool.reserve([1, 2], 9)
    assert cache.capacity == 16
    assert pool.used == 2 * 2 * 8 * TOKEN
    keys, values = cache.views(0, 16)[2]
    assert keys.shape == values.shape == (2, 16, 8)


def test_a_job_that_finds_no_room_waits_until_another_has_ended() -> None:
    pool = pool_of(4)
    told: list[int] = []
    pool.on_free = lambda: told.append(pool.used)
    first = pool.reserve([0, 1], 16)
    with pytest.raises(CacheFull):
        pool.reserve([0], 1)
    first.free()
    assert told == [0]
    assert pool.reserve([0], 32).capacity == 32


def test_room_is_given_back_once() -> None:
    pool = pool_of(4)
    one, other = pool.reserve([0], 8), pool.reserve([0], 8)
    one.free()
    one.free()
    assert pool.used == other.bytes
    assert one.freed


def test_a_job_that_can_never_have_room_is_refused() -> None:
    pool = pool_of(4)
    with pytest.raises(LlmFailure) as caught:
        pool.reserve([0, 1, 2], 16)
    assert caught.value.code == LlmCode.NO_ROOM
    with pytest.raises(LlmFailure) as caught:
        pool.reserve([0], 1001)
    assert caught.value.code == LlmCode.CONTEXT_EXCEEDED
    assert caught.value.facts == {"tokens": 1001, "context": 1000}
    assert pool.used == 0


def test_what_is_kept_is_taken_again_with_what_it_had() -> None:
    pool = pool_of(8)
    cache = filled(pool, 8)
    pool.keep(cache, b"chat", until=10)
    assert (pool.used, pool.kept) == (0, cache.bytes)
    again = pool.take(b"chat", [0, 1], 30)
    assert again is cache
    assert (pool.kept, pool.used) == (0, cache.bytes)
    assert again.capacity == 32
    assert again.filled == {0: 8, 1: 8}
    assert torch.equal(again.views(0, 8)[1][0], torch.full((2, 8, 8), 3.0))
    assert pool.take(b"chat", [0, 1], 30) is None


def test_a_cache_that_goes_on_with_other_layers_keeps_what_it_has_of_them() -> None:
    pool = pool_of(8)
    kept = filled(pool, 8)
    first = kept.layers[0]
    before = [one.clone() for one in kept.views(0, 8)[first]]
    pool.keep(kept, b"chat", until=10)
    taken = pool.take(b"chat", [first, 3], 8)
    assert taken is not None
    assert taken.filled == {first: 8, 3: 0}
    assert all(map(torch.equal, before, taken.views(0, 8)[first]))
    taken.free()
    assert pool.used == pool.kept == 0


def test_hidden_states_make_way_for_a_job() -> None:
    pool = KvPool(
        dict.fromkeys(range(4), LAYOUT),
        1000,
        3 * 8 * TOKEN,
        torch.float32,
        block=8,
        hidden=TOKEN // 4,
    )
    first = pool.reserve([0], 8, boundaries=[1])
    first.remember(1, 0, torch.ones(8, TOKEN // 4))
    assert first.remembered(1, 0, 8) is not None
    pool.reserve([0], 16)
    assert first.remembered(1, 0, 8) is None
    first.remember(1, 0, torch.ones(8, TOKEN // 4))
    assert first.remembered(1, 0, 8) is None
    first.free()


def test_the_oldest_that_is_kept_makes_way_for_a_job() -> None:
    pool = pool_of(4)
    for name in (b"a", b"b", b"c", b"d"):
        pool.keep(pool.reserve([0], 8), name, until=10)
    pool.reserve([0], 16)
    assert (pool.used, pool.kept) == (16 * TOKEN, 16 * TOKEN)
    assert pool.take(b"a", [0], 8) is None
    assert pool.take(b"b", [0], 8) is None
    assert pool.take(b"c", [0], 8) is not None


def test_a_kept_cache_that_can_not_grow_now_stays_kept() -> None:
    pool = pool_of(4)
    pool.keep(pool.reserve([0], 8), b"chat", until=10)
    other = pool.reserve([0], 24)
    with pytest.raises(CacheFull):
        pool.take(b"chat", [0], 16)
    other.free()
    assert pool.take(b"chat", [0], 16) is not None


def test_what_was_kept_long_enough_is_forgotten() -> None:
    pool = pool_of(4)
    told: list[bool] = []
    old, young = pool.reserve([0], 8), pool.reserve([0], 8)
    pool.keep(old, b"old", until=10)
    pool.keep(young, b"young", until=20)
    pool.on_free = lambda: told.append(True)
    pool.forget(9)
    assert not told
    pool.forget(10)
    assert told
    assert old.freed
    assert pool.kept == young.bytes
    pool.drop(b"young")
    pool.drop(b"young")
    assert (pool.kept, len(told)) == (0, 2)


def test_a_key_is_kept_once_and_a_freed_cache_never() -> None:
    pool = pool_of(4)
    first, second = pool.reserve([0], 8), pool.reserve([0], 8)
    pool.keep(first, b"chat", until=10)
    pool.keep(second, b"chat", until=10)
    assert first.freed
    assert (pool.used, pool.kept) == (0, second.bytes)
    second.free()
    assert (pool.used, pool.kept) == (0, 0)
    pool.keep(second, b"chat", until=10)
    assert pool.kept == 0


def test_what_was_freed_can_not_be_used() -> None:
    pool = pool_of(4)
    cache = pool.reserve([0], 8)
    cache.free()
    with pytest.raises(LlmFailure, match="ended"):
        cache.views(0, 1)


def test_layers_keep_what_their_layout_says() -> None:
    layouts = {0: Layout(2, 8, 2, 8), 1: Layout(4, 6, 1, 3), 2: Layout(), 3: Layout(2, 8, 2, 8)}
    pool = KvPool(layouts, 1000, 1 << 20, torch.float32, block=8)
    cache = pool.reserve(range(4), 8)
    assert cache.bytes == 4 * 8 * (32 + 27 + 0 + 32)
    found = cache.views(2, 5)
    sizes = [tuple(found[n][0].shape) for n in range(4)]
    assert sizes == [(2, 3, 8), (4, 3, 6), (0, 3, 0), (2, 3, 8)]
    found[1][1].fill_(7.0)
    assert torch.equal(cache.views(4, 5)[1][1], torch.full((1, 1, 3), 7.0))
    assert not cache.views(0, 8)[3][0].any()


def filled(pool: KvPool, tokens: int) -> JobCache:
    cache = pool.reserve([0, 1], tokens)
    for keys, values in cache.views(0, cache.capacity).values():
        keys.fill_(3.0)
        values.fill_(3.0)
    cache.filled.update({0: tokens, 1: tokens})
    return cache
