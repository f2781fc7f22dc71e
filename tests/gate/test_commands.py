"""The gate from the command line, on a study that it judged as it went; drift, calibration and the trial."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from runners.calibrate import main as calibrate
from sdopt.gate.calibration import FOLDER, read_calibration
from sdopt.gate.trust import doubts_of
from sdopt.record.files import JobError, read_result, write_error, write_result
from sdopt.record.records import Status
from sdopt.record.verdicts import Verdict
from tests.command import Finished, refused, sdopt
from tests.fakes import fake_workers
from tests.records import known, reconfigure
from tests.robustness.damage import RESULT
from tests.trial import CONF
from tests.trial.__main__ import main as trial
from tests.trial.judging import judge_timed

SMALLEST = (
    "hardware=cpu",
    "hardware.threads=1",
    "workload.steps=2",
    "workload.size=32",
    "protocol.rounds=2",
    "protocol.warmup=1",
    "protocol.stage_calls=0",
    "protocol.interference=null",
    "protocol.programs_s=0",
    "quality.floor_prompts=2",
    "gate.replicates=1",
    "gate.prompt_count=8",
)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Options that go wrong, each in one way, beside an honest one, under the default gate."""
    variants = (
        "baseline: [], honest: ['grad_mode=inference_mode'], black: ['+trial=black_image','trial.every=4'], "
        "fewer: ['+trial=half_steps','trial.steps=1'], child: ['+trial=memory_in_child'], "
        "at first: ['+trial=fewer_steps_at_first','trial.steps=1','trial.calls=5']"
    )
    return sdopt(
        tmp_path_factory.mktemp("judged"),
        *(
            "run",
            "--config-dir",
            str(CONF),
            *SMALLEST,
            "study=explicit",
            "study.name=judged",
        ),
        *(f"study.variants={{{variants}}}", "gate=default", "tracking=none"),
    )


@pytest.fixture(scope="module")
def folder(judged: Finished) -> Path:
    [found] = judged.cwd.glob("outputs/runs/*/*")
    return found


class TestRun:
    def test_a_regression_is_exit_code_1_and_its_image_is_shown(
        self, judged: Finished
    ) -> None:
        assert judged.code == 1, judged.shown
        assert "images are broken: black" in judged.shown

    def test_each_is_judged_for_its_own_reason(self, folder: Path) -> None:
        found = {j.candidate: j for j in read_result(folder).judgements}
        assert set(found) == {"honest", "black", "fewer", "child", "at first"}
        same = next(r for r in found["honest"].rulings if r.metric == "mse")
        assert (same.verdict, same.reason) == (
            Verdict.PASS,
            "all 8 prompts are the same",
        )
        for name, rule in (
            ("black", "tripwires"),
            ("fewer", "steps"),
            ("at first", "timed as drawn"),
        ):
            assert found[name].verdict is Verdict.FAIL
            assert rule in [
                r.rule for r in found[name].rulings if r.verdict is Verdict.FAIL
            ]

    def test_files_for_ci_are_written(self, folder: Path) -> None:
        assert {"verdicts.json", "verdicts.xml", "verdicts.md"} <= {
            file.name for file in folder.iterdir()
        }

    def test_timed_calls_have_other_prompts_in_each_round_and_other_images_are_doubtful(
        self, folder: Path, judged: Finished
    ) -> None:
        result = read_result(folder)
        doubts = [
            doubt for doubt in doubts_of(result) if "images of timed calls" in doubt
        ]
        assert [doubt.partition(":")[0] for doubt in doubts] == ["black", "at first"]
        assert (
            "2 of 3 images of timed calls, in process 1, differ from those that were scored"
            in doubts[1]
        )
        assert f"Doubtful: {doubts[1]}" in judged.shown
        for row in (result.variant("baseline"), *result.candidates):
            [measurement] = row.measurements
            [shape] = measurement.shapes
            # The first call had prompt 1, the one to warm up prompt 2, and the discarded round prompt 3.
            assert [image.prompt_index for image in shape.timed_images[:2]] == [3, 4]
            assert all(call.held_gib and not call.repeated for call in shape.calls)
            assert len(measurement.pass_s) == len(measurement.pass_held_gib) == 8
            assert measurement.memory_after
        assert {
            image.error
            for image in result.variant("baseline")
            .measurements[0]
            .shapes[0]
            .timed_images
        } == {0.0}

    def test_memory_of_a_child_is_the_variants(self, folder: Path) -> None:
        peaks = {
            row.name: known(row.measurements[0].peak)[1]
            for row in read_result(folder).variants
        }
        assert peaks["child"] > peaks["baseline"] + 0.2


