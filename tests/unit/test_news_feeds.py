"""Feeds to articles: malformed ones survive, hostile ones are refused, within bounds."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workloads.pipeline.news.articles import Article
from penstock.workloads.pipeline.news.errors import BadFeed
from penstock.workloads.pipeline.news.feeds import Feed, parse_feed
from penstock.workloads.pipeline.records import ErrorClass
from penstock.workloads.pipeline.retrying import judge


def rss(items: str, *, head: str = "<?xml version='1.0'?>") -> bytes:
    return f'{head}<rss version="2.0"><channel><title>T</title>{items}</channel></rss>'.encode()


def item(title: str = "A title", body: str = "A body", extra: str = "") -> str:
    return (
        f"<item><title>{escape(title)}</title><description>{escape(body)}</description>"
        f"{extra}</item>"
    )


def read(data: bytes, **options: object) -> Feed:
    return parse_feed(data, "the feed", **options)  # type: ignore[arg-type]


def only(data: bytes) -> Article:
    (article,) = read(data).articles
    return article


# -- what is read ------------------------------------------------------------------------


def test_the_longest_text_of_an_entry_is_its_body() -> None:
    content = (
        '<content:encoded xmlns:content="http://purl.org/rss/1.0/modules/content/">'
        "<![CDATA[<p>The whole story.</p><p>And its end.</p>]]></content:encoded>"
    )
    assert only(rss(item(body="Short.", extra=content))).body == "The whole story.\nAnd its end."


def test_a_plain_text_is_not_taken_for_html() -> None:
    data = (
        b'<feed xmlns="http://www.w3.org/2005/Atom"><title>T</title><entry>'
        b'<title type="text">a &lt;b&gt; c</title><id>urn:1</id>'
        b'<content type="text">if x &lt;y and y&gt; z</content></entry></feed>'
    )
    article = only(data)
    assert article.title == "a <b> c"
    assert article.body == "if x <y and y> z"


@pytest.mark.parametrize(("length", "truncated"), [(499, True), (500, False)])
def test_a_body_under_500_characters_is_a_teaser(length: int, truncated: bool) -> None:
    assert only(rss(item(body="x" * length))).truncated is truncated


@pytest.mark.parametrize(
    ("date", "epoch"),
    [
        ("<pubDate>Thu, 04 Jun 2026 16:40:00 GMT</pubDate>", 1780591200.0),
        ("<pubDate>Thu, 04 Jun 2026 18:40:00 +0200</pubDate>", 1780591200.0),
        ("<pubDate>soon</pubDate>", None),
        ("", None),
    ],
)
def test_dates_become_seconds_since_1970(date: str, epoch: float | None) -> None:
    assert only(rss(item(extra=date))).published == epoch


def test_an_update_serves_where_there_is_no_date_of_publishing() -> None:
    data = (
        b'<feed xmlns="http://www.w3.org/2005/Atom"><entry><title>t</title><id>urn:1</id>'
        b"<updated>2026-06-04T16:40:00Z</updated></entry></feed>"
    )
    assert only(data).published == 1780591200.0


def test_the_newest_are_taken_and_those_without_a_date_last() -> None:
    days = [3, 9, 1, 5]
    items = item("no date") + "".join(
        item(f"day {day}", extra=f"<pubDate>{day:02} Jun 2026 10:00:00 GMT</pubDate>")
        for day in days
    )
    feed = read(rss(items), limit=3)
    assert [article.title for article in feed.articles] == ["day 9", "day 5", "day 3"]
    assert read(rss(items)).articles[-1].title == "no date"


def test_an_entry_that_the_feed_has_twice_is_taken_once() -> None:
    twice = item("One", extra="<link>https://a.example/1</link>") + item(
        "Two", extra="<link>https://a.example/1?utm_source=x</link>"
    )
    feed = read(rss(twice))
    assert (len(feed.articles), feed.repeated) == (1, 1)


def test_an_entry_with_neither_title_nor_text_is_counted_and_left() -> None:
    feed = read(rss("<item><link>https://a.example/1</link></item>" + item()))
    assert (len(feed.articles), feed.unreadable) == (1, 1)


def test_a_feed_without_entries_is_no_error() -> None:
    assert read(rss("")).articles == ()


def test_an_address_that_no_reader_should_click_is_left_out() -> None:
    article = only(rss(item(extra="<link>javascript:alert(1)</link><guid>urn:x</guid>")))
    assert article.url == ""
    assert article.hash


def test_entries_without_addresses_are_told_apart() -> None:
    one, two = read(rss(item("First of them") + item("Second of them"))).articles
    assert one.hash != two.hash


@pytest.mark.parametrize(
    ("link", "label", "section"),
    [
        ("https://a.example/sport/cup", "", "sport"),
        ("https://a.example/news/world-europe-39448414", "", "world"),
        ("https://a.example/1", "Technology", "technology"),
        ("https://a.example/sport/1", "Technology", "sport"),
        ("https://a.example/business-as-usual-says-the-mayor", "", ""),
        ("https://a.example/1", "Gardens", ""),
    ],
)
def test_the_section_is_in_the_address_or_in_the_label(link: str, label: str, section: str) -> None:
    extra = f"<link>{link}</link><category>{label}</category>"
    assert only(rss(item(extra=extra))).section == section


# -- encodings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "charset"),
    [
        ("utf-8", ""),
        ("utf-8-sig", ""),
        ("utf-16", ""),
        ("utf-32", ""),
        ("utf-32-le", ""),
        ("utf-32-be", ""),
        ("utf-16-le", ""),
        ("iso-8859-1", ""),
        ("cp1252", "windows-1252"),
        ("koi8-r", "koi8-r"),
    ],
)
def test_a_feed_is_read_in_its_encoding(encoding: str, charset: str) -> None:
    title = "Привет" if encoding == "koi8-r" else "Café"
    named = "" if charset else f" encoding='{encoding}'"
    text = rss(item(title), head=f"<?xml version='1.0'{named}?>").decode()
    feed = read(text.encode(encoding), charset=charset)
    assert feed.articles[0].title == title
    assert feed.malformed == ""


@pytest.mark.parametrize("claimed", ["utf-8", "no-such-encoding", "utf-16", "hex", "rot13"])
def test_a_feed_that_lies_about_its_encoding_is_read_and_noted(claimed: str) -> None:
    text = rss(item("Café"), head=f"<?xml version='1.0' encoding='{claimed}'?>").decode()
    feed = read(text.encode("cp1252"))
    assert feed.articles[0].title == "Café"
    assert feed.malformed


# -- malformed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        rss(item("One") + "<item><title>Two</title><b></item>"),
        rss(item("One") + "<item><title>Two &nosuch; &amp;</title></item>"),
        rss(item("One") + "<item><title>Two & a half</title></item>"),
        rss(item("One") + "<item><title>Two</title></item>").replace(b"</channel></rss>", b""),
        b"junk before\n" + rss(item("One") + item("Two")),
        rss(item("One") + "<item><title>Two \x0b</title></item>"),
    ],
)
def test_a_malformed_feed_gives_what_can_be_read_of_it(broken: bytes) -> None:
    feed = read(broken)
    assert feed.malformed
    assert {article.title[:3] for article in feed.articles} == {"One", "Two"}


@pytest.mark.parametrize("wrong", ["xd83d;&#xde00", "x110000", "9" * 10_000, "x" + "f" * 9])
@pytest.mark.parametrize("after", ["", "<x>"], ids=["well-formed", "malformed"])
def test_a_character_that_does_not_exist_costs_only_itself(wrong: str, after: str) -> None:
    one, two = read(
        rss(f"<item><title>a&#{wrong};&#x1f600;b</title>{after}</item>{item()}")
    ).articles
    assert (one.title, two.title) == ("a\U0001f600b", "A title")


def test_what_the_parser_does_not_survive_is_an_error_of_the_feed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stumble(*args: object, **options: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("feedparser.parse", stumble)
    with pytest.raises(BadFeed, match="can't be parsed: RecursionError: too deep"):
        read(rss(item()))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_a_damaged_feed_is_read_or_refused_and_nothing_else(junk: bytes, at: int) -> None:
    good = rss(item("One", "x" * 100) + item("Two"))
    with contextlib.suppress(BadFeed):
        read(good[:at] + junk + good[at:])


# -- refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"<!DOCTYPE html><html><body>Hello</body></html>", "a web page, not a feed"),
        (b"<!-- x --><HTML lang='en'><head></head></HTML>", "a web page, not a feed"),
        (b"<?xml version='1.0'?><!doctype  HTML><html/>", "a web page, not a feed"),
        (b"just a sentence", "is not a feed"),
        (b'{"version": "https://jsonfeed.org/version/1"}', "is not a feed"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "is not a feed"),
        (b"<opml><body/></opml>", "is not a feed"),
    ],
)
def test_what_is_no_feed_is_refused_for_good(data: bytes, words: str) -> None:
    with pytest.raises(BadFeed, match=words) as caught:
        read(data)
    assert "the feed" in str(caught.value)
    assert judge(caught.value).error_class is ErrorClass.PERMANENT


def billion_laughs() -> str:
    levels = "".join(f'<!ENTITY lol{n} "{f"&lol{n - 1};" * 10}">' for n in range(1, 10))
    return (
        f'<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY lol0 "lol">{levels}]>'
        '<rss version="2.0"><channel><item><title>&lol9;</title></item></channel></rss>'
    )


def quadratic(doctype: str) -> str:
    return (
        f'{doctype}<!ENTITY a "{"x" * 50_000}">]>'
        f'<rss version="2.0"><channel><item><title>{"&a;" * 50_000}</title></item></channel></rss>'
    )


@pytest.mark.parametrize(
    "document",
    [
        billion_laughs().encode(),
        billion_laughs()
        .replace("<?xml version=", "<?xml encoding='utf-16' version=")
        .encode("utf-16"),
        b"<?xml version='1.0' encoding='utf-7'?>" + billion_laughs()[21:].encode("utf-7"),
        quadratic("<!DOCTYPE x [").encode(),
        quadratic("<!DOCTYPE x [<!-- <rss> -->").encode(),
        quadratic('<!DOCTYPE x SYSTEM "a>b" [').encode(),
        quadratic("<!-- <a> --><?pi <b> ?><!doctype x [").encode(),
        quadratic("<!-- never closed <!DOCTYPE x [").encode(),
    ],
    ids=[
        "billion laughs",
        "in UTF-16",
        "in UTF-7",
        "quadratic",
        "behind a comment",
        "behind a quoted bracket",
        "behind a comment and an instruction",
        "in an open comment",
    ],
)
def test_entities_are_refused_before_they_can_grow(document: bytes) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(BadFeed, match="declares XML entities"):
            read(document)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000
    assert time.process_time() - began < 2


def test_a_feed_that_calls_itself_a_page_is_a_feed() -> None:
    head = "<!DOCTYPE html PUBLIC '-//W3C//DTD HTML 4.0//EN' 'http://a.example/x.dtd'>"
    assert only(rss(item("Still a feed"), head=head)).title == "Still a feed"


def test_a_file_is_not_read_through_an_entity(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    named = f'<?xml version="1.0"?><!DOCTYPE rss [<!ENTITY s SYSTEM "{secret.as_uri()}">]>'
    with pytest.raises(BadFeed, match="declares XML entities"):
        read(rss("<item><title>&s;</title></item>", head=named))


def test_a_type_of_elsewhere_is_named_and_not_read(tmp_path: Path) -> None:
    declared = tmp_path / "rss.dtd"
    declared.write_text('<!ENTITY s "the secret">')
    head = f'<?xml version="1.0"?><!DOCTYPE rss SYSTEM "{declared.as_uri()}">'
    feed = read(rss("<item><title>a &s; b</title></item>", head=head))
    assert "secret" not in feed.articles[0].title


def test_a_feed_may_write_about_entities() -> None:
    told = "<item><title>XML</title><description><![CDATA[<!ENTITY a 'b'>]]></description></item>"
    assert len(read(rss(told)).articles) == 1


@pytest.mark.parametrize("unit", ["<", "&", "<a", "<item>", "<b>", "<x:y xmlns:x='a'>", "</"])
def test_broken_xml_costs_no_more_than_its_length(unit: str) -> None:
    began = time.process_time()
    read(rss(unit * (100_000 // len(unit))))
    assert time.process_time() - began < 10
