# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

import pytest

from penstock.core.errors import Misconfigured
from penstock.workloads.pipeline.news.lexicon import (
    Addition,
    Settings,
    lexicon_of,
    parse,
    shipped,
    version_of,
)


def words(text, lexicon):
    return [match.group() for match, _, _ in lexicon.find(text)]


def test_the_shipped_lexicon_is_broad_and_leaves_one_category_off():
    assert len(shipped().phrases) >= 60
    assert set(shipped().categories) - shipped().on == {"hype"}
    assert len(shipped().with_()) < len(shipped().everything())


def test_no_replacement_is_itself_a_phrase_so_a_second_pass_finds_nothing():
    everything = shipped().everything()
    for phrase in shipped().phrases:
        for to in phrase.to:
            assert words(to, everything) == [], phrase.id


def test_every_form_is_found_in_any_case_and_with_either_apostrophe():
    everything = shipped().everything()
    for phrase in shipped().phrases:
        for form in phrase.forms:
            for written in (form, form.upper(), form.title(), form.replace("'", "’")):
                assert words(f"x {written} y", everything) == [written]


def test_the_longest_form_wins():
    assert words("in total chaos", shipped().everything()) == ["in total chaos"]
    assert words("it is what it is", shipped().everything()) == []


@pytest.mark.parametrize(
    "text",
    [
        "massively",
        "non-massive",
        "massive-scale",
        "#massive",
        "@slam",
        "a.org/massive",
        "massive's",
    ],
)
def test_a_part_of_a_longer_word_is_not_found(text):
    assert words(text, shipped().everything()) == []


def test_a_phrase_over_two_lines_is_found_but_not_over_two_paragraphs():
    assert words("a war of\nwords", shipped().everything()) == ["war of\nwords"]
    assert words("a war of\n\nwords", shipped().everything()) == []


def test_a_phrases_own_switch_wins_over_its_categorys():
    settings = Settings(off=("conflict",), on=("conflict/slam",))
    assert words("he slammed a war of words", lexicon_of(settings)) == ["slammed"]
    settings = Settings(on=("hype",), off=("hype/cutting-edge",))
    assert words("groundbreaking and cutting-edge", lexicon_of(settings)) == ["groundbreaking"]


def test_an_addition_is_found_and_can_be_switched_off_again():
    added = Addition(category="hype", forms="dazzling", to="bright")
    assert words("dazzling", lexicon_of(Settings(on=("hype",), additions=(added,)))) == ["dazzling"]
    off = Settings(on=("hype",), off=("hype/dazzling",), additions=(added,))
    assert words("dazzling", lexicon_of(off)) == []


def test_settings_that_name_nothing_are_refused_with_what_there_is():
    with pytest.raises(Misconfigured, match="no 'hyp'") as error:
        lexicon_of(Settings(on=("hyp",)))
    assert "emotional" in error.value.hint


def test_the_version_tells_settings_apart_but_not_their_order():
    one = version_of("1", Settings(on=("a", "b")))
    assert one == version_of("1", Settings(on=("b", "a")))
    assert one != version_of("1", Settings(off=("a", "b")))
    assert version_of("1", Settings()) == "1"


def test_a_file_with_a_wrong_count_or_a_form_twice_is_refused():
    def lexicon(*phrases):
        return {"version": "1", "x": {"phrases": list(phrases)}}

    with pytest.raises(Misconfigured, match="3 forms and 2 replacements"):
        parse(lexicon({"forms": "a/b/c", "to": "d/e"}))
    with pytest.raises(Misconfigured, match="'a' in x/a and in x/b"):
        parse(lexicon({"forms": "a", "to": "d"}, {"forms": "b/a", "to": "d"}))
