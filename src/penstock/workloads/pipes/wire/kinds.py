"""What a frame between two nodes can be, and how large."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

PROTOCOL = 1
"""Nodes of different protocols do not talk. HELLO and BYE stay as they are for ever, so that
each can tell the other."""


class Kind(IntEnum):
    HELLO = 1
    """The first frame each way."""
    BYE = 2
    """The last one: why the connection ends."""
    PING = 3
    PONG = 4
    STATE = 5
    """Records of nodes: what each holds."""
    OPEN = 6
    """The origin asks for room for a job."""
    OPENED = 7
    STEPS = 8
    """Hidden states of one or more jobs, on their way to the next layers."""
    LANDED = 9
    """The last node of a pipe has taken a pass of which nothing is sent back."""
    FAILED = 10
    """A node can't go on with a job."""
    END = 11
    """The origin is done with a job."""
    ASSIGN = 12
    """Which layers a node is to hold."""


MAX_STEPS = 64 << 20
"""Bytes of a STEPS frame, unless told otherwise: 512 tokens of a model 16384 wide, in float32,
twice."""
_SMALL = 4 << 10
_CONTROL = 64 << 10

HELLO_LIMITS: Mapping[int, int] = {Kind.HELLO: _SMALL, Kind.BYE: _SMALL}
"""Before the peer is known."""


def limits(steps: int = MAX_STEPS) -> Mapping[int, int]:
    """The most bytes a frame of each kind may have after HELLO."""
    return {
        Kind.BYE: _SMALL,
        Kind.PING: 8,
        Kind.PONG: 8,
        # A record is a few kilobytes: fingerprints of all the layers that a node holds.
        Kind.STATE: 16 << 20,
        Kind.OPEN: _CONTROL,
        Kind.OPENED: _CONTROL,
        Kind.STEPS: steps,
        Kind.LANDED: _CONTROL,
        Kind.FAILED: _CONTROL,
        Kind.END: _CONTROL,
        Kind.ASSIGN: _CONTROL,
    }


def steps_limit(hidden: int, tokens: int, jobs: int = 256) -> int:
    """Bytes that one pass can need: its hidden states in float32, and a header for each job."""
    return hidden * tokens * 4 + jobs * _SMALL
