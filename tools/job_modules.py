"""Prints the modules that one no-op job passes, from `submit` to its result, in one process.

`python tools/job_modules.py`; ARCHITECTURE.md has the list.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import threading
import time
from types import FrameType
from typing import Any

import penstock

app = penstock.App()
seen: set[str] = set()


@app.job("job.noop")
async def noop(sent: int = 0) -> None:
    pass


def note(frame: FrameType, event: str, _: Any) -> None:
    _, found, module = frame.f_code.co_filename.rpartition("/penstock/")
    if event == "call" and found:
        seen.add(module)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, app.run(folder) as client:
        client.submit("job.noop", {"sent": 0}).result(timeout=10)  # everything is loaded
        loops = [one for one in gc.get_objects() if isinstance(one, asyncio.AbstractEventLoop)]
        is_noted = threading.Event()
        for loop in loops:
            if loop.is_running():
                loop.call_soon_threadsafe(sys.setprofile, note)
                loop.call_soon_threadsafe(is_noted.set)
        is_noted.wait()
        time.sleep(1.0)
        seen.clear()
        sys.setprofile(note)
        client.submit("job.noop", {"sent": 0}).result(timeout=10)
        sys.setprofile(None)
        passed = sorted(seen)
    print(f"{len(passed)} modules")
    print("\n".join(passed))


if __name__ == "__main__":
    main()
