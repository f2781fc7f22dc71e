"""What goes wrong around a study: disks and databases."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.record.files import read_result, write_at_last
from sdopt.schema import Tracking
from sdopt.tracking.store import require_store
from tests.command import SMOKE, Finished, refused, sdopt
from tests.fakes import Fakes, FakeWorker, fake_workers

QUICK = (*SMOKE, "workload.steps=1", "protocol.stage_calls=0")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size; needs root, and a kernel that lets it mount."""
    folder.mkdir()
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no mount to make a small disk with")
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def full(folder: Path) -> Path:
    """Fills the disk to its last byte; returns what to delete to have room again."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream:
        for size in (2**16, 2**10, 1):
            try:
                while True:
                    stream.write(b"\0" * size)
            except OSError:
                continue
    return filler


class TestDisk:
    def test_without_room_nothing_is_measured(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "1m") as disk:
            assert (
                "1 MiB are free there, and up to 4 MiB are needed; make room"
                in refused(disk, "run", *QUICK).shown
            )
            assert not list(disk.rglob("result.json"))

    def test_room_for_weights_that_options_keep_on_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=6 * 2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
        monkeypatch.setattr("sdopt.study.plan.count_weights", lambda model: 2 * 2**20)
        offloads = (
            "study=one_at_a_time",
            "study.options=[memory:group_offload]",
            "protocol.replicates=3",
        )
        finished = refused(tmp_path, "run", *SMOKE, "workload.size=64", *offloads)
        assert (
            "up to 24 MiB are needed; make room, or name another folder with TMPDIR=…"
            in finished.shown
        )
        finished = refused(
            tmp_path,
            "run",
            *SMOKE,
            "workload.size=64",
            *offloads,
            "protocol.schedule=blocks",
        )
        assert "up to 8 MiB are needed" in finished.shown

    def test_a_full_one_before_the_start(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "1m") as disk:
            full(disk)
            finished = sdopt(disk, "run", *QUICK)
            assert finished.code in (
                2,
                3,
            )  # by whether there was room for the folder itself
            assert finished.err.startswith("sdopt: outputs/runs/")
            assert "No space left on device" in finished.err.splitlines()[-1]
            assert "Traceback" not in finished.err

    def test_a_read_only_folder(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "16m") as disk:
            read_only(disk)
            finished = refused(disk, "run", *QUICK)
            assert "Read-only file system" in finished.err
            assert "outputs" in finished.err
            assert "Traceback" not in finished.err

    def test_one_that_fills_up_meanwhile_loses_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk becomes full while an option is prepared, after the baseline was warmed up."""
        refuge = tmp_path / "refuge"
        refuge.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(refuge))
        with small_disk(tmp_path / "disk", "8m") as disk:

            def fills(_worker: FakeWorker, name: str) -> None:
                if name == "prepare":
                    full(disk)

            with fake_workers(Fakes({"attention=math": fills})):
                finished = sdopt(disk, "run", *QUICK, "attention=math")
            assert finished.code == 3, finished.shown
            assert (
                "measuring continues, and writing is tried again after every round"
                in finished.shown
            )
            [saved] = refuge.glob("sdopt-*-result.json")
            assert (
                f"No space left on device; the result is in {saved}: make room and move it here"
                in finished.shown
            )
            assert "Traceback" not in finished.err
            # What lies in the run's folder is the last one that could be written, and whole.
            [path] = disk.rglob("result.json")
            assert read_result(path).status == "running"
            assert not list(disk.rglob("*.tmp"))
            result = read_result(saved)
            assert result.status == "finished"
            assert all(
                len(m.shapes[0].latency_s) == 2
                for row in result.variants
                for m in row.measurements
            )
            assert result.comparisons[0].shapes[0].speedup is not None

            (disk / "filler").unlink()
            path.write_bytes(saved.read_bytes())
            assert "already complete" in sdopt(disk, "run", f"resume={path.parent}").out

    def test_nowhere_to_write_is_said(
        self, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        monkeypatch.setenv("HOME", str(tmp_path / "gone"))
        with pytest.raises(
            OSError, match=r"is lost: make room and run `sdopt run resume="
        ):
            write_at_last(finished.result, tmp_path / "gone")


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
class TestDatabase:
    """One that cannot be written is found before anything is measured."""

    def test_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("no database" * 100)
        uri = f"sqlite:///{tmp_path}/notes.txt"
        refused(
            tmp_path,
            "run",
            *QUICK,
            "tracking=mlflow",
            f"tracking.uri={uri}",
            says="file is not a database",
        )
        with pytest.raises(UsageError, match=r"notes\.txt cannot be written"):
            require_store(Tracking(uri=f"{uri}/mlflow.db"), "pair")

    def test_on_a_read_only_disk(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "16m") as disk:
            (disk / "there.db").touch()
            read_only(disk)
            for name, reason in (
                ("there.db", "readonly database"),
                ("new/new.db", "disk cannot be written"),
            ):
                with pytest.raises(UsageError, match=reason):
                    require_store(Tracking(uri=f"sqlite:///{disk}/{name}"), "pair")
