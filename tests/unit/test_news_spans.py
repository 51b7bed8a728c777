# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every

from penstock.workloads.pipeline.news.lexicon import shipped
from penstock.workloads.pipeline.news.quotes import quoted
from penstock.workloads.pipeline.news.spans import apply, find_spans, name_pairs
from penstock.workloads.pipeline.news.wording import article

ALL = shipped().everything()


def rewrite(text, *, headline=False, names=frozenset()):
    return apply(text, find_spans(text, ALL, headline=headline, names=names))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The mayor slammed a shocking plan.", "The mayor criticised an unexpected plan."),
        ("An incredible, massive crowd.", "A notable, large crowd."),
        ("Shocking figures. Massive losses.", "Unexpected figures. Large losses."),
        ("SLAMMED BY ALL", "CRITICISED BY ALL"),
        ("Prices skyrocketed, shares plummeted 4%.", "Prices rose, shares fell 4%."),
    ],
)
def test_a_phrase_is_replaced_with_its_capitals_and_its_article(text, plain):
    assert rewrite(text) == plain


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("It is absolutely clear.", "It is clear."),
        ("Shockingly, the mayor left.", "The mayor left."),
        ("He was, shockingly, late.", "He was late."),
        ("It was late, shockingly.", "It was late."),
        ("An absolutely clear win, a literally shocking one.", "A clear win, an unexpected one."),
        ("Absolutely shocking scenes.", "Unexpected scenes."),
        ("A must-see film", "A film"),
    ],
)
def test_a_phrase_is_taken_out_tidily(text, plain):
    assert rewrite(text) == plain


@pytest.mark.parametrize(
    "text",
    [
        "Is it right? Absolutely.",
        "It is absolutely and completely right.",
        "It is not absolutely clear.",
        "She said (absolutely).",
    ],
)
def test_what_can_not_be_taken_out_tidily_is_left(text):
    assert rewrite(text) == text


@every(
    "text",
    [
        'He called it "a shocking plan".',
        "He called it “a shocking plan”.",
        "He called it ‘a shocking plan’.",
        "He called it 'a shocking plan'.",
        "He called it «a shocking plan».",
        "He called it „a shocking plan“.",
        "“He said ‘no’ to a massive one,” she said.",
        "“It goes on.\n“A massive one.”",
        '"It goes on.\n"A massive one."',
        "“It was never closed, a massive one.",
        "‘The workers’ massive union’ it was.",
        '"In 1990" was a 6" record, "massive".',
    ],
)
def test_nothing_within_a_quotation_is_touched(text):
    assert rewrite(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "The workers' massive union didn't come.",
        "The workers’ massive union didn’t come.",
        "In the '90s a massive union came, and in the ’80s.",
        'A 6" pipe and a massive one.',
        "He said “no” to a massive one, and “yes” to another.",
    ],
)
def test_an_apostrophe_is_no_quotation_mark(text):
    assert rewrite(text) == text.replace("massive", "large")


def test_a_name_is_left_alone():
    text = "Massive Attack played. The band Massive Attack met Mr. Slam. He met the SLAM team."
    assert rewrite(text) == text


def test_a_headline_in_capitals_is_read_and_names_known_from_the_body_are_kept():
    names = name_pairs("The band Massive Attack played.")
    title = "Massive Attack Slams Shocking Plan For Massive Tour"
    assert (
        rewrite(title, headline=True, names=names)
        == "Massive Attack Criticises Unexpected Plan For Large Tour"
    )


def test_headline_phrases_are_left_in_the_body():
    text = "Pensions will change, and here's why"
    assert rewrite(text, headline=True) == "Pensions will change"
    assert rewrite(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "She slammed the door and won the Grand Slam.",
        "The verdict was explosive, and an explosive device was found.",
        "The name literally means wide.",
        "They were kicking and humiliating people.",
        "A miracle happened.",
        "The chilling effect of water chilling units.",
    ],
)
def test_a_guard_keeps_innocent_uses(text):
    assert rewrite(text) == text


def test_positions_are_exact_and_spans_are_in_order():
    text = "Wow. A shocking, utterly massive plan, incredibly, went viral; he slammed it."
    spans = find_spans(text, ALL)
    assert [text[one.start : one.end] for one in spans] == [one.text for one in spans]
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    assert len(spans) == 5


@every(
    "following, fits",
    [
        ("apple", "an"), ("hour", "an"), ("honest", "an"), ("unusual", "an"), ("unimpressed", "an"),
        ("university", "a"), ("one-off", "a"), ("European", "a"), ("user", "a"), ("plan", "a"),
        ("FBI agent", "an"), ("NATO plan", "a"), ("UN plan", "a"), ("MP", "an"),
        ("18-year-old", "an"), ("1800 men", "a"), ("8 per cent", "an"),
        ("uninvited", "an"), ("union", "a"),
    ],
)  # fmt: skip
def test_a_and_an_go_by_sound(following, fits):
    assert article(following) == fits


WORDS = [form for phrase in shipped().phrases for form in phrase.forms] + [
    "a", "an", "the", "and", "was", "Smith", "Kelvin", "42", "apple", "not", "plan", "said",
    "“yes, massive”", '"no"', "workers'", "‘", "”", '"', "'", "\n", "\n\n", ",", ".", ":", "  ",
    "—",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join) | st.text(max_size=80)


@given(TEXTS, st.booleans())
def test_whatever_the_text_spans_are_exact_apart_and_outside_quotations(text, headline):
    spans = find_spans(text, ALL, headline=headline)
    at = 0
    for span in spans:
        assert at <= span.start < span.end <= len(text)
        assert text[span.start : span.end] == span.text
        assert not any(a < span.end and span.start < b for a, b in quoted(text))
        at = span.end


@given(st.lists(st.sampled_from(["'a ", "“", '"', "‘a ", "«", "x’ "]), max_size=200).map("".join))
def test_quotations_are_in_order_and_do_not_overlap(text):
    at = 0
    for start, end in quoted(text):
        assert at <= start < end <= len(text)
        at = end
