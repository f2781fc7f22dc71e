"""A Ray cluster of one node on this machine, which listens on the loopback interface alone."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command import eventually
from tests.tracking.postgres import free_port


class Head:
    """The head node with two cores, whose files are all in one folder; `environment` is what its users need."""

    def __init__(self) -> None:
        # Ray's sockets lie in it, and the kernel takes no path of theirs beyond 107 letters.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._port = free_port()
        # By the second, Ray takes 127.0.0.1 for its own address: what it calls the firewall of other systems.
        self.environment = {
            "RAY_ADDRESS": f"127.0.0.1:{self._port}",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Else Ray kills jobs where other processes have taken the machine's memory.
            "RAY_memory_monitor_refresh_ms": "0",
        }
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts all daemons, and waits until jobs can be sent."""
        options = ["--head", "--block", "--num-cpus=2", "--include-dashboard=false"]
        options += ["--object-store-memory=100000000", f"--temp-dir={self.folder}"]
        ports = [f"--port={self._port}", f"--ray-client-server-port={free_port()}"]
        output = self.folder / "start.log"
        with output.open("w") as stream:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    *options,
                    *ports,
                ],
                # Its workers begin here, and not in the folder of the command.
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        ended = self._process.poll
        eventually(
            lambda: "Ray runtime started" in output.read_text() or ended() is not None,
            120,
            pause_s=0.5,
        )
        assert ended() is None, output.read_text()

    def stop(self) -> None:
        """Kills the daemons, which are a process group; their workers end with them."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def worker_in(folder: Path) -> int | None:
    """The process that measures in a folder: it keeps the folder open, by which that is locked."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink() == folder:
                return int(link.parts[2])
    return None


@contextmanager
def running(extra: str, module: str) -> Iterator[Head]:
    """A head node for the block; skips the test where the module of an extra is not installed."""
    if find_spec("ray") is None or find_spec(module) is None:
        pytest.skip(
            f"needs the extra {extra}, in an environment of its own: see sdopt/README.md"
        )
    head = Head()
    try:
        head.start()
        yield head
    finally:
        head.stop()
