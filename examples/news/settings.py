"""Settings of the program: what its operator decides, and no job's input can change."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

SAMPLE = Path(__file__).parent / "sample" / "feeds.toml"
"""Feeds written for this example: one is malformed, one repeats another, one is dead."""
SAMPLE_TIME = 1_780_592_400.0
"""4 June 2026, 17:00 UTC: when the sample is news."""


class Feed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    url: str
    """An http(s) URL, or a file; a relative path counts from the folder of feeds.toml."""
    kind: Literal["quality", "tabloid", "other"] = "other"
    pages: str = ""
    """A folder of saved article pages: that of .../ferry-delays is ferry-delays.html."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    home: Path
    """Holds articles.db, brief.md, brief.html, and the engine's own data."""
    feeds: tuple[Feed, ...]
    allow_private: bool = False
    """Whether article links and redirects may lead to private addresses."""
    model: str = ""
    """The language model that classifies and rewrites; none: offline rules."""
    teachers: tuple[str, ...] = ()
    """Models that may judge labels in an evaluation."""
    as_of: float | None = None
    """The time that the brief is made for; None: now."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    feeds: tuple[Feed, ...]
    allow_private: bool = False
    model: str = ""
    teachers: tuple[str, ...] = ()


def load(home: Path, feeds: Path | None = None, **given: object) -> Settings:
    """Settings from feeds.toml (by default the one in `home`). Raises ValueError."""
    path = feeds or home / "feeds.toml"
    try:
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} can't be used: {error}") from error
    names = [feed.name for feed in file.feeds]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{path}: give at least one feed, each with a name of its own")
    known = {
        "feeds": tuple(_resolved(feed, path.parent) for feed in file.feeds),
        "allow_private": file.allow_private,
        "model": file.model,
        "teachers": file.teachers,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return Settings(home=home, **{**known, **chosen})  # type: ignore[arg-type]


def from_environment() -> Settings:
    """For `penstock up --app examples.news.app:app`: NEWS_HOME names the home folder."""
    home = os.environ.get("NEWS_HOME")
    if not home:
        raise ValueError("NEWS_HOME is not set: name the folder that holds feeds.toml")
    return load(Path(home))


def _resolved(feed: Feed, folder: Path) -> Feed:
    is_web = feed.url.startswith(("http://", "https://"))
    return msgspec.structs.replace(
        feed,
        url=feed.url if is_web else str((folder / feed.url).resolve()),
        pages=str((folder / feed.pages).resolve()) if feed.pages else "",
    )
