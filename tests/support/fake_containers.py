"""An engine without containers: tests write what happens in them, and when the engine fails.

It is honest where real ones are awkward: a container that writes stands still until somebody
reads, and then no kill comes through either; without a reader its output is lost; a name is
taken until it is removed; calls under way raise an error when the engine dies.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from msgspec import Struct
from msgspec.structs import replace

from penstock.ports.clock import Clock
from penstock.workloads.container.engine import (
    AttachSession,
    BuildFailed,
    BuildRequest,
    Chunk,
    ContainerNotFound,
    ContainerSpec,
    ContainerState,
    ContainerSummary,
    EngineError,
    EngineFacts,
    EngineUnavailable,
    ExitStatus,
    Image,
    ImageNotFound,
    RegistryAuth,
)
from penstock.workloads.container.job import OUTPUT_FOLDER, Stream, Usage

_PIPE = 64 << 10
"""Bytes that a container can write, or be sent, before somebody must read."""


class Say(Struct, frozen=True):
    """Some output."""

    data: bytes
    stream: Stream = Stream.STDOUT
    after: float = 0
    """Seconds after what came before it."""


class Script(Struct, frozen=True, kw_only=True):
    """What happens in the containers of an image, in this order."""

    refuses: type[EngineError] | None = None
    """What `start` raises."""
    says: tuple[Say, ...] = ()
    leaves: Mapping[str, bytes] = {}
    """Files in its output folder."""
    echoes: bool = False
    """It reads its input to the end, and writes it out again."""
    reads: bool = True
    """Whether it takes what it is sent."""
    seconds: float = 0
    """How long it then runs on."""
    exit_code: int | None = 0
    oom: bool = False
    error: str = ""
    heeds_term: bool = True
    term_code: int = 143
    last_words: bytes = b""
    """To stdout, when it is asked to end."""
    usage: Usage = Usage(1 << 20, 0.25)
    usage_after_end: bool = True


class Fault(Struct, frozen=True, kw_only=True):
    """What goes wrong in one call of a method."""

    error: Exception | None = None
    before: float = 0
    """Seconds until it does anything; `math.inf` means never."""
    after: float = 0
    """Seconds between what it does and its answer."""


HANGS = Fault(before=math.inf)
NEVER_ANSWERS = Fault(after=math.inf)
"""It does what it is asked, and says nothing."""


class _Container:
    def __init__(self, plan: ContainerSpec, script: Script, created: float) -> None:
        self.plan, self.script, self.created = plan, script, created
        self.state = ContainerState.CREATED
        self.exit = ExitStatus(None)
        self.reader: _Streams | None = None
        self.unread: list[Chunk] = []
        self.log = {stream: bytearray() for stream in Stream}
        self.given = bytearray()
        self.input_ended = False
        self.life: asyncio.Task[None] | None = None

    def wrote(self, chunk: Chunk) -> None:
        self.log[chunk.stream] += chunk.data
        if self.reader is not None:
            self.unread.append(chunk)

    @property
    def running(self) -> bool:
        return self.state is ContainerState.RUNNING

    @property
    def full(self) -> bool:
        """Whether it stands still because nobody reads what it wrote."""
        return self.reader is not None and sum(len(one.data) for one in self.unread) >= _PIPE


class FakeEngine:
    """Keeps what it was asked to make until it is asked to remove it."""

    name = "fake"
    keeps_output = False
    """Whether it has a log of what a container writes while nobody reads."""

    def __init__(self, clock: Clock, scripts: Mapping[str, Script] | None = None) -> None:
        self._clock = clock
        self.scripts = dict(scripts or {})
        """By the name of the image, for those that are here."""
        self.registry: dict[str, Script] = {}
        """Those that `pull` finds."""
        self.recipe: Script | EngineError = BuildFailed("no recipe")
        """What `build` makes of anything, or raises."""
        self.where = "fake.sock"
        self.build_log = b"Step 1/1 : FROM scratch\n"
        self.containers: dict[str, _Container] = {}
        self.built: dict[str, Image] = {}
        self.calls: list[str] = []
        self.heard: Callable[[str], None] = lambda method: None
        """Told of every call, before it does anything."""
        self.tells_of_death = True
        """Whether who reads output is told when the engine dies, or just sees an end."""
        self._faults: dict[str, list[Fault]] = {}
        self._down = ""
        self._deaths = 0
        self._changed = asyncio.Event()

    # -- what a test does -------------------------------------------------------------------

    def fault(self, method: str, *faults: Fault) -> None:
        """The next calls of it go like that."""
        self._faults.setdefault(method, []).extend(faults)

    def die(self, *, spare: bool = True) -> None:
        """Nobody answers until `revive`; the containers live on or are gone with it."""
        self._down, self._deaths = "the engine died", self._deaths + 1
        for container in self.containers.values():
            container.reader = None
        if not spare:
            for name in list(self.containers):
                self._end(self.containers.pop(name), ExitStatus(137))
        self._ring()

    def cut(self, name: str) -> None:
        """Its streams break off, and nothing else does."""
        container = self.containers[name]
        if container.reader is not None:
            container.reader.broken = True
        container.reader = None
        self._ring()

    def revive(self) -> None:
        self._down = ""

    def leftovers(self) -> list[str]:
        """Containers and built images that nobody removed."""
        return [*self.containers, *self.built]

    def running(self) -> list[str]:
        return [name for name, container in self.containers.items() if container.running]

    async def change(self) -> None:
        """Until something has happened in it."""
        await self._changed.wait()

    # -- images -----------------------------------------------------------------------------

    async def facts(self) -> EngineFacts:
        async with self._call("facts"):
            return EngineFacts(
                name=self.name,
                version="1",
                can_build=True,
                can_pull=True,
                networks=True,
                where=self.where,
            )

    async def image(self, reference: str) -> Image:
        async with self._call("image"):
            for name in self.scripts:
                if reference in (name, image_of(name).id):
                    return image_of(name)
            raise ImageNotFound(f"no such image: {reference}")

    async def pull(self, reference: str, auth: RegistryAuth | None = None) -> Image:
        async with self._call("pull"):
            if reference not in self.registry:
                raise ImageNotFound(f"the registry has no {reference}")
            self.scripts[reference] = self.registry[reference]
            return image_of(reference)

    async def build(self, request: BuildRequest, on_log: Callable[[bytes], None]) -> Image:
        async with self._call("build"):
            on_log(self.build_log)
            if isinstance(self.recipe, EngineError):
                raise self.recipe
            tag = request.tag
            self.scripts[tag] = self.recipe
            self.built[tag] = replace(image_of(tag), labels=dict(request.labels))
            return self.built[tag]

    async def images(self, labels: Mapping[str, str]) -> list[Image]:
        async with self._call("images"):
            every = [self.built.get(name) or image_of(name) for name in self.scripts]
            return [image for image in every if _has(image.labels, labels)]

    async def remove_image(self, reference: str) -> None:
        async with self._call("remove_image"):
            for name in list(self.scripts):
                if reference in (name, image_of(name).id):
                    del self.scripts[name]
                    self.built.pop(name, None)

    # -- containers -------------------------------------------------------------------------

    async def create(self, plan: ContainerSpec) -> None:
        async with self._call("create"):
            script = next(
                (s for n, s in self.scripts.items() if image_of(n).id == plan.image), None
            )
            if script is None:
                raise ImageNotFound(f"no such image: {plan.image}")
            if plan.name in self.containers:
                raise EngineError(f"the name {plan.name} is taken")
            self.containers[plan.name] = _Container(plan, script, self._clock.now())

    async def attach(self, name: str, *, stdin: bool) -> AttachSession:
        async with self._call("attach"):
            container = self._get(name)
            container.reader = _Streams(self, container)
            return container.reader

    async def reattach(self, name: str, received: Mapping[Stream, int]) -> AttachSession:
        async with self._call("reattach"):
            container = self._get(name)
            container.reader = _Streams(self, container)
            container.unread = [Chunk(Stream.STDERR, b"", gap=True)]
            if self.keeps_output:
                missed = ((one, container.log[one][received.get(one, 0) :]) for one in Stream)
                container.unread = [Chunk(one, bytes(data)) for one, data in missed if data]
            return container.reader

    async def start(self, name: str) -> None:
        async with self._call("start"):
            container = self._get(name)
            if container.script.refuses is not None:
                raise container.script.refuses("exec failed")
            container.state = ContainerState.RUNNING
            container.life = asyncio.ensure_future(self._live(container))
            self._ring()

    async def wait(self, name: str) -> ExitStatus:
        async with self._call("wait"):
            container = self._get(name)
            await self.until(lambda: container.state is ContainerState.EXITED)
            return container.exit

    async def usage(self, name: str) -> Usage:
        async with self._call("usage"):
            container = self.containers.get(name)
            if container is None or not (container.running or container.script.usage_after_end):
                return Usage()
            return container.script.usage

    async def signal(self, name: str, number: int) -> None:
        async with self._call("signal"):
            container = self.containers.get(name)
            if container is None or not container.running:
                return
            await self.until(lambda: not container.full)
            if number == signal.SIGTERM and container.script.heeds_term:
                if container.script.last_words:
                    container.wrote(Chunk(Stream.STDOUT, container.script.last_words))
                self._end(container, ExitStatus(container.script.term_code))

    async def kill(self, name: str) -> None:
        async with self._call("kill"):
            container = self.containers.get(name)
            if container is not None and container.running:
                await self.until(lambda: not container.full)
                self._end(container, ExitStatus(137))

    async def remove(self, name: str) -> None:
        async with self._call("remove"):
            container = self.containers.get(name)
            if container is None:
                return
            await self.until(lambda: not container.full)
            self.containers.pop(name, None)
            self._end(container, ExitStatus(137))

    async def find(self, labels: Mapping[str, str]) -> list[ContainerSummary]:
        async with self._call("find"):
            return [
                ContainerSummary(name, one.state, one.plan.labels, one.created)
                for name, one in self.containers.items()
                if _has(one.plan.labels, labels)
            ]

    async def close(self) -> None:
        every = list(self.containers.values())
        for container in every:
            self._end(container, ExitStatus(137))
        lives = [container.life for container in every if container.life is not None]
        await asyncio.gather(*lives, return_exceptions=True)

    # -- how it works -----------------------------------------------------------------------

    def _get(self, name: str) -> _Container:
        if name not in self.containers:
            raise ContainerNotFound(f"no such container: {name}")
        return self.containers[name]

    async def _live(self, container: _Container) -> None:
        script = container.script
        for say in script.says:
            if say.after:
                await self._clock.sleep(say.after)
            await self._write(container, say)
        for mount in container.plan.mounts:
            if mount.target == OUTPUT_FOLDER:
                for path, data in script.leaves.items():
                    (mount.source / path).write_bytes(data)
        if script.echoes:
            await self.until(lambda: container.input_ended)
            await self._write(container, Say(bytes(container.given)))
        if script.seconds:
            await self._clock.sleep(script.seconds)
        self._end(container, ExitStatus(script.exit_code, script.oom, script.error))

    async def _write(self, container: _Container, say: Say) -> None:
        for start in range(0, len(say.data), _PIPE):
            await self.until(lambda: not container.full, mortal=False)
            container.wrote(Chunk(say.stream, say.data[start : start + _PIPE]))
            self._ring()

    def _end(self, container: _Container, how: ExitStatus) -> None:
        if container.state is not ContainerState.EXITED:
            container.state, container.exit = ContainerState.EXITED, how
            if container.life is not None:
                container.life.cancel()
        self._ring()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, true: Callable[[], bool], *, mortal: bool = True) -> None:
        """Wait for it; who waits for an answer (`mortal`) hears of the engine's death."""
        deaths = self._deaths
        while not true():
            await self._changed.wait()
            if mortal and self._deaths != deaths:
                raise EngineUnavailable("the engine died")

    @asynccontextmanager
    async def _call(self, method: str) -> AsyncIterator[None]:
        self.calls.append(method)
        self.heard(method)
        waiting = self._faults.get(method)
        fault = waiting.pop(0) if waiting else Fault()
        self._must_be_up()
        await self._pause(fault.before)
        if fault.error is not None:
            raise fault.error
        yield
        await self._pause(fault.after)

    async def _pause(self, seconds: float) -> None:
        if seconds == math.inf:
            await self.until(lambda: False)
        if seconds:
            await self._clock.sleep(seconds)
            self._must_be_up()

    def _must_be_up(self) -> None:
        if self._down:
            raise EngineUnavailable(self._down)


