"""The report as a page: its order, that it is valid and closed, what it escapes, and what it does without."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock
from xml.etree.ElementTree import Element

import html5lib
import numpy as np
import pytest
from PIL import Image

from sdopt.contract import Contract
from sdopt.record.comparisons import BreakEven, Effect, Interval, ShapeRatios
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import ShapeSamples
from sdopt.record.scores import BrokenImage, ImageRecord, Score
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.report.blocks import Chart, Prose
from sdopt.report.charts.comparisons import forest, interactions, main_plot, waterfall
from sdopt.report.charts.spec import Spec
from sdopt.report.contact_sheet import comparison_sheet
from sdopt.report.markdown import markdown_page
from sdopt.report.page import html
from sdopt.report.page.gallery import gallery_of
from sdopt.report.page.html import html_page
from sdopt.report.page.sections import study_page, sweep_page
from sdopt.report.summary import Summary, summary_of
from tests.command import Finished
from tests.records import reconfigure, timed
from tests.report.test_table import renamed

_XHTML = "{http://www.w3.org/1999/xhtml}"

ATTACK = "</script></style><script>alert(1)</script><img src=x onerror=alert(2)>\"' & `{{ 7 * 7 }}` <b>"


def parsed(content: bytes) -> Element:
    """Parses a page as a browser does, and fails at the first error that one would only pass over."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=True)
    root: Element = parser.parse(content.decode())
    return root


def every(root: Element, tag: str) -> Iterator[Element]:
    return root.iter(f"{_XHTML}{tag}")


