"""Rewriting in examples/news: what is toned down, what is never touched, and who judges."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from examples.news.articles import Article, Articles, normal_url
from examples.news.auditor import audit, audit_model
from examples.news.brief import as_html, as_markdown, assemble
from examples.news.classify import by_keywords, classify, sections
from examples.news.evaluation import cases, challenge, half_of, score
from examples.news.lexicon import Choice, Lexicon, Span, apply, lexicon_of, shipped
from examples.news.model import Model
from examples.news.neutralize import Neutral, neutralize
from examples.news.optimization import Evaluation, History, Version, improve, load, optimize, save
from tests.support.news.newsroom import BODY, NOW

import penstock

LEXICON = lexicon_of(Choice())
NO_MODEL = Model("", lambda: pytest.fail("no model is asked"))  # type: ignore[arg-type]


def article(n: int = 1, **given: object) -> Article:
    fields: dict[str, object] = {
        "id": f"{n:020x}", "url": f"https://paper.example/{n}", "title": f"Plan {n}",
        "teaser": "", "body": BODY, "source": "Paper", "kind": "other", "section": "",
        "published": NOW, "first_seen": NOW,
    }  # fmt: skip
    return Article(**{**fields, **given})  # type: ignore[arg-type]


class Parrot(Model):
    """A model that says what it is told to."""

    def __init__(self, says: str) -> None:
        self.problem, self.says = "", says

    def __bool__(self) -> bool:
        return True

    def _ask(self, prompt: str, **options: object) -> str | None:
        return self.says


@pytest.mark.parametrize(
    ("text", "plainer"),
    [
        ("The mayor slammed the firm.", "The mayor criticised the firm."),
        ("It was a shocking day.", "It was an unexpected day."),
        ("It was an absolutely massive wave.", "It was a large wave."),
        ("It is an utterly outrageous offer.", "It is a disputed offer."),
        ("Shockingly, it rained.", "It rained."),
        ("The show is, literally, over.", "The show is over."),
        ("It was absolutely and completely full.", "It was absolutely and completely full."),
        ("Ms Ansel said “it is a shocking and massive mistake” twice.", None),
        ("The workers' 'massive' mistake was found.", None),
        ('"They slammed it,\' he wrote, "and it is utterly wrong.', None),
        ("The group Massive Attack played.", None),
        ("He slammed the door.", None),
        ("An explosive device was found.", None),
        ("See example.org/shocking or #shocking or @massive.", None),
    ],
)
def test_phrases_are_toned_down_and_quotations_names_and_plain_senses_are_not(
    text: str, plainer: str | None
) -> None:
    spans = LEXICON.spans(text)
    assert apply(text, spans) == (text if plainer is None else plainer)
    assert audit(text, spans) == ""


def test_a_headline_keeps_its_capitals() -> None:
    text = "Mayor Slams Shocking Ferry Delays"
    assert (
        apply(text, LEXICON.spans(text, headline=True))
        == "Mayor Criticises Unexpected Ferry Delays"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("slammed", "criticised"), ""),
        (("the 14 delays", "14 of the delays"), "phrases of the lexicon"),
        (("14", "15"), "number is lost: '14'"),
        (("Ansel", "Hansel"), "name is lost"),
        (("“no”", "“yes”"), "quotation is lost"),
        (("slammed", "never criticised"), "denial is new"),
        (("slammed the 14 delays, and “no” was the answer", "spoke of 14, “no”"), "length is"),
        (("slammed the 14 delays, and", "sang of 14 sheep, while a"), "too few of the words"),
        (("slammed", "slammed slammed"), "reads badly"),
    ],
)
def test_the_auditor_judges_a_models_text(change: tuple[str, str], problem: str) -> None:
    original = "On Monday Ms Ansel slammed the 14 delays, and “no” was the answer."
    rewritten = original.replace(*change)
    found = audit_model(original, rewritten, LEXICON)
    assert problem in found
    assert bool(found) == bool(problem)
    done = neutralize(article(body=original), LEXICON, Parrot(rewritten))
    assert done.text == "On Monday Ms Ansel criticised the 14 delays, and “no” was the answer."
    assert done.by_model == (not problem)


def test_the_auditor_refuses_spans_that_change_a_quotation_or_a_number() -> None:
    def span(text: str, word: str) -> Span:
        at = text.index(word)
        return Span(start=at, end=at + len(word), text=word, phrase="x", replacement="few")

    assert "quotation is changed" in audit(
        "He said “many came”.", [span("He said “many came”.", "many")]
    )
    assert "number is changed" in audit("In 1987 it rained.", [span("In 1987 it rained.", "1987")])
    assert "out of place" in audit("It rained.", [span("Now it rained.", "rained")])


@pytest.mark.parametrize(
    ("answer", "label", "method"),
    [
        ('{"section": "health"}', "health", "llm"),
        ('{"section": "gossip"}', "sport", "feed"),
        ("I think that it is health", "sport", "feed"),
        ("[]", "sport", "feed"),
    ],
)
def test_a_models_label_must_be_one_of_those_offered(answer: str, label: str, method: str) -> None:
    assert classify(article(section="sport"), Parrot(answer)) == (label, method)


def test_without_a_model_a_section_goes_by_keywords() -> None:
    assert classify(article(title="Hospital tests vaccine"), NO_MODEL) == ("health", "keywords")
    assert by_keywords("Rovers win the cup", "The coach and the striker of the league") == "sport"
    assert by_keywords("Hm", "Nothing in particular") == sections()[-1] == "other"


def test_a_model_that_keeps_failing_is_not_asked_again() -> None:
    asked = []

    def nobody():  # type: ignore[no-untyped-def]
        asked.append(1)
        raise penstock.EngineUnavailable("it is gone")

    model = Model("small", nobody)
    for _ in range(5):
        assert model.rewrite("A text.") is None
    assert len(asked) == 3
    assert not model
    assert "it is gone" in model.problem


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://www.a.example/x/?utm_source=rss&fbclid=1#top", "http://a.example/x", True),
        ("https://a.example/x?id=1&b=2", "https://a.example/x?b=2&id=1", True),
        ("https://a.example/x?id=1", "https://a.example/x?id=2", False),
        ("https://a.example:8080/x", "https://a.example/x", False),
    ],
)
def test_two_urls_name_the_same_article(one: str, other: str, same: bool) -> None:
    assert (normal_url(one) == normal_url(other)) == same


# -- the brief -----------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]
        assert not [name for name, _ in attrs if name.startswith("on")]


def test_a_hostile_story_can_put_nothing_into_the_page() -> None:
    bad = "<script>alert(1)</script><img src=x onerror=y> ](javascript:z) `*_ $time &amp;\n# Fake"
    neutral = msgspec.json.encode(Neutral(title=bad, text=bad)).decode()
    stories = [
        article(1, neutral=neutral, label="world", source=bad),
        article(2, neutral=neutral, label=bad, url="javascript:alert(1)"),
        article(3, neutral=neutral, label="sport", url='https://a.example/"onclick="x()</a>(1)'),
    ]
    edition = assemble(stories, sections(), NOW, 24, {bad: bad})
    page = Tags(as_html(edition))
    assert page.tags.isdisjoint({"script", "img"})
    assert page.links == ["https://paper.example/1", 'https://a.example/"onclick="x()</a>(1)']
    text = as_markdown(edition)
    assert "\\<script\\>" in text
    assert "\n# Fake" not in text
    assert "](javascript:" not in text.replace("\\](", "")
    assert 'https://a.example/"onclick="x%28%29%3C/a%3E%281%29)' in text


# -- evaluation and optimization -----------------------------------------------------------

POOL = [article(int(f"{n:08x}" + "0" * 12, 16)) for n in range(20)]


def evaluation(n: int, **given: object) -> Evaluation:
    fields: dict[str, object] = {
        "job_id": f"run {n}", "version": 0, "accuracy": None, "neutralization": 8.0,
        "precision": 1.0, "recall": 0.5, "overall": 8.0,
        "missed": {"groundbreaking": 2, "earth-shattering": 1},
    }  # fmt: skip
    return Evaluation(**{**fields, **given})  # type: ignore[arg-type]


def test_no_phrase_and_no_article_is_in_both_halves() -> None:
    plants = {
        half: {one.phrase for one in challenge().plants(half)} for half in ("dev", "held_out")
    }  # type: ignore[arg-type]
    assert plants["dev"].isdisjoint(plants["held_out"])
    assert len(plants["held_out"]) > 20
    known = {form for phrase in shipped()[0] for form in phrase.replacements}
    assert plants["held_out"] - known  # some that no lexicon of ours has
    assert {half_of(one) for one in POOL} == {"dev", "held_out"}
    assert len(cases(POOL, "dev", 0)) + len(cases(POOL, "held_out", 0)) == len(POOL)


def test_a_score_counts_what_was_planted_and_nothing_else() -> None:
    texts = cases(POOL, "held_out", 0)
    assert texts == cases(POOL, "held_out", 0)
    assert all(
        one.text[start:end].lower() == phrase for one in texts for start, end, phrase in one.planted
    )
    nothing, everything = score(texts, Lexicon([])), score(texts, Lexicon(shipped()[0]))
    assert (nothing.recall, nothing.precision) == (0, 1)
    assert 0 < score(texts, LEXICON).recall < everything.recall < 1
    assert nothing.overall() < score(texts, LEXICON).overall() < everything.overall() <= 10


def test_a_change_is_kept_only_if_it_improves_the_held_out_score() -> None:
    texts = cases(POOL, "held_out", 0)
    choice, trials = improve(evaluation(1), Choice(), texts)
    assert choice == Choice(on=("hype",))
    assert trials[0].startswith("switch on hype")
    assert trials[0].endswith("kept")
    useful = evaluation(1, missed={}, false_hits={"exaggeration/massive": 1, "conflict/lambast": 1})
    kept, trials = improve(useful, Choice(), texts)
    assert "conflict/lambast" not in kept.off
    assert [one for one in trials if "lambast" in one and one.endswith("dropped")]


def test_optimization_waits_for_evaluations_changes_and_rolls_back(tmp_path: Path) -> None:
    table = Articles(tmp_path / "articles.db")
    for n, reason in [(1, "1 of 3 evaluations"), (2, "2 of 3 evaluations"), (3, "switch on hype")]:
        save(table, load(table).evaluated(evaluation(n)))
        done = optimize(table, POOL, f"run {n}", 3)
        assert reason in done.reason
    assert done.action == "optimized"
    assert optimize(table, POOL, "run 3", 3).action == "optimized"  # resumed: nothing is added
    assert [one.id for one in load(table).versions] == [0, 1]
    assert load(table).current.choice == Choice(on=("hype",))

    save(table, load(table).evaluated(evaluation(4, overall=7.4)))
    done = optimize(table, POOL, "run 4", 3)
    assert (done.action, done.reason) == ("rollback", "overall fell: back to version 0")
    assert load(table).current.choice == Choice()
    table.close()


@pytest.mark.parametrize(
    ("latest", "reason"),
    [
        ({"overall": 7.51}, "of 3 evaluations"),
        ({"overall": 7.5}, "overall fell"),
        ({"recall": 0.35}, "recall fell"),
        ({"precision": 0.85}, "precision fell"),
        ({"neutralization": 7.25}, "neutralization fell"),
        ({"precision": 0.9, "recall": 0.9, "overall": 9.0}, "of 3 evaluations"),
    ],
)
def test_a_fall_is_seen_on_both_sides_of_its_threshold(
    latest: dict[str, float], reason: str, tmp_path: Path
) -> None:
    table = Articles(tmp_path / "articles.db")
    history = History((Version(), Version(id=1, parent=0, source="auto_optimize", evaluations=1)))
    save(table, history.evaluated(evaluation(1)).evaluated(evaluation(2, **latest)))
    assert reason in optimize(table, POOL, "run 2", 3).reason
    table.close()
