"""One container engine of this machine, and all that a worker keeps there.

`ContainerHost` knows which jobs run in this process, what earlier processes left (folders and
containers, by the owner's label), whether the engine answers, and how much room there is. Several
processes may share one engine and one folder: the lock of a job's folder says whose it is. What
workers of different job engines keep in one folder is apart.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Struct

from penstock.core.errors import NotFound, PenstockError
from penstock.core.ledger import Step
from penstock.lifecycles.canonical import HELD
from penstock.ports.clock import Clock, SystemClock, wait_at_most
from penstock.ports.engine_api import EngineApi
from penstock.ports.executor import Environment
from penstock.ports.store import JobQuery, StepQuery
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import (
    JOB_LABEL,
    OWNER_LABEL,
    ContainerEngine,
    ContainerNotFound,
    ContainerState,
    ContainerSummary,
    EngineError,
    EngineFacts,
)
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import JobFolders, owner_of
from penstock.workloads.container.images import PulledImages
from penstock.workloads.container.job import TOPIC, ContainerJob, Usage
from penstock.workloads.container.machine import Capacity, Machine, disk_of
from penstock.workloads.container.runner import Runner
from penstock.workloads.container.timeouts import Late, done_within, drop, within

T = TypeVar("T")

log = logging.getLogger(__name__)

STEP = "container"
"""The name of the row by which a job says where its container was started."""
_STARTED = StepQuery(name=STEP, limit=1)
_MANY = 1000
"""Jobs that run on all machines, of which those that were lost are looked for."""
_WATCH = 5.0
"""Seconds between two looks at the engine."""
_ANSWER = 10.0
"""Seconds after which an engine that says nothing counts as unavailable."""
_LOOK = 60.0
"""Seconds between two looks for what nobody needs any more; and for one call while at it."""
_SOON = 2.0
"""The same while a lost job waits to be reattached to, or something could not be removed."""
_SETTLES = 2.0
"""Seconds in which an engine has started what it was asked to start."""
_SOONEST, _LATEST = 0.005, 2.0
"""Seconds between two looks at whether a job's end is recorded."""
_LAST = 5.0
"""Seconds that removing what is left may take when a worker stops."""


class Started(Struct, frozen=True):
    """Where and when a job's container was started, as it was checkpointed. Without an owner, none
    was: what an earlier attempt said is withdrawn."""

    owner: str = ""
    name: str = ""
    at: float = 0.0
    engine: str = ""
    """The socket or program of the container engine."""

    def row(self) -> Step:
        return Step(STEP, 0, key=self.owner, output=self.name, at=self.at, info=self.engine)

    @classmethod
    def of(cls, row: Step) -> Started:
        return cls(row.key, row.output, row.at, row.info)


_ENGINE_ID = "containers/engine-id"


async def engine_id(environment: Environment | None) -> str:
    """The id of the job engine, made once: its workers' containers are told from others' by it."""
    if environment is None:
        return "none"
    while (known := await environment.state.read(_ENGINE_ID)) is None:
        await environment.state.replace(_ENGINE_ID, None, secrets.token_hex(8).encode())
    return known.decode()


