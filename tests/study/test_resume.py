"""Going on with what broke off: killed at any point, studies and sweeps are completed, and nothing is lost."""

import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdopt.conclusion import Conclusion
from sdopt.config.composed import with_resumed
from sdopt.contract import Contract
from sdopt.experiment import Experiment
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import judge
from sdopt.record.files import read_result, write_result
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import Measurement
from sdopt.record.scores import Score
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.report.sweep import exit_code
from sdopt.schema import Gate, Rule
from sdopt.statistics.pairs import paired_rounds
from sdopt.study.designs import CONTROL, Plan
from sdopt.study.resume import merge_resumed, missing_of
from sdopt.study.timeline import Timeline
from sdopt.worker.machine import Machine
from tests.command import SMALL, SMOKE, Finished, eventually, fork, refused, sdopt
from tests.fakes import Fakes, failing, fake_study, fake_workers, run_fake


@pytest.fixture(scope="module", autouse=True)
def faked() -> Iterator[None]:
    """Only a command in a process of its own, as one to be killed is, has real workers."""
    with fake_workers():
        yield


def samples(result: StudyResult) -> dict[tuple[str, int, int], tuple[float, ...]]:
    """Raw samples by variant, session and replicate."""
    return {
        (row.name, m.session, m.replicate): tuple(m.shapes[0].latency_s)
        for row in result.variants
        for m in row.measurements
    }


def measured(result: StudyResult) -> list[Measurement]:
    return [measurement for row in result.variants for measurement in row.measurements]


def assert_whole(result: StudyResult, rounds: int) -> None:
    assert result.status == "finished"
    for row in result.variants:
        assert row.status is Status.OK, row.reason
        assert len(row.images) == 1
        assert row.tflop_per_image
        if row.name != result.baseline:
            assert paired_rounds(row, result.variant(result.baseline), 0) >= rounds
    assert all(edge.shapes[0].speedup is not None for edge in result.comparisons)
    assert missing_of(result).variants == frozenset()


class TestKilled:
    def test_in_the_rounds_loses_the_one_under_way_at_most(
        self, tmp_path: Path
    ) -> None:
        rounds = 40
        study = [
            *SMALL,
            "workload.steps=1",
            "protocol.warmup=0",
            "protocol.stage_calls=0",
            "grad_mode=inference_mode",
        ]
        process = fork(tmp_path, "run", *study, f"protocol.rounds={rounds}")

        def timed() -> bool:
            assert process.popen.poll() is None, process.finish().shown
            found = list(tmp_path.rglob("result.json"))
            return (
                bool(found)
                and min(
                    (len(m.shapes[0].calls) for m in measured(read_result(found[0]))),
                    default=0,
                )
                > 1
            )

        try:
            assert eventually(timed, 240)
            assert len(process.descendants()) >= 5, (
                "the server and its workers among them"
            )
        finally:
            process.popen.kill()
        out, err = process.popen.communicate()
        assert process.popen.returncode == -9, out + err
        assert process.left_behind(patience_s=30) == []
        [folder] = tmp_path.glob("outputs/runs/*/*")
        before = read_result(folder)
        assert before.status == "running"

        resumed = sdopt(tmp_path, "run", f"resume={folder}")
        assert resumed.code == 0, resumed.shown
        assert_whole(resumed.result, rounds)
        assert resumed.result.id == before.id
        assert samples(resumed.result).items() >= samples(before).items()
        again = [m for m in measured(resumed.result) if m.session == 1]
        done = min(len(m.shapes[0].latency_s) for m in measured(before))
        assert max(len(m.shapes[0].latency_s) for m in again) == rounds - done
        assert len(resumed.result.sessions) == 2


