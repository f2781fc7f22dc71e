"""A variant that is clearly slower is not timed further, and is a result like any other, on every surface."""

import json
from pathlib import Path
from typing import Any

import pytest

from sdopt.contract import Contract
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import exit_code, judge
from sdopt.record.files import parse_result, to_json
from sdopt.record.records import Promise, Status, StudyResult
from sdopt.record.verdicts import Verdict
from sdopt.report.answer_json import answer_of
from sdopt.report.answer_json import to_json as answer_json
from sdopt.report.charts.comparisons import forest
from sdopt.report.summary import summary_of
from sdopt.report.sweep import exit_code as folder_code
from sdopt.report.tables import ranking, to_csv
from sdopt.schema import Gate, Rule
from sdopt.statistics.comparing import compare
from sdopt.statistics.effects import effects_of
from sdopt.statistics.scale import Speed
from sdopt.study.resume import missing_of
from sdopt.tracking.contents import logged_metrics, variant_run
from sdopt.variant import Variant
from tests.fakes import Fakes, NoMeter, failing, fake_study, run_fake


@pytest.fixture(autouse=True)
def meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdopt.study.giving_up.InterferenceMeter", NoMeter)


SECONDS = {"quick": 0.05, "slow": 2.0, "slowest": 4.0}


def measured(
    folder: Path,
    names: tuple[str, ...] = ("quick", "slow"),
    claims: Any = None,
    **protocol: Any,
) -> tuple[StudyResult, Fakes]:
    study = fake_study(
        names,
        **{
            "rounds": 3,
            "warmup": 1,
            "replicates": 3,
            "interference": None,
            "give_up": 3.0,
            **protocol,
        },
    )
    for row in study[1].variants:
        row.promises = (
            {"attention": Promise(Contract.EXACT, claims)}
            if claims and row.name in names
            else {}
        )
    return run_fake(folder, study, Fakes(seconds=SECONDS))


@pytest.mark.parametrize("schedule", ["interleaved", "blocks"])
def test_is_not_timed_further_and_all_others_are(tmp_path: Path, schedule: str) -> None:
    result, fakes = measured(tmp_path, schedule=schedule)
    slow = result.variant("slow")
    assert slow.status is Status.SLOWER
    assert len(slow.measurements) == 1
    assert sum(worker.variant.name == "slow" for worker in fakes.started) == 1
    assert not slow.images
    for name in ("baseline", "quick"):
        assert all(
            len(m.shapes[0].deciding_s) >= 3 for m in result.variant(name).measurements
        )
    assert {len(m.shapes[0].trial_s) for m in result.variant("quick").measurements} == {
        0
    }
    # What is decided lacks nothing, also after it was written and read.
    assert not missing_of(parse_result(to_json(result))).variants


@pytest.mark.parametrize("schedule", ["interleaved", "blocks"])
def test_alone_leaves_nothing_to_compare_and_the_study_ends(
    tmp_path: Path, schedule: str
) -> None:
    result, fakes = measured(tmp_path, ("slow",), schedule=schedule)
    assert (result.status, result.variant("slow").status) == ("finished", "slower")
    baseline = result.baseline_variant
    assert len(baseline.measurements) == 1
    passes = {"interleaved": 1, "blocks": 2}[schedule]  # before and after the control
    assert len(baseline.measurements[0].shapes[0].deciding_s) == passes
    assert sum(worker.variant.name == "slow" for worker in fakes.started) == 1
    assert not missing_of(parse_result(to_json(result))).variants
    [note] = [note for note in summary_of(result).notes if "left out" in note]
    assert "2 of 3 rounds" in note
    assert "2 of 3 processes of baseline" in note


