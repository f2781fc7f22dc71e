"""Each figure is derived once: table, plot, tracker, data frame and objective say the same."""

from dataclasses import replace

import pytest

from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import Memory
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.report.outcome import Outcome, load_result
from sdopt.report.summary import summary_of
from sdopt.report.tables import ranking, to_dataframe
from sdopt.statistics.comparing import compare
from sdopt.statistics.disturbance import noise_of
from sdopt.statistics.figures import first_rows
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP, Ratio
from sdopt.tracking.contents import logged_metrics
from tests.command import Finished
from tests.records import column


class TestRatio:
    @pytest.mark.parametrize(
        ("estimate", "inside"),
        [(1.1, True), (1 / 1.1, True), (1.2, False), (0.8, False)],
    )
    def test_must_exceed_the_floor_in_either_direction(
        self, estimate: float, inside: bool
    ) -> None:
        assert Ratio(SPEEDUP, Interval(estimate), 1.1 + 1e-9).within_floor is inside

    @pytest.mark.parametrize(
        ("interval", "gain"),
        [
            (Interval(1.5, 1.2, 1.9), 1),
            (Interval(1.5), 0),
            (Interval(0.5, 0.4, 0.6), -1),
            (Interval(1.5, 0.9, 2.5), 0),
            (Interval(1.05, 1.04, 1.06), 0),
            (Interval(1.16, 1.14, 1.18), 0),
        ],
    )
    def test_is_a_gain_only_if_the_interval_the_floor_and_its_size_say_so(
        self, interval: Interval, gain: int
    ) -> None:
        assert Ratio(SPEEDUP, interval, 1.1, smallest=1.15).gain == gain
        assert Ratio(MEMORY_RATIO, interval, 1.1, smallest=1.15).gain == -gain


class TestOneFigureEverywhere:
    def test_memory_is_the_amount_of_which_the_ratio_is_made(
        self, result: StudyResult
    ) -> None:
        edge = result.comparisons[0]
        for name, peaks in (
            ("baseline", (0.5, 0.5, 0.5)),
            (edge.candidate, (0.25, 0.5, 1.0)),
        ):
            for measured, peak in zip(
                result.variant(name).measurements, peaks, strict=True
            ):
                measured.shapes[0].memory, measured.memory_after = (
                    Memory(0.0, 0.1),
                    Memory(0.0, peak),
                )
        compare(result)
        rows = first_rows(result)
        amounts = [
            found[1]
            for name in ("baseline", edge.candidate)
            if (found := rows[name].headline_memory)
        ]
        assert amounts == pytest.approx([0.5, 0.5])
        assert edge.shapes[0].memory_ratio is not None
        assert amounts[1] / amounts[0] == pytest.approx(
            edge.shapes[0].memory_ratio.estimate
        )
        assert {"+0 % (512 MiB)", "512 MiB"} <= set(
            map(str, column(ranking(summary_of(result)), "memory"))
        )
        flat = rows[edge.candidate].flat
        assert (flat["memory_ratio"], flat["memory/peak_process_gib"]) == (
            edge.shapes[0].memory_ratio.estimate,
            amounts[1],
        )
        assert rows[edge.candidate].largest_memory_gib == 1.0, (
            "a limit is kept by every process or not at all"
        )
        result.variants = result.variants[:2]
        assert noise_of(result)["memory"] == pytest.approx(3.0), (
            "of the larger peak of each process, as everywhere"
        )

    def test_verdict_of_each_comparison(self, result: StudyResult) -> None:
        edge = result.comparisons[0]
        result.comparisons.append(replace(edge, reference="batches of four"))
        result.judgements = [
            Judgement(
                edge.candidate, reference, edge.credit, Contract.LOSSY, verdict, []
            )
            for reference, verdict in (
                (edge.reference, Verdict.PASS),
                ("batches of four", Verdict.FAIL),
            )
        ]
        frame = to_dataframe(summary_of(result))
        rows = frame[frame["variant"] == edge.candidate]
        assert list(zip(rows["gate"], rows["gate/passed"], strict=True)) == [
            ("pass", 1),
            ("fail", 0),
        ]
        passed = logged_metrics(summary_of(result), result.variant(edge.candidate))[
            "gate/passed"
        ]
        assert passed == 0, "the run of a variant is about all its comparisons"
        for judgement in result.judgements:
            judgement.verdict = Verdict.INCONCLUSIVE
        undecided = summary_of(result)
        variant = result.variant(edge.candidate)
        assert "gate/passed" not in logged_metrics(undecided, variant)
        assert "gate/passed" not in undecided.first[edge.candidate].flat

    def test_stages_and_their_rest_add_up_to_the_call(
        self, result: StudyResult
    ) -> None:
        """Also where a cache makes most steps short."""
        row = result.variant("baseline")
        call = {
            "text_encoder": [0.01],
            "denoiser_step": [0.02, 0.003, 0.003, 0.019, 0.003],
            "vae_decoder": [0.03],
        }
        twice = {
            stage: times + [2 * seconds for seconds in times]
            for stage, times in call.items()
        }
        row.denoiser_calls = 5
        for stages_s, seconds in ((call, 0.088), (twice, 1.5 * 0.088)):
            for measurement in row.measurements:
                measurement.stages_s = {} if measurement.replicate else stages_s
            assert sum(
                first_rows(result)["baseline"].call_ms.values()
            ) == pytest.approx(1000 * seconds)


class TestDataFrame:
    def test_has_a_row_per_option_and_nothing_for_what_was_not_measured(
        self, result: StudyResult
    ) -> None:
        frame = Outcome.of(result).table()
        names = [row.name for row in summary_of(result).rows]
        assert list(frame["variant"]) == names, "without the repeated baseline"
        first = [
            "variant",
            "speedup",
            "latency/p50_s",
            "memory_ratio",
            "speed",
            "images",
            "gate",
        ]
        assert [*frame.columns[:7]] == first, "of which a notebook shows ten"
        skipped = frame.set_index("variant").loc["TensorFloat-32"]
        assert skipped["status"] == Status.SKIPPED
        assert frame["speedup"].isna().sum() == 2, (
            "of the baseline and of what was skipped"
        )
        assert frame["speedup"].dtype == frame["latency/p50_s"].dtype == float
        assert frame["speedup"].round(2).gt(0).sum() == 2
        assert (frame["against"] == "").sum() == 1
        assert frame.set_index("variant").loc["bfloat16", "precision"] == "bf16"

    def test_shows_itself_as_a_picture_and_in_words(self, finished: Finished) -> None:
        outcome = load_result(finished.folder)
        assert outcome.plot().width == 1350
        assert outcome.images(prompts=1).width > 300
        assert outcome.table().to_latex().startswith(r"\begin{tabular}")
        assert repr(outcome.answer()).startswith(f"{outcome.answer().sentence}\n")
        with pytest.raises(UsageError, match="no images"):
            Outcome.of(outcome).images()
