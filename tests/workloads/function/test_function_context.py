from __future__ import annotations

import pytest

from penstock.core.errors import Misconfigured
from penstock.workloads.function.context import current


def test_outside_a_job_there_is_no_current_one() -> None:
    with pytest.raises(Misconfigured, match="no job is running here"):
        current()
