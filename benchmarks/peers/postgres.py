"""A PostgreSQL server of the benchmark's own, on a free loopback port, with fsync on."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import free_port, start, stop, wait

MISSING = "there is no PostgreSQL server: install the system's package 'postgresql'"
_OPTIONS = (
    "fsync=on",
    "synchronous_commit=on",
    "full_page_writes=on",
    "shared_buffers=512MB",
    "max_wal_size=4GB",
)


def programs() -> Path | None:
    """The folder of the server's programs; Debian keeps them off the PATH."""
    if (found := shutil.which("postgres")) is not None:
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return installed[-1].parent if installed else None


def version() -> str | None:
    if (folder := programs()) is None:
        return None
    argv = [folder / "postgres", "--version"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True)
    return said.stdout.split()[2]


class Postgres:
    def __init__(self, folder: Path) -> None:
        bin_folder = programs()
        assert bin_folder is not None, MISSING
        user = _user()
        data = folder / "pg"
        data.mkdir()
        if user is not None:
            shutil.chown(data, user, pwd.getpwnam(user).pw_gid)
            folder.chmod(0o711)  # the server's user has to get to its folder
        log = folder / "postgres.log"
        make = [str(bin_folder / "initdb"), "-D", str(data), "-U", "bench", "-A", "trust"]
        process = start([*make, "-E", "UTF8", "--locale=C"], log, user=user)
        if process.wait():
            raise RuntimeError(f"initdb failed: {log.read_text()[-1000:]}")
        port = free_port()
        options = [f"port={port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={data}"]
        argv = [str(bin_folder / "postgres"), "-D", str(data)]
        for option in (*options, *_OPTIONS):
            argv += ["-c", option]
        self._server = start(argv, log, user=user)
        self.pid = self._server.pid
        self.url = f"postgresql://bench@127.0.0.1:{port}/postgres"
        ready = [bin_folder / "pg_isready", "-q", "-d", self.url]
        wait(lambda: subprocess.run(ready).returncode == 0, "PostgreSQL does not start", 20.0)

    @contextmanager
    def long_reader(self) -> Iterator[None]:
        """A session that keeps a snapshot open."""
        folder = programs()
        assert folder is not None
        reader = subprocess.Popen(
            [folder / "psql", "-qAt", self.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert reader.stdin is not None
        assert reader.stdout is not None
        try:
            reader.stdin.write(b"BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1;\n")
            reader.stdin.flush()
            if not reader.stdout.readline():
                raise RuntimeError("the session that keeps a snapshot open was refused")
            yield
        finally:
            reader.communicate()

    def close(self) -> None:
        stop(self._server)


def _user() -> str | None:
    """The user that the server runs as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"
