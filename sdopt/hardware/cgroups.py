"""Limits that control groups set for this process: containers, systemd and Slurm, in both versions."""

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
_LISTING = Path("/proc/self/cgroup")


_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""How both versions name the files of the limit and of the usage, and in `memory.stat` the part of the usage that the
kernel gives back."""


def memory_limits(mount: Path = MOUNT, listing: Path = _LISTING) -> tuple[float, float]:
    """Returns the bytes that this process may have, and those that are left of them; infinite without a limit."""
    most = left = float("inf")
    for group in _groups(mount, listing, "memory"):
        for limit_file, usage_file, reclaimable in _VERSIONS:
            limit = _number(group / limit_file)
            if limit is None:
                continue
            used = _number(group / usage_file) or 0
            used -= _listed(group / "memory.stat", reclaimable)
            most = min(most, limit)
            left = min(left, max(limit - used, 0))
    return most, left


def core_limit(mount: Path = MOUNT, listing: Path = _LISTING) -> float:
    """Returns how many cores this process may use on average; infinite without a limit."""
    most = float("inf")
    for group in _groups(mount, listing, "cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not quota:
            quota = _text(group / "cpu.cfs_quota_us")
            period = _text(group / "cpu.cfs_period_us")
        if quota.strip().isdecimal():  # else `max`, or -1
            most = min(most, int(quota) / int(period))
    return most


def _groups(mount: Path, listing: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's groups and of all above them, whose limits hold for it too."""
    for line in _text(listing).splitlines():
        number, controllers, place = line.split(":", 2)
        if number == "0":
            base = mount
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        # Within a container the path may be that of its host, of which only the root is mounted.
        group = Path(place.lstrip("/"))
        yield base / group
        for above in group.parents:
            yield base / above


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(file: Path) -> float | None:
    text = _text(file).strip()
    return float(text) if text.isdecimal() else None


def _listed(file: Path, name: str) -> float:
    for line in _text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return float(value)
    return 0
