"""Limits of memory that control groups set for this process: containers, systemd and Slurm, in both versions."""

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The limit, what is used, and the part of that which the kernel gives back, by version: the second one, the first."""


def memory_limits(mount: Path = MOUNT, listing: Path = _SELF) -> tuple[float, float]:
    """Returns the bytes that this process may have, and those that are left of them; infinite without a limit."""
    most = left = float("inf")
    for group in _groups(mount, listing):
        for limit_file, usage_file, reclaimable in _FILES:
            limit = _number(group / limit_file)
            if limit is None:
                continue
            used = (_number(group / usage_file) or 0) - _listed(group / "memory.stat", reclaimable)
            most, left = min(most, limit), min(left, max(limit - used, 0))
    return most, left


def _groups(mount: Path, listing: Path) -> Iterator[Path]:
    """Yields the folders of this process's groups and of all above them, whose limits hold for it too."""
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    for line in lines:
        number, controllers, place = line.split(":", 2)
        base = mount if number == "0" else mount / "memory"
        if number == "0" or "memory" in controllers.split(","):
            # Within a container the path may be that of its host, of which only the root is mounted.
            inner = Path(place.lstrip("/"))
            yield from (base / each for each in (inner, *inner.parents))


def _number(file: Path) -> float | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return float(text) if text.isdecimal() else None


def _listed(file: Path, name: str) -> float:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
