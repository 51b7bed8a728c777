"""The language model: asked through the engine, and never trusted.

Its labels must be among those offered, and its texts must pass the auditor. A model that is absent
or keeps failing is not asked again in the same run; offline rules do its work.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import penstock

MAX_FAILURES = 3
"""Failed questions in a row after which a run asks no more."""
TIMEOUT = 120.0
"""Seconds for one answer."""
MAX_PROMPT = 2_000
"""Characters of a text that is shown to the model."""
_REWRITE = (
    "Rewrite the text in calm, neutral words. Keep every number, name and quotation exactly as it"
    " is, and the order of the facts. Change only words that judge or dramatise. Answer with the"
    " rewritten text only."
)


class Model:
    """One model in one run. Safe to use from threads."""

    def __init__(self, name: str, client: Callable[[], penstock.Client]) -> None:
        self._name, self._client = name, client
        self._failures, self._lock = 0, threading.Lock()
        self.problem = ""
        """Why it is not asked any more."""

    def __bool__(self) -> bool:
        return bool(self._name) and not self.problem

    def label(self, text: str, labels: Sequence[str]) -> str | None:
        schema = {
            "type": "object",
            "properties": {"section": {"enum": [*labels]}},
            "required": ["section"],
            "additionalProperties": False,
        }
        prompt = f"Which section of a newspaper is this article for?\n\n{text[:MAX_PROMPT]}"
        answer = self._ask(prompt, max_tokens=32, schema=schema)
        try:
            found = json.loads(answer or "")["section"]
        except (ValueError, KeyError, TypeError):
            return None
        return found if found in labels else None

    def rewrite(self, text: str) -> str | None:
        if len(text) > MAX_PROMPT:
            return None
        answer = self._ask(text, system=_REWRITE, max_tokens=len(text) // 2 + 32)
        return answer.strip() if answer else None

    def _ask(self, prompt: str, **options: Any) -> str | None:
        """None if there was no answer."""
        if not self:
            return None
        urgency: penstock.SubmitOptions = {"priority": "batch", "timeout": TIMEOUT}
        try:
            answer: penstock.Answer = penstock.ask(
                prompt,
                model=self._name,
                client=self._client(),
                submit=urgency,
                temperature=0,
                **options,
            )
        except penstock.PenstockError as error:
            with self._lock:
                self._failures += 1
                if self._failures >= MAX_FAILURES or isinstance(error, penstock.NotFound):
                    self.problem = str(error)
            return None
        self._failures = 0
        return answer.text
