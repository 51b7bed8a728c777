"""A brief as Markdown and as a page that needs nothing else."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import escape

from penstock.workloads.pipeline.news.edition import Edition, Section, Story

_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|])")
_LINK = re.compile(r"https?://\S+$", re.IGNORECASE)
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6670; --line: #d9dee3;
        --paper: #fdfdfb; --accent: #0b5c7d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --soft: #9aa5ae; --line: #353c43; --paper: #16191c; --accent: #6cc0e0; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 44rem; padding: 2.5rem 1.25rem 4rem; background: var(--paper);
       color: var(--ink); font: 1.05rem/1.55 Georgia, "Times New Roman", serif; }
h1 { margin: 0; font-size: 2rem; line-height: 1.2; }
.when, .facts, footer, .empty { color: var(--soft); font-size: .9rem;
       font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }
.when { margin: .4rem 0 0; padding-bottom: 1.25rem; border-bottom: 2px solid var(--ink); }
h2 { margin: 2.2rem 0 .6rem; font: 600 .85rem/1.4 system-ui, -apple-system, sans-serif;
     letter-spacing: .08em; text-transform: uppercase; color: var(--accent); }
article { padding: .9rem 0; border-top: 1px solid var(--line); }
h2 + article { border-top: 0; padding-top: 0; }
h3 { margin: 0; font-size: 1.2rem; line-height: 1.3; }
a { color: inherit; text-decoration-color: var(--accent); text-underline-offset: .15em; }
p { margin: .35rem 0; overflow-wrap: anywhere; }
.facts { margin: 0; }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 2px solid var(--ink); }
footer ul { margin: .3rem 0; padding-left: 1.2rem; }
footer li { overflow-wrap: anywhere; }
"""


def as_markdown(edition: Edition) -> str:
    lines = ["# News brief", "", f"*{_headline(edition)}*", ""]
    for section in edition.sections:
        lines += [f"## {section.category.title()}", ""]
        for story in section.stories:
            lines += [f"- **{_linked(story)}**  ", f"  {_plain(_facts(story))}"]
            lines += ["", f"  {_plain(story.summary)}", ""]
    if not edition.sections:
        lines += ["No stories in these hours.", ""]
    lines += ["---", ""]
    for note in _foot(edition):
        lines += [_plain(note), ""]
    lines += [f"- {_plain(one.source)}: {_plain(one.error)}" for one in edition.missing]
    return "\n".join(lines).rstrip() + "\n"


def as_html(edition: Edition) -> str:
    sections = "\n".join(_section(section) for section in edition.sections)
    missing = "".join(
        f"<li>{escape(one.source)}: {escape(one.error)}</li>" for one in edition.missing
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in _foot(edition))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>News brief, {escape(_time(edition.until))}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>News brief</h1>
<p class="when">{escape(_headline(edition))}</p>
</header>
<main>
{sections or '<p class="empty">No stories in these hours.</p>'}
</main>
<footer>
{notes}{f"<ul>{missing}</ul>" if missing else ""}
</footer>
</body>
</html>
"""


def _section(section: Section) -> str:
    stories = "\n".join(_article(story) for story in section.stories)
    return f"<section>\n<h2>{escape(section.category)}</h2>\n{stories}\n</section>"


def _article(story: Story) -> str:
    title = escape(story.title)
    if _LINK.match(story.url):
        title = f'<a href="{escape(story.url)}" rel="noreferrer">{title}</a>'
    return (
        f"<article>\n<h3>{title}</h3>\n<p>{escape(story.summary)}</p>\n"
        f'<p class="facts">{escape(_facts(story))}</p>\n</article>'
    )


def _headline(edition: Edition) -> str:
    stories, sections = edition.story_count, len(edition.sections)
    return (
        f"{_count(stories, 'story', 'stories')} in {_count(sections, 'section', 'sections')},"
        f" {edition.hours} hours up to {_time(edition.until)}"
    )


def _facts(story: Story) -> str:
    parts = [story.source, "undated" if story.published is None else _time(story.published)]
    if story.note:
        parts.append(f"original wording kept ({story.note})")
    elif story.changed:
        parts.append(f"{_count(story.changed, 'phrase', 'phrases')} toned down")
    return " · ".join(parts)


def _foot(edition: Edition) -> list[str]:
    """What the reader does not see here, and why."""
    notes = []
    if edition.left_out:
        left_out = _count(edition.left_out, "story", "stories")
        notes.append(
            f"{left_out} left out: too old, or more than three of one source in a section."
        )
    if edition.missing:
        notes.append("Not read this time:")
    else:
        notes.append("Every source was read.")
    return notes


def _linked(story: Story) -> str:
    title = _plain(story.title)
    # Brackets and spaces would end the address.
    address = story.url.replace("(", "%28").replace(")", "%29")
    return f"[{title}]({address})" if _LINK.match(story.url) else title


def _plain(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%-d %B %Y, %H:%M UTC")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
