"""What the demo shows, in the order of its table.

A new capability is a module with a `SCENARIOS` list of its own, added here.
"""

from __future__ import annotations

from scenarios import control, everyday, trouble, workers
from scenarios.scenario import Scenario

SCENARIOS: list[Scenario] = [
    *everyday.SCENARIOS,
    *trouble.SCENARIOS,
    *control.SCENARIOS,
    *workers.SCENARIOS,
]
