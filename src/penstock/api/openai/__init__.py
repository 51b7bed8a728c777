"""OpenAI's API: each request becomes a job like any other.

A request is checked, submitted as one job with the topic of its model, and answered when that job
has ended, or piece by piece while it runs. Nothing here computes or decides who may: the EngineApi
does, as for every other API.
"""

from __future__ import annotations

from penstock.api.openai import batches, models, responses
from penstock.api.openai.endpoints import MODEL_ENDPOINTS
from penstock.api.openai.errors import OpenAiError, problem_reply
from penstock.api.openai.messages import create_message
from penstock.api.operation import routes_of

_ENDPOINTS = (*MODEL_ENDPOINTS, responses.create_response, create_message)
OPERATIONS = (
    *(one.operation() for one in _ENDPOINTS),
    *routes_of(responses, models, batches, problem=problem_reply, problem_kind=OpenAiError),
)

__all__ = ["OPERATIONS", "problem_reply"]
