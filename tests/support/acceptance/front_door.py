"""A real `penstock up` process, and people who come to it with keys of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.chaos.cluster import PENSTOCK, Cluster, kill
from tests.support.waiting import eventually

Body = dict[str, Any]
PATIENCE = 30.0


class House(Cluster):
    """One engine with HTTP and a rule file; it can be killed and started again."""

    def __init__(self, folder: Path, rules: str) -> None:
        super().__init__(folder, PENSTOCK_HTTP__LISTEN="127.0.0.1:0", NO_COLOR="1", COLUMNS="200")
        self.rules = folder / "rules.toml"
        self.rules.write_text(rules)
        self.url = ""
        self._worker: subprocess.Popen[bytes] | None = None
        self.people: dict[str, Person] = {}

    @property
    def is_behind_nats(self) -> bool:
        """Whether jobs are run by a worker of its own, which reaches the engine through NATS."""
        return "PENSTOCK_BUS__URL" in self.environment

    def open(self, app: str = "jobs:app") -> None:
        runs = ("--no-worker",) if self.is_behind_nats else ("--app", app)
        self.engine = self.start("up", *runs, "--rules", str(self.rules))

        def is_ready() -> bool:
            assert self.engine.poll() is None, self.log_of(self.engine)
            return "ready;" in self.log_of(self.engine)

        eventually(is_ready, "the engine is ready", PATIENCE)
        words = self.log_of(self.engine).split()
        self.url = next(word for word in words if word.startswith("http://"))
        # Started again, it is found at the same place.
        self.environment["PENSTOCK_HTTP__LISTEN"] = self.url.removeprefix("http://")
        if self.is_behind_nats:
            bus = ("--bus", self.environment["PENSTOCK_BUS__URL"])
            self._worker = self.start("worker", "start", *bus, "--app", app)
            eventually(lambda: len(self.workers()) == 1, "the worker joins", PATIENCE)

    def reopen(self) -> None:
        """Kill the engine with its worker, and start another on what it left."""
        kill(self.engine)
        if self._worker is not None:
            kill(self._worker)
        self.open()

    def let_in(self, **roles: str) -> None:
        """Make a key for each, as `submit approve` or `submit @tenant`, by the command line."""
        making = {name: self._making(name, words.split()) for name, words in roles.items()}
        for name, process in making.items():
            token, said = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, said
            file = self.folder / f"{name}.token"
            file.write_text(token)
            self.people[name] = Person(self, name, token.strip(), file)

    def _making(self, name: str, words: list[str]) -> subprocess.Popen[str]:
        args: list[str] = []
        for word in words:
            args += ["--tenant", word[1:]] if word.startswith("@") else ["--role", word]
        return subprocess.Popen(
            [str(PENSTOCK), "keys", "create", name, *args],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __getitem__(self, name: str) -> Person:
        return self.people[name]

    def gate(self, name: str) -> Path:
        """A file for which `job.chaos.gated` waits."""
        return self.folder / name


class Person:
    """Somebody with a key: over HTTP, and with the command line from elsewhere."""

    def __init__(self, house: House, name: str, token: str, file: Path) -> None:
        self.house, self.name, self.token, self.file = house, name, token, file

    def ask(
        self, method: str, path: str, body: Body | None = None, *, status: int = 200
    ) -> dict[str, Any]:
        """Call the HTTP API; it must answer with this status."""
        found, _, answer = self.exchange(method, path, body)
        assert found == status, (method, path, found, answer)
        return answer

    def exchange(
        self, method: str, path: str, body: Body | None = None, headers: Mapping[str, str] = {}
    ) -> tuple[int, Mapping[str, str], Any]:
        request = Request(self.house.url + path, method=method, headers={**self.headers, **headers})
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.headers, _read(answer.read())
        except HTTPError as error:
            with error:
                return error.code, error.headers, _read(error.read())

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def submit(self, topic: str, given: Body, **fields: Any) -> str:
        job = self.ask("POST", "/v1/jobs", {"topic": topic, "input": given, **fields}, status=201)
        return str(job["job_id"])

    def get(self, job_id: str) -> dict[str, Any]:
        return self.ask("GET", f"/v1/jobs/{job_id}")

    def end(self, job_id: str) -> dict[str, Any]:
        """The record of a job that ends soon."""
        return self.ask("GET", f"/v1/jobs/{job_id}/wait?timeout={PATIENCE:g}")

    def why(self, job_id: str) -> str:
        return str(self.ask("GET", f"/v1/jobs/{job_id}/why")["why"])

    def until(self, job_id: str, holds: Callable[[dict[str, Any]], Any], what: str) -> Any:
        eventually(lambda: bool(holds(self.get(job_id))), what, PATIENCE)
        return self.get(job_id)

    def parked(self, **fields: Any) -> str:
        """A job that waits for people when this returns."""
        job_id = self.submit("job.chaos.quick", {"n": 21}, **fields)
        self.until(job_id, lambda job: job["hold"], "it is parked")
        return job_id

    def cli(self, *words: str, code: int = 0) -> str:
        """What a command from elsewhere prints, errors included; it must end with this code."""
        place = ("--connect", self.house.url, "--token", f"@{self.file}")
        done = subprocess.run(
            [str(PENSTOCK), *words, *place],
            env=self.house.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, (words, done.returncode, said)
        assert "Traceback" not in said
        return said.strip()


def _read(answer: bytes) -> Any:
    return json.loads(answer) if answer[:1] in (b"{", b"[", b'"') else answer.decode()


@contextlib.contextmanager
def house(folder: Path, rules: str, **people: str) -> Iterator[House]:
    made = House(folder, rules)
    try:
        made.open()
        made.let_in(**people)
        yield made
    finally:
        made.stop()
