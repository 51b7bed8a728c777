"""The times of a cron expression in a time zone.

Two kinds of expression differ where a zone turns its clocks:

* A *fixed* one names its hours (`30 2 * * *`) and goes by the wall clock. A time that the
  wall clock shows twice counts once, the first time; times that it leaves out come once,
  together, at the moment of the turn.
* One whose hour field begins with `*` goes by real time: it comes whenever the wall clock
  matches, be that for the second time, and never where the wall clock shows no such time.

`cronsim` finds the wall-clock times and `zoneinfo` says what they are in UTC. All times are
whole seconds since the epoch; the same question has the same answer wherever it begins.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from penstock.core.errors import InvalidRequest

MAX_CRON = 200
_DAY = 86_400.0
_FIRST_LOOK = 600.0

MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

_FIELDS = (
    ("second", "0 to 59"),
    ("minute", "0 to 59"),
    ("hour", "0 to 23"),
    ("day of the month", "1 to 31, L for the last day, LW for the last working day"),
    ("month", "1 to 12, or jan to dec"),
    ("weekday", "0 to 7 (0 and 7 are Sunday), or sun to sat, mon#2 for the second Monday"),
)
_SHAPE = "five fields: minute hour day month weekday, as '30 7 * * mon-fri'; or @hourly, @daily …"


class Calendar:
    """When a cron expression fires. Raises InvalidRequest, naming the field, if it can't."""

    def __init__(self, cron: str, timezone: str = "UTC") -> None:
        self._expression = _expression(cron)
        self._zone = zone(timezone)
        self._fixed = not self._expression.split()[2].startswith("*")

    def after(self, time: float) -> Iterator[float]:
        """Its times after a time; ends when there is none for fifty years."""
        time = float(math.floor(time))
        repeated: deque[float] = deque()
        """When the wall clock will show times for the second time."""
        # What the wall clock shows again within a day is shown from an hour or so ago on.
        start = time + min(self._offset(time), self._offset(time + _DAY))
        for wall in CronSim(self._expression, datetime.fromtimestamp(start, UTC)):
            local = wall.replace(tzinfo=self._zone)
            first, second = local.timestamp(), local.replace(fold=1).timestamp()
            while repeated and repeated[0] < first:
                if (again := repeated.popleft()) > time:
                    yield again
            if second < first:  # the wall clock leaves it out
                if not self._fixed:
                    continue
                first = self._turn(second, first)
            elif second > first and not self._fixed:
                repeated.append(second)
            if first > time:  # else it was shown before, or is another one that was left out
                time = first
                yield first

    def next(self, time: float) -> float | None:
        return next(self.after(time), None)

    def last(self, most: int, after: float, until: float) -> tuple[list[float], bool]:
        """The last times of (after, until], `most` at most; and whether there are more."""
        look = _FIRST_LOOK
        while True:
            start = max(after, until - look)
            found: deque[float] = deque(maxlen=most + 1)
            for time in self.after(start):
                if time > until:
                    break
                found.append(time)
            if len(found) > most or start <= after:
                more = len(found) > most
                return list(found)[1 if more else 0 :], more
            look *= 4

    def _offset(self, time: float) -> float:
        wall = datetime.fromtimestamp(time, self._zone)
        return wall.replace(tzinfo=UTC).timestamp() - time

    def _turn(self, begin: float, end: float) -> float:
        """The moment in (begin, end] at which the UTC offset changes."""
        offset = self._offset(begin)
        while end - begin > 1:
            middle = float((begin + end) // 2)
            if self._offset(middle) == offset:
                begin = middle
            else:
                end = middle
        return end


def zone(name: str) -> ZoneInfo:
    """The time zone of this name. Raises InvalidRequest if it is unknown."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        near = get_close_matches(name[:60].lower(), _zone_names(), 1, 0.7)
        raise InvalidRequest(
            "timezone",
            f"unknown time zone {name[:60]!r}",
            hint=f"did you mean {_zone_names()[near[0]]}?"
            if near
            else "a name of the IANA database, as UTC or Europe/Berlin",
        ) from None


@cache
def _zone_names() -> dict[str, str]:
    """All zone names, by lower-case name and by lower-case city."""
    names = sorted(available_timezones() - {"localtime", "posixrules", "Factory"})
    places = {name.rpartition("/")[2].lower(): name for name in names}
    return places | {name.lower(): name for name in names}


def _expression(cron: str) -> str:
    """The expression, checked, with six fields."""
    shown = repr(cron if len(cron) <= 60 else cron[:57] + "...")
    if len(cron) > MAX_CRON:
        raise InvalidRequest("cron", f"{shown} is longer than {MAX_CRON} characters", hint=_SHAPE)
    text = cron.strip()
    if text.startswith("@"):
        if text.lower() not in MACROS:
            raise InvalidRequest("cron", f"{shown} is unknown", hint=", ".join(MACROS))
        text = MACROS[text.lower()]
    fields = text.split()
    if len(fields) == 5:
        fields.insert(0, "0")
    if len(fields) != 6:
        said = f"{shown} has {len(fields)} field{'s' if len(fields) != 1 else ''}"
        raise InvalidRequest("cron", said, hint=_SHAPE)
    for index, (field, (name, allowed)) in enumerate(zip(fields, _FIELDS, strict=True)):
        alone = ["*"] * 6
        alone[index] = field
        try:
            CronSim(" ".join(alone), _EXAMPLE)
        except CronSimError:
            raise InvalidRequest(
                "cron", f"{shown}: {name} {field!r} is not valid", hint=allowed
            ) from None
    text = " ".join(fields)
    try:
        next(CronSim(text, _EXAMPLE))
    except (CronSimError, StopIteration):
        raise InvalidRequest(
            "cron", f"{shown} never fires", hint="there is no such day in these months"
        ) from None
    return text


_EXAMPLE = datetime(2000, 1, 1)
"""Any date that occurs, occurs within the 50 years that cronsim looks ahead from here."""
