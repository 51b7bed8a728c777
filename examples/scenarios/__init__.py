"""What the demo shows, in the order of its table.

A new capability is a module with a `SCENARIOS` list of its own, added here.
"""

from __future__ import annotations

from scenarios import (
    agent,
    contained,
    control,
    everyday,
    flow,
    gate,
    limits,
    network,
    split,
    spoken,
    staged,
    trouble,
    workers,
)
from scenarios.scenario import Scenario

SECTIONS: dict[str, list[Scenario]] = {
    "in this process": [*everyday.SCENARIOS, *trouble.SCENARIOS, *control.SCENARIOS],
    "with worker processes": workers.SCENARIOS,
    "through HTTP: the gate": gate.SCENARIOS,
    "through HTTP: limits": limits.SCENARIOS,
    "through HTTP: after others, by the clock, once more": flow.SCENARIOS,
    "through HTTP: who sees what": network.SCENARIOS,
    "through HTTP: an AI agent": agent.SCENARIOS,
    "pipelines": staged.SCENARIOS,
    "containers": contained.SCENARIOS,
    "language models": spoken.SCENARIOS,
    "a model split over nodes": split.SCENARIOS,
}
