"""Finds all processes that a worker started, and measures their memory."""

import os
import signal
import stat
from collections.abc import Iterable, Set
from contextlib import suppress
from functools import cache
from pathlib import Path

PROC = Path("/proc")

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
"""File systems that keep their files in memory."""


def started_by(pid: int, proc: Path = PROC) -> list[int]:
    """Returns all descendants of a process, and all members of its and their process groups."""
    children: dict[int, list[int]] = {}
    for name in os.listdir(proc) if proc.is_dir() else ():  # noqa: PTH208
        if name.isdecimal() and (fields := _fields(f"{proc}/{name}/stat")):
            child, parent, group = int(name), int(fields[1]), int(fields[2])
            for above in {parent, group} - {child}:
                children.setdefault(above, []).append(child)
    pids = [pid]
    for known in pids:
        pids += [child for child in children.get(known, []) if child not in pids]
    return pids[1:]


def end(pids: Iterable[int]) -> None:
    """Kills processes at once; those that have ended are left out."""
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL)


def held_elsewhere(files: Path | None = None) -> float:
    """Returns the memory that this process causes outside its own resident set, in GiB.

    Includes the memory of its descendants (private pages, and a share of the shared ones), and the files of a folder
    where they are kept in memory, as far as none of these processes maps them.
    """
    pid = os.getpid()
    children = started_by(pid)
    mapped = sum(
        _gib_of(PROC / str(number), ("RssShmem:",)) for number in (pid, *children)
    )
    in_files = 0.0 if files is None else files_in_memory(files)
    return sum(_own_gib(PROC / str(child)) for child in children) + max(
        0.0, in_files - mapped
    )


def files_in_memory(folder: Path) -> float:
    """Returns the size of the files below a folder that are kept in memory, as on a tmpfs, in GiB."""
    if folder.stat().st_dev not in _memory_devices():
        return 0.0
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(
        folder
    ):  # unlike `rglob`, it goes on if a folder has vanished
        for name in names:
            with suppress(OSError):
                status = Path(parent, name).lstat()
                sizes[status.st_ino] = (
                    status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
                )
    return sum(sizes.values()) / 2**30


@cache
def _memory_devices() -> Set[int]:
    """Returns the numbers of the file systems that keep their files in memory."""
    with suppress(OSError):
        lines = [
            line.partition(" - ")
            for line in (PROC / "self/mountinfo")
            .read_text(encoding="utf-8")
            .splitlines()
        ]
        numbers = [
            before.split()[2].split(":")
            for before, _, after in lines
            if after.split()[0] in _IN_MEMORY
        ]
        return {os.makedev(int(major), int(minor)) for major, minor in numbers}
    return frozenset()


def text_of_process(file: Path) -> str:
    """Reads a file about a process, whose name the kernel may have cut in the middle of a character. Raises OSError."""
    return file.read_text(encoding="utf-8", errors="replace")


def waited_s() -> float:
    """Returns for how long this process's main thread has waited for a core; 0 if it is not known."""
    with suppress(OSError, ValueError):
        return (
            int((PROC / "self" / "schedstat").read_text(encoding="utf-8").split()[1])
            / 1e9
        )
    return 0.0


def _fields(file: str) -> list[bytes]:
    """Returns the fields of a process's `stat` after its name; [] if it has ended.

    Read without `pathlib`: all processes of the machine are asked after each timed call.
    """
    try:
        with open(file, "rb", buffering=0) as stream:  # noqa: PTH123
            return stream.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _own_gib(folder: Path) -> float:
    """Returns the anonymous and shared memory of a process; a page counts divided by the processes that share it."""
    return _gib_of(folder, ("Pss_Anon:", "Pss_Shmem:"), "smaps_rollup") or _gib_of(
        folder, ("RssAnon:", "RssShmem:")
    )


def _gib_of(folder: Path, names: tuple[str, ...], file: str = "status") -> float:
    """Returns the sum of some memory fields of a process, in GiB; 0 if there are none, or it has ended."""
    with suppress(OSError):
        lines = text_of_process(folder / file).splitlines()
        return (
            sum(int(line.split()[1]) for line in lines if line.startswith(names))
            / 2**20
        )
    return 0.0
