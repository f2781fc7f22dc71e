"""A sweep ends with an answer: which job gains most over its own baseline."""

import json
from copy import deepcopy
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sdopt.record.files import JobError, read_result, write_error, write_result
from sdopt.record.records import Status, StudyResult
from sdopt.record.scores import BrokenImage
from sdopt.report.markdown import written
from sdopt.report.sweep import Sweep, read_sweep
from sdopt.report.terminal import shown
from sdopt.statistics.comparing import compare
from tests.command import ROOT, sdopt
from tests.records import reconfigure
from tests.report.test_claims import imported, two_shapes

RECORD = ROOT / "outputs" / "records" / "amd-epyc" / "quickstart"


@pytest.fixture
def jobs() -> dict[str, StudyResult]:
    """An all-default job, one with an option that gains, and one with an option that does not."""
    found = {}
    for number, name in enumerate(("", "deep cache", "math attention")):
        study = read_result(RECORD)
        study.variants = [
            row
            for row in study.variants
            if row.name in (study.baseline, name) or row.is_control
        ]
        names = {row.name for row in study.variants}
        study.comparisons = [
            edge for edge in study.comparisons if edge.candidate in names
        ]
        found[str(number)] = study
    return found


def test_names_the_winner_and_knows_the_baseline(jobs: dict[str, StudyResult]) -> None:
    sweep = Sweep(
        Path(), jobs, {"3": JobError(2, ["attention=cudnn: needs a CUDA device"])}
    )
    assert sweep.sentence.startswith("deep cache is 1.92× faster (501 → 260 ms)")
    assert sweep.sentence.endswith("(job 1 of 4).")
    assert [(job.name, job.number) for job in sweep.jobs] == [
        ("deep cache", "1"),
        ("baseline", "0"),
        ("math attention", "2"),
        ("", "3"),
    ]
    for width in (100, 160):
        text = StringIO()
        Console(file=text, width=width).print(shown(sweep.blocks(reasons=False), width))
        assert text.getvalue().startswith(sweep.sentence)
        assert ("260 ms from 501 ms" in text.getvalue()) is (width == 160)
        assert max(map(len, text.getvalue().splitlines())) <= width
    assert Sweep(Path(), {"2": jobs["2"]}, {}).sentence.startswith("Keep the baseline")
    assert (
        Sweep(Path(), {"0": jobs["0"]}, {}).sentence
        == "Nothing was compared with a baseline."
    )


def test_nothing_is_advised_where_nothing_was_measured(
    jobs: dict[str, StudyResult],
) -> None:
    """Each job's option failed: that the baseline is as good was not seen."""
    for job, name in (("1", "deep cache"), ("2", "math attention")):
        row = jobs[job].variant(name)
        row.status, row.reason, row.measurements, row.images, row.quality = (
            Status.FAILED,
            "it broke",
            [],
            [],
            {},
        )
        jobs[job].judgements = []
        for edge in jobs[job].comparisons:
            edge.quality = {}
        compare(jobs[job])
    sentence = Sweep(Path(), {job: jobs[job] for job in ("1", "2")}, {}).sentence
    assert sentence.startswith("Nothing was measured beside a baseline: ")
    assert "it broke" in sentence


def test_images_without_times_are_no_reason_to_keep_the_baseline() -> None:
    """As of results that were taken in, in one folder."""
    sweep = Sweep(Path(), {"0": imported(times=False)}, {})
    assert sweep.sentence.startswith("Nothing was timed beside a baseline: 2 of 2 ")


def test_the_fastest_whose_images_can_be_used_leads(
    jobs: dict[str, StudyResult],
) -> None:
    for study in jobs.values():
        study.judgements = []
        for edge in study.comparisons:
            for ratios in edge.shapes:
                if ratios.speedup:
                    ratios.speedup.low = ratios.speedup.high = None
    broken = jobs["1"].variant("deep cache")
    broken.trips = [BrokenImage("black", broken.images[0].path, "all are 0")]
    sweep = Sweep(Path(), jobs, {})
    assert sweep.jobs[0].row is not None
    assert sweep.jobs[0].row.variant is broken
    assert sweep.sentence.startswith("Not enough runs to tell: math attention ")
    for row in jobs["1"].candidates:
        row.trips = broken.trips
    alone = Sweep(Path(), {"1": jobs["1"]}, {})
    assert alone.sentence.startswith("Keep the baseline: none of 1 ")