class ContainerHost:
    """Made once for a process; `open` before the first job, `close` after the last."""

    def __init__(
        self,
        engine: ContainerEngine,
        config: WorkerConfig,
        environment: Environment | None,
        engine_id: str = "none",
    ) -> None:
        self.config = config
        self.clock: Clock = SystemClock() if environment is None else environment.clock
        self.blobs = None if environment is None else environment.blobs
        self._api: EngineApi | None = None if environment is None else environment.api
        self._worker_id = "" if environment is None else environment.worker_id
        self.machine = machine = Machine()
        self.owner = f"{owner_of(config.jobs_dir)}-{engine_id}"
        jobs = config.jobs_dir / "jobs"
        self.folders = JobFolders(jobs, config.inputs, self.blobs, owner=self.owner)
        self.capacity = Capacity(config, machine.memory().total_mb)
        self._images = PulledImages(config.jobs_dir / "pulled-images.json", self.clock)
        self.engine = engine
        self.runner = Runner(engine, config, self.clock, self.owner, self._images)
        self.facts: EngineFacts | None = None
        """What the engine said last; None until it has answered once."""
        self._problem = ""
        self._problem_since = self.clock.monotonic()
        self.outputs: dict[str, Output] = {}
        """What running jobs write, by id."""
        self._running: dict[str, str] = {}
        """Jobs that this process runs, with the names of their images."""
        self._settling: dict[str, asyncio.Task[None]] = {}
        """Jobs that have ended, until their end is recorded and nothing of them is left."""
        self.usage: dict[str, Usage] = {}
        """What running containers have used, as seen a few seconds ago at most; by job."""
        self.reattachable: dict[str, int] = {}
        """Lost jobs whose work is here, by id, and their attempts."""
        self._soon = asyncio.Event()
        self._doubt = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Raises EngineError if the engine does not answer."""
        self.facts = await self._within(_ANSWER, self.engine.facts())
        await self.reconcile()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._upkeep())]

    @property
    def where(self) -> str:
        """The socket or program of the container engine."""
        return self.facts.where if self.facts is not None else ""

    async def close(self) -> None:
        """Containers that run go on; of jobs that have ended nothing is left, if there is time."""
        if settling := [*self._settling.values()]:  # the dict changes while it is waited for
            await done_within(_LAST, asyncio.ensure_future(asyncio.wait(settling)))
        await drop(*self._tasks, *self._settling.values())
        self.folders.close()
        self._images.save()
        await self.engine.close()

    # -- jobs that run here -----------------------------------------------------------------

    async def enter(self, job: ContainerJob) -> None:
        """Before an attempt looks for what is here of its job. An earlier one may still be about
        to end, or to be removed; from now on nothing of the job is."""
        while self._is_mine(job.job_id):
            await self.next_change(_WATCH)
        self._running[job.job_id] = job.image

    def begin(self, job_id: str, output: Output) -> None:
        """It has a container, or will soon."""
        self.reattachable.pop(job_id, None)
        self.outputs[job_id] = output
        self._change()

    def end(self, job_id: str) -> None:
        """Its container has ended, or is left to itself."""
        if (output := self.outputs.pop(job_id, None)) is not None:
            output.close()
        self._running.pop(job_id, None)
        self.usage.pop(job_id, None)
        self.capacity.release(job_id)
        self._change()

    def settle(self, job_id: str, attempt: int, image_id: str = "") -> None:
        """Remove what is left of a job once its end is recorded: until then, whoever comes after
        us could need it."""
        self._images.used(image_id)
        self._clear(job_id, self._settle(job_id, attempt))

    def _clear(self, job_id: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """No attempt of a job begins here before this is done."""
        task = self._settling[job_id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._cleared(job_id))
        return task

    def _cleared(self, job_id: str) -> None:
        del self._settling[job_id]
        self._change()

    async def _settle(self, job_id: str, attempt: int) -> None:
        pause = _SOONEST
        while (recorded := await self._is_recorded(job_id, attempt)) is None:
            await self.clock.sleep(pause)
            pause = min(pause * 2, _LATEST)
        if recorded:
            await self._remove_or_retry(job_id)
        else:
            self.look_soon()

    async def _remove_or_retry(self, job_id: str) -> None:
        if not await self.remove(job_id):
            self.look_soon()

    async def _is_recorded(self, job_id: str, attempt: int) -> bool | None:
        """Whether the job has ended; False if a later attempt may need what is here, and None if
        neither is known yet."""
        if self._api is None:
            return True
        try:
            job = await self._api.get(job_id)
        except NotFound:
            return True
        except PenstockError as error:
            log.info("job %s: can't ask whether its end is recorded: %s", job_id, error)
            return None
        return True if job.is_final else False if job.attempt > attempt else None

    async def is_clear_of(self, job_id: str, seconds: float) -> bool:
        """Wait until nothing of a job is left here."""
        until = self.clock.monotonic() + seconds
        while self._is_mine(job_id) or job_id in self.reattachable:
            if (left := until - self.clock.monotonic()) <= 0:
                return False
            await self.next_change(left)
        return True

    async def next_change(self, seconds: float) -> None:
        """Until a job began or ended here, or the time is over."""
        await wait_at_most(self.clock, seconds, self._changed)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def find(self, job_id: str) -> ContainerSummary | None:
        """A job's container that an earlier process left. Raises EngineError."""
        labels, name = {OWNER_LABEL: self.owner, JOB_LABEL: job_id}, self.runner.name_of(job_id)
        found = await self._named(labels, name)
        if found is not None and found.state is ContainerState.CREATED:
            # The engine may have been asked to start it just before the worker died.
            await self.clock.sleep(_SETTLES)
            found = await self._named(labels, name)
        return found

    async def _named(self, labels: dict[str, str], name: str) -> ContainerSummary | None:
        found = await self._within(_LOOK, self.engine.find(labels))
        return next((one for one in found if one.name == name), None)

    async def remove(self, job_id: str) -> bool:
        """Remove all that is here of a job: one try. Whether nothing is left."""
        try:
            if not await self.runner.remove(job_id):
                return False
            if self.config.build.enabled:
                labels = {OWNER_LABEL: self.owner, JOB_LABEL: job_id}
                for image in await self._within(_LOOK, self.engine.images(labels)):
                    await self._within(_LOOK, self.engine.remove_image(image.id))
            await self.folders.sandbox(job_id).delete()
        except EngineError as error:
            log.warning("job %s: something of it is still there: %s", job_id, error)
            return False
        except OSError as error:
            log.warning("job %s: its folder is still there: %s", job_id, error)
            self.folders.release(job_id)
            return True  # to try again would not help: its files are another user's
        self.folders.release(job_id)
        return True

    # -- what others left -------------------------------------------------------------------

    async def reconcile(self) -> None:
        """Find what earlier processes left here: reattach to it, or remove it."""
        found = await self._within(_LOOK, self.engine.find({OWNER_LABEL: self.owner}))
        known = {one.labels.get(JOB_LABEL, "") for one in found}
        known.update(await asyncio.to_thread(self.folders.job_ids))
        claims: dict[str, int] = {}
        for job_id in sorted(known - {""}):
            if self._is_mine(job_id) or not self.folders.hold(job_id):
                continue
            attempt = await self._attempt_to_reattach(job_id)
            if self._is_mine(job_id):
                continue  # it came meanwhile
            if attempt is None:
                log.warning("removing what is left here of job %s, which does not need it", job_id)
                await self._clear(job_id, self._remove_or_retry(job_id))
            elif attempt:
                claims[job_id] = attempt
        self.reattachable = {**await self._without_container(known), **claims}
        self._change()
        if self.reattachable:
            self.look_soon()  # until their jobs came here, or have ended
        if self.config.build.enabled:
            await self._sweep_images()

    async def _without_container(self, known: set[str]) -> dict[str, int]:
        """Lost jobs, with their attempts, that can only be ended or begun anew. Of some no worker
        has checkpointed that it starts a container: none ever will, once there is a later attempt,
        so any worker may have them. Of others, that was here, and nothing of them is left."""
        if self._api is None:
            return {}
        found = {}
        try:
            query = JobQuery(topic=TOPIC, states=tuple(HELD), limit=_MANY)
            if jobs := await self._api.find(query):
                workers = await self._api.workers()
                others = {one.worker_id for one in workers if one.status == "ready"}
                others.discard(self._worker_id)
                for job in jobs:
                    if job.worker_id not in others and not self._is_mine(job.job_id):
                        page = await self._api.read_steps(job.job_id, _STARTED)
                        begun = [row for row in map(Started.of, page.steps) if row.owner]
                        here = (self.owner, self.where)
                        was_here = job.job_id not in known and all(
                            (row.owner, row.engine) == here for row in begun
                        )
                        if was_here or not begun:
                            found[job.job_id] = job.attempt
        except PenstockError as error:
            log.warning("can't ask which jobs were lost: %s", error)
        return found

    def _is_mine(self, job_id: str) -> bool:
        return job_id in self._running or job_id in self._settling

    async def _attempt_to_reattach(self, job_id: str) -> int | None:
        """The attempt to which this host can reattach; None if nobody needs what is here, and 0 if
        that can't be told now."""
        if self._api is None:
            return None
        try:
            job = await self._api.get(job_id)
            if job.is_final:
                return None
            page = await self._api.read_steps(job_id, _STARTED)
        except NotFound:
            return None
        except PenstockError as error:
            log.warning("can't ask what became of job %s: %s", job_id, error)
            self.look_soon()
            return 0
        for started in map(Started.of, page.steps):
            if started.owner not in ("", self.owner):
                return None  # its container was started elsewhere since
            if started.owner and started.engine != self.where:
                return 0  # it is for a worker with that container engine
        # A worker that died may have begun it without having said so.
        return job.attempt if job.state in HELD else 0

    async def _sweep_images(self) -> None:
        """Remove images that were built for jobs of which nothing else is left."""
        for image in await self._within(_LOOK, self.engine.images({OWNER_LABEL: self.owner})):
            job_id = image.labels.get(JOB_LABEL, "")
            if job_id and not self._is_mine(job_id) and not self.folders.holds(job_id):
                await self._within(_LOOK, self.engine.remove_image(image.id))

    def look_soon(self) -> None:
        """Something is left that could not be removed, or reattached to."""
        self._soon.set()

    async def _upkeep(self) -> None:
        while True:
            await wait_at_most(self.clock, _LOOK, self._soon)
            if self._soon.is_set():
                self._soon.clear()
                await self.clock.sleep(_SOON)
            await self._try(self.reconcile)
            if self.config.image_retention:
                await self._try(self._remove_unused_images)

    async def _remove_unused_images(self) -> None:
        seconds = self.config.image_retention
        await self._images.remove_unused(self.engine, seconds, set(self._running.values()))

    async def _try(self, duty: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await duty()
        except EngineError as error:
            log.warning("upkeep: %s", error)
            self._doubt.set()
        except (PenstockError, OSError) as error:
            log.error("upkeep: %s", error)

    # -- how it is --------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why the engine runs no containers now; empty while it does."""
        if not self._problem:
            return ""
        seconds = self.clock.monotonic() - self._problem_since
        return f"the container engine has not answered for {seconds:.0f} s: {self._problem}"

    def obstacle(self) -> str:
        """Why no container can be started here now, in a sentence; empty if one can."""
        return self.problem or low_disk(self.config)

    def failed(self, error: str) -> None:
        """The engine did not answer: it counts as unavailable until it does."""
        self._note(error)
        self._doubt.set()

    async def _watch(self) -> None:
        while True:
            await wait_at_most(self.clock, _WATCH, self._doubt)
            self._doubt.clear()
            try:
                self.facts = await self._within(_ANSWER, self.engine.facts())
                self._note("")
                await self._measure()
            except EngineError as error:
                self._note(str(error) or type(error).__name__)

    async def _measure(self) -> None:
        for job_id in tuple(self.outputs):
            with suppress(ContainerNotFound):  # not made yet, or gone
                name = self.runner.name_of(job_id)
                used = await self._within(_ANSWER, self.engine.usage(name))
                if job_id in self.outputs:
                    self.usage[job_id] = used

    def _note(self, problem: str) -> None:
        if bool(problem) != bool(self._problem):
            self._problem_since = self.clock.monotonic()
            if not problem:
                self.look_soon()
        self._problem = problem

    async def _within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await within(seconds, work)
        except Late:
            raise EngineError(f"the container engine gave no answer within {seconds:g} s") from None


def low_disk(config: WorkerConfig) -> str:
    """Why no job can be taken, in a sentence; empty while there is space, or nobody can tell."""
    available = disk_of(config.jobs_dir).available_mb
    if available is None or available >= config.disk_low_mb:
        return ""
    return (
        f"only {available} MB are free where jobs have their files, "
        f"and {config.disk_low_mb:g} MB must be (disk_low_mb)"
    )
