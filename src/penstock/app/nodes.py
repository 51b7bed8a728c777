"""Nodes of split models as processes: what a node runs in, its children, and where to find it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from penstock.config.loading import variable
from penstock.config.settings import NodeDtype
from penstock.core.errors import PenstockError, Unavailable
from penstock.workloads.pipes.config import AUTO
from penstock.workloads.pipes.setup import pipe_config
from penstock.workloads.pipes.status import NodeChange, PipesView, changes
from penstock.workloads.pipes.views import view_of

if TYPE_CHECKING:
    from penstock.app.application import App
    from penstock.config import Settings
    from penstock.ports.executor import Executor
    from penstock.workloads.pipes.config import LpConfig
    from penstock.workloads.pipes.executor import Host
    from penstock.workloads.pipes.node import Node
    from penstock.workloads.pipes.weights.source import Source

log = logging.getLogger("penstock.cli")

USUAL_HTTP = "127.0.0.1:7470"
OnProgress = Callable[[float, str], None]

# -- files that say where nodes are ------------------------------------------------


class NodeFile(Struct, frozen=True, kw_only=True):
    """Where a node of this data folder listens, and which process it is."""

    node_id: str
    address: str
    pid: int
    model: str = ""


@contextmanager
def announced(folder: Path, node: NodeFile) -> Iterator[None]:
    """A file for it, as long as it runs."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"{node.node_id}.json"
    new = folder / f".{node.node_id}.{node.pid}"
    new.write_bytes(msgspec.json.encode(node))
    new.replace(file)
    try:
        yield
    finally:
        with suppress(OSError):
            if _read(file) == node:
                file.unlink()


def node_files(folder: Path) -> list[NodeFile]:
    """Those whose processes are there, the youngest first. What others left is removed."""
    found = []
    for file in sorted(folder.glob("*.json"), key=_age):
        node = _read(file)
        if node is not None and _lives(node.pid):
            found.append(node)
        else:
            with suppress(OSError):
                file.unlink()
    return found


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:
        return 0.0


def _read(file: Path) -> NodeFile | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=NodeFile)
    except (OSError, msgspec.MsgspecError):
        return None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


# -- what a node runs in -----------------------------------------------------------


class NodeRunner(Protocol):
    """A node, whatever it lives in."""

    @property
    def url(self) -> str:
        """Where the HTTP API of its engine is, if it has one here."""

    @property
    def node(self) -> Node:
        """Once it was started."""

    async def start(self) -> None: ...

    async def wait(self) -> None:
        """Until it fails; raises why."""

    async def stop(self) -> None:
        """It drains first."""


def node_runner(
    settings: Settings,
    on_progress: OnProgress,
    *,
    no_http: bool,
    join: tuple[Any, str] | None = None,
    engine_there: Callable[[], Awaitable[None]] | None = None,
) -> NodeRunner:
    """What a node of these settings runs in; mistakes are found before anything takes long.

    `join`: the address and token of an engine whose worker it becomes, once it is there.
    """
    from penstock.workloads.pipes.weights.source import needs_engine

    needs_engine()
    config = pipe_config(settings)
    assert config is not None
    from penstock.workloads.pipes.wire.identity import Identity

    Identity.make(config.key, config.node_id or "node")
    if join is not None:
        return _Worker(settings, on_progress, *join, engine_there)
    if config.end_model:
        return _Engine(settings, on_progress, no_http=no_http)
    return _Alone(config, on_progress)


