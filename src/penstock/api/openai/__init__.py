"""OpenAI's API: each request becomes a job like any other.

A request is checked, submitted as one job with the topic of its model, and answered when that job
has ended, or piece by piece while it runs. Nothing here computes or decides who may: the EngineApi
does, as for every other API.
"""

from __future__ import annotations

from penstock.api.openai import audio, batches, files, messages, models, rerank, responses, tokens
from penstock.api.openai.endpoints import CHAT, COMPLETIONS, EMBEDDINGS
from penstock.api.openai.errors import is_openai_path, problem_reply

MODEL_OPERATIONS = tuple(one.operation() for one in (CHAT, COMPLETIONS, EMBEDDINGS))
OPERATIONS = (
    *MODEL_OPERATIONS,
    *responses.OPERATIONS,
    *messages.OPERATIONS,
    *rerank.OPERATIONS,
    *audio.OPERATIONS,
    *tokens.OPERATIONS,
    *models.OPERATIONS,
    *files.OPERATIONS,
    *batches.OPERATIONS,
)

__all__ = ["MODEL_OPERATIONS", "OPERATIONS", "is_openai_path", "problem_reply"]
