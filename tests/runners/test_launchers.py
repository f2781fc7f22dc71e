"""Sweeps through Hydra's launchers: on a real Slurm cluster, and a second time in the same folder."""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from sdopt.results.files import read_result
from sdopt.results.records import Status
from tests.command import SMOKE, sdopt, start
from tests.runners import slurm

SWEEP = ("run", "-m", *SMOKE, "hydra.sweep.dir=outputs/sweep")
SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=30", "hydra.launcher.partition=all")


def test_a_sweep_that_is_submitted_again_measures_what_is_missing(tmp_path: Path) -> None:
    first = sdopt(tmp_path, *SWEEP, "attention=math")
    assert first.code == 0
    file = tmp_path / "outputs" / "sweep" / "0" / "result.json"
    measured = file.read_bytes()
    again = sdopt(tmp_path, *SWEEP, "attention=math,vanilla")
    assert again.code == 0, again.shown
    assert again.out.count("nothing is missing") == 1
    assert file.read_bytes() == measured
    assert read_result(file.parents[1] / "1").variant("attention=vanilla").status is Status.OK

    other = sdopt(tmp_path, *SWEEP, "attention=vanilla")
    assert other.code == 2
    assert "not the same study" in other.err
    assert file.read_bytes() == measured

    moved = json.loads(measured)
    moved["environment"]["host"] = "another"
    file.write_text(json.dumps(moved))
    elsewhere = sdopt(tmp_path, *SWEEP, "attention=math")
    assert elsewhere.code == 0, elsewhere.shown
    assert "measured on another before; begins anew" in elsewhere.err
    assert read_result(file).id != moved["id"]
    assert (file.parent / "result.another.json").is_file()


@pytest.mark.slow
class TestSlurm:
    @pytest.fixture(scope="class")
    def cluster(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
        if not slurm.is_installed() or find_spec("submitit") is None:
            reason = "needs root, Debian's slurm-wlm, and the extra slurm"
            if os.environ.get("SDOPT_REQUIRE_SLURM"):
                raise AssertionError(reason)
            pytest.skip(reason)
        cluster = slurm.Cluster(tmp_path_factory.mktemp("slurm"))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()

    def test_a_job_that_is_killed_is_a_row_and_is_measured_later(self, cluster: slurm.Cluster, tmp_path: Path) -> None:
        axes = ("attention=default,math", "layout=contiguous,channels_last")
        arguments = (*SWEEP, *SLURM, *axes, "protocol.rounds=30")
        process = start(tmp_path, *arguments, **cluster.environment)
        folder = tmp_path / "outputs" / "sweep"
        cluster.wait_for(lambda: "1" in cluster.tasks() and (folder / "1" / "result.json").is_file(), "job 1 measures")
        cluster.cancel(cluster.tasks()["1"])
        # The launcher stops waiting at the first job that is lost; the others go on.
        ended = process.finish(600)
        assert ended.code == 3, ended.shown
        assert "did not end by itself" in ended.err
        assert "the study has not ended" in " ".join(ended.out.split())
        cluster.wait_for(lambda: not cluster.tasks(), "the other jobs end", 600)
        others = {number: (folder / number / "result.json").read_bytes() for number in ("0", "2", "3")}

        # Of a job's processes any may be killed first: its baseline may have failed before the job itself ended.
        again = ("run", f"resume={folder}", "retry_failed=true")
        resumed = start(tmp_path, *again, **cluster.environment).finish(600)
        assert resumed.code == 0, resumed.shown
        assert {number: (folder / number / "result.json").read_bytes() for number in others} == others
        studies = [read_result(folder / str(number)) for number in range(4)]
        assert {study.status for study in studies} == {"finished"}
        assert len(studies[1].sessions) == 2
        assert {study.environment.host for study in studies} == {os.uname().nodename}

    def test_a_job_that_is_preempted_goes_on_by_itself(self, cluster: slurm.Cluster, tmp_path: Path) -> None:
        arguments = (*SWEEP, *SLURM, "attention=math", "protocol.rounds=30")
        process = start(tmp_path, *arguments, **cluster.environment)
        file = tmp_path / "outputs" / "sweep" / "0" / "result.json"
        cluster.wait_for(lambda: file.is_file() and len(read_result(file).variants[0].samples) > 0, "job 0 measures")
        before = read_result(file)
        cluster.requeue(cluster.tasks()["0"])
        ended = process.finish(900)
        assert ended.code == 0, ended.shown
        after = read_result(file)
        assert (after.id, after.status) == (before.id, "finished")
        assert len(after.sessions) == 2
