"""The child's side: a process that holds one model, and serves it on a Unix socket.

It is run as a file and imports nothing of ours, so that it starts quickly and whatever happens
in llama.cpp happens here. What it is told comes as one line on standard input, which stays open
as long as the parent lives; what it tells goes out in lines on standard output.

    child.py FOLDER           FOLDER is the child's own
    child.py FOLDER --check   only tell whether llama.cpp can be loaded
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LINE = 1 << 16
CHECK = "--check"
_PR_SET_PDEATHSIG = 1
_OPENMP = "libgomp.so.1"
_PATH = "LD_LIBRARY_PATH"


def main() -> None:
    voice = _take_voice()
    xllamacpp = _imported(voice, Path(sys.argv[1]))
    if CHECK in sys.argv:
        _tell(voice, event="ready")
        return
    plan = json.loads(_line(0))
    _die_with_parent(signal.SIGKILL, plan["parent"])
    _tell(voice, event="loading")
    try:
        server = xllamacpp.Server(_params(xllamacpp, plan))
    except Exception as error:  # its reason is on standard error
        _tell(voice, event="failed", why=str(error))
        os._exit(1)
    _stay_with_parent(Path(plan["socket"]), plan["parent"])
    _tell(voice, event="ready")
    _wait(server)


def _imported(voice: int, folder: Path) -> Any:
    """The module of llama.cpp. Where the system has no OpenMP library, with a copy that another
    Python package brings; the linker looks for it only when a program starts."""
    link = folder / _OPENMP
    try:
        import xllamacpp
    except ImportError as error:
        copy = next(_copies(), None)
        if _OPENMP in str(error) and copy is not None and not link.is_symlink():
            link.symlink_to(copy)
            os.dup2(voice, 1)
            paths = filter(None, (str(folder), os.environ.get(_PATH)))
            os.environ[_PATH] = os.pathsep.join(paths)
            os.execv(sys.executable, [sys.executable, "-P", *sys.argv])
        _tell(voice, event="missing", why=str(error))
        os._exit(1)
    link.unlink(missing_ok=True)
    return xllamacpp


def _copies() -> Iterator[Path]:
    """OpenMP libraries (GNU's) of installed packages, as of torch and scikit-learn."""
    for folder in map(Path, sys.path):
        for pattern in (f"*/lib/{_OPENMP}", "*.libs/libgomp-*.so*"):
            yield from sorted(folder.glob(pattern))


def _params(engine: Any, plan: dict[str, Any]) -> Any:
    params, size = engine.CommonParams(), plan["size"]
    params.model.path = plan["path"]
    if plan["projector"]:
        params.mmproj.path = plan["projector"]
        params.mmproj_use_gpu = plan["projector_gpu"]
    params.n_gpu_layers = plan["gpu_layers"]
    if split := plan["tensor_split"]:
        params.tensor_split = [*split, *([0.0] * (len(params.tensor_split) - len(split)))]
    params.hostnames = [plan["socket"]]
    params.api_keys = [plan["key"]]
    params.n_threads_http = plan["http_threads"]
    params.cpuparams.n_threads = size["threads"]
    params.cpuparams_batch.n_threads = size["threads"]
    params.n_parallel = size["slots"]
    params.n_ctx = size["slots"] * size["context"]
    # Together they would be computed a little differently each time, and greedy text would
    # depend on the neighbours.
    params.kv_unified = False
    params.n_batch = size["batch"]
    params.n_ubatch = size["batch"]
    params.cache_ram_mib = 0  # a slot keeps what it computed last, and memory stays what it was
    if plan["embedding"]:
        params.embedding = True
        if plan["pooling"]:
            params.pooling_type = engine.llama_pooling_type[plan["pooling"]]
    params.endpoint_props = True
    params.endpoint_slots = True
    params.slot_save_path = str(Path(plan["socket"]).parent) + "/"
    params.fit_params = False  # how much memory it may take was decided before
    params.ui = False
    params.verbosity = 1  # errors
    return params


def _take_voice() -> int:
    """Keep standard output for us; whatever a library prints goes to standard error."""
    voice = os.dup(1)
    os.dup2(2, 1)
    return voice


def _tell(voice: int, **told: str) -> None:
    with suppress(OSError):  # the parent is gone, and we soon
        # On a line of its own, whatever was printed before it.
        os.write(voice, b"\n" + json.dumps(told).encode() + b"\n")


def _line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(fd, LINE)
        if not data:
            os._exit(1)
        line += data
    return line


def _die_with_parent(how: signal.Signals, parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _stay_with_parent(socket: Path, parent: int) -> None:
    """From now on an end takes the socket away. (Nothing of Python runs while a model loads.)

    The pipe tells of the parent's end everywhere, and the signal also when somebody whom the
    parent has forked holds the pipe open.
    """
    signal.signal(signal.SIGTERM, lambda *_: _leave(socket))
    _die_with_parent(signal.SIGTERM, parent)

    def watch() -> None:
        while os.read(0, LINE):
            pass
        _leave(socket)

    threading.Thread(target=watch, daemon=True).start()


def _leave(socket: Path) -> None:
    """Take the socket and its folder away, and end.

    The signal and the pipe may both be here at once: whichever ends the process has itself seen
    that nothing is left.
    """
    with suppress(OSError):
        socket.unlink()
    with suppress(OSError):
        socket.parent.rmdir()
    os.kill(os.getpid(), signal.SIGKILL)  # nothing of llama.cpp is worth an orderly end


def _wait(server: object) -> None:
    """Keep the server referenced, for ever."""
    while server is not None:
        signal.pause()


if __name__ == "__main__":
    main()
