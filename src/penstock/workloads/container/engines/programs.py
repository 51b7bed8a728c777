"""Helper programs, run to their end (skopeo, a credential helper, a runtime), and the end of other
processes."""

from __future__ import annotations

import asyncio
import contextlib

from msgspec import Struct


class Ended(Struct, frozen=True):
    """How a program ended, and what it said."""

    code: int
    stdout: bytes
    stderr: bytes


async def run_program(*command: str, stdin: bytes = b"", timeout: float | None = None) -> Ended:
    """Raises OSError if it can't be started, and TimeoutError. Nothing of it goes on afterwards."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout):
            stdout, stderr = await process.communicate(stdin or None)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return Ended(process.returncode or 0, stdout, stderr)


async def process_end(fd: int, timeout: float | None = None) -> bool:
    """Until the process of this pidfd has ended; False if it has not within the time."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(timeout):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True
