"""Nodes as processes: `python pipes_nodes.py SOCKET` is a nursery that has imported everything and
forks a node for each connection to its socket. Over that connection the node is told what to do
and tells what happens, in lines of JSON. It ends with its connection."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib
import logging
import os
import select
import signal
import socket
import struct
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

MODEL = "tiny"
LEFT = "left"
"""Instead of a code: the one who asked was not there any more."""
IMPORTED = (
    "penstock.workloads.pipes.node",
    "penstock.workloads.pipes.weights.prepared",
    "penstock.workloads.pipes.weights.safetensors",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",  # and what its tokenizers need
)
_NEW_NETWORK = 0x40000000
_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_SET_FLAGS, _SET_ADDRESS, _SET_MASK, _UP = 0x8914, 0x8916, 0x891C, 0x0041
"""Of linux/sched.h, linux/if_tun.h, linux/sockios.h and linux/if.h."""

# -- what a node is told ----------------------------------------------------------------


class MoveOut(Struct, tag=True):
    """Have a network of its own: what leaves it comes out of a file, in packets of IP."""

    address: str


class WatchFiles(Struct, tag=True):
    """Remember every file that is opened from now on."""


class Start(Struct, tag=True):
    config: msgspec.Raw


class Ask(Struct, tag=True):
    number: int
    prompt: tuple[int, ...]
    count: int


class Hang(Struct, tag=True):
    """The one who asked leaves."""

    number: int


class Tell(Struct, tag=True):
    """How it is now."""


class Stop(Struct, tag=True):
    """Politely."""


Command = MoveOut | WatchFiles | Start | Ask | Hang | Tell | Stop

# -- what it tells ----------------------------------------------------------------------


class Born(Struct, tag=True):
    pid: int


class MovedOut(Struct, tag=True):
    fd: int
    """Of that file, in the node's process."""


class Started(Struct, tag=True):
    address: str


class Wrote(Struct, tag=True):
    number: int
    text: str
    tokens: int


class Ended(Struct, tag=True):
    """An answer is whole."""

    number: int
    text: str
    tokens: int
    nodes: tuple[str, ...]


class Failed(Struct, tag=True):
    number: int
    code: str
    reason: str


class Heard(Struct, tag=True):
    """What the one who asked is told beside the answer."""

    number: int
    text: str


class Lost(Struct, tag=True):
    node_id: str
    reason: str


class Now(Struct, tag=True):
    jobs: int
    waiting: int
    used: int
    kept: int
    trips: int
    lanes: int
    """Jobs that the thread that computes is at."""
    whole: bool
    nodes: tuple[str, ...]
    refused: dict[str, int]
    rss: int
    """Bytes that are resident."""
    weights: int
    files: tuple[str, ...]
    open_files: int
    threads: int


class Stopped(Struct, tag=True):
    pass


Event = Born | MovedOut | Started | Wrote | Ended | Failed | Heard | Lost | Now | Stopped
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def hook(of: Any, value: Any) -> Any:
    return of(value)


# -- a node -----------------------------------------------------------------------------


