"""Random kill -9 of container workers, alone and under an engine, while jobs end in every way.

No container is left without its job, no job is left without an end, none is run twice, and what ran
when its worker was killed is adopted. `CONTAINER_KILLS` says how often they are killed, on each
engine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote

import pytest
from tests.conftest import needs_runtime
from tests.support.container.leftovers import cgroups_of, containers_of, leftovers, settled
from tests.support.container.serving import Served
from tests.support.container_engines import ask
from tests.support.waiting import eventually

import penstock
from penstock.testing.images import IMAGE
from penstock.workloads.container.engines.oci.images import ImageStore

KILLS = {"crun": 12, "runc": 4, "docker": 12, "podman": 4}
if asked := os.environ.get("CONTAINER_KILLS"):
    KILLS = dict.fromkeys(KILLS, int(asked))
COMMAND = Path(sys.executable).with_name("penstock")
CONFIG = {"stop_grace": 0.1, "cpus": 64, "memory_mb": 100_000}
SLOTS = 6
TELL = "read t _ < /proc/uptime; echo"
"""In a container: say something, and the time."""


class Engine(Protocol):
    """A container engine that tells which containers it started."""

    name: str
    runtime: str
    environ: dict[str, str]

    def started(self) -> list[str]: ...
    def left(self, jobs_dir: Path) -> list[str]: ...


class Oci:
    """Every call of the runtime leaves a line in a file, and so does every start of a container."""

    name = "oci"

    def __init__(self, runtime: str, folder: Path, busybox: Path, jobs_dir: Path) -> None:
        program, place, told = needs_runtime(runtime), folder / "bin", folder / "told"
        self.runtime, self._calls, self._started = runtime, folder / "calls", told / "started"
        place.mkdir()
        told.mkdir()
        told.chmod(0o777)
        (folder / "edit").write_text(TELL_START.replace("FOLDER", str(told)))
        wrapper = WRAPPER.format(calls=self._calls, edit=folder / "edit", program=program)
        (place / runtime).write_text(wrapper)
        (place / runtime).chmod(0o755)
        self.environ = {"PATH": f"{place}:{os.environ['PATH']}"}
        store = ImageStore(jobs_dir / "oci" / "images")
        store.import_tree(busybox, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))

    def started(self) -> list[str]:
        return self._started.read_text().split() if self._started.exists() else []

    def left(self, jobs_dir: Path) -> list[str]:
        words = self._calls.read_text().split()
        return cgroups_of({word for word in words if word.startswith("penstock-")})


WRAPPER = """\
#!/bin/sh
echo "$@" >> {calls}
bundle= name=
for word; do
    case $name in --bundle) bundle=$word;; esac
    name=$word
