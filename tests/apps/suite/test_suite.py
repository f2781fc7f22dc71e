"""The suite on a CPU: budget, limits, what fails, and a second call that goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdopt.apps.suite import run as running
from sdopt.apps.suite.config import Part, suite_config
from sdopt.apps.suite.parts import (
    machine_findings,
    option_findings,
    study_findings,
)
from sdopt.apps.suite.parts import test_findings as findings_of_tests
from sdopt.apps.suite.process import PartRun, run_limited
from sdopt.apps.suite.record import (
    Ending,
    PartEntry,
    SuiteRecord,
    pack,
    read_record,
    unpack,
    write_record,
)
from sdopt.apps.suite.run import Suite, run_suite, slug_of
from sdopt.errors import UsageError
from sdopt.record.files import read_result, write_result
from sdopt.record.records import Status, StudyResult
from sdopt.statistics.disturbance import noise_of
from tests.command import (
    ROOT,
    Finished,
    eventually,
    has_ended,
    refused,
    sdopt,
    working_in,
)
from tests.fakes import fake_workers
from tests.fixtures import CPU
from tests.records import known, retime

TINY = "protocol:smoke, workload.prompt_count:1, protocol.stage_calls:0, protocol.interference:null"
RUNS = ("flash", "fused_qkv", "math", "sliced", "sliced_max", "vanilla")
SETTLED = ", ".join(f"attention:{option}" for option in RUNS)
PARTS = (
    "+parts.wrong={kind: study, limit_s: 200, least_s: 0, overrides: [layout:nonsense]}",
    "+parts.slow={kind: study, limit_s: 3, least_s: 0, overrides: [workload.steps:1000]}",
    "+parts.large={kind: study, limit_s: 85000, least_s: 80000}",
    "+parts.late={kind: options, limit_s: 1, least_s: 0, options: [layout], overrides: [workload.steps:1000]}",
    f"+parts.unable={{kind: options, limit_s: 60, options: [attention], settled: [{SETTLED}]}}",
)
ONLY = "only=[wrong,slow,late,large,unable,blade_sd15_lora]"
SUITE = ("gpu-suite", "device=cpu", "budget_s=300", *PARTS, ONLY)


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """Parts run in this process, with fake workers; one of a thousand steps is ended at its limit."""

    def run(command: list[str], log: Path, limit_s: float, *_: object) -> PartRun:
        if any("1000" in argument for argument in command):
            return PartRun(-signal.SIGTERM, limit_s, stopped=True)
        with fake_workers():
            ended = sdopt(Path.cwd(), *command[3:])
        log.write_text(ended.out + ended.err)
        return PartRun(ended.code, 1.0, stopped=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "run_limited", run)
        yield


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return sdopt(tmp_path_factory.mktemp("suite"), *SUITE)


def record_of(called: Finished) -> SuiteRecord:
    return known(read_record(results_of(called)))


def results_of(called: Finished) -> Path:
    return called.cwd / "outputs" / "gpu_suite" / slug_of(CPU.name)


def entry(called: Finished, part: str) -> PartEntry:
    return known(record_of(called).entry(part))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_ends_before_anything_is_measured(tmp_path: Path) -> None:
    """It once took the CPU instead, and spent a GPU's minutes there."""
    finished = refused(tmp_path, "gpu-suite", "budget_s=300")
    assert finished.err.rstrip().endswith(
        "device=cpu runs a trial of the suite on the CPU"
    )
    assert len(finished.err.splitlines()) == 1
    assert not any(tmp_path.rglob("*.json"))


