"""The OpenAI door: what programs that speak OpenAI's API ask becomes jobs like any other.

A request is checked, submitted as one job with the topic of its model, and answered when that job
has ended, or piece by piece while it runs. Nothing here computes or decides who may: the EngineApi
does, as for every other door.
"""

from __future__ import annotations

from penstock.api.openai import batches, chat, completions, embeddings, files, models

OPERATIONS = (
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *embeddings.OPERATIONS,
    *models.OPERATIONS,
    *files.OPERATIONS,
    *batches.OPERATIONS,
)