# ---------------------------------------------------------------------------------------- going on with what is missing


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A cumulative study of three steps with a negative prompt, whole."""
    return sdopt(
        tmp_path_factory.mktemp("whole"),
        *(
            "run",
            *SMOKE,
            "workload.steps=1",
            "workload.negative_prompt=grey",
            "protocol.stage_calls=0",
            "study=cumulative",
        ),
        "study.options=[grad_mode:inference_mode,attention:math]",
    )


@pytest.fixture
def folder(whole: Finished, tmp_path: Path) -> Path:
    copy = tmp_path / "outputs" / "runs" / "cumulative" / "it's a copy"
    shutil.copytree(whole.folder, copy)
    return copy


@pytest.fixture
def broken_off(folder: Path) -> Path:
    """The study without its last step, as if it had been killed before that was started."""
    result = read_result(folder)
    result.status = "running"
    last = result.variant("+ attention=math")
    last.status, last.measurements, last.images, last.tflop_per_image = (
        Status.PENDING,
        [],
        [],
        None,
    )
    write_result(result, folder)
    return folder


def resume(folder: Path, *arguments: str) -> Finished:
    return sdopt(folder.parents[3], "run", f"resume={folder}", *arguments)


class TestMissing:
    def test_is_measured_beside_its_references_measured_again(
        self, broken_off: Path
    ) -> None:
        before = read_result(broken_off)
        resumed = resume(broken_off)
        assert resumed.code == 0, resumed.shown
        result = resumed.result
        assert_whole(result, 2)
        assert samples(result).items() >= samples(before).items()
        # Its reference is the step before it; a baseline and a control belong to every session.
        again = {
            row.name
            for row in result.variants
            for m in row.measurements
            if m.session == 1
        }
        assert again == {
            "baseline",
            CONTROL,
            "+ grad_mode=inference_mode",
            "+ attention=math",
        }
        assert [m.session for m in result.variant("+ attention=math").measurements] == [
            1
        ]
        assert (
            len({record.path for row in result.variants for record in row.images}) == 4
        )
        assert "already complete" in resume(broken_off).out

    def test_of_a_study_that_was_killed_before_it_had_a_result(
        self, folder: Path
    ) -> None:
        """Another tracker may be named beside `resume`."""
        (folder / "result.json").unlink()
        resumed = resume(folder, "tracking=none", "tracking.images=false")
        assert resumed.code == 0, resumed.shown
        assert_whole(resumed.result, 2)
        assert resumed.result.config.tracking.images is False

    def test_is_logged_where_it_is_told_though_it_was_to_be_logged_nowhere(
        self, folder: Path
    ) -> None:
        expanded = with_resumed([f"resume={folder}", "tracking.uri=sqlite:///own.db"])
        assert "tracking=none" not in expanded
        assert "tracking=mlflow" in expanded


@pytest.mark.parametrize("asked", ["prepare", "prove"])
@pytest.mark.walk(1)
def test_a_failure_is_a_result_unless_it_is_to_be_tried_again(
    tmp_path: Path, asked: str
) -> None:
    once = [
        "study=explicit",
        "study.variants={baseline: [], once: ['workload.steps:2']}",
    ]
    with fake_workers(Fakes({"once": failing(Status.FAILED, asked)})):
        found = sdopt(tmp_path, "run", *SMOKE, *once)
    assert found.code == 3
    assert "retry_failed=true` measures again: once" in found.err
    result = found.result
    result.gate = "a gate"
    result.judgements = [
        Judgement("once", "baseline", "once", Contract.EXACT, Verdict.FAIL, [])
    ]
    write_result(result, found.folder)
    assert "already complete" in resume(found.folder).out
    assert read_result(found.folder).gate
    resumed = resume(found.folder, "retry_failed=true")
    assert resumed.code == 0, resumed.shown
    assert_whole(resumed.result, 2)
    assert (resumed.result.gate, resumed.result.judgements) == (
        "",
        [],
    )  # those were on what failed


class TestRefused:
    """What would not be the same study any more; nothing is measured, and the result stays as it is."""

    @pytest.mark.parametrize(
        "beside",
        [
            "precision=bf16",
            "workload.steps=9",
            "protocol=gate",
            "--config-dir=/tmp",
            "hydra.run.dir=x",
            "x",
        ],
    )
    def test_other_overrides(self, folder: Path, beside: str) -> None:
        resumed = resume(folder, beside)
        assert resumed.code == 2
        assert resumed.err.startswith(
            f"sdopt: {beside}: cannot be changed together with resume"
        )

    def test_a_folder_without_a_study(self, tmp_path: Path) -> None:
        resumed = refused(tmp_path, "run", "resume=nowhere")
        assert resumed.err.startswith("sdopt: resume=nowhere: has no .hydra/hydra.yaml")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "result.json").touch()
        assert "a copy without hidden files" in refused(tmp_path, "run", "resume=.").err
        assert (
            "only on a study that is resumed"
            in refused(tmp_path, "run", "retry_failed=True").err
        )

    def test_another_machine_other_versions_and_other_contents_all_at_once(
        self, broken_off: Path
    ) -> None:
        result = read_result(broken_off)
        result.environment.host, result.environment.device["name"] = (
            "another",
            "NVIDIA A10",
        )
        result.environment.packages["torch"] = "2.0.0"
        result.environment.gpu = {"power_limit_w": 300.0, "processes": []}
        result.variant("baseline").inputs |= {
            "model": "other weights",
            "prompts": "other words",
        }
        write_result(result, broken_off)
        before = (broken_off / "result.json").read_bytes()
        resumed = resume(broken_off)
        assert resumed.code == 2
        named = [
            "it was measured on another, but this is",
            "packages.torch: was 2.0.0",
            "device.name: was NVIDIA A10, now",
            "gpu.power_limit_w: was 300.0, now None",
            "baseline: the contents of its model: was other weights, now",
            "baseline: the contents of its prompts: was other words, now",
        ]
        for line, said in zip(resumed.err.splitlines(), named, strict=True):
            assert line.partition("the study: ")[2].startswith(said)
        assert (broken_off / "result.json").read_bytes() == before

    def test_a_folder_that_another_process_writes(self, broken_off: Path) -> None:
        from sdopt.locks import lock_folder

        with lock_folder(broken_off) as ours:
            assert ours
            resumed = resume(broken_off)
        assert resumed.code == 2
        assert "another process is measuring there" in resumed.err
        assert not (broken_off / "error.json").exists()
        assert resume(broken_off).code == 0


class TestExtended:
    """More of the same study: what was measured stays, and what is added is measured in a session of its own."""

    def test_by_processes(self, folder: Path) -> None:
        before = read_result(folder)
        extended = resume(folder, "protocol.replicates=2")
        assert extended.code == 0, extended.shown
        result = extended.result
        assert result.config.replicates == 2
        assert result.id == before.id
        assert samples(result).items() > samples(before).items()
        for row in result.variants:
            assert row.status is Status.OK, row.reason
            found = [
                (m.replicate, m.session, len(m.shapes[0].latency_s))
                for m in row.measurements
            ]
            assert found == [(0, 0, 2), (1, 1, 2)]
            assert row.config.protocol == result.config.protocol
        assert all(
            edge.shapes[0].speedup is not None and edge.shapes[0].speedup.n == 2
            for edge in result.comparisons
        )
        # The command that measures it again, and that of the report, measure as much.
        command = result.candidates[0].command
        assert "protocol.replicates=2" in command, command
        assert result.environment.command[-1] == "protocol.replicates=2"
        # The extension has become the study's own.
        assert "already complete" in resume(folder).out

    @pytest.mark.slow
    def test_by_prompts(self, tmp_path: Path) -> None:
        study = [
            *SMOKE,
            "workload.steps=1",
            "workload.negative_prompt=grey",
            "protocol.stage_calls=0",
            "grad_mode=inference_mode",
        ]
        quality = [
            "quality=default",
            "quality.prompt_count=2",
            "quality.floor_prompts=2",
            "quality.features=[]",
        ]
        run = sdopt(tmp_path, "run", *study, *quality)
        assert run.code == 0, run.shown
        before = run.result
        extended = resume(run.folder, "quality.prompt_count=3")
        assert extended.code == 0, extended.shown
        for old, row in zip(before.variants, extended.result.variants, strict=True):
            assert [image.prompt for image in row.images][:2] == [
                image.prompt for image in old.images
            ]
            assert len(row.images) == 3 if row.role != "control" else not row.images
            assert samples(before).items() <= samples(extended.result).items()
        assert extended.result.comparisons[0].quality["mse"].per_prompt == [
            0.0,
            0.0,
            0.0,
        ]

    def test_beyond_its_looks_it_cannot_pass(self, folder: Path) -> None:
        gate = Gate(
            "a gate",
            rules={"exact": [Rule("speedup", "at_least", limit=0.1, confidence=None)]},
            must_pay=False,
        )
        result = read_result(folder)
        judge(result, gate, Fit())
        write_result(result, folder)
        assert [look.number for look in result.looks] == [1, 1]
        extended = resume(folder, "protocol.replicates=2").result
        judge(extended, gate, Fit())
        assert [look.number for look in extended.looks] == [1, 1, 2, 2]
        for judgement in extended.judgements:
            assert judgement.verdict is not Verdict.PASS
            [ruling] = [
                ruling for ruling in judgement.rulings if ruling.rule == "looks"
            ]
            assert ruling.verdict is Verdict.INCONCLUSIVE

    @pytest.mark.slow  # its images are scored twice
    def test_is_judged_again_though_it_broke_off_before_that(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        study = [
            *SMOKE,
            "grad_mode=inference_mode",
            "gate=default",
            "quality=default",
            "quality.features=[]",
        ]
        run = sdopt(
            tmp_path, "run", *study, "quality.prompt_count=2", "quality.floor_prompts=2"
        )
        assert [look.number for look in run.result.looks] == [1], run.shown

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Conclusion, "evaluate", interrupted)
            assert resume(run.folder, "protocol.replicates=2").code == 130
        broken_off = read_result(run.folder)
        assert missing_of(broken_off).variants == frozenset()
        assert (broken_off.gate, broken_off.judgements) == ("", [])
        judged = resume(run.folder)
        assert "already measured" in judged.out
        assert "How far to trust it" in judged.out  # nobody has seen its answer
        assert [look.number for look in judged.result.looks] == [1, 2]
        assert judged.result.gate == "default"

    def test_not_by_less_nor_by_what_it_cannot_have(self, folder: Path) -> None:
        before = (folder / "result.json").read_bytes()
        refused = resume(folder, "protocol.rounds=1", "quality.prompt_count=9")
        assert refused.code == 2
        assert (
            "protocol.rounds=1: a study can only be extended, and this one has 2"
            in refused.err
        )
        assert (
            "quality.prompt_count: cannot change in a study with quality.metrics=false"
            in refused.err
        )
        assert (folder / "result.json").read_bytes() == before
        # What was refused has not become the study's own, though Hydra has recorded it.
        assert "already complete" in resume(folder).out


@pytest.mark.slow
def test_jobs_of_a_sweep_that_finished_are_kept(
    sweep: Finished, sweep_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / sweep_folder.relative_to(sweep.cwd)
    shutil.copytree(sweep_folder, folder)
    shutil.rmtree(folder / "1")
    (folder / "sweep.md").unlink()
    kept = (folder / "0" / "result.json").read_bytes()
    resumed = sdopt(tmp_path, "run", f"resume={folder}", "tracking=none")
    assert resumed.code == 0, resumed.shown
    assert (
        resumed.out.count("already complete") == 2
    )  # the baseline itself, and the job that cannot run here
    assert (folder / "0" / "result.json").read_bytes() == kept
    assert read_result(folder / "1").variant("attention=math").status is Status.OK
    assert "attention=math" in (folder / "sweep.md").read_text()
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in sweep_folder.iterdir()
    }


# --------------------------------------------------------------------------------------------- what a study still lacks


def test_what_follows_a_missing_step_is_timed_again_too(whole: Finished) -> None:
    study = whole.result
    middle = study.variant("+ grad_mode=inference_mode")
    middle.status, middle.measurements = Status.PENDING, []
    assert missing_of(study).timed == {(row.name, 0) for row in study.variants}
    assert missing_of(study).unfinished == {(middle.name, 0)}


def test_a_block_that_broke_off_has_no_rounds(whole: Finished) -> None:
    study = whole.result
    last = study.variant("+ attention=math")
    last.status, last.measurements[0].shapes[0].latency_before_s = (
        Status.PENDING,
        [1.0, 1.0],
    )
    assert missing_of(study).rounds == 2


class TestJudged:
    """By `sdopt gate`, since it was measured, by another gate or other thresholds than its own."""

    @pytest.fixture
    def judged_since(
        self, tmp_path: Path
    ) -> tuple[Experiment, StudyResult, tuple[Plan, StudyResult, Machine]]:
        study = fake_study(programs_s=0)
        result = study[1]
        gate = Gate(
            "own",
            rules={"exact": [Rule("speedup", "at_least", limit=0.1)]},
            must_pay=False,
        )
        quality = replace(result.config.quality, metrics=True)
        result.config = replace(result.config, gate=gate, quality=quality)
        fresh = deepcopy(result)
        run_fake(tmp_path, study)
        composer: Any = SimpleNamespace(current=result.config)
        context: Any = None
        return Experiment(composer, tmp_path, context, Timeline()), fresh, study

    def test_exits_by_its_own_gate(self, judged_since: Any) -> None:
        """Recorded last was a failure by somebody's stricter gate, with which `resume=` ended, too."""
        experiment, fresh, (plan, result, machine) = judged_since
        result.gate = "strict"
        result.judgements = [
            Judgement("it", "baseline", "it", Contract.EXACT, Verdict.FAIL, [])
        ]
        for row in result.variants:
            row.quality = {"brightness": Score(1.0)}
        write_result(result, experiment.folder)
        assert exit_code(experiment.folder) == 1
        merged = merge_resumed(result, fresh, plan, experiment.folder, False)
        experiment._complete(merged, plan, machine)
        recorded = read_result(experiment.folder)
        assert recorded.gate == "own"
        assert recorded.judgements[0].verdict is not Verdict.FAIL
        assert exit_code(experiment.folder) == 3
        kept = (experiment.folder / "result.json").read_bytes()
        experiment._complete(read_result(experiment.folder), plan, machine)
        assert (experiment.folder / "result.json").read_bytes() == kept

    def test_can_be_extended(self, judged_since: Any) -> None:
        """Thresholds that `sdopt gate` records are no other study, and could not be given beside `resume`."""
        experiment, fresh, (plan, result, _) = judged_since
        protocol = replace(result.config.protocol, smallest_speedup=0.2)
        result.config = replace(result.config, protocol=protocol)
        merged = merge_resumed(result, fresh, plan, experiment.folder, False)
        assert merged.config.protocol.smallest_speedup == 0.01
