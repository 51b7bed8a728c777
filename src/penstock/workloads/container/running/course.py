"""One job's way through an engine, from its image to what it leaves behind.

Nothing here decides what the end is called: a `Story` says what was seen, `ending` judges it.
A course that is cancelled (as asyncio cancels) lets go of its container and leaves it running,
for whoever adopts it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from penstock.ports.clock import Clock
from penstock.ports.process import failpoint
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import (
    DEADLINE_LABEL,
    IMAGE_LABEL,
    ContainerEngine,
    ContainerSpec,
    EngineError,
    EngineUnavailable,
    ExitStatus,
    Gpus,
    Image,
    ImageNotFound,
    Mount,
)
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import BadInput, Sandbox
from penstock.workloads.container.files.weighing import Hidden
from penstock.workloads.container.job import Code, ContainerJob, Mode, Usage
from penstock.workloads.container.protocol.policy import chosen_runtime
from penstock.workloads.container.running.attending import Attendance
from penstock.workloads.container.running.ending import Cause, Story, Trouble, number, trouble_of
from penstock.workloads.container.running.measuring import Meter
from penstock.workloads.container.running.patience import (
    Asked,
    Late,
    Stopped,
    drop,
    to_its_end,
    within,
)
from penstock.workloads.container.running.resolving import BuildLog, Resolving
from penstock.workloads.container.running.stopping import end_container

T = TypeVar("T")

_CALL = 60.0
"""Seconds in which an engine makes or starts a container, however busy it is."""
_LAST_CALL = 5.0
"""Seconds for what is worth a try, but not worth waiting for."""
_LOOK_AT_OUTPUT = 0.2
_HIDDEN_LOOKS = 25
_DEADLINE_MARGIN = 600.0
"""Seconds beyond every limit after which a container is certainly nobody's."""
_ENDED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""Exit codes of what a worker ended."""
_MIB = 1 << 20

log = logging.getLogger(__name__)


class Course:
    def __init__(
        self,
        engine: ContainerEngine,
        config: WorkerConfig,
        clock: Clock,
        name: str,
        labels: Mapping[str, str],
        job: ContainerJob,
        sandbox: Sandbox,
        output: Output,
        asked: Asked,
    ) -> None:
        self._engine, self._config, self._clock = engine, config, clock
        self._name, self._labels = name, labels
        self._job, self._sandbox, self._output, self._asked = job, sandbox, output, asked
        self._attendance = Attendance(engine, clock, name, labels, output)
        self._meter = Meter(engine, clock, name)
        self.build_log = BuildLog()
        self.image_id = ""
        self._hidden_looks = 0
        """How often in a row the output folder had a folder that can't be looked into."""
        self.ran = False
        """Whether a container was started, as far as is known."""

    @property
    def usage(self) -> Usage:
        return self._meter.usage

    # -- beginning --------------------------------------------------------------------------

    async def run(self, starts: Callable[[], Awaitable[None]] | None = None) -> Story:
        return await self._told(self._from_the_start(starts))

    async def adopt_running(self, image_id: str, seconds: float) -> Story:
        """Go on with it; so many seconds are left of its time."""
        self.image_id, self.ran = image_id, True
        return await self._told(self._from_the_middle(seconds))

    async def adopt_exited(self, image_id: str, *, out_of_time: bool) -> Story:
        self.image_id, self.ran = image_id, True
        return await self._told(self._from_the_end(out_of_time))

    async def _from_the_start(self, starts: Callable[[], Awaitable[None]] | None) -> Story:
        try:
            image = await self._asked.unless(self._image())
            self.image_id = image.id
            preparing = self._files("inputs", self._sandbox.prepare)
            mounts = await self._asked.unless(preparing)
        except Stopped:
            return self._cancelled()
        await self._create(image, mounts)
        failpoint("container-created")
        if self._asked.requested:
            return self._cancelled()
        await self._attendance.attach(stdin=True)
        self._attendance.feed(self._job.stdin_bytes)
        if starts is not None:
            await starts()
        await self._start()
        failpoint("container-started")
        return await self._see_through(self._job.limits.max_runtime_seconds)

    async def _from_the_middle(self, seconds: float) -> Story:
        await self._attendance.resume()
        return await self._see_through(seconds)

    async def _from_the_end(self, out_of_time: bool) -> Story:
        await self._attendance.resume()  # some engines keep the last of what it wrote
        seen = await self._call(self._attendance.exit(), "say how the container ended")
        await asyncio.gather(self._attendance.finish(), self._meter.look())
        # The worker that died had ended it: nobody else sends these once the time is over.
        ended = out_of_time and seen.code in _ENDED and not seen.oom
        cause = Cause.TIMEOUT if ended else None
        return replace(await self._left_behind(), exit=seen, cause=cause)

    async def _image(self) -> Image:
        resolving = Resolving(self._engine, self._config, self._clock)
        if self._job.mode is not Mode.BUILD:
            return await resolving.image(self._job)
        context = await self._files("runtime.build.context", self._sandbox.build_context)
        tag = built_tag(self._name)
        return await resolving.build(self._job, context, tag, self._labels, self.build_log)

    async def _files(self, field: str, make: Callable[[ContainerJob], Coroutine[Any, Any, T]]) -> T:
        """What a pointer leads to may never come; it has as long as the image has."""
        seconds = self._job.limits.pull_seconds
        try:
            return await within(self._clock, seconds, make(self._job))
        except Late:
            said = f"took longer than {number(seconds)} s to fetch (runtime.limits.pull_seconds)"
            raise BadInput(said, field=field, code=Code.INPUT_UNAVAILABLE) from None

    async def _create(self, image: Image, mounts: tuple[Mount, ...]) -> None:
        try:
            await self._call(self._engine.create(self._plan(image, mounts)), "make a container")
        except ImageNotFound as error:
            raise ImageNotFound(
                f"image {self._job.image!r} was removed from this machine just before the "
                f"container was made: {error}"
            ) from error

    async def _start(self) -> None:
        """Whoever lets go now must leave a container that has been started, or has not."""
        self.ran = True
        try:
            starting = self._call(self._engine.start(self._name), "start the container")
            await to_its_end(starting)
        except EngineUnavailable as error:
            self._attendance.broke_off(error)  # it may run all the same

    def _plan(self, image: Image, mounts: tuple[Mount, ...]) -> ContainerSpec:
        job, limits = self._job, self._job.limits
        most = limits.max_runtime_seconds + self._config.stop_grace + _DEADLINE_MARGIN
        return ContainerSpec(
            name=self._name,
            image=image.id,
            cmd=job.cmd,
            env=job.env,
            user=job.user,
            workdir=job.workdir,
            memory=int(limits.memory_mb * _MIB),
            cpus=limits.cpus,
            pids=limits.pids,
            tmp=int(limits.tmp_mb * _MIB),
            # One more than it may have in all, so that a file that is cut there is seen.
            file_size=limits.max_artifact_bytes + 1 if job.outputs else 0,
            shm=int(limits.shm_mb * _MIB),
            network=job.network,
            mounts=(*mounts, *job.mounts),
            gpus=Gpus.parse(job.gpus),
            read_only_root=job.read_only,
            user_namespace=self._config.user_namespaces,
            runtime=chosen_runtime(self._config, job, image),
            labels={
                **self._labels,
                DEADLINE_LABEL: str(int(self._clock.now() + most)),
                IMAGE_LABEL: image.id,
            },
        )

    # -- running ----------------------------------------------------------------------------

    async def _see_through(self, seconds: float) -> Story:
        ended = asyncio.ensure_future(self._attendance.exit())
        alarm = asyncio.ensure_future(self._clock.sleep(max(seconds, 0.0)))
        watch = asyncio.ensure_future(self._until_too_much())
        looking = asyncio.ensure_future(self._meter.keep_looking())
        try:
            ends = (ended, alarm, watch, self._asked.future)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._while_engine_is_away(ended)
            if ended.done() and not (self._asked.requested and ended.exception()):
                await asyncio.gather(self._attendance.finish(), self._meter.look())
                return replace(await self._left_behind(), exit=ended.result())
            cause = self._cause(watch)
            await drop(alarm, watch)
            return await self._end_it(ended, cause)
        finally:
            await drop(ended, alarm, watch, looking)

    async def _while_engine_is_away(self, ended: asyncio.Future[ExitStatus]) -> None:
        """Whether a container that can't be reached has ended by itself is known only later."""
        if not ended.done() and not self._attendance.present.is_set():
            back = asyncio.ensure_future(self._attendance.present.wait())
            try:
                await asyncio.wait((ended, back), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await drop(back)

    def _cause(self, watch: asyncio.Future[None]) -> Cause:
        if self._asked.requested:
            return Cause.CANCELLED
        return Cause.OUTPUT_LIMIT if watch.done() else Cause.TIMEOUT

    async def _end_it(self, ended: asyncio.Future[ExitStatus], cause: Cause) -> Story:
        ending = end_container(
            self._engine,
            self._clock,
            self._name,
            ended=ended,
            grace=self._config.stop_grace,
            let_go=self._attendance.let_go,
        )
        await asyncio.gather(ending, self._meter.look())
        await asyncio.gather(self._attendance.finish(), self._meter.look())
        story = Story(cause=cause, hidden=self._hidden_looks > 0)
        if cause is Cause.CANCELLED:
            story = self._cancelled()
        if ended.done() and ended.exception() is None:
            return replace(story, exit=ended.result())
        await self._kill()
        return replace(story, stuck=True)

    async def _until_too_much(self) -> None:
        """Until its output folder holds more than it may; for ever if it has none."""
        if not self._job.outputs:
            await asyncio.get_running_loop().create_future()
        while not await self._has_too_much():
            await self._clock.sleep(_LOOK_AT_OUTPUT)

    async def _left_behind(self) -> Story:
        """What is to be said of its output folder once it has ended."""
        too_much = await self._has_too_much(patience=0)
        return Story(too_much_output=too_much, hidden=self._hidden_looks > 0)

    async def _has_too_much(self, patience: int = _HIDDEN_LOOKS) -> bool:
        """A folder that can't be looked into counts as too much, after so many looks: many
        programs make a folder for themselves alone first, and open it when it is complete."""
        if not self._job.outputs:
            return False
        try:
            size = await asyncio.to_thread(self._sandbox.output_size)
            self._hidden_looks = 0
        except Hidden as hidden:
            self._hidden_looks += 1
            return (
                self._hidden_looks > patience or hidden.size > self._job.limits.max_artifact_bytes
            )
        except OSError as error:
            log.warning("the output folder of %s can't be looked at: %s", self._name, error)
            return False
        return size > self._job.limits.max_artifact_bytes

    # -- trouble ----------------------------------------------------------------------------

    async def _told(self, telling: Coroutine[Any, Any, Story]) -> Story:
        try:
            return await telling
        except EngineError as error:
            await self._kill()
            return Story(trouble=trouble_of(self._job, error))
        except Exception as error:
            log.exception("job %s", self._job.job_id)
            await self._kill()
            said = f"the worker itself failed: {type(error).__name__}: {error}"
            return Story(trouble=Trouble(Code.RUNTIME_ERROR, None, said))
        finally:
            await self._attendance.close()

    def _cancelled(self) -> Story:
        return Story(cause=Cause.CANCELLED, reason=self._asked.reason)

    async def _kill(self) -> None:
        """A last try; whoever removes the container tries again."""
        if self.ran:
            self._attendance.let_go()
            with suppress(EngineError, Late):
                await within(self._clock, _LAST_CALL, self._engine.kill(self._name))

    async def _call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        try:
            return await within(self._clock, _CALL, work)
        except Late:
            raise EngineUnavailable(
                f"the container engine did not {what} within {_CALL:g} s"
            ) from None


def built_tag(name: str) -> str:
    """Of the image that is built for a job."""
    return f"{name}:built"
