"""A PostgreSQL server in a temporary folder, on a free port, from Debian's package or any other; gone afterwards."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def missing() -> str | None:
    """Why no server can be started here, or nothing."""
    if _binaries() is None:
        return "PostgreSQL's initdb and pg_ctl are not installed (Debian: apt-get install postgresql)"
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def postgres() -> Iterator[str]:
    """Starts a server on localhost and gives the SQLAlchemy address of an empty database in it."""
    binaries, port = _binaries(), free_port()
    assert binaries is not None, missing()
    # Not below the tests' own temporary folder: its user could not get through to it.
    folder = Path(tempfile.mkdtemp(prefix="sdopt-postgres-", dir="/tmp"))
    user = _unprivileged() if os.geteuid() == 0 else None
    if user:
        shutil.chown(folder, user)

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [binaries / program, "-D", folder / "data", *arguments],
            user=user,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            stdout=subprocess.DEVNULL,
            check=True,
        )

    try:
        run("initdb", "-U", "sdopt", "-E", "UTF8", "--auth=trust", "--no-sync")
        options = f"-p {port} -h 127.0.0.1 -F -c unix_socket_directories="
        run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql+psycopg2://sdopt@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-m", "fast", "stop")  # does not wait for clients
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path | None:
    """Debian keeps them off the PATH, by version."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    candidates += [Path(on_path).resolve().parent] if on_path else []
    return next(
        (
            path
            for path in candidates
            if (path / "initdb").is_file() and (path / "pg_ctl").is_file()
        ),
        None,
    )


def _unprivileged() -> str:
    """PostgreSQL does not run as root."""
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)
