"""How many jobs are in each state, of each tenant and of all, known at any moment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from penstock.adapters.sqlite.database import STATE_CODES
from penstock.lifecycles.canonical import JobState


class Tally:
    """Loaded once from the table of the same name, then kept in step, commit by commit."""

    def __init__(self, rows: Iterable[tuple[str, int, int]] = ()) -> None:
        self._all: Counter[int] = Counter()
        self._tenants: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.add({(tenant, state): count for tenant, state, count in rows})

    def add(self, counts: Mapping[tuple[str, int], int]) -> None:
        for (tenant, state), count in counts.items():
            self._all[state] += count
            self._tenants[tenant][state] += count

    def of(self, tenant: str | None = None) -> dict[JobState, int]:
        """The states that have any, in the order of the lifecycle."""
        counts = self._all if tenant is None else self._tenants.get(tenant, Counter())
        return {state: n for state, code in STATE_CODES.items() if (n := counts[code])}