def text(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def titles(root: Element) -> list[str]:
    return [text(heading) for heading in every(root, "h2")]


def plots(root: Element) -> list[dict[str, object]]:
    data = [
        script.text or ""
        for script in every(root, "script")
        if script.get("type") == "application/json"
    ]
    return [spec for specs in data for spec in json.loads(specs)]


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser in Python takes seconds for a megabyte of script."""
    monkeypatch.setattr(
        html, "_library", lambda: "window.vegaEmbed = () => Promise.resolve();"
    )


@pytest.fixture
def full(result: StudyResult) -> StudyResult:
    """A study that has something to show in every section."""
    half, four = result.comparisons[:2]
    half.shapes[0].speedup, half.shapes[0].floor = (
        Interval(1.5, 1.4, 1.6, 0.95, 3, "process"),
        1.01,
    )
    for edge, worse in ((half, 0.1), (four, 0.2)):
        edge.quality = {
            "psnr_db": Score(40.0 - 100 * worse),
            "mse": Score(worse, [worse, 0.0, 2 * worse, worse / 2]),
        }
    half.break_even = BreakEven(9.0, 5.0, 1.0, 30.0, 20.0, 60.0, 0.95)
    result.effects = [
        Effect(("precision=bf16",), Interval(1.5)),
        Effect(("layout=channels_last",), Interval(1.1)),
        Effect(("precision=bf16", "layout=channels_last"), Interval(1.0)),
    ]
    result.design = "cumulative"
    result.gate = "default"
    result.judgements = [
        Judgement(
            "bfloat16",
            "baseline",
            "it",
            Contract.LOSSY,
            Verdict.PASS,
            [],
            gains=["speedup"],
        )
    ]
    return result


def test_the_answer_comes_first_the_environment_last_and_nothing_is_fetched(
    full: StudyResult, finished: Finished
) -> None:
    page = study_page(summary_of(full), finished.folder)
    root = parsed(html_page(page))
    assert titles(root) == [
        "Answer",
        "Results",
        "Speed against quality",
        "Step by step",
        "Effects and interactions",
        "Time of each call",
        "Time and memory by stage",
        "Break-even",
        "Images",
        "Method and reproduction",
        "Environment",
    ]
    links = [link.get("href") for link in every(root, "a")]
    assert links == [f"#{section.get('id')}" for section in every(root, "section")]
    [environment] = [
        section
        for section in every(root, "section")
        if section.get("id") == "environment"
    ]
    assert [child.tag for child in environment] == [f"{_XHTML}h2", f"{_XHTML}details"]
    # Markdown has the same sections.
    written = markdown_page(page).decode()
    assert re.findall(r"^## (.*)$", written, re.MULTILINE) == titles(root)
    pictures = set(re.findall(r"!\[.*\]\((.*)\)", written))
    assert pictures <= {"plot.png", "tradeoff.png", "stages.png", "comparison.png"}
    for element in root.iter():
        for name in ("src", "href", "srcset", "action"):
            value = element.get(name)
            assert value is None or value.startswith(("data:image/webp;base64,", "#"))
    [policy] = [
        meta.get("content") or ""
        for meta in every(root, "meta")
        if meta.get("http-equiv")
    ]
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert len(re.findall("'sha256-", policy)) == 2
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]


@pytest.mark.parametrize(
    ("design", "options", "plot"),
    [
        ("one_at_a_time", [], forest),
        ("cumulative", [], waterfall),
        # Rivals of one axis exclude each other, so they have effects and no interaction.
        ("factorial", [("attention=math",), ("attention=flash",)], forest),
        (
            "factorial",
            [("precision=bf16",), ("precision=bf16", "attention=math")],
            interactions,
        ),
    ],
)
@pytest.mark.walk(2)
def test_the_picture_stands_where_the_page_has_the_same_plot(
    result: StudyResult,
    finished: Finished,
    design: str,
    options: list[tuple[str, ...]],
    plot: Callable[[Summary], Spec | None],
) -> None:
    result.design, result.effects = (
        design,
        [Effect(of, Interval(1.2)) for of in options],
    )
    summary = summary_of(result)
    assert main_plot(summary) is plot
    page = study_page(summary, finished.folder)
    assert (
        dict(page.summary)["measured"]
        == f"{result.started[:10]} {result.started[11:16]} UTC (finished)"
    )
    charts = [
        block
        for section in page.sections
        for block in section.blocks
        if isinstance(block, Chart)
    ]
    assert [chart.views[0][1] for chart in charts if chart.file == "plot.png"] == [
        plot(summary)
    ]
    assert markdown_page(page).count(b"](plot.png)") == 1


def test_what_is_quoted_is_text(full: StudyResult, finished: Finished) -> None:
    plain = parsed(
        html_page(study_page(summary_of(copy.deepcopy(full)), finished.folder))
    )
    full.name = ATTACK
    for variant in full.variants:
        for record in variant.images:
            record.prompt = ATTACK
    full.variant("bfloat16").trips = [
        BrokenImage(ATTACK, full.variant("bfloat16").images[0].path, ATTACK)
    ]
    full.variant("TensorFloat-32").reason = ATTACK
    full.environment.command = ["sdopt", "run", ATTACK]
    full.environment.device["name"] = ATTACK
    full.comparisons[0].credit = ATTACK
    full.effects[0].options = (ATTACK,)
    attacked = html_page(
        study_page(
            summary_of(renamed(full, "batches of four", ATTACK)), finished.folder
        )
    )
    root = parsed(attacked)
    for tag in ("script", "style", "b", "img"):
        assert len(list(every(root, tag))) <= len(list(every(plain, tag))) + (
            tag == "b"
        ), tag
    assert not [
        name
        for element in root.iter()
        for name in element.keys()  # noqa: SIM118
        if name.startswith("on")
    ]
    assert [text(heading) for heading in every(root, "h1")] == [
        " ".join(ATTACK.split())
    ]
    assert ATTACK in json.dumps(plots(root)).encode().decode("unicode_escape")
    assert "49" not in text(next(every(root, "h1")))


def nothing_compared(result: StudyResult) -> None:
    for edge in result.comparisons:
        edge.shapes[0].speedup = edge.shapes[0].memory_ratio = (
            edge.break_even
        ) = edge.shapes[0].floor = None
    result.floor = None


def one_variant(result: StudyResult) -> None:
    result.variants, result.comparisons = result.variants[:1], []


def all_failed(result: StudyResult) -> None:
    nothing_compared(result)
    for variant in result.variants:
        variant.status, variant.reason, variant.measurements, variant.images = (
            Status.FAILED,
            "it broke",
            [],
            [],
        )


def scores_without_figures(result: StudyResult) -> None:
    for edge in result.comparisons:
        edge.quality = {
            "psnr_db": Score(None),
            "mse": Score(None, [None] * 4),
            "ssim": Score(None),
        }
    for variant in result.variants:
        variant.quality = {
            "clip_score_emojiclip": Score(None),
            "another_versions_metric": Score(1.0),
        }


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        (
            lambda _: None,
            ["Speed against quality", "Step by step", "Effects and interactions"],
        ),
        (nothing_compared, ["Speed against quality", "Break-even"]),
        (one_variant, ["Speed against quality", "Break-even"]),
        (
            all_failed,
            [
                "Speed against quality",
                "Time of each call",
                "Time by stage",
                "Images",
                "Break-even",
            ],
        ),
        (scores_without_figures, []),
    ],
)
def test_a_section_without_content_is_left_out(
    result: StudyResult,
    finished: Finished,
    change: Callable[[StudyResult], None],
    absent: list[str],
) -> None:
    change(result)
    page = study_page(summary_of(result), finished.folder)
    found = {section.title for section in page.sections}
    assert not set(absent) & found
    assert {"Answer", "Method and reproduction", "Environment"} <= found
    assert html_page(page)
    assert markdown_page(page).startswith(b"# shared\n")


class TestGallery:
    def test_the_worst_prompt_comes_first(
        self, full: StudyResult, finished: Finished
    ) -> None:
        gallery = gallery_of(full, finished.folder, 10**9)
        assert gallery is not None
        prompts = [record.prompt for record in full.variant("baseline").images]
        assert [row.prompt for row in gallery.prompts] == [
            prompts[n] for n in (2, 0, 3, 1)
        ]
        captions = {
            picture.variant: picture.caption for picture in gallery.prompts[0].variants
        }
        assert captions == {"bfloat16": "0.2", "batches of four": "0.4"}
        assert [picture.caption for picture in gallery.prompts[-1].variants] == [
            "equal",
            "equal",
        ]
        assert [picture.uri for picture in gallery.prompts[-1].variants] == ["", ""]

    def test_the_worst_prompt_is_in_the_picture_too(
        self, full: StudyResult, finished: Finished, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        titles: list[str] = []

        def draw(_: object, rows: list[tuple[str, object]], feet: object) -> bytes:
            titles.extend(title for title, _ in rows)
            return b""

        monkeypatch.setattr("sdopt.report.contact_sheet._draw", draw)
        by_prompt: list[float | None] = [40.0, 40.0, 20.0, 40.0]
        full.comparisons[0].quality["psnr_db"] = Score(35.0, by_prompt)
        comparison_sheet(summary_of(full), finished.folder, prompts=1)
        assert titles[0] == full.variant("baseline").images[2].prompt

    def test_other_noise_is_not_called_the_same(
        self, full: StudyResult, finished: Finished
    ) -> None:
        """With more images per prompt, the second prompt begins at another seed."""
        gallery = gallery_of(full, finished.folder, 10**9)
        assert gallery is not None
        assert "the same noise" in gallery.caption
        full.variant("bfloat16").images[-1].seed += 3
        gallery = gallery_of(full, finished.folder, 10**9)
        assert gallery is not None
        assert "the same noise" not in gallery.caption

    def test_an_image_that_equals_its_reference_is_not_shown_as_the_baselines(
        self, full: StudyResult, finished: Finished
    ) -> None:
        half, four = full.comparisons[:2]
        four.reference, four.quality["mse"] = half.candidate, Score(0.0, [0.0] * 4)
        gallery = gallery_of(full, finished.folder, 10**9)
        assert gallery is not None
        for row in gallery.prompts:
            picture = next(
                picture for picture in row.variants if picture.variant == four.candidate
            )
            assert picture.caption == "equal against bfloat16"
            place = next(
                n
                for n, record in enumerate(full.variant("baseline").images)
                if record.prompt == row.prompt
            )
            paths = [
                finished.folder / full.variant(name).images[place].path
                for name in ("baseline", four.candidate)
            ]
            assert (picture.uri == "") is (
                paths[0].read_bytes() == paths[1].read_bytes()
            )

    def test_fits_its_budget_and_shows_one_prompt_at_least(
        self, full: StudyResult, tmp_path: Path
    ) -> None:
        noise = np.random.default_rng(0)
        for edge in full.comparisons:
            edge.quality = {}
        for variant in full.variants:
            variant.images = []
            for number in range(3) if variant.name in ("baseline", "bfloat16") else ():
                path = f"{variant.name} {number}.png"
                Image.fromarray(noise.integers(0, 255, (512, 512, 3), np.uint8)).save(
                    tmp_path / path
                )
                variant.images.append(
                    ImageRecord(f"prompt {number}", number, 0, 0, path)
                )
        whole = gallery_of(full, tmp_path, 10**9)
        assert whole is not None
        one = sum(
            len(p.uri) for p in (whole.prompts[0].baseline, *whole.prompts[0].variants)
        )
        assert one < 300_000
        assert len(whole.prompts) == 3
        assert not whole.pixelated
        for budget, shown in ((0, 1), (int(2.5 * one), 2)):
            gallery = gallery_of(full, tmp_path, budget)
            assert gallery is not None
            assert len(gallery.prompts) == shown
        (tmp_path / "baseline 1.png").unlink()  # somebody made room
        gallery = gallery_of(full, tmp_path, 10**9)
        assert gallery is not None
        assert [row.prompt for row in gallery.prompts] == ["prompt 0", "prompt 2"]


def test_every_shape_is_shown(result: StudyResult, finished: Finished) -> None:
    reconfigure(result, "workload", batch_size=[1, 4])
    for variant in result.variants:
        reconfigure(variant, "workload", batch_size=[1, 4])
        for measurement in variant.measurements:
            measurement.shapes.append(
                ShapeSamples(
                    calls=timed([3 * each for each in measurement.shapes[0].latency_s])
                )
            )
    for edge in result.comparisons:
        edge.shapes.append(ShapeRatios(speedup=Interval(1.4, 1.3, 1.5)))
    root = parsed(html_page(study_page(summary_of(result), finished.folder)))
    [latency] = [
        section for section in every(root, "section") if section.get("id") == "latency"
    ]
    assert [text(option) for option in every(latency, "option")] == [
        "32×32, batch 1",
        "32×32, batch 4",
    ]
    assert "bfloat16, 32×32, batch 4" in {
        row["name"]
        for row in plots(root)[0]["data"]["values"]  # type: ignore[index]
    }


def test_a_sweep_has_a_table_of_all_and_then_each_study(
    full: StudyResult, finished: Finished
) -> None:
    studies = [(str(number), summary_of(full), finished.folder) for number in range(2)]
    page = sweep_page("mine", [Prose("the answer")], studies)
    root = parsed(html_page(page))
    assert titles(root) == ["Answer", "job 0: shared", "job 1: shared"]
    assert len(list(every(root, "article"))) == 2
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    charts = [
        figure for figure in every(root, "figure") if figure.get("class") == "chart"
    ]
    assert len(plots(root)) == sum(
        max(1, len(list(every(chart, "option")))) for chart in charts
    )
    assert markdown_page(page).decode().count("\n## job") == 2


def test_the_library_is_kept(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundled = iter(["'<div></script>'"])
    monkeypatch.setattr(
        html, "engine", lambda: Mock(javascript_bundle=lambda vl_version: next(bundled))
    )
    for _ in range(2):
        html._library.cache_clear()
        assert html._library() == "'<div><\\/script>'", (
            "an HTML parser ends a script at this word"
        )
    html._library.cache_clear()
    page = (finished.folder / "report.html").read_bytes()
    assert b"vegaEmbed" in page
    assert len(page) < 1_300_000
