"""A column is one entry of `COLUMNS`: it is then on every surface that shows variants."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sdopt.apps.loadtest import command as load_command
from sdopt.apps.loadtest.config import load_config
from sdopt.apps.loadtest.report import blocks_of as load_blocks
from sdopt.apps.loadtest.run import columns_of
from sdopt.config.composer import composer_of
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.report import columns
from sdopt.report.answer import answer_shown
from sdopt.report.answer_json import answer_of, to_json
from sdopt.report.catalog import markdown_table
from sdopt.report.columns import Column
from sdopt.report.markdown import written
from sdopt.report.page import html
from sdopt.report.page.html import html_page
from sdopt.report.page.sections import study_page
from sdopt.report.summary import Summary, summary_of
from sdopt.report.sweep import Sweep
from sdopt.report.tables import to_csv, to_dataframe
from sdopt.schema import Gate, Tracking
from sdopt.search.answer import entry_of
from sdopt.search.command import trial_run
from sdopt.search.config import search_config
from sdopt.search.findings import findings_of
from sdopt.search.record import SearchRecord, markdown_of
from sdopt.search.space import Combination
from sdopt.statistics.rows import Row
from sdopt.tracking.client import TrackedRun
from sdopt.tracking.contents import logged_metrics, verdict_tags
from tests.apps.loadtest.test_loadtest import record as load_record
from tests.command import ROOT, SMOKE

RECORD = ROOT / "outputs" / "records" / "amd-epyc" / "quickstart"
NAME = "deep cache"


def calls_per_s(row: Row) -> float | None:
    return 1 / row.latency.estimate if row.latency else None


def pace(row: Row) -> str | None:
    return "brisk pace" if row.latency else None


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> StudyResult:
    """A study, while a number and a word are registered as columns."""
    number = Column("calls_per_s", "calls a second{unit}", calls_per_s, tracked=True)
    word = Column("pace", "pace", pace, number=False, tracked=True)
    monkeypatch.setattr(columns, "COLUMNS", (*columns.COLUMNS, number, word))
    return read_result(RECORD)


@pytest.fixture
def summary(result: StudyResult) -> Summary:
    return summary_of(result)


def value(summary: Summary) -> float:
    row = summary.row(NAME)
    assert row is not None
    assert row.latency is not None
    return 1 / row.latency.estimate


def has(text: str, summary: Summary) -> bool:
    """Whether a table has both columns, with the figure of one variant."""
    return all(
        part in text
        for part in ("calls a second", "pace", "brisk pace", f"{value(summary):.3g}")
    )


class TestStudy:
    def test_tables(self, summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(html, "_library", lambda: "")
        stream = StringIO()
        Console(file=stream, width=240).print(answer_shown(summary, 240))
        assert has(stream.getvalue(), summary)
        assert has(markdown_table(summary), summary)
        assert has(html_page(study_page(summary, RECORD)).decode(), summary)

    def test_a_narrow_terminal_leaves_it_out_first(self, summary: Summary) -> None:
        stream = StringIO()
        Console(file=stream, width=80).print(answer_shown(summary, 80))
        assert "calls a second" not in stream.getvalue()
        assert "speed-up" in stream.getvalue()

    def test_data(self, summary: Summary) -> None:
        frame = to_dataframe(summary).set_index("variant")
        assert frame.loc[NAME, "calls_per_s"] == pytest.approx(value(summary))
        assert frame.loc[NAME, "pace"] == "brisk pace"
        heading = to_csv(summary).splitlines()[0].split(",")
        assert {"calls_per_s", "pace"} <= {*heading}
        answer: Any = to_json(answer_of(summary, RECORD))
        [candidate] = [one for one in answer["candidates"] if one["name"] == NAME]
        assert candidate["columns"]["calls_per_s"] == pytest.approx(value(summary))
        assert candidate["columns"]["pace"] == "brisk pace"
        assert candidate["columns"]["speedup"] == candidate["speedup"]["estimate"]

    def test_mlflow(self, summary: Summary) -> None:
        variant = summary.result.variant(NAME)
        assert logged_metrics(summary, variant)["calls_per_s"] == pytest.approx(
            value(summary)
        )
        assert verdict_tags(summary, variant)["pace"] == "brisk pace"
        assert {"metrics.`calls_per_s`", "tags.`pace`"} <= {*TrackedRun().leaderboard}


def test_a_sweep(summary: Summary) -> None:
    sweep = Sweep(Path(), {"0": summary.result}, {})
    assert has(written(sweep.blocks()), summary)


def test_a_search(summary: Summary) -> None:
    config = search_config(["search.groups=[caching]"])
    finding = findings_of(summary.result, config, Gate())[NAME]
    entry = entry_of(
        Combination(NAME, ("caching=deepcache",)), "not enough runs", "", [finding]
    )
    record = SearchRecord(
        "mine", "", "", [], ["latency"], "mse", "", [entry], {}, [], []
    )
    assert has(markdown_of(record), summary)
    run = trial_run(entry, record, {}, 0)
    assert run.metrics["calls_per_s"] == pytest.approx(value(summary))
    assert run.tags["pace"] == "brisk pace"


def test_a_load_test(
    result: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = load_record([2.0], [4.0])
    load, _, _ = load_config(["load.rates=[1,2]"])
    with composer_of([*SMOKE]) as composer:
        variant = composer.variant("mine")
    for row in record.rows:
        row.columns = columns_of(variant, row.service_s)
    text = written(load_blocks(record))
    assert "calls a second" in text
    assert "| 5 | brisk pace |" in text, "of calls of 0.2 s"

    logged: list[TrackedRun] = []
    monkeypatch.setattr(
        load_command,
        "ask",
        lambda _put, _tracking, _name, run, *_more: logged.append(run),
    )
    record.write(tmp_path)
    load_command._log(record, tmp_path, Tracking(), load, text)
    [run] = logged
    assert {row.metrics["calls_per_s"] for row in run.below} == {5.0}
    assert {row.tags["pace"] for row in run.below} == {"brisk pace"}
    assert (
        json.loads((tmp_path / "load.json").read_text())["rows"][0]["columns"]["pace"]
        == "brisk pace"
    )
