"""Counts what took the processor from a timed process, by cause, from the Linux kernel's counters.

Causes are counted, not guessed from slow samples: if a call is slow without a cause, the program itself is slow.
A program with more threads than cores makes its own threads wait. So waiting counts only up to the time for which
others ran on the cores that the program may use.
"""

import operator
import os
import time
from collections.abc import Mapping
from pathlib import Path

from sdopt.measure.processes import PROC, started_by, text_of_process
from sdopt.record.samples import Interference

_CPUS = Path("/sys/devices/system/cpu")

_TICKS = 8
"""Fields of a core's line in /proc/stat that add up to all its time: user, nice, system, idle, iowait, irq, softirq,
steal (proc(5)); guests are counted as user."""

_IDLE, _STOLEN = (3, 4), 7

_MAJOR_FAULTS = 9
"""Position of major faults in /proc/<pid>/task/<tid>/stat, after the bracket that closes the name (proc(5))."""


_Thread = tuple[float, float, int, int]
"""How long a thread ran and waited, in seconds; its major faults, and how often it was switched out."""

_Counts = tuple[Mapping[str, _Thread], float, float, float]
"""The threads of the process and of all others in its group; the time of all cores that it may use (busy, idle and
stolen), and how much of that was busy, and stolen."""


class InterferenceMeter:
    """Counts the interference with a process, and with all processes that it started, from now until `stop`.

    Threads that start in this time count from their start; the counts of threads that end in it are lost. The process
    must be the leader of its group.
    """

    def __init__(self, pid: int, proc: Path = PROC, cpus: Path = _CPUS) -> None:
        self._pid, self._proc, self._cpus = pid, proc, cpus
        self._start, self._before = time.perf_counter(), self._read()

    @property
    def off(self) -> str:
        """Why nothing is counted; "" if something is."""
        if self._before is not None:
            return ""
        missing = "/proc/stat, or no schedstat and status of each thread"
        return f"interference is not recorded, and no extra round is timed because of it: this system lacks {missing}"

    def stop(self, seconds: float, own_s: float = 0.0) -> Interference | None:
        """Returns the interference with a call of some seconds; None if the kernel does not count, or it has ended.

        `own_s` is processor time of further processes that belong to what is measured, and are no others.
        """
        after = self._read()
        passed_s = time.perf_counter() - self._start
        if self._before is None or after is None:
            return None
        earlier, *cores_then = self._before
        threads, *cores_now = after
        grown = [
            map(operator.sub, now, earlier.get(name, (0.0, 0.0, 0, 0)))
            for name, now in threads.items()
        ]
        ran_s, waited_s, major_faults, switched_out = map(sum, zip(*grown, strict=True))
        total_s, busy_s, stolen_s = map(operator.sub, cores_now, cores_then)
        others_s = max(0.0, busy_s - ran_s - own_s)
        lost_s = min(waited_s, others_s)
        return Interference(
            waited=round(lost_s / max(seconds, ran_s + lost_s), 5) if lost_s else 0.0,
            stolen=round(stolen_s / total_s, 5) if total_s > 0 else 0.0,
            major_faults=major_faults,
            switched_out=switched_out,
            cpu_mhz=self._mhz(),
            cores=round((ran_s + waited_s) / passed_s, 3),
        )

    def _read(self) -> _Counts | None:
        try:
            cores = self._cores()
            ticks = _ticks((self._proc / "stat").read_text(encoding="utf-8"), cores)
            threads: dict[str, _Thread] = {}
            for pid in (self._pid, *started_by(self._pid, self._proc)):
                threads |= _threads(self._proc / str(pid) / "task")
        except OSError:
            return None
        if not threads or not ticks:
            return None
        second = os.sysconf("SC_CLK_TCK")
        seconds = [sum(fields) / second for fields in zip(*ticks, strict=True)]
        total_s, stolen_s = sum(seconds), seconds[_STOLEN]
        idle_s = sum(seconds[field] for field in _IDLE)
        return threads, total_s, total_s - idle_s - stolen_s, stolen_s

    def _cores(self) -> set[int]:
        """Returns the numbers of the cores that the process may use."""
        status = text_of_process(self._proc / str(self._pid) / "status")
        listed = next(
            (
                line
                for line in status.splitlines()
                if line.startswith("Cpus_allowed_list:")
            ),
            ":",
        )
        numbers: set[int] = set()
        for part in filter(None, listed.partition(":")[2].strip().split(",")):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
        return numbers

    def _mhz(self) -> float | None:
        """Returns the present mean frequency of the cores that the process may use; None if it is not known."""
        try:
            cores = self._cores()
            files = [
                self._cpus / f"cpu{core}" / "cpufreq" / "scaling_cur_freq"
                for core in sorted(cores)
            ]
            frequencies = [
                int(file.read_text(encoding="utf-8")) / 1000
                for file in files
                if file.is_file()
            ]
            frequencies = frequencies or _listed_mhz(
                (self._proc / "cpuinfo").read_text(encoding="utf-8"), cores
            )
        except (OSError, ValueError):
            return None
        return round(sum(frequencies) / len(frequencies), 1) if frequencies else None


def _ticks(stat: str, cores: set[int]) -> list[list[int]]:
    """Returns the counters of some cores, a list each; leaves out cores for which the kernel keeps too few."""
    of_cores = []
    for line in stat.splitlines():
        name, *fields = line.split()
        if (
            name.removeprefix("cpu").isdecimal()
            and int(name.removeprefix("cpu")) in cores
            and len(fields) >= _TICKS
        ):
            of_cores.append([int(field) for field in fields[:_TICKS]])
    return of_cores


def _listed_mhz(cpuinfo: str, cores: set[int]) -> list[float]:
    frequencies, core = [], -1
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "processor":
            core = int(value)
        elif name.strip() == "cpu MHz" and core in cores:
            frequencies.append(float(value))
    return frequencies


def _threads(tasks: Path) -> dict[str, _Thread]:
    """Returns the counts of the threads of a process, by their numbers."""
    threads = {}
    for task in tasks.glob("*"):
        counts = _thread(task)
        if counts is not None:
            threads[task.name] = counts
    return threads


def _thread(task: Path) -> _Thread | None:
    """Returns the counts of a thread; None if it has ended, or the kernel keeps none."""
    try:
        ran, waited = (task / "schedstat").read_text(encoding="utf-8").split()[:2]
        fields = text_of_process(task / "stat").rpartition(")")[2].split()
        status = text_of_process(task / "status")
    except (OSError, ValueError):
        return None
    switched = next(
        line
        for line in status.splitlines()
        if line.startswith("nonvoluntary_ctxt_switches:")
    )
    faults, times = int(fields[_MAJOR_FAULTS]), int(switched.split()[1])
    return int(ran) / 1e9, int(waited) / 1e9, faults, times
