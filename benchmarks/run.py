"""Runs measurements, each in a process and a folder of its own, and gathers the figures."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Figures, look
from marks import Marks
from peers import dramatiq, huey, pgqueuer, postgres
from processes import HERE
from side import DRAMATIQ, HUEY, HUEY_FSYNC, PGQUEUER

_TOO_LONG = 1200.0


class MeasurementFailed(Exception):
    pass


def missing(side: str) -> str | None:
    """Why a peer can't be measured here, if so."""
    if side in (HUEY, HUEY_FSYNC) and importlib.util.find_spec("huey") is None:
        return huey.MISSING
    if side == DRAMATIQ:
        if importlib.util.find_spec("dramatiq") is None:
            return dramatiq.MISSING
        if shutil.which("redis-server") is None:
            return dramatiq.MISSING_SERVER
    if side == PGQUEUER:
        if any(importlib.util.find_spec(name) is None for name in ("pgqueuer", "asyncpg")):
            return pgqueuer.MISSING
        if postgres.programs() is None:
            return postgres.MISSING
    return None


def versions() -> dict[str, str]:
    """Which peers these are."""
    found = {
        name: importlib.metadata.version(name)
        for name in ("huey", "pgqueuer", "dramatiq")
        if importlib.util.find_spec(name) is not None
    }
    if (server := shutil.which("redis-server")) is not None:
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
        found["redis-server"] = said.stdout.partition("v=")[2].partition(" ")[0]
    if (postgresql := postgres.version()) is not None:
        found["PostgreSQL"] = postgresql
    return {"peers": ", ".join(f"{name} {version}" for name, version in found.items())}


@contextmanager
def scratch(root: Path | None) -> Iterator[Path]:
    """A folder for one measurement; its path is short, for a socket's sake."""
    folder = Path(tempfile.mkdtemp(prefix="pb-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(side: str, what: str, folder: Path, options: dict[str, Any]) -> Figures:
    """One measurement. Raises MeasurementFailed with what the process said."""
    look()
    marks = Marks.fresh()
    argv = [sys.executable, str(HERE / "side.py"), side, what, str(folder), json.dumps(options)]
    child = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **marks.environment},
    )
    try:
        said, complaint = child.communicate(timeout=_TOO_LONG)
    except BaseException as error:
        child.terminate()  # it ends its own workers, which a kill would leave behind
        said, complaint = child.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        marks.delete()
    if child.returncode != 0:
        last = complaint.strip().splitlines()[-12:]
        raise MeasurementFailed(f"{side}: {what}\n" + "\n".join(last))
    figures: Figures = json.loads(said.splitlines()[-1])
    return figures
