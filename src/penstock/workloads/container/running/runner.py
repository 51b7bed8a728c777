"""Runs jobs in containers of one engine, and says how each ended."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable

from penstock.ports.clock import Clock
from penstock.ports.executor import CancelToken
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import (
    IMAGE_LABEL,
    JOB_LABEL,
    OWNER_LABEL,
    ContainerEngine,
    ContainerState,
    ContainerSummary,
    EngineError,
)
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import Sandbox
from penstock.workloads.container.job import ContainerJob, End
from penstock.workloads.container.running.closing import close_job
from penstock.workloads.container.running.course import Course, built_tag
from penstock.workloads.container.running.patience import Asked, Late, within

_REMOVE = 60.0
"""Seconds that the removal of a container or an image may take."""

log = logging.getLogger(__name__)


class Runner:
    """`run` and `adopt` end in exactly one End and raise nothing for what happens to the job.
    Cancelled as asyncio cancels, they let go: a container that runs is left running, with
    nobody reading, until it is adopted; one that has ended can be adopted, too.
    """

    def __init__(
        self, engine: ContainerEngine, config: WorkerConfig, clock: Clock, owner: str
    ) -> None:
        self._engine, self._config, self._clock, self._owner = engine, config, clock, owner

    def name_of(self, job_id: str) -> str:
        """Of the job's container: safe whatever the id is made of."""
        of = hashlib.sha256(f"{self._owner}/{job_id}".encode()).hexdigest()
        return f"penstock-{of[:24]}"

    async def run(
        self,
        job: ContainerJob,
        sandbox: Sandbox,
        output: Output,
        stop: CancelToken,
        *,
        starts: Callable[[], Awaitable[None]] | None = None,
    ) -> End:
        """The container has ended when this returns. It and the sandbox's folders are still there:
        `remove` and `Sandbox.clear` are for when the end is recorded. `starts` is awaited just
        before the container is started; if it is cancelled, the container never is."""
        with Asked(stop) as asked:
            course = self._course(job, sandbox, output, asked)
            story = await course.run(starts)
            return await close_job(job, story, course, sandbox, output)

    async def adopt(
        self,
        job: ContainerJob,
        found: ContainerSummary,
        sandbox: Sandbox,
        output: Output,
        stop: CancelToken,
        started_at: float,
    ) -> End:
        """Take up a container that an earlier worker left. What it was not sent of its input
        it does not get; its run time counts from when it was started. One that was only created
        is made anew: an engine that is still about to start it would run the job twice."""
        with Asked(stop) as asked:
            course = self._course(job, sandbox, output, asked)
            image_id = found.labels.get(IMAGE_LABEL, "")
            left = self._left(job, found, started_at)
            if found.state is ContainerState.EXITED:
                story = await course.adopt_exited(image_id, out_of_time=left <= 0)
            else:
                story = await course.adopt_running(image_id, left)
            return await close_job(job, story, course, sandbox, output)

    def _left(self, job: ContainerJob, found: ContainerSummary, started_at: float) -> float:
        """Seconds of its time; fetching the image was none of it."""
        now = self._clock.now()
        began = min(max(started_at, found.created), now)
        return began + job.limits.max_runtime_seconds - now

    async def remove(self, job_id: str, job: ContainerJob | None = None) -> bool:
        """The container and, given the job, the image that was built for it: one try, which may
        be made again at any time. Whether nothing of it is left."""
        name = self.name_of(job_id)
        try:
            await within(self._clock, _REMOVE, self._engine.remove(name))
            if job is not None and job.build is not None:
                await within(self._clock, _REMOVE, self._engine.remove_image(built_tag(name)))
        except (EngineError, Late) as error:
            log.warning("container %s is not removed yet: %r", name, error)
            return False
        return True

    def _course(self, job: ContainerJob, sandbox: Sandbox, output: Output, asked: Asked) -> Course:
        labels = {OWNER_LABEL: self._owner, JOB_LABEL: job.job_id}
        name = self.name_of(job.job_id)
        return Course(
            self._engine, self._config, self._clock, name, labels, job, sandbox, output, asked
        )
