"""What is left in caches is found again by its tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.pipes.generation import LEAST, MOST, CachedPrefix, Prefixes, shared
from penstock.workloads.pipes.job import Hop

HOPS = (Hop("a", 0, 4), Hop("b", 4, 8))
TOKENS = tuple(range(100, 100 + 3 * LEAST))


def any_of(kept: CachedPrefix) -> bool:
    return True


def kept(key: bytes, ids: tuple[int, ...], until: float = 10.0) -> CachedPrefix:
    return CachedPrefix({"a": key, "b": key}, "t", ids, HOPS, until)


def test_the_longest_common_beginning_is_taken() -> None:
    prefixes = Prefixes()
    prefixes.add(kept(b"short", TOKENS[:LEAST]))
    prefixes.add(kept(b"long", TOKENS[: 2 * LEAST]))
    prefixes.add(kept(b"other", (7, *TOKENS)))
    found = prefixes.take("t", TOKENS, 0.0, any_of)
    assert found is not None
    assert (found[0].keys["b"], found[1]) == (b"long", 2 * LEAST)


def test_each_is_taken_once() -> None:
    prefixes = Prefixes()
    prefixes.add(kept(b"one", TOKENS))
    assert prefixes.take("t", TOKENS, 0.0, any_of) is not None
    assert prefixes.take("t", TOKENS, 0.0, any_of) is None


def test_at_least_one_token_is_left_to_compute() -> None:
    prefixes = Prefixes()
    prefixes.add(kept(b"one", TOKENS))
    found = prefixes.take("t", TOKENS, 0.0, any_of)
    assert found is not None
    assert found[1] == len(TOKENS) - 1


def test_a_few_common_tokens_are_not_worth_it() -> None:
    prefixes = Prefixes()
    prefixes.add(kept(b"one", (*TOKENS[: LEAST - 1], 7, 8, 9)))
    assert prefixes.take("t", TOKENS, 0.0, any_of) is None


def test_what_is_too_old_or_not_usable_is_passed_over() -> None:
    prefixes = Prefixes()
    prefixes.add(kept(b"old", TOKENS, until=1.0))
    prefixes.add(kept(b"gone", TOKENS[:-1], until=9.0))
    assert prefixes.take("t", TOKENS, 5.0, lambda _: False) is None
    assert len(prefixes) == 1


def test_a_lost_node_takes_its_caches_along() -> None:
    prefixes = Prefixes()
    prefixes.add(kept(b"one", TOKENS))
    prefixes.forget("c")
    assert len(prefixes) == 1
    prefixes.forget("b")
    assert len(prefixes) == 0


def test_only_so_many_are_remembered() -> None:
    prefixes = Prefixes()
    for number in range(MOST + 1):
        prefixes.add(kept(bytes([number]), (number, *TOKENS)))
    assert len(prefixes) == MOST
    assert prefixes.take("t", (0, *TOKENS), 0.0, any_of) is None


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_shared_is_how_far_both_are_the_same(one: list[int], other: list[int]) -> None:
    n = shared(one, other)
    assert one[:n] == other[:n]
    assert n == min(len(one), len(other)) or one[n] != other[n]


def test_the_cache_of_another_tenant_is_not_taken() -> None:
    prefixes = Prefixes()
    prefixes.add(kept(b"one", TOKENS))
    assert prefixes.take("other", TOKENS, 0.0, any_of) is None
    assert prefixes.take("t", TOKENS, 0.0, any_of) is not None
