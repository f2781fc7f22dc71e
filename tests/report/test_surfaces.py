"""All that shows a result says the same of each variant: one scale, one ranking, one look for each verdict."""

import json
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import NamedTuple, get_args
from xml.etree import ElementTree

import html5lib
import pytest
from rich.console import Console

from sdopt.record.files import read_result
from sdopt.record.records import Status
from sdopt.record.verdicts import Verdict
from sdopt.report.answer import answer_shown
from sdopt.report.answer_json import answer_of, to_json
from sdopt.report.catalog import markdown_table
from sdopt.report.charts.comparisons import forest
from sdopt.report.charts.tradeoff import _SHAPES, tradeoffs
from sdopt.report.outcome import load_result
from sdopt.report.page import html
from sdopt.report.page.html import html_page
from sdopt.report.page.sections import study_page
from sdopt.report.summary import Summary, summary_of
from sdopt.report.tables import to_csv, to_dataframe
from sdopt.report.tones import BASELINE, COLOUR, GLYPH, RICH, TONES, Tone
from sdopt.report.verdicts import junit, summary_markdown, verdict_json
from sdopt.statistics.reproduction import Reproduction
from sdopt.statistics.scale import Images, Speed
from sdopt.tracking.contents import verdict_tags
from tests.command import ROOT
from tests.pages import table

RECORDS = ROOT / "outputs" / "records" / "amd-epyc"


class Said(NamedTuple):
    """The verdicts on one variant; "" where a surface shows none."""

    name: str
    speed: str
    images: str
    gate: str


def word(text: str, scale: type[Speed | Images | Verdict]) -> str:
    """The word of a scale with which a cell begins, after a badge's glyph."""
    text = text.lstrip("✓?✗⚠– ")
    return next((str(each) for each in scale if text.startswith(each)), "")


def of_rows(headings: list[str], rows: list[list[str]]) -> list[Said]:
    def cell(row: list[str], heading: str) -> str:
        return row[headings.index(heading)] if heading in headings else ""

    return [
        Said(
            cell(row, "variant"),
            word(cell(row, "speed"), Speed),
            word(cell(row, "images"), Images),
            word(cell(row, "gate"), Verdict),
        )
        for row in rows
    ]


def of_markdown(text: str) -> list[Said]:
    block = next(
        block for block in text.split("\n\n") if block.startswith("| variant |")
    )
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in block.splitlines()
    ]
    return of_rows(head, rows)


def of_terminal(summary: Summary, width: int) -> list[Said]:
    stream = StringIO()
    Console(file=stream, width=width).print(answer_shown(summary, width))
    lines = stream.getvalue().splitlines()
    head = next(line for line in lines if line.startswith("variant "))
    starts = {
        name: head.index(name) for name in ("speed ", "images", "gate") if name in head
    }
    below = lines[lines.index(head) + 1 :][: len(summary.rows)]
    return [
        Said(
            summary.rows[n].name
            if line.startswith(summary.rows[n].name[:12])
            else line,
            word(line[starts["speed "] :], Speed),
            word(line[starts["images"] :], Images) if "images" in starts else "",
            word(line[starts["gate"] :], Verdict) if "gate" in starts else "",
        )
        for n, line in enumerate(below)
    ]


def of_page(summary: Summary, folder: Path) -> list[Said]:
    root = html5lib.parse(
        html_page(study_page(summary, folder)).decode(), namespaceHTMLElements=False
    )
    table = next(root.iter("table"))
    headings = [
        "".join(cell.itertext()).strip()
        for cell in table.iter("th")
        if cell.get("scope") == "col"
    ]
    body = next(table.iter("tbody"))
    return of_rows(
        headings,
        [[" ".join("".join(cell.itertext()).split()) for cell in row] for row in body],
    )


