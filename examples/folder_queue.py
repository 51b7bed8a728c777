"""A folder as the queue: submit prompts, serve them with a local model, read the answers.

It needs the extra `llm` and a model: 'penstock model pull smollm2' fetches a small one. The
server is a command of its own, as 'penstock spool serve WORKSPACE --model smollm2' would be.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import penstock


def main(workspace: Path) -> None:
    work, flow = penstock.Work(workspace), penstock.Flow(workspace)
    ids = [work.submit(f"What is {n} plus {n}?") for n in (1, 2, 3)]
    print(*(flow.status(job_id) for job_id in ids))

    command = [sys.executable, "-m", "penstock.cli", "spool", "serve", str(workspace)]
    limits = ["--model", "SmolLM2", "--max-tokens", "8", "--context", "512"]
    with subprocess.Popen([*command, *limits], stdout=subprocess.DEVNULL) as server:
        found = [flow.wait(job_id, timeout=120) for job_id in ids]
        server.terminate()
    print(*(one.status for one in found))
    print(sorted(file.name for file in (workspace / "output" / ids[0]).iterdir()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
