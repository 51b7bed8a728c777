"""Callbacks that a store calls after each commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Listeners(Generic[T]):
    """The listeners of one store.

    The commit has happened when they are called, so one that raises must not keep the others
    or the committing caller waiting. Its error is logged and goes to `on_failure`: whatever
    that listener maintains no longer matches the store.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[T], None]] = []
        self.on_failure: Callable[[Exception], None] = lambda error: None

    def add(self, listener: Callable[[T], None]) -> Callable[[], None]:
        """Returns the way to stop listening."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def tell(self, news: T) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(news)
            except Exception as error:
                log.exception("a listener failed after a commit")
                self.on_failure(error)

    def clear(self) -> None:
        self._listeners.clear()
