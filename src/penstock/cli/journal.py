"""How a process that serves tells what happens: one readable line each, on stderr."""

from __future__ import annotations

import logging
import os
import sys

from penstock.cli.program import DEBUG
from penstock.cli.terminal import harmless
from penstock.ports.executor import IN_JOB_LOG, JOB_LOGGER

_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}


class Lines(logging.Formatter):
    """`12:03:44 message`, the level if it is worth a look, and no stack trace unless asked."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__("%(message)s", datefmt="%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = f"{self.formatTime(record, self.datefmt)} "
        if record.levelno >= logging.WARNING:
            level = record.levelname.lower()
            code = _COLOURS.get(record.levelno, "0")
            text += f"\x1b[{code}m{level}\x1b[0m: " if self._colour else f"{level}: "
        if job_id := getattr(record, "job_id", ""):
            text += f"[{job_id}] "
        text += harmless(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            if os.environ.get(DEBUG):
                return f"{text}\n{harmless(self.formatException(record.exc_info))}"
            error = record.exc_info[1]
            text += harmless(f": {type(error).__name__}: {error}")
        return text


def keep_journal(*, verbose: bool = False) -> None:
    """Let this process's log, and those of the jobs that it runs, go to stderr."""
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(colour=colour))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(logging.DEBUG if verbose else logging.INFO)
    # What jobs log and print is told once: as lines of their logs.
    handler.addFilter(lambda record: not hasattr(record, IN_JOB_LOG))
    jobs = logging.getLogger(JOB_LOGGER)
    jobs.addHandler(handler)
    jobs.propagate = False
