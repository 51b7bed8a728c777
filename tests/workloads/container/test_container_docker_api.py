"""An engine that answers nonsense, breaks off or says nothing is unavailable, and nothing else."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.rows import every

from penstock.testing.aio import run_async
from penstock.workloads.container.engine import (
    BuildRequest,
    Chunk,
    CommandNotFound,
    CommandNotRunnable,
    ContainerNotFound,
    ContainerSpec,
    EngineError,
    EngineUnavailable,
    ExitStatus,
    ImageNotFound,
    PullFailed,
    Unsupported,
)
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.job import Stream, Usage

Say = Callable[[str], bytes | None]

PLAN = ContainerSpec(
    name="penstock-x", image="sha256:1", memory=1 << 26, cpus=1.0, pids=64, tmp=1 << 20
)
VERSION = {
    "Version": "24.0",
    "ApiVersion": "1.43",
    "MinAPIVersion": "1.12",
    "Components": [{"Name": "Engine"}],
}
PODMAN = VERSION | {"Components": [{"Name": "Podman Engine"}]}
IMAGE = {"Id": "sha256:1", "Config": {"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"]}}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A socket's path must be short."""
    path = Path(tempfile.mkdtemp(prefix="pd-"))
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def engine_that(folder: Path, say: Say, timeout: float = 5) -> AsyncIterator[DockerEngine]:
    """A client of an engine that gives to each request line the bytes that `say` has for it,
    or keeps silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _request_line(reader):
                answer = say(request)
                if answer is None:
                    await reader.read()
                    return
                writer.write(answer)
                await writer.drain()
                if not answer.startswith(b"HTTP/1.1 2") or answer is TRUNCATED:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    address = folder / "s"
    server = await asyncio.start_unix_server(serve, address)
    engine = DockerEngine(address, timeout=timeout)
    try:
        yield engine
    finally:
        await engine.close()
        server.close()
        await server.wait_closed()


async def _request_line(reader: asyncio.StreamReader) -> str:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = await reader.readline()
        if not piece:
            return ""
        head += piece
    fields = head.lower().split(b"\r\n")
    for field in fields:
        if field.startswith(b"content-length:"):
            await reader.readexactly(int(field.split(b":")[1]))
        if field.startswith(b"transfer-encoding:"):
            await reader.readuntil(b"0\r\n\r\n")
    return head.split(b" HTTP")[0].decode()


def http(status: int, body: Any, *, kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


TRUNCATED = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"Version":"2'
)
PAGE = b"<html><body>Bad gateway</body></html>"
NONSENSE = {
    "garbage": b"\x00\xff\x17 what?\r\n\r\n" * 9,
    "nothing": b"",
    "a page": http(200, PAGE, kind="text/html"),
    "a page and a status": http(502, PAGE, kind="text/html"),
    "half an object": http(200, b'{"Version": "2'),
    "half an answer": TRUNCATED,
    "not UTF-8": http(200, b'{"Version": "\xff\xfe"}'),
    "another kind of object": http(200, [{"Version": 7}]),
    "a number": http(200, b"17"),
    "an error without words": http(500, {"oops": True}),
    "a redirect": b"HTTP/1.1 301 X\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
    "a head without an end": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
    "an impossible length": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nnope\r\n",
}


def _calls(engine: DockerEngine, folder: Path) -> dict[str, Callable[[], Awaitable[Any]]]:
    build = BuildRequest(tag="t:1", context=folder, memory=1 << 26, cpus=1)
    return {
        "facts": engine.facts,
        "image": lambda: engine.image("alpine"),
        "pull": lambda: engine.pull("alpine"),
        "build": lambda: engine.build(build, lambda _: None),
        "create": lambda: engine.create(PLAN),
        "attach": lambda: engine.attach("penstock-x", stdin=True),
        "reattach": lambda: engine.reattach("penstock-x", {}),
        "start": lambda: engine.start("penstock-x"),
        "wait": lambda: engine.wait("penstock-x"),
        "usage": lambda: engine.usage("penstock-x"),
        "signal": lambda: engine.signal("penstock-x", signal.SIGTERM),
        "kill": lambda: engine.kill("penstock-x"),
        "remove": lambda: engine.remove("penstock-x"),
        "find": lambda: engine.find({}),
        "images": lambda: engine.images({}),
        "remove_image": lambda: engine.remove_image("alpine"),
    }


CALLS = list(_calls(DockerEngine("s"), Path()))
ANY_ANSWER_WILL_DO = {"start", "signal", "kill", "remove", "remove_image"}
"""Calls of whose answer only the status matters."""


@every("nonsense", NONSENSE)
@run_async
async def test_nonsense_for_a_greeting_is_unavailable(folder: Path, nonsense: str) -> None:
    async with engine_that(folder, lambda _: NONSENSE[nonsense]) as engine:
        for name, call in _calls(engine, folder).items():
            with pytest.raises(EngineUnavailable, match=str(folder)):
                await call()
                pytest.fail(f"{name} took it")


@every("nonsense", NONSENSE)
@every("call", CALLS)
@run_async
async def test_nonsense_in_the_middle_is_unavailable(
    folder: Path, nonsense: str, call: str
) -> None:
    (folder / "Dockerfile").write_text("FROM scratch\n")

    def say(request: str) -> bytes:
        return http(200, VERSION) if request.endswith("/version") else NONSENSE[nonsense]

    async with engine_that(folder, say) as engine:
        if call in ANY_ANSWER_WILL_DO and NONSENSE[nonsense].startswith(b"HTTP/1.1 200"):
            pytest_raises = pytest.raises((EngineUnavailable, _Nothing))
        else:
            pytest_raises = pytest.raises(EngineUnavailable)
        with pytest_raises:
            await _calls(engine, folder)[call]()
            if call in ANY_ANSWER_WILL_DO:
                raise _Nothing


class _Nothing(Exception):
    """It was content with the answer."""


@run_async
async def test_calls_keep_their_version_while_the_engine_is_asked_for_its_own(
    folder: Path,
) -> None:
    asked: list[str] = []

    def say(request: str) -> bytes | None:
        asked.append(request)
        if request.endswith("/version"):
            return http(200, VERSION) if len(asked) == 1 else None
        return http(200, [])

    async with engine_that(folder, say) as engine:
        await engine.find({})
        asking = asyncio.ensure_future(engine.facts())
        while asked[-1] != "GET /version":  # noqa: ASYNC110 nothing else tells
            await asyncio.sleep(0.001)
        await asyncio.wait_for(engine.find({}), 4)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert [request.split("?")[0] for request in asked] == [
        *("GET /version", "GET /v1.43/containers/json"),
        *("GET /version", "GET /v1.43/containers/json"),
    ]


@run_async
async def test_nobody_there_is_unavailable(folder: Path) -> None:
    engine = DockerEngine(folder / "nobody")
    for call in _calls(engine, folder).values():
        with pytest.raises(EngineUnavailable, match="can't be reached"):
            await call()
    await engine.close()


@pytest.mark.parametrize("greets", [False, True])
@run_async
async def test_silence_is_unavailable_after_the_timeout(folder: Path, greets: bool) -> None:
    def say(request: str) -> bytes | None:
        return http(200, VERSION) if greets and request.endswith("/version") else None

    async with engine_that(folder, say, timeout=0.05) as engine:
        calls = _calls(engine, folder)
        for name in calls.keys() - {"pull", "build"}:
            async with asyncio.timeout(10):
                with pytest.raises(EngineUnavailable, match=r"does not|closed"):
                    await calls[name]()


@pytest.mark.parametrize("version", [VERSION, PODMAN])
@pytest.mark.parametrize("who", ["engine", "client"])
@run_async
async def test_a_connection_that_goes_while_one_waits_is_unavailable(
    folder: Path, version: dict[str, Any], who: str
) -> None:
    """Docker's head has come, but the answer never does; Podman has not even that."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while request := await _request_line(reader):
            if request.endswith("/version"):
                writer.write(http(200, version))
            elif "libpod" not in request:
                writer.write(head)

    server = await asyncio.start_unix_server(serve, folder / "s")
    engine = DockerEngine(folder / "s")
    waiting = asyncio.create_task(engine.wait("penstock-x"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    if who == "engine":
        for writer in writers:
            writer.close()
    else:
        await engine.close()
    async with asyncio.timeout(5):
        with pytest.raises(EngineUnavailable):
            await waiting
    await engine.close()
    for writer in writers:
        writer.close()
    server.close()
    await server.wait_closed()


def _by_path(answers: dict[str, bytes], version: dict[str, Any] = VERSION) -> Say:
    """The first answer whose words are in the request line."""

    def say(request: str) -> bytes:
        if request.endswith("/version"):
            return http(200, version)
        return next((say for words, say in answers.items() if words in request), http(404, NO))

    return say


NO = {"message": "No such thing"}


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (404, "No such image: sha256:1", ImageNotFound),
        (400, "No command specified", CommandNotFound),
        (400, "unknown or invalid runtime name: kata", Unsupported),
        (409, "Conflict. The container name is already in use", EngineError),
        (400, "Minimum memory limit allowed is 6MB", EngineError),
    ],
)
@run_async
async def test_a_refused_container_says_why(
    folder: Path, status: int, words: str, kind: type[EngineError]
) -> None:
    answers = {
        "/info": http(200, {"DockerRootDir": "/var/lib/docker"}),
        "/images/": http(200, IMAGE),
        "/containers/create": http(status, {"message": words}),
    }
    async with engine_that(folder, _by_path(answers)) as engine:
        with pytest.raises(kind, match=words) as caught:
            await engine.create(PLAN)
        assert not isinstance(caught.value, EngineUnavailable)
        assert caught.value.code is kind.code


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (404, "No such container: penstock-x", ContainerNotFound),
        (400, 'exec: "nope": executable file not found in $PATH: unknown', CommandNotFound),
        (500, 'runc: exec: "/nope": no such file or directory: OCI not found', CommandNotFound),
        (400, 'exec: "/etc/notes": permission denied: unknown', CommandNotRunnable),
        (500, "exec /prog: exec format error", CommandNotRunnable),
        (500, 'exec: "/sbin/docker-init": no such file or directory', EngineError),
        (500, "mount /x: no such file or directory", EngineError),
    ],
)
@run_async
async def test_a_start_that_is_refused_says_why(
    folder: Path, status: int, words: str, kind: type[EngineError]
) -> None:
    answers = {"/start": http(status, {"message": words})}
    async with engine_that(folder, _by_path(answers)) as engine:
        with pytest.raises(kind) as caught:
            await engine.start("penstock-x")
        assert caught.value.code is kind.code
        assert caught.value.exit_code == kind.exit_code