def test_what_was_not_measured_is_not_called_no_better(
    jobs: dict[str, StudyResult],
) -> None:
    row = jobs["1"].variant("deep cache")
    row.status, row.reason, row.measurements, row.images = Status.FAILED, "it", [], []
    jobs["1"].judgements = []
    compare(jobs["1"])
    both = {job: jobs[job] for job in ("1", "2")}
    sentence = Sweep(Path(), both, {"3": JobError(3, ["it broke"])}).sentence
    assert sentence == (
        "Keep the baseline: none of 1 is shown to be better; 2 not measured."
    )


def test_a_sweep_of_one_job_is_shown(
    jobs: dict[str, StudyResult], tmp_path: Path
) -> None:
    (tmp_path / "mine" / "0").mkdir(parents=True)
    write_result(jobs["1"], tmp_path / "mine" / "0")
    assert sdopt(tmp_path, "show", "mine").out.startswith("deep cache is 1.92× faster")


def test_jobs_of_other_work_are_told_apart(jobs: dict[str, StudyResult]) -> None:
    other = deepcopy(jobs["1"])
    reconfigure(other, "workload", steps=7)
    for variant in other.variants:
        reconfigure(variant, "workload", steps=7)
    names = {job.name for job in Sweep(Path(), {"0": jobs["1"], "1": other}, {}).jobs}
    assert names == {"deep cache, workload.steps=25", "deep cache, workload.steps=7"}


def test_a_task_and_a_scheduler_are_said_once_and_no_defaults(
    jobs: dict[str, StudyResult],
) -> None:
    other = deepcopy(jobs["1"])
    for variant in other.variants:
        reconfigure(variant, "task", kind="img2img", image="/my/a.png", strength=0.6)
        reconfigure(variant, "scheduler", class_name="Euler")
        changed = {"task": "img2img(image=a.png, strength=0.6)", "scheduler": "euler"}
        changed |= {"lora": "loaded", "memory.vae_slicing": "vae_slicing"}
        variant.choices = variant.choices | changed
    names = [job.name for job in Sweep(Path(), {"0": jobs["1"], "1": other}, {}).jobs]
    picture = "task=img2img(image=a.png, strength=0.6)"
    assert sorted(names) == [
        "deep cache",
        f"deep cache, on lora=loaded, {picture}, scheduler=euler, on memory=vae_slicing",
    ]
    # Pictures of one name in several folders are told apart by their paths.
    further = deepcopy(other)
    for variant in further.variants:
        reconfigure(variant, "task", image="/other/a.png")
    both = {job.name for job in Sweep(Path(), {"0": other, "1": further}, {}).jobs}
    assert both == {
        "deep cache, task.image=/my/a.png",
        "deep cache, task.image=/other/a.png",
    }


def test_runs_without_a_result_have_their_overrides_and_the_reason(
    jobs: dict[str, StudyResult], tmp_path: Path
) -> None:
    for number, words in enumerate(
        ("[model=m, caching=deepcache]", "[model=m, 'patch=a.py:b']", "[model=m]")
    ):
        hydra = tmp_path / str(number) / ".hydra"
        hydra.mkdir(parents=True)
        (hydra / "overrides.yaml").write_text(words)
    (tmp_path / "2" / ".hydra" / "overrides.yaml").unlink()
    write_result(jobs["1"], tmp_path / "0")
    write_error(JobError(2, ["a.py defines no function b"]), tmp_path / "1")
    sweep = read_sweep(tmp_path)
    assert [job.name for job in sweep.jobs] == [
        "deep cache",
        "patch=a.py:b",
        "no overrides recorded",
    ]
    brief = written(sweep.blocks(reasons=False))
    assert "1: a.py defines no function b" in brief
    assert "2: the job has begun and has written no result" in brief
    assert written(sweep.blocks()).count("defines no function b") == 1


