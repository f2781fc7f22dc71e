"""The figures of an article beside those measured: how they are read, compared and judged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdopt.errors import UsageError
from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import Memory
from sdopt.report.blocks import Table
from sdopt.report.catalog import published_markdown
from sdopt.report.page.sections import study_page
from sdopt.report.summary import summary_of
from sdopt.statistics.published import (
    Printed,
    Published,
    PublishedTable,
    read_figure,
    require_published,
)
from sdopt.statistics.reproduction import (
    MEMORY,
    PublishedClaim,
    Reproduction,
    claims_of,
    published_of,
)
from tests.records import column, known, reconfigure, samples_of

Article = Callable[..., list[PublishedClaim]]


@pytest.fixture
def article(result: StudyResult) -> Article:
    """Gives the finished study an article of one table, and returns the claims: `article(time={...})`."""

    def claims(
        setup: dict[str, Any] | None = None,
        gpus: tuple[str, ...] = ("A100",),
        **table: Any,
    ) -> list[PublishedClaim]:
        tables = [{"place": "Table 1", "gpus": list(gpus), **table}]
        published = {
            "article": "A study",
            "gpu": "A100",
            "setup": setup or {},
            "tables": tables,
            "notes": ["It says."],
        }
        result.config.study["published"] = published
        return claims_of(result)

    return claims


def speedup_of(
    result: StudyResult,
    estimate: float,
    low: float | None = None,
    high: float | None = None,
) -> None:
    result.comparisons[0].shapes[0].speedup = Interval(estimate, low, high)


def on_a_gpu(result: StudyResult, gib: dict[str, float]) -> None:
    """Gives variants peaks of a GPU's memory, alike in all processes, as they are there."""
    for name, peak in gib.items():
        for samples in samples_of(result.variant(name)):
            samples.memory = Memory(1.0, 1.0, cuda_peak_allocated_gib=peak)


class TestFigures:
    @pytest.mark.parametrize(
        ("text", "value", "low", "high"),
        [
            ("6.4", 6.4, 6.35, 6.45),
            ("29", 29, 28.5, 29.5),
            ("-101.7", -101.7, -101.75, -101.65),
            ("<3", 3, 0, 3),
        ],
    )
    def test_are_known_to_their_last_digit(
        self, text: str, value: float, low: float, high: float
    ) -> None:
        found = read_figure(f"1 {text}", 1)
        assert isinstance(found, Printed)
        assert (found.value, found.low, found.high) == pytest.approx((value, low, high))

    def test_may_be_missing_or_out_of_memory(self) -> None:
        assert read_figure("- OOM", 0) is read_figure(None, 3) is None
        assert read_figure("- OOM", 1) == "OOM"

    @pytest.mark.parametrize(
        ("table", "speedup"),
        [
            ({"time": {"baseline": "6.4", "bfloat16": "3.2"}}, 2.0),
            (
                {"time": {"baseline": 6, "bfloat16": 3}},
                2.0,
            ),  # numbers instead of strings
            ({"time": {"baseline": "10.0", "bfloat16": "25.0"}, "unit": "it/s"}, 2.5),
            ({"time_saved": {"bfloat16": "38.5"}}, 1 / 0.615),
            ({"time_saved": {"bfloat16": "-100"}}, 0.5),
            ({"speedup": {"bfloat16": "2.67"}}, 2.67),
            # The article's own figure of a gain comes before that of its rounded times.
            (
                {
                    "time": {"baseline": "6.7", "bfloat16": "4.1"},
                    "time_saved": {"bfloat16": "38.5"},
                },
                1 / 0.615,
            ),
        ],
    )
    def test_make_a_speedup(
        self, article: Article, table: dict[str, Any], speedup: float
    ) -> None:
        claim = article(reference="baseline", **table)[0]
        value = known(claim.value)
        assert value.value == pytest.approx(speedup)
        assert value.low < value.value < value.high
        assert ("time_saved" in table) == claim.printed.endswith(" % of the time saved")

    @pytest.mark.parametrize(
        ("table", "problem"),
        [
            ({"time": {"nobody": "1"}}, "the study has no variant 'nobody'"),
            ({"time": {"a": "1 2"}}, "'a' has 2 figures for 1 cards"),
            ({"time": {"a": "fast"}}, "fast is not a number"),
            ({"time": {"a": "<3"}}, "'a': <3: of times and memory ratios are computed"),
            ({"memory_gb": {"b": "0.0"}}, "a number above 0"),
            ({"speedup": {"b": "2"}}, "has speed-ups but no reference"),
            ({"time_saved": {"b": "100"}, "reference": "a"}, "less than 100"),
        ],
    )
    def test_that_cannot_be_right_are_a_mistake(
        self, table: dict[str, Any], problem: str
    ) -> None:
        published = Published(
            "A study", "A100", tables=[PublishedTable("Table 1", ["A100"], **table)]
        )
        with pytest.raises(UsageError, match=problem) as caught:
            require_published(published, ["a", "b"])
        assert "study.published (Table 1)" in str(caught.value)


