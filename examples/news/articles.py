"""The article table: what was seen, what is done with it, and what still waits.

Every stage takes its work from here and writes it back here, so a second run does only what is new
or undone, and a crash loses nothing. What an earlier run left comes first; what failed comes last.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from .classify import section_named
from .feeds import Entry
from .settings import Feed

MAX_PAGE_TRIES = 3
"""Runs that try to download an article's page."""
KEPT = 90 * 86400.0
"""Seconds that an article is remembered after it was last seen in its feed."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS feed (
    name TEXT PRIMARY KEY,
    etag TEXT NOT NULL, modified TEXT NOT NULL,
    entries INTEGER NOT NULL,
    checked REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS article (
    id TEXT PRIMARY KEY,
    title_mark TEXT UNIQUE,
    url TEXT NOT NULL, title TEXT NOT NULL, teaser TEXT NOT NULL, body TEXT NOT NULL,
    feed TEXT NOT NULL,          -- who brought it first
    source TEXT NOT NULL, kind TEXT NOT NULL, section TEXT NOT NULL,
    published REAL,
    first_seen REAL NOT NULL,
    seen REAL NOT NULL,
    run TEXT,                    -- the run that took it up
    taken REAL,
    page_tries INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    label TEXT, method TEXT,
    neutral TEXT,                -- the rewritten article, as JSON
    briefed TEXT                 -- the first run whose brief has it
);
CREATE INDEX IF NOT EXISTS undone ON article (feed, run) WHERE neutral IS NULL;
CREATE TABLE IF NOT EXISTS note (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""
_FULL_TEXT_WINS = """
UPDATE article SET url = ?1, title = ?2, teaser = ?3, body = ?4, source = ?5, kind = ?6,
    section = ?7, published = ?8, label = NULL, neutral = NULL
WHERE (id = ?9 OR title_mark = ?10) AND body = '' AND ?4 != ''
"""
"""Of two feeds that have the same article, the one with more than a teaser is shown."""
_WAITING = "ORDER BY failures, taken, published DESC, id LIMIT ?"


class Article(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table; `body` is '' where only a teaser is known."""

    id: str
    url: str
    title: str
    teaser: str
    body: str
    source: str
    kind: str
    section: str
    published: float | None
    first_seen: float
    label: str | None = None
    method: str | None = None
    neutral: str | None = None

    @property
    def text(self) -> str:
        return self.body or self.teaser


_COLUMNS = ", ".join(Article.__struct_fields__)