@pytest.mark.parametrize("on_podman", [False, True])
@run_async
async def test_the_status_is_not_believed_beside_an_error(folder: Path, on_podman: bool) -> None:
    failed = {"StatusCode": 0, "Error": {"Message": "lost it"}}
    answers = {"/libpod/": http(200, b"-1"), "/wait": http(200, failed)}
    say = _by_path(answers, PODMAN if on_podman else VERSION)
    async with engine_that(folder, say) as engine:
        ended = await engine.wait("penstock-x")
        assert ended.code is None
        assert ended.error


@run_async
async def test_a_memory_kill_is_told_by_the_engine(folder: Path) -> None:
    answers = {
        "/wait": http(200, {"StatusCode": 137}),
        "/json": http(200, {"Id": "1", "State": {"OOMKilled": True}}),
    }
    async with engine_that(folder, _by_path(answers)) as engine:
        assert await engine.wait("penstock-x") == ExitStatus(137, oom=True)


@pytest.mark.parametrize("status", [404, 409])
@run_async
async def test_a_signal_to_what_has_ended_is_no_error(folder: Path, status: int) -> None:
    async with engine_that(folder, _by_path({"/kill": http(status, NO)})) as engine:
        await engine.kill("penstock-x")
        await engine.signal("penstock-x", signal.SIGTERM)


