"""When two entries are the same article."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.pipeline.news.articles import Article
from penstock.workloads.pipeline.news.identity import (
    Known,
    Seen,
    normal_url,
    title_hash,
    url_hash,
)

PLAIN = "https://harbour.example/world/truce"


def article(url: str = PLAIN, title: str = "Skarrow and Tessaly sign a truce") -> Article:
    return Article(url=url, title=title, body="", source="x", hash=url_hash(url))


@pytest.mark.parametrize(
    "same",
    [
        "http://harbour.example/world/truce",
        "https://www.harbour.example/world/truce/",
        "https://HARBOUR.example:443/world/truce#comments",
        "https://harbour.example/world/truce?utm_source=rss&utm_medium=feed&fbclid=1",
        " https://harbour.example/world/truce?ref=front ",
    ],
)
def test_an_address_is_the_same_with_tracking_and_trimmings(same: str) -> None:
    assert url_hash(same) == url_hash(PLAIN)


@pytest.mark.parametrize(
    "other",
    [
        "https://harbour.example/world/truce?page=2",
        "https://harbour.example/World/truce",
        "https://harbour.example:8443/world/truce",
        "https://valley.example/world/truce",
        "",
    ],
)
def test_another_page_is_another_address(other: str) -> None:
    assert url_hash(other) != url_hash(PLAIN)


def test_the_order_of_what_is_asked_for_does_not_matter() -> None:
    assert normal_url("https://a.example/?b=1&a=2") == normal_url("https://a.example/?a=2&b=1")


@given(st.text())
def test_no_address_is_too_odd_to_be_hashed(url: str) -> None:
    assert len(url_hash(url)) == 20


@pytest.mark.parametrize("odd", ["http://[::1", "http://a.example:99999/", "http://\ud800/"])
def test_a_broken_address_is_only_itself(odd: str) -> None:
    assert len(url_hash(odd)) == 20


def test_a_headline_is_the_same_whatever_its_marks_and_letters() -> None:
    assert title_hash("“Truce” signed, at last, in Kesh!") == title_hash(
        "truce SIGNED at last in Kesh"
    )


def test_a_short_headline_says_nothing() -> None:
    assert title_hash("News in brief") == ""
    known = Known()
    assert known.add(article("https://a.example/1", "News in brief"))
    assert known.add(article("https://a.example/2", "News in brief"))


def test_the_same_headline_elsewhere_is_the_same_article() -> None:
    known = Known()
    assert known.add(article())
    assert not known.add(article("https://echo.example/repeats/truce"))
    assert not known.add(article(title="Quite another headline for it"))


def test_a_source_that_is_read_again_finds_its_own_articles_new() -> None:
    seen = Seen()
    assert seen.claim(article(), "harbour")
    assert seen.claim(article(), "harbour")
    assert not seen.claim(article(), "echo")
