"""The HTTP API with nothing but the standard library: submit, wait, follow, resume.

penstock up --app tasks:app
PENSTOCK_TOKEN=$(penstock key create me --role submit) python http_client.py

The token is in the environment, not among the arguments, which everybody can see.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class Penstock:
    def __init__(self, url: str, token: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"}

    def submit(self, topic: str, given: dict[str, Any], key: str = "") -> Any:
        """With an idempotency key it is safe to send it again when the answer was lost."""
        headers = {"Idempotency-Key": key} if key else {}
        return self._call("POST", "/v1/jobs", {"topic": topic, "input": given}, headers)

    def wait(self, job_id: str) -> Any:
        """The final record. A call waits for half a minute, then it is asked again."""
        while not (job := self._call("GET", f"/v1/jobs/{job_id}/wait"))["finished_at"]:
            pass
        return job

    def result(self, job_id: str) -> Any:
        return self._call("GET", f"/v1/jobs/{job_id}/result")

    def events(self, job_id: str, last_id: str = "") -> Iterator[tuple[str, Any]]:
        """Each move of a job with its id, from the first on, or after the one named."""
        headers = {"Last-Event-ID": last_id or "0-0"}
        request = Request(f"{self._url}/v1/jobs/{job_id}/updates", headers=self._headers | headers)
        with urlopen(request) as stream:
            for line in stream:
                name, _, value = line.decode().strip().partition(": ")
                if (name, value) == ("event", "end"):
                    return  # the job has ended, and no more will come
                if name == "id":
                    last_id = value
                elif name == "data" and (update := json.loads(value))["type"] == "moved":
                    yield last_id, update["transition"]

    def _call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | {"Content-Type": "application/json"} | (headers or {})
        request = Request(self._url + path, data, headers, method=method)
        with urlopen(request) as answer:
            return json.load(answer)


def main(url: str, token: str) -> None:
    penstock = Penstock(url, token)
    job = penstock.submit("job.text.shout", {"text": "hello"}, key="greeting-1")
    again = penstock.submit("job.text.shout", {"text": "hello"}, key="greeting-1")
    print("sent twice, one job:", job["job_id"] == again["job_id"])
    print(penstock.wait(job["job_id"])["state"], penstock.result(job["job_id"]))

    try:
        penstock.submit("job.text.shout", {"text": 3})
    except HTTPError as error:
        problem = json.load(error)
        print(problem["status"], problem["field"], "-", problem["problem"])

    slow = penstock.submit("job.slow.count", {"to": 3})["job_id"]
    last_id = ""
    for seen, event in penstock.events(slow):
        print(event["n"], event["after"])
        last_id = seen
        if event["after"] == "RUNNING":
            break  # hang up; what happens meanwhile is not missed
    for _, event in penstock.events(slow, last_id):
        print(event["n"], event["after"], "after a pause")


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7470"
    main(url, os.environ["PENSTOCK_TOKEN"])
