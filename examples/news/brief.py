"""The brief: finished stories by section, as Markdown and as a page that needs nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

import msgspec

from .articles import Article
from .neutralize import Neutral

PER_SOURCE = 3
"""Stories of one source in one section."""
_PRIORITY = {"quality": 0, "other": 1, "tabloid": 2}
_SUMMARY = 280
_SENTENCE_END = re.compile(r"[.!?][\"”’»]?(?=\s|$)")  # noqa: RUF001 (closing marks)


class Story(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    title: str
    summary: str
    url: str
    facts: str


class Edition(msgspec.Struct, frozen=True, kw_only=True):
    """What a brief says, before it is put in a form."""

    until: float
    hours: int
    sections: dict[str, tuple[Story, ...]]
    missing: dict[str, str] = {}
    """Feeds that could not be read, and why."""
    notes: tuple[str, ...] = ()

    @property
    def stories(self) -> list[Story]:
        return [story for stories in self.sections.values() for story in stories]


def assemble(
    articles: Sequence[Article],
    sections: Sequence[str],
    until: float,
    hours: int,
    missing: Mapping[str, str],
    undone: int = 0,
) -> Edition:
    """Sections in their order; in each the newest first, then the better source, then the id."""
    ordered = sorted(
        articles, key=lambda one: (-(one.published or 0.0), _PRIORITY.get(one.kind, 1), one.id)
    )
    taken: Counter[tuple[str, str]] = Counter()
    found: dict[str, list[Story]] = {section: [] for section in sections}
    for one in ordered:
        section = one.label if one.label in found else sections[-1]
        taken[section, one.source] += 1
        if taken[section, one.source] <= PER_SOURCE:
            found[section].append(_story(one))
    full = {section: tuple(stories) for section, stories in found.items() if stories}
    left_out = len(ordered) - sum(map(len, full.values()))
    notes = []
    if left_out:
        notes.append(f"{_count(left_out, 'story', 'stories')} left out: more than {PER_SOURCE} of"
                     " one source in a section.")  # fmt: skip
    if undone:
        notes.append(f"{_count(undone, 'article', 'articles')} wait for the next run.")
    notes.append("Not read this time:" if missing else "Every feed was read.")
    return Edition(
        until=until, hours=hours, sections=full, missing=dict(missing), notes=tuple(notes)
    )


def write(edition: Edition, home: Path) -> None:
    """brief.md and brief.html; each is there in full or not at all."""
    for name, text in (("brief.md", as_markdown(edition)), ("brief.html", as_html(edition))):
        unfinished = home / f".{name}.new"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(home / name)


def _story(article: Article) -> Story:
    neutral = msgspec.json.decode(article.neutral or "", type=Neutral)
    facts = [article.source, "undated" if article.published is None else _time(article.published)]
    if neutral.teaser:
        facts.append("teaser only")
    if neutral.refused:
        facts.append(f"original wording kept in part ({neutral.refused[0]})")
    elif neutral.phrases:
        facts.append(f"{_count(neutral.phrases, 'phrase', 'phrases')} toned down")
    if neutral.by_model:
        facts.append("rewritten by a model")
    return Story(
        id=article.id,
        title=" ".join(neutral.title.split()),
        summary=summary_of(neutral.text),
        url=article.url if re.match(r"https?://\S+$", article.url, re.IGNORECASE) else "",
        facts=" · ".join(facts),
    )


def summary_of(text: str) -> str:
    """The first sentences, as many as fit; a longer one is cut at a word."""
    text = " ".join(text.split())
    if len(text) <= _SUMMARY:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text, 0, _SUMMARY)]
    if ends and ends[-1] > _SUMMARY // 4:
        return text[: ends[-1]]
    return text[: text.rfind(" ", 0, _SUMMARY)].rstrip(",;:") + " …"


# -- Markdown ------------------------------------------------------------------------------


def as_markdown(edition: Edition) -> str:
    lines = ["# News brief", "", f"*{_headline(edition)}*", ""]
    for section, stories in edition.sections.items():
        lines += [f"## {section.title()}", ""]
        for story in stories:
            lines += [f"- **{_linked(story)}**  ", f"  {_escaped(story.facts)}"]
            lines += ["", f"  {_escaped(story.summary)}", ""]
    lines += ["---", ""]
    for note in edition.notes:
        lines += [_escaped(note), ""]
    lines += [f"- {_escaped(name)}: {_escaped(why)}" for name, why in edition.missing.items()]
    return "\n".join(lines).rstrip() + "\n"


def _linked(story: Story) -> str:
    title = _escaped(story.title)
    # Brackets would end the address.
    address = re.sub(r"[()<>\\]", lambda one: f"%{ord(one[0]):02X}", story.url)
    return f"[{title}]({address})" if address else title


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#|!&~])", r"\\\1", " ".join(text.split()))


# -- HTML ----------------------------------------------------------------------------------


def as_html(edition: Edition) -> str:
    sections = "\n".join(
        f"<section>\n<h2>{escape(name)}</h2>\n{''.join(map(_article, stories))}</section>"
        for name, stories in edition.sections.items()
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in edition.notes)
    missing = "".join(
        f"<li>{escape(name)}: {escape(why)}</li>" for name, why in edition.missing.items()
    )
    page = Template(Path(__file__).with_name("brief.html").read_text(encoding="utf-8"))
    return page.substitute(
        time=escape(_time(edition.until)),
        headline=escape(_headline(edition)),
        sections=sections,
        notes=notes,
        missing=f"<ul>{missing}</ul>" if missing else "",
    )


def _article(story: Story) -> str:
    title = escape(story.title)
    if story.url:
        title = f'<a href="{escape(story.url)}" rel="noreferrer">{title}</a>'
    return (
        f"<article>\n<h3>{title}</h3>\n<p>{escape(story.summary)}</p>\n"
        f'<p class="facts">{escape(story.facts)}</p>\n</article>\n'
    )


def _headline(edition: Edition) -> str:
    return (
        f"{_count(len(edition.stories), 'story', 'stories')} in"
        f" {_count(len(edition.sections), 'section', 'sections')},"
        f" {edition.hours} hours up to {_time(edition.until)}"
    )


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%-d %B %Y, %H:%M UTC")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
