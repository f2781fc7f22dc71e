"""What a study says of its programs: only code that was run, and drew the measured image, is handed out."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdopt.conclusion import Conclusion
from sdopt.programs import running
from sdopt.programs.running import compared, program_drawn, time_limit
from sdopt.record.files import read_result, write_result
from sdopt.record.programs import Program
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import Measurement, ShapeSamples
from sdopt.record.scores import ImageRecord
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.report.answer import use_of
from sdopt.report.answer_json import answer_of
from sdopt.report.blocks import Code, Notes
from sdopt.report.program import program_of, said_of
from sdopt.report.summary import Summary, summary_of
from sdopt.variant import Variant
from sdopt.worker.child import ChildDiedError, ChildTimeoutError
from tests.command import ROOT, SMOKE, sdopt
from tests.fixtures import CPU, Composers

RECORD = ROOT / "outputs" / "records" / "amd-epyc" / "quickstart"

DRAWN = Program(
    "whole\n", ["one", "two"], draws=True, error=2e-7, limit=1e-6, levels=1, seconds=2.0
)
OTHER = Program(
    "whole\n",
    ["one", "two"],
    reason="its image is 88 of 255 levels off (mean squared error 0.1)",
)


@pytest.fixture
def result() -> StudyResult:
    return read_result(RECORD)


def summary_with(result: StudyResult, program: Program | None) -> Summary:
    summary = summary_of(result)
    assert summary.best is not None
    summary.best.variant.program = program
    return summary_of(result)


@pytest.mark.parametrize(
    "program", [None, OTHER, DRAWN], ids=["none", "another image", "the image"]
)
def test_no_code_that_did_not_draw_the_image(
    result: StudyResult, tmp_path: Path, program: Program | None
) -> None:
    summary = summary_with(result, program)
    assert summary.best is not None
    blocks = use_of(summary)
    code = [
        block for block in blocks if isinstance(block, Code) and "To use" in block.title
    ]
    [said] = [block.lines for block in blocks if isinstance(block, Notes)]
    handed_out = program is DRAWN
    assert (
        bool(code)
        == handed_out
        == bool(summary.best.lines)
        == bool(program_of(summary.best.variant))
    )
    assert ("makes that image" in said[0]) == handed_out
    candidate = next(
        one
        for one in answer_of(summary, tmp_path).candidates
        if one.name == summary.best.name
    )
    assert candidate.program == ("whole\n" if handed_out else None)
    assert candidate.program_run == said_of(program)
    write_result(result, tmp_path)
    assert read_result(tmp_path).variant(summary.best.name).program == program


def test_lines_alone_are_no_whole_program(result: StudyResult, tmp_path: Path) -> None:
    """Others cannot load random weights: nothing says of a program that is not there that it was run."""
    program = replace(DRAWN, text="")
    summary = summary_with(result, program)
    assert summary.best is not None
    [candidate] = [
        one
        for one in answer_of(summary, tmp_path).candidates
        if one.name == summary.best.name
    ]
    assert candidate.program is None
    assert candidate.program_run.startswith("No whole program is shown")
    [said] = [block.lines for block in use_of(summary) if isinstance(block, Notes)]
    assert said[0].startswith("This code was run")


def test_an_image_is_held_against_the_measured_one(tmp_path: Path) -> None:
    pixels = np.full((8, 8, 3), 100, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    same = compared(Program(), pixels, tmp_path / "a.png", 1e-6)
    assert (same.draws, same.error, same.levels, same.reason) == (True, 0.0, 0, "")
    other = pixels.copy()
    other[0, 0, 0] = 130
    off = compared(Program(), other, tmp_path / "a.png", 1e-6)
    assert not off.draws
    assert off.levels == 30
    assert "30 of 255" in off.reason
    assert compared(Program(), other, tmp_path / "a.png", 1e-2).draws
    assert (
        "another size"
        in compared(Program(), pixels[:4], tmp_path / "a.png", 1e-6).reason
    )


def test_a_program_may_take_as_long_as_its_worker_took(result: StudyResult) -> None:
    row = result.candidates[0]
    for start_s, limit_s in ((1.0, 120.0), (40.0, 200.0), (9000.0, 900.0)):
        row.measurements = [
            Measurement(0, shapes=[ShapeSamples(cold_start_s=start_s)], load_s=0.0)
        ]
        assert time_limit(row) == limit_s


class TestOfAStudy:
    """With processes that only answer."""

    @pytest.fixture
    def run(
        self,
        result: StudyResult,
        composer: Composers,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Callable[..., list[str]]:
        variant = composer([*SMOKE]).variant("it")
        named = {row.name: replace(variant, name=row.name) for row in result.candidates}
        result.config = replace(
            result.config, protocol=replace(result.config.protocol, programs_s=100.0)
        )
        for row in result.candidates:
            row.status, row.images = (
                Status.OK,
                [ImageRecord("a", 0, 0, 0, "images/a.png")],
            )

        def run(answer: Callable[[Variant], Program]) -> list[str]:
            asked: list[str] = []

            def call(
                _context: object,
                _run: object,
                variant: Variant,
                *_of: object,
                timeout_s: float,
            ) -> Program:
                asked.append(variant.name)
                assert timeout_s > 0
                return answer(variant)

            monkeypatch.setattr(running, "call_apart", call)
            end = Conclusion(result.config, tmp_path, None)  # type: ignore[arg-type]
            end.run_programs(summary_of(result), list(named.values()), CPU)
            return asked

        return run

    def test_each_is_run_once_the_best_first(
        self, result: StudyResult, run: Callable[..., list[str]]
    ) -> None:
        best = summary_of(result).best
        assert best is not None
        asked = run(lambda _: DRAWN)
        assert asked[0] == best.name
        assert sorted(asked) == sorted(row.name for row in result.candidates)
        assert run(lambda _: DRAWN) == [], "what was run is not run again"

    def test_what_is_faster_and_not_recommended_comes_later(
        self, result: StudyResult, run: Callable[..., list[str]]
    ) -> None:
        """Else the time may be spent on programs whose code nobody is shown."""
        fastest = summary_of(result).best
        assert fastest is not None
        for judgement in result.judgements:
            if judgement.candidate == fastest.name:
                judgement.verdict = Verdict.FAIL
                judgement.rulings.append(Ruling("tripwires", "", Verdict.FAIL, "black"))
            elif judgement.candidate == "bfloat16":
                judgement.verdict, judgement.gains = Verdict.PASS, ["speedup"]
        best = summary_of(result).best
        assert best is not None
        assert best.name != fastest.name
        assert run(lambda _: DRAWN)[:2] == [best.name, fastest.name]

    @pytest.mark.parametrize(
        "error", [ChildTimeoutError(), ChildDiedError(-11), OSError("no process")]
    )
    def test_what_goes_wrong_is_a_reason(
        self, result: StudyResult, run: Callable[..., list[str]], error: Exception
    ) -> None:
        def fail(_: Variant) -> Program:
            raise error

        run(fail)
        assert all(
            row.program and row.program.reason and not row.program.draws
            for row in result.candidates
        )

    def test_an_interrupt_keeps_what_was_found(
        self, result: StudyResult, run: Callable[..., list[str]], tmp_path: Path
    ) -> None:
        done: list[str] = []

        def interrupted(variant: Variant) -> Program:
            if done:
                raise KeyboardInterrupt
            done.append(variant.name)
            return DRAWN

        with pytest.raises(KeyboardInterrupt):
            run(interrupted)
        kept = read_result(tmp_path)
        assert [row.name for row in kept.candidates if row.program] == done
        assert kept.status == result.status
        assert run(lambda _: DRAWN) == [
            row.name for row in _ranked(result) if row.name not in done
        ]

    def test_the_others_share_a_time(
        self,
        result: StudyResult,
        run: Callable[..., list[str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        now = [0.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])

        def slow(_: Variant) -> Program:
            now[0] += 60  # of 100
            return DRAWN

        asked = run(slow)
        assert len(asked) == 2
        left = [row for row in result.candidates if row.name not in asked]
        assert all(row.program is None for row in left), "a resumed study runs theirs"

    def test_none_is_asked_for(
        self, result: StudyResult, run: Callable[..., list[str]]
    ) -> None:
        protocol = replace(result.config.protocol, programs_s=0)
        result.config = replace(result.config, protocol=protocol)
        assert run(lambda _: DRAWN) == []
        assert all(row.program is None for row in result.candidates)


def _ranked(result: StudyResult) -> list[Any]:
    return [row.variant for row in summary_of(result).candidates]


def test_a_program_that_fails_says_why(
    composer: Composers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_print_to", lambda _: None)
    monkeypatch.setattr(running, "_forget_the_working_folder", lambda: None)
    monkeypatch.setattr(running, "variables", lambda *_: {})
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    scratch, fails = tmp_path / "scratch", "raise SystemExit('no ' + Path.cwd().name)"
    scratch.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "image_of", lambda _: exec(fails))
    found = program_drawn(
        composer([*SMOKE]).variant("it"),
        None,
        CPU,
        tmp_path,
        1e-6,
        tmp_path / "log",
        scratch,
    )
    assert not found.draws
    assert "SystemExit: no scratch" in found.reason, "it may be run in any folder"
    assert "pipe = StableDiffusionPipeline" in found.text


@pytest.mark.slow
def test_a_study_hands_out_what_it_ran(tmp_path: Path) -> None:
    changed = ("workload.size", "workload.steps", "protocol.programs_s")
    given = [word for word in SMOKE if not word.startswith(changed)]
    found = sdopt(
        tmp_path,
        "run",
        *given,
        "workload.steps=6",
        "caching=deepcache",
        "caching.interval=2",
    )
    assert found.code == 0, found.shown
    [row] = found.result.candidates
    assert row.program is not None
    assert row.program.draws, row.program.reason
    assert "caching.interval=2" in row.command
    assert '"caching.interval=2"' in row.program.text
    assert (
        "caching.interval=2" in (found.folder / "logs" / "program-01.log").read_text()
    )
