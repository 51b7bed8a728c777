"""Images from a registry, through `skopeo` where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from pathlib import Path

from penstock.workloads.container.engine import Image, ImageNotFound, PullFailed
from penstock.workloads.container.engines.oci.images import ImageStore

_UNKNOWN = ("manifest unknown", "name unknown", "not found", "repository does not exist")


def can_fetch() -> bool:
    return shutil.which("skopeo") is not None


async def fetch(store: ImageStore, reference: str) -> Image:
    """Raises ImageNotFound if nobody has it, or nobody can be asked; PullFailed."""
    program = shutil.which("skopeo")
    if program is None:
        raise ImageNotFound(
            f"There is no image {reference!r} here, and no skopeo to fetch it with; "
            "`penstock container image load FILE` brings one in."
        )
    with tempfile.TemporaryDirectory(prefix="penstock-pull-") as folder:
        file = Path(folder, "image.tar")
        await _run(program, "copy", "--quiet", f"docker://{reference}", f"oci-archive:{file}")
        stop = threading.Event()
        loading = asyncio.ensure_future(
            asyncio.to_thread(store.load, file, reference, digest=True, stopped=stop.is_set)
        )
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            # Else it would go on, and keep others from the store.
            stop.set()
            await asyncio.gather(loading, return_exceptions=True)
            raise


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        text = said.decode(errors="replace").strip()[-500:]
        unknown = any(word in text.lower() for word in _UNKNOWN)
        raise (ImageNotFound if unknown else PullFailed)(text)
