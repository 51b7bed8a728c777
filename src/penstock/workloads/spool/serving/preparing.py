"""From a job's folder to what is asked of the model. Blocking code."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from msgspec import Struct

from penstock.workloads.llm.values import Embedding, Generation, LlmCode, LlmFailure
from penstock.workloads.spool.disk import Unfit
from penstock.workloads.spool.options import JobKind
from penstock.workloads.spool.serving.asking import embedding_of, generation_of
from penstock.workloads.spool.serving.parents import History, Parents
from penstock.workloads.spool.serving.reading import Spooled, is_folder

_SEEDS = (1 << 32) - 1
_ODD = "not-a-folder"


class Prepared(Struct, frozen=True, kw_only=True):
    job: Spooled
    ask: Generation | Embedding


def asked(job: Spooled, parents: Parents, max_tokens: int) -> Generation | Embedding:
    """Raises Unfit, ParentFailed, NotYet, or LlmFailure for what nobody can do."""
    if job.kind is JobKind.TTS:
        raise LlmFailure(LlmCode.NOT_SUPPORTED, "this server has no voice: tts is not supported")
    if job.kind is JobKind.EMBED:
        return embedding_of(job)
    history = parents.history(job) if job.meta.parent else History()
    # Told in the metadata, so that an answer can be had again.
    seed = secrets.randbelow(_SEEDS)
    return generation_of(job, history, max_tokens=max_tokens, seed=seed)


def check_folder(folder: Path, spare: Path) -> None:
    """Unfit if something else lies where a job's folder should: it is put into one first.

    Nothing is ever written through a link that somebody else made. `spare` is a path where a
    folder can be made.
    """
    if is_folder(folder):
        return
    kind = "a symbolic link" if folder.is_symlink() else "not a folder"
    spare.mkdir()
    os.rename(folder, spare / _ODD)
    os.rename(spare, folder)
    raise Unfit("job", f"{folder.name} is {kind}")