class _Alone:
    """A layer node: it needs no engine."""

    url = ""

    def __init__(self, config: LpConfig, on_progress: OnProgress) -> None:
        from penstock.workloads.pipes.node import Node

        self.node: Node = Node(config)
        self._on_progress = on_progress

    async def start(self) -> None:
        await self.node.start(self._on_progress)

    async def wait(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        await self.node.stop()


class _Hosted:
    """A node that an executor starts."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._node: Node | None = None
        self.there = asyncio.Event()

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    def executors(self, app: App | None, settings: Settings) -> list[Executor]:
        """Those that the settings make, with one for this node."""
        from penstock.app.application import make_executors
        from penstock.workloads.pipes.executor import PipesExecutor

        others = make_executors(app, settings.changed(node__model=""))
        own = PipesExecutor(pipe_config(settings), self._host)
        return [one for one in others if not isinstance(one, PipesExecutor)] + [own]

    def _host(self, config: LpConfig) -> Host:
        from penstock.workloads.pipes.runner import NodeHost

        hosted = self

        class Shown(NodeHost):
            async def start(self, on_progress: Callable[[float, str], None]) -> None:
                await super().start(hosted._on_progress)
                hosted._node = self.runner.node
                hosted.there.set()

        return Shown(config)


class _Engine:
    """An origin: an engine of its own, as of `penstock up`."""

    def __init__(self, settings: Settings, on_progress: OnProgress, *, no_http: bool) -> None:
        from penstock.app.engine import Engine

        any_port = not (settings.http.listen or no_http)
        if any_port:
            settings = settings.changed(http__listen=USUAL_HTTP)
        self._hosted = _Hosted(on_progress)
        executors: Sequence[Executor] = self._hosted.executors(None, settings)
        self._engine = Engine(settings, executors, any_port=any_port)
        self._started = False

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def node(self) -> Node:
        return self._hosted.node

    async def start(self) -> None:
        await self._engine.start()
        self._started = True

    async def wait(self) -> None:
        await self._engine.wait()

    async def stop(self) -> None:
        if self._started:
            await self._engine.stop()


class _Worker:
    """A worker of an engine that runs elsewhere."""

    url = ""

    def __init__(
        self,
        settings: Settings,
        on_progress: OnProgress,
        address: Any,
        token: str,
        engine_there: Callable[[], Awaitable[None]] | None,
    ) -> None:
        from penstock.app import App
        from penstock.app.worker_process import WorkerProcess

        self._hosted, self._engine_there = _Hosted(on_progress), engine_there
        self._site = WorkerProcess(
            *(App(), address, settings),
            token=token,
            drain_timeout=settings.node.drain,
            make=self._hosted.executors,
        )
        self._working: asyncio.Task[None] | None = None

    @property
    def node(self) -> Node:
        return self._hosted.node

    async def start(self) -> None:
        if self._engine_there is not None:
            await self._engine_there()
        self._working = asyncio.create_task(self._site.run())
        there = asyncio.create_task(self._hosted.there.wait())
        try:
            await asyncio.wait({self._working, there}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
        if self._working.done():
            self._working.result()

    async def wait(self) -> None:
        assert self._working is not None
        await asyncio.shield(self._working)

    async def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(self._working, return_exceptions=True)


# -- a whole network on one machine ------------------------------------------------

_OWN = ("end_model", "node_id", "layers", "listen", "advertise", "join", "local_layers")
"""What is said of this node, and not of its children."""


def node_name() -> str:
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-") or "node"
    return f"{host[:20]}-{secrets.token_hex(2)}"


def open_model(settings: Settings) -> Source:
    from penstock.workloads.pipes.setup import pipe_source
    from penstock.workloads.pipes.weights.source import open_source

    return open_source(pipe_source(settings)[1])


def measured_once(source: Source, settings: Settings) -> Settings:
    """All compute in the same: measuring at the same time, each would find something else."""
    from penstock.workloads.pipes.device import device_of
    from penstock.workloads.pipes.measure import measured
    from penstock.workloads.pipes.weights.source import architecture_of

    if settings.node.dtype.value != AUTO or device_of(settings.node.device).type != "cpu":
        return settings
    choice = measured(architecture_of(source).linears, settings.node.threads)
    return settings.changed(node__dtype=NodeDtype(choice.dtype))


def shared(settings: Settings, count: int) -> Settings:
    """Each node has its part of the machine, unless it is said what it has."""
    from penstock.workloads.pipes.weights.room import machine_memory

    return settings.changed(
        node__threads=settings.node.threads or max(1, (os.cpu_count() or 1) // count),
        node__memory=settings.node.memory or machine_memory() * 3 // 4 // count,
    )


def cut(source: Source, settings: Settings, count: int) -> dict[str, str]:
    """The layers of each node, by name. All are equally fast, and the first has the ends too.

    They are said once and for all: whoever dies comes back with the same, and nobody else has to
    load them meanwhile.
    """
    from penstock.workloads.pipes.placement import Member, plan
    from penstock.workloads.pipes.weights.source import architecture_of

    model = architecture_of(source)
    ends = model.vocabulary * model.hidden / model.layer_values[0]
    first = settings.node.node_id
    names = [first, *(f"{first}-{number}" for number in range(2, count + 1))]
    found = plan(
        model.num_layers,
        [Member(name, 1.0, model.num_layers, base_ms=ends * (name == first)) for name in names],
        origin=first,
        local_layers=settings.node.local_layers,
    )
    return {name: str(found.ranges[name]) for name in names if name in found.ranges}


def children_of(settings: Settings, ranges: Mapping[str, str]) -> Children:
    from penstock.workloads.pipes.setup import network_key, pipe_source

    model, source = pipe_source(settings)
    key = network_key(settings)
    given = settings.changed(node__model=model, node__source=source, node__key=key)
    commands = {name: ("--node-id", name, "--layers", layers) for name, layers in ranges.items()}
    return Children(commands, {**os.environ, **_environment(given)}, settings.node.drain)


def _environment(settings: Settings) -> dict[str, str]:
    """What a child is told, the key too: options of a process can be seen by others."""
    return {
        variable(f"node.{name}"): _text(value)
        for name, value in asdict(settings.node).items()
        if name not in _OWN
    } | {"PENSTOCK_DATA_DIR": str(settings.data_dir)}


def _text(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    return msgspec.json.encode(value).decode()


_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR, "critical": logging.ERROR}
_TRIES = 3
"""How often a child may be killed before it was ever there."""
_LAST = 5.0
"""Seconds beyond its drain after which a child that was asked to end is ended."""

Joined = Callable[[Iterable[str]], None]


class Children:
    """One process for each list of arguments, by name."""

    def __init__(
        self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], drain: float
    ) -> None:
        self._commands, self._environment, self._drain = commands, environment, drain
        self._children = {name: _Child(self, name) for name in commands}
        self._keeping: list[asyncio.Task[None]] = []
        self._join: Joined | None = None
        self._failed: asyncio.Future[None] | None = None

    @property
    def pids(self) -> Mapping[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def start(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        self._keeping = [asyncio.create_task(one.keep()) for one in self._children.values()]

    def attach(self, join: Joined) -> None:
        """Whoever is there, and whoever comes, is joined."""
        self._join = join
        join([child.address for child in self._children.values() if child.address])

    async def wait(self) -> None:
        """Until one of them can't be started; raises why."""
        assert self._failed is not None
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Ask all to end, and see to it."""
        for child in self._children.values():
            child.ask_to_end()
        _, late = await asyncio.wait(self._keeping, timeout=self._drain + _LAST)
        for child in self._children.values():
            child.kill()
        await asyncio.gather(*late, return_exceptions=True)
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()

    # -- what a child calls -------------------------------------------------------

    async def spawn(self, name: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", "node", "start", *self._commands[name]),
            *("--json", "--with-parent"),
            env=dict(self._environment),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            # Ctrl-C is for this process alone, which asks them to end when it is time.
            start_new_session=True,
        )

    def is_there(self, address: str) -> None:
        if self._join is not None:
            self._join([address])

    def can_not_start(self, name: str, why: str) -> None:
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(Unavailable(f"node {name} can't be started: {why}"))


class _Child:
    def __init__(self, children: Children, name: str) -> None:
        self._children, self._name = children, name
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False
        self._last = ""
        self.address = ""
        """Where it listens, while it is there."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def is_ending(self) -> bool:
        return self._ending

    def ask_to_end(self) -> None:
        self._ending = True
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def keep(self) -> None:
        """Run it until it is asked to end."""
        pause, tries, was_there = _FIRST_PAUSE, 0, False
        while not self.is_ending():
            code = await self._run()
            lived, self.address = bool(self.address), ""
            was_there |= lived
            if self.is_ending():
                return
            why = self._last if code > 0 and self._last else _ended(code)
            tries += 1
            if not was_there and (code > 0 or tries == _TRIES):
                self._children.can_not_start(self._name, why)
                return
            log.warning("%s ended: %s; it is started again", self._name, why)
            pause = _FIRST_PAUSE if lived else min(pause * 2, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _run(self) -> int:
        self._process = process = await self._children.spawn(self._name)
        if self._ending:
            self.kill()
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(self._listen(process.stdout), self._relay(process.stderr))
        return await process.wait()

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            with suppress(msgspec.DecodeError):
                told = msgspec.json.decode(line)
                if told.get("what") == "here":
                    self.address = told["address"]
                    self._children.is_there(self.address)

    async def _relay(self, lines: asyncio.StreamReader) -> None:
        """Pass on what it warns of."""
        async for line in lines:
            text = line.decode("utf-8", "replace").rstrip()
            said = text.removeprefix("penstock: ") if text.startswith("penstock: ") else text[9:]
            level, colon, rest = said.partition(": ")
            if colon and level in _LEVELS:
                log.log(_LEVELS[level], "%s: %s", self._name, rest)
            else:
                log.debug("%s: %s", self._name, said)
            if text.startswith("penstock: ") or (colon and level in _LEVELS):
                self._last = rest if level in _LEVELS else said


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


# -- a node while it runs ----------------------------------------------------------

_SETTLE = 0.05
"""Seconds in which changes that belong together come together."""
_LOOK = 60.0


def stay_with_parent() -> None:
    """End with the parent process, however that ends: standard input is closed then."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if os.isatty(0):
        raise PenstockError("--with-parent is for processes that are started by another")
    threading.Thread(target=watch, daemon=True).start()


async def first_failure(waiting: Coroutine[Any, Any, None], children: Children | None) -> None:
    """Wait until one of them fails."""
    if children is None:
        return await waiting
    tasks = [asyncio.create_task(waiting), asyncio.create_task(children.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def watching(node: Node, tell: Callable[[NodeChange], None]) -> AsyncIterator[None]:
    """Tell every change in the network, as this node sees it."""
    reasons: dict[str, str] = {}
    node.mesh.on_lost.append(reasons.__setitem__)

    async def watch() -> None:
        before = PipesView(nodes=tuple(n for n in seen_by(node).nodes if n.node_id == node.node_id))
        while True:
            after = seen_by(node)
            for one in changes(before, after, reasons):
                tell(one)
            reasons.clear()
            before = after
            await node.changed(_LOOK)
            await asyncio.sleep(_SETTLE)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def seen_by(node: Node) -> PipesView:
    return view_of(node.mesh.table.live())
