"""Which engine it is that answers, and which version of the API it is spoken to in."""

from __future__ import annotations

from penstock.workloads.container.engines.docker.answers import Version
from penstock.workloads.container.engines.docker.api import VERSION_PATH, Api

NEWEST = (1, 44)
"""The newest version of the API that this was written for."""


async def greet(api: Api) -> Version:
    """Ask, and speak that version from now on."""
    version = await api.ask(Version, "GET", VERSION_PATH)
    ours = min(NEWEST, _numbers(api, version.api_version))
    if version.min_api_version:
        ours = max(ours, _numbers(api, version.min_api_version))
    api.prefix = f"/v{ours[0]}.{ours[1]}"
    return version


def _numbers(api: Api, text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise api.nonsense(f"{text!r} as its version")
    return int(major), int(minor)
