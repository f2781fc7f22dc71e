"""Sweeps through Hydra's launchers: on a real Slurm cluster, and a second time in the same folder."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from sdopt.record.files import read_result
from sdopt.record.records import Status, StudyResult
from tests.command import SMOKE, Finished, Process, refused, sdopt, start
from tests.fakes import fake_workers
from tests.runners import slurm

SWEEP = ("run", "-m", *SMOKE, "hydra.sweep.dir=outputs/sweep")
SLURM = (
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.timeout_min=30",
    "hydra.launcher.partition=all",
)


def test_a_sweep_that_is_submitted_again_measures_what_is_missing(
    sweep: Finished, sweep_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    shutil.copytree(sweep_folder, folder)
    shutil.rmtree(folder / "2")
    files = [folder / f"{job}" / "result.json" for job in range(3)]
    before = [file.read_bytes() for file in files[:2]]
    again = ("run", "-m", *SMOKE, "hydra.sweep.dir=sweep")
    with fake_workers():
        found = sdopt(tmp_path, *again, "attention=default,math,cudnn")
    assert found.code == 0, found.shown
    assert found.out.count("already complete") == 2
    assert [file.read_bytes() for file in files[:2]] == before
    assert read_result(files[2]).variant("attention=cudnn").status is Status.SKIPPED

    moved = json.loads(before[1])
    moved["environment"]["host"] = "another"
    files[1].write_text(json.dumps(moved))
    other = refused(tmp_path, *again, "attention=vanilla,math")
    assert "holds results of another sweep" in other.err
    record = (folder / "multirun.yaml").read_text()
    (folder / "multirun.yaml").write_text("[]")
    damaged = refused(tmp_path, *again, "attention=default,math,cudnn")
    assert "holds results of another sweep" in damaged.err
    (folder / "multirun.yaml").write_text(record)
    with fake_workers():
        third = sdopt(tmp_path, *again, "attention=default,math,cudnn")
    assert third.code == 0, third.shown
    assert files[0].read_bytes() == before[0]
    assert "measured on another before; starts over" in third.err
    assert read_result(files[1]).id != moved["id"]
    assert (files[1].parent / "result.another.json").is_file()


@pytest.mark.slow
class TestSlurm:
    @pytest.fixture(scope="class")
    def cluster(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[slurm.Cluster]:
        if not slurm.is_installed() or find_spec("submitit") is None:
            reason = "needs root, Debian's slurm-wlm, and the extra slurm"
            if os.environ.get("SDOPT_REQUIRE_SLURM"):
                raise AssertionError(reason)
            pytest.skip(reason)
        with slurm.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster

    def test_a_job_that_is_killed_is_a_row_and_is_measured_later(
        self, cluster: slurm.Cluster, tmp_path: Path
    ) -> None:
        arguments = (
            *SWEEP,
            *SLURM,
            "attention=default,math",
            "protocol.rounds=30",
        )
        process = start(tmp_path, *arguments, **cluster.environment)
        folder = tmp_path / "outputs" / "sweep"
        cluster.wait_for(
            lambda: "0" in cluster.tasks() and (folder / "0" / "result.json").is_file(),
            "job 0 measures",
        )
        cluster.cancel(cluster.tasks()["0"])
        # The launcher stops waiting at the first job that is lost; the other goes on.
        ended = process.finish(600)
        assert ended.code == 3, ended.shown
        assert "ended unexpectedly" in ended.err
        # Of its processes srun may be killed before the job is, which then ends as at SIGTERM.
        [row] = [
            line
            for line in (folder / "sweep.md").read_text().splitlines()
            if "| 0 |" in line
        ]
        assert "the study has not ended" in row or "| interrupted |" in row
        cluster.wait_for(lambda: not cluster.tasks(), "the other job ends", 600)
        other = (folder / "1" / "result.json").read_bytes()

        # Of a job's processes any may be killed first: its baseline may have failed before the job itself ended.
        again = ("run", f"resume={folder}", "retry_failed=true")
        resumed = start(tmp_path, *again, **cluster.environment).finish(600)
        assert resumed.code == 0, resumed.shown
        assert (folder / "1" / "result.json").read_bytes() == other
        studies = [read_result(folder / str(number)) for number in range(2)]
        assert {study.status for study in studies} == {"finished"}
        assert len(studies[0].sessions) == 2
        assert {study.environment.host for study in studies} == {os.uname().nodename}

    @pytest.fixture
    def measuring(
        self, cluster: slurm.Cluster, tmp_path: Path
    ) -> Callable[..., tuple[Process, StudyResult, str]]:
        """Submits a sweep of one study; returns its command, what it has measured, and Slurm's number of the job."""

        def submit(*arguments: str) -> tuple[Process, StudyResult, str]:
            command = (
                *SWEEP,
                *SLURM,
                "attention=math",
                "protocol.rounds=30",
                *arguments,
            )
            process = start(tmp_path, *command, **cluster.environment)
            file = tmp_path / "outputs" / "sweep" / "0" / "result.json"
            cluster.wait_for(
                lambda: (
                    file.is_file() and len(read_result(file).variants[0].samples) > 0
                ),
                "it measures",
            )
            [task] = cluster.tasks().values()
            return process, read_result(file), task

        return submit

    # submitit takes a warning for that of the time limit in the last ten minutes before it.
    @pytest.mark.parametrize(
        ("end", "arguments"),
        [
            (slurm.Cluster.requeue, []),
            (
                slurm.Cluster.warn,
                ["hydra.launcher.timeout_min=9", "hydra.launcher.max_num_timeout=1"],
            ),
        ],
        ids=["preempted", "time limit"],
    )
    def test_a_job_that_slurm_ends_goes_on_by_itself(
        self,
        cluster: slurm.Cluster,
        measuring: Callable[..., tuple[Process, StudyResult, str]],
        end: Callable[[slurm.Cluster, str], None],
        arguments: list[str],
    ) -> None:
        process, before, task = measuring(*arguments)
        end(cluster, task)
        cluster.wait_for(lambda: cluster.is_queued(task), "the job is queued again")
        cluster.start_now(task)
        ended = process.finish(900)
        assert ended.code == 0, ended.shown
        after = ended.result
        assert (after.id, after.status) == (before.id, "finished")
        assert len(after.sessions) == 2

    def test_a_job_at_its_last_time_limit_is_a_row(
        self,
        cluster: slurm.Cluster,
        measuring: Callable[..., tuple[Process, StudyResult, str]],
    ) -> None:
        process, _, task = measuring("hydra.launcher.timeout_min=9")
        cluster.warn(task)
        ended = process.finish(300)
        assert ended.code == 3, ended.shown
        table = (ended.folder.parent / "sweep.md").read_text()
        assert (
            "Job not requeued because: timed-out too many times: raise hydra.launcher.timeout_min"
            in table
        )
        assert "defect" not in table
