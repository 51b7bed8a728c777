"""The parent's side: one process with one model, until it is ready, and until it is gone."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import msgspec

from penstock.adapters.llama import child, failures
from penstock.adapters.llama.machine import Size, memory_kills
from penstock.workloads.llm.runner import Loading
from penstock.workloads.llm.values import LlmCode, LlmFailure

PACKAGE = "xllamacpp"
_CHECK_TIMEOUT = 60.0
"""Seconds that loading the library may take on a busy machine."""
_ERRORS = 200
"""Lines of standard error that are kept."""
MEAN = "LLAMA_POOLING_TYPE_MEAN"
_SOCKET = "llama.sock"
_PREFIX = "penstock-llm-"
_OLD = 86_400.0
"""Seconds after which nobody is loading any more."""
_LONGEST = 104
"""Bytes of a path that a socket may have, with room to spare."""
_LAST_WORDS = 1.0
"""Seconds that are waited for what a dead process still had to say."""
_LOOK = 0.1
"""Seconds between two looks at how far loading is."""
_EXTRA_HTTP = 4
"""Threads beyond those that answer, and those that have yet to see that nobody listens: for
questions about the engine itself."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which model a process is for, and what with."""

    model: str
    path: str
    size: Size
    projector: str = ""
    embedding: bool = False
    pooling: str = ""
    """How the vectors of tokens become that of a text; the model's own way if it is empty."""
    spin: bool = False
    gpu_layers: int = -1
    tensor_split: tuple[float, ...] = ()
    projector_gpu: bool = True
    waiting: int = 0
    """Answers that wait inside of the engine, so that no slot is empty when others end."""


def plan_of(spec: EngineSpec, socket: str, key: str) -> dict[str, Any]:
    """What a child is told."""
    return {
        **msgspec.to_builtins(spec),
        "parent": os.getpid(),
        "socket": socket,
        "key": key,
        "http_threads": 2 * (spec.size.slots + spec.waiting) + _EXTRA_HTTP,
    }


