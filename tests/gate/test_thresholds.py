"""What counts as faster or as more memory is a key of the protocol, with or without a gate, on every surface."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from sdopt.gate.judge import judge
from sdopt.record.comparisons import Interval
from sdopt.record.files import read_result, write_result
from sdopt.record.records import StudyResult
from sdopt.record.verdicts import Verdict
from sdopt.report.answer_json import answer_of
from sdopt.report.catalog import markdown_table
from sdopt.report.charts.comparisons import forest
from sdopt.report.notes import caveats_of
from sdopt.report.summary import summary_of
from sdopt.report.tables import to_csv
from sdopt.schema import Gate, Rule
from sdopt.statistics.scale import Speed
from sdopt.tracking.contents import verdict_tags
from tests.command import sdopt
from tests.fixtures import Composers
from tests.gate.test_judge import FIT
from tests.records import reconfigure
from tests.report.test_charts import rows

RECORD = Path(__file__).parents[2] / "outputs" / "records" / "amd-epyc" / "quickstart"
NAME = "channels last"


@pytest.fixture
def study() -> StudyResult:
    """One option that is 10 % faster, with an interval, beside a baseline that is steady; no gate judged it."""
    result = deepcopy(read_result(RECORD))
    result.variants = [
        row
        for row in result.variants
        if row.is_control or row.name in (result.baseline, NAME)
    ]
    names = {row.name for row in result.variants}
    result.comparisons = [
        edge for edge in result.comparisons if edge.candidate in names
    ]
    result.judgements, result.gate, result.looks = [], "", []
    [edge] = [edge for edge in result.comparisons if edge.candidate == NAME]
    edge.shapes[0].speedup = Interval(1.1, 1.08, 1.12, 0.95, 3, "process")
    for edge in result.comparisons:
        edge.shapes[0].floor = 1.005
    return result


def said(result: StudyResult) -> set[str]:
    """The verdict on the speed of the one option, as each surface has it."""
    summary = summary_of(result)
    [row] = summary.candidates
    line = next(line for line in to_csv(summary).splitlines() if line.startswith(NAME))
    # The repeated baseline has a row of its own in the plot.
    plotted = {row["name"]: row["speed"] for row in rows(forest(summary))}
    words = [*Speed]
    found = {
        str(row.speed),
        str(answer_of(summary, Path()).candidates[0].speed),
        verdict_tags(summary, row.variant)["speed"],
        next(str(word) for word in words if f",{word}," in line),
        str(plotted[NAME]),
    }
    table = next(
        line
        for line in markdown_table(summary).splitlines()
        if line.startswith(f"| {NAME}")
    )
    return found | {next(str(word) for word in words if str(word) in table)}


def band(result: StudyResult) -> float:
    """The right edge of the plot's shaded band."""
    spec = forest(summary_of(result))
    assert spec is not None
    [shaded] = [layer for layer in spec["layer"] if layer["mark"]["type"] == "rect"]
    edge: float = shaded["data"]["values"][0]["high"]
    return edge


def test_a_run_takes_it_without_a_gate(composer: Composers) -> None:
    job = composer(["precision=bf16", "protocol.smallest_speedup=0.2"])
    assert not job.current.gate.judges
    plan = job.current.study.plan(job)
    assert {variant.config.protocol.smallest_speedup for variant in plan.variants} == {
        0.2
    }


def test_every_surface_follows_it(study: StudyResult) -> None:
    assert said(study) == {"faster"}
    assert "1.10× faster" in summary_of(study).sentence
    reconfigure(study, "protocol", smallest_speedup=0.2)
    assert said(study) == {"too close to call"}
    assert band(study) == 1.2
    summary = summary_of(study)
    assert "protocol.smallest_speedup" in summary.candidates[0].because
    assert any(
        "20 % (protocol.smallest_speedup)" in note for note in caveats_of(summary)
    )
    reconfigure(study, "protocol", smallest_speedup=0.001)
    assert band(study) == 1.005, "two identical baselines differed by more"
    study.comparisons[0].shapes[0].speedup = Interval(
        0.9, 0.88, 0.92, 0.95, 3, "process"
    )
    assert said(study) == {"slower"}


def test_a_gate_tolerates_what_is_too_small_to_count(study: StudyResult) -> None:
    """A rule against any loss, and a variant that takes twice as long: it fails unless even that is too small."""
    gate = Gate(
        "g",
        {
            contract: [Rule("speedup", "at_least", limit=1.0)]
            for contract in ("exact", "equivalent", "lossy")
        },
    )
    for measurement in study.variant(NAME).measurements:
        for call in measurement.shapes[0].calls:
            call.seconds *= 2
    verdicts = []
    for smallest in (0.01, 3.0):
        reconfigure(study, "protocol", smallest_speedup=smallest, interference=None)
        judge(study, replace(gate, must_pay=False), FIT)
        verdicts += [
            ruling.verdict
            for ruling in study.judgements[0].rulings
            if ruling.metric == "speedup"
        ]
    assert verdicts == [Verdict.FAIL, Verdict.PASS]


def test_a_gate_sets_another_one_for_a_finished_result(
    study: StudyResult, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_result(study, folder)
    done = sdopt(
        tmp_path,
        "gate",
        str(folder),
        "protocol.smallest_speedup=0.2",
        "gate=report_only",
    )
    assert done.code == 0, done.shown
    kept = read_result(folder)
    assert kept.config.protocol.smallest_speedup == 0.2
    assert said(replace(kept, judgements=[])) == {"too close to call"}
    assert "too close to call" in sdopt(tmp_path, "show", str(folder)).out
    for name in ("table.md", "table.csv"):
        assert "too close to call" in (folder / name).read_text(), name
    again = sdopt(tmp_path, "gate", str(folder), "gate=report_only")
    assert again.code == 0, again.shown
    assert read_result(folder).config.protocol.smallest_speedup == 0.2, (
        "what was recorded holds until it is set again"
    )
    shown = sdopt(tmp_path, "show", str(folder), "protocol.smallest_speedup=0.2")
    assert shown.code == 2
    assert "protocol.smallest_speedup=0.2: has no effect" in shown.shown
    refused = sdopt(tmp_path, "gate", str(folder), "protocol.rounds=9")
    assert refused.code == 2
    assert "protocol.rounds=9: has no effect on a finished result" in refused.shown
