"""Functions that tests run in processes of their own, where they must be importable."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from penstock.core.job import Retry
from penstock.ports.executor import Context
from penstock.workloads.function.context import current


class Mishap(ValueError):
    pass


def double(number: int) -> int:
    return number * 2


def my_pid() -> int:
    return os.getpid()


def fail() -> None:
    raise Mishap("by design")


def ask_again() -> None:
    raise Retry("busy", after=7)


def report(ctx: Context) -> None:
    ctx.progress(0.5, "half")
    ctx.log("working")


def talk() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    os.system("echo from a subprocess")
    logging.getLogger("talk").warning("to logging")
    current().log("to current()")
    sys.stdout.write("without an end")


def until_asked(ctx: Context) -> None:
    ctx.progress(message="started")
    ctx.cancel.wait()
    ctx.cancel.raise_if_requested()


def deaf(ctx: Context) -> None:
    ctx.progress(message=str(os.getpid()))
    ctx.progress(message="started")
    while True:
        pass


def deaf_with_pid(ctx: Context, pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    deaf(ctx)


def deafer(ctx: Context) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf(ctx)


def with_family(ctx: Context) -> None:
    """Starts one process in its own group, one in a session of its own, and waits."""
    here = subprocess.Popen(["sleep", "600"])
    away = subprocess.Popen(["sleep", "600"], start_new_session=True)
    ctx.log(f"{here.pid} {away.pid}", level="pids")
    ctx.progress(message="started")
    while True:
        time.sleep(1)


def with_deaf_family(ctx: Context) -> None:
    """Starts a process in a session of its own that ignores SIGTERM, and waits."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(600)"
    command = [sys.executable, "-uc", code]
    away = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert away.stdout is not None
    away.stdout.read(1)
    ctx.log(str(away.pid), level="pids")
    ctx.progress(message="started")
    while True:
        time.sleep(1)


def leave_behind() -> int:
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def leave_thread() -> str:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "done"


def exit_politely() -> None:
    sys.exit(3)


def exit_abruptly() -> None:
    print("last words", flush=True)
    os._exit(4)


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def eat(size: int) -> int:
    return len(bytearray(size))


def fork_and_return() -> str:
    if os.fork() == 0:
        sys.exit(9)
    os.wait()
    return "parent"


def read_stdin() -> str:
    return sys.stdin.read()


def anything(value: Any) -> Any:
    return value


def unstorable() -> object:
    return object()


def letters(count: int) -> str:
    return "x" * count


def close_files() -> None:
    """All of them: where the parent has many open, the socket is far above the usual numbers."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def greet(port: int) -> str:
    """What a server on this machine says."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        return connection.recv(100).decode()


def write(path: str) -> None:
    Path(path).write_text("written")


def who_am_i(path: str) -> list[int]:
    Path(path).touch()
    return [os.getuid(), os.getgid(), Path(path).stat().st_uid]


STORY = ["a ", "long ", "story ", "é"]


def tell_until_there(ctx: Context, gate: str) -> str:
    """Streams a story, and ends when a file is there."""
    for word in STORY:
        ctx.stream(word)
    while not os.path.exists(gate):
        ctx.cancel.wait(0.01)
    return "".join(STORY)
