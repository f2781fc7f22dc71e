"""Counts what took the processor from a timed process, by cause, from the Linux kernel's counters.

Causes are counted, not guessed from slow samples: if a call is slow without a cause, the program itself is slow.
A program with more threads than cores makes its own threads wait. So waiting counts only up to the time for which
others ran on the cores that the program may use.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

from sdopt.measure.processes import PROC, started_by, text_of_process
from sdopt.record.samples import Interference
from sdopt.schema import Protocol

_CPUS = Path("/sys/devices/system/cpu")

_TICKS = 8
"""Fields of a core's line in /proc/stat that add up to all its time: user, nice, system, idle, iowait, irq, softirq,
steal (proc(5)); guests are counted as user."""

_IDLE, _STOLEN = (3, 4), 7

_MAJOR_FAULTS = 9
"""Position of major faults in /proc/<pid>/task/<tid>/stat, after the bracket that closes the name (proc(5))."""


class _Thread(NamedTuple):
    """What a thread has had so far."""

    ran_s: float = 0.0
    waited_s: float = 0.0
    major_faults: int = 0
    switched_out: int = 0


class _Counts(NamedTuple):
    """What a process and the cores that it may use have had so far."""

    threads: dict[str, _Thread]
    """The threads of the process and of all others in its group, by number."""
    total_s: float
    """The time of all cores: busy, idle and stolen."""
    busy_s: float
    stolen_s: float


class InterferenceMeter:
    """Counts the interference with a process, and with all processes that it started, from now until `stop`.

    Threads that start in this time count from their start; the counts of threads that end in it are lost. The process
    must be the leader of its group.
    """

    def __init__(self, pid: int, proc: Path = PROC, cpus: Path = _CPUS) -> None:
        self._pid = pid
        self._proc = proc
        self._cpus = cpus
        self._start = time.perf_counter()
        self._before = self._read()

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
        before = self._before
        ran_s = waited_s = 0.0
        major_faults = switched_out = 0
        for number, thread in after.threads.items():
            earlier = before.threads.get(number, _Thread())
            ran_s += thread.ran_s - earlier.ran_s
            waited_s += thread.waited_s - earlier.waited_s
            major_faults += thread.major_faults - earlier.major_faults
            switched_out += thread.switched_out - earlier.switched_out
        total_s = after.total_s - before.total_s
        busy_s = after.busy_s - before.busy_s
        stolen_s = after.stolen_s - before.stolen_s
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
        total_s = sum(seconds)
        stolen_s = seconds[_STOLEN]
        idle_s = sum(seconds[field] for field in _IDLE)
        busy_s = total_s - idle_s - stolen_s
        return _Counts(threads, total_s, busy_s, stolen_s)

    def _cores(self) -> set[int]:
        """Returns the numbers of the cores that the process may use."""
        status = text_of_process(self._proc / str(self._pid) / "status")
        numbers: set[int] = set()
        for part in filter(None, _value_in(status, "Cpus_allowed_list").split(",")):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
        return numbers

    def _mhz(self) -> float | None:
        """Returns the present mean frequency of the cores that the process may use; None if it is not known."""
        try:
            cores = self._cores()
            frequencies = []
            for core in sorted(cores):
                file = self._cpus / f"cpu{core}" / "cpufreq" / "scaling_cur_freq"
                if file.is_file():
                    frequencies.append(int(file.read_text(encoding="utf-8")) / 1000)
            if not frequencies:
                cpuinfo = (self._proc / "cpuinfo").read_text(encoding="utf-8")
                frequencies = _listed_mhz(cpuinfo, cores)
        except (OSError, ValueError):
            return None
        return round(sum(frequencies) / len(frequencies), 1) if frequencies else None


def disturbance_of(interference: Interference | None) -> str:
    """Returns in words what other work took; "" if it took no more than it may from a timed call, or nobody counted."""
    limit = Protocol().interference
    if interference is None or limit is None:
        return ""
    took = max(interference.waited, interference.stolen)
    if took <= limit:
        return ""
    return f"other work took {100 * took:.0f} % of the processor"


def _ticks(stat: str, cores: set[int]) -> list[list[int]]:
    """Returns the counters of some cores, a list each; leaves out cores for which the kernel keeps too few."""
    of_cores = []
    for line in stat.splitlines():
        name, *fields = line.split()
        core = name.removeprefix("cpu")
        if not core.isdecimal() or int(core) not in cores:
            continue
        if len(fields) >= _TICKS:
            of_cores.append([int(field) for field in fields[:_TICKS]])
    return of_cores


def _value_in(status: str, name: str) -> str:
    """Returns a value in /proc/<pid>/status; "" if it is not there."""
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def _listed_mhz(cpuinfo: str, cores: set[int]) -> list[float]:
    frequencies = []
    core = -1
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
        return _Thread(
            ran_s=int(ran) / 1e9,
            waited_s=int(waited) / 1e9,
            major_faults=int(fields[_MAJOR_FAULTS]),
            switched_out=int(_value_in(status, "nonvoluntary_ctxt_switches")),
        )
    except (OSError, ValueError):
        return None
