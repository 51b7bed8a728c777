"""A PostgreSQL server of the tests' own, on a free loopback port."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

MISSING = "there is no PostgreSQL server: install the system's package 'postgresql'"


def programs() -> Path | None:
    """The folder of the server's programs; Debian keeps them off the PATH."""
    if (found := shutil.which("postgres")) is not None:
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return installed[-1].parent if installed else None


class PostgresServer:
    """A server with its data in a folder. It can be stopped, killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        found = programs()
        assert found is not None, MISSING
        self._programs, self._options = found, options
        self._user = _user()
        self.data, self._log = folder / "pg", folder / "postgres.log"
        self.data.mkdir()
        folder.chmod(0o711)  # the server's user has to get to its folder
        if self._user is not None:
            shutil.chown(self.data, self._user, pwd.getpwnam(self._user).pw_gid)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._run("initdb", "-D", self.data, "-Utest", "-Atrust", "-EUTF8", "--locale=C")
        self._server: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://test@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = (
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            f"unix_socket_directories={self.data}",
            "max_connections=200",
            *self._options,
        )
        argv = [str(self._programs / "postgres"), "-D", str(self.data)]
        for option in options:
            argv += ["-c", option]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                argv, stdout=log, stderr=log, user=self._user, start_new_session=True
            )
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + 60
        ready = [self._programs / "pg_isready", "-h", "127.0.0.1", "-p", str(self.port), "-q"]
        while subprocess.run(ready, check=False).returncode:
            if time.monotonic() > end:
                raise RuntimeError(f"PostgreSQL does not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def sql(self, text: str) -> str:
        """Run statements with psql; answers what they print."""
        return self._run("psql", self.url, "-v", "ON_ERROR_STOP=1", "-Atqc", text)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT is PostgreSQL's fast shutdown, SIGQUIT its immediate one, as after a crash."""
        if self._server is not None:
            self._server.send_signal(how)
            self._server.wait(60)
            self._server = None

    def _run(self, program: str, *arguments: object) -> str:
        argv = [str(self._programs / program), *map(str, arguments)]
        done = subprocess.run(argv, capture_output=True, text=True, user=self._user, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")
        return done.stdout


def _user() -> str | None:
    """The user that the server runs as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"