class EngineProcess:
    """A child with one model. `start()` first; `close()` in the end, whatever happened."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.key = secrets.token_hex(16)
        self.errors: deque[str] = deque(maxlen=_ERRORS)
        """The last that it wrote to standard error."""
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[int] = self._loop.create_future()
        """Done, with the exit status, when the process is no more."""
        self._ready: asyncio.Future[dict[str, str]] = self._loop.create_future()
        self._folder = _folder()
        self.socket = self._folder / _SOCKET
        self._popen = self._spawn()
        self.pid = self._popen.pid
        self._kills = memory_kills()
        self._killed_for_memory = False
        """Known once it is gone."""
        self._threads = [
            threading.Thread(target=self._hear, args=(self._popen.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._popen.stderr,), daemon=True),
            threading.Thread(target=self._await_end, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        return not self.gone.done()

    @property
    def memory(self) -> int:
        """Bytes that it takes now; the estimate where that can't be read."""
        return resident(self.pid) or self.spec.size.memory

    def beside(self, name: str) -> Path:
        """A file in its private folder."""
        return self._folder / name

    async def start(self, on_progress: Loading, timeout: float) -> None:
        """Return when the model is loaded. Raises LlmFailure saying why it can't be."""
        self._tell()
        looking = asyncio.ensure_future(self._look(on_progress))
        try:
            async with asyncio.timeout(timeout):
                await _first(self._ready, self.gone)
        except TimeoutError:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR,
                f"the model {self.spec.model} was not loaded within {timeout:g} seconds",
            ) from None
        finally:
            looking.cancel()
        said = self._ready.result() if self._ready.done() else {}
        if said.get("event") != "ready":
            raise await self._why(said)

    def kill(self) -> None:
        """End it at once. `gone` tells when it is."""
        self._popen.kill()

    async def close(self) -> None:
        """End it, and leave nothing of it."""
        self.kill()
        await asyncio.shield(self.gone)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def death(self) -> LlmFailure:
        """Why it died, for those who waited for an answer."""
        status = await asyncio.shield(self.gone)
        return failures.of_death(self.spec.model, status, self.errors, self._killed_for_memory)

    def begin_answer(self) -> None:
        """It is alive: no kill until now was its own."""
        self._kills = memory_kills()

    async def _why(self, said: dict[str, str]) -> LlmFailure:
        if said.get("event") == "missing":
            return failures.of_import(said["why"])
        status = await asyncio.shield(self.gone)
        if not said and status > 0:
            return failures.of_child(status, self.errors)
        return failures.of_loading(self.spec, status, self.errors, self._killed_for_memory)

    def _spawn(self) -> subprocess.Popen[bytes]:
        # In the thread of the event loop: the kernel ends the child with the thread that made it.
        try:
            return subprocess.Popen(
                [sys.executable, "-P", child.__file__, str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(self.spec),
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _tell(self) -> None:
        plan = plan_of(self.spec, str(self.socket), self.key)
        pipe = self._popen.stdin
        assert pipe is not None
        with suppress(BrokenPipeError, ValueError):  # it is dead, or closed: that will be told
            pipe.write(msgspec.json.encode(plan) + b"\n")
            pipe.flush()

    async def _look(self, on_progress: Loading) -> None:
        """Tell how far loading is, by how much memory it has."""
        furthest = 0.0
        while True:
            furthest = max(furthest, resident(self.pid) / self.spec.size.memory)
            on_progress(min(0.95, furthest), "loading the model")
            await asyncio.sleep(_LOOK)

    # -- in threads of their own -----------------------------------------------------------

    def _hear(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                try:
                    said = msgspec.json.decode(line, type=dict[str, str])
                except msgspec.DecodeError:  # something printed it before the child spoke
                    if line.strip():
                        self.errors.append(line.decode("utf-8", "replace").rstrip())
                    continue
                if said.get("event") != "loading":
                    self._call(_settle, self._ready, said)

    def _await_end(self) -> None:
        """Not by the end of its pipes: a process that it left behind may hold them open."""
        status = self._popen.wait()
        self._killed_for_memory = memory_kills() > self._kills
        for thread in self._threads[:2]:
            thread.join(_LAST_WORDS)
        if self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()
        self._call(_settle, self.gone, status)

    def _read_errors(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self.errors.append(line.decode("utf-8", "replace").rstrip())

    def _call(self, do: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(do, *args)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _environment(spec: EngineSpec) -> dict[str, str]:
    """Threads that wait for each other sleep, unless spinning is wished for. Our settings, with
    their keys, are no business of what reads a model's file."""
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    waiting = {} if spec.spin else {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    return {**theirs, **waiting}


def _folder() -> Path:
    """A private folder with a path that is short enough for a socket."""
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) + len(_PREFIX) + len(_SOCKET) + 10 > _LONGEST:
        place = "/tmp"
    _tidy(Path(place))
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))


def _tidy(place: Path) -> None:
    """A parent and child that were killed while loading leave a folder, perhaps with a socket."""
    for old in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = old.lstat()
            is_old = time.time() - found.st_mtime > _OLD
            if is_old and found.st_uid == os.getuid() and not _is_served(old / _SOCKET):
                shutil.rmtree(old, ignore_errors=True)


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # as when it is too busy to say
            pass
        return True


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 where that can't be read."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- availability ---------------------------------------------------------------------------


@functools.cache  # reading a package's metadata takes milliseconds, and every answer names it
def engine_version() -> str:
    """As `xllamacpp 2026.10.11549`. Raises LlmFailure if it is not installed. Whether it can be
    loaded is seen when a model is: that is done in a process of its own."""
    try:
        return f"{PACKAGE} {metadata.version(PACKAGE)}"
    except metadata.PackageNotFoundError:
        raise failures.of_import(f"No module named {PACKAGE!r}") from None


def check_engine() -> str:
    """Its version, after it was loaded in a process of its own; takes a second or so. Raises
    LlmFailure, which says what is missing and how to get it."""
    version = engine_version()
    with tempfile.TemporaryDirectory(prefix="penstock-llm-check-") as folder:
        command = [sys.executable, "-P", child.__file__, folder, child.CHECK]
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CHECK_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR, f"llama.cpp was not loaded within {_CHECK_TIMEOUT:g} seconds"
            ) from None
    for line in ended.stdout.splitlines():
        try:
            said = msgspec.json.decode(line, type=dict[str, str])
        except msgspec.DecodeError:
            continue
        if said.get("event") == "missing":
            raise failures.of_import(said.get("why", ""))
        return version
    raise failures.of_child(ended.returncode, ended.stderr.decode(errors="replace").splitlines())
