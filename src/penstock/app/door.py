"""The engine's door to the network: a key makes a caller, and a caller has a Desk."""

from __future__ import annotations

from penstock.control.desk import EngineDesk
from penstock.control.keys import KeyRing
from penstock.ports.door import Guest

_KEPT = 10_000


class EngineDoor:
    """See `penstock.ports.door.Door`."""

    def __init__(self, keys: KeyRing, desk: EngineDesk) -> None:
        self._keys, self._desk = keys, desk
        self._guests: dict[str, Guest] = {}

    def enter(self, token: str) -> Guest:
        caller = self._keys.authenticate(token)
        guest = self._guests.get(caller.key_id)
        if guest is None or guest.caller != caller:
            if len(self._guests) >= _KEPT:
                self._guests.clear()
            desk = self._desk.serving(caller)
            guest = self._guests[caller.key_id] = Guest(caller, desk, desk.guard.admit)
        return guest