@pytest.mark.parametrize("claims", [None, ["memory"]])
def test_is_known_where_memory_runs_out_later(
    tmp_path: Path, claims: list[str] | None
) -> None:
    """The rest is measured in blocks, in a session that forgets what broke off before its first round."""
    study = fake_study(
        ("quick", "slow"), rounds=4, warmup=1, interference=None, give_up=3.0
    )
    if claims:
        study[1].variant("slow").promises = {
            "attention": Promise(Contract.EXACT, claims)
        }
    fault = failing(Status.OUT_OF_MEMORY, "time_once", call=2 + 3, beside=True)
    result, _ = run_fake(tmp_path, study, Fakes({"quick": fault}, seconds=SECONDS))
    assert [session.schedule for session in result.sessions] == [
        "interleaved",
        "blocks",
    ]
    slow = result.variant("slow")
    assert slow.given_up
    assert slow.status is (Status.OK if claims else Status.SLOWER)
    assert result.variant("quick").status is Status.OK
    row = summary_of(result).row("slow")
    assert row is not None
    assert row.at_least_slower is not None


@pytest.mark.parametrize(
    ("reasons", "trial_calls"), [([], 2), (["computed in software"], 1)]
)
def test_the_first_call_counts_where_an_option_is_known_to_be_slow_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reasons: list[str],
    trial_calls: int,
) -> None:
    monkeypatch.setattr(Variant, "slow_here", lambda *_: reasons)
    result, _ = measured(tmp_path)
    slow = result.variant("slow")
    assert slow.status is Status.SLOWER
    # The baseline is called before and after each.
    assert len(slow.measurements[0].shapes[0].trial_beside_s) == trial_calls + 1
    assert result.variant("quick").status is Status.OK


def test_is_shown_on_every_surface(tmp_path: Path) -> None:
    result, _ = measured(tmp_path, ("quick", "slowest", "slow"))
    summary = summary_of(result)
    row = summary.row("slow")
    assert row is not None
    assert row.speed is Speed.SLOWER
    assert row.at_least_slower is not None
    assert row.at_least_slower == pytest.approx(20 / 1.2, rel=0.05)
    names = [other.name for other in summary.rows]
    assert names == ["quick", "baseline", "slow", "slowest"]
    [cells] = [cells for cells in ranking(summary).rows if str(cells[0]) == "slow"]
    assert "≤ 0.06×" in [str(cell) for cell in cells]
    spec = json.dumps(forest(summary), ensure_ascii=False)
    assert "≤ 0.06×" in spec
    [candidate] = [
        c
        for c in answer_json(answer_of(summary, tmp_path))["candidates"]
        if c["name"] == "slow"
    ]
    assert candidate["speed"] == "slower"
    assert candidate["at_least_slower"] == row.at_least_slower
    header, *lines = (line.split(",") for line in to_csv(summary).splitlines())
    [line] = [line for line in lines if line[0] == "slow"]
    assert float(line[header.index("speedup_high")]) == pytest.approx(
        1 / row.at_least_slower
    )
    assert line[header.index("speed")] == "slower"
    assert logged_metrics(summary, row.variant)["speedup_high"] == pytest.approx(
        1 / row.at_least_slower
    )
    assert (
        variant_run(summary, row.variant, tmp_path, images=False).status == "FINISHED"
    )
    alone, _ = measured(tmp_path, ("slow",))
    assert "slow is at least 16." in summary_of(alone).sentence


@pytest.mark.parametrize("claims", [["latency"], ["memory"]])
def test_is_no_failure_of_the_study(tmp_path: Path, claims: list[str]) -> None:
    measured(tmp_path, claims=claims)
    assert folder_code(tmp_path) == 0


def test_of_memory_alone_still_has_its_memory_and_its_images(tmp_path: Path) -> None:
    result, _ = measured(tmp_path, claims=["memory"])
    slow = result.variant("slow")
    assert slow.status is Status.OK
    assert slow.given_up
    assert len(slow.peaks_gib) == 3
    assert slow.images
    assert not slow.samples
    assert not missing_of(result).variants
    row = summary_of(result).row("slow")
    assert row is not None
    assert row.speed is Speed.SLOWER
    assert row.memory is not None
    assert row.memory.interval.low is not None


