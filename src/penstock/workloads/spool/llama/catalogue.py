"""Which models there are to be asked, by the names that they are asked by."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.models.gguf import GgufFacts, name_for
from penstock.workloads.llm.models.shelf import ModelShelf
from penstock.workloads.llm.values import EngineUnavailable, LlmCode, LlmFailure

Entry = GgufFacts | LlmFailure
"""A model, or why it is none."""


class Catalogue:
    """Looks at files only when it is asked for all, or for one that it does not know."""

    def __init__(self, config: ModelConfig) -> None:
        self._shelf = ModelShelf(config.models_dir or Path("models"))
        self._wanted = config.models
        self._entries: dict[str, Entry] = {}
        """In their order: the first is the default one."""
        self._known: dict[str, GgufFacts] = {}
        """All that were ever usable: jobs may name them, and wait until their files are back."""

    async def list(self) -> Sequence[GgufFacts]:
        """All that can be used."""
        await asyncio.to_thread(self._look)
        return [one for one in self._entries.values() if isinstance(one, GgufFacts)]

    async def find(self, name: str) -> GgufFacts:
        """By its name, or a part of it that no other has; the default one by none. Raises
        MODEL_NOT_FOUND, or EngineUnavailable for a known one whose file is gone or no good."""
        entry = self._entries.get(name or next(iter(self._entries), ""))
        if not isinstance(entry, GgufFacts):
            await asyncio.to_thread(self._look)
            entry = self._entries[self._named(name)]
        if isinstance(entry, LlmFailure):
            raise EngineUnavailable(entry.code, entry.message, **entry.facts)
        return entry

    def _named(self, name: str) -> str:
        if name in self._entries:
            return name
        if not name and self._entries:
            return next(iter(self._entries))
        alike = [one for one in self._entries if name and name.lower() in one.lower()]
        if len(alike) == 1:
            return alike[0]
        problem = f"{name!r} may be {' or '.join(alike)}" if alike else _absent(name)
        there = ", ".join(self._entries) or "none"
        raise LlmFailure(LlmCode.MODEL_NOT_FOUND, f"{problem}; there is {there}")

    def _look(self) -> None:
        found: list[tuple[str, Entry]]
        if self._wanted:
            found = [self._wanted_one(one) for one in self._wanted]
        else:
            found = [(one.name, one) for one in self._shelf.list()]
        entries: dict[str, Entry] = {}
        for name, entry in found:
            entries.setdefault(name, entry)
        for name, known in self._known.items():
            entries.setdefault(name, _gone(known))
        self._known |= {name: one for name, one in found if isinstance(one, GgufFacts)}
        self._entries = entries

    def _wanted_one(self, wanted: str) -> tuple[str, Entry]:
        try:
            facts = self._shelf.find(wanted)
        except LlmFailure as failure:
            return name_for(Path(wanted)), failure
        except PenstockError as error:
            missing = LlmFailure(LlmCode.MODEL_NOT_FOUND, str(error))
            return name_for(Path(wanted)), missing
        return facts.name, facts


def _absent(name: str) -> str:
    return f"there is no model {name!r}" if name else "there is no model at all"


def _gone(known: GgufFacts) -> LlmFailure:
    return LlmFailure(
        LlmCode.MODEL_NOT_FOUND, f"the file of the model {known.name} is gone: {known.path}"
    )
