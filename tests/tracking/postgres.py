"""A PostgreSQL server in a temporary folder, on a free port, from Debian's package or any other; gone afterwards.

`python -m tests.tracking.postgres` starts one, prints its address, and ends it with Ctrl-C.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def missing() -> str | None:
    """Why no server can be started here, or nothing."""
    if _binaries() is None:
        return "PostgreSQL's initdb and postgres are not installed (Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and _unprivileged() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def postgres() -> Iterator[str]:
    """Starts a server on localhost and gives the SQLAlchemy address of an empty database in it."""
    binaries = _binaries()
    assert binaries is not None, missing()
    # Not below the tests' own temporary folder: its user could not get through to it, and socket paths are short.
    folder = Path(tempfile.mkdtemp(prefix="sdopt-postgres-", dir="/tmp"))
    user = _unprivileged() if os.geteuid() == 0 else None
    password, port = secrets.token_hex(16), free_port()
    try:
        if user:
            shutil.chown(folder, user)
        (folder / "password").write_text(password)
        if user:
            shutil.chown(folder / "password", user)
        quiet = {"user": user, "cwd": folder, "stdout": subprocess.DEVNULL, "env": {**os.environ, "LC_ALL": "C.UTF-8"}}
        subprocess.run(
            [binaries / "initdb", "-D", folder / "data", "-U", "sdopt", "-E", "UTF8", "--auth=scram-sha-256"]
            + [f"--pwfile={folder / 'password'}", "--no-sync"],
            check=True,
            **quiet,  # type: ignore[call-overload]
        )
        settings = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": folder, "fsync": "off"}
        options = [f"-c{key}={value}" for key, value in settings.items()]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [binaries / "postgres", "-D", folder / "data", *options],
                **(quiet | {"stdout": log, "stderr": log}),  # type: ignore[call-overload]
            )
        try:
            ready = [str(binaries / "pg_isready"), "-q", "-t", "60", "-h", "127.0.0.1", "-p", str(port)]
            while subprocess.run(ready, check=False).returncode:
                if server.poll() is not None:
                    raise RuntimeError(f"postgres ended: {(folder / 'log').read_text()}")
            yield f"postgresql+psycopg2://sdopt:{password}@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # its "fast" shutdown, which does not wait for clients
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path | None:
    """Debian keeps them off the PATH, by version."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    candidates += [Path(on_path).resolve().parent] if on_path else []
    needed = ("initdb", "postgres", "pg_isready")
    return next((path for path in candidates if all((path / name).is_file() for name in needed)), None)


def _unprivileged() -> str | None:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


if __name__ == "__main__":
    with postgres() as address:
        print(address, flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
