"""Limits on jobs, by key: how many run at once, how many start in a time, how many may wait.
`Limiter` counts and decides; `LimitService` stores what was set.

A job falls into one *bucket* for each limit that matches it, by the values of the limit's
key, and into one more if the safety rule that allowed it limits it. It is dispatched only
when each of its buckets has room; a job whose worker was lost still counts.

The counters are projections: OpenJobs reports what waits and what is held, and they are
counted anew when the limits change.
"""

from __future__ import annotations

import builtins
import heapq
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.control.guard import Guard
from penstock.control.ledger import Ledger
from penstock.core.check import DAY, check_name, check_number, check_pairs
from penstock.core.errors import InvalidRequest, NotFound, TooMany
from penstock.core.job import Job, JobRequest
from penstock.core.journal import cursor_of, page_of
from penstock.core.verdict import Rate, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Limit, Limits, LimitUse, LimitView
from penstock.ports.store import JournalEvent

if TYPE_CHECKING:
    from penstock.control.backlog import QueueKey

_USES = 100
_DEPARTURES = 32
"""Recent departures from which the drain rate of a queue is estimated."""
_SHORTEST_HINT, _LONGEST_HINT = 1.0, 60.0
_TIDY = 1000
_KINDS = 10_000
"""Kinds of jobs whose buckets are cached."""
_SLICES = 1000
"""Maximum number of slices of a window, to bound its size."""
_LABEL = "label:"
_RULE = "rule:"
"""Prefix of the names of limits that come from a safety rule."""


class Bucket(NamedTuple):
    """One key's share of one limit."""

    limit: str
    key: tuple[str, ...]

    def __str__(self) -> str:
        values = ", ".join(self.key)
        return f"{self.limit} for {values}" if values else self.limit


Buckets = tuple[Bucket, ...]


def rule_limit(verdict: SafetyVerdict) -> Limit | None:
    """The limit of the safety rule that allowed a job, if it sets one: for each tenant."""
    most = None if verdict.constraints is None else verdict.constraints.max_concurrent
    if most is None and verdict.rate is None:
        return None
    name = _RULE + verdict.rule_id
    return Limit(name=name, key=("tenant",), concurrency=most, rate=verdict.rate)


class Sorter:
    """Finds the buckets of a job among the limits that were set."""

    def __init__(self, limits: Iterable[Limit] = ()) -> None:
        self.limits = {limit.name: limit for limit in limits}
        looked_at = {name for limit in self.limits.values() for name in _labels_of(limit)}
        self._labels = sorted(looked_at)
        self._kinds: dict[tuple[str | None, ...], Buckets] = {}

    def sort(self, request: JobRequest) -> Buckets:
        """The buckets of a job (cached)."""
        if not self.limits:
            return ()
        labels = request.labels
        kind = (request.topic, request.tenant, *[labels.get(name) for name in self._labels])
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            known = self._kinds[kind] = tuple(
                Bucket(limit.name, tuple(_value(part, request) for part in limit.key))
                for limit in self.limits.values()
                if matches(limit, request)
            )
        return known


def matches(limit: Limit, request: JobRequest) -> bool:
    """Whether a limit applies to a job."""
    return (
        _any(request.topic, limit.topics)
        and _any(request.tenant, limit.tenants)
        and all(
            name in request.labels and fnmatchcase(request.labels[name], glob)
            for name, glob in limit.labels.items()
        )
    )


def _any(value: str, globs: tuple[str, ...]) -> bool:
    return not globs or any(fnmatchcase(value, glob) for glob in globs)


def _labels_of(limit: Limit) -> list[str]:
    keys = [part.removeprefix(_LABEL) for part in limit.key if part.startswith(_LABEL)]
    return [*keys, *limit.labels]


def _value(part: str, request: JobRequest) -> str:
    """Jobs without the label share one key, so leaving it out does not evade the limit."""
    if part.startswith(_LABEL):
        return request.labels.get(part.removeprefix(_LABEL), "")
    return request.tenant if part == "tenant" else request.topic


_NOTHING_TAKEN: Counter[Bucket] = Counter()


