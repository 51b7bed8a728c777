"""What a chat template always begins with is computed once, and given to every slot.

llama.cpp reuses what a slot has computed, but each slot computes its own first. So the first one
does, its state goes through a file, and the others begin with it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import Any

import msgspec

from penstock.workloads.llm.values import LlmFailure

Call = Callable[[str, bytes], Awaitable[dict[str, Any]]]
PREFIX_FILE = "prefix"
_FEWEST = 8
"""Characters that are worth it."""
_encode = msgspec.json.encode
log = logging.getLogger(__name__)


async def prime(call: Call, slots: int) -> None:
    """Only speed is lost if it can't be."""
    try:
        prefix = _shared(await _templated(call, "a"), await _templated(call, "Z"))
        if slots > 1 and len(prefix) >= _FEWEST:
            await _share(call, prefix, slots)
    except LlmFailure as failure:
        log.debug("slots begin without the template: %s", failure)


def _shared(one: str, other: str) -> str:
    """How both begin."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in same)


async def _templated(call: Call, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    return str((await call("/apply-template", _encode(body)))["prompt"])


async def _share(call: Call, prefix: str, slots: int) -> None:
    body = {"prompt": prefix, "n_predict": 0, "id_slot": 0, "cache_prompt": True}
    await call("/completion", _encode(body))
    file = _encode({"filename": PREFIX_FILE})
    await call("/slots/0?action=save", file)
    for slot in range(1, slots):
        await call(f"/slots/{slot}?action=restore", file)
