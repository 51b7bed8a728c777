"""What is kept of a job when its container has ended."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path

from msgspec.structs import replace

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import Sandbox
from penstock.workloads.container.job import Code, ContainerJob, End, OutputFile, Stream
from penstock.workloads.container.running.course import Course
from penstock.workloads.container.running.ending import Story, Trouble, ending

BUILD_LOG = "build.log"
"""The artifact that a build's log becomes, unless the job left one of that name."""

log = logging.getLogger(__name__)

_Kept = tuple[tuple[OutputFile, ...], tuple[str, ...]]


async def close_job(
    job: ContainerJob, story: Story, course: Course, sandbox: Sandbox, output: Output
) -> End:
    """Collect what it left, and say how it ended. Its folders stay as they are until that is
    recorded: a worker that dies before can do all this again."""
    end = ending(job, story)
    try:
        artifacts, skipped = await _collected(job, course, sandbox)
    except Exception as error:
        log.exception("what job %s left can't be collected", job.job_id)
        said = f"what it left in /output could not be collected: {error}"
        artifacts, skipped = (), (said,)
        if end.state is ContainerJobState.FINISHED:
            end = ending(job, Story(trouble=Trouble(Code.RUNTIME_ERROR, end.exit_code, said)))
    output.end()
    return replace(
        end,
        usage=course.usage,
        stdout=output.count(Stream.STDOUT),
        stderr=output.count(Stream.STDERR),
        artifacts=artifacts,
        skipped=skipped,
        image_id=course.image_id,
    )


async def _collected(job: ContainerJob, course: Course, sandbox: Sandbox) -> _Kept:
    artifacts: tuple[OutputFile, ...] = ()
    skipped: tuple[str, ...] = ()
    if job.outputs and course.ran:
        artifacts, skipped = await sandbox.collect(job.limits.max_artifact_bytes)
    said = course.build_log.data
    if said and all(artifact.path != BUILD_LOG for artifact in artifacts):
        artifacts += (await asyncio.to_thread(_keep_build_log, sandbox.folder, said),)
    return artifacts, skipped


def _keep_build_log(folder: Path, data: bytes) -> OutputFile:
    kept = folder / "artifacts"
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    (kept / BUILD_LOG).write_bytes(data)
    return OutputFile(BUILD_LOG, len(data), hashlib.sha256(data).hexdigest())
