"""An engine for who has none: the one that runs on the data folder, or one in this process."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.core.errors import NotRunning

if TYPE_CHECKING:
    from penstock.app.application import Session
    from penstock.app.client import Client


class Alone:
    """Connects when it is first needed, and lets go when the process ends."""

    def __init__(self, embed: Callable[[], Session], check: Callable[[Client], None]) -> None:
        """`embed` makes an engine of this process; `check` raises if the one that is running
        won't do."""
        self._embed, self._check = embed, check
        self._session: Session | None = None
        self._client: Client | None = None

    def client(self) -> Client:
        if self._client is None:
            self._client = self._connected()
        return self._client

    def _connected(self) -> Client:
        from penstock.app.application import connect

        session = connect()
        try:
            client = session.__enter__()
        except NotRunning:
            session = self._embed()
            client = session.__enter__()
        else:
            try:
                self._check(client)
            except BaseException:
                session.__exit__(None, None, None)
                raise
        self._session = session
        atexit.register(self.close)
        return client

    def close(self) -> None:
        """Let go of the engine; what it has accepted goes on at its next start."""
        session, self._session, self._client = self._session, None, None
        if session is not None:
            atexit.unregister(self.close)
            session.__exit__(None, None, None)
