"""What every Executor must do: a suite for authors of executors.

    class TestMyExecutor(ExecutorContract):
        def make_executor(self) -> Executor:
            return MyExecutor()

        def succeeding(self) -> JobRequest: ...      # and the other kinds of job

Say how to make the executor and name a job of each kind; pytest does the rest.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.core.job import JobRequest
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.executor import Executor, Outcome, Task
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext

STARTED = "started"
"""The progress message by which a job tells these tests that it runs."""
NOT_ENFORCED = "CONSTRAINT_NOT_ENFORCED"
"""The error code of a job that was not run, because it could not be held to its constraints."""
MIB = 1 << 20


class Sample(msgspec.Struct, frozen=True):
    """A job to run, and its input."""

    request: JobRequest
    payload: bytes = b"{}"


class ExecutorContract(ABC):
    """The promises of `penstock.ports.executor.Executor`."""

    patience = 30.0
    """Seconds after which a test gives up."""

    @abstractmethod
    def make_executor(self) -> Executor: ...

    @abstractmethod
    def succeeding(self) -> Sample:
        """A job that soon ends well, with some result."""

    @abstractmethod
    def failing(self) -> Sample:
        """A job that soon ends badly."""

    @abstractmethod
    def refusing(self) -> Sample:
        """A job whose input is not acceptable."""

    @abstractmethod
    def reporting(self) -> Sample:
        """A job that reports progress (0.5, "half") and logs the line "working"."""

    @abstractmethod
    def endless(self) -> Sample:
        """A job that reports the progress message STARTED and ends only when asked."""

    @abstractmethod
    def is_running(self, sample: Sample) -> bool:
        """Whether anything of the endless job is still alive."""

    @abstractmethod
    def connecting(self, port: int) -> Sample:
        """A job that reads from a server at this port of 127.0.0.1, or fails."""

    @abstractmethod
    def taking(self, size: int) -> Sample:
        """A job that allocates this many bytes at once, or fails."""

    @abstractmethod
    def writing(self, path: Path) -> Sample:
        """A job that writes this file, or fails."""

    @run_async
    async def test_names_the_topics_it_can_run(self) -> None:
        async with self._executor() as executor:
            assert executor.topics
            assert all(isinstance(topic, str) for topic in executor.topics)

    @run_async
    async def test_a_job_that_ends_well_succeeds_with_its_result(self) -> None:
        outcome = await self._outcome(self.succeeding())
        assert outcome.status is JobState.SUCCEEDED, outcome
        assert outcome.payload is not None
        assert outcome.error_code is None

    @run_async
    async def test_a_job_that_ends_badly_is_an_outcome_and_not_an_exception(self) -> None:
        outcome = await self._outcome(self.failing())
        assert outcome.status is JobState.FAILED, outcome
        assert outcome.payload is None
        assert outcome.error_code
        assert outcome.error_message

    @run_async
    async def test_unacceptable_input_fails_the_job_and_says_why(self) -> None:
        outcome = await self._outcome(self.refusing())
        assert outcome.status is JobState.FAILED, outcome
        assert outcome.error_code
        assert outcome.error_message

    @run_async
    async def test_an_unknown_topic_is_an_outcome_and_not_an_exception(self) -> None:
        request = JobRequest(job_id="nobody-serves-this", topic="job.nobody.serves-this")
        outcome = await self._outcome(Sample(request))
        assert outcome.status is JobState.FAILED, outcome
        assert outcome.error_code

    @run_async
    async def test_progress_and_log_reach_the_context_before_the_end(self) -> None:
        sample = self.reporting()
        ctx = RecordingContext(sample.request)
        async with self._executor() as executor:
            outcome = await self._run(executor, sample, ctx)
        assert outcome.status is JobState.SUCCEEDED, outcome
        assert (0.5, "half") in ctx.progressed
        assert "working" in [text for _, text in ctx.lines]

    @run_async
    async def test_jobs_run_side_by_side(self) -> None:
        async with self._executor() as executor:
            endless, quick = self.endless(), self.succeeding()
            ctx = RecordingContext(endless.request)
            running = asyncio.create_task(self._run(executor, endless, ctx))
            await self._started(ctx)
            outcome = await self._run(executor, quick, RecordingContext(quick.request))
            assert outcome.status is JobState.SUCCEEDED
            await self._cancel(running, ctx)

    @run_async
    async def test_after_a_cancel_nothing_runs_any_more(self) -> None:
        sample = self.endless()
        ctx = RecordingContext(sample.request)
        async with self._executor() as executor:
            running = asyncio.create_task(self._run(executor, sample, ctx))
            await self._started(ctx)
            assert self.is_running(sample)
            await self._cancel(running, ctx)
            assert not self.is_running(sample)

    @run_async
    async def test_an_executor_goes_on_after_failures_and_cancels(self) -> None:
        async with self._executor() as executor:
            failing, endless, quick = self.failing(), self.endless(), self.succeeding()
            await self._run(executor, failing, RecordingContext(failing.request))
            ctx = RecordingContext(endless.request)
            running = asyncio.create_task(self._run(executor, endless, ctx))
            await self._started(ctx)
            await self._cancel(running, ctx)
            outcome = await self._run(executor, quick, RecordingContext(quick.request))
            assert outcome.status is JobState.SUCCEEDED

    @run_async
    async def test_a_job_without_constraints_may_connect_take_and_write(
        self, tmp_path: Path
    ) -> None:
        async with self._executor() as executor, Greeter() as server:
            for sample in (
                self.connecting(server.port),
                self.taking(256 * MIB),
                self.writing(tmp_path / "file"),
            ):
                outcome = await self._run(executor, sample, RecordingContext(sample.request))
                assert outcome.status is JobState.SUCCEEDED, outcome
            assert server.guests == 1
            assert (tmp_path / "file").exists()

    @run_async
    async def test_no_job_connects_when_it_may_use_no_network_or_only_other_hosts(self) -> None:
        async with self._executor() as executor, Greeter() as server:
            for network in ((), ("example.org",)):
                for _ in range(2):
                    sample = self.connecting(server.port)
                    await self._kept_from(executor, sample, Constraints(network=network))
            assert server.guests == 0

    @run_async
    async def test_no_job_takes_more_memory_than_it_may(self) -> None:
        async with self._executor() as executor:
            await self._kept_from(executor, self.taking(256 * MIB), Constraints(max_memory=MIB))

    @run_async
    async def test_no_job_writes_when_it_may_only_read(self, tmp_path: Path) -> None:
        async with self._executor() as executor:
            sample = self.writing(tmp_path / "file")
            await self._kept_from(executor, sample, Constraints(read_only=True))
        assert not (tmp_path / "file").exists()

    @run_async
    async def test_a_job_within_its_constraints_succeeds_or_is_not_run(self) -> None:
        async with self._executor() as executor:
            for constraints in (
                Constraints(),
                Constraints(max_runtime=60, max_retries=1, max_concurrent=1, max_output=MIB),
                Constraints(max_memory=1 << 40),
                Constraints(network=()),
                Constraints(network=("example.org",)),
                Constraints(read_only=True),
            ):
                outcome = await self._constrained(executor, self.succeeding(), constraints)
                if outcome.status is not JobState.SUCCEEDED:
                    _check_refusal(outcome, constraints)

    @run_async
    async def test_constraints_of_one_job_don_t_bind_the_next(self, tmp_path: Path) -> None:
        async with self._executor() as executor, Greeter() as server:
            strict = Constraints(max_memory=MIB, network=(), read_only=True)
            for constraints in (strict, Constraints(network=()), Constraints(max_memory=MIB)):
                await self._constrained(executor, self.succeeding(), constraints)
                for sample in (
                    self.connecting(server.port),
                    self.taking(256 * MIB),
                    self.writing(tmp_path / "file"),
                ):
                    outcome = await self._run(executor, sample, RecordingContext(sample.request))
                    assert outcome.status is JobState.SUCCEEDED, outcome

    @run_async
    async def test_closing_twice_is_harmless(self) -> None:
        executor = self.make_executor()
        await executor.close()
        await executor.close()

    @asynccontextmanager
    async def _executor(self) -> AsyncIterator[Executor]:
        executor = self.make_executor()
        try:
            yield executor
        finally:
            await executor.close()

    async def _outcome(self, sample: Sample) -> Outcome:
        async with self._executor() as executor:
            return await self._run(executor, sample, RecordingContext(sample.request))

    async def _kept_from(
        self, executor: Executor, sample: Sample, constraints: Constraints
    ) -> None:
        """It failed in what it tried, or was not run at all."""
        outcome = await self._constrained(executor, sample, constraints)
        assert outcome.status is JobState.FAILED, outcome
        if outcome.error_code == NOT_ENFORCED:
            _check_refusal(outcome, constraints)

    async def _constrained(
        self, executor: Executor, sample: Sample, constraints: Constraints
    ) -> Outcome:
        return await self._run(executor, sample, RecordingContext(sample.request), constraints)

    async def _run(
        self,
        executor: Executor,
        sample: Sample,
        ctx: RecordingContext,
        constraints: Constraints | None = None,
    ) -> Outcome:
        until = asyncio.get_running_loop().time() + self.patience
        task = Task(sample.request, 1, sample.payload, until, constraints)
        async with asyncio.timeout(self.patience):
            outcome = await executor.run(task, ctx)
        assert outcome.status in TERMINAL
        return outcome

    async def _started(self, ctx: RecordingContext) -> None:
        said = await asyncio.to_thread(ctx.wait_for_progress, STARTED, self.patience)
        assert said, "the job did not report that it started"

    async def _cancel(self, running: asyncio.Task[Outcome], ctx: RecordingContext) -> None:
        """As a worker does it: the token first, then the task."""
        ctx.cancel.request()
        running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(ended, Outcome):
            assert ended.status in TERMINAL
        else:
            assert isinstance(ended, asyncio.CancelledError), ended


class Greeter:
    """Greets each client, and counts them."""

    async def __aenter__(self) -> Greeter:
        self.guests = 0
        self._server = await asyncio.start_server(self._greet, "127.0.0.1")
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.guests += 1
        writer.write(b"hello")
        writer.close()
        await writer.wait_closed()


def _check_refusal(outcome: Outcome, constraints: Constraints) -> None:
    """A job that was not run says so, and names a constraint that was set."""
    assert outcome.status is JobState.FAILED, outcome
    assert outcome.error_code == NOT_ENFORCED, outcome
    said = outcome.error_message or ""
    assert any(
        name in said for name in ("max_memory", "network", "read_only") if _set(constraints, name)
    ), said


def _set(constraints: Constraints, name: str) -> bool:
    return getattr(constraints, name) not in (None, False)
