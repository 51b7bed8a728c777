"""Submits recurring jobs when their time has come.

A firing submits its job under a key made of the schedule's name and the time it fires for,
and then remembers that this time is dealt with. Whatever dies in between, the time is fired
for again and the gateway answers with the job that is already there: no time has two jobs.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from penstock.control.recurrence import (
    Kept,
    Recurrence,
    checked,
    iso,
    owed,
    request_of,
    same_times,
)
from penstock.core.calendar import Calendar
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PenstockError,
    TooMany,
    Unavailable,
    UnknownTopic,
)
from penstock.core.job import Job, JobRequest
from penstock.ports.clock import Clock
from penstock.ports.schedules import Schedule, ScheduleView
from penstock.ports.store import JobQuery, Store

log = logging.getLogger(__name__)

Submit = Callable[[Sequence[JobRequest]], Awaitable[list[Job]]]

_FACTS = "schedule/"
_LATE = 60.0
"""Seconds after which a time counts as missed: we were asleep, or the clock was set."""
_LOOK = 60.0
"""Seconds between looks at the clock, which may be set while we sleep."""
_AT_ONCE = 50
"""Times that one schedule makes up for before the others have their turn."""


class ScheduleKeeper:
    """Keeps the schedules and fires them. It checks nothing about who asks."""

    def __init__(self, store: Store, submit: Submit, clock: Clock) -> None:
        self._store, self._submit, self._clock = store, submit, clock
        self._known: dict[tuple[str, str], Recurrence] = {}
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()

    async def restore(self) -> None:
        """Take up what is stored. One that can't be read or understood harms no other."""
        facts = await self._store.recall_all(_FACTS)
        for name, value in facts.items():
            try:
                kept = msgspec.json.decode(value, type=Kept)
            except msgspec.MsgspecError as error:
                log.error("can't read the stored %s: %s", name, error)
                continue
            schedule = kept.schedule
            try:
                known = Recurrence(kept, Calendar(schedule.cron, schedule.timezone))
            except InvalidRequest as error:  # a zone that the machine no longer knows
                known = Recurrence(replace(kept, problem=str(error)), None)
            self._known[schedule.tenant, schedule.name] = known

    # -- asked by callers ---------------------------------------------------------

    async def put(self, schedule: Schedule, *, by: str) -> ScheduleView:
        """Make or change one. Times before this moment are owed only to the same cron."""
        now = self._clock.now()
        schedule = checked(schedule, now)
        calendar = Calendar(schedule.cron, schedule.timezone)
        async with self._changing:
            held = self._known.get((schedule.tenant, schedule.name))
            if held is None:
                kept = Kept(schedule=schedule, by=by, done=now)
            else:
                done = held.kept.done if same_times(held.kept.schedule, schedule) else now
                kept = replace(held.kept, schedule=schedule, by=by, done=done, problem="")
            return await self._replace(Recurrence(kept, calendar))

    async def list(self) -> builtins.list[ScheduleView]:
        now = self._clock.now()
        return [self._known[key].view(now) for key in sorted(self._known)]

    async def get(self, name: str, tenant: str = "default") -> ScheduleView:
        return self._find(name, tenant).view(self._clock.now())

    async def pause(
        self, name: str, tenant: str = "default", *, paused: bool = True
    ) -> ScheduleView:
        """Stop it or let it go on. What would have come meanwhile is left out."""
        async with self._changing:
            known = self._find(name, tenant)
            kept = known.kept
            if kept.schedule.paused is paused:
                return known.view(self._clock.now())
            schedule = replace(kept.schedule, paused=paused)
            kept = replace(kept, schedule=schedule, done=self._clock.now(), problem="")
            return await self._replace(Recurrence(kept, known.calendar))

    async def fire(self, name: str, tenant: str = "default", *, by: str) -> Job:
        """Submit its job now, besides its times, in the name of who asks."""
        async with self._changing:
            known = self._find(name, tenant)
            (job,) = await self._submit([request_of(known.kept.schedule, by, None)])
            fired = replace(known.kept, last_job_id=job.job_id, fired=known.kept.fired + 1)
            await self._remember(fired)
            known.kept = fired
            return job

    async def delete(self, name: str, tenant: str = "default") -> None:
        async with self._changing:
            self._find(name, tenant)
            await self._store.forget(f"{_FACTS}{tenant}/{name}")
            del self._known[tenant, name]

    def pointers(self) -> Iterable[str]:
        """The inputs that jobs to come will need: not to be pruned."""
        return [known.kept.schedule.request.context_ptr for known in self._known.values()]

    def _find(self, name: str, tenant: str) -> Recurrence:
        known = self._known.get((tenant, name))
        if known is None:
            raise NotFound(
                f"no schedule {name!r}", hint="'penstock schedule list' lists those there are"
            )
        return known

    async def _replace(self, known: Recurrence) -> ScheduleView:
        await self._remember(known.kept)
        schedule = known.kept.schedule
        self._known[schedule.tenant, schedule.name] = known
        self._changed.set()
        return known.view(self._clock.now())

    async def _remember(self, kept: Kept) -> None:
        name = f"{_FACTS}{kept.schedule.tenant}/{kept.schedule.name}"
        await self._store.remember(name, msgspec.json.encode(kept))

    # -- the service --------------------------------------------------------------

    async def run(self) -> None:
        """Fire what is due, then sleep until something is, or something changes."""
        punctual = self._clock.now()  # what is older was missed while nobody was here
        while True:
            self._changed.clear()
            now = self._clock.now()
            for known in [*self._known.values()]:
                if (wake := known.wakes_at) is not None and wake <= now:
                    await self._attend(known, punctual)
            await self._rest()
            punctual = self._clock.now() - _LATE

    async def _rest(self) -> None:
        wakes = [at for known in self._known.values() if (at := known.wakes_at) is not None]
        if not wakes:
            await self._changed.wait()
            return
        seconds = min(max(0.0, min(wakes) - self._clock.now()), _LOOK)
        changed = asyncio.ensure_future(self._changed.wait())
        asleep = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((changed, asleep), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            asleep.cancel()

    async def _attend(self, known: Recurrence, punctual: float) -> None:
        """Fire one schedule for what it owes; its troubles stay its own."""
        try:
            await self._pay(known, punctual)
        except Exception as error:
            schedule = known.kept.schedule
            if not isinstance(error, PenstockError):
                log.exception("schedule %s of %s", schedule.name, schedule.tenant)
            known.hold_back(known.tried, self._clock.now(), error)

    async def _pay(self, known: Recurrence, punctual: float) -> None:
        kept, schedule = known.kept, known.kept.schedule
        assert known.calendar is not None
        debt = owed(
            known.calendar,
            schedule.catch_up,
            kept.done,
            self._clock.now(),
            punctual=punctual,
            tried=known.tried,
        )
        if debt is None:  # the clock was set back
            known.advance(kept)
            return
        if debt.said:
            known.said = debt.said
            log.warning("schedule %s of %s: %s", schedule.name, schedule.tenant, debt.said)
        for time in debt.times[:_AT_ONCE]:
            async with self._changing:
                if not self._is_current(known) or not await self._fire_for(known, time):
                    return
        if len(debt.times) <= _AT_ONCE:
            async with self._changing:
                if self._is_current(known) and (known.said or known.kept.done < debt.until):
                    problem, known.said = known.said or known.kept.problem, ""
                    await self._keep(known, replace(known.kept, done=debt.until, problem=problem))

    def _is_current(self, known: Recurrence) -> bool:
        """Whether nobody changed or deleted it since we looked."""
        schedule = known.kept.schedule
        return self._known.get((schedule.tenant, schedule.name)) is known

    async def _fire_for(self, known: Recurrence, time: float) -> bool:
        """Fire for one time; False if that has to wait, and all that follows with it."""
        kept = known.kept
        if not kept.schedule.overlap and (busy := await self._unfinished(kept.last_job_id)):
            await self._skip(known, time, f"job {busy} of the time before has not ended")
            return True
        request = request_of(kept.schedule, kept.by, time)
        try:
            job = await self._submitted(request)
        except (TooMany, Unavailable, UnknownTopic) as error:
            known.hold_back(time, self._clock.now(), error)
            return False
        except PenstockError as error:
            problem = f"refused for {iso(time)}: {error}"
            await self._keep(known, replace(kept, done=time, problem=problem))
            return True
        if job.request.idempotency_key != request.idempotency_key:
            await self._skip(known, time, f"job {job.job_id} has its unique key")
            return True
        fired = replace(
            kept,
            done=time,
            last_at=time,
            last_job_id=job.job_id,
            fired=kept.fired + 1,
            problem="",
        )
        await self._keep(known, fired)
        return True

    async def _skip(self, known: Recurrence, time: float, why: str) -> None:
        kept, problem = known.kept, f"skipped {iso(time)}: {why}"
        await self._keep(known, replace(kept, done=time, skipped=kept.skipped + 1, problem=problem))

    async def _submitted(self, request: JobRequest) -> Job:
        """The job of this firing, also if it was submitted before the schedule was changed."""
        try:
            (job,) = await self._submit([request])
        except Conflict:
            key = request.idempotency_key
            query = JobQuery(tenant=request.tenant, idempotency_key=key, limit=1)
            if not (found := await self._store.find(query)):
                raise
            job = found[0]
        return job

    async def _unfinished(self, job_id: str | None) -> str | None:
        """The job in which a job goes on, if that has not ended."""
        while job_id is not None:
            job = await self._store.get(job_id)
            if job is None:
                return None
            if not job.is_final:
                return job_id
            job_id = job.successor
        return None

    async def _keep(self, known: Recurrence, kept: Kept) -> None:
        await self._remember(kept)
        known.advance(kept)
