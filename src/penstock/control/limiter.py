"""How many jobs may run at once, how fast they may go, and how many may wait, by key.

The counters are projections: the board tells what waits and what is held, and they are
counted anew when the limits change. A job is given out only when each of its buckets has
room; a job whose worker was lost is still in its buckets.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from penstock.control.backlog import Lane
from penstock.control.buckets import Bucket, Buckets, Sorter, Terms, rule_bucket, rule_terms
from penstock.control.windows import Window
from penstock.core.errors import TooMany
from penstock.core.job import Job, JobRequest
from penstock.core.verdict import SafetyVerdict
from penstock.ports.limits import Limit, LimitUse, LimitView

_USES = 100
_LEAVINGS = 32
"""How many jobs' leaving tells how fast a queue gets shorter."""
_SHORTEST_HINT, _LONGEST_HINT = 1.0, 60.0
_TIDY = 1000
_NONE_TAKEN: Counter[Bucket] = Counter()


class Limiter:
    """Limits that were set, and those of safety rules; and how far each is used."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        held: Callable[[], Iterable[Job]] = tuple,
        waiting: Callable[[], Iterable[Job]] = tuple,
    ) -> None:
        self.monotonic = now
        """The scheduler gives it a clock that nobody sets."""
        self.on_change: Callable[[], None] = lambda: None
        self.in_use = False
        """Whether there is any limit at all."""
        self._now, self._all_held, self._all_waiting = now, held, waiting
        self._sorter = Sorter()
        self._terms: dict[str, Terms] = {}
        self._held: dict[str, Buckets] = {}
        self._waiting: dict[int, Buckets] = {}
        self._reserved: dict[str, Buckets] = {}
        """Requests, by id, that are counted as queued and are not committed yet."""
        self._running: Counter[Bucket] = Counter()
        self._queued: Counter[Bucket] = Counter()
        self._windows: dict[Bucket, Window] = {}
        self._leavings: dict[Bucket, deque[float]] = {}
        self._timers: list[tuple[float, Bucket]] = []
        self._timed: set[Bucket] = set()
        self._freed: dict[Bucket, None] = {}
        self._tidy_at = _TIDY

    # -- what holds ---------------------------------------------------------------

    def use(self, limits: Iterable[Limit]) -> None:
        """Hold to these from now on; what waits is given its place anew."""
        before, self._sorter = self._sorter.limits, Sorter(limits)
        now = self._sorter.limits
        rules = {name: terms for name, terms in self._terms.items() if name not in before}
        self._terms = rules | self._sorter.terms()
        self.in_use = bool(self._terms)
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
        """What a job counts against, under the verdict that it has or that is just given."""
        mine = self._sorter.sort(job.request)
        said = job.verdict if verdict is None else verdict
        bucket = None if said is None else rule_bucket(job, said)
        if said is None or bucket is None:
            return mine
        if verdict is not None or bucket.limit not in self._terms:
            self._learn(bucket.limit, rule_terms(said))
        return (*mine, bucket)

    def _learn(self, name: str, terms: Terms) -> None:
        """What a rule says now, whatever it said before."""
        if self._terms.get(name) != terms:
            self._terms[name] = terms
            self.in_use = True
            late = {bucket for bucket in self._timed if bucket.limit == name}
            self._timed -= late
            self._freed.update(dict.fromkeys(late))

    # -- what is counted ----------------------------------------------------------

    def wait(self, job: Job) -> None:
        """It waits, whatever for."""
        if job.seq not in self._waiting and (mine := self._sorter.sort(job.request)):
            self._waiting[job.seq] = mine
            self._queued.update(mine)

    def wait_no_more(self, seq: int) -> None:
        for bucket in self._waiting.pop(seq, ()):
            _take_one(self._queued, bucket)
            if self._terms[bucket.limit].max_waiting is not None:
                left = self._leavings.setdefault(bucket, deque(maxlen=_LEAVINGS))
                left.append(self.monotonic())

    def hold(self, job: Job) -> None:
        """A worker has it; that it goes to another makes no difference."""
        if job.job_id in self._held:
            return
        self._spend(self._count_held(job), job.dispatched_at or 0.0)
        if len(self._windows) + len(self._leavings) > self._tidy_at:
            self._tidy()

    def _count_held(self, job: Job) -> Buckets:
        mine = self.buckets(job)
        if mine:
            self._held[job.job_id] = mine
            self._running.update(mine)
        return mine

    def recall(self, job: Job, went_at: float) -> None:
        """It went under an earlier engine and has ended: it counts for the rates."""
        self._spend(self.buckets(job), went_at)

    def _spend(self, buckets: Buckets, went_at: float) -> None:
        ago = max(0.0, self._now() - went_at)
        for bucket in buckets:
            terms = self._terms.get(bucket.limit)
            if terms is not None and terms.rate is not None:
                window = self._windows.setdefault(bucket, Window())
                window.spend(terms.rate, self.monotonic() - ago)

    def let_go(self, job_id: str) -> None:
        """No worker has it any more."""
        for bucket in self._held.pop(job_id, ()):
            _take_one(self._running, bucket)
            self._freed[bucket] = None

    def _tidy(self) -> None:
        """Forget the windows of keys that come no more."""
        at = self.monotonic()
        for bucket, window in list(self._windows.items()):
            terms = self._terms.get(bucket.limit)
            if terms is None or terms.rate is None or window.is_empty(terms.rate, at):
                del self._windows[bucket]
        for bucket in [bucket for bucket in self._leavings if bucket not in self._queued]:
            del self._leavings[bucket]
        self._tidy_at = max(_TIDY, 2 * (len(self._windows) + len(self._leavings)))

    # -- who may go ---------------------------------------------------------------

    def freed(self) -> list[Bucket]:
        """The buckets that may have room again since this was asked last."""
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
        """Seconds until a rate lets something go that it holds back."""
        return max(0.0, self._timers[0][0] - self.monotonic()) if self._timers else None

    def full(self, buckets: Buckets, taken: Counter[Bucket]) -> Bucket | None:
        """The first bucket that has no room beyond what is taken in this turn."""
        for bucket in buckets:
            terms = self._terms.get(bucket.limit)
            if terms is not None and (
                self._too_many_run(bucket, terms, taken) or self._too_fast(bucket, terms, taken)
            ):
                return bucket
        return None

    def _too_many_run(self, bucket: Bucket, terms: Terms, taken: Counter[Bucket]) -> bool:
        most = terms.concurrency
        return most is not None and self._running[bucket] + taken[bucket] >= most

    def _too_fast(self, bucket: Bucket, terms: Terms, taken: Counter[Bucket]) -> bool:
        if terms.rate is None:
            return False
        window = self._windows.get(bucket)
        room = terms.rate.count if window is None else window.room(terms.rate, self.monotonic())
        return room <= taken[bucket]

    def watch(self, bucket: Bucket, taken: Counter[Bucket]) -> None:
        """A lane waits for this bucket: say when it may have room again."""
        terms = self._terms[bucket.limit]
        if terms.rate is None or self._too_many_run(bucket, terms, taken):
            return  # one that ends will free it
        if not self._too_fast(bucket, terms, _NONE_TAKEN):
            self._freed[bucket] = None  # it is full only with what this turn took
        elif bucket not in self._timed:
            self._timed.add(bucket)
            heapq.heappush(self._timers, (self._opens(bucket, terms), bucket))

    def retract(self, buckets: Iterable[Bucket]) -> None:
        """What was taken in a turn was not used after all."""
        self._freed.update(dict.fromkeys(buckets))

    # -- what may come ------------------------------------------------------------

    @property
    def limits_queues(self) -> bool:
        """Whether some limit says how many jobs may wait."""
        return any(limit.max_waiting is not None for limit in self._sorter.limits.values())

    def reserve_room(self, request: JobRequest) -> None:
        """Count a request as queued before it is committed, so that nobody else gets its room."""
        if mine := self._sorter.sort(request):
            self._reserved[request.job_id] = mine
            self._queued.update(mine)

    def release_room(self, request: JobRequest) -> None:
        for bucket in self._reserved.pop(request.job_id, ()):
            _take_one(self._queued, bucket)

    def check_waiting(self, requests: Sequence[JobRequest]) -> None:
        """Raise TooMany if so many more may not wait."""
        if not self.limits_queues:
            return
        coming: Counter[Bucket] = Counter()
        for request in requests:
            coming.update(self._sorter.sort(request))
        for bucket, more in coming.items():
            most = self._terms[bucket.limit].max_waiting
            waiting = self._queued[bucket]
            if most is not None and waiting + more > most:
                raise self._too_many(bucket, waiting, more, most)

    def _too_many(self, bucket: Bucket, waiting: int, more: int, most: int) -> TooMany:
        retry_after = self._drains_in(bucket, waiting + more - most)
        hint = f"try again in {retry_after:.0f} s"
        if more > most:
            hint = f"submit at most {most} at once"
        return TooMany(
            f"limit {bucket}: {waiting} jobs wait, and with {more} more there would be over {most}",
            retry_after=retry_after,
            hint=hint,
        )

    def _drains_in(self, bucket: Bucket, too_many: int) -> float:
        """Seconds until so many are likely to have left, as fast as they did lately."""
        left = self._leavings.get(bucket)
        if not left:
            return _LONGEST_HINT
        took = (self.monotonic() - left[0]) / len(left)
        return min(max(took * too_many, _SHORTEST_HINT), _LONGEST_HINT)

    # -- what is said -------------------------------------------------------------

    def why(self, job: Job) -> str | None:
        """Which limit holds a job back, in a sentence."""
        bucket = self.full(self.buckets(job), _NONE_TAKEN)
        if bucket is None:
            return None
        terms = self._terms[bucket.limit]
        running = self._running[bucket]
        if terms.concurrency is not None and running >= terms.concurrency:
            return f"the limit {bucket} is reached: {running} of {terms.concurrency} run"
        pause = self._opens(bucket, terms) - self.monotonic()
        return f"the limit {bucket} lets {terms.rate} go: the next in {pause:.1f} s"

    def _opens(self, bucket: Bucket, terms: Terms) -> float:
        at, window = self.monotonic(), self._windows.get(bucket)
        return at if window is None or terms.rate is None else window.opens(terms.rate, at)

    def views(self, now: float) -> list[LimitView]:
        """Every limit and who uses it; those of safety rules come last."""
        by_limit: dict[str, dict[Bucket, None]] = {name: {} for name in self._terms}
        for bucket in (*self._running, *self._queued, *self._windows):
            if bucket.limit in by_limit:
                by_limit[bucket.limit][bucket] = None
        limits = [*self._sorter.limits.values()]
        limits += [
            Limit(name=name, key=("tenant",), concurrency=terms.concurrency, rate=terms.rate)
            for name, terms in self._terms.items()
            if name not in self._sorter.limits and by_limit[name]
        ]
        return [LimitView(limit, self._uses(by_limit[limit.name], now)) for limit in limits]

    def _uses(self, buckets: Iterable[Bucket], now: float) -> tuple[LimitUse, ...]:
        uses = []
        for bucket in buckets:
            pause = self._opens(bucket, self._terms[bucket.limit]) - self.monotonic()
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
    """Gives out places within the limits, counting what it gave out in one turn."""

    def __init__(self, limiter: Limiter, place: Callable[[Lane], str | None]) -> None:
        self._limiter, self._place = limiter, place
        self.taken: Counter[Bucket] = Counter()

    def place(self, lane: Lane) -> str | Bucket | None:
        """A worker; the bucket that is full; or None, as nobody has room."""
        buckets = lane.buckets
        if buckets:
            full = self._limiter.full(buckets, self.taken)
            if full is not None:
                self._limiter.watch(full, self.taken)
                return full
        worker = self._place(lane)
        if worker is not None and buckets:
            self.taken.update(buckets)
        return worker


def _take_one(counts: Counter[Bucket], bucket: Bucket) -> None:
    counts[bucket] -= 1
    if counts[bucket] <= 0:
        del counts[bucket]
