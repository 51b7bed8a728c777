"""What an engine's refusals mean. It tells most of it in words only."""

from __future__ import annotations

from penstock.workloads.container.engine import (
    CommandNotFound,
    CommandNotRunnable,
    EngineError,
    ImageNotFound,
    NotThere,
    PullFailed,
    Unsupported,
)
from penstock.workloads.container.engines.docker.api import Refused

NOT_FOUND = 404
CONFLICT = 409

_NO_COMMAND = ("no command specified", "no command or entrypoint", "no cmd or entrypoint")
_RUNTIME = ("unknown or invalid runtime", "invalid runtime name", "unknown runtime")
_MISSING = ("executable file not found", "no such file or directory", "not found in $path")
_NOT_RUNNABLE = ("permission denied", "exec format error", "is a directory")
_INITS = ("docker-init", "podman-init", "catatonit", "tini")
_NO_SUCH_IMAGE = (
    "manifest unknown",
    "not found",
    "does not exist",
    "name unknown",
    "no such image",
    "repository name not known",
)


def of_create(refused: Refused) -> EngineError:
    words = refused.message.lower()
    if refused.status == NOT_FOUND and "image" in words:
        return ImageNotFound(refused.message)
    if any(text in words for text in _NO_COMMAND):
        return CommandNotFound(refused.message)
    if any(text in words for text in _RUNTIME):
        return Unsupported(refused.message)
    return refused


def means_no_init(refused: Refused) -> bool:
    """Podman looks for its init program when a container is made."""
    return "container-init binary not found" in refused.message


def of_container(refused: Refused) -> EngineError:
    return NotThere(refused.message) if refused.status == NOT_FOUND else refused


def of_start(refused: Refused) -> EngineError:
    words = refused.message.lower()
    if refused.status == NOT_FOUND and "no such container" in words:
        return of_container(refused)
    if any(text in words for text in _NO_COMMAND):
        return CommandNotFound(refused.message)
    if "exec" in words and not any(name in words for name in _INITS):
        if any(text in words for text in _MISSING):
            return CommandNotFound(refused.message)
        if any(text in words for text in _NOT_RUNNABLE):
            return CommandNotRunnable(refused.message)
    return refused


def means_that_nothing_runs(refused: Refused) -> bool:
    """Of a signal: there is no such container, or it has ended. Podman has no status for that."""
    words = refused.message.lower()
    return refused.status in (NOT_FOUND, CONFLICT) or "can only kill running" in words


def of_pull(words: str) -> EngineError:
    """Registries that know no such image say so, in one of these ways."""
    lower = words.lower()
    if any(text in lower for text in _NO_SUCH_IMAGE) and "no such host" not in lower:
        return ImageNotFound(words)
    return PullFailed(words)