TIMES = {"baseline": "6.0", "bfloat16": "3.0"}
"""Twice as fast, or between 1.95 and 2.05 times, as the times are rounded."""


class TestVerdicts:
    @pytest.mark.parametrize(
        ("bounds", "verdict", "reason"),
        [
            ((2.0, 1.8, 2.2), "reproduced", "within"),
            ((3.0, 2.5, 3.5), "reproduced", "exceeded"),
            ((1.95, 1.9, 1.97), "reproduced", "within"),
            ((1.5, 1.3, 1.7), "not reproduced", "falls short"),
            ((2.5,), "undecided", "protocol.replicates=3"),
            ((1.3, 0.8, 2.1), "undecided", "no change"),
        ],
        ids=[
            "within",
            "exceeded",
            "equal as far as it was printed",
            "short",
            "no interval",
            "an interval that holds the figure and no change",
        ],
    )
    def test_on_a_speedup(
        self,
        result: StudyResult,
        article: Article,
        bounds: tuple[float, ...],
        verdict: Reproduction,
        reason: str,
    ) -> None:
        speedup_of(result, *bounds)
        claim = article(time=TIMES)[0]
        assert claim.verdict == verdict
        assert reason in claim.reason

    def test_no_gain_is_reproduced_by_an_interval_around_none(
        self, result: StudyResult, article: Article
    ) -> None:
        speedup_of(result, 1.0, 0.97, 1.03)
        alike = article(time={"baseline": "6.0", "bfloat16": "6.0"})
        assert alike[0].verdict == "reproduced"

    def test_of_steps_that_images_decide_says_nothing_with_untrained_weights(
        self, result: StudyResult, article: Article
    ) -> None:
        speedup_of(result, 2.0, 1.8, 2.2)
        promise = result.variant("bfloat16").promises["precision"]
        promise.by_image = True
        assert article(time=TIMES)[0].verdict == "reproduced"
        for variant in result.variants:
            reconfigure(variant, "model", weights="random")
        claim = article(time=TIMES)[0]
        assert claim.verdict == "not judged"
        assert "untrained weights" in claim.reason
        promise.by_image = False
        assert article(time=TIMES)[0].verdict == "reproduced"

    def test_a_row_that_did_not_run_says_why_and_one_whose_reference_did_not_names_it(
        self, result: StudyResult, article: Article
    ) -> None:
        [claim] = [
            c
            for c in article(time={"baseline": "6", "TensorFloat-32": "3"})
            if c.variant == "TensorFloat-32"
        ]
        assert claim.verdict == "not run"
        assert "needs a CUDA device" in claim.reason
        assert (claim.value is None, claim.measured) == (False, None)
        result.variant("baseline").status = Status.KILLED
        claim = article(time=TIMES)[0]
        assert (claim.verdict, claim.reason) == (
            "not run",
            "baseline: killed",
        )

    def test_other_work_is_not_compared(self, article: Article) -> None:
        setup = {
            "model": "sd15",
            "steps": 50,
            "size": 512,
            "images": 4,
            "scheduler": "PNDMScheduler",
        }
        claim = article(setup, time=TIMES)[0]
        assert claim.verdict == "not judged"
        for said in (
            "model emoji instead of sd15",
            "steps 2 instead of 50",
            "size 32 instead of 512",
            "images per call 1 instead of 4",
            "scheduler DDIMScheduler instead of PNDMScheduler",
        ):
            assert said in claim.reason

    def test_a_row_without_a_figure_is_listed(self, article: Article) -> None:
        claims = article(time=TIMES)
        assert [claim.variant for claim in claims] == [
            "bfloat16",
            "batches of four",
            "TensorFloat-32",
        ]
        assert [claim.verdict for claim in claims[1:]] == [
            "no figure",
            "not run",
        ]


