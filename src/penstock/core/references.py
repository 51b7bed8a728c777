"""Results of other jobs in a job's input.

Where an input has `{"$result_of": "<job id>"}`, and its request says `takes_results`, the job gets
the result of that job instead, which is one of its `after`. It is put in when the job starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

RESULT_OF = "$result_of"


def references(plain: Any) -> Iterator[str]:
    """The ids of the jobs whose results an input has, as it was decoded from JSON."""
    stack = [plain]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            if (job_id := _reference(value)) is not None:
                yield job_id
            else:
                stack += value.values()


def filled(payload: bytes, results: Mapping[str, Raw]) -> bytes:
    """The input with results, each as JSON, in place of the references to these jobs."""

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            if (job_id := _reference(value)) is not None:
                return results.get(job_id, value)
            return {key: fill(item) for key, item in value.items()}
        return value

    return msgspec.json.encode(fill(msgspec.json.decode(payload)))


def _reference(value: dict[str, Any]) -> str | None:
    job_id = value.get(RESULT_OF) if len(value) == 1 else None
    return job_id if isinstance(job_id, str) else None
