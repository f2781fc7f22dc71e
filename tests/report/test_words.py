"""The words of verdicts: one scale, wherever a user meets one."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest

from sdopt.apps.exchange.study import GivenFolder, import_study
from sdopt.apps.foresight.memory import Footprint
from sdopt.apps.foresight.plan import Prediction, text_of
from sdopt.apps.foresight.tables import plan_table, remarks
from sdopt.apps.loadtest.record import LoadRecord
from sdopt.apps.loadtest.report import blocks_of as load_blocks
from sdopt.apps.suite.outcomes import Standing
from sdopt.config.groups import data_sheets
from sdopt.config.paths import CONF
from sdopt.contract import Contract
from sdopt.record.files import read_result
from sdopt.record.scores import Score
from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.report.answer_json import answer_of, to_json
from sdopt.report.catalog import published_markdown
from sdopt.report.markdown import written
from sdopt.report.summary import Summary, summary_of
from sdopt.report.verdicts import (
    junit,
    summary_markdown,
    verdict_json,
    verdict_markdown,
    verdicts_of,
)
from sdopt.schema import Shape
from sdopt.search.record import Fate, SearchEntry, SearchRecord, markdown_of
from sdopt.statistics.reproduction import Reproduction
from sdopt.statistics.scale import Images, Speed
from sdopt.tracking.contents import study_tags, variant_run
from tests.apps.exchange.test_judge import pictures, write
from tests.command import ROOT
from tests.fakes import fake_study

SCALE = {
    *("faster", "slower", "too close to call", "not enough runs"),
    *("equal", "within tolerance", "worse", "not judged"),
    *("pass", "fail", "undecided"),
}

FACTS = {"took effect", "no gain", "cannot run", "impossible", "not measured"}
"""What was seen of an option in all records: no verdict on its images."""

OF_ARTICLES = {"reproduced", "not reproduced", "not run", "no figure"}
"""What is shown of an article's figure, which is no verdict on an option."""

OTHERS = re.compile(
    r"\b(unproven|proven|refuted|inconclusive|ruled out|left out|dropped|not passed|passed over|straddles)\b",
    re.I,
)
"""Words for a verdict that an earlier version had beside the scale."""


@pytest.mark.parametrize("verdicts", [Speed, Images, Verdict])
def test_a_verdict_is_a_word_of_the_scale(verdicts: type[StrEnum]) -> None:
    assert {str(verdict) for verdict in verdicts} <= SCALE


OF_SEARCHES = {"winner", "beaten"}
"""How candidates of a search end beside each other; what is slower than the baseline is another matter."""


def test_a_search_adds_its_winner_and_what_it_beats_and_no_other_word() -> None:
    assert {*get_args(Fate)} - SCALE == OF_SEARCHES
    assert "slower" not in get_args(Fate)


def test_what_records_show_of_options_is_no_verdict() -> None:
    assert {str(word) for word in Standing} <= FACTS
    assert not FACTS & SCALE


def test_each_word_of_the_scale_is_one_of_a_verdict() -> None:
    assert {
        str(verdict) for verdicts in (Speed, Images, Verdict) for verdict in verdicts
    } == SCALE


def test_an_article_s_figures_have_words_of_their_own_and_those_of_the_scale() -> None:
    assert {*get_args(Reproduction)} <= SCALE | OF_ARTICLES


@pytest.fixture(
    scope="module",
    params=["nvidia-h200/gate", "intel-xeon/fastest", "amd-epyc/quickstart"],
)
def summary(request: pytest.FixtureRequest) -> Summary:
    """The summary of a record, with and without a gate."""
    return summary_of(read_result(ROOT / "outputs" / "records" / request.param))


def test_in_the_tags_of_mlflow(summary: Summary) -> None:
    for variant in summary.result.variants:
        tags = variant_run(summary, variant, Path(), images=False).tags
        assert {
            tags[name] for name in ("speed", "images", "gate") if name in tags
        } <= SCALE
        assert not OTHERS.search(tags["mlflow.note.content"])
    assert not OTHERS.search(study_tags(summary)["answer"])


def test_in_junit_and_in_the_summary_of_a_step(summary: Summary) -> None:
    root = ElementTree.fromstring(junit(summary))
    kinds = {element.get("type") for case in root.iter("testcase") for element in case}
    values = {found.get("value") for found in root.iter("property")}
    assert kinds | values <= SCALE
    messages = [
        str(element.get("message"))
        for case in root.iter("testcase")
        for element in case
    ]
    for text in (*messages, summary_markdown(summary).partition("<details>")[0]):
        assert not OTHERS.search(text), text


def test_in_tables(summary: Summary) -> None:
    for row in summary.candidates:
        verdicts = verdicts_of(row)
        assert {
            verdicts[name] for name in ("speed", "images", "gate") if name in verdicts
        } <= SCALE
    cells = {
        cell.strip()
        for line in verdict_markdown(summary).splitlines()
        for cell in line.split("|")
    }
    assert not {cell for cell in cells if OTHERS.fullmatch(cell)}