class Process:
    def __init__(self) -> None:
        self._node: Any = None
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._files: set[str] = set()

    def say(self, event: Event) -> None:
        data = msgspec.json.encode(event) + b"\n"
        while data:
            data = data[os.write(1, data) :]

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self.say(Born(os.getpid()))
        reader = asyncio.StreamReader(limit=1 << 24)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb", 0)
        )
        while line := await reader.readline():
            await self._obey(_commands.decode(line))

    async def _obey(self, command: Command) -> None:
        if isinstance(command, MoveOut):
            self.say(MovedOut(_moved_out(command.address)))
        elif isinstance(command, WatchFiles):
            sys.addaudithook(self._opened)
        elif isinstance(command, Start):
            await self._start(command)
        elif isinstance(command, Ask):
            self._asked[command.number] = asyncio.ensure_future(self._ask(command))
        elif isinstance(command, Hang):
            self._asked[command.number].cancel()
        elif isinstance(command, Tell):
            self.say(self._now())
        else:
            await self._node.stop()
            self.say(Stopped())

    def _opened(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes):
            self._files.add(os.path.abspath(os.fsdecode(args[0])))

    async def _start(self, command: Start) -> None:
        from penstock.workloads.pipes.config import LpConfig
        from penstock.workloads.pipes.node import Node

        self._node = Node(msgspec.json.decode(command.config, type=LpConfig, dec_hook=hook))
        starting = asyncio.ensure_future(self._node.start())
        while not hasattr(self._node, "mesh") and not starting.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if hasattr(self._node, "mesh"):
            self._node.mesh.on_lost.append(lambda node_id, reason: self.say(Lost(node_id, reason)))
        await starting
        self.say(Started(self._node.address))

    async def _ask(self, command: Ask) -> None:
        from penstock.workloads.llm.values import CompletionRequest, Delta, LlmFailure, Sampling

        number = command.number
        question = CompletionRequest(
            prompts=(command.prompt,),
            max_tokens=command.count,
            sampling=Sampling(temperature=0),
            logprobs=0,
        )
        try:
            async with aclosing(self._node.generate(question, watch=Watch(self, number))) as said:
                async for piece in said:
                    if isinstance(piece, Delta):
                        self.say(Wrote(number, piece.text, len(piece.logprobs)))
                    else:
                        nodes = tuple(hop.node for hop in piece.hops)
                        usage = piece.usage.completion_tokens
                        self.say(Ended(number, piece.choice.text, usage, nodes))
        except LlmFailure as failure:
            self.say(Failed(number, str(failure.code), failure.message))
        except asyncio.CancelledError:
            self.say(Failed(number, LEFT, ""))
        except Exception as error:
            self.say(Failed(number, "raised", repr(error)))

    def _now(self) -> Now:
        from penstock.workloads.pipes.routes import Route

        node = self._node
        record = node.record
        origin = node.origin
        return Now(
            jobs=record.jobs,
            waiting=record.waiting,
            used=record.cache_used,
            kept=record.cache_kept,
            trips=len(origin._generations) if origin is not None else 0,
            lanes=node._compute.jobs,
            whole=isinstance(node.find(frozenset()), Route),
            nodes=tuple(one.node_id for one in node.records()),
            refused=record.refused,
            rss=_resident(),
            weights=record.weights,
            files=tuple(sorted(self._files)),
            open_files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
        )


class Watch:
    def __init__(self, process: Process, number: int) -> None:
        self._process, self._number = process, number

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        pass

    def log(self, text: str, level: str = "info") -> None:
        self._process.say(Heard(self._number, text))


def _moved_out(address: str) -> int:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no network of its own")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _SET_INTERFACE, struct.pack("16sH22x", b"wire", _TUN | _NO_HEADER))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for number, value in ((_SET_ADDRESS, address), (_SET_MASK, "255.255.255.0")):
            where = struct.pack("16sHxx4s16x", b"wire", socket.AF_INET, socket.inet_aton(value))
            fcntl.ioctl(control, number, where)
        for name in (b"lo", b"wire"):
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", name, _UP))
    return tun


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the system does not say how much memory is resident")


# -- the nursery ------------------------------------------------------------------------


def nursery(path: str) -> None:
    """Ends with its standard input."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads can't be forked"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener.fileno(), 0], [], [])
            if 0 in readable:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                live(connection)
            connection.close()


def live(connection: socket.socket) -> None:
    """Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (0, 1):
            os.dup2(connection.fileno(), number)
        connection.close()
        logging.basicConfig(level=os.environ.get("PIPES_LOG", "WARNING"))
        asyncio.run(Process().serve())
        code = 0
    except BaseException:
        logging.exception("a node ended")
    finally:
        os._exit(code)


if __name__ == "__main__":
    nursery(sys.argv[1])
