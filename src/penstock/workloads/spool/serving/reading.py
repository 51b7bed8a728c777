"""What a job's folder says. Whatever is wrong with it raises Unfit, which says what."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from msgspec import Struct

from penstock.workloads.spool.disk import Unfit, read_file, read_text
from penstock.workloads.spool.images import MAX_IMAGE
from penstock.workloads.spool.meta import Meta, read_kind, read_meta, read_options
from penstock.workloads.spool.options import JobKind, SpoolOptions
from penstock.workloads.spool.submission import MAX_PROMPT

PROMPT = "prompt.txt"
IMAGES = "images"
_MAX_IMAGES = 256 << 20
"""Bytes of all images of a job: they are all in memory at once."""


class Gone(Exception):
    """A folder that somebody took away."""


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
        raise Gone(path.name) from None


def read_job(folder: Path) -> Spooled:
    kind, options = read_kind(folder), read_options(folder)
    images = read_images(folder)
    return Spooled(
        job_id=folder.name,
        kind=kind,
        prompt=read_prompt(folder, needed=not (options.messages or images)),
        options=options,
        meta=read_meta(folder),
        images=images,
    )


def read_prompt(folder: Path, *, needed: bool = True) -> str:
    try:
        prompt = read_text(folder / PROMPT, MAX_PROMPT)
    except FileNotFoundError:
        is_folder(folder)
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
    except (Gone, FileNotFoundError):
        return ()
    images: list[bytes] = []
    for name in names:
        images.append(read_file(folder / IMAGES / name, MAX_IMAGE))
        if sum(map(len, images)) > _MAX_IMAGES:
            raise Unfit(IMAGES, f"are larger than {_MAX_IMAGES} bytes together")
    return tuple(images)