class Articles:
    """One SQLite file. Safe to use from threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, timeout=30)
        self._db.row_factory = sqlite3.Row
        with self._lock, self._db:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- ingest ---------------------------------------------------------------------------

    def validators(self, feed: str) -> tuple[str, str]:
        """ETag and Last-Modified of the version that was stored last."""
        rows = self._all("SELECT etag, modified FROM feed WHERE name = ?", feed)
        return (rows[0]["etag"], rows[0]["modified"]) if rows else ("", "")

    def store(
        self, feed: Feed, entries: Sequence[Entry], etag: str, modified: str, now: float
    ) -> None:
        """Add what is new of a feed, together with the version of the feed that it is from."""
        rows = [
            (*_identity(one), one.url, one.title, one.teaser, one.body, feed.name, feed.name,
             feed.kind, section_named(one.url, one.labels), one.published, now, now)
            for one in entries
        ]  # fmt: skip
        with self._lock, self._db:
            self._db.executemany(
                "INSERT INTO article (id, title_mark, url, title, teaser, body, feed, source,"
                " kind, section, published, first_seen, seen)"
                " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"
                " ON CONFLICT DO UPDATE SET seen = excluded.seen",
                rows,
            )
            self._db.executemany(
                _FULL_TEXT_WINS, [(*row[2:6], *row[7:11], *row[:2]) for row in rows]
            )
            self._db.execute(
                "INSERT OR REPLACE INTO feed VALUES (?, ?, ?, ?, ?)",
                (feed.name, etag, modified, len(entries), now),
            )

    def unchanged(self, feed: str, now: float) -> None:
        """The feed is as it was: what was in it was seen again."""
        with self._lock, self._db:
            self._db.execute(
                "UPDATE article SET seen = ? WHERE article.feed = ?"
                " AND seen = (SELECT checked FROM feed WHERE name = article.feed)",
                (now, feed),
            )
            self._db.execute("UPDATE feed SET checked = ? WHERE name = ?", (now, feed))

    def take(self, feed: str, run: str, limit: int, now: float) -> None:
        """Hand up to `limit` articles of a feed to a run; a repeated call adds none."""
        with self._lock, self._db:
            (had,) = self._db.execute(
                "SELECT count(*) FROM article WHERE feed = ? AND run = ?", (feed, run)
            ).fetchone()
            self._db.execute(
                "UPDATE article SET run = ?, taken = ? WHERE id IN (SELECT id FROM article"
                " WHERE feed = ? AND run IS NULL"
                " ORDER BY first_seen, published DESC, id LIMIT ?)",
                (run, now, feed, max(0, limit - had)),
            )

    def without_page(self, feed: str) -> list[Article]:
        """Articles whose page is still to be downloaded."""
        return self._articles(
            "WHERE feed = ? AND run IS NOT NULL AND body = '' AND url != '' AND page_tries < ?"
            " ORDER BY taken, published DESC LIMIT 100",
            feed,
            MAX_PAGE_TRIES,
        )

    def page_read(self, id: str, body: str) -> None:
        """With a body the article is classified and rewritten anew."""
        self._change(
            "UPDATE article SET body = ?, label = NULL, neutral = NULL WHERE id = ?", body, id
        )

    def page_failed(self, id: str, *, final: bool) -> None:
        tries = MAX_PAGE_TRIES if final else 1
        self._change("UPDATE article SET page_tries = page_tries + ? WHERE id = ?", tries, id)

    def ingested(self, feed: str, run: str) -> dict[str, int]:
        """The figures of one feed in one run."""
        (row,) = self._all(
            "SELECT coalesce((SELECT entries FROM feed WHERE name = :feed), 0) AS entries,"
            " total(run = :run) AS success, total(run = :run AND body != '') AS body_downloaded,"
            " total(run IS NULL) AS waiting FROM article WHERE feed = :feed",
            {"feed": feed, "run": run},
        )
        success, waiting = int(row["success"]), int(row["waiting"])
        duplicates = max(0, row["entries"] - success - waiting)
        bodies = int(row["body_downloaded"])
        return {
            "total": success + duplicates,
            "success": success,
            "body_downloaded": bodies,
            "body_failed": success - bodies,
            "skipped_duplicate": duplicates,
            "waiting": waiting,
        }

    # -- the stages after it --------------------------------------------------------------

    def unclassified(self, limit: int) -> list[str]:
        where = "WHERE run IS NOT NULL AND label IS NULL"
        return [one.id for one in self._articles(f"{where} {_WAITING}", limit)]

    def unneutralized(self, limit: int) -> list[str]:
        where = "WHERE label IS NOT NULL AND neutral IS NULL"
        return [one.id for one in self._articles(f"{where} {_WAITING}", limit)]

    def get(self, id: str) -> Article:
        return self._articles("WHERE id = ?", id)[0]

    def classified(self, id: str, label: str, method: str) -> None:
        self._change("UPDATE article SET label = ?, method = ? WHERE id = ?", label, method, id)

    def neutralized(self, id: str, neutral: str) -> None:
        self._change("UPDATE article SET neutral = ? WHERE id = ?", neutral, id)

    def failed(self, id: str) -> None:
        self._change("UPDATE article SET failures = failures + 1 WHERE id = ?", id)

    def finished(self) -> list[Article]:
        """Everything that is ready for a brief, newest first."""
        return self._articles("WHERE neutral IS NOT NULL ORDER BY published DESC, id")

    def fresh(self, now: float, hours: float, run: str) -> list[Article]:
        """Finished articles of the last hours, and those that were fresh when they were taken up
        but have waited for their brief until now."""
        return self._articles(
            "WHERE neutral IS NOT NULL AND (coalesce(published, first_seen) > :now - :old"
            " OR (coalesce(briefed, :run) = :run"
            " AND coalesce(published, first_seen) > first_seen - :old))",
            {"now": now, "old": hours * 3600, "run": run},
        )

    def briefed(self, ids: Iterable[str], run: str, now: float) -> None:
        """Mark the articles of a brief, and forget those that are long gone."""
        with self._lock, self._db:
            self._db.executemany(
                "UPDATE article SET briefed = coalesce(briefed, ?) WHERE id = ?",
                [(run, id) for id in ids],
            )
            self._db.execute("DELETE FROM article WHERE seen < ?", (now - KEPT,))

    def counts(self) -> dict[str, int]:
        (row,) = self._all(
            "SELECT count(*) AS articles, total(neutral IS NOT NULL) AS finished,"
            " total(run IS NULL) AS waiting,"
            " total(run IS NOT NULL AND neutral IS NULL) AS undone FROM article"
        )
        return {name: int(row[name]) for name in row.keys()}  # noqa: SIM118 (a Row)

    # -- what one run leaves for the next -------------------------------------------------

    def recall(self, name: str) -> bytes | None:
        rows = self._all("SELECT value FROM note WHERE name = ?", name)
        return rows[0]["value"] if rows else None

    def remember(self, values: Mapping[str, bytes]) -> None:
        """All of them, or none."""
        with self._lock, self._db:
            self._db.executemany("INSERT OR REPLACE INTO note VALUES (?, ?)", [*values.items()])

    # -- SQL ------------------------------------------------------------------------------

    def _all(self, sql: str, *given: Any) -> list[sqlite3.Row]:
        parameters = given[0] if given and isinstance(given[0], dict) else given
        with self._lock:
            return self._db.execute(sql, parameters).fetchall()

    def _articles(self, where: str, *given: Any) -> list[Article]:
        rows = self._all(f"SELECT {_COLUMNS} FROM article {where}", *given)
        return [Article(**dict(row)) for row in rows]

    def _change(self, sql: str, *given: Any) -> None:
        with self._lock, self._db:
            self._db.execute(sql, given)


# -- identity: the same address, or the same headline --------------------------------------

_TRACKING = re.compile(
    r"(utm_|at_|mc_|pk_|hsa_|oly_|ns_)\w*"
    r"|fbclid|gclid|dclid|msclkid|yclid|igshid|cmpid|cmp|ref|ref_src|referrer|src|source|rss|ncid|ito"
)
_OWN_TITLE = 20
"""Characters of a headline that is likely to be one article's own."""


def _identity(entry: Entry) -> tuple[str, str | None]:
    words = " ".join(re.findall(r"\w+", entry.title.casefold()))
    return _hash(normal_url(entry.id)), _hash(words) if len(words) >= _OWN_TITLE else None


def normal_url(url: str) -> str:
    """A URL without what does not name the article: scheme, www, tracking, fragment."""
    try:
        parts = urlsplit(url.strip())
        host, port = (parts.hostname or "").removeprefix("www."), parts.port
    except ValueError:
        return url.strip()
    if parts.scheme not in ("http", "https"):
        return url.strip()
    query = [
        pair
        for pair in parse_qsl(parts.query, keep_blank_values=True)
        if not _TRACKING.fullmatch(pair[0].lower())
    ]
    shown = f":{port}" if port not in (None, 80, 443) else ""
    return f"{host}{shown}{parts.path.rstrip('/')}?{urlencode(sorted(query))}".rstrip("?")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]
