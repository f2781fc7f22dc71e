"""The command line: what it prints, which exit code it ends with, and what a sweep leaves."""

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from rich.console import Console

from sdopt import __version__
from sdopt.apps.foresight.cpu import CpuRates
from sdopt.cli import COMMANDS
from sdopt.config.command import CommandLine
from sdopt.config.composed import Command
from sdopt.config.paths import CONF
from sdopt.errors import UsageError
from sdopt.launching import summarise_sweep
from sdopt.locks import lock_folder
from sdopt.record.files import read_result
from sdopt.record.records import Status
from sdopt.study.cost import StudyCost
from tests.command import SMOKE, Finished, refused, sdopt
from tests.fakes import fake_workers


@pytest.fixture(scope="module", autouse=True)
def faked() -> Iterator[None]:
    with fake_workers():
        yield


class TestCommands:
    def test_without_one_the_help_is_shown(self, tmp_path: Path) -> None:
        finished = refused(tmp_path)
        assert sdopt(tmp_path, "--help").out == finished.out
        assert sdopt(tmp_path, "--help").code == sdopt(tmp_path, "help").code == 0
        for command in COMMANDS:
            assert f"\n  {command} " in finished.out

    @pytest.mark.parametrize(
        ("word", "said"),
        [
            ("optimise", "did you mean optimize?"),
            ("rnu", "did you mean run?"),
            ("quickly", "`sdopt --help` lists all"),
        ],
    )
    def test_of_an_unknown_one_it_is_said_which_may_be_meant(
        self, word: str, said: str, tmp_path: Path
    ) -> None:
        finished = refused(tmp_path, word, "precision=bf16")
        assert finished.err == f"sdopt: unknown command '{word}'; {said}\n"
        assert finished.out == ""


class TestInformation:
    def test_help_shows_the_groups_and_their_options(self, tmp_path: Path) -> None:
        finished = sdopt(tmp_path, "run", "--help")
        assert finished.code == 0
        for group in (
            "model",
            "precision",
            "attention",
            "compiler",
            "layout",
            "grad_mode",
            "study",
            "protocol",
        ):
            section = finished.out.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
            told = dict(line.split(maxsplit=1) for line in section.splitlines())
            assert told.keys() == {
                option.stem for option in (CONF / group).glob("*.yaml")
            }

    def test_of_the_configuration_and_of_defaults_writes_no_file(
        self, tmp_path: Path
    ) -> None:
        assert (
            "weights: bfloat16"
            in sdopt(tmp_path, "run", "precision=bf16", "--cfg", "job").out
        )
        assert sdopt(tmp_path, "run", "--info", "defaults").code == 0
        assert sdopt(tmp_path, "--version").out == f"sdopt {__version__}\n"
        assert list(tmp_path.iterdir()) == []


MISTAKES = {
    "no override": ["precision"],
    "no value": ["precision="],
    "a broken list": ["workload.prompts=[red"],
    "an unknown flag": ["--gpu"],
    "an unknown option to show": ["--cfg", "job", "precision=nope"],
    "an empty option to show": ["--cfg", "job", "precision="],
    "flags of which one has no effect alone": [
        "precision=bf16",
        "--package",
        "workload",
    ],
    "a missing folder of groups": ["--config-dir", "/nowhere"],
    "a missing folder on the search path": ["hydra.searchpath=[file:///nowhere]"],
    "a pattern of options without -m": ["precision=glob(*)"],
    "an interpolation in a path": ["study.name=${nope}"],
    "a variable for processes that have started": ["+hydra.job.env_set.X=1"],
    "the folder of a sweep": ["hydra.sweep.dir=mine"],
    "a launcher for a single study": ["hydra/launcher=submitit_local"],
    "how a launcher of a single study runs": ["+hydra.launcher.n_jobs=2"],
    "a key within null": ["+hydra.sweeper.params.override=1"],
    "the folder of a run for a sweep": [
        "-m",
        "layout=contiguous,channels_last",
        "hydra.run.dir=mine",
    ],
}


def mistake(*words: str) -> str:
    """What is wrong with a command line, found when it is composed; `tests/test_guard.py` holds how that ends it."""
    with pytest.raises(UsageError) as caught:
        Command.of(CommandLine.of([*SMOKE, *words]))
    [problem] = caught.value.problems
    return problem