class Window:
    """A sliding window over a monotonic clock: no window of `per` seconds admits more than `count`.

    (A token bucket would admit up to twice as many.) What goes within a thousandth of the window
    counts as one moment, its last, which errs on the slow side.
    """

    __slots__ = ("_gone", "_went")

    def __init__(self) -> None:
        self._went: deque[tuple[float, float, int]] = deque()
        """(first time, last time, count)"""
        self._gone = 0

    def spend(self, rate: Rate, at: float) -> None:
        if self._went:
            first, last, count = self._went[-1]
            at = max(at, last)
            if at - first < rate.per / _SLICES:
                self._went[-1] = (first, at, count + 1)
                self._gone += 1
                return
        self._went.append((at, at, 1))
        self._gone += 1

    def room(self, rate: Rate, at: float) -> int:
        """How many may start now."""
        self._forget(rate, at)
        return rate.count - self._gone

    def opens(self, rate: Rate, at: float) -> float:
        """When the next one may start."""
        if self.room(rate, at) > 0:
            return at
        too_many = self._gone - rate.count + 1
        for _, last, count in self._went:
            too_many -= count
            if too_many <= 0:
                return last + rate.per
        return at

    def is_empty(self, rate: Rate, at: float) -> bool:
        self._forget(rate, at)
        return not self._went

    def _forget(self, rate: Rate, at: float) -> None:
        went = self._went
        while went and went[0][1] + rate.per <= at:
            self._gone -= went.popleft()[2]