class TestMemory:
    def test_of_a_cpu_is_not_that_of_a_gpu(self, article: Article) -> None:
        claim = article(memory_gb={"baseline": "28.09", "bfloat16": "21.72"})[0]
        assert (claim.measure, claim.verdict) == (
            "memory_ratio",
            "not judged",
        )
        assert "on a CPU" in claim.reason

    @pytest.mark.parametrize(
        ("ratio", "verdict"),
        [(0.7732, "reproduced"), (0.78, "not reproduced")],
        ids=["equal as far as it was printed", "more"],
    )
    def test_ratio(
        self, result: StudyResult, article: Article, ratio: float, verdict: Reproduction
    ) -> None:
        on_a_gpu(result, {"baseline": 10.0, "bfloat16": 10.0 * ratio})
        result.comparisons[0].shapes[0].memory_ratio = Interval(ratio, ratio, ratio)
        claim = article(memory_gb={"baseline": "28.09", "bfloat16": "21.72"})[0]
        assert claim.verdict == verdict
        assert claim.printed == "28.09 GB → 21.72 GB"

    @pytest.mark.parametrize(
        ("gib", "verdict"),
        [(2.7, "reproduced"), (2.9, "not reproduced")],
    )
    def test_limit_is_of_the_variant_alone(
        self, result: StudyResult, article: Article, gib: float, verdict: Reproduction
    ) -> None:
        """3 GB are 2.79 GiB."""
        on_a_gpu(result, {"bfloat16": gib})
        result.comparisons.append(
            type(result.comparisons[0])("bfloat16", "batches of four", "nothing")
        )
        claims = [
            claim
            for claim in article(memory_limit_gb={"bfloat16": "<3"})
            if claim.measure == MEMORY
        ]
        assert [(c.variant, c.reference, c.verdict) for c in claims] == [
            ("bfloat16", "", verdict)
        ]

    def test_that_ran_out_is_reproduced_only_if_it_ran_out_here(
        self, result: StudyResult, article: Article
    ) -> None:
        table = {
            "time": {"baseline": "OOM", "bfloat16": "13.86"},
            "memory_gb": {"baseline": "OOM", "bfloat16": "6.89"},
        }
        assert {claim.verdict for claim in article(**table)[:2]} == {"not judged"}
        result.variant("baseline").status = Status.OUT_OF_MEMORY
        assert {claim.verdict for claim in article(**table)[:2]} == {"reproduced"}


def test_a_page_shows_the_main_card_and_markdown_all_cards_and_reasons(
    result: StudyResult, article: Article, tmp_path: Path
) -> None:
    assert published_of(result) is None
    assert not claims_of(result)
    assert not published_markdown(summary_of(result))
    speedup_of(result, 2.5, 2.2, 2.8)
    article(
        gpus=("T4", "A100"),
        time={"baseline": "29.8 8.0", "bfloat16": "16.4 4.0", "TensorFloat-32": "20 5"},
    )
    written = published_markdown(summary_of(result))
    rows = [line for line in written.splitlines() if line.startswith("| bfloat16")]
    assert [" T4 " in row for row in rows] == [True, False]
    assert (
        "2.00× 8.0 s → 4.0 s, Table 1 | 2.50× [2.20, 2.80] | reproduced | exceeded |"
        in rows[1]
    )
    assert "TensorFloat-32 needs a CUDA device" in written
    assert "Published: A study." in written
    [section] = [
        one
        for one in study_page(summary_of(result), tmp_path).sections
        if one.key == "published"
    ]
    table = section.blocks[0]
    assert isinstance(table, Table)
    assert set(map(str, column(table, "GPU"))) == {"A100", ""}
