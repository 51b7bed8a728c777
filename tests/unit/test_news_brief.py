from html.parser import HTMLParser

import msgspec
import pytest
from tests.jobs.news import FakeContext, FakeResults, article

from penstock.workloads.pipeline.news.articles import Neutralized
from penstock.workloads.pipeline.news.brief import brief, reference_time
from penstock.workloads.pipeline.news.config import NewsConfig
from penstock.workloads.pipeline.news.edition import Missing, assemble, summary_of
from penstock.workloads.pipeline.news.layout import as_html, as_markdown
from penstock.workloads.pipeline.news.neutralize import NO_BODY
from penstock.workloads.pipeline.records import ItemOutcome, ItemRecord


@pytest.fixture(autouse=True)
def every_folder_is_allowed(monkeypatch):
    monkeypatch.setenv("PENSTOCK_NEWS_FOLDERS", "/")


NOW = 1_700_000_000.0
HOUR = 3600.0


def story(n=1, label="politics", *, ago=1.0, title="", audit="", **given):
    published = None if ago is None else NOW - ago * HOUR
    one = article(n, published=published, title=title or f"Story {n}", **given)
    return Neutralized(article=one, label=label, title=one.title, body=one.body, audit=audit)


def titles(edition):
    return {one.category: [s.title for s in one.stories] for one in edition.sections}


def test_sections_come_in_the_fixed_order_and_empty_ones_are_left_out():
    edition = assemble([story(1, "sport"), story(2, "world"), story(3, "nonsense")], NOW, 24)
    assert list(titles(edition)) == ["world", "sport", "other"]


def test_within_a_section_the_newest_is_first_then_the_better_source_then_the_hash():
    stories = [
        story(1, ago=2),
        story(5, ago=1, kind="tabloid", source="T"),
        story(4, ago=1, kind="quality", source="Q"),
        story(3, ago=1, kind="quality", source="Q"),
        story(6, ago=None),
    ]
    expected = ["Story 3", "Story 4", "Story 5", "Story 1", "Story 6"]
    assert titles(assemble(stories, NOW, 24)) == {"politics": expected}
    assert titles(assemble(stories[::-1], NOW, 24)) == {"politics": expected}


def test_a_source_has_three_stories_in_a_section_and_three_in_the_next():
    stories = [story(n, label) for n, label in enumerate(["world"] * 5 + ["sport"] * 2)]
    edition = assemble(stories, NOW, 24)
    assert {name: len(found) for name, found in titles(edition).items()} == {"world": 3, "sport": 2}
    assert edition.left_out == 2


@pytest.mark.parametrize(("ago", "count"), [(23.99, 1), (24.0, 0), (30.0, 0), (None, 1)])
def test_the_cutoff_is_exact(ago, count):
    assert assemble([story(ago=ago)], NOW, 24).story_count == count


def test_an_article_without_a_body_is_no_story():
    assert assemble([story(audit=NO_BODY)], NOW, 24).story_count == 0


def test_the_hours_count_back_from_now_or_from_the_newest_of_fixed_dates():
    stories = [story(1, ago=5), story(2, ago=9)]
    assert reference_time(NewsConfig(sources=("a",)), stories, NOW) == NOW
    assert reference_time(NewsConfig(), stories, NOW) == NOW - 5 * HOUR
    assert reference_time(NewsConfig(corpus=True), [], NOW) == NOW
    assert reference_time(NewsConfig(reference_time=7.0), stories, NOW) == 7.0


def test_the_stage_counts_writes_its_files_and_names_the_feeds_it_lacks(tmp_path):
    ctx = FakeContext(now=NOW, out=str(tmp_path / "deep" / "er"))
    dead = ItemRecord(seq=1, key="dead.xml", outcome=ItemOutcome.FAILED, error="503 <gone>")
    ctx.outputs["ingest"] = FakeResults([], [dead])
    made = brief(FakeResults([story(1), story(2, "sport")]), ctx)
    assert ctx.metrics == {"story_count": 2, "section_count": 2, "is_empty": False}
    assert made.missing == (Missing("dead.xml", "503 <gone>"),)
    assert (tmp_path / "deep" / "er" / "brief.md").read_text() == made.markdown
    assert (tmp_path / "deep" / "er" / "brief.html").read_text() == made.html
    assert sorted(path.name for path in (tmp_path / "deep" / "er").iterdir()) == [
        "brief.html",
        "brief.md",
    ]
    assert "dead.xml: 503 \\<gone\\>" in made.markdown
    assert "dead.xml: 503 &lt;gone&gt;" in made.html
    assert msgspec.json.decode(msgspec.json.encode(made))["story_count"] == 2


def test_an_empty_brief_says_so():
    ctx = FakeContext(now=NOW)
    made = brief(FakeResults([]), ctx)
    assert ctx.metrics == {"story_count": 0, "section_count": 0, "is_empty": True}
    assert made.is_empty
    assert "No stories in these hours." in made.markdown
    assert "No stories in these hours." in made.html
    assert "Every source was read." in made.markdown


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.links = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]


def test_nothing_of_a_feed_becomes_markup():
    evil = story(title="<script>alert(1)</script> & *b* [x](y)", source='"><img src=x>')
    edition = assemble([evil], NOW, 24, [Missing("<b>", "<i>")])
    tags = Tags(as_html(edition))
    assert not {"script", "img", "b", "i"} & set(tags.tags)
    assert "\\<script\\>alert(1)\\</script\\> & \\*b\\* \\[x\\](y)" in as_markdown(edition)


def test_a_page_links_to_stories_only_and_loads_nothing():
    normal = story(1)
    odd = msgspec.structs.replace(
        story(2), article=msgspec.structs.replace(article(2), url="javascript:alert(1)")
    )
    odd = msgspec.structs.replace(
        odd, article=msgspec.structs.replace(odd.article, published=NOW - HOUR)
    )
    tags = Tags(as_html(assemble([normal, odd], NOW, 24)))
    assert tags.links == ["https://news.example/1"]
    assert "link" not in tags.tags


def test_the_facts_of_a_story_tell_what_was_done_to_it():
    refused = story(1, audit="body: a number is lost: '4'")
    page = as_markdown(assemble([refused, story(2, ago=None)], NOW, 24))
    assert "original wording kept (body: a number is lost: '4')" in page
    assert "undated" in page


@pytest.mark.parametrize(
    ("body", "summary"),
    [
        ("Short.", "Short."),
        ("One two. " * 40, "One two. " * 30 + "One two."),
        ("word " * 100, "word " * 55 + "word …"),
        ("A\n\nB " * 10, "A B " * 9 + "A B"),
    ],
)
def test_a_summary_ends_with_a_sentence_or_a_word(body, summary):
    assert summary_of(body) == summary
    assert len(summary) <= 282
