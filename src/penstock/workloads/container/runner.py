"""Runs jobs in containers of one engine, from the image to the end.

What an end is called is decided in `result`. A run that is cancelled (as asyncio cancels) leaves
its container running, with nobody reading, for the worker that adopts it; one that has ended can
be adopted, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from penstock.ports.clock import Clock
from penstock.ports.process import failpoint
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import (
    IMAGE_LABEL,
    JOB_LABEL,
    OWNER_LABEL,
    ContainerEngine,
    ContainerSpec,
    ContainerState,
    ContainerSummary,
    EngineError,
    EngineUnavailable,
    ExitStatus,
    Gpus,
    Image,
    ImageNotFound,
    Mount,
    WorkerFailure,
    command_failure,
)
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import BadInput, Sandbox
from penstock.workloads.container.files.tree import Hidden
from penstock.workloads.container.images import BuildLog, ImageResolver, PulledImages
from penstock.workloads.container.job import (
    ContainerJob,
    ContainerResult,
    ErrorCode,
    Mode,
    Stream,
    Usage,
)
from penstock.workloads.container.monitor import ContainerMonitor
from penstock.workloads.container.protocol.image_rules import chosen_runtime
from penstock.workloads.container.result import Cause, ended, exited, failed, number
from penstock.workloads.container.timeouts import (
    Late,
    Stopped,
    StopRequest,
    done_within,
    drop,
    to_its_end,
    within,
)

T = TypeVar("T")

_CALL = 60.0
"""Seconds in which an engine makes, starts or removes a container, however busy it is."""
_LAST_CALL = 5.0
"""Seconds for what is worth a try, but not worth waiting for."""
KILL_WAITS = (3.0, 3.0, 6.0, 12.0, 24.0)
"""Seconds that each kill has until the next."""
_LOOK_AT_OUTPUT = 0.2
_HIDDEN_LOOKS = 25
_ENDED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""Exit codes of what a worker ended."""
_INIT_WORDS = 4096
_MIB = 1 << 20

log = logging.getLogger(__name__)


class Runner:
    """`run` and `adopt` end in one result, and raise nothing for what happens to the job."""

    def __init__(
        self,
        engine: ContainerEngine,
        config: WorkerConfig,
        clock: Clock,
        owner: str,
        pulled: PulledImages | None = None,
    ) -> None:
        self.engine, self.config, self.clock, self.owner = engine, config, clock, owner
        self.images = ImageResolver(engine, config, pulled)

    def name_of(self, job_id: str) -> str:
        """Of the job's container: safe whatever the id is made of."""
        of = hashlib.sha256(f"{self.owner}/{job_id}".encode()).hexdigest()
        return f"penstock-{of[:24]}"

    async def run(
        self,
        job: ContainerJob,
        sandbox: Sandbox,
        output: Output,
        stop: StopRequest,
        *,
        starts: Callable[[], Awaitable[None]] | None = None,
    ) -> ContainerResult:
        """The container has ended when this returns. It and the sandbox are still there: `remove`
        and `Sandbox.delete` are for when the end is recorded. `starts` is awaited just before the
        container is started; if it is cancelled, the container never is."""
        run = ContainerRun(self, job, sandbox, output, stop)
        return await run.to_its_end(run.from_the_start(starts))

    async def adopt(
        self,
        job: ContainerJob,
        found: ContainerSummary,
        sandbox: Sandbox,
        output: Output,
        stop: StopRequest,
        started_at: float,
    ) -> ContainerResult:
        """Take up a container that an earlier worker left. What it was not sent of its input
        it does not get; its run time counts from when it was started. One that was only created
        is made anew: an engine that is still about to start it would run the job twice."""
        run = ContainerRun(self, job, sandbox, output, stop)
        run.ran, run.image_id = True, found.labels.get(IMAGE_LABEL, "")
        left = self._left(job, found, started_at)
        if found.state is ContainerState.EXITED:
            return await run.to_its_end(run.after_the_end(out_of_time=left <= 0))
        return await run.to_its_end(run.from_the_middle(left))

    def _left(self, job: ContainerJob, found: ContainerSummary, started_at: float) -> float:
        """Seconds of its time; fetching the image was none of it."""
        now = self.clock.now()
        began = min(max(started_at, found.created), now)
        return began + job.limits.max_runtime_seconds - now

    async def remove(self, job_id: str) -> bool:
        """The container: one try, which may be made again at any time. Whether it is gone."""
        name = self.name_of(job_id)
        try:
            await within(_CALL, self.engine.remove(name))
        except (EngineError, Late) as error:
            log.warning("container %s is not removed yet: %r", name, error)
            return False
        return True