def test_on_the_page_of_options_and_models() -> None:
    lines = [
        line
        for line in (CONF / "MATRIX.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    states = {
        re.sub(r" \(\d+\)$", "", cell.strip())
        for line in lines
        for cell in line.split("|")[4:-1]
    }
    assert len(lines) > 100
    assert states <= FACTS


def verdicts_in(content: object) -> Iterator[str]:
    """Yields the words below the keys of verdicts in a JSON document."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key in ("speed", "images", "gate", "verdict") and isinstance(value, str):
                yield value
            yield from verdicts_in(value)
    elif isinstance(content, list):
        for value in content:
            yield from verdicts_in(value)


def test_in_json(summary: Summary) -> None:
    verdicts = json.loads(verdict_json(summary))
    gate = verdicts.pop("gate")
    answer = to_json(answer_of(summary, Path()))
    assert gate == summary.result.gate
    assert set(verdicts_in([verdicts, answer])) <= SCALE
    assert not OTHERS.search(answer["answer"])


def test_in_the_report_of_a_search() -> None:
    entries = []
    for fate in get_args(Fate):
        entries.append(
            SearchEntry(fate, [], fate, "it is slower", 1.1, 0.9, 0.1, 1.0, 0.1, 3)
        )
    record = SearchRecord(
        "a", "a", "", [], ["latency"], "mse", "Keep the baseline.", entries, {}, [], []
    )
    text = markdown_of(record)
    outcomes = {
        line.split("|")[2].strip() for line in text.splitlines() if "1.10×" in line
    }
    assert outcomes - OF_SEARCHES <= SCALE
    assert not OTHERS.search(text)


def test_in_the_report_of_a_load_test() -> None:
    record = LoadRecord.read(ROOT / "outputs" / "records" / "intel-xeon" / "load")
    assert not OTHERS.search(written(load_blocks(record)))


STATISTICS = re.compile(
    r"interval|one-sided|bound|straddl|p value|confidence|percentile|\["
)
"""Words of statistics, which a first sentence does without."""


def planned(state: str, likely_gib: float) -> Prediction:
    """Returns a prediction on a card of 24 GB."""
    return Prediction(
        "precision=fp16",
        "rtx4090",
        data_sheets()["rtx4090"],
        Shape(512, 1),
        1,
        25,
        Footprint(likely_gib - 1, likely_gib),
        state,
        reason="needs more" if state == "refused" else "",
        seconds=float("nan") if state == "refused" else 0.85,
        low=0.6,
        high=1.2,
        shares={"matrix products": 0.6, "launches": 0.4},
        evidence="" if state == "refused" else "10 Ada cards",
    )


def test_in_a_plan_which_gives_no_verdict_on_an_option() -> None:
    predictions = [planned("known", 3), planned("extrapolated", 24)]
    predictions.append(planned("refused", 30))
    table = plan_table(predictions)
    fits = {row[table.headings.index("fits?")] for row in table.rows}
    assert fits == {"fits", "tight", "does not fit"}
    assert not fits & (SCALE | FACTS)
    said = [*remarks(predictions, "sdopt run")]
    for text in (*map(text_of, predictions), *said):
        assert not OTHERS.search(text), text
    assert "one call: 512×512, batch 1, 25 steps" in said
    predictions[0] = replace(predictions[0], steps=50)
    assert "512×512, batch 1, 50 steps" in plan_table(predictions).rows[0]


def test_a_plan_begins_with_a_sentence_without_statistics() -> None:
    first, second, *_ = text_of(planned("known", 3)).split(". ")
    assert first.startswith("One call takes about 850 ms on ")
    assert first.endswith("four in five such calls between 600 and 1200 ms")
    assert second.endswith("of 23.52 GiB: fits")
    assert not STATISTICS.search(f"{first} {second}")
    assert text_of(planned("refused", 30)).startswith("There is no time for ")


def test_in_what_judge_says_of_images_of_other_programs(tmp_path: Path) -> None:
    sides = [
        write(tmp_path / name, pictures(), listed=False) for name in ("fp32", "int8")
    ]
    of_calls = fake_study()[1]
    given = GivenFolder(sides[0], sides[1:])
    result = import_study(
        given, of_calls.config, of_calls.environment, "now", tmp_path / "judged"
    )
    result.variants[0].quality["brightness"] = Score(0.5, [0.5] * 8)
    darker: list[float | None] = [0.40, 0.41, 0.40, 0.38, 0.40, 0.41, 0.40, 0.40]
    result.variants[1].quality["brightness"] = Score(0.4, darker)
    found = Ruling("equivalent", "brightness", Verdict.FAIL, "", 0.1, 0.09, 0.11, 0.005)
    judged = Judgement(
        "int8", "baseline", "int8", Contract.LOSSY, Verdict.FAIL, [found]
    )
    result.gate, result.judgements = "default", [judged]
    answer = summary_of(result).sentence
    assert answer.startswith("int8: images worse"), answer
    assert "images are 20 % darker than the baseline's (1 % allowed)" in answer
    assert ", most of all for “3.png”" in answer, "no prompt is known, so it is a file"
    assert not STATISTICS.search(answer)
    assert not OTHERS.search(answer)


def test_beside_published_figures() -> None:
    folder = ROOT / "outputs" / "records" / "amd-epyc" / "hf_sdxl"
    text = published_markdown(summary_of(read_result(folder)))
    assert (folder / "published.md").read_text(encoding="utf-8") == text
    words = {
        line.split("|")[-3].strip()
        for line in text.splitlines()
        if line.startswith("|")
    }
    assert words - {"verdict", "---"} <= SCALE | OF_ARTICLES
    assert not OTHERS.search(text)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "conf/README.md",
        "sdopt/gate/README.md",
        "sdopt/gate/SENTENCES.md",
        "sdopt/agents/SKILL.md",
    ],
)
def test_on_pages(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = OTHERS.findall(text)
    assert not {word.lower() for word in found} - PLAIN


PLAIN = {"left out", "dropped", "ruled out"}
"""Plain words that pages have where they give no verdict."""