class _Streams:
    """Of one container, for one reader."""

    def __init__(self, engine: FakeEngine, container: _Container) -> None:
        self._engine, self._container = engine, container
        self.broken = False

    @property
    def _mine(self) -> bool:
        return self._container.reader is self

    async def output(self) -> AsyncIterator[Chunk]:
        container = self._container
        while self._mine:
            if container.unread:
                yield container.unread.pop(0)
                self._engine._ring()
                continue
            if container.state is ContainerState.EXITED:
                return
            try:
                await self._engine.until(lambda: self._over() or bool(container.unread))
            except EngineUnavailable:
                if self._engine.tells_of_death:
                    raise
                return
        if self.broken:
            raise EngineUnavailable("the connection was reset")

    def _over(self) -> bool:
        return not self._mine or self._container.state is ContainerState.EXITED

    async def send(self, data: bytes) -> None:
        container = self._container
        await self._engine.until(
            lambda: container.script.reads or self._over() or len(data) <= _PIPE
        )
        if self._mine:
            container.given += data

    async def end_input(self) -> None:
        if self._mine:
            self._container.input_ended = True
            self._engine._ring()

    def close(self) -> None:
        if self._mine:
            self._container.reader = None
            self._container.unread.clear()
            self._engine._ring()


def image_of(name: str) -> Image:
    """The image that the fake engine has under a name."""
    return Image(id="sha256:" + hashlib.sha256(name.encode()).hexdigest(), tags=(name,))


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(key in labels and value in ("", labels[key]) for key, value in wanted.items())
