"""From a job's folder to the request to the model."""

from __future__ import annotations

import base64
import os
import secrets
import stat
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from penstock.lifecycles.spool import Status
from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    ImageUrl,
    LlmCode,
    LlmFailure,
    Message,
    TextPart,
)
from penstock.workloads.spool.client.work import (
    IMAGES,
    MAX_IMAGE,
    MAX_IMAGES,
    MAX_PROMPT,
    PROMPT,
    media_type,
)
from penstock.workloads.spool.config import JobKind, SpoolOptions
from penstock.workloads.spool.disk.files import OpenFolder, Unfit, read_file, read_text
from penstock.workloads.spool.disk.job import (
    RESULT,
    JobGone,
    Meta,
    read_kind,
    read_meta,
    read_options,
)
from penstock.workloads.spool.disk.workspace import Workspace, is_job_id, is_original

_MAX_IMAGES = 256 << 20
"""Bytes of all images of a job: they are all in memory at once."""


class Spooled(Struct, frozen=True, kw_only=True):
    """One job, as it was submitted."""

    job_id: str
    kind: JobKind = JobKind.TEXT
    prompt: str = ""
    options: SpoolOptions = SpoolOptions()
    meta: Meta = Meta()
    images: tuple[bytes, ...] = ()


def is_folder(path: Path) -> bool:
    """Whether it is one itself, not a link to one; Gone if it is nothing."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        raise JobGone(path.name) from None


def read_job(folder: OpenFolder) -> Spooled:
    kind, options = read_kind(folder), read_options(folder)
    images = read_images(Path(folder.path)) if folder.has(IMAGES) else ()
    return Spooled(
        job_id=folder.name,
        kind=kind,
        prompt=read_prompt(folder, needed=not (options.messages or images)),
        options=options,
        meta=read_meta(folder),
        images=images,
    )


def read_prompt(folder: OpenFolder, *, needed: bool = True) -> str:
    try:
        prompt = read_text(folder, PROMPT, MAX_PROMPT)
    except FileNotFoundError:
        is_folder(Path(folder.path))
        raise Unfit(PROMPT, "is missing") from None
    if needed and not prompt:
        raise Unfit(PROMPT, "is empty")
    return prompt


def read_images(folder: Path) -> tuple[bytes, ...]:
    """In the order of their names."""
    try:
        if not is_folder(folder / IMAGES):
            raise Unfit(IMAGES, "is not a folder")
        names = sorted(os.listdir(folder / IMAGES))
    except (JobGone, FileNotFoundError):
        return ()
    if len(names) > MAX_IMAGES:
        raise Unfit(IMAGES, f"are {len(names)}; at most {MAX_IMAGES} are allowed")
    images: list[bytes] = []
    size = 0
    for name in names:
        images.append(read_file(folder / IMAGES, name, MAX_IMAGE))
        size += len(images[-1])
        if size > _MAX_IMAGES:
            raise Unfit(IMAGES, f"are larger than {_MAX_IMAGES} bytes together")
    return tuple(images)


MAX_DEPTH = 256
_PARENT = "parent"
_LOOKS = 10
"""How often the parents are read, while somebody moves them."""


class ParentFailed(Exception):
    """A job can't go on from its parent; says why."""


class NotYet(Exception):
    """The parent has not ended: the job waits for it."""


class ParentHistory(Struct, frozen=True, kw_only=True):
    """What was said before a job, from the first job of its conversation on."""

    system: str = ""
    messages: tuple[Message, ...] = ()
    text: str = ""
    """The same as plain text, for a raw prompt."""


