"""A Slurm cluster of two nodes on this machine: controller, node daemons and munge, all from Debian's packages.

The daemons are this process's children, and end with it, however it ends. Where it is killed, what is left is the
job that runs.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.command import eventually
from tests.tracking.postgres import free_port

NODES = ("one", "two")

_CONFIGURATION = """
ClusterName=sdopt
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node-%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=2
MinJobAge=3600
MpiDefault=none
{nodes}
PartitionName=all Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""

_SACCT = '''#!{python}
"""What `sacct` says where accounting is on, from what the controller remembers."""
import re, subprocess, sys

print("JobID|State|NodeList")
jobs = [sys.argv[place + 1] for place, word in enumerate(sys.argv) if word == "-j"]
for job in jobs:
    shown = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True).stdout
    for line in shown.splitlines():
        fields = dict(re.findall(r"(\\w+)=(\\S*)", line))
        number = fields["JobId"]
        if "ArrayJobId" in fields:
            number = fields["ArrayJobId"] + "_" + fields["ArrayTaskId"]
        print("|".join([number, fields["JobState"], fields.get("NodeList", "")]))
'''
"""submitit asks `sacct` what became of a job; it needs a database daemon, which two nodes on one machine do without."""


def is_installed() -> bool:
    """Whether the daemons are there, and this user may start them."""
    programs = ("slurmctld", "slurmd", "munged", "setpriv")
    return os.geteuid() == 0 and all(
        shutil.which(name, path=_path()) for name in programs
    )


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


@contextmanager
def cluster(folder: Path) -> Iterator["Cluster"]:
    """Yields a cluster that takes jobs; nothing that it started is left afterwards."""
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


class Cluster:
    """Controller and nodes, whose files are all in one folder; `environment` is what its users need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        programs = folder / "bin"
        self.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{programs}:{_path()}",
        }
        for name in ("state", "bin", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(stat.S_IRUSR | stat.S_IWUSR)
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
            for node in NODES
        )
        text = _CONFIGURATION.format(
            folder=folder, host=host, port=free_port(), nodes=nodes
        )
        (folder / "slurm.conf").write_text(text)
        sacct = programs / "sacct"
        sacct.write_text(_SACCT.format(python=sys.executable))
        sacct.chmod(0o755)

    def start(self) -> None:
        """Starts all daemons, and waits until both nodes take jobs."""
        munge = {
            name: self.folder / f"munge.{name}"
            for name in ("socket", "pid", "log", "seed")
        }
        self._launch(
            "munged",
            *(
                "--foreground",
                "--force",
                f"--key-file={self.folder / 'munge.key'}",
                f"--socket={munge['socket']}",
            ),
            *(
                f"--pid-file={munge['pid']}",
                f"--log-file={munge['log']}",
                f"--seed-file={munge['seed']}",
            ),
        )
        self.wait_for(munge["socket"].is_socket, "munged has its socket")
        self._launch("slurmctld", "-D")
        for node in NODES:
            self._launch("slurmd", "-D", "-N", node, name=node)
        self.wait_for(self._is_idle, "nodes are idle")

    def _is_idle(self) -> bool:
        with suppress(
            subprocess.CalledProcessError
        ):  # the controller does not answer yet
            return self._run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"]
        return False

    def stop(self) -> None:
        """Ends all jobs, all daemons, and what they left."""
        with suppress(subprocess.SubprocessError):
            self._run("scancel", "--user=root", timeout=20)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # Jobs, their steps and the commands that wait for them have sessions of their own, and outlive the daemons.
        _kill_with(f"SLURM_CONF={self.environment['SLURM_CONF']}")

    def tasks(self) -> dict[str, str]:
        """The jobs that run, by their number in the sweep: the number by which Slurm knows them."""
        lines = self._run("squeue", "-h", "-t", "RUNNING", "-o", "%K %i").splitlines()
        return dict(line.split() for line in lines)

    def cancel(self, task: str) -> None:
        """Kills a job's processes without a warning, as a machine does that goes down."""
        self._run("scancel", "--full", "--signal=KILL", task)

    def requeue(self, task: str) -> None:
        """Ends a job and queues it again, as preemption does."""
        self._run("scontrol", "requeue", task)

    def warn(self, task: str) -> None:
        """Sends what submitit lets Slurm send some minutes before a time limit, and before preemption."""
        self._run("scancel", "--signal=USR2", task)

    def is_queued(self, task: str) -> bool:
        return self._run("squeue", "-h", "-j", task, "-o", "%T").strip() == "PENDING"

    def start_now(self, task: str) -> None:
        """Spares a job that comes back the minutes for which Slurm holds it."""
        self._run("scontrol", "update", f"JobId={task}", "StartTime=now")

    def wait_for(
        self, condition: Callable[[], bool], what: str, timeout_s: float = 120
    ) -> None:
        if not eventually(condition, timeout_s, pause_s=0.5):
            logs = "\n".join(
                path.read_text()[-2000:] for path in self.folder.glob("*.log")
            )
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{logs}")

    def _launch(self, program: str, *arguments: str, name: str = "") -> None:
        """Starts a daemon in a session of its own, where no Ctrl-C meets it; it ends when this process does."""
        found = shutil.which(program, path=self.environment["PATH"]) or program
        with (self.folder / f"{name or program}.out.log").open("ab") as log:
            self._daemons[name or program] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", found, *arguments],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _run(self, *command: str, timeout: float | None = None) -> str:
        environment = {**os.environ, **self.environment}
        program = shutil.which(command[0], path=environment["PATH"]) or command[0]
        finished = subprocess.run(
            [program, *command[1:]],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout,
        )
        return finished.stdout


def _processes_with(entry: str) -> list[int]:
    """The processes, this one left out, that have an entry in their environment."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            if pid != os.getpid() and entry.encode() in Path(
                f"/proc/{pid}/environ"
            ).read_bytes().split(b"\0"):
                found.append(pid)
    return found


def _kill_with(entry: str) -> None:
    """Kills all processes that have an entry in their environment, and what these start meanwhile."""
    deadline = time.monotonic() + 10
    while (found := _processes_with(entry)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
