"""Takes this process off the network, for good (Linux).

A network namespace of its own has no device that is up and no way out. Any user may make one
together with a user namespace, which also keeps the process from going back: what lies outside
of that is out of its rights, though it be root.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


def leave_network() -> str:
    """Do it, while there is only one thread. Empty if it is done, else why it is not."""
    if sys.platform != "linux":
        return "only Linux can do that"
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    try:
        # Whoever it was before, it is still: the names of user and group are the same inside.
        _write("setgroups", "deny")
        _write("uid_map", f"{user} {user} 1")
        _write("gid_map", f"{group} {group} 1")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def _write(name: str, text: str) -> None:
    Path("/proc/self", name).write_text(text)
