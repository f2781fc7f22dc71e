"""What a dry run expects of a study, from an earlier run of the same work and of no other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sdopt.record.files import write_result
from sdopt.record.records import Status
from sdopt.record.samples import Measurement, ShapeSamples
from sdopt.report.header import effort_of_sweep, show_plan
from sdopt.schema import Protocol
from sdopt.study.cost import StudyCost, cost_of
from sdopt.study.work import LEAST_REPORT_S, Sharing, programs_s
from tests.fakes import fake_study
from tests.records import timed

CALL_S = 2.0

SHARING = Sharing(cores=2, threads=1, on_gpu=False)


def earlier(folder: Path, **of: dict[str, Any]) -> None:
    """Writes the record of a run whose baseline takes `CALL_S` for a call; `of` has other keys, by section."""
    _, result, _ = fake_study(of=of)
    row = result.baseline_variant
    row.status = Status.OK
    row.measurements = [
        Measurement(0, shapes=[ShapeSamples(calls=timed([CALL_S] * 3))], load_s=1e-9)
    ]
    (folder / "run").mkdir()
    write_result(result, folder / "run")


def cost(folder: Path) -> StudyCost:
    plan, result, _ = fake_study()
    return cost_of([*plan.variants, plan.baseline], result, folder, SHARING)


def around_s(call_s: float = CALL_S) -> float:
    """What a command takes beside measuring: a report, and the program of the one candidate."""
    _, result, _ = fake_study()
    return LEAST_REPORT_S + programs_s(result.config.protocol, [call_s])


def test_counts_what_a_command_takes_beside_its_calls(tmp_path: Path) -> None:
    found = cost(tmp_path)
    protocol = Protocol()
    around = LEAST_REPORT_S + programs_s(protocol, [0.0])
    assert found.time_s(protocol, 0.0, 0.0, 0.0) == around
    assert found.time_s(protocol, 0.0, 0.0, 100.0) == around + 172
    starts = 10 * (found.starts + found.programs)
    assert found.time_s(protocol, 0.0, 10.0, 0.0) == around + starts


def test_is_that_of_the_same_work(tmp_path: Path) -> None:
    earlier(tmp_path)
    found = cost(tmp_path)
    assert found.seconds == pytest.approx(found.calls_alone * CALL_S + around_s())


def test_goes_by_the_number_of_steps(tmp_path: Path) -> None:
    _, result, _ = fake_study()
    earlier(tmp_path, workload={"steps": 2 * result.config.workload.steps})
    found = cost(tmp_path)
    assert found.seconds == pytest.approx(
        found.calls_alone * CALL_S / 2 + around_s(CALL_S / 2)
    )


@pytest.mark.parametrize(
    "of",
    [
        {"task": {"kind": "img2img", "strength": 0.3}},
        {"workload": {"guidance_scale": 1.0}},
        {"scheduler": {"class_name": "HeunDiscreteScheduler"}},
    ],
    ids=lambda of: next(iter(of)),
)
def test_other_work_tells_nothing(tmp_path: Path, of: dict[str, Any]) -> None:
    earlier(tmp_path, **of)
    expected = cost(tmp_path)
    assert expected.seconds is None
    # A call holds more than its weights, which may be loaded in another type than that of the files.
    assert expected.memory_gib is None


def test_variants_may_do_more_than_the_baseline(tmp_path: Path) -> None:
    earlier(tmp_path)
    plan, result, _ = fake_study()
    baseline, other = plan.variants
    several = replace(
        other,
        config=replace(
            other.config, workload=replace(other.config.workload, batch_size=4)
        ),
    )
    found = cost_of([baseline, several, baseline], result, tmp_path, SHARING)
    assert found.seconds == pytest.approx(
        found.calls_alone * 2 * CALL_S + around_s(2 * CALL_S)
    )


def test_of_a_sweep_is_the_sum_of_what_is_known() -> None:
    known = effort_of_sweep([60.0, None, 120.0])
    assert known == "all jobs: about 3 min, and 1 of unknown time"
    assert not effort_of_sweep([None])


@pytest.mark.parametrize(("budget_s", "limited"), [(9.0, True), (1e6, False)])
def test_a_budget_is_said_before_what_all_of_it_would_take(
    tmp_path: Path, budget_s: float, limited: bool
) -> None:
    earlier(tmp_path)
    plan, result, _ = fake_study(budget_s=budget_s)
    expected = cost_of([*plan.variants, plan.baseline], result, tmp_path, SHARING)
    assert expected.compiling == 0
    console = Console(record=True, width=200)
    show_plan(result, replace(expected, compiling=2), console)
    text = console.export_text()
    assert "without compiling (2 of 3 variants)" in text
    assert (
        "time: protocol.budget_s=9, and all of it would take about" in text
    ) is limited
    assert ("time: about" in text) is not limited