class TestGate:
    def test_a_result_is_judged_anew(self, folder: Path, tmp_path: Path) -> None:
        before = (folder / "result.json").read_bytes()
        done = sdopt(tmp_path, "gate", str(folder), "gate=default", "--output", "again")
        assert done.code == 1
        assert (folder / "result.json").read_bytes() == before
        assert (tmp_path / "again" / "verdicts.xml").is_file()
        assert (
            sdopt(
                tmp_path, "gate", str(folder), "gate=report_only", "--output", "again"
            ).code
            == 0
        )
        looks = read_result(folder).looks
        assert {(look.gate, look.number) for look in looks} == {
            ("default", 1),
            ("report_only", 1),
        }

    def test_the_gate_of_the_study_judges_unless_another_is_named(
        self, folder: Path, tmp_path: Path
    ) -> None:
        copytree(folder, tmp_path / "mine")
        result = read_result(folder)
        gate = replace(result.config.gate, name="mine", report_only=True)
        result.config = replace(result.config, gate=gate)
        write_result(result, tmp_path / "mine")
        done = sdopt(tmp_path, "gate", "mine", "--output", "again")
        assert (done.code, "gate: mine" in done.out) == (0, True)
        done = sdopt(tmp_path, "gate", "mine", "gate=default", "--output", "again")
        assert (done.code, "gate: default" in done.out) == (1, True)

    def test_against_an_equal_result_nothing_has_got_worse(
        self, folder: Path, tmp_path: Path
    ) -> None:
        copytree(folder, tmp_path / "earlier")
        earlier = read_result(folder)
        earlier.id = "another"
        write_result(earlier, tmp_path / "earlier")
        # Of two steps there is none: one of ten is not applied unless it is named, and then the verdict says so.
        named = f"gate.calibration={FOLDER / 'emoji-10.json'}"
        done = sdopt(
            tmp_path,
            *(
                "gate",
                str(folder),
                "--against",
                "earlier",
                "--waive",
                "sdopt",
                "--output",
                str(tmp_path),
                named,
            ),
        )
        written = json.loads((tmp_path / "verdicts.json").read_text())
        assert written["variants"] == [
            {"variant": j["candidate"], "gate": j["gate"]}
            for j in written["judgements"]
        ]
        assert not any("speed" in row for row in written["variants"]), (
            "of the comparison alone"
        )
        found = {j["candidate"]: j for j in written["judgements"]}
        # Its images are broken then as now: there is nothing to hold it against.
        assert found.pop("black")["verdict"] == "not judged"
        assert found.pop("fewer")["verdict"] == "not judged"
        assert found.pop("at first")["verdict"] == "fail"
        assert {j["verdict"] for j in found.values()} <= {"pass", "undecided"}, (
            done.shown
        )
        assert all(
            "the calibration was measured with workload.steps=10 (here 2)" in j["note"]
            for j in found.values()
        )

    def test_against_itself_is_refused(self, folder: Path, tmp_path: Path) -> None:
        """It would always pass: a script may name the new result twice."""
        done = refused(tmp_path, "gate", str(folder), "--against", str(folder))
        assert "is the result that is judged" in done.shown

    def test_against_another_study_is_refused_by_name(
        self, folder: Path, tmp_path: Path
    ) -> None:
        earlier = read_result(folder)
        earlier.id = "another"
        reconfigure(earlier, "workload", steps=25)
        earlier.environment.packages["torch"] = "2.12.0"
        write_result(earlier, tmp_path)
        done = refused(
            tmp_path,
            "gate",
            str(folder),
            "--against",
            str(tmp_path),
            "--waive",
            "sdopt",
        )
        assert "workload.steps: 2 against 25" in done.shown
        assert "torch" in done.shown
        assert "--waive versions" in done.shown

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((".",), "has no result.json"),
            ((".", "gate=none"), "has no rules; choose gate=default"),
            ((".", "gate=nonsense"), "nonsense"),
            (
                (".", "quality.prompt_count=3"),
                "quality.prompt_count=3: has no effect on a finished result",
            ),
            (
                (".", "--against", ".", "--waive", "everything"),
                "--waive everything: unknown; choose from versions",
            ),
            (
                (".", "--waive", "sdopt"),
                "--waive sdopt: allows differences to an earlier result",
            ),
        ],
    )
    def test_a_mistake_is_named(
        self, arguments: tuple[str, ...], said: str, tmp_path: Path
    ) -> None:
        assert said in refused(tmp_path, "gate", *arguments).shown

    def test_a_command_that_ended_without_a_result_says_why(
        self, tmp_path: Path
    ) -> None:
        assert (
            sdopt(
                tmp_path, "run", "attention=cudnn", "hardware=cpu", "tracking=none"
            ).code
            == 2
        )
        [there] = tmp_path.glob("outputs/runs/*/*")
        done = refused(tmp_path, "gate", str(there), "gate=default")
        assert (
            "without a result: attention=cudnn: the cudnn kernel needs a CUDA device"
            in done.shown
        )

    def test_a_result_with_nothing_to_judge_does_not_pass(self, tmp_path: Path) -> None:
        empty = read_result(RESULT)
        for row in empty.candidates:
            row.status = Status.SKIPPED
        (tmp_path / "sweep" / "0").mkdir(parents=True)
        write_result(empty, tmp_path / "sweep" / "0")
        for name in ("sweep", "sweep/0"):
            done = refused(tmp_path, "gate", name)
            assert done.err == f"sdopt: {name}: has no comparison to judge\n"
        (tmp_path / "sweep" / "1").mkdir()
        write_result(read_result(RESULT), tmp_path / "sweep" / "1")
        done = sdopt(tmp_path, "gate", "sweep", "--output", "verdicts")
        assert done.code == 3
        assert [path.name for path in (tmp_path / "verdicts").iterdir()] == ["1"]

    def test_jobs_of_a_sweep_whose_folders_have_one_name_keep_their_verdicts(
        self, tmp_path: Path
    ) -> None:
        jobs = [
            "a/bf16",
            "b/bf16",
        ]  # hydra.sweep.subdir=${model.name}/${precision.weights}
        for job in jobs:
            (tmp_path / "sweep" / job).mkdir(parents=True)
            write_result(read_result(RESULT), tmp_path / "sweep" / job)
        (tmp_path / "sweep" / "multirun.yaml").touch()
        sdopt(tmp_path, "gate", "sweep", "--output", "verdicts")
        assert [
            str(file.parent)
            for file in sorted(tmp_path.glob("verdicts/**/verdicts.json"))
        ] == [str(tmp_path / "verdicts" / job) for job in jobs]

    def test_jobs_of_a_sweep_without_a_result_do_not_pass(self, tmp_path: Path) -> None:
        sweep = tmp_path / "sweep"
        for job, ending in {
            "0": None,
            "1": JobError(0, ["precision=fp16: conflicts"], Status.SKIPPED),
        }.items():
            (sweep / job).mkdir(parents=True)
            if ending is None:
                write_result(read_result(RESULT), sweep / job)
            else:
                write_error(ending, sweep / job)
        (sweep / "multirun.yaml").touch()
        judged = "gate", "sweep", "gate=report_only"
        assert sdopt(tmp_path, *judged).code == 0
        (sweep / "2" / ".hydra").mkdir(parents=True)
        lost = sdopt(tmp_path, *judged)
        assert lost.code == 3
        assert "sweep/2: the job has begun and has written no result" in lost.err
        write_error(JobError(2, ["workload.steps=0: too few"]), sweep / "2")
        mistaken = sdopt(tmp_path, *judged, "--json")
        assert mistaken.code == 2
        problems = json.loads(mistaken.out)["problems"]
        assert problems == ["sweep/2: workload.steps=0: too few"]