def test_the_shape_that_the_table_is_of_is_named(jobs: dict[str, StudyResult]) -> None:
    """The gain at the others may be none."""
    said = "Figures of a job with several shapes are those of its first one (64×64, batch 1)"
    sweep = Sweep(Path(), jobs, {})
    assert said not in written(sweep.blocks())
    assert said in written(Sweep(Path(), jobs | {"3": two_shapes()}, {}).blocks())


def test_jobs_of_other_models_have_the_model_s_name_and_what_it_does_not_set(
    jobs: dict[str, StudyResult],
) -> None:
    results = {"0": jobs["1"]}
    for number, scale in (("1", 3.0), ("2", 4.0)):
        results[number] = deepcopy(jobs["1"])
        for variant in results[number].variants:
            reconfigure(variant, "model", name="other", size=32, guidance_scale=scale)
            variant.choices["scheduler"] = "flow_euler"
            reconfigure(variant, "scheduler", class_name="Flow")
    names = {job.name for job in Sweep(Path(), results, {}).jobs}
    assert names == {
        "deep cache, model.name=emoji, model.guidance_scale=4.5",
        "deep cache, model.name=other, model.guidance_scale=3.0",
        "deep cache, model.name=other, model.guidance_scale=4.0",
    }


def test_jobs_of_other_threads_are_told_apart(jobs: dict[str, StudyResult]) -> None:
    other = deepcopy(jobs["0"])
    reconfigure(other, "hardware", threads=7)
    for variant in other.variants:
        reconfigure(variant, "hardware", threads=7)
    names = {job.name for job in Sweep(Path(), {"0": jobs["0"], "1": other}, {}).jobs}
    assert len(names) == 2
    assert "baseline, hardware.threads=7" in names


def test_jobs_of_other_protocols_gates_and_baselines_are_told_apart(
    jobs: dict[str, StudyResult],
) -> None:
    other = deepcopy(jobs["1"])
    reconfigure(other, "gate", name="strict")
    for variant in other.variants:
        reconfigure(variant, "protocol", rounds=7)
        variant.choices = {**variant.choices, "precision": "bf16"}
    names = {job.name for job in Sweep(Path(), {"0": jobs["1"], "1": other}, {}).jobs}
    assert names == {
        "deep cache, protocol.rounds=4, gate=default",
        "deep cache, protocol.rounds=7, gate=strict, on precision=bf16",
    }


def test_jobs_that_have_not_begun_are_counted_and_named(
    jobs: dict[str, StudyResult], tmp_path: Path
) -> None:
    command = ["+batch=2", "attention=default,math", "layout=a,b"]
    sweeper = {"_target_": "hydra…BasicSweeper", "params": {"attention": "math"}}
    recorded = {
        "sweep": {"subdir": "job-${hydra.job.num}"},
        "sweeper": sweeper,
        "overrides": {"task": command},
    }
    (tmp_path / "job-0").mkdir()
    write_result(jobs["1"], tmp_path / "job-0")
    (tmp_path / "multirun.yaml").write_text(json.dumps({"hydra": recorded}))
    sweep = read_sweep(tmp_path)
    assert sweep.sentence.endswith("(job job-0 of 4).")
    assert sweep.waiting == {
        "job-1": "attention=default, layout=b",
        "job-2": "attention=math, layout=a",
        "job-3": "attention=math, layout=b",
    }
    assert replace(sweep, studies={}).exit_code == 3
    table = written(sweep.blocks())
    assert "Not begun: 3 of 4 jobs, which resuming the sweep runs." in table
    assert "| attention=math, layout=b | job-3 |" in table
    for other in ("layout=glob(*)", "layout=shuffle(a,b)"):
        command[-1] = other
        (tmp_path / "multirun.yaml").write_text(json.dumps({"hydra": recorded}))
        assert not read_sweep(tmp_path).waiting


def test_a_job_that_ended_early_says_why(jobs: dict[str, StudyResult]) -> None:
    jobs["1"].status = "crashed"
    jobs["1"].variant("deep cache").status = Status.PENDING
    [row] = Sweep(Path(), {"1": jobs["1"]}, {"1": JobError(3, ["no more time"])}).jobs
    assert row.because == "no more time"