class ContainerRun:
    """One container, from its image to its end."""

    def __init__(
        self,
        runner: Runner,
        job: ContainerJob,
        sandbox: Sandbox,
        output: Output,
        stopping: StopRequest,
    ) -> None:
        self._engine, self._config = runner.engine, runner.config
        self._images, self._name = runner.images, runner.name_of(job.job_id)
        self._labels = {OWNER_LABEL: runner.owner, JOB_LABEL: job.job_id}
        self._job, self._sandbox, self._output, self._stopping = job, sandbox, output, stopping
        self._monitor = ContainerMonitor(self._engine, self._name, self._labels, output)
        self._usage = Usage()
        self.image_id = ""
        self._hidden_looks = 0
        """How often in a row the output folder had a folder that can't be looked into."""
        self.ran = False
        """Whether a container was started, as far as is known."""

    async def to_its_end(self, work: Coroutine[Any, Any, ContainerResult]) -> ContainerResult:
        """What came of one of `from_the_start`, `from_the_middle` and `after_the_end`."""
        try:
            result = await work
        except EngineError as error:
            await self._kill()
            result = failed(self._job, error)
        except Exception as error:
            log.exception("job %s", self._job.job_id)
            await self._kill()
            said = f"the worker itself failed: {type(error).__name__}: {error}"
            result = failed(self._job, WorkerFailure(said))
        finally:
            await self._monitor.close()
        self._output.end()
        return replace(
            result,
            usage=self._usage,
            stdout_count=self._output.count(Stream.STDOUT),
            stderr_count=self._output.count(Stream.STDERR),
            image_id=self.image_id,
        )

    # -- beginning --------------------------------------------------------------------------

    async def from_the_start(self, starts: Callable[[], Awaitable[None]] | None) -> ContainerResult:
        try:
            image, mounts = await self._stopping.unless(self._prepared())
        except Stopped:
            return self._cancelled()
        await self._create(image, mounts)
        failpoint("container-created")
        if self._stopping.requested:
            return self._cancelled()
        await self._monitor.attach(stdin=True)
        self._monitor.feed(self._job.stdin_bytes)
        if starts is not None:
            await starts()
        await self._start()
        failpoint("container-started")
        return await self._see_through(self._job.limits.max_runtime_seconds)

    async def from_the_middle(self, seconds: float) -> ContainerResult:
        """Go on with a container that runs; so many seconds are left of its time."""
        await self._monitor.resume()
        return await self._see_through(seconds)

    async def after_the_end(self, *, out_of_time: bool) -> ContainerResult:
        await self._monitor.resume()  # some engines keep the last of what it wrote
        exit = await self._call(self._monitor.exit(), "say how the container ended")
        result = await self._exited(exit)
        if exit.code not in _ENDED or exit.oom:
            return result
        # The worker that died had ended it: nobody else does once that was asked for, or the time
        # is over.
        if self._stopping.requested:
            return self._cancelled()
        return ended(self._job, Cause.TIMEOUT) if out_of_time else result

    async def _prepared(self) -> tuple[Image, tuple[Mount, ...]]:
        image = await self._image()
        self.image_id = image.id
        return image, await self._files("inputs", self._sandbox.prepare)

    async def _image(self) -> Image:
        if self._job.mode is not Mode.BUILD:
            return await self._images.find(self._job)
        context = await self._files("runtime.build.context", self._sandbox.build_context)
        said, tag = BuildLog(), f"{self._name}:built"
        try:
            return await self._images.build(self._job, context, tag, self._labels, said)
        finally:
            self._sandbox.keep_build_log(said.data)

    async def _files(self, field: str, make: Callable[[ContainerJob], Coroutine[Any, Any, T]]) -> T:
        """What a pointer leads to may never come; it has as long as the image has."""
        seconds = self._job.limits.pull_seconds
        try:
            return await within(seconds, make(self._job))
        except Late:
            said = f"took longer than {number(seconds)} s to fetch (runtime.limits.pull_seconds)"
            raise BadInput(said, field=field, code=ErrorCode.INPUT_UNAVAILABLE) from None

    async def _create(self, image: Image, mounts: tuple[Mount, ...]) -> None:
        try:
            await self._call(self._engine.create(self._spec(image, mounts)), "make a container")
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
            self._monitor.broke_off(error)  # it may run all the same

    def _spec(self, image: Image, mounts: tuple[Mount, ...]) -> ContainerSpec:
        job, limits = self._job, self._job.limits
        return ContainerSpec(
            name=self._name,
            image=image.id,
            cmd=job.cmd,
            entrypoint=job.entrypoint,
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
            labels={**self._labels, IMAGE_LABEL: image.id},
        )

    # -- running ----------------------------------------------------------------------------

    async def _see_through(self, seconds: float) -> ContainerResult:
        exit = asyncio.ensure_future(self._monitor.exit())
        watch = asyncio.ensure_future(self._until_too_much()) if self._job.outputs else None
        asked = asyncio.ensure_future(self._stopping.wait())
        ends = (exit, asked, *([watch] if watch else ()))
        try:
            await done_within(max(seconds, 0.0), *ends)
            await self._while_engine_is_away(exit)
            if exit.done() and not (self._stopping.requested and exit.exception()):
                return await self._exited(exit.result())
            cause = self._cause(watch)
            await drop(watch)
            return await self._end_it(exit, cause)
        finally:
            await drop(exit, asked, watch)

    async def _exited(self, exit: ExitStatus) -> ContainerResult:
        await asyncio.gather(self._monitor.finish(), self._look_at_usage())
        if exit.code and (failure := self._command_failure()) is not None:
            return failed(self._job, failure)
        too_much = await self._has_too_much(patience=0)
        return exited(self._job, exit, too_much_output=too_much, hidden=self._hidden_looks > 0)

    def _command_failure(self) -> EngineError | None:
        """Where the container has an init program, that is started, whatever the command is."""
        stdout, stderr = map(self._output.count, Stream)
        if stdout.bytes or not 0 < stderr.bytes <= _INIT_WORDS:
            return None
        return command_failure(self._output.page(Stream.STDERR, 0, _INIT_WORDS).data)

    async def _while_engine_is_away(self, exit: asyncio.Future[ExitStatus]) -> None:
        """Whether a container that can't be reached has ended by itself is known only later."""
        if not exit.done() and not self._monitor.present.is_set():
            back = asyncio.ensure_future(self._monitor.present.wait())
            try:
                await asyncio.wait((exit, back), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await drop(back)

    def _cause(self, watch: asyncio.Future[None] | None) -> Cause:
        if self._stopping.requested:
            return Cause.CANCELLED
        return Cause.OUTPUT_LIMIT if watch and watch.done() else Cause.TIMEOUT

    async def _end_it(self, exit: asyncio.Future[ExitStatus], cause: Cause) -> ContainerResult:
        await self._stop(exit)
        await asyncio.gather(self._monitor.finish(), self._look_at_usage())
        stuck = not exit.done() or exit.exception() is not None
        if stuck:
            await self._kill()
        return ended(
            self._job,
            cause,
            reason=self._stopping.reason,
            exit=None if stuck else exit.result(),
            hidden=self._hidden_looks > 0,
            stuck=stuck,
        )

    async def _stop(self, exit: asyncio.Future[ExitStatus]) -> None:
        """TERM, a grace, KILL. No engine that hangs, fails or dies can make this take longer than
        the grace and `KILL_WAITS` together.

        A container whose output is not read blocks, and its engine may then wait for ever with a
        kill. So a kill that times out is repeated after the streams were closed."""
        grace, name = self._config.stop_grace, self._name
        if grace > 0 and await self._send(self._engine.signal(name, signal.SIGTERM), exit, grace):
            return
        for seconds in KILL_WAITS:
            if await self._send(self._engine.kill(name), exit, seconds):
                return
            self._monitor.let_go()

    async def _send(
        self, call: Coroutine[Any, Any, None], exit: asyncio.Future[Any], seconds: float
    ) -> bool:
        """Make the call and wait for the end, whether the call is answered or not. An engine that
        is gone is told by whoever waits for the end."""
        sending = asyncio.ensure_future(call)
        try:
            return await done_within(seconds, exit)
        finally:
            await drop(sending)

    async def _until_too_much(self) -> None:
        """Until its output folder holds more than it may."""
        while True:
            if await self._has_too_much():
                return
            await asyncio.sleep(_LOOK_AT_OUTPUT)

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

    # -- within -----------------------------------------------------------------------------

    def _cancelled(self) -> ContainerResult:
        return ended(self._job, Cause.CANCELLED, reason=self._stopping.reason)

    async def _kill(self) -> None:
        """A last try; whoever removes the container tries again."""
        if self.ran:
            self._monitor.let_go()
            with suppress(EngineError, Late):
                await within(_LAST_CALL, self._engine.kill(self._name))

    async def _look_at_usage(self) -> None:
        """An engine that does not say is not waited for, and no reason to fail."""
        with suppress(EngineError, Late):
            self._usage = await within(_LAST_CALL, self._engine.usage(self._name))

    async def _call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        try:
            return await within(_CALL, work)
        except Late:
            raise EngineUnavailable(
                f"the container engine did not {what} within {_CALL:g} s"
            ) from None
