"""Nodes of split models, made from the settings."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidRequest, Misconfigured, NotRunning, StoreFailed
from penstock.models.gguf import SUFFIX, stem_of
from penstock.models.store import ModelStore
from penstock.workloads.llm.values import LlmFailure, is_model_name
from penstock.workloads.pipes.config import LpConfig, parse_layers
from penstock.workloads.pipes.status import PipesView

if TYPE_CHECKING:
    from penstock.config import Settings


def pipe_config(settings: Settings) -> LpConfig | None:
    """How the node here is set up; None if there is none. Makes the network's key if there is
    none yet. Raises NotFound, InvalidRequest and Misconfigured."""
    node = settings.node
    if not node.model:
        return None
    model, source = pipe_source(settings)
    same = {name: getattr(node, name) for name in LpConfig.__struct_fields__ if hasattr(node, name)}
    return LpConfig(
        **same
        | {
            "model": model,
            "source": source,
            "layers": parse_layers(node.layers),
            "key": network_key(settings),
            "dtype": node.dtype.value,
            "wire": node.wire.value,
            "keep": node.keep_cache,
            "ping": node.heartbeat,
            "silence": node.lease,
            "open_timeout": node.wait_timeout,
        }
    )


# -- the model ----------------------------------------------------------------------


def pipe_source(settings: Settings) -> tuple[str, Path]:
    """The name by which the network knows the model, and where its weights are.

    A name that was given is the name, whatever file was found by it, so that all nodes that are
    told the same serve the same; a path that was given lends its own. The fingerprints of the
    weights tell whether it was the same model.
    """
    wanted = settings.node.model
    if settings.node.source is not None:
        return _named(wanted, "node.model"), _there(settings.node.source)
    store = ModelStore(settings.model_folder)
    if (folder := settings.model_folder / wanted).is_dir() and is_model_name(wanted):
        return wanted, folder
    if _is_path(wanted) and not (is_model_name(wanted) and _is_stored(store, wanted)):
        path = _there(Path(wanted).expanduser())
        return _named(stem_of(path.name), wanted), path
    try:
        found = store.find(wanted)
    except LlmFailure as failure:
        raise Misconfigured(failure.message) from failure
    return wanted if is_model_name(wanted) else found.name, Path(found.path)


def _is_path(text: str) -> bool:
    """A bare word is a path only if it leads to a model: folders are called anything."""
    looks_so = os.sep in text or text.startswith("~") or text.endswith(SUFFIX)
    return looks_so or os.path.isfile(os.path.join(text, "config.json"))


def _is_stored(store: ModelStore, name: str) -> bool:
    return (store.folder / f"{name}{SUFFIX}").is_file()


def _there(path: Path) -> Path:
    if not path.exists():
        raise Misconfigured(
            f"there is no file or folder {path}", hint="'penstock model list' shows what is there"
        )
    return path.resolve()


def _named(name: str, given: str) -> str:
    if not is_model_name(name):
        raise InvalidRequest(
            given[:150],
            f"a model can't be called {name[:150]!r}",
            hint="say --model NAME --source PATH (node.model and node.source); a name has letters,"
            " digits, _ and -, in words with single dots between",
        )
    return name


# -- the key ------------------------------------------------------------------------


def network_key(settings: Settings) -> str:
    """As it is set, or as it is kept in the data folder; made there at first."""
    if settings.node.key.startswith("@"):
        return _read(Path(settings.node.key[1:]).expanduser())
    if settings.node.key:
        return settings.node.key
    path = settings.pipe_key_file
    if not path.is_file():
        _make_key(path)
    return _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"can't read the network's key in {path}: {error}") from error


def _make_key(path: Path) -> None:
    """Whole or not at all; of two that make one at once, the first one's stays."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            os.link(new, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(new)
    except OSError as error:
        raise StoreFailed(f"can't keep the network's key in {path}: {error.strerror}") from error


# -- other nodes ---------------------------------------------------------------------


async def observe(address: str, key: str) -> PipesView:
    """What a node knows of its network, asked without joining it. Raises NotRunning if none
    answers there, or not with this key."""
    from penstock.workloads.pipes.net.mesh import observe as look
    from penstock.workloads.pipes.net.mesh import observer_id
    from penstock.workloads.pipes.views import view_of
    from penstock.workloads.pipes.wire.connection import NotConnected
    from penstock.workloads.pipes.wire.identity import Identity

    try:
        return view_of(await look(address, Identity.make(key, observer_id())))
    except NotConnected as error:
        raise NotRunning(f"no node tells of its network at {address}: {error.reason}") from error
