"""What CI reads: JUnit XML, by the rules of Ant's schema and of Jenkins' written out, and GitHub's step summary."""

import fcntl
import os
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from runners.gate import main as gate
from sdopt.contract import Contract
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.report.summary import summary_of
from sdopt.report.verdicts import junit, summary_markdown
from sdopt.step_summary import append_step_summary
from tests.command import ROOT

DECIMAL, COUNT, TOKEN = r"\d+(\.\d+)?", r"\d+", r"\S(.*\S)?"
DATE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"

SUITE = {
    "name": TOKEN,
    "package": TOKEN,
    "id": COUNT,
    "hostname": TOKEN,
    "timestamp": DATE,
    "time": DECIMAL,
    "tests": COUNT,
    "failures": COUNT,
    "errors": COUNT,
    "skipped": COUNT,
}
"""The attributes that Ant's schema (windyroad's JUnit.xsd) requires of a suite, and `skipped`, which it allows; Jenkins'
allows each of them."""

CASE = {"name": TOKEN, "classname": TOKEN, "time": DECIMAL}


def require(element: ElementTree.Element, wanted: dict[str, str]) -> None:
    assert set(element.attrib) == set(wanted)
    for name, pattern in wanted.items():
        assert re.fullmatch(pattern, element.attrib[name], re.DOTALL), (
            name,
            element.attrib[name],
        )


def valid(content: bytes) -> ElementTree.Element:
    """Returns the root of what both schemas take."""
    root = ElementTree.fromstring(content)
    assert (root.tag, root.attrib) == (
        "testsuites",
        {},
    )  # Ant's schema has no attributes here
    for number, suite in enumerate(root):
        require(suite, SUITE)
        assert suite.attrib["id"] == str(number)
        for verdict in suite.findall("properties/property"):
            require(verdict, {"name": TOKEN, "value": TOKEN})
        tags = [child.tag for child in suite]
        cases = suite.findall("testcase")
        assert tags == [
            "properties",
            *["testcase"] * len(cases),
            "system-out",
            "system-err",
        ]
        for case in cases:
            require(case, CASE)
            assert len(case) <= 1
            for found in case:
                assert found.tag in {"failure", "error", "skipped"}
                require(found, {"message": ".*", "type": TOKEN})
        for kind, count in (
            ("failure", "failures"),
            ("error", "errors"),
            ("skipped", "skipped"),
        ):
            assert int(suite.attrib[count]) == len(suite.findall(f"testcase/{kind}"))
        assert int(suite.attrib["tests"]) == len(cases)
        assert sum(float(case.attrib["time"]) for case in cases) <= float(
            suite.attrib["time"]
        )
    names = [
        (case.attrib["classname"], case.attrib["name"])
        for case in root.iter("testcase")
    ]
    assert len(set(names)) == len(names)
    return root


@pytest.fixture(scope="module")
def result() -> StudyResult:
    return read_result(ROOT / "outputs" / "records" / "amd-epyc" / "quickstart")


def test_a_recorded_study_and_odd_names_and_reasons(result: StudyResult) -> None:
    root = valid(junit(summary_of(result)))
    assert (
        [float(suite.attrib["time"]) > 0 for suite in root]
        == [True] * len(result.judgements)
        != []
    )
    odd = 'a <b> & "c"\x00\x1b[31m\ud800\ufffe\x85 \U0001f34e\n'
    rulings = [
        Ruling("at_most", "fid", Verdict.PASS, odd),
        Ruling("at_most", "fid", Verdict.FAIL, odd),
        Ruling("at_most", "fid", Verdict.NOT_COMPARABLE, ""),
    ]
    judgements = [
        Judgement(odd, reference, "", Contract.LOSSY, Verdict.FAIL, rulings)
        for reference in ("baseline", "other")
    ]
    judgements.append(Judgement("empty", "b", "", Contract.LOSSY, Verdict.PASS, []))
    root = valid(junit(summary_of(replace(result, judgements=judgements))))
    assert [suite.attrib["tests"] for suite in root] == ["1", "1", "1"]
    assert (
        root[0].attrib["name"] == 'a <b> & "c"��[31m��� \U0001f34e\n against baseline'
    )


