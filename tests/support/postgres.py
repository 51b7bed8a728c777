"""A PostgreSQL server of the tests' own, on a free loopback port."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
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

    def __init__(
        self,
        folder: Path,
        *options: str,
        copy_of: PostgresServer | None = None,
        port: int = 0,
        inside: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        """With `copy_of` it is a streaming replica of another one, found at the other's `host`;
        `inside` is what its programs are started with, as in a network namespace."""
        found = programs()
        assert found is not None, MISSING
        self._programs, self._options, self.host = found, options, host
        self._user = _user()
        self._inside = [*inside]
        if inside and self._user is not None:
            self._inside += ["setpriv", f"--reuid={self._user}", "--init-groups"]
            self._inside += [f"--regid={pwd.getpwnam(self._user).pw_gid}"]
        self.data, self._log = folder / "pg", folder / "postgres.log"
        self.data.mkdir(0o700)
        folder.chmod(0o711)  # the server's user has to get to its folder
        if self._user is not None:
            shutil.chown(self.data, self._user, pwd.getpwnam(self._user).pw_gid)
        self.port = port or _free_port()
        if copy_of is None:
            self._run("initdb", "-D", self.data, "-Utest", "-Atrust", "-EUTF8", "--locale=C")
        else:
            source = (
                f"-h{copy_of.host}",
                f"-p{copy_of.port}",
                "-Utest",
                "-R",
                "-Xstream",
                "-cfast",
            )
            self._run("pg_basebackup", *source, "-D", self.data)
        self._server: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def _popen_user(self) -> str | None:
        """Who enters a namespace must be root until then."""
        return None if self._inside else self._user

    @property
    def url(self) -> str:
        return f"postgresql://test@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def start(self) -> None:
        options = (
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            f"unix_socket_directories={self.data}",
            "max_connections=200",
            *self._options,
        )
        argv = [*self._inside, str(self._programs / "postgres"), "-D", str(self.data)]
        for option in options:
            argv += ["-c", option]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                argv, stdout=log, stderr=log, user=self._popen_user, start_new_session=True
            )
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + 60
        ready = [
            *self._inside,
            self._programs / "pg_isready",
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-q",
        ]
        while subprocess.run(ready, check=False).returncode:
            if time.monotonic() > end or (self._server is not None and self._server.poll()):
                raise RuntimeError(f"PostgreSQL does not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def sql(self, text: str) -> str:
        """Run statements with psql; answers what they print."""
        return self._run("psql", self.url, "-v", "ON_ERROR_STOP=1", "-Atqc", text)

    def kill_backend(self, query: str) -> None:
        """SIGKILL the process of the session whose last statement is like this."""
        found = self.sql(f"SELECT pid FROM pg_stat_activity WHERE query LIKE '{query}' LIMIT 1")
        os.kill(int(found), signal.SIGKILL)
        self._wait()

    def promote(self) -> None:
        """Make a replica the primary."""
        self._run("pg_ctl", "promote", "-D", self.data)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT is PostgreSQL's fast shutdown, SIGQUIT its immediate one; SIGKILL is a crash."""
        if self._server is not None:
            self._server.send_signal(how)
            self._server.wait(60)
            self._server = None

    def _run(self, program: str, *arguments: object) -> str:
        argv = [*self._inside, str(self._programs / program), *map(str, arguments)]
        user = self._popen_user
        done = subprocess.run(argv, capture_output=True, text=True, user=user, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")
        return done.stdout


class PgBouncer:
    """A pooler in transaction mode in front of a server: few sessions for many connections."""

    def __init__(self, folder: Path, server: PostgresServer) -> None:
        program = shutil.which("pgbouncer")
        assert program is not None, "there is no pgbouncer: install the system's package"
        self.port = _free_port()
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={server.port} user=test\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\n"
            "auth_type = any\nunix_socket_dir =\npool_mode = transaction\ndefault_pool_size = 4\n"
            "server_login_retry = 0.2\n"
        )
        with (folder / "pgbouncer.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, str(settings)], stdout=log, stderr=log, user=_user()
            )
        end = time.monotonic() + 20
        while not _listens(self.port):
            assert time.monotonic() < end, (folder / "pgbouncer.log").read_text()
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"postgresql://test@127.0.0.1:{self.port}/postgres"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _user() -> str | None:
    """The user that the server runs as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"
