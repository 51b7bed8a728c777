"""Whether this machine lets a process leave the network."""

from __future__ import annotations

import subprocess
import sys
from functools import cache


@cache
def leaving_is_permitted() -> bool:
    """Not where user namespaces are forbidden, as in a chroot."""
    code = (
        "from penstock.workloads.function.process_control import leave_network as go; print(go())"
    )
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return tried.stdout == "\n"
