"""OpenAI's API: each request becomes a job like any other.

A request is checked, submitted as one job with the topic of its model, and answered when that job
has ended, or piece by piece while it runs. Nothing here computes or decides who may: the EngineApi
does, as for every other API.
"""

from __future__ import annotations

from penstock.api.openai import batches, messages, models, responses
from penstock.api.openai.endpoints import MODEL_ENDPOINTS
from penstock.api.openai.errors import problem_reply

OPERATIONS = (
    *(one.operation() for one in MODEL_ENDPOINTS),
    *responses.OPERATIONS,
    *messages.OPERATIONS,
    *models.OPERATIONS,
    *batches.OPERATIONS,
)

__all__ = ["OPERATIONS", "problem_reply"]
