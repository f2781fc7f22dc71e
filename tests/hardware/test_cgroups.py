"""Limits of memory and of cores, wherever in the tree of control groups they are set."""

from pathlib import Path

import pytest

from sdopt.hardware.cgroups import core_limit, memory_limits

GIB = 2**30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    return tmp_path / "listing"


def test_the_lowest_of_all_groups_above_holds(tmp_path: Path, listing: Path) -> None:
    listing.write_text("0::/user.slice/job.scope\n")
    write(tmp_path, max="max")
    write(
        tmp_path / "user.slice",
        max=f"{4 * GIB}",
        current=f"{3 * GIB}",
        stat=f"anon 7\ninactive_file {GIB}",
    )
    write(tmp_path / "user.slice/job.scope", max=f"{8 * GIB}", current=f"{GIB}")
    assert memory_limits(tmp_path, listing) == (4 * GIB, 2 * GIB)


def test_the_first_version_has_a_tree_for_memory(tmp_path: Path, listing: Path) -> None:
    listing.write_text("5:cpu:/\n4:memory:/slurm/job_7\n0::/\n")
    write(
        tmp_path / "memory",
        limit_in_bytes="9223372036854771712",
        usage_in_bytes=f"{9 * GIB}",
    )
    write(
        tmp_path / "memory/slurm/job_7",
        limit_in_bytes=f"{2 * GIB}",
        usage_in_bytes=f"{GIB}",
    )
    assert memory_limits(tmp_path, listing) == (2 * GIB, GIB)


def test_a_container_sees_its_own_group_as_the_root(
    tmp_path: Path, listing: Path
) -> None:
    listing.write_text("0::/docker/0a1b\n")
    write(tmp_path, max=f"{GIB}", current="0")
    assert memory_limits(tmp_path, listing) == (GIB, GIB)


def test_without_groups_nothing_is_limited(tmp_path: Path, listing: Path) -> None:
    assert memory_limits(tmp_path, listing) == (float("inf"), float("inf"))
    assert core_limit(tmp_path, listing) == float("inf")


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}),
        (
            "0::/user.slice/run.scope\n",
            {
                "cpu.max": "max 100000",
                "user.slice/cpu.max": "200000 100000",
                "user.slice/run.scope/cpu.max": "800000 100000",
            },
        ),
        (
            "4:memory:/\n3:cpu,cpuacct:/slurm/job_7\n",
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "cpu/slurm/job_7/cpu.cfs_quota_us": "100000",
                "cpu/slurm/job_7/cpu.cfs_period_us": "50000",
            },
        ),
    ],
    ids=["of a container", "of systemd", "of the first version"],
)
def test_cores_are_limited_by_the_same_groups(
    tmp_path: Path, listing: Path, groups: str, files: dict[str, str]
) -> None:
    listing.write_text(groups)
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert core_limit(tmp_path, listing) == 2
