"""What an HTTP stack costs by itself: a trivial JSON POST (decode, make an id, encode).

    python benchmarks/frameworks.py [--seconds 3] [--connections 64] [--rounds 3]

Each stack runs in a process of its own, one after another and several times over, with wrk on
the same machine. Needs wrk and `pip install -e '.[bench]'`; what is missing is left out.
The decision that these figures led to: docs/decisions/0010-http-stack.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import busy_percent, cpu_seconds

BODY = '{"topic":"job.text.shout","input":{"text":"hello there"},"labels":{"team":"ml"}}'
SCRIPT = """
wrk.method = "POST"
wrk.path = "/v1/jobs"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '%s'
"""


# -- the stacks: each serves at a port until it is ended -------------------------------


def answer(body: bytes) -> bytes:
    import msgspec

    given = msgspec.json.decode(body)
    return msgspec.json.encode({"job_id": os.urandom(13).hex(), "topic": given["topic"]})


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    message = await receive()
    body = answer(message["body"])
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def rsgi(scope: Any, protocol: Any) -> None:
    body = answer(await protocol())
    protocol.response_bytes(201, [("content-type", "application/json")], body)


def starlette_app() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def submit(request: Request) -> Response:
        return Response(answer(await request.body()), 201, media_type="application/json")

    return Starlette(routes=[Route("/v1/jobs", submit, methods=["POST"])])


def fastapi_app() -> Any:
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Submission(BaseModel):
        topic: str
        input: dict[str, Any] = {}
        labels: dict[str, str] = {}

    class Accepted(BaseModel):
        job_id: str
        topic: str

    app = FastAPI()

    async def submit(given: Submission) -> Accepted:
        return Accepted(job_id=os.urandom(13).hex(), topic=given.topic)

    submit.__annotations__ = {"given": Submission, "return": Accepted}
    app.post("/v1/jobs", status_code=201)(submit)
    return app


def by_uvicorn(app: Any) -> Callable[[int], None]:
    def serve(port: int) -> None:
        import uvicorn

        uvicorn.run(
            app if callable(app) and app is asgi else app(),
            port=port,
            loop="uvloop",
            http="httptools",
            access_log=False,
            log_level="error",
            lifespan="off",
        )

    return serve


def by_granian(target: str, interface: str) -> Callable[[int], None]:
    def serve(port: int) -> None:
        from granian import Granian
        from granian.constants import Interfaces

        Granian(
            target,
            port=port,
            interface=Interfaces(interface),
            workers=1,
            log_enabled=False,
            factory=target.endswith("_app"),
        ).serve()

    return serve


def by_aiohttp(port: int) -> None:
    import uvloop
    from aiohttp import web

    async def submit(request: web.Request) -> web.Response:
        return web.Response(
            body=answer(await request.read()), status=201, content_type="application/json"
        )

    app = web.Application()
    app.router.add_post("/v1/jobs", submit)
    web.run_app(
        app, host="127.0.0.1", port=port, access_log=None, print=None, loop=uvloop.new_event_loop()
    )


HERE = "benchmarks.frameworks"
STACKS: dict[str, tuple[Callable[[int], None], tuple[str, ...]]] = {
    "raw ASGI, uvicorn": (by_uvicorn(asgi), ("uvicorn", "uvloop", "httptools")),
    "raw ASGI, Granian": (by_granian(f"{HERE}:asgi", "asgi"), ("granian",)),
    "raw RSGI, Granian": (by_granian(f"{HERE}:rsgi", "rsgi"), ("granian",)),
    "aiohttp.web": (by_aiohttp, ("aiohttp", "uvloop")),
    "Starlette, uvicorn": (by_uvicorn(starlette_app), ("starlette", "uvicorn")),
    "FastAPI, uvicorn": (by_uvicorn(fastapi_app), ("fastapi", "uvicorn")),
    "FastAPI, Granian": (by_granian(f"{HERE}:fastapi_app", "asgi"), ("fastapi", "granian")),
}


# -- measuring -------------------------------------------------------------------------


def measure(name: str, seconds: int, connections: int) -> dict[str, float]:
    port = _free_port()
    command = [sys.executable, __file__, "--serve", name, "--port", str(port)]
    server = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1])
    try:
        _wait_for(port, server)
        load(port, 1, connections)
        before = cpu_seconds(server.pid)
        found = load(port, seconds, connections)
        found["cpu_us"] = (cpu_seconds(server.pid) - before) * 1e6 / found["requests"]
        return found
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(10)


def load(port: int, seconds: int, connections: int) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT % BODY)
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s"]
        target = f"http://127.0.0.1:{port}"
        ended = subprocess.run(
            [*command, script.name, target], capture_output=True, text=True, check=True
        )
    said = ended.stdout
    assert "Non-2xx" not in said, said
    requests = re.search(r"(\d+) requests in", said)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    slowest = re.search(r"99%\s+([\d.]+)(us|ms|s)", said)
    assert requests
    assert rate
    assert slowest
    unit = {"us": 0.001, "ms": 1.0, "s": 1000.0}[slowest[2]]
    return {
        "requests": float(requests[1]),
        "rate": float(rate[1]),
        "p99_ms": float(slowest[1]) * unit,
    }


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens at {port}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=STACKS)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    if given.serve:
        STACKS[given.serve][0](given.port)
        return
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed")
    present = [
        name
        for name, (_, needs) in STACKS.items()
        if all(importlib.util.find_spec(module) for module in needs)
    ]
    busy = busy_percent()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in present}
    for _ in range(given.rounds):
        for name in present:  # they take turns, so that a bad moment is everybody's
            found[name].append(measure(name, given.seconds, given.connections))
    print(f"others kept {busy:.0f}% of the machine busy\n")
    print("| stack | requests/s | p99 ms | CPU µs a request |\n|---|--:|--:|--:|")
    for name, runs in found.items():
        middle = {key: median(run[key] for run in runs) for key in runs[0]}
        figures = f"{middle['rate']:,.0f} | {middle['p99_ms']:.1f} | {middle['cpu_us']:.0f}"
        print(f"| {name} | {figures} |")
    if given.json:
        given.json.write_text(json.dumps({"busy": busy, "found": found}, indent=1))


if __name__ == "__main__":
    main()