class Limiter:
    """The limits that were set or come from safety rules, and their usage."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        held: Callable[[], Iterable[Job]] = tuple,
        waiting: Callable[[], Iterable[Job]] = tuple,
    ) -> None:
        self.monotonic = now
        """The scheduler sets a monotonic clock here."""
        self.on_change: Callable[[], None] = lambda: None
        self.in_use = False
        """Whether there is any limit at all."""
        self.shards = 1
        """Those of the database: each keeps to its share of a limit that tenants have in common."""
        self._now, self._all_held, self._all_waiting = now, held, waiting
        self._sorter = Sorter()
        self._in_force: dict[str, Limit] = {}
        """The limits that were set, and those of rules."""
        self._held: dict[str, Buckets] = {}
        self._waiting: dict[int, Buckets] = {}
        self._reserved: dict[str, Buckets] = {}
        """Requests, by id, that are counted as queued and are not committed yet."""
        self._running: Counter[Bucket] = Counter()
        self._queued: Counter[Bucket] = Counter()
        self._windows: dict[Bucket, Window] = {}
        self._departures: dict[Bucket, deque[float]] = {}
        self._timers: list[tuple[float, Bucket]] = []
        self._timed: set[Bucket] = set()
        self._freed: dict[Bucket, None] = {}
        self._tidy_at = _TIDY

    # -- the limits ---------------------------------------------------------------

    @property
    def limits(self) -> dict[str, Limit]:
        """The limits that were set, by name."""
        return self._sorter.limits

    def use(self, limits: Iterable[Limit]) -> None:
        """Apply these limits from now on and recount all jobs."""
        before, self._sorter = self._sorter.limits, Sorter(limits)
        now = self._sorter.limits
        rules = {name: limit for name, limit in self._in_force.items() if name not in before}
        self._in_force = rules | {name: share_of(limit, self.shards) for name, limit in now.items()}
        self.in_use = bool(self._in_force)
        for bucket in list(self._windows):
            old, new = before.get(bucket.limit), now.get(bucket.limit)
            if old is not None and (new is None or new.key != old.key):
                del self._windows[bucket]
        self._count_anew()
        self.on_change()

    def _count_anew(self) -> None:
        for counted in (self._held, self._running, self._waiting, self._queued, self._reserved):
            counted.clear()
        self._timers.clear()
        self._timed.clear()
        for job in self._all_held():
            self._count_held(job)
        for job in self._all_waiting():
            self.wait(job)

    def buckets(self, job: Job, verdict: SafetyVerdict | None = None) -> Buckets:
        """The buckets of a job, by its stored verdict or a newer one."""
        mine = self._sorter.sort(job.request)
        said = job.verdict if verdict is None else verdict
        limit = None if said is None else rule_limit(said)
        if limit is None:
            return mine
        if verdict is not None or limit.name not in self._in_force:
            self._learn(limit)
        return (*mine, Bucket(limit.name, (job.request.tenant,)))

    def _learn(self, limit: Limit) -> None:
        """Update the limit of a rule."""
        if self._in_force.get(limit.name) != limit:
            self._in_force[limit.name] = limit
            self.in_use = True
            late = {bucket for bucket in self._timed if bucket.limit == limit.name}
            self._timed -= late
            self._freed.update(dict.fromkeys(late))

    # -- counting ----------------------------------------------------------

    def wait(self, job: Job) -> None:
        """Count a job as waiting."""
        if job.seq not in self._waiting and (mine := self._sorter.sort(job.request)):
            self._waiting[job.seq] = mine
            self._queued.update(mine)

    def wait_no_more(self, seq: int) -> None:
        for bucket in self._waiting.pop(seq, ()):
            _take_one(self._queued, bucket)
            if self._in_force[bucket.limit].max_waiting is not None:
                left = self._departures.setdefault(bucket, deque(maxlen=_DEPARTURES))
                left.append(self.monotonic())

    def hold(self, job: Job) -> None:
        """Count a job as running, once, even if it moves to another worker."""
        if job.job_id in self._held:
            return
        self._spend(self._count_held(job), job.dispatched_at or 0.0)
        if len(self._windows) + len(self._departures) > self._tidy_at:
            self._tidy()

    def _count_held(self, job: Job) -> Buckets:
        mine = self.buckets(job)
        if mine:
            self._held[job.job_id] = mine
            self._running.update(mine)
        return mine

    def recall(self, job: Job, went_at: float) -> None:
        """Count a job that an earlier engine started: it counts for rates only."""
        self._spend(self.buckets(job), went_at)

    def _spend(self, buckets: Buckets, went_at: float) -> None:
        ago = max(0.0, self._now() - went_at)
        for bucket in buckets:
            limit = self._in_force.get(bucket.limit)
            if limit is not None and limit.rate is not None:
                window = self._windows.setdefault(bucket, Window())
                window.spend(limit.rate, self.monotonic() - ago)

    def let_go(self, job_id: str) -> None:
        """Count a job as no longer running."""
        for bucket in self._held.pop(job_id, ()):
            _take_one(self._running, bucket)
            self._freed[bucket] = None

    def has_room_again(self, job: Job) -> bool:
        """Whether a job that was let go of while it waited may be counted as running again."""
        return not any(
            self._too_many_run(bucket, limit, _NOTHING_TAKEN)
            for bucket in self.buckets(job)
            if (limit := self._in_force.get(bucket.limit)) is not None
        )

    def hold_again(self, job: Job) -> None:
        """Count it as running again; its start was counted before."""
        if job.job_id not in self._held:
            self._count_held(job)

    def _tidy(self) -> None:
        """Forget the windows of idle keys."""
        at = self.monotonic()
        for bucket, window in list(self._windows.items()):
            limit = self._in_force.get(bucket.limit)
            if limit is None or limit.rate is None or window.is_empty(limit.rate, at):
                del self._windows[bucket]
        for bucket in [bucket for bucket in self._departures if bucket not in self._queued]:
            del self._departures[bucket]
        self._tidy_at = max(_TIDY, 2 * (len(self._windows) + len(self._departures)))

    # -- dispatch ---------------------------------------------------------------

    def freed(self) -> list[Bucket]:
        """The buckets that may have room again since the last call."""
        at = self.monotonic()
        while self._timers and self._timers[0][0] <= at:
            _, bucket = heapq.heappop(self._timers)
            if bucket in self._timed:
                self._timed.discard(bucket)
                self._freed[bucket] = None
        freed = list(self._freed)
        self._freed.clear()
        return freed

    def opens_in(self) -> float | None:
        """Seconds until a rate limit next lets a waiting job start."""
        return max(0.0, self._timers[0][0] - self.monotonic()) if self._timers else None

    def full(self, buckets: Buckets, taken: Counter[Bucket]) -> Bucket | None:
        """The first bucket without room, counting what this turn took."""
        for bucket in buckets:
            limit = self._in_force.get(bucket.limit)
            if limit is not None and (
                self._too_many_run(bucket, limit, taken) or self._too_fast(bucket, limit, taken)
            ):
                return bucket
        return None

    def _too_many_run(self, bucket: Bucket, limit: Limit, taken: Counter[Bucket]) -> bool:
        most = limit.concurrency
        return most is not None and self._running[bucket] + taken[bucket] >= most

    def _too_fast(self, bucket: Bucket, limit: Limit, taken: Counter[Bucket]) -> bool:
        if limit.rate is None:
            return False
        window = self._windows.get(bucket)
        room = limit.rate.count if window is None else window.room(limit.rate, self.monotonic())
        return room <= taken[bucket]

    def watch(self, bucket: Bucket, taken: Counter[Bucket]) -> None:
        """Jobs wait for this bucket: say when it may have room again."""
        limit = self._in_force[bucket.limit]
        if limit.rate is None or self._too_many_run(bucket, limit, taken):
            return  # one that ends will free it
        if not self._too_fast(bucket, limit, _NOTHING_TAKEN):
            self._freed[bucket] = None  # it is full only with what this turn took
        elif bucket not in self._timed:
            self._timed.add(bucket)
            heapq.heappush(self._timers, (self._opens(bucket, limit), bucket))

    def retract(self, buckets: Iterable[Bucket]) -> None:
        """Give back what a turn took and did not use."""
        self._freed.update(dict.fromkeys(buckets))

    # -- admission ------------------------------------------------------------

    @property
    def limits_queues(self) -> bool:
        """Whether some limit has max_waiting."""
        return any(limit.max_waiting is not None for limit in self.limits.values())

    def reserve_room(self, request: JobRequest) -> None:
        """Count a request as queued before it is committed, to reserve its room."""
        if self._in_force and (mine := self._sorter.sort(request)):
            self._reserved[request.job_id] = mine
            self._queued.update(mine)

    def release_room(self, request: JobRequest) -> None:
        for bucket in self._reserved.pop(request.job_id, ()):
            _take_one(self._queued, bucket)

    def check_waiting(self, requests: Sequence[JobRequest]) -> None:
        """Raise TooMany if these requests would exceed a max_waiting."""
        if not self.limits_queues:
            return
        coming: Counter[Bucket] = Counter()
        for request in requests:
            coming.update(self._sorter.sort(request))
        for bucket, more in coming.items():
            most = self._in_force[bucket.limit].max_waiting
            waiting = self._queued[bucket]
            if most is not None and waiting + more > most:
                raise self._too_many(bucket, waiting, more, most)

    def _too_many(self, bucket: Bucket, waiting: int, more: int, most: int) -> TooMany:
        retry_after = self._drains_in(bucket, waiting + more - most)
        hint = f"try again in {retry_after:.0f} s"
        if more > most:
            hint = f"submit at most {most} at once"
        return TooMany(
            f"limit {bucket}: queue is full (max_waiting={most}, {waiting} waiting, {more} more)",
            retry_after=retry_after,
            hint=hint,
        )

    def _drains_in(self, bucket: Bucket, too_many: int) -> float:
        """Estimated seconds until this many have left, at the recent rate."""
        left = self._departures.get(bucket)
        if not left:
            return _LONGEST_HINT
        took = (self.monotonic() - left[0]) / len(left)
        return min(max(took * too_many, _SHORTEST_HINT), _LONGEST_HINT)

    # -- reporting -------------------------------------------------------------

    def why(self, job: Job) -> str | None:
        """Which limit delays a job, in a sentence."""
        bucket = self.full(self.buckets(job), _NOTHING_TAKEN)
        if bucket is None:
            return None
        limit = self._in_force[bucket.limit]
        running = self._running[bucket]
        if limit.concurrency is not None and running >= limit.concurrency:
            return f"limit {bucket} is reached: {running} of {limit.concurrency} running"
        pause = self._opens(bucket, limit) - self.monotonic()
        return f"limit {bucket} is reached: {limit.rate}, next in {pause:.1f} s"

    def _opens(self, bucket: Bucket, limit: Limit) -> float:
        at, window = self.monotonic(), self._windows.get(bucket)
        return at if window is None or limit.rate is None else window.opens(limit.rate, at)

    def views(self, now: float) -> list[LimitView]:
        """Every limit and its usage; those of safety rules come last."""
        by_limit: dict[str, dict[Bucket, None]] = {name: {} for name in self._in_force}
        for bucket in (*self._running, *self._queued, *self._windows):
            if bucket.limit in by_limit:
                by_limit[bucket.limit][bucket] = None
        limits = [*self.limits.values()]
        limits += [
            limit
            for name, limit in self._in_force.items()
            if name not in self.limits and by_limit[name]
        ]
        return [LimitView(limit, self._uses(by_limit[limit.name], now)) for limit in limits]

    def _uses(self, buckets: Iterable[Bucket], now: float) -> tuple[LimitUse, ...]:
        uses = []
        for bucket in buckets:
            pause = self._opens(bucket, self._in_force[bucket.limit]) - self.monotonic()
            use = LimitUse(
                bucket.key,
                self._running[bucket],
                self._queued[bucket],
                now + pause if pause > 0 else None,
            )
            if use.running or use.waiting or use.blocked_until is not None:
                uses.append(use)
        uses.sort(key=lambda use: (-use.running, -use.waiting, use.key))
        return tuple(uses[:_USES])


class Gate:
    """Places jobs within the limits, counting what this turn took."""

    def __init__(self, limiter: Limiter, place: Callable[[QueueKey], str | None]) -> None:
        self._limiter, self._place = limiter, place
        self.taken: Counter[Bucket] = Counter()

    def place(self, key: QueueKey) -> str | Bucket | None:
        """A worker; the bucket that is full; or None if no worker has room."""
        buckets = key.buckets
        if buckets:
            full = self._limiter.full(buckets, self.taken)
            if full is not None:
                self._limiter.watch(full, self.taken)
                return full
        worker = self._place(key)
        if worker is not None and buckets:
            self.taken.update(buckets)
        return worker


def _take_one(counts: Counter[Bucket], bucket: Bucket) -> None:
    counts[bucket] -= 1
    if counts[bucket] <= 0:
        del counts[bucket]


# -- setting them ---------------------------------------------------------------------------

LIMITS = "limit/"
"""How the names of facts begin that are limits."""
_LONGEST = 7 * DAY
"""How far back rates look at start."""
_PAGES = 50
"""Pages of the journal that are read at once, from its end."""
_EVENTS = 10_000
_MOST = 100_000
"""Dispatches that are recalled at most; the newest count."""
_GLOB = re.compile(r"[A-Za-z0-9_.:@*?\[\]!-]{1,200}", re.ASCII)


class LimitService:
    """See `penstock.ports.engine_api.Limits`."""

    def __init__(self, store: Ledger, limiter: Limiter, clock: Clock, guard: Guard) -> None:
        self._store, self._limiter, self._clock, self._guard = store, limiter, clock, guard

    async def put(self, limit: Limit) -> LimitView:
        with self._guard.doing(Limits.put, limit.name):
            check_limit(limit)
            check_share(limit, self._store.shard.count)
            await self._store.home.remember(LIMITS + limit.name, msgspec.json.encode(limit))
            self._limiter.use({**self._limiter.limits, limit.name: limit}.values())
            views = self._limiter.views(self._clock.now())
            return next(view for view in views if view.limit.name == limit.name)

    async def list(self) -> builtins.list[LimitView]:
        """Of a limit that tenants have each for themselves, a tenant sees its own use."""
        views = self._limiter.views(self._clock.now())
        if (mine := self._guard.caller.tenant) is None:
            return views
        return [
            LimitView(view.limit, _uses_of(view, mine))
            for view in views
            if view.limit.tenants in ((), (mine,)) or "tenant" in view.limit.key
        ]

    async def get(self, name: str) -> LimitView:
        for view in await self.list():
            if view.limit.name == name:
                return view
        raise NotFound(f"no limit {name[:100]!r}", hint="'penstock limit list' shows them")

    async def delete(self, name: str) -> None:
        with self._guard.doing(Limits.delete, name):
            if not await self._store.home.forget(LIMITS + name):
                raise NotFound(f"no limit {name!r}", hint="'penstock limit list' shows them")
            limits = self._limiter.limits.values()
            self._limiter.use([limit for limit in limits if limit.name != name])


def _uses_of(view: LimitView, tenant: str) -> tuple[LimitUse, ...]:
    if "tenant" not in view.limit.key:
        return view.uses if view.limit.tenants == (tenant,) else ()
    at = view.limit.key.index("tenant")
    return tuple(use for use in view.uses if use.key[at] == tenant)


def check_limit(limit: Limit) -> None:
    """Raise InvalidRequest for the first field that is not acceptable."""
    check_name("name", limit.name)
    for index, part in enumerate(limit.key):
        if part not in ("tenant", "topic") and not re.fullmatch(r"label:.{1,128}", part):
            raise InvalidRequest(
                f"key[{index}]", f"{part!r} is not a key", hint="tenant, topic or label:NAME"
            )
    for field in ("topics", "tenants"):
        for index, glob in enumerate(getattr(limit, field)):
            if not _GLOB.fullmatch(glob):
                raise InvalidRequest(f"{field}[{index}]", f"{glob!r} is not a glob, as job.text.*")
    check_pairs("labels", limit.labels)
    if limit.concurrency is None and limit.rate is None and limit.max_waiting is None:
        raise InvalidRequest(
            "concurrency", "no limit is set", hint="set concurrency, rate or max_waiting"
        )
    if limit.concurrency is not None:
        check_number("concurrency", limit.concurrency, 1, 1_000_000)
    if limit.max_waiting is not None:
        check_number("max_waiting", limit.max_waiting, 0, 100_000_000)
    if limit.rate is not None:
        check_number("rate.count", limit.rate.count, 1, 1_000_000)
        check_number("rate.per", limit.rate.per, 0.001, 31_536_000)


def share_of(limit: Limit, shards: int) -> Limit:
    """What one shard may use of a limit. A tenant is in one shard, so what is its own is whole."""
    if shards == 1 or not _is_common(limit):
        return limit
    most, rate, waiting = limit.concurrency, limit.rate, limit.max_waiting
    return replace(
        limit,
        concurrency=None if most is None else most // shards,
        rate=None if rate is None else replace(rate, count=rate.count // shards),
        max_waiting=None if waiting is None else waiting // shards,
    )


def check_share(limit: Limit, shards: int) -> None:
    """Raise InvalidRequest for a limit that can't be divided among shards."""
    if shards == 1 or not _is_common(limit):
        return
    values = {"concurrency": limit.concurrency, "max_waiting": limit.max_waiting}
    values["rate.count"] = None if limit.rate is None else limit.rate.count
    for field, value in values.items():
        if value is not None and value < shards and not (field == "max_waiting" and value == 0):
            raise InvalidRequest(
                field,
                f"must be at least {shards}, because each of {shards} shards gets its share",
                hint="or give each tenant a limit of its own: add tenant to the key",
            )