class TestMistakes:
    @pytest.mark.parametrize("kind", MISTAKES)
    def test_name_the_key_or_the_value(self, kind: str) -> None:
        problem = mistake(*MISTAKES[kind])
        key, _, value = MISTAKES[kind][-1].lstrip("+~-").partition("=")
        assert key.partition(".")[0] in problem or (
            value and value.strip("${}") in problem
        )

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["hardware.device=cuda:99"], "cuda:99"),
            (["hardware.device=tpu"], "tpu"),
            (["--cfg", "job", "--multirun"], "--multirun"),
            (["hydra.run.dir=/dev/null"], "hydra.run.dir"),
            (["-m", f"hydra.sweep.subdir={300 * 'x'}"], "File name too long"),
        ],
    )
    def test_that_show_when_it_begins(
        self, tmp_path: Path, words: list[str], says: str
    ) -> None:
        refused(tmp_path, "run", *SMOKE, *words, says=says)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["precison=bf16"], "precison: "),
            (["-m", "workload.stepz=3"], "workload.stepz: "),
            (["experimnt=mine"], "experimnt: "),
            (["study.options=[precision:bf16]"], "study.options: "),
            (["lora.scale=0.5"], "lora.scale: "),
            (
                ["study.options=[precision=bf16]"],
                "study.options=[precision=bf16]: not an override",
            ),
            (
                ["study.variants={a: [precision=bf16]}"],
                "study.variants={a: [precision=bf16]}: not an override",
            ),
        ],
    )
    def test_name_the_key(self, words: list[str], said: str) -> None:
        assert mistake(*words).startswith(said)


