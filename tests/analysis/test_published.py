"""The figures of an article beside those measured: how they are read, compared and judged."""

from collections.abc import Callable
from typing import Any

import pytest

from sdopt.analysis.article import Printed, Published, PublishedTable, read_figure, require_published
from sdopt.analysis.figures import figures_by_variant
from sdopt.analysis.published import (
    MEMORY,
    Claim,
    Reproduction,
    claims_of,
    is_card,
    notes_of_published,
    published_of,
    shown_claims,
)
from sdopt.errors import UsageError
from sdopt.results.comparisons import Interval
from sdopt.results.records import Status, StudyResult
from sdopt.results.samples import Memory
from tests.records import reconfigure

Article = Callable[..., list[Claim]]


@pytest.fixture
def article(result: StudyResult) -> Article:
    """Gives the finished study an article of one table, and returns the claims: `article(time={...})`."""

    def claims(setup: dict[str, Any] | None = None, gpus: tuple[str, ...] = ("A100",), **table: Any) -> list[Claim]:
        tables = [{"place": "Table 1", "gpus": list(gpus), **table}]
        published = {"article": "A study", "gpu": "A100", "setup": setup or {}, "tables": tables, "notes": ["It says."]}
        result.config.study["published"] = published
        return claims_of(result)

    return claims


def speedup_of(result: StudyResult, estimate: float, low: float | None = None, high: float | None = None) -> None:
    result.comparisons[0].shapes[0].speedup = Interval(estimate, low, high)


def on_a_gpu(result: StudyResult, gib: dict[str, float]) -> None:
    """Gives variants peaks of a GPU's memory, alike in all processes, as they are there."""
    for name, peak in gib.items():
        for measurement in result.variant(name).measurements:
            measurement.shapes[0].memory = Memory(1.0, 1.0, cuda_peak_allocated_gib=peak)


class TestFigures:
    @pytest.mark.parametrize(
        ("text", "value", "low", "high"),
        [
            ("6.4", 6.4, 6.35, 6.45),
            ("2.00", 2.0, 1.995, 2.005),
            ("29", 29, 28.5, 29.5),
            ("-101.7", -101.7, -101.75, -101.65),
            ("<3", 3, 0, 3),
        ],
    )
    def test_are_known_to_their_last_digit(self, text: str, value: float, low: float, high: float) -> None:
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
            ({"time": {"baseline": "10.0", "bfloat16": "25.0"}, "unit": "it/s"}, 2.5),
            ({"time_saved": {"bfloat16": "38.5"}, "reference": "baseline"}, 1 / 0.615),
            ({"time_saved": {"bfloat16": "-100"}, "reference": "baseline"}, 0.5),
            ({"speedup": {"bfloat16": "2.67"}, "reference": "baseline"}, 2.67),
            ({"time": {"baseline": 6, "bfloat16": 3}}, 2.0),
        ],
        ids=["times", "rates", "share of the time", "slower", "factor", "numbers instead of strings"],
    )
    def test_make_a_speedup(self, article: Article, table: dict[str, Any], speedup: float) -> None:
        claim = article(**table)[0]
        assert claim.published is not None
        assert claim.published.value == pytest.approx(speedup)
        assert claim.published.low < claim.published.value < claim.published.high

    def test_of_a_gain_are_those_of_the_article_before_those_of_rounded_times(self, article: Article) -> None:
        claim = article(
            reference="baseline", time={"baseline": "6.7", "bfloat16": "4.1"}, time_saved={"bfloat16": "38.5"}
        )[0]
        assert claim.published is not None
        assert claim.published.value == pytest.approx(1 / 0.615)
        assert claim.printed == "38.5 % of the time saved; 6.7 s → 4.1 s"

    def test_are_read_for_each_card(self, article: Article) -> None:
        claims = article(gpus=("P100", "A100"), time={"baseline": "30.4 8.0", "bfloat16": "- 4.0"})
        of_bfloat16 = [claim for claim in claims if claim.variant == "bfloat16"]
        assert [(claim.gpu, claim.printed) for claim in of_bfloat16] == [("A100", "8.0 s → 4.0 s")]

    @pytest.mark.parametrize(
        ("table", "problem"),
        [
            ({"time": {"nobody": "1"}}, "the study has no variant 'nobody'"),
            ({"time": {"a": "1 2"}}, "'a' has 2 figures for 1 cards"),
            ({"time": {"a": "fast"}}, "fast is not a number"),
            ({"speedup": {"b": "2"}}, "has speed-ups but no reference"),
            ({"time_saved": {"b": "100"}, "reference": "a"}, "less than 100"),
        ],
    )
    def test_that_cannot_be_right_are_a_mistake(self, table: dict[str, Any], problem: str) -> None:
        published = Published("A study", "A100", tables=[PublishedTable("Table 1", ["A100"], **table)])
        with pytest.raises(UsageError, match=problem) as caught:
            require_published(published, ["a", "b"])
        assert "study.published (Table 1)" in str(caught.value)


