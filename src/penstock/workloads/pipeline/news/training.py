"""A text classifier, trained on the spot: word frequencies and a linear support vector machine.

It learns from the texts written for this project and, in a run on the public corpus, from the
sections in the addresses of the articles that the run does not read.
"""

from __future__ import annotations

import functools
import math
import threading
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import msgspec

from penstock.workloads.pipeline.news import corpus
from penstock.workloads.pipeline.news.articles import Article
from penstock.workloads.pipeline.news.keywords import keyword_counts

HEAD = 1_500
"""Characters of a body that count: what an article is about stands at its front."""
MOST_OF_A_SECTION = 500
"""Examples of the corpus: no section fills the whole lesson."""
FEW = 500
_lock = threading.Lock()


class Example(msgspec.Struct, frozen=True):
    text: str
    label: str


class Classifier:
    """Trained once, then only read, so any thread may ask it."""

    def __init__(self, examples: Sequence[Example], seed: int = 0) -> None:
        self._model = new_model(seed, few=len(examples) < FEW)
        self._model.fit([one.text for one in examples], [one.label for one in examples])
        self.examples = len(examples)

    def predict(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """Labels, and how sure it is: the best score's lead over the next, between 0 and 1."""
        scores = self._model.decision_function(texts)
        labels = self._model.classes_
        found = []
        for row in scores:
            order = row.argsort()
            lead = float(row[order[-1]] - row[order[-2]])
            found.append((str(labels[order[-1]]), round(min(1.0, max(0.0, lead)), 3)))
        return found


def new_model(seed: int = 0, *, few: bool = False) -> Any:
    """Untrained. With few examples it is told the keywords too; with many it knows better.
    Raises ModuleNotFoundError where scikit-learn is not installed."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline, make_union
    from sklearn.preprocessing import FunctionTransformer
    from sklearn.svm import LinearSVC

    words = TfidfVectorizer(
        sublinear_tf=True,
        ngram_range=(1, 2),
        stop_words="english",
        max_features=60_000,
        strip_accents="unicode",
    )
    return make_pipeline(
        make_union(words, FunctionTransformer(_keyword_features)) if few else words,
        LinearSVC(C=0.3, class_weight="balanced", random_state=seed),
    )


def _keyword_features(texts: Sequence[str]) -> list[list[float]]:
    """Of length one, as the word frequencies are."""
    counts = (keyword_counts(text) for text in texts)
    return [[value / (math.hypot(*row) or 1.0) for value in row] for row in counts]


@functools.lru_cache(maxsize=4)
def _trained(corpus_size: int, seed: int) -> Classifier:
    examples = own_examples()
    if corpus_size:
        examples = [*examples, *corpus_examples(corpus.left_out(corpus_size))]
    return Classifier(examples, seed)


def classifier(*, corpus_size: int = 0, seed: int = 0) -> Classifier:
    """Fitted when it is first asked for, by one thread while the others wait."""
    with _lock:
        return _trained(corpus_size, seed)


def text_of(title: str, body: str) -> str:
    # A headline is short and says most, so it counts twice.
    return f"{title}\n{title}\n{body[:HEAD]}"


def own_examples() -> list[Example]:
    file = resources.files(__package__).joinpath("sample", "labelled.toml")
    written = tomllib.loads(file.read_text(encoding="utf-8"))
    return [Example(text, label) for label, texts in written.items() for text in texts]


def corpus_examples(articles: Iterable[Article]) -> list[Example]:
    """Of the articles whose address names a section."""
    used: Counter[str] = Counter()
    examples = []
    for article in articles:
        used[article.section] += 1
        if article.section and used[article.section] <= MOST_OF_A_SECTION:
            examples.append(Example(text_of(article.title, article.body), article.section))
    return examples