@run_async
async def test_a_removal_waits_for_one_that_is_under_way(folder: Path) -> None:
    asked = 0

    def say(request: str) -> bytes:
        nonlocal asked
        if request.startswith("DELETE"):
            asked += 1
            return http(409 if asked < 3 else 404, NO)
        return http(200, VERSION)

    async with engine_that(folder, say) as engine:
        await engine.remove("penstock-x")
    assert asked == 3


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ({"error": "manifest for x:1 not found: manifest unknown"}, ImageNotFound),
        ({"errorDetail": {"message": "repository does not exist"}}, ImageNotFound),
        ({"error": "dial tcp: lookup nowhere: no such host"}, PullFailed),
        ({"error": "net/http: TLS handshake timeout"}, PullFailed),
    ],
)
@pytest.mark.parametrize("how", ["stream", "status"])
@run_async
async def test_a_pull_that_fails_says_how(
    folder: Path, how: str, line: dict[str, Any], kind: type[EngineError]
) -> None:
    words = line.get("error") or line["errorDetail"]["message"]
    answer = http(200, b'{"status":"Pulling"}\r\n' + msgspec.json.encode(line))
    if how == "status":
        answer = http(500, {"message": words})
    async with engine_that(folder, _by_path({"/images/create": answer})) as engine:
        with pytest.raises(kind, match=words[:10]):
            await engine.pull("x:1")


@pytest.mark.parametrize(
    ("reference", "asked"),
    [
        ("tool", "fromImage=tool&tag=latest"),
        ("team/tool:2", "fromImage=team%2Ftool&tag=2"),
        ("host:5000/tool", "fromImage=host%3A5000%2Ftool&tag=latest"),
        ("tool@sha256:ab", "fromImage=tool&tag=sha256%3Aab"),
    ],
)
@run_async
async def test_a_pull_asks_for_one_tag_and_never_for_all(
    folder: Path, reference: str, asked: str
) -> None:
    heard: list[str] = []

    def say(request: str) -> bytes | None:
        heard.append(request)
        answers = {"/images/create": http(200, b"{}\n"), "/json": http(200, IMAGE)}
        return _by_path(answers)(request)

    async with engine_that(folder, say) as engine:
        await engine.pull(reference)
    assert any(request.endswith(asked) for request in heard)


