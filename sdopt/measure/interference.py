"""What took the processor from a process while it was timed, by cause, as the Linux kernel counts it.

Causes are counted, and not guessed from slow samples: a call that is slow without a cause is the program's own doing.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")

_TICKS = 8
"""Fields of the first line of /proc/stat that add up to all time: user, nice, system, idle, …; the last is stolen."""

_MAJOR_FAULTS = 9
"""Position of major faults in /proc/<pid>/task/<tid>/stat, after the bracket that closes the name (proc(5))."""


@dataclass(frozen=True)
class Interference:
    """What happened to a process, with all its threads, during one stretch of time."""

    seconds: float
    waited: float
    """Time for which threads that were ready waited for a core, summed over threads, as a share of the stretch."""
    stolen: float
    """Share of all cores' time that a hypervisor gave to others."""
    major_faults: int
    """Pages that had to be read from disk."""
    switched_out: int
    """How often a thread lost its core before it was done."""


@dataclass(frozen=True)
class _Thread:
    waited_ns: int = 0
    major_faults: int = 0
    switched_out: int = 0


@dataclass(frozen=True)
class _Counts:
    threads: Mapping[str, _Thread]
    ticks: int
    stolen: int


class InterferenceMeter:
    """Counts what interferes with a process between `start` and `stop`.

    Threads that begin within the stretch count from their beginning; those that end take their counts along.

    Args:
        pid: the process.
        proc: where the kernel's counters are.
    """

    def __init__(self, pid: int, proc: Path = _PROC) -> None:
        self._pid, self._proc = pid, proc
        self._begun, self._before = 0.0, self._read()

    @property
    def off(self) -> str:
        """Why nothing is counted; "" where something is."""
        if self._before is not None:
            return ""
        return f"interference is not recorded: there is no {self._proc / 'stat'}, or no schedstat of each thread"

    def start(self) -> None:
        """Begins a stretch."""
        self._before = self._read()
        self._begun = time.perf_counter()

    def stop(self) -> Interference | None:
        """Returns what happened since `start`; None where the kernel does not count, or the process has ended."""
        seconds = time.perf_counter() - self._begun
        before, after = self._before, self._read()
        if before is None or after is None:
            return None
        pairs = [(before.threads.get(tid, _Thread()), now) for tid, now in after.threads.items()]
        return Interference(
            seconds=seconds,
            waited=sum(now.waited_ns - then.waited_ns for then, now in pairs) / 1e9 / seconds,
            stolen=(after.stolen - before.stolen) / max(1, after.ticks - before.ticks),
            major_faults=sum(now.major_faults - then.major_faults for then, now in pairs),
            switched_out=sum(now.switched_out - then.switched_out for then, now in pairs),
        )

    def _read(self) -> _Counts | None:
        try:
            ticks = [
                int(field) for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1 : 1 + _TICKS]
            ]
            tasks = list((self._proc / str(self._pid) / "task").iterdir())
            threads = {task.name: found for task in tasks if (found := _thread(task)) is not None}
        except OSError:
            return None
        return _Counts(threads, sum(ticks), ticks[-1]) if threads and len(ticks) == _TICKS else None


def _thread(task: Path) -> _Thread | None:
    """Returns the counts of a thread; None where it has ended, or the kernel keeps none."""
    try:
        waited = int((task / "schedstat").read_text().split()[1])
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        status = (task / "status").read_text()
    except (OSError, IndexError):
        return None
    switched = next(line for line in status.splitlines() if line.startswith("nonvoluntary_ctxt_switches:"))
    return _Thread(waited, int(fields[_MAJOR_FAULTS]), int(switched.split()[1]))
