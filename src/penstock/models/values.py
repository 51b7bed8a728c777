"""Names of models, what is known of a model, and why one can't be used."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from penstock.core.errors import InvalidRequest, NotFound

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.ASCII)
_MAX_NAME = 120
_LATEST = ":latest"
"""What clients of Ollama add to a name."""


class LlmCode(StrEnum):
    """Why a model did not answer."""

    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
    """The prompt has more tokens than the model's context; both counts are in the message."""
    INVALID_PROMPT = "INVALID_PROMPT"
    """The prompt can't be given to this model: empty, not UTF-8, roles out of order."""
    INVALID_SCHEMA = "INVALID_SCHEMA"
    """Invalid JSON schema or grammar."""
    NOT_SUPPORTED = "NOT_SUPPORTED"
    """The model can't do this: images without a projector, tools that its template ignores."""
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_INVALID = "MODEL_INVALID"
    """Its file is cut off, damaged, or no GGUF."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    ENGINE_MISSING = "ENGINE_MISSING"
    """llama.cpp is not installed, or can't be loaded here."""
    ENGINE_CRASHED = "ENGINE_CRASHED"
    """The process that computes died; the job may be tried again."""
    ENGINE_ERROR = "ENGINE_ERROR"
    """The engine refused or failed for a reason of its own."""
    JOB_MISSING = "JOB_MISSING"
    """A node of the pipe knows nothing of the job: it was restarted, or gave it up."""
    ORIGIN_MISMATCH = "ORIGIN_MISMATCH"
    """A job came to its head on a node that is not its origin."""
    END_MODEL_UNAVAILABLE = "END_MODEL_UNAVAILABLE"
    """The origin has no end model (any more)."""
    PREFILL_UPDATE_FAILED = "PREFILL_UPDATE_FAILED"
    """Nobody listened any more while the prompt was read."""
    NO_MODEL_FOR_NEXT_LAYER = "NO_MODEL_FOR_NEXT_LAYER"
    """No node of the pipe has the first layer."""
    NO_LOCAL_MODEL = "NO_LOCAL_MODEL"
    """A node was given a job for layers that it does not hold (any more)."""
    JOB_UPDATE_FAILED = "JOB_UPDATE_FAILED"
    """Nobody listened any more while the answer was made."""
    PIPE_UNAVAILABLE = "PIPE_UNAVAILABLE"
    """The nodes that are there do not hold all of the model's layers, or not the same weights."""
    NODE_LOST = "NODE_LOST"
    """A node of the pipe was lost, and no other has its layers."""
    NODE_STALLED = "NODE_STALLED"
    """A step did not come back in time, and no other way was left."""
    NO_ROOM = "NO_ROOM"
    """The nodes' caches stayed full, or too many jobs waited, for as long as a job may wait."""
    WRONG_COMPUTATION = "WRONG_COMPUTATION"
    """A node gave back what can't be right: not a number, another shape, or not what the origin
    computed itself."""


class LlmFailure(Exception):
    """A model did not answer, or can't be used."""

    def __init__(self, code: LlmCode, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.facts: Mapping[str, Any] = facts
        """For programs, as `prompt_tokens` and `context` of CONTEXT_EXCEEDED."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What is known of a model."""

    name: str
    path: str = ""
    """Its file; of a split model, the first part."""
    size: int = 0
    """Bytes of its file, or of all its parts."""
    architecture: str = ""
    parameters: int = 0
    quantisation: str = ""
    train_context: int = 0
    """Tokens that it was trained for."""
    context: int = 0
    """Tokens that one job may have here; 0 while it is not loaded."""
    slots: int = 0
    """Jobs that it computes at once; 0 while it is not loaded."""
    loaded: bool = False
    tools: bool | None = None
    """None while it is not known: the template tells when it is loaded."""
    vision: bool = False
    memory: int = 0
    """Bytes that it takes, estimated before it is loaded and read off afterwards."""


def is_model_name(name: str) -> bool:
    """Letters, digits, `_` and `-`, in words with single dots between: a part of a topic."""
    return len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None


def resolve_name(wanted: str, names: Iterable[str], *, hint: str = "") -> str:
    """The name that is meant: exactly, or by a part that no other name has, ignoring case.

    Raises NotFound, which names similar ones, and InvalidRequest if several are meant.
    """
    known = list(names)
    if wanted in known:
        return wanted
    part = wanted.lower().removesuffix(_LATEST).removesuffix(".gguf")
    exact = [one for one in known if one.lower() == part]
    found = exact or [one for one in known if part and part in one.lower()]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest("model", f"{wanted[:150]!r} may be {_either(found)}")
    raise no_such_model(wanted, known, hint)


def no_such_model(wanted: str, names: Iterable[str], hint: str = "") -> NotFound:
    """The hint names similar ones, if there are any."""
    near = difflib.get_close_matches(wanted, list(names), n=3, cutoff=0.4)
    return NotFound(
        f"there is no model {wanted[:150]!r}", hint=f"is it {_either(near)}?" if near else hint
    )


def _either(names: Sequence[str]) -> str:
    *others, last = sorted(names)[:8]
    return f"{', '.join(others)} or {last}" if others else last


def public_facts(facts: ModelFacts) -> dict[str, Any]:
    """What every caller may know of a model: nothing of the machine."""
    return {
        "size": facts.size,
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "quantisation": facts.quantisation,
        "train_context": facts.train_context,
        "context": facts.context,
        "vision": facts.vision,
    }