def test_a_launcher_that_the_jobs_of_a_sweep_choose_is_refused(tmp_path: Path) -> None:
    """Hydra would run them without it, one after the other on this machine."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    presets = tmp_path / "experiment"
    presets.mkdir()
    for name in "ab":
        (presets / f"{name}.yaml").write_text(
            "# @package _global_\ndefaults: [override /hydra/launcher: submitit_local]\n"
        )
    words = "-m", "--config-dir", str(tmp_path), "layout=contiguous,channels_last"
    assert Command.of(CommandLine.of([*words, "experiment=a"])).sweep
    problem = mistake(*words, "experiment=a,b")
    assert problem.startswith("hydra/launcher=submitit_local: is chosen by what")
    named = (*words, "experiment=a,b", "hydra/launcher=submitit_local")
    assert Command.of(CommandLine.of(named)).sweep


def test_values_that_the_jobs_of_a_sweep_sweep_over_are_refused(tmp_path: Path) -> None:
    """Hydra would run one job of each, as if nothing were to be swept."""
    presets = tmp_path / "experiment"
    presets.mkdir()
    for name in "ab":
        (presets / f"{name}.yaml").write_text(
            "# @package _global_\nhydra: {sweeper: {params: {precision: 'bf16,fp16'}}}\n"
        )
    words = "-m", "--config-dir", str(tmp_path)
    assert Command.of(CommandLine.of([*words, "experiment=a"])).sweep
    problem = mistake(*words, "experiment=a,b")
    assert problem.startswith("hydra.sweeper.params: is set by what")


class TestFolder:
    def test_keeps_the_record_of_what_was_measured_there(self, tmp_path: Path) -> None:
        """Hydra replaces it before sdopt runs, and then another study would be resumed."""
        study = ("run", *SMOKE, "precision=bf16", "hydra.run.dir=mine")
        (tmp_path / "mine").mkdir()
        for name in ("notes.tmp", "result.jsonn_2iop7f.tmp"):
            (tmp_path / "mine" / name).touch()
        with fake_workers():
            assert sdopt(tmp_path, *study).code == 0
        # What a killed process left in the middle of writing is removed, and no file of the user's.
        assert [file.name for file in tmp_path.glob("mine/*.tmp")] == ["notes.tmp"]
        record = (tmp_path / "mine" / ".hydra" / "overrides.yaml").read_text()
        done = refused(tmp_path, "run", *SMOKE, "attention=math", "hydra.run.dir=mine")
        assert (
            "mine: holds a result; continue it with `sdopt run resume=mine`" in done.err
        )
        assert (tmp_path / "mine" / ".hydra" / "overrides.yaml").read_text() == record
        with fake_workers():
            assert sdopt(tmp_path, "run", "resume=mine", "protocol.rounds=3").code == 0

    def test_of_another_process_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        with lock_folder(tmp_path / "mine"):
            refused = sdopt(
                tmp_path, "run", *SMOKE, "precision=bf16", "hydra.run.dir=mine"
            )
        assert refused.code == 2
        assert "another process is measuring there" in refused.err
        assert list((tmp_path / "mine").iterdir()) == []


class TestDryRun:
    @pytest.fixture(autouse=True)
    def known_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its rates, which `sdopt plan` has kept, are those of no machine."""
        for module in ("cpu", "forecast"):
            monkeypatch.setattr(
                f"sdopt.apps.foresight.{module}.known_machine",
                lambda *_: CpuRates(*[1e11] * 6),
            )

    def test_shows_what_would_be_measured_compared_and_skipped(
        self, tmp_path: Path
    ) -> None:
        finished = sdopt(
            tmp_path,
            *(
                "run",
                *SMOKE,
                "dry_run=true",
                "study=explicit",
                "workload.batch_size=[1,2]",
                "quality.prompt_count=300",
            ),
            "study.variants={plain: [], half: ['precision=bf16'], other: ['attention=deepspeed']}",
        )
        assert finished.code == 0
        assert finished.began == (
            "starting: composing the study, importing PyTorch and diffusers"
        )
        [reason] = [line for line in finished.out.splitlines() if "other: no:" in line]
        assert "choose precision=fp16" in reason, (
            "a reason is one line, from which one copies"
        )
        for shown in (
            "half",
            "lossy",
            "repeated baseline",
            "no:",
            "needs a CUDA",
            "what would be compared",
        ):
            assert shown in finished.out
        assert re.search(r"time: about .*\(predicted; no earlier run", finished.shown)
        assert "timed at 32×32, batch 1; 32×32, batch 2" in finished.shown
        assert (
            "quality.prompt_count=300: there are 240 prompts, and images are judged by these alone"
            in finished.shown
        )
        assert list(tmp_path.iterdir()) == []

    def test_measures_no_rates(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is not known is said: to find it out would take longer than the rest of the command."""
        asked: list[str] = []
        of_foresight = "sdopt.apps.foresight"
        monkeypatch.setattr(f"{of_foresight}.cpu.measure_machine", asked.append)
        monkeypatch.setattr(f"{of_foresight}.forecast.known_machine", lambda *_: None)
        monkeypatch.setattr(f"{of_foresight}.forecast.in_process", asked.append)
        finished = sdopt(tmp_path, "run", *SMOKE, "dry_run=true", "precision=bf16")
        assert "this machine's rates are not known yet" in finished.shown
        assert not asked

    def test_what_does_not_fit_on_a_planned_card_would_not_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        too_large = {"baseline"}
        monkeypatch.setattr(
            "sdopt.experiment.foreseen", lambda *_: (2.0, [], too_large)
        )
        finished = sdopt(
            tmp_path, *("run", *SMOKE, "dry_run=true", "precision=fp16", "hardware=t4")
        )
        rows = [line.split() for line in finished.out.splitlines()]
        ends = {row[0]: row[-1] for row in rows if row and row[-1] in ("yes", "no")}
        assert (ends["baseline"], ends["precision=fp16"]) == ("no", "yes")
        assert (
            "baseline: no: does not fit in the memory of the device" in finished.shown
        )
        assert "time: unknown" in finished.shown
        too_large.clear()
        compiling = sdopt(
            tmp_path,
            *("run", *SMOKE, "dry_run=true", "compiler=inductor", "hardware=t4"),
        )
        assert "without compiling (1 of 3 variants)" in compiling.shown
        too_large |= {"baseline", "precision=fp16"}
        planned = sdopt(
            tmp_path, *("run", *SMOKE, "dry_run=true", "precision=fp16", "hardware=t4")
        )
        assert "precision=fp16: no: does not fit" in planned.shown

    def test_of_a_sweep_says_what_its_jobs_take_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls_s = iter([60.0, 120.0])
        monkeypatch.setattr(
            "sdopt.experiment.foreseen", lambda *_: (next(calls_s), [], set())
        )
        monkeypatch.setattr(
            "sdopt.experiment.cost_of",
            lambda *_: StudyCost(1, 1, 1.0, None, None, "", {}),
        )
        words = ("dry_run=true", "hardware=t4", "attention=math,vanilla")
        planned = sdopt(tmp_path, "run", "-m", *SMOKE, *words)
        assert planned.out.endswith("all jobs: about 3 min\n")

    @pytest.mark.slow
    def test_of_a_sweep_ends_as_the_sweep_would_and_leaves_a_folder_as_it_was(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "mine" / "empty").mkdir(parents=True)
        planned = refused(
            tmp_path,
            "run",
            "-m",
            *SMOKE,
            "workload.steps=0,1",
            "dry_run=true",
            "hydra.sweep.dir=mine",
        )
        assert "workload.steps=0: Input should be greater" in planned.err
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "mine"]

    @pytest.mark.slow
    def test_says_what_it_takes_as_far_as_that_is_known(
        self, tmp_path: Path, finished: Finished
    ) -> None:
        (tmp_path / "mine").mkdir()
        planned = sdopt(
            tmp_path,
            "run",
            *SMOKE,
            "dry_run=true",
            "precision=bf16",
            "hydra.run.dir=mine",
        )
        assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
        # Three processes: a first call, a discarded round, evidence and its profile, two rounds, a stage and an image.
        assert "emoji 32×32, 1 steps (DDIM), batch 1" in planned.shown
        assert "calls of the pipeline: about 24, by 3 processes" in planned.shown
        assert re.search(
            r"time: about .+; memory: unknown \(predicted; no earlier run .+ hold \d\d MiB of weights",
            planned.shown,
        )
        known = sdopt(
            finished.cwd,
            "run",
            *SMOKE,
            "workload.steps=2",
            "dry_run=true",
            "precision=bf16",
        )
        assert f"from {finished.folder.relative_to(finished.cwd)}" in known.shown
        assert "time: about" in known.shown


class TestConflicts:
    def test_of_the_one_candidate_are_all_reported_before_anything_is_loaded(
        self, tmp_path: Path
    ) -> None:
        finished = refused(tmp_path, "run", *SMOKE, "attention=cudnn", "precision=tf32")
        assert [
            line.partition(": ")[2].partition(":")[0]
            for line in finished.err.splitlines()
        ] == [
            "precision=tf32",
            "attention=cudnn",
        ]
        assert not list(tmp_path.rglob("result.json"))

    def test_of_the_baseline_leave_nothing_to_compare_with(
        self, tmp_path: Path
    ) -> None:
        finished = refused(
            tmp_path,
            *("run", *SMOKE, "study=explicit", "dry_run=true"),
            "study.variants={first: ['attention=cudnn'], second: ['precision=bf16']}",
        )
        assert finished.err.startswith(
            "sdopt: the baseline 'first' cannot run: attention=cudnn: "
        )


class Returned(Callback):
    """Keeps what jobs return, as a sweeper would see it."""

    values: ClassVar[list[Any]] = []

    def on_job_end(self, config: Any, job_return: JobReturn, **_: Any) -> None:
        Returned.values.append(job_return.return_value)


class TestObjective:
    @pytest.fixture(autouse=True)
    def values(self) -> list[Any]:
        Returned.values.clear()
        return Returned.values

    SPY = "+hydra.callbacks.spy._target_=tests.runners.test_run.Returned"

    def test_is_returned_to_a_sweeper(self, tmp_path: Path, values: list[Any]) -> None:
        finished = sdopt(
            tmp_path,
            "run",
            self.SPY,
            *SMOKE,
            "grad_mode=inference_mode",
            "objective=[latency/mean_s,nonsense]",
        )
        samples = (
            finished.result.variant("grad_mode=inference_mode")
            .measurements[0]
            .shapes[0]
            .latency_s
        )
        [(latency, nonsense)] = values
        assert latency == pytest.approx(sum(samples) / 2)
        assert math.isnan(nonsense)
        assert "objective=nonsense: unknown metric; available: " in finished.err
        assert "speedup, speedup_" in finished.err

    def test_of_a_mistake_is_not_a_number_and_the_sweep_runs_the_others(
        self, tmp_path: Path, values: list[Any]
    ) -> None:
        finished = sdopt(tmp_path, "run", "-m", self.SPY, *SMOKE, "workload.steps=0,1")
        assert math.isnan(values[0])
        assert len(values) == 2
        assert finished.code == 2
        assert "workload.steps=0: Input should be greater" in finished.err
        [path] = tmp_path.rglob("result.json")
        assert path.parent.name == "1"
        assert (
            "workload.steps=0: Input should be greater"
            in (path.parents[1] / "sweep.md").read_text()
        )


class TestSweep:
    def test_has_a_folder_for_each_job_and_a_table_and_skips_what_cannot_run(
        self, sweep: Finished, sweep_folder: Path
    ) -> None:
        assert sweep.code == 0, sweep.err
        about_all = {"sweep.md", "report.md", "report.html", "multirun.yaml"}
        assert {path.name for path in sweep_folder.iterdir()} == {
            "0",
            "1",
            "2",
        } | about_all
        assert (sweep_folder / "1" / "images").is_dir()
        baseline, math_, cudnn = (
            read_result(sweep_folder / str(number)) for number in range(3)
        )
        assert [row.name for row in baseline.variants] == [
            "baseline",
            "repeated baseline",
        ]
        assert math_.variant("attention=math").status is Status.OK
        assert cudnn.variant("attention=cudnn").status is Status.SKIPPED
        assert cudnn.variant("attention=cudnn").reason.startswith(
            "the cudnn kernel needs a CUDA device"
        )
        assert all(row.measurements == [] for row in cudnn.variants)
        lines = (sweep_folder / "sweep.md").read_text().splitlines()
        rows = [line.split(" | ") for line in lines if line.startswith("| ")]
        assert [(row[0], row[1], row[3]) for row in rows[1:]] == [
            ("| baseline", "0", ""),
            ("| attention=math", "1", "not enough runs"),
            ("| attention=cudnn", "2", "skipped"),
        ]
        assert "×" in rows[2][2]
        assert lines[0].strip("*") in sweep.shown

    def test_of_another_command_leaves_the_record_of_this_one(
        self, sweep_folder: Path, tmp_path: Path
    ) -> None:
        """By that record `resume` finds the jobs again; a single run there would be taken for the sweep."""
        folder = tmp_path / "swept"
        shutil.copytree(sweep_folder, folder)
        record = (folder / "multirun.yaml").read_text()
        other = ("precision=bf16", "attention=math,vanilla")
        for words in (
            ("-m", *other, "hydra.sweep.dir=swept", "hydra.sweep.subdir=more_\\${hydra.job.num}"),
            ("precision=bf16", "hydra.run.dir=swept"),
        ):  # fmt: skip
            done = refused(tmp_path, "run", *SMOKE, *words)
            assert "swept: holds results of a" in done.err
        assert (folder / "multirun.yaml").read_text() == record
        assert not (folder / ".hydra").exists()
        resumed = sdopt(tmp_path, "run", "resume=swept")
        assert "holds results" not in resumed.err

    def test_in_the_folder_of_a_run_leaves_its_record(
        self, sweep_folder: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(sweep_folder / "1", tmp_path / "one")
        words = ("-m", "attention=math,vanilla", "hydra.sweep.dir=one")
        done = refused(tmp_path, "run", *SMOKE, *words)
        assert "one: holds a result" in done.err
        assert not (tmp_path / "one" / "multirun.yaml").exists()

    def test_uses_each_mapping_that_is_given(self, tmp_path: Path) -> None:
        """Hydra merges those of one key in a run, and takes the last one in a sweep."""
        words = ("+scheduler.options={steps_offset: 0}", "+scheduler.options={timestep_spacing: leading}")  # fmt: skip
        done = refused(tmp_path, "run", "-m", *SMOKE, *words, "attention=math,vanilla")
        assert "in a sweep only the last would be used" in done.err
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            once = compose("config", list(words))
        assert set(once.scheduler.options) == {"steps_offset", "timestep_spacing"}

    def test_with_a_typo_runs_nothing(self, tmp_path: Path) -> None:
        finished = refused(tmp_path, "run", "-m", *SMOKE, "attention=math,nope")
        said = finished.err.partition("attention=nope: ")[2]
        assert all(
            option.stem in said for option in (CONF / "attention").glob("*.yaml")
        )
        assert not list(tmp_path.rglob("result.json"))

    def test_whose_jobs_wrote_elsewhere(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert summarise_sweep(tmp_path, Console()) == 3
        assert "no job has written a result" in capsys.readouterr().err
