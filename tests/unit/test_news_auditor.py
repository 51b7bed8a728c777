# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.rows import every

from penstock.workloads.pipeline.news.articles import Span
from penstock.workloads.pipeline.news.auditor import audit, lints
from penstock.workloads.pipeline.news.lexicon import shipped
from penstock.workloads.pipeline.news.spans import apply, find_spans

ALL = shipped().everything()
TEXT = "On Monday Anna Reed said “we lost 40 jobs” to 3.5 million people. It was a shocking day."


def span(text, part, replacement):
    start = text.index(part)
    return Span(
        start=start, end=start + len(part), text=part, category="x", replacement=replacement
    )


@every(
    "changed, why",
    [
        (TEXT.replace("3.5", "3.6"), "a number is lost: '3.5'"),
        (TEXT.replace("million", "billion"), "a number is lost: 'million'"),
        (TEXT.replace("lost 40", "had 40"), "a quotation is lost"),
        (TEXT.replace("Reed", "Read"), "a name is lost: 'Reed'"),
        (TEXT.replace("Monday", "monday"), "a name is lost: 'Monday'"),
        (TEXT.replace("Anna Reed", "Reed Anna"), "the names are in another order"),
        (TEXT.replace("people", "people in Oslo"), "a name is new: 'Oslo'"),
        (TEXT.replace("people", "2 people"), "a number is new: '2'"),
        (TEXT.replace("It was", "It was not"), "a denial is new: 'not'"),
        (TEXT[:60], "its length is 68% of the original's"),
        (TEXT + " And much more that was said there." * 2, "its length is"),
        (TEXT.replace("shocking", "unexpected"), "it reads badly: 'a unexpected'"),
        (TEXT.replace("shocking ", " "), "it reads badly: 'a double space'"),
        ("  ", "nothing is left"),
    ],
)
def test_a_models_text_is_refused_where_a_fact_is_changed(changed, why):
    assert audit(TEXT, changed).startswith(why)


def test_a_models_text_with_all_facts_passes():
    assert audit(TEXT, TEXT.replace("It was a shocking day", "It was an unusual day")) == ""
    assert audit(TEXT, TEXT) == ""


def test_a_sentences_first_word_counts_as_a_name_unless_it_is_a_common_one():
    assert audit("Reed left.", "Smith left.") == "a name is lost: 'Reed'"
    assert audit("The man left.", "This man left.") == ""


def test_a_rewrite_by_spans_may_change_nothing_else():
    text = "A teh massive plan, and a tpyo."
    good = span(text, "massive", "large")
    assert audit(text, text.replace("massive", "large"), [good]) == ""
    repaired = text.replace("massive", "large").replace("teh", "the")
    assert audit(text, repaired, [good]) == "text outside the spans is changed"


def test_a_span_that_touches_a_quotation_or_a_number_or_lies_is_refused():
    quoted = span(TEXT, "lost", "had")
    assert audit(TEXT, apply(TEXT, [quoted]), [quoted]).startswith("a quotation is touched")
    number = span(TEXT, "3.5 million", "many")
    assert audit(TEXT, apply(TEXT, [number]), [number]).startswith("a number is touched")
    lie = Span(start=0, end=2, text="no", category="x", replacement="")
    assert audit(TEXT, TEXT[2:], [lie]).startswith("a span is not where it says")
    twice = span(TEXT, "shocking", "odd")
    assert audit(TEXT, TEXT, [twice, twice]).startswith("a span is out of place")


def test_the_sources_own_faults_are_let_be():
    text = "A  apple , teh massive plan plan."
    found = find_spans(text, ALL)
    assert audit(text, apply(text, found), found) == ""
    assert lints("a apple") == {"a apple": 1}
    assert lints("a plan, an hour, a user") == {}


# -- whatever the text ------------------------------------------------------------------

PHRASES = [form for phrase in shipped().phrases for form in phrase.forms]
QUOTES = ['"a massive {}"', "“utterly {}”", "‘shocking {}’", "«slammed {}»"]
COMMON = "a an the and was is not plan apple hour people said , . : ; -"
PIECES = st.one_of(
    st.sampled_from(PHRASES),
    st.sampled_from(PHRASES).map(str.capitalize),
    st.sampled_from(
        [
            "a",
            "an",
            "the",
            "and",
            "was",
            "is",
            "not",
            "plan",
            "apple",
            "hour",
            "people",
            "said",
            ",",
            ".",
            ":",
            ";",
            "-",
        ]
    ),
    st.sampled_from(["Anna", "Reed", "Oslo", "NATO", "McKay", "O'Neill", "IBM"]),
    st.from_regex(r"[1-9][0-9]{0,3}(\.[0-9])?%?", fullmatch=True),
    st.builds(str.format, st.sampled_from(QUOTES), st.sampled_from(["plan", "12", "Anna"])),
)
TEXTS = st.lists(PIECES, min_size=1, max_size=40).map(" ".join)
NAMES = ("Anna", "Reed", "Oslo", "NATO", "McKay", "O'Neill", "IBM")


def kept(text):
    """Numbers, names and quotations, found by other means than the auditor's."""
    quotes = [part for mark in ("“”", "‘’", "«»") for part in between(text, *mark)]
    words = text.replace(",", " ").split()
    names = [word for word in words if word in NAMES]
    return quotes, names, [char for char in text if char.isdigit()]


def between(text, left, right):
    return [part.split(right)[0] for part in text.split(left)[1:] if right in part]


@settings(max_examples=400)
@given(TEXTS, st.booleans())
def test_whatever_the_text_numbers_names_and_quotations_survive_the_span_rewrite(text, headline):
    rewritten = apply(text, find_spans(text, ALL, headline=headline))
    assert kept(rewritten) == kept(text)


@settings(max_examples=400)
@given(TEXTS)
def test_whatever_the_text_a_rewrite_that_is_refused_is_refused_for_its_form_only(text):
    spans = find_spans(text, ALL)
    problem = audit(text, apply(text, spans), spans)
    allowed = (
        "it reads badly",
        "its length is",
        "nothing is left",
        "a quotation",
        "the quotations",
    )
    assert not problem or problem.startswith(allowed)


@given(TEXTS, st.data())
def test_whatever_the_text_a_changed_digit_is_noticed(text, data):
    digits = [at for at, char in enumerate(text) if char.isdigit()]
    if not digits:
        return
    at = data.draw(st.sampled_from(digits))
    other = "7" if text[at] != "7" else "3"
    assert audit(text, text[:at] + other + text[at + 1 :])