TIMES = {"baseline": "6.0", "bfloat16": "3.0"}
"""Twice as fast, or between 1.95 and 2.05 times, as the times are rounded."""


class TestVerdicts:
    @pytest.mark.parametrize(
        ("bounds", "verdict", "reason"),
        [
            ((2.0, 1.8, 2.2), Reproduction.REPRODUCED, "within"),
            ((3.0, 2.5, 3.5), Reproduction.REPRODUCED, "exceeded"),
            ((1.95, 1.9, 1.97), Reproduction.REPRODUCED, "within"),
            ((1.5, 1.3, 1.7), Reproduction.NOT_REPRODUCED, "falls short"),
            ((2.5,), Reproduction.UNDECIDED, "protocol.replicates=3"),
        ],
        ids=["within", "exceeded", "equal as far as it was printed", "short", "no interval"],
    )
    def test_on_a_speedup(
        self, result: StudyResult, article: Article, bounds: tuple[float, ...], verdict: Reproduction, reason: str
    ) -> None:
        speedup_of(result, *bounds)
        claim = article(time=TIMES)[0]
        assert claim.verdict is verdict
        assert reason in claim.reason
        assert claim.ratio is not None
        assert claim.ratio.estimate == pytest.approx(bounds[0] / 2)
        assert claim.ratio.low == (pytest.approx(bounds[1] / 2) if len(bounds) > 1 else None)

    def test_names_the_times_that_its_ratio_is_of(self, result: StudyResult, article: Article) -> None:
        latencies = [figures_by_variant(result)[name].latency for name in TIMES]
        assert article(time=TIMES)[0].amounts == tuple(latency.estimate for latency in latencies if latency)
        result.variant("baseline").status = Status.KILLED
        assert article(time=TIMES)[0].amounts == ()

    def test_a_skipped_row_says_why(self, article: Article) -> None:
        [claim] = [c for c in article(time={"baseline": "6", "TensorFloat-32": "3"}) if c.variant == "TensorFloat-32"]
        assert claim.verdict is Reproduction.NOT_RUN
        assert "needs a CUDA device" in claim.reason
        assert claim.published is not None
        assert claim.measured is claim.ratio is None

    def test_a_row_whose_reference_did_not_run_names_it(self, result: StudyResult, article: Article) -> None:
        result.variant("baseline").status = Status.KILLED
        claim = article(time=TIMES)[0]
        assert (claim.verdict, claim.reason) == (Reproduction.NOT_RUN, "baseline: killed")

    def test_an_option_without_effect_reproduces_nothing(self, result: StudyResult, article: Article) -> None:
        result.variant("bfloat16").status = Status.NOT_ENGAGED
        assert article(time=TIMES)[0].verdict is Reproduction.NOT_RUN

    @pytest.mark.parametrize(
        ("setup", "said"),
        [
            ({"model": "sd15"}, "model emoji instead of sd15"),
            ({"steps": 50}, "steps 2 instead of 50"),
            ({"size": 512}, "size 32 instead of 512"),
            ({"images": 4}, "images per call 1 instead of 4"),
            ({"scheduler": "PNDMScheduler"}, "scheduler DDIMScheduler instead of PNDMScheduler"),
        ],
    )
    def test_other_work_is_not_compared(self, article: Article, setup: dict[str, Any], said: str) -> None:
        claim = article(setup, time=TIMES)[0]
        assert claim.verdict is Reproduction.NOT_COMPARABLE
        assert said in claim.reason
        assert claim.ratio is None

    def test_the_same_work_is(self, result: StudyResult, article: Article) -> None:
        speedup_of(result, 2.0, 1.9, 2.1)
        setup = {"model": "emoji", "steps": 2, "size": 32, "images": 1, "scheduler": "DDIMScheduler"}
        assert article(setup, time=TIMES)[0].verdict is Reproduction.REPRODUCED
        reconfigure(result, "workload", steps=3)
        assert article(setup, time=TIMES)[0].verdict is Reproduction.NOT_COMPARABLE

    def test_a_row_without_a_figure_is_listed(self, article: Article) -> None:
        claims = article(time=TIMES)
        assert [claim.variant for claim in claims] == ["bfloat16", "batches of four", "TensorFloat-32"]
        assert [claim.verdict for claim in claims[1:]] == [Reproduction.NO_FIGURE, Reproduction.NOT_RUN]