class TestCalibrate:
    def test_a_calibration_is_measured_and_used(self, tmp_path: Path) -> None:
        work = (
            "hardware=cpu",
            "hardware.threads=1",
            "workload.steps=2",
            "workload.size=32",
        )
        with fake_workers():
            done = sdopt(
                tmp_path, "calibrate", "--prompts", "3", *work, "--output", "own.json"
            )
        assert done.code == 0, done.shown
        found = read_calibration(tmp_path / "own.json")
        assert found.model == "emoji"
        assert found.workload["steps"] == 2
        assert {
            "clip_score_emojiclip",
            "cmmd_emojiclip",
            "perceptual_emojiclip",
        } <= set(found.metrics)
        assert found.metrics["clip_score_emojiclip"].n == 3
        assert found.workload["prompt_count"] == 3


class TestTrial:
    def test_mistakes_say_what_caught_them(self, folder: Path) -> None:
        found = {one.name: one for one in judge_timed(read_result(folder))}
        assert found["black"].fits
        assert found["black"].by[0] == "tripwires"
        assert found["black"].kind == "a few images of many"
        assert found["fewer"].fits
        assert "steps" in found["fewer"].by
        assert found["honest"].kind == "honest"

    @pytest.mark.slow
    def test_a_measured_trial_is_reported_anew(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # Of two steps there is no calibration, so that rules in shares are open for honest options as well.
        assert trial(
            ["--result", str(folder), "--only", "all mirrored,the seed ignored"]
        ) in (0, 1)
        written, shown = (folder / "trial.md").read_text(), capsys.readouterr().out
        assert "| black | lossy | fail | tripwires" in written
        assert "| geometry | all mirrored | lossy |" in written
        assert "| the baseline again | exact |" in written
        assert "workload.steps=" in written
        assert max(map(len, shown.splitlines())) > 80
        assert trial(["--result", str(tmp_path)]) == 2
        assert "no result.json" in capsys.readouterr().err
        assert trial(["--result", str(folder), "gate=strict"]) == 2
        assert "leave out gate=strict" in capsys.readouterr().err

    def test_where_a_calibration_cannot_be_written_nothing_is_drawn(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        below = tmp_path / "file" / "own.json"
        assert calibrate(["model=nothing", "--output", str(tmp_path)]) == 2
        assert f"--output {tmp_path}: is a folder" in capsys.readouterr().err
        assert calibrate(["model=nothing", "--output", str(below)]) == 3
        assert f"{below.parent}: " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("command", "arguments"), [(trial, []), (calibrate, ["--output", "own.json"])]
    )
    def test_after_a_signal_nothing_more_is_generated(
        self,
        command: Callable[[list[str]], int],
        arguments: list[str],
        folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """An interrupted study leaves a result, too."""

        def interrupted(argv: list[str]) -> int:
            left = Path(argv[-1].removeprefix("hydra.run.dir="))
            left.mkdir(parents=True)
            write_result(read_result(folder), left)
            return 143

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("runners.run.main", interrupted)
        assert command(arguments) == 143
        assert capsys.readouterr() == ("", "")