def test_a_call_says_how_each_part_ended_and_what_is_left(called: Finished) -> None:
    for part, ending, reason in (
        ("wrong", Ending.FAILED, "ended with exit code 2: .*nonsense"),
        ("slow", Ending.STOPPED, "at its limit of 3 s"),
        ("late", Ending.STOPPED, "at its limit of 1 s"),
        ("large", Ending.NOT_RUN, "needs at least 80000 s"),
        ("unable", Ending.DONE, "nothing in this part can run here"),
        ("blade_sd15_lora", Ending.LEFT_OUT, "needs a CUDA device"),
    ):
        found = entry(called, part)
        assert found.ending is ending
        assert re.search(reason, found.reason)
    [late] = entry(called, "late").findings
    assert (late.name, late.state) == ("layout=channels_last", "not run")
    assert {finding.state for finding in entry(called, "unable").findings} == {
        "cannot run"
    }
    assert called.code == 3
    assert "1 of the 5 parts that can run here are done" in called.shown
    assert "large: not run (needs at least 80000 s" in called.shown


@pytest.mark.slow
def test_options_that_were_proven_are_measured_once_more_with_intervals(
    tmp_path: Path,
) -> None:
    command = (
        *(
            "gpu-suite",
            "device=cpu",
            "budget_s=600",
            f"parts.noise.overrides=[{TINY},protocol.replicates:3]",
        ),
        f"+parts.options={{kind: options, limit_s: 200, options: [layout,attention:flash], overrides: [{TINY}]}}",
    )
    first = sdopt(tmp_path, *command, "only=[noise,options]")
    assert first.code == 0, first.shown
    states = {
        finding.name: finding.state for finding in entry(first, "options").findings
    }
    assert states["layout=channels_last"] == "took effect"
    precise = ("intervals=true", 'precise=["protocol.replicates=3"]')
    second = sdopt(tmp_path, *command, "only=[options]", *precise)
    assert second.code == 0, second.shown
    again = entry(second, "options_intervals")
    assert "[" in next(
        found.said for found in again.findings if found.name == "layout=channels_last"
    )
    assert not any(
        state != "took effect" and f"{option}]" in str(again.command)
        for option, state in states.items()
    )


