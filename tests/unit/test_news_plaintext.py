"""HTML to text: what a reader sees, in time that grows with the length only."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every

from penstock.workloads.pipeline.news.plaintext import MAX_MARKUP, MAX_TEXT, html_to_text, tidy


@every(
    "markup, text",
    [
        ("<p>One</p><p>Two</p>", "One\nTwo"),
        ("a <b>bold</b> word", "a bold word"),
        ("caf&eacute; &amp; bar &#233; 3 &lt; 4", "café & bar é 3 < 4"),
        ("&amp;lt;p&amp;gt; stays", "&lt;p&gt; stays"),
        ("a<br/>b<hr>c", "a\nb\nc"),
        ("one\nline", "one line"),
        ("one <b>\n</b> line", "one line"),
        ("first\r\n\r\nsecond <i>x</i>", "first\nsecond x"),
        ("x<script>alert('<p>')</script>y<style>p{}</style>z", "xyz"),
        ("x<SCRIPT>never closed", "x"),
        ("x<!-- <p>hidden</p> -->y", "xy"),
        ('<img alt="a > b">seen', "seen"),
        ("<img alt='it is \"so\" > x'>seen", "seen"),
        ("3 < 4 and 5 > 2", "3 < 4 and 5 > 2"),
        ("<!-- open <b>shown</b>", "open shown"),
        ("a\u200bb\x00c", "abc"),
        ("", ""),
    ],
)
def test_it_gives_what_a_reader_sees(markup: str, text: str) -> None:
    assert html_to_text(markup) == text


@every(
    "unit",
    [
        *("<", "<a", "<a ", '<a "', "<!--", "<?", "<![CDATA[", "<!D", "</", "<script", "<p>"),
        *("<svg></svg>", '<a b="c" ', "\n ", "<a '\"", "&", "&#", "&#x"),
    ],
)
def test_hostile_markup_costs_no_more_than_its_length(unit: str) -> None:
    began = time.process_time()
    html_to_text("x" + unit * (MAX_MARKUP // len(unit)))
    # A quadratic one takes minutes for this.
    assert time.process_time() - began < 5


def test_a_reference_too_long_to_be_a_number_is_left_out() -> None:
    assert html_to_text("a&#" + "9" * 10_000 + ";b &#x" + "f" * 10_000 + "; c") == "ab c"


def test_a_text_has_a_most() -> None:
    assert len(html_to_text("<b>" + "x" * 200_000)) == MAX_TEXT


@given(st.text())
def test_any_text_can_be_stored_afterwards(markup: str) -> None:
    html_to_text(markup).encode("utf-8")
    assert tidy(markup) == tidy(tidy(markup))


@given(st.lists(st.sampled_from(["<p>", "</p>", "<b>", "</b>", "<br>", "word", " ", "<img x>"])))
def test_no_whole_tag_is_left(parts: list[str]) -> None:
    assert "<" not in html_to_text("".join(parts))