@pytest.mark.parametrize("reference", ["../containers/x", "a//b", "./x", ""])
@run_async
async def test_a_reference_leads_nowhere_but_to_images(folder: Path, reference: str) -> None:
    heard: list[str] = []

    def say(request: str) -> bytes:
        heard.append(request)
        return http(200, VERSION)

    async with engine_that(folder, say) as engine:
        with pytest.raises(ImageNotFound):
            await engine.image(reference)
        await engine.remove_image(reference)
    assert heard == []


@run_async
async def test_the_api_is_spoken_in_a_version_that_both_know(folder: Path) -> None:
    heard: list[str] = []
    versions = {"Version": "99", "ApiVersion": "1.99", "MinAPIVersion": "1.60"}

    def say(request: str) -> bytes:
        heard.append(request)
        return http(200, versions if request.endswith("/version") else [])

    async with engine_that(folder, say) as engine:
        await engine.find({})
        versions["MinAPIVersion"] = "1.20"
        engine._api.version = None
        await engine.find({})
    assert [line.split("/")[1] for line in heard if "containers" in line] == ["v1.60", "v1.44"]


@run_async
async def test_usage_of_what_is_not_there_is_unknown(folder: Path) -> None:
    async with engine_that(folder, _by_path({})) as engine:
        assert await engine.usage("penstock-x") == Usage()


@run_async
async def test_usage_in_an_engine_elsewhere_is_asked_for_while_the_container_runs(
    folder: Path,
) -> None:
    stats = {"cpu_stats": {"cpu_usage": {"total_usage": 0}}}
    used = {
        "cpu_stats": {"cpu_usage": {"total_usage": 15 * 10**8}},
        "memory_stats": {"max_usage": 7},
    }
    answers = {
        "/start": http(200, b""),
        "/wait": http(200, {"StatusCode": 0}),
        "/stats": http(200, used),
        "/json": http(200, {"Id": "x", "State": {"Status": "running"}}),
    }
    asked = asyncio.Event()

    def say(request: str) -> bytes:
        if "/stats" in request:
            asked.set()
        return _by_path(answers)(request)

    async with engine_that(folder, say) as engine:
        await engine.start("penstock-x")
        async with asyncio.timeout(10):
            await asked.wait()
            answers["/stats"] = http(200, stats)  # as after its end
            while await engine.usage("penstock-x") != Usage(7, 1.5):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await engine.wait("penstock-x")
        assert await engine.usage("penstock-x") == Usage(7, 1.5)


# -- the attached connection ----------------------------------------------------------

UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


def _attached(answer: bytes) -> Say:
    running = http(200, {"Id": "1", "State": {"Status": "running"}})
    return _by_path({"/attach": answer, "/json": running})


@run_async
async def test_frames_behind_the_head_are_heard(folder: Path) -> None:
    answer = UPGRADED + frame(1, b"out") + frame(2, b"err")
    async with engine_that(folder, _attached(answer)) as engine:
        attached = await engine.attach("penstock-x", stdin=False)
        heard = [chunk async for chunk in attached.output()]
    assert heard == [Chunk(Stream.STDOUT, b"out"), Chunk(Stream.STDERR, b"err")]


@run_async
async def test_what_is_no_frame_is_nonsense(folder: Path) -> None:
    answer = UPGRADED + frame(1, b"out") + b"<html>"  # half a head: lost with the connection
    async with engine_that(folder, _attached(answer)) as engine:
        attached = await engine.attach("penstock-x", stdin=False)
        assert [chunk.data async for chunk in attached.output()] == [b"out"]
    async with engine_that(folder, _attached(answer + PAGE)) as engine:
        attached = await engine.attach("penstock-x", stdin=False)
        with pytest.raises(EngineUnavailable, match="nonsense"):
            async for _ in attached.output():
                pass


@run_async
async def test_attaching_to_what_is_not_there_says_so(folder: Path) -> None:
    for body in (http(404, NO), b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n"):
        async with engine_that(folder, _attached(body)) as engine:
            with pytest.raises(ContainerNotFound):
                await engine.attach("penstock-x", stdin=False)


@run_async
async def test_output_of_one_that_had_ended_before_ends_at_once(folder: Path) -> None:
    ended = http(200, {"Id": "1", "State": {"Status": "exited"}})
    async with engine_that(folder, _by_path({"/attach": UPGRADED, "/json": ended})) as engine:
        attached = await engine.attach("penstock-x", stdin=False)
        async with asyncio.timeout(5):
            assert [chunk async for chunk in attached.output()] == []
        attached.close()
        await attached.send(b"into the void")
        await attached.end_input()
