"""Named points at which a test may strike.

Real code calls `failpoint("name")` where a crash would matter most. It does nothing unless
the environment arms it, as `PENSTOCK_FAILPOINT=before-commit:3`: the third time, the
process kills itself with SIGKILL, so nothing can be cleaned up.
"""

from __future__ import annotations

import os
import signal

_ARMED, _, _AFTER = os.environ.get("PENSTOCK_FAILPOINT", "").partition(":")
_left = int(_AFTER or 1)


def failpoint(name: str) -> None:
    global _left
    if name == _ARMED:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