STUDY = (
    *(
        "gpu-suite",
        "device=cpu",
        "budget_s=600",
        "only=[study]",
        "archive=suite.tar.xz",
    ),
    f"+parts.study={{kind: study, limit_s: 300, overrides: [{TINY}, layout:channels_last]}}",
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A study that the suite measured, and packed."""
    return sdopt(tmp_path_factory.mktemp("measured"), *STUDY)


@pytest.fixture
def copied(measured: Finished, tmp_path: Path) -> Finished:
    """The same in a folder of its own, which a test may change."""
    shutil.copytree(measured.cwd, tmp_path / "it's a copy")
    return replace(measured, cwd=tmp_path / "it's a copy")


def cut_off(folder: Path) -> StudyResult:
    """Leaves the study as if the budget had ended before its option was measured; returns what is left of it."""
    left = read_result(folder / "parts" / "study" / "run")
    left.status, row = "running", left.variant("layout=channels_last")
    row.status, row.measurements, row.images = Status.PENDING, [], []
    write_result(left, folder / "parts" / "study" / "run")
    record = known(read_record(folder))
    [done] = record.entries
    write_record(replace(record, entries=[replace(done, ending=Ending.CUT)]), folder)
    return left


def test_another_machine_goes_on_from_the_archive(copied: Finished) -> None:
    folder = results_of(copied)
    before = record_of(copied)
    shutil.rmtree(folder)
    finished = sdopt(copied.cwd, *STUDY)
    assert finished.code == 0, finished.shown
    assert record_of(copied) == before, "nothing was measured once more"
    run = folder / "parts" / "study" / "run"
    assert read_result(run).variant("layout=channels_last").status is Status.OK
    assert (run / ".hydra" / "hydra.yaml").is_file(), "so that it can be resumed"
    left = cut_off(folder)
    resumed = sdopt(copied.cwd, *STUDY)
    assert resumed.code == 0, resumed.shown
    after = read_result(run)
    assert (after.id, after.variant("layout=channels_last").status) == (
        left.id,
        Status.OK,
    )
    [earlier], [first, *_] = (
        found.variant("baseline").measurements for found in (left, after)
    )
    assert first.shapes[0].latency_s == earlier.shapes[0].latency_s, (
        "what was measured is kept"
    )
    assert not list(run.parent.glob("earlier-*")), "nothing was moved away"


class TestArchive:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "card"
        run = folder / "parts" / "study" / "run"
        for name, content in {
            "result.json": b"{}",
            ".hydra/hydra.yaml": b"a: 1",
            "images/baseline/0000_00.png": b"a picture",
            "logs/baseline.log": b"of a worker",
            "../log.txt": bytes(70_000) + b"the end",
        }.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(content)
        write_record(SuiteRecord(CPU.name, ""), folder)
        return folder

    def test_holds_results_and_the_ends_of_logs_but_no_images(
        self, folder: Path, tmp_path: Path
    ) -> None:
        archive, made = tmp_path / "suite.tar.xz", tmp_path / "made"
        pack(folder, archive)
        assert unpack(archive, made, CPU.name) == CPU.name
        assert sorted(
            str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()
        ) == [
            *(
                "parts/study/log.txt",
                "parts/study/run/.hydra/hydra.yaml",
                "parts/study/run/logs/baseline.log",
            ),
            *("parts/study/run/result.json", "suite.json", "suite.md"),
        ]
        log = (made / "parts" / "study" / "log.txt").read_bytes()
        assert len(log) == 64 * 1024
        assert log.endswith(b"the end")
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "card",
            "made",
            "suite.tar.xz",
        ]

    def test_of_another_device_is_refused(self, folder: Path, tmp_path: Path) -> None:
        archive = tmp_path / "suite.tar.xz"
        pack(folder, archive)
        other = replace(
            suite(tmp_path / "made", archive=str(archive)),
            device=replace(CPU, name="Another"),
        )
        with pytest.raises(
            UsageError,
            match=f"holds the record of {re.escape(CPU.name)}; choose another file",
        ):
            run_suite(other)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "card",
            "suite.tar.xz",
        ]

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("../x", tarfile.REGTYPE), ("x", tarfile.SYMTYPE), ("x", tarfile.FIFOTYPE)],
    )
    def test_that_holds_more_than_files_within_is_refused(
        self, tmp_path: Path, name: str, kind: bytes
    ) -> None:
        archive, folder = tmp_path / "suite.tar.xz", tmp_path / "outputs" / "card"
        folder.parent.mkdir()
        with tarfile.open(archive, "w:xz") as tar:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "suite.json"
            tar.addfile(member)
        with pytest.raises(UsageError, match="not an archive of the suite"):
            unpack(archive, folder, CPU.name)
        assert not list(folder.parent.iterdir())


def suite(
    folder: Path, budget_s: float = 100.0, parts: Sequence[Part] = (), **changed: object
) -> Suite:
    config = replace(
        suite_config([]),
        parts={part.name: part for part in parts},
        **changed,  # type: ignore[arg-type]
    )
    return Suite(config, CPU, folder, time.monotonic() + budget_s, lambda said: None)


class TestGoingOn:
    """What a killed or cut-off call leaves; the command itself is a stand-in, so that nothing is measured."""

    PART = Part(name="study", kind="study", limit_s=50, overrides=["precision=fp32"])

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        called: list[list[str]] = []

        def run(command: list[str], *_: object) -> PartRun:
            called.append(list(command))
            refused = any("resume=" in argument for argument in command)
            return PartRun(2 if refused else 0, 1.0, stopped=False)

        monkeypatch.setattr(running, "run_limited", run)
        return called

    def test_runs_only_files_with_tests_for_a_gpu(
        self, tmp_path: Path, commands: list[list[str]]
    ) -> None:
        run_suite(
            suite(tmp_path, parts=(Part(name="tests", kind="tests", limit_s=50),))
        )
        [command] = commands
        assert "gpu and not slow" in command
        files = {
            Path(argument).name for argument in command if argument.endswith(".py")
        }
        assert {"test_optimizations.py", "test_precision.py"} <= files
        assert "test_architecture.py" not in files

    @pytest.mark.parametrize(("settings", "left_out"), [({}, 2), ({"retry": True}, 1)])
    def test_goes_on_with_the_tests_that_have_not_ended(
        self,
        tmp_path: Path,
        commands: list[list[str]],
        settings: dict[str, Any],
        left_out: int,
    ) -> None:
        write_record(
            SuiteRecord(CPU.name, "", [PartEntry("tests", Ending.CUT)]), tmp_path
        )
        log = tmp_path / "parts" / "tests" / "log.txt"
        log.parent.mkdir(parents=True)
        log.write_text(
            "tests/test_a.py::test_it PASSED [ 3%]\n../b/tests/test_a.py::test_it[1] FAILED\ntests/test_a.py::test_x "
        )
        run_suite(
            suite(
                tmp_path,
                parts=(Part(name="tests", kind="tests", limit_s=50),),
                **settings,
            )
        )
        [command] = commands
        ended = [
            "--deselect=tests/test_a.py::test_it",
            "--deselect=tests/test_a.py::test_it[1]",
        ]
        assert [
            argument for argument in command if argument.startswith("--deselect")
        ] == ended[:left_out]

    @pytest.mark.parametrize(
        ("ending", "retry", "begins"),
        [
            *(
                (ending, False, True)
                for ending in (Ending.RUNNING, Ending.CUT, Ending.NOT_RUN)
            ),
            (Ending.FAILED, False, False),
            (Ending.FAILED, True, True),
        ],
    )
    def test_begins_what_did_not_end_and_what_failed_if_asked(
        self,
        tmp_path: Path,
        commands: list[list[str]],
        ending: Ending,
        retry: bool,
        begins: bool,
    ) -> None:
        made = suite(tmp_path, parts=(self.PART,), retry=retry)
        write_record(SuiteRecord(CPU.name, "", [PartEntry("study", ending)]), tmp_path)
        assert [found.ending for found in run_suite(made).entries] == [
            Ending.DONE if begins else ending
        ]
        assert len(commands) == begins

    @pytest.mark.parametrize(
        ("row", "retry", "begins"),
        [(Status.OK, True, 0), (Status.FAILED, False, 0), (Status.FAILED, True, 1)],
    )
    def test_runs_a_done_part_again_if_a_row_failed(
        self,
        tmp_path: Path,
        commands: list[list[str]],
        result: StudyResult,
        row: Status,
        retry: bool,
        begins: int,
    ) -> None:
        folder = tmp_path / "parts" / "study" / "run"
        folder.mkdir(parents=True)
        result.variant("bfloat16").status = row
        write_result(result, folder)
        write_record(
            SuiteRecord(
                CPU.name,
                "",
                [PartEntry("study", Ending.DONE, folder="parts/study/run")],
            ),
            tmp_path,
        )
        run_suite(suite(tmp_path, parts=(self.PART,), retry=retry))
        # What is refused is begun anew.
        assert [command[-1] for command in commands[:1]] == [
            "retry_failed=true"
        ] * begins

    def test_resumes_a_study_and_begins_anew_where_that_is_refused(
        self, tmp_path: Path, commands: list[list[str]], result: StudyResult
    ) -> None:
        folder = tmp_path / "parts" / "study" / "run"
        folder.mkdir(parents=True)
        write_result(result, folder)
        write_record(
            SuiteRecord(CPU.name, "", [PartEntry("study", Ending.CUT)]), tmp_path
        )
        run_suite(suite(tmp_path, parts=(self.PART,)))
        first, second = commands
        assert first[-2:] == [f"resume={folder}", "tracking=none"]
        assert f"hydra.run.dir='{folder}'" in second
        assert (tmp_path / "parts" / "study" / "earlier-1" / "result.json").is_file(), (
            "what was measured is kept"
        )

    def test_keeps_a_cut_off_part_that_does_not_fit(
        self, tmp_path: Path, commands: list[list[str]]
    ) -> None:
        cut = PartEntry("study", Ending.CUT, "the budget was used up after 9 s")
        write_record(SuiteRecord(CPU.name, "", [cut]), tmp_path)
        assert run_suite(suite(tmp_path, budget_s=5.0, parts=(self.PART,))).entries == [
            cut
        ]
        assert not commands

    @pytest.mark.parametrize(("budget_s", "packed"), [(5.0, 1), (100.0, 7)])
    def test_packs_what_was_measured_and_no_row_of_what_was_not(
        self,
        tmp_path: Path,
        commands: list[list[str]],
        monkeypatch: pytest.MonkeyPatch,
        budget_s: float,
        packed: int,
    ) -> None:
        """Once when a part begins, which may be the last that the suite does, once when it ends, and at the end."""
        found: list[Path] = []
        monkeypatch.setattr(
            running, "pack", lambda folder, archive: found.append(archive)
        )
        parts = tuple(replace(self.PART, name=name) for name in ("a", "b", "c"))
        archive = str(tmp_path / "suite.tar.xz")
        run_suite(
            suite(tmp_path / "card", budget_s=budget_s, parts=parts, archive=archive)
        )
        assert found == [Path(archive)] * packed
        assert len(commands) == packed // 2

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "holds the record of another card"),
            ("{", "not the record of a suite"),
        ],
    )
    def test_a_record_of_another_device_or_a_damaged_one_is_refused(
        self, tmp_path: Path, content: str | None, said: str
    ) -> None:
        write_record(SuiteRecord("another card", ""), tmp_path)
        if content is not None:
            (tmp_path / "suite.json").write_text(content)
        with pytest.raises(UsageError, match=said):
            run_suite(suite(tmp_path))


class TestProcess:
    def test_one_that_hangs_is_killed_with_its_children(self, tmp_path: Path) -> None:
        run = run_limited(
            ["sh", "-c", "trap '' TERM; sleep 60 & echo $!; wait"],
            tmp_path / "log",
            0.5,
            0.3,
        )
        assert run.stopped
        assert run.code == -signal.SIGKILL
        assert run.seconds < 10
        child = int((tmp_path / "log").read_text())
        assert eventually(lambda: has_ended(child), 5)

    def test_output_and_errors_are_kept_apart_if_asked(self, tmp_path: Path) -> None:
        command = [
            sys.executable,
            "-c",
            "import sys; print(1); print(2, file=sys.stderr); sys.exit(7)",
        ]
        assert (
            run_limited(command, tmp_path / "log", 20.0, out=tmp_path / "out").code == 7
        )
        assert ((tmp_path / "out").read_text(), (tmp_path / "log").read_text()) == (
            "1\n",
            "2\n",
        )

    def test_an_interrupted_suite_ends_its_part(self, tmp_path: Path) -> None:
        """The parent is a process of its own, because the interrupt is meant for it."""
        script = (
            "from pathlib import Path; import signal, sys; from sdopt.apps.suite.process import run_limited;"
            # A shell's background job ignores SIGINT, and so would the parent.
            "signal.signal(signal.SIGINT, signal.default_int_handler);"
            "run_limited([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)'], Path('log'), 60)"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", script]
        parent = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
        )
        log = tmp_path / "log"
        assert eventually(lambda: log.is_file() and bool(log.read_text()), 20)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(20) != 0
        assert eventually(lambda: working_in(tmp_path) == [], 60)


class TestFindings:
    def test_of_tests_that_were_stopped_on_the_way(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(
            "tests/a.py::test_one PASSED      [ 20%]\ntests/a.py::test_two[x y] FAILED  [ 40%]\n"
            "tests/b.py::test_three SKIPPED (no) [ 60%]\ntests/b.py::test_four "
        )
        first, failed = findings_of_tests(log)
        assert first.said == "1 passed, 1 failed, 1 skipped"
        assert (failed.name, failed.state) == ("tests/a.py::test_two[x y]", "failed")

    def test_of_the_machine(self, tmp_path: Path) -> None:
        found = {
            "device": {"name": "a card", "driver": "580.1"},
            "packages": {"torch": "2.11.0"},
            "python": "3.12.3",
            "platform": "Linux",
            "start_method": "forkserver",
            "options": [{"runs": True}, {"runs": False}],
        }
        found["ceilings"] = [
            {"kind": "bf16", "rate": 788.4, "unit": "TFLOP/s", "failure": ""},
            {
                "kind": "int8",
                "rate": None,
                "unit": "TOP/s",
                "failure": "RuntimeError: no kernel",
            },
        ]
        (tmp_path / "doctor.json").write_text(json.dumps(found))
        machine, bf16, int8, options = machine_findings(tmp_path / "doctor.json")
        assert (machine.name, machine.said) == (
            "a card",
            "driver 580.1, Python 3.12.3, torch 2.11.0, Linux",
        )
        assert bf16.said == "788.4 TFLOP/s"
        assert (int8.state, int8.said) == ("failed", "RuntimeError: no kernel")
        assert options.said.startswith("1 of 2 should run here")

    def test_of_options_that_have_no_result(self, result: StudyResult) -> None:
        """What was not measured is listed option by option, and never as what cannot run."""
        row = result.variant("bfloat16")
        row.name, row.status, row.reason, row.measurements = (
            "precision bf16",
            Status.TIMEOUT,
            "more than 5 s",
            [],
        )
        for edge in result.comparisons:
            edge.candidate = (
                row.name if edge.candidate == "bfloat16" else edge.candidate
            )
        tried = ["precision=bf16", "precision=fp16"]
        found = {
            finding.name: (finding.state, finding.said)
            for finding in option_findings(result, tried)
        }
        assert found["precision=bf16"] == ("not run", "time limit: more than 5 s")
        assert found["precision=fp16"] == (
            "not run",
            "the part ended before it was measured",
        )
        row.status = Status.FAILED
        [again] = [
            finding
            for finding in option_findings(result, tried)
            if finding.name == "precision=bf16"
        ]
        assert (again.state, again.said) == ("cannot run", "failed: more than 5 s")
        assert {finding.state for finding in option_findings(None, tried)} == {
            "not run"
        }


class TestNoise:
    def test_is_that_of_the_samples(self, result: StudyResult) -> None:
        rng = np.random.default_rng(0)
        timed = [
            m
            for variant in result.variants
            for m in variant.measurements
            if m.shapes[0].latency_s
        ]
        offsets = rng.normal(0, 0.05, len(timed))
        for measured, offset in zip(timed, offsets, strict=True):
            retime(measured.shapes[0], left_out=[])
            retime(measured.shapes[0], list(np.exp(offset + rng.normal(0, 0.01, 400))))
            measured.shapes[0].calls[0].seconds *= 1.5
        noise = noise_of(result)
        assert noise["processes"] == len(timed)
        assert noise["between_processes"] == pytest.approx(
            np.std(offsets, ddof=1), rel=0.1
        )
        assert noise["between_rounds"] == pytest.approx(
            np.hypot(0.01, np.log(1.5) / 20), rel=0.1
        )
        assert noise["first_round"] == pytest.approx(0.5, abs=0.02)
        assert noise["of_ratio"] == pytest.approx(0.05 * np.sqrt(2), rel=0.5)


def test_what_a_study_found_names_what_each_row_is_a_gain_over() -> None:
    """Rows that add to one another are compared with the row below, the others with the baseline."""
    result = read_result(ROOT / "outputs" / "records" / "nvidia-h200" / "sdxl")
    said = {finding.name: finding.said for finding in study_findings(result)}
    assert "0.86× of half precision" in said["+ channels last"]
    assert "2.09× of + CUDA graphs" in said["+ deep cache"]
