"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A shared machine is slow now and then, and that says nothing about the code.
settings.register_profile(
    "penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("penstock")