done
case $name in penstock-trial-*) ;; penstock-*) sed -i -f {edit} "$bundle/config.json";; esac
exec {program} "$@"
"""
TELL_START = r"""
s|"args":\["/dev/.init","--",|&"sh","-c","hostname >> /input/started; exec \\"$@\\"","sh",|
s|"mounts":\[|&{"destination":"/input","type":"bind","source":"FOLDER","options":["rbind","rw"]},|
"""
"""A sed script: the container's command first writes its name down."""


class Daemon:
    """Docker or Podman."""

    runtime = ""

    def __init__(self, kind: str, socket: Path) -> None:
        self.environ: dict[str, str] = {}
        self.name, self._kind, self._socket = f"unix://{socket}", kind, socket
        self._since = time.time()
        self._started: dict[tuple[str, int], str] = {}

    def started(self) -> list[str]:
        """Docker remembers its last 256 events only: to be asked often. Podman writes an event
        down a while after it happened, and then remembers it."""
        until = time.time()
        filters = quote(json.dumps({"type": ["container"], "event": ["start"]}))
        last = f"until={until:.9f}" if self._kind == "docker" else "stream=false"
        path = f"/events?since={self._since:.9f}&{last}&filters={filters}"
        status, answer = ask(self._socket, "GET", path)
        assert status == 200, answer
        if self._kind == "docker":
            self._since = until
        for event in map(json.loads, answer.splitlines()):
            if (name := event["Actor"]["Attributes"]["name"]).startswith("penstock-"):
                self._started[event["id"], event["timeNano"]] = name
        return list(self._started.values())

    def left(self, jobs_dir: Path) -> list[str]:
        return containers_of(self._socket, jobs_dir)


class End(NamedTuple):
    code: str
    stdout: str = ""

    @property
    def span(self) -> tuple[float, float]:
        """When its container began and ended, by its own account; all of it must be there."""
        began, ended = (float(line.split()[-1]) for line in self.stdout.splitlines())
        return began, ended


class Alone:
    """`penstock container serve`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.jobs_dir = folder / "data" / "containers"

    def start(self, engine: Engine) -> None:
        self._served = Served(
            self._folder, engine.name, runtime=engine.runtime, max_concurrent_jobs=SLOTS, **CONFIG
        )
        self._served.environ = engine.environ
        self._served.start()

    def submit(self, name: str, script: str, seconds: float) -> None:
        limits = {"max_runtime_seconds": seconds, "cpus": 0.5}
        status, answer = self._served.submit(name, "sh", "-c", script, limits=limits)
        assert status == 202, answer

    def cancel(self, name: str) -> None:
        assert self._served.ask("DELETE", f"/jobs/{name}")[0] in (200, 202)

    def kill(self, name: str) -> None:
        self._served.kill()
        self._served.start()

    def end(self, name: str) -> End:
        record = self._served.ended(name)
        code = (record["error"] or {}).get("code", "finished")
        return End(code, record["stdout"])

    def running(self) -> int:
        return int(self._served.ask("GET", "/health")[1]["running_jobs"])

    def stop(self) -> None:
        assert self._served.stop() == 0


def uptime() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


class UnderAnEngine:
    """`penstock up`, and a worker of it; one of the two is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._data = folder, folder / "data"
        self._connection = ExitStack()
        self.jobs_dir = self._data / "containers"

    def start(self, engine: Engine) -> None:
        config = self._folder / "worker.yaml"
        config.write_text(json.dumps({**CONFIG, "runtime": engine.runtime}))
        own = {"PENSTOCK_CONTAINERS__CONFIG": str(config), "PENSTOCK_TIMEOUTS__LOST_GRACE": "0.3"}
        self._environ = {**os.environ, **engine.environ, **own}
        work = ("worker", "--containers", engine.name, "--concurrency", f"{SLOTS}")
        self._words = {"engine": ("up", "--no-http"), "worker": work}
        self._processes = {name: self._run(*words) for name, words in self._words.items()}
        self._connect()
        eventually(self._client.workers)

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        command = [COMMAND, "--data", self._data, *words]
        with (self._folder / "plane.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)

    def _connect(self) -> None:
        self._connection.close()
        connected = eventually(self._connected)
        assert connected is not None
        self._client = connected

    def _connected(self) -> penstock.Client | None:
        try:
            return self._connection.enter_context(penstock.connect(data=self._data))
        except penstock.PenstockError:
            return None

    def submit(self, name: str, script: str, seconds: float) -> None:
        limits = {"max_runtime_seconds": seconds, "cpus": 0.5}
        runtime = {"image": IMAGE, "cmd": ["sh", "-c", script], "limits": limits}
        self._client.submit("job.container.run", {"runtime": runtime}, job_id=name)

    def cancel(self, name: str) -> None:
        self._client.get(name).cancel(timeout=0)

    def kill(self, name: str) -> None:
        process = self._processes[name]
        process.kill()
        process.wait()
        self._processes[name] = self._run(*self._words[name])
        if name == "engine":
            self._connect()
        if self._processes["worker"].poll() is not None:  # it gave up waiting for the engine
            self._processes["worker"] = self._run(*self._words["worker"])

    def end(self, name: str) -> End:
        handle = self._client.get(name)
        try:
            job = handle.wait(60)
        except penstock.WaitTimedOut as late:
            raise AssertionError((handle.why(), handle.history())) from late
        assert job.result is not None, job
        code = job.result.error_code or "finished"
        stdout = handle.result()["stdout"] if code == "finished" else ""
        return End(code, stdout)

    def running(self) -> int:
        return sum(worker.held for worker in self._client.workers())

    def stop(self) -> None:
        self._connection.close()
        for process in reversed(self._processes.values()):
            process.terminate()
            assert process.wait(40) == 0


EXPECTED = {"timeout": "TIMEOUT", "cancel": "CANCELLED", "end": "finished"}


def script_of(wanted: str, chance: random.Random, mark: str) -> tuple[str, float]:
    """One that runs too long, one that runs until it is cancelled, one that ends by itself; and
    how long it may."""
    seconds = 0.05 + 2 * chance.random() if wanted == "timeout" else 60.0
    stubborn = chance.choice(["", "trap '' TERM; "])
    pause = f"{chance.random() * 4:.2f}" if wanted == "end" else "60"
    return f"{stubborn}{TELL} begin $t; sleep {pause}; {TELL} end $t; : {mark}", seconds


@pytest.fixture
def site(
    request: pytest.FixtureRequest, tmp_path: Path, form: type[Alone | UnderAnEngine], kind: str
) -> Iterator[tuple[Alone | UnderAnEngine, Engine]]:
    place = form(tmp_path)
    engine: Engine
    if kind in ("docker", "podman"):
        engine = Daemon(kind, request.getfixturevalue(f"{kind}_socket"))
    else:
        engine = Oci(kind, tmp_path, request.getfixturevalue("busybox"), place.jobs_dir)
    try:
        place.start(engine)
        yield place, engine
    finally:
        place.stop()


@pytest.mark.seed("003", "10.2", "10.5")
@pytest.mark.timeout(180 + 15 * max(KILLS.values()))
@pytest.mark.parametrize("kind", KILLS)
@pytest.mark.parametrize("form", [Alone, UnderAnEngine])
def test_random_kills_leave_no_container_and_no_job_without_its_end(
    site: tuple[Alone | UnderAnEngine, Engine], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place, engine), count = site, KILLS[kind]
    seed = random.randrange(1 << 32)
    chance, mark = random.Random(seed), f"9{seed:010}"
    wanted: dict[str, str] = {}
    ends: dict[str, End] = {}
    kills: list[float] = []
    wanted["first"] = "end"
    place.submit("first", f"{TELL} begin $t; sleep 5; {TELL} end $t; : {mark}", 60)
    eventually(engine.started)
    time.sleep(0.5)
    kills.append(uptime())
    place.kill("worker")
    for number in range(1, count):
        new = {f"job-{number}-{n}": chance.choice([*EXPECTED]) for n in range(chance.randint(1, 3))}
        for name, how in new.items():
            place.submit(name, *script_of(how, chance, mark))
        due = [name for name, how in new.items() if how == "cancel"]
        before = {name for name in due if chance.random() < 0.3}
        time.sleep(chance.random() * chance.choice([0.1, 1]))
        for name in before:
            place.cancel(name)
        kills.append(uptime())
        place.kill(chance.choice(["worker", "worker", "worker", "engine"]))
        for name in set(due) - before:
            place.cancel(name)
        wanted |= new
        engine.started()
        while len(wanted) - len(ends) > 2 * SLOTS:
            name = next(name for name in wanted if name not in ends)
            ends[name] = place.end(name)
    for name in wanted.keys() - ends.keys():
        ends[name] = place.end(name)
    wrong = {name: end for name, end in ends.items() if end.code != EXPECTED[wanted[name]]}
    assert not wrong, (seed, {name: wanted[name] for name in wrong}, wrong)
    runs = Counter(engine.started())
    assert max(runs.values()) == 1, (seed, runs.most_common(3))
    assert settled(lambda: leftovers(mark, place.jobs_dir) + engine.left(place.jobs_dir)) == []
    assert settled(place.running) == 0
    spans = [end.span for end in ends.values() if end.code == "finished"]
    adopted = [began for began, ended in spans if any(began < at < ended for at in kills)]
    assert adopted, seed
    with capsys.disabled():
        print(
            f" {count} kills, {len(ends)} jobs, {len(runs)} containers, {len(adopted)} adopted"
            f" that ended by themselves",
            end="",
        )
