"""The colour of each state, the same on the web page and in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.lifecycles.canonical import JobState


class Colour(NamedTuple):
    """Always shown together with the state's name."""

    light: str
    """On a light background, with a contrast of at least 4.5."""
    dark: str
    """The same on a dark one."""
    terminal: str
    """The nearest of a terminal's own colours, whatever its background."""


COLOURS: Mapping[JobState, Colour] = {
    JobState.PENDING: Colour("#8d6c00", "#f8dd5f", "yellow"),
    JobState.SCHEDULED: Colour("#6c34da", "#b098fb", "magenta"),
    JobState.DISPATCHED: Colour("#26798d", "#88edf5", "cyan"),
    JobState.RUNNING: Colour("#003da2", "#3b7ffb", "bright_blue"),
    JobState.SUCCEEDED: Colour("#066d4a", "#60c77f", "green"),
    JobState.FAILED: Colour("#950011", "#e5544b", "red"),
    JobState.CANCELLED: Colour("#42464b", "#8c8d93", "dim"),
    JobState.DENIED: Colour("#901976", "#e0a2cc", "bright_magenta"),
    JobState.TIMEOUT: Colour("#8b4f20", "#fb8c19", "dark_orange"),
}
"""Chosen to differ also for people who do not see all colours."""

LIKE: Mapping[JobState, tuple[str, ...]] = {
    JobState.PENDING: ("IDLE", "SKIPPED", "STAGING", "GONE"),
    JobState.SCHEDULED: ("QUEUED", "VALIDATING", "JOINED"),
    JobState.DISPATCHED: ("LOADING", "FINALIZING", "HALF_OPEN", "SEND"),
    JobState.RUNNING: ("IN_PROGRESS", "EMBED", "PROCESS_LAYERS", "HEAD"),
    JobState.SUCCEEDED: (
        *("COMPLETED", "FINISHED", "DONE", "OK", "READY", "CLOSED", "ACTIVE", "VALID", "COMPLETE"),
    ),
    JobState.FAILED: ("OPEN", "MISSING", "STALLED", "REVOKED", "LOST", "BAD", "INCOMPLETE", "ILL"),
    JobState.CANCELLED: ("CANCELLING", "EXPIRED"),
    JobState.DENIED: ("REJECTED", "REFUSED"),
    JobState.TIMEOUT: ("PARTIAL", "PAUSED", "DRAINING"),
}
"""States of other things (stages, workers, nodes …), by the job state whose colour they have."""
