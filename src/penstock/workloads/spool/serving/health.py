"""What keeps a server from its work."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Health:
    """Troubles that last, each under a name; told when they come and when they are over."""

    def __init__(self) -> None:
        self._troubles: dict[str, str] = {}

    @property
    def troubles(self) -> Mapping[str, str]:
        return dict(self._troubles)

    @property
    def is_well(self) -> bool:
        return not self._troubles

    def trouble(self, name: str, why: str) -> None:
        if name not in self._troubles:
            log.error("%s: %s", name, why)
        self._troubles[name] = why

    def over(self, name: str) -> None:
        if self._troubles.pop(name, None) is not None:
            log.warning("%s: goes on", name)
