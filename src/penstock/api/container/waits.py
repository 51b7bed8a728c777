"""Waiting for a job, when a caller asks for it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST = 300.0
"""Seconds; who wants to wait longer asks again."""

Wait = Annotated[float, Meta(ge=0, le=86_400)]


def patience(asked: float) -> float:
    return min(asked, MOST)