def _is_common(limit: Limit) -> bool:
    """Whether tenants of several shards may share it."""
    one = len(limit.tenants) == 1 and not set(limit.tenants[0]) & set("*?[")
    return "tenant" not in limit.key and not one


# -- at start ---------------------------------------------------------------------------------


def read_limits(facts: Mapping[str, bytes]) -> list[Limit]:
    return [msgspec.json.decode(value, type=Limit) for value in facts.values()]


async def load_limits(
    store: Ledger, limiter: Limiter, clock: Clock, rates: Iterable[Rate] = ()
) -> None:
    """Use the stored limits; and count, for their rates and these, what started lately."""
    limits = read_limits(await store.home.recall_all(LIMITS))
    limiter.use(limits)
    spans = [limit.rate.per for limit in limits if limit.rate is not None]
    spans += [rate.per for rate in rates]
    if spans:
        await recall_rates(store, limiter, clock.now() - min(max(spans), _LONGEST))


async def recall_rates(store: Ledger, limiter: Limiter, since: float) -> int:
    """Count what was given to workers since a time and has ended; returns how many did."""
    gone = await _dispatched(store, since)
    counted = 0
    for event in reversed(gone):
        job = await store.get(event.transition.job_id)
        if job is not None and job.is_final:  # others are counted as what is held
            limiter.recall(job, event.transition.at)
            counted += 1
    return counted


async def _dispatched(store: Ledger, since: float) -> list[JournalEvent]:
    """Dispatches since a time, newest first. A repeat of one takes no second place."""
    found: list[JournalEvent] = []
    end = await store.last_event()
    while end > 0 and len(found) < _MOST:
        start = cursor_of(max(0, page_of(end) - _PAGES), 0)
        page = await _between(store, start, end)
        found.extend(
            event
            for event in reversed(page)
            if event.transition.event is JobEvent.DISPATCH and event.transition.at >= since
        )
        if page and page[0].transition.at < since:
            break
        end = start
    return found[:_MOST]


async def _between(store: Ledger, start: int, end: int) -> list[JournalEvent]:
    """Events after one cursor, up to another."""
    found: list[JournalEvent] = []
    while start < end and (some := await store.events(start, _EVENTS)):
        found.extend(event for event in some if event.cursor <= end)
        start = some[-1].cursor
    return found
