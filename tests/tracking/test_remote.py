"""Results at an address that fsspec knows: what is downloaded, and what is refused."""

import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from sdopt.errors import UsageError
from sdopt.schema import Tracking
from sdopt.tracking import remote
from sdopt.tracking.finding import find_result
from sdopt.tracking.remote import download
from tests.command import Finished


@pytest.fixture
def memory() -> Any:
    system = fsspec.filesystem("memory")
    system.store.clear()
    return system


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_the_same_here(memory: Any, finished: Finished) -> None:
    memory.put(str(finished.folder), "/bucket/one", recursive=True)
    memory.pipe("/bucket/one-more/result.json", b"{}")
    for address in ("memory://bucket/one", f"file://{finished.folder}"):
        folder = download(address)
        assert folder.name == address.rpartition("/")[2]
        assert files_below(folder) == files_below(finished.folder)
    assert find_result("memory://bucket/one", Tracking())[0] == finished.result


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("memory://bucket/none", "no result.json at or below it"),
        ("memory://bucket/more/result.json", "name the folder that contains it"),
        ("memory://bucket/worse", "lies outside of it"),
        ("file:///nowhere/at/all", "no result.json at or below it"),
        ("nonsense://bucket", "nonsense"),
    ],
)
def test_what_is_refused(memory: Any, address: str, said: str) -> None:
    memory.pipe("/bucket/more/result.json", b"{}")
    memory.store["/bucket/worse/../../result.json"] = memory.store["/bucket/more/result.json"]
    with pytest.raises(UsageError, match=said) as caught:
        download(address)
    assert address in str(caught.value)


def test_more_than_a_sweep_is_refused(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/bucket/result.json", b"{}")
    monkeypatch.setattr(remote, "_MOST_BYTES", 1)
    with pytest.raises(UsageError, match=r"1 files, 0\.0 GiB, are too much for a sweep"):
        download("memory://bucket")


def test_a_protocol_without_its_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match="s3fs"):
        download("s3://bucket/sweep")
