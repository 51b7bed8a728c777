"""Jobs that wait for each other must not do so in a circle. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.errors import InvalidRequest


def check_cycles(after: Mapping[str, tuple[str, ...]]) -> None:
    """Raise InvalidRequest for jobs that would wait for each other for ever.

    Only jobs that come together can form a circle: what is there already waits for
    nothing that comes later.
    """
    done: set[str] = set()
    for start in after:
        trail: dict[str, None] = {}
        stack = [(start, iter(after[start]))]
        while stack:
            job_id, parents = stack[-1]
            trail[job_id] = None
            for parent in parents:
                if parent in trail:
                    raise InvalidRequest("after", f"a circle: {_drawn(trail, parent)}")
                if parent in after and parent not in done:
                    stack.append((parent, iter(after[parent])))
                    break
            else:
                done.add(job_id)
                del trail[job_id]
                stack.pop()


def _drawn(trail: Mapping[str, None], back_to: str) -> str:
    ids = list(trail)
    circle = [*ids[ids.index(back_to) :], back_to]
    shown = circle if len(circle) <= 6 else [*circle[:3], "…", *circle[-2:]]
    return " waits for ".join(shown)