def test_a_variant_that_others_are_compared_with_is_timed(tmp_path: Path) -> None:
    study = fake_study(
        ("slow", "quick"),
        rounds=2,
        warmup=1,
        replicates=3,
        interference=None,
        give_up=3.0,
    )
    [edge] = [edge for edge in study[1].comparisons if edge.candidate == "quick"]
    edge.reference = "slow"
    result, _ = run_fake(tmp_path, study, Fakes(seconds=SECONDS))
    assert result.variant("slow").status is Status.OK
    assert edge.shapes[0].speedup is not None
    # But not for one that is as slow.
    (tmp_path / "both").mkdir()
    study = fake_study(
        ("slow", "slower"),
        rounds=2,
        warmup=1,
        replicates=3,
        interference=None,
        give_up=3.0,
    )
    [edge] = [edge for edge in study[1].comparisons if edge.candidate == "slower"]
    edge.reference = "slow"
    result, _ = run_fake(
        tmp_path / "both", study, Fakes(seconds=SECONDS | {"slower": 3.0})
    )
    assert {result.variant(name).status for name in ("slow", "slower")} == {
        Status.SLOWER
    }


def test_a_baseline_that_fails_in_a_trial_ends_the_study(tmp_path: Path) -> None:
    study = fake_study(
        ("slow",), rounds=2, warmup=1, replicates=1, interference=None, give_up=3.0
    )
    fakes = Fakes({"baseline": failing(Status.KILLED, "time_once", call=2)}, SECONDS)
    result, _ = run_fake(tmp_path, study, fakes)
    assert result.variant("baseline").status is Status.KILLED
    assert result.variant("slow").status is Status.INTERRUPTED


@pytest.mark.parametrize(
    ("claims", "rules", "verdict", "code"),
    [
        (["latency"], {}, Verdict.FAIL, 1),
        (
            [],
            {Contract.EXACT: [Rule("speedup", "at_least", limit=0.95)]},
            Verdict.FAIL,
            1,
        ),
        (
            [],
            {Contract.EXACT: [Rule("speedup", "at_least", limit=0.01)]},
            Verdict.NOT_COMPARABLE,
            3,
        ),
        ([], {Contract.EXACT: [Rule("mse", "exact")]}, Verdict.NOT_COMPARABLE, 3),
    ],
)
def test_a_gate_fails_it_where_speed_is_asked_for(
    tmp_path: Path, claims: list[str], rules: Any, verdict: Verdict, code: int
) -> None:
    result, _ = measured(tmp_path, ("slow",), claims=claims)
    result.variant("slow").choices["attention"] = "other"
    gate = Gate("mine", must_pay=True, rules=rules)
    judge(result, gate, Fit())
    [judged] = result.judgements
    assert judged.verdict is verdict
    assert exit_code(result.judgements, gate) == code


def test_cells_of_a_factorial_study_that_were_given_up_leave_only_effects_that_can_be_told_apart(
    tmp_path: Path,
) -> None:
    """With one of four cells missing, neither main effect can be told from the interaction."""
    names = ("a", "b", "a, b")
    study = fake_study(
        names, rounds=2, warmup=1, replicates=3, interference=None, give_up=3.0
    )
    fakes = Fakes(seconds={"a": 0.08, "b": 0.09, "a, b": 2.0})
    result, _ = run_fake(tmp_path, study, fakes)
    for row in result.variants:
        row.choices = {
            "x": "a" if "a" in row.name.split(", ") else "n",
            "y": "b" if "b" in row.name.split(", ") else "n",
        }
    effects = effects_of(result, ["x=a", "y=b"])
    assert all(effect.speedup is None and effect.aliased_with for effect in effects)
    # If all cells of an option were given up, the other one is estimated without them.
    for name in ("b", "a, b"):
        row = result.variant(name)
        row.given_up, row.status = True, Status.SLOWER
        row.measurements = result.variant("a, b").measurements
    compare(result)
    first, second, both = effects_of(result, ["x=a", "y=b"])
    assert first.speedup is not None
    assert first.speedup.estimate == pytest.approx(1.25, rel=0.05)
    assert second.aliased_with
    assert both.aliased_with
