"""What a client asks to be spooled, and whether it can be."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from penstock.core.errors import InvalidRequest, TooLarge
from penstock.workloads.spool.ids import check_job_id
from penstock.workloads.spool.images import check_image
from penstock.workloads.spool.meta import checked as checked_options
from penstock.workloads.spool.options import JobKind, SpoolOptions

MAX_PROMPT = 10_000_000
MAX_TAGS = 1000
MAX_IMAGES = 1000
_TAG = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


class Submission(Struct, frozen=True, kw_only=True):
    prompt: str | bytes
    kind: JobKind = JobKind.TEXT
    options: SpoolOptions = SpoolOptions()
    images: tuple[Path, ...] = ()
    parent: str | None = None
    """The job that this one goes on from."""
    tags: tuple[str, ...] = ()
    retry_of: str | None = None


class Checked(Struct, frozen=True, kw_only=True):
    """A submission that can be spooled."""

    prompt: bytes
    kind: JobKind
    options: SpoolOptions
    images: tuple[Path, ...]
    parent: str
    tags: tuple[str, ...]
    retry_of: str


def checked(job: Submission) -> Checked:
    """InvalidRequest, naming what is wrong; TooLarge where something is."""
    return Checked(
        prompt=_prompt(job),
        kind=_kind(job),
        options=checked_options(job.options),
        images=_images(job),
        parent=check_job_id(job.parent, "parent") if job.parent else "",
        tags=_tags(job),
        retry_of=check_job_id(job.retry_of, "retry_of") if job.retry_of else "",
    )


def _prompt(job: Submission) -> bytes:
    prompt = job.prompt
    try:
        data = prompt.encode() if isinstance(prompt, str) else bytes(prompt)
        data.decode()
    except UnicodeError:
        raise InvalidRequest("prompt", "is not UTF-8") from None
    if len(data) > MAX_PROMPT:
        raise TooLarge("prompt", f"has {len(data)} bytes; {MAX_PROMPT} is the most")
    if not data and not (job.kind is JobKind.EMBED and job.images):
        raise InvalidRequest("prompt", "is empty")
    return data


def _kind(job: Submission) -> JobKind:
    if job.kind is JobKind.TEXT and job.images:
        return JobKind.VISION
    if job.kind is JobKind.VISION and not job.images:
        raise InvalidRequest("images", "a job of kind vision has at least one")
    if job.kind is JobKind.TTS and job.images:
        raise InvalidRequest("images", "a job of kind tts has none")
    return job.kind


def _images(job: Submission) -> tuple[Path, ...]:
    if len(job.images) > MAX_IMAGES:
        raise TooLarge("images", f"are {len(job.images)}; {MAX_IMAGES} is the most")
    images = tuple(map(Path, job.images))
    for image in images:
        check_image(image)
    return images


def _tags(job: Submission) -> tuple[str, ...]:
    if len(job.tags) > MAX_TAGS:
        raise TooLarge("tags", f"are {len(job.tags)}; {MAX_TAGS} is the most")
    for tag in job.tags:
        if not _TAG.fullmatch(tag):
            raise InvalidRequest(
                "tags", f"{tag[:80]!a} can't be one", hint="1 to 64 letters, digits, - and _"
            )
    return tuple(job.tags)