class Parents:
    """Reads the jobs that a job goes on from."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def history(self, job: Spooled) -> ParentHistory:
        """Raises ParentFailed, NotYet, or Unfit if a parent's files are."""
        for _ in range(_LOOKS):
            try:
                return self._read(job)
            except JobGone:  # a parent was cleaned or queued again while it was read: look again
                continue
            except ParentFailed:
                if is_original(job.job_id):  # the original keeps a parent's name, and no more
                    return ParentHistory()
                raise
        raise ParentFailed(f"a parent of this job, as {job.meta.parent}, is moved all the time")

    def _read(self, job: Spooled) -> ParentHistory:
        """Gone if a parent's folder was taken away meanwhile."""
        system, turns, text, size = "", list[Message](), "", 0
        for folder in reversed(self._chain(job)):
            options = read_options(folder)
            prompt, answer = _said(folder)
            is_folder(folder)  # else what was read of it may be nothing
            given = len(msgspec.json.encode(options.messages)) if options.messages else 0
            size += len(prompt) + len(answer) + given
            if size > MAX_PROMPT:
                raise Unfit(_PARENT, f"the conversation so far is over {MAX_PROMPT} characters")
            system = options.system or system
            turns += options.messages
            if prompt:
                turns.append(Message(role="user", content=prompt))
            turns.append(Message(role="assistant", content=answer))
            text += prompt + answer
        return ParentHistory(system=system, messages=tuple(turns), text=text)

    def _chain(self, job: Spooled) -> list[Path]:
        """The folders of its parents, the nearest first."""
        chain: list[Path] = []
        seen = {job.job_id}
        waiting, parent = False, job.meta.parent
        while parent:
            if not is_job_id(parent):
                raise Unfit(_PARENT, f"{parent[:40]!a} is not a job id")
            if parent in seen:
                raise ParentFailed(f"the parents of this job go in a circle, by {parent}")
            if len(seen) > MAX_DEPTH:
                raise ParentFailed(f"this job has more than {MAX_DEPTH} parents")
            seen.add(parent)
            status = self._workspace.find(parent)
            waiting = waiting or status in (Status.QUEUED, Status.RUNNING)
            folder = self._ended(parent, status)
            chain.append(folder)
            parent = read_meta(folder).parent
            is_folder(folder)
        if waiting:
            raise NotYet(job.meta.parent)
        return chain

    def _ended(self, parent: str, status: Status) -> Path:
        if status is Status.FAILED:
            raise ParentFailed(f"its parent {parent} failed")
        if status is Status.MISSING:
            raise ParentFailed(f"its parent {parent} is missing")
        return self._workspace.of(status, parent)


def _said(folder: Path) -> tuple[str, str]:
    try:
        with OpenFolder(folder) as opened:
            return read_prompt(opened, needed=False), read_text(opened, RESULT, MAX_PROMPT)
    except FileNotFoundError:
        is_folder(folder)
        raise ParentFailed(f"its parent {folder.name} has no text to go on from") from None


def embedding_of(job: Spooled) -> EmbeddingRequest:
    if job.images:
        raise LlmFailure(LlmCode.NOT_SUPPORTED, "embeddings of images are not supported")
    if not job.prompt:
        raise Unfit(PROMPT, "is empty")
    return EmbeddingRequest(inputs=(job.prompt,))


def generation_of(
    job: Spooled, history: ParentHistory, *, max_tokens: int, seed: int
) -> GenerationRequest:
    """`max_tokens` and `seed` are for a job that names none."""
    options = job.options
    ask = {
        "max_tokens": options.max_tokens or max_tokens,
        "stop": options.stop,
        "sampling": sampled(job, seed),
        "logprobs": options.logprobs,
        "schema": options.schema,
        "grammar": options.grammar,
    }
    if options.raw:
        if job.images:
            raise Unfit(IMAGES, "can't be part of a raw prompt")
        return CompletionRequest(prompts=(history.text + job.prompt,), **ask)  # type: ignore[arg-type]
    return ChatRequest(messages=_conversation(job, history), **ask)  # type: ignore[arg-type]


def sampled(job: Spooled, seed: int) -> object:
    given = job.options.sampling
    return given if given.seed is not None else structs.replace(given, seed=seed)


def _conversation(job: Spooled, history: ParentHistory) -> tuple[Message, ...]:
    system = job.options.system or history.system
    turns: list[Message] = [Message(role="system", content=system)] if system else []
    turns += [*history.messages, *job.options.messages]
    if job.images or job.prompt:
        turns.append(Message(role="user", content=_content(job)))
    return tuple(turns)


def _content(job: Spooled) -> str | tuple[TextPart | ImagePart, ...]:
    if not job.images:
        if job.kind is JobKind.VISION:
            raise Unfit(IMAGES, "there are none")
        return job.prompt
    images = tuple(ImagePart(ImageUrl(_data_uri(image))) for image in job.images)
    return (*images, TextPart(job.prompt)) if job.prompt else images


def _data_uri(image: bytes) -> str:
    kind = media_type(image)
    if kind is None:
        raise Unfit(IMAGES, "one is not a JPEG, PNG, GIF or WebP image")
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


_SEEDS = (1 << 32) - 1


def request_for(
    job: Spooled, parents: Parents, max_tokens: int
) -> GenerationRequest | EmbeddingRequest:
    """Raises Unfit, ParentFailed, NotYet, or LlmFailure for what nobody can do."""
    if job.kind is JobKind.TTS:
        raise LlmFailure(LlmCode.NOT_SUPPORTED, "this server has no voice: tts is not supported")
    if job.kind is JobKind.EMBED:
        return embedding_of(job)
    history = parents.history(job) if job.meta.parent else ParentHistory()
    # Told in the metadata, so that an answer can be had again.
    seed = secrets.randbelow(_SEEDS)
    return generation_of(job, history, max_tokens=max_tokens, seed=seed)
