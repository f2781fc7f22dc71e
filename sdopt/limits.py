"""Checks the resource limits of a shell or a batch system (`ulimit`) against the minimum for a measurement.

Below the minimum, libraries abort the process with unrelated errors, or results cannot be written.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sdopt.errors import UnavailableError

SIZES = (
    (resource.RLIMIT_AS, "v", "address space", 8 * 2**30),
    (resource.RLIMIT_FSIZE, "f", "the size of a file", 64 * 2**20),
)
"""Limits in bytes: resource, flag of `ulimit`, description, minimum. Importing PyTorch and diffusers takes most of the
address space; the largest files are results with many samples, final latents, and MLflow's database."""

_TASKS = 64
"""Processes and threads of a command that measures two variants, in addition to one per core."""


def require_limits() -> None:
    """Checks the limits of this process, which its workers inherit.

    Raises:
        UnavailableError: some limits are too low; the error has a line for each.
    """
    lines = (_too_low(*row) for row in SIZES)
    if problems := [*filter(None, lines), *_tasks_too_few()]:
        raise UnavailableError(problems)


def require_address_space(what: str, least: int) -> None:
    """Raises UnavailableError if the address space of this process is limited to less than `least` bytes."""
    if problem := _too_low(
        resource.RLIMIT_AS, "v", "address space", least, f" for {what}"
    ):
        raise UnavailableError(problem)


def _too_low(
    limit: int, flag: str, what: str, least: int, purpose: str = ""
) -> str | None:
    allowed, _ = resource.getrlimit(limit)
    if allowed == resource.RLIM_INFINITY or allowed >= least:
        return None
    has = f"{what} is limited to {round(allowed / 2**20, 1):g} MiB"
    problem = f"{has}, but at least {least / 2**20:g} MiB is required"
    return f"{problem}{purpose}; allow more (ulimit -{flag} unlimited)"


def _tasks_too_few() -> Iterator[str]:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = _TASKS + (os.cpu_count() or 1)
    if os.getuid() == 0 or allowed == resource.RLIM_INFINITY or allowed >= 64 * needed:
        return  # root has no limit, and counting takes time, which a high limit does not need
    running = _running_tasks()
    if allowed < running + needed:
        problem = f"processes and threads are limited to {allowed}, and {running} run already, but at least {needed}"
        yield f"{problem} more are required; allow more (ulimit -u), or end other programs"


def _running_tasks() -> int:
    """Returns the number of this user's processes and threads."""
    tasks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if process.stat().st_uid == os.getuid():
                tasks += sum(1 for _ in (process / "task").iterdir())
    return tasks