class TestMemory:
    def test_of_a_cpu_is_not_that_of_a_gpu(self, article: Article) -> None:
        claim = article(memory_gb={"baseline": "28.09", "bfloat16": "21.72"})[0]
        assert (claim.measure, claim.verdict) == ("memory_ratio", Reproduction.NOT_COMPARABLE)
        assert "on a CPU" in claim.reason

    @pytest.mark.parametrize(
        ("ratio", "verdict"),
        [(0.7732, Reproduction.REPRODUCED), (0.5, Reproduction.REPRODUCED), (0.78, Reproduction.NOT_REPRODUCED)],
        ids=["equal as far as it was printed", "less", "more"],
    )
    def test_ratio(self, result: StudyResult, article: Article, ratio: float, verdict: Reproduction) -> None:
        on_a_gpu(result, {"baseline": 10.0, "bfloat16": 10.0 * ratio})
        result.comparisons[0].shapes[0].memory_ratio = Interval(ratio, ratio, ratio)
        claim = article(memory_gb={"baseline": "28.09", "bfloat16": "21.72"})[0]
        assert claim.verdict is verdict
        assert claim.printed == "28.09 GB → 21.72 GB"
        assert claim.amounts == pytest.approx((10.737, 10.737 * ratio), rel=1e-3)

    @pytest.mark.parametrize(("gib", "verdict"), [(2.7, Reproduction.REPRODUCED), (2.9, Reproduction.NOT_REPRODUCED)])
    def test_limit_is_of_the_variant_alone(
        self, result: StudyResult, article: Article, gib: float, verdict: Reproduction
    ) -> None:
        """3 GB are 2.79 GiB."""
        on_a_gpu(result, {"bfloat16": gib})
        result.comparisons.append(type(result.comparisons[0])("bfloat16", "batches of four", "nothing"))
        claims = [claim for claim in article(memory_limit_gb={"bfloat16": "<3"}) if claim.measure == MEMORY]
        assert [(c.variant, c.reference, c.verdict) for c in claims] == [("bfloat16", "", verdict)]
        assert claims[0].amounts == ()

    def test_that_ran_out_is_reproduced_only_if_it_ran_out_here(self, result: StudyResult, article: Article) -> None:
        table = {"time": {"baseline": "OOM", "bfloat16": "13.86"}, "memory_gb": {"baseline": "OOM", "bfloat16": "6.89"}}
        assert {claim.verdict for claim in article(**table)[:2]} == {Reproduction.NOT_COMPARABLE}
        result.variant("baseline").status = Status.OUT_OF_MEMORY
        assert {claim.verdict for claim in article(**table)[:2]} == {Reproduction.REPRODUCED}


class TestCards:
    @pytest.mark.parametrize(
        ("gpu", "device", "same"),
        [
            ("A100", "NVIDIA A100-SXM4-40GB", True),
            ("A10", "NVIDIA A100-SXM4-40GB", False),
            ("A10", "NVIDIA A10G", False),
            ("NVIDIA Tesla T4", "Tesla T4", True),
            ("NVIDIA 3060 RTX", "NVIDIA GeForce RTX 3060", True),
            ("NVIDIA 3060 RTX", "NVIDIA GeForce RTX 3060 Ti", False),
            ("NVIDIA TITAN RTX", "NVIDIA TITAN V", False),
            ("A100 (40 GB)", "NVIDIA A100-SXM4-40GB", True),
            ("A100 (40 GB)", "NVIDIA A100-SXM4-80GB", False),
            ("A100-SXM-80GB", "NVIDIA A100-SXM4-80GB", True),
            ("A100 (40 GB)", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", False),
        ],
    )
    def test_are_known_by_the_drivers_name(self, gpu: str, device: str, same: bool) -> None:
        assert is_card(gpu, device) is same

    def test_of_this_machine_is_shown_else_the_main_one(self, result: StudyResult, article: Article) -> None:
        claims = article(gpus=("T4", "A10", "A100"), time={"baseline": "3 3 3", "bfloat16": "2 2 2"})
        assert {claim.gpu for claim in shown_claims(result, claims)} == {"A100", ""}
        result.environment.device["name"] = "NVIDIA A10"
        assert {claim.gpu for claim in shown_claims(result, claims)} == {"A10", ""}


def test_a_study_without_an_article_has_no_claims(result: StudyResult) -> None:
    assert published_of(result) is None
    assert not claims_of(result)
    assert not shown_claims(result, [])
    assert not notes_of_published(result, [])


def test_the_notes_count_and_name_the_machine(result: StudyResult, article: Article) -> None:
    notes = notes_of_published(result, article(time=TIMES))
    assert "Published: A study." in notes
    assert "It says." in notes
    assert any("1 no figure" in note and "1 not run" in note for note in notes)
    assert any(str(result.environment.device["name"]) in note and "are not" in note for note in notes)