@pytest.mark.parametrize("name", ["quickstart", "hf_sdxl"])
def test_every_surface_has_the_same_verdicts_in_the_same_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "_library", lambda: "")
    summary = summary_of(read_result(RECORDS / name))
    judged = bool(summary.result.judgements)
    expected = [
        Said(
            row.name,
            str(row.speed or ""),
            str(row.images or "") if judged else "",
            str(row.decision or ""),
        )
        for row in summary.rows
    ]
    tables = {
        "table.md": of_markdown(markdown_table(summary)),
        "README": of_markdown(table(RECORDS / name)),
        "step summary": of_markdown(summary_markdown(summary)),
        "page": of_page(summary, RECORDS / name),
        **{
            f"terminal of {width}": of_terminal(summary, width)
            for width in (80, 100, 120, 160)
        },
    }
    for surface, said in tables.items():
        assert said == expected, surface

    frame = to_dataframe(summary)
    assert to_csv(summary) == frame.to_csv(index=False)
    frame = frame[frame["role"] != "control"].drop_duplicates("variant")
    rows = frame[["variant", "speed", "images", "gate"]].itertuples(index=False)
    whole = [
        Said(
            row.name, *map(str, (row.speed or "", row.images or "", row.decision or ""))
        )
        for row in summary.rows
    ]
    # The gate's verdict is that on the comparison, and not yet that on what it is built on.
    steps = {row.name: row.decision or "" for row in summary.rows if row.steps}
    said = [Said(*row) for row in rows]
    assert [each._replace(gate=steps.get(each.name, each.gate)) for each in said] == (
        whole
    ), "table.csv"
    distances = {
        one["name"]: one["against"]
        for one in to_json(answer_of(summary, RECORDS / name))["candidates"]
    }
    against = frame.set_index("variant")["against"].to_dict()
    assert distances == {row.name: against[row.name] for row in summary.candidates}
    for row, one in zip(summary.rows, whole, strict=True):
        tags = verdict_tags(summary, row.variant)
        assert (
            row.is_baseline
            or Said(
                row.name, *(tags.get(key, "") for key in ("speed", "images", "gate"))
            )
            == one
        )

    plot = forest(summary)
    assert plot is not None
    speeds = [(str(row["name"]), str(row["speed"])) for row in plot["data"]["values"]]
    assert [pair for pair in speeds if "repeated" not in pair[0]] == [
        (row.name, row.speed) for row in summary.rows if row.speed
    ]
    chart = tradeoffs(summary)
    for _, variant, kind in chart.legend if chart else ():
        shown_row = summary.row(variant)
        assert shown_row is not None
        assert str(kind) == (shown_row.images or "baseline")

    if judged:
        data = json.loads(verdict_json(summary))
        keys = ("variant", "speed", "images", "gate")
        said = [Said(*(one.get(key, "") for key in keys)) for one in data["variants"]]
        assert said == [
            one
            for one, row in zip(whole, summary.rows, strict=True)
            if not row.is_baseline
        ]
        for suite in ElementTree.fromstring(junit(summary)):
            words = {
                each.get("name"): each.get("value") for each in suite.iter("property")
            }
            found = summary.row(str(suite.get("name")).partition(" against ")[0])
            assert found is not None
            assert words == {
                "speed": found.speed,
                "images": found.images,
                "gate": found.decision,
            }


def test_every_verdict_has_a_tone_and_every_tone_a_look() -> None:
    scales = (Status, Speed, Images, Verdict, get_args(Reproduction))
    assert not [
        verdict for scale in scales for verdict in scale if verdict not in TONES
    ]
    style = (files("sdopt.report.page") / "templates" / "page.css").read_text(
        encoding="utf-8"
    )
    for tone in get_args(Tone):
        assert tone in RICH
        assert tone in COLOUR
        assert f".badge.{tone} " in style
    # On a phone a figure's name stands beside it, and wraps though the figure does not.
    beside = style.partition("td[data-name]::before {")[2].partition("}")[0]
    assert "white-space: normal" in beside
    assert len({GLYPH[tone] for tone in get_args(Tone)}) == len(get_args(Tone))


def test_verdicts_of_one_colour_differ_in_their_shapes() -> None:
    assert {*_SHAPES} == {BASELINE, *Images}
    assert len({*_SHAPES.values()}) == len(_SHAPES)


def test_a_notebook_shows_the_ranking_and_no_table_of_metrics() -> None:
    result = load_result(RECORDS / "quickstart")
    shown = result._repr_markdown_()
    assert [said.name for said in of_markdown(shown)] == [
        row.name for row in result.answer().rows
    ]
    assert "perceptual_emojiclip" in markdown_table(result.answer())
    assert "perceptual_emojiclip" not in shown