def test_what_several_rules_share_is_told_once(result: StudyResult) -> None:
    lacking, busy = "no calibration fits these settings", "other programs disturbed it"
    open_verdict, unjudged = Verdict.INCONCLUSIVE, Verdict.NOT_COMPARABLE
    rulings = [
        Ruling("at_most", "perceptual", unjudged, lacking),
        Ruling("rarely", "perceptual", unjudged, lacking),
        Ruling("at_least", "speedup", open_verdict, "at least 1", doubt=busy),
        Ruling("undisturbed", "", open_verdict, busy),
    ]
    judged = Judgement("it", "baseline", "", Contract.LOSSY, unjudged, rulings)
    [error] = valid(junit(summary_of(replace(result, judgements=[judged])))).iter(
        "error"
    )
    assert error.attrib["type"] == "not judged"
    assert (error.text or "").splitlines() == [
        f"not judged: perceptual at_most, perceptual rarely: {lacking}",
        "undecided: speedup at_least: at least 1",
        f"undecided: speedup at_least, undisturbed: {busy}",
    ]


def summarise(
    result: StudyResult, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    append_step_summary(summary_markdown(summary_of(result)))


def test_a_summary_begins_with_the_answer_and_follows_what_is_there(
    result: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "summary.md"
    summarise(result, target, monkeypatch)
    whole = summary_markdown(summary_of(result)) + "\n"
    assert target.read_text() == whole
    first, _, heading = whole.splitlines()[:3]
    assert "×" in first  # the answer
    assert "speed-up" in heading
    summarise(result, target, monkeypatch)
    assert target.read_text() == 2 * whole


def test_a_summary_may_be_shown_instead(
    result: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 2**20)
    summarise(result, Path(f"/dev/fd/{writer}"), monkeypatch)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as shown:
        assert shown.read() == summary_markdown(summary_of(result)) + "\n"


def test_two_results_that_cannot_be_compared_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    record = str(ROOT / "outputs" / "records" / "amd-epyc" / "quickstart")
    output = str(tmp_path / "drift")
    assert gate([record, "--against", record, "--output", output]) == 2
    assert "sdopt: not comparable: " in target.read_text()


def test_a_summary_stays_as_large_as_github_shows(
    result: StudyResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a larger file it shows nothing, also not what other commands of the step wrote."""
    target = tmp_path / "summary.md"
    target.write_text("x" * (2**20 - 10))
    summarise(result, target, monkeypatch)
    assert target.read_text() == "x" * (2**20 - 10)
    assert "more than 1 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["absent/summary.md", "."])
def test_a_summary_that_cannot_be_written_is_said(
    result: StudyResult,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summarise(result, tmp_path / place, monkeypatch)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"sdopt: GITHUB_STEP_SUMMARY={tmp_path / place}: the summary cannot be written ("
    )


@pytest.mark.parametrize(
    ("verdict", "lenient", "tag"),
    [
        (Verdict.FAIL, False, "failure"),
        (Verdict.INCONCLUSIVE, False, "error"),
        (Verdict.INCONCLUSIVE, True, "skipped"),
        (Verdict.NOT_COMPARABLE, True, "error"),
    ],
)
def test_a_variant_has_one_entry_and_says_a_shared_reason_once(
    result: StudyResult, verdict: Verdict, lenient: bool, tag: str
) -> None:
    rulings = [
        Ruling("at_most", metric, verdict, "other", doubt="the disk was full")
        for metric in ("mse", "perceptual")
    ]
    judgement = Judgement("a", "baseline", "", Contract.LOSSY, verdict, rulings)
    [suite] = valid(junit(summary_of(replace(result, judgements=[judgement])), lenient))
    [case] = suite.findall("testcase")
    assert [child.tag for child in case] == [tag]
    assert case[0].attrib["message"].count("the disk was full") == 1
