"""The files that a job ends with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.workloads.llm.values import EmbeddingResult, LlmResult
from penstock.workloads.spool.ending import ANSWER, EMBEDDING, RESULT

_A_LINE = 10


def of_answer(result: LlmResult) -> dict[str, bytes]:
    """The text, and all of the answer if there is more to it than text."""
    choice = result.choices[0]
    files = {RESULT: choice.text.encode(errors="replace")}
    if choice.logprobs is not None or choice.tool_calls or choice.reasoning:
        files[ANSWER] = msgspec.json.encode(result)
    return files


def of_embedding(result: EmbeddingResult) -> dict[str, bytes]:
    return {EMBEDDING: embedding_json(result.vectors[0])}


def embedding_json(vector: Sequence[float]) -> bytes:
    """As the original writes it: six digits that count, ten numbers a line."""
    numbers = [f"{number:.6g}" for number in vector]
    lines = [", ".join(numbers[at : at + _A_LINE]) for at in range(0, len(numbers), _A_LINE)]
    inner = ",\n    ".join(lines)
    return f'{{\n  "dim": {len(vector)},\n  "vector": [\n    {inner}\n  ]\n}}\n'.encode()
