"""The answer follows the gate where one judged, else the intervals; its code and its command do what they say."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from sdopt.analysis.adoption import PLAIN, command_of, lines_of
from sdopt.analysis.answer import REPEATS, OptionAnswer, Worth, _in_words, answer_of
from sdopt.analysis.figures import Ratio, figures_of
from sdopt.analysis.measures import RULED, Measure
from sdopt.config.paths import CONF
from sdopt.contract import Contract
from sdopt.gate.judge import exit_code
from sdopt.report.rows import rows_of
from sdopt.results.comparisons import Interval, ShapeRatios
from sdopt.results.files import read_result
from sdopt.results.records import Status, StudyResult, VariantResult
from sdopt.results.scores import BrokenImage, Score
from sdopt.results.verdicts import Judgement, Payoff, Ruling, Verdict
from sdopt.schema import Gate
from sdopt.tracking.projection import variant_tags
from tests.records import reconfigure

RECORD = Path(__file__).parents[2] / "outputs" / "records" / "amd-epyc" / "quickstart"
NAME = "channels last"


@pytest.fixture(scope="module")
def recorded() -> StudyResult:
    return read_result(RECORD)


@pytest.fixture
def study(recorded: StudyResult) -> StudyResult:
    """One option against the baseline, without a gate."""
    found = deepcopy(recorded)
    found.variants = [v for v in found.variants if v.name in (found.baseline, NAME) or v.role == "control"]
    found.comparisons = [edge for edge in found.comparisons if edge.candidate != "bfloat16"]
    found.comparisons = [edge for edge in found.comparisons if edge.candidate in {v.name for v in found.variants}]
    found.judgements, found.gate = [], ""
    for row in found.variants:
        row.measurements[0].shapes[0].traced = {"operators": 2.0 if row.name == NAME else 1.0}
    found.comparisons[0].shapes[0].floor = 1.02
    found.comparisons[0].shapes[0].memory_ratio = Interval(1.0, 0.99, 1.01, 0.95, 3, "process")
    return found


def test_a_row_has_the_verdict_on_its_own_comparison(study: StudyResult) -> None:
    [edge, *_] = [edge for edge in study.comparisons if edge.candidate == NAME]
    study.comparisons.append(replace(edge, reference=next(v.name for v in study.variants if v.role == "control")))
    answer, rows = answer_of(study), figures_of(study)
    assert [option for row in rows if (option := answer.on(row))] == list(answer.options)
    assert [row.reference for row in rows if answer.on(row)] == [option.reference for option in answer.options]
    assert len(answer.options) == 2


@pytest.mark.parametrize("measure", RULED.values(), ids=lambda measure: measure.name)
def test_every_measure_says_a_gain_and_a_harm_in_words(measure: Measure) -> None:
    name = f"{measure.name}/512x512b1"
    said = [_in_words({name: Ratio(measure, Interval(measure.gain(gain)), None)}, [name]) for gain in (2.0, 0.5)]
    assert said == [f"{measure.better} at 512x512b1", f"{measure.worse} at 512x512b1"]


def only(study: StudyResult) -> OptionAnswer:
    [option] = answer_of(study).options
    return option


def timed(study: StudyResult, estimate: float, low: float | None, high: float | None) -> OptionAnswer:
    study.comparisons[0].shapes[0].speedup = Interval(estimate, low, high, 0.95, 3, "process")
    return only(study)


class TestWithoutAGate:
    @pytest.mark.parametrize(
        ("estimate", "low", "high", "worth", "because"),
        [
            (1.21, 1.08, 1.35, Worth.WORTH_IT, "faster"),
            (0.85, 0.80, 0.90, Worth.HARMFUL, "slower"),
            (1.05, 0.95, 1.15, Worth.UNPROVEN, "too small to count"),
            (1.03, 1.005, 1.05, Worth.UNPROVEN, "its interval includes changes too small to count"),
            (1.025, 1.024, 1.026, Worth.WORTH_IT, "faster"),
            (1.015, 1.012, 1.018, Worth.UNPROVEN, "baselines differed by as much"),
            (1.5, None, None, Worth.UNPROVEN, "protocol.replicates=3"),
            (0.998, 0.992, 1.004, Worth.NO_BENEFIT, "excludes a gain that counts (gate.smallest_speedup)"),
        ],
    )
    def test_the_interval_and_the_floor_decide(
        self,
        study: StudyResult,
        estimate: float,
        low: float | None,
        high: float | None,
        worth: Worth,
        because: str,
    ) -> None:
        option = timed(study, estimate, low, high)
        assert option.worth is worth
        assert because in option.because
        assert option.images == "images not judged"
        assert "images were not judged" in answer_of(study).notes[0]

    def test_the_sentence_names_the_option_its_figure_and_its_images(self, study: StudyResult) -> None:
        timed(study, 1.21, 1.08, 1.35)
        said = answer_of(study).sentence
        assert said == "Turn on layout=channels_last: 1.21× [1.08, 1.35], images not judged."

    def test_less_memory_is_worth_some_time_to_an_option_that_claims_only_memory(self, study: StudyResult) -> None:
        study.comparisons[0].shapes[0].memory_ratio = Interval(0.5, 0.48, 0.52, 0.95, 3, "process")
        study.comparisons[0].shapes[0].speedup = Interval(0.85, 0.80, 0.90, 0.95, 3, "process")
        study.variant(NAME).promises["layout"].claims = ["memory"]
        assert only(study).worth is Worth.WORTH_IT
        assert only(study).because == "less memory, at the cost of slower"
        study.variant(NAME).promises["layout"].claims = ["latency", "memory"]
        assert only(study).worth is Worth.HARMFUL

    @pytest.mark.parametrize(
        ("memory", "because"),
        [
            ((0.6, None, None), "no interval, which needs protocol.replicates=3 or more"),
            ((0.6, 0.58, 0.62), "less memory"),
            ((0.97, 0.96, 0.98), "speed: no interval, which needs protocol.replicates=3 or more; memory: {small}"),
        ],
    )
    def test_a_gain_of_memory_that_is_unproven_says_why(
        self, study: StudyResult, memory: tuple[float, float | None, float | None], because: str
    ) -> None:
        for mib, key in ((16, "gate.smallest_memory_mib"), (0, "gate.smallest_memory")):  # 16 MiB are 17 % here
            reconfigure(study, "gate", smallest_memory=0.05, smallest_memory_mib=mib)
            study.comparisons[0].shapes[0].memory_ratio = Interval(*memory, 0.95, 3, "process")
            option = timed(study, 1.02, None, None)
            assert option.because == because.format(small=f"too small to count ({key})")

    def test_a_change_of_memory_too_small_to_count_is_no_gain_anywhere(self, study: StudyResult) -> None:
        study.comparisons[0].shapes[0].memory_ratio = Interval(0.93, 0.92, 0.94, 0.95, 3, "process")
        option = timed(study, 1.21, 1.08, 1.35)
        assert (option.figure, option.because) == ("1.21× [1.08, 1.35]", "faster"), "16 MiB are 17 % here"
        reconfigure(study, "gate", smallest_memory_mib=0)
        option = timed(study, 1.21, 1.08, 1.35)
        assert option.figure == "1.21× [1.08, 1.35], memory 0.93× [0.92, 0.94]"
        assert option.because == "faster and less memory"

    def test_other_work_is_neither_a_gain_nor_a_harm(self, study: StudyResult) -> None:
        reconfigure(study.variant(NAME), "workload", steps=10)
        assert timed(study, 2.0, 1.9, 2.1).worth is Worth.WORTH_IT, "fewer steps are a choice"
        reconfigure(study.variant(NAME), "workload", batch_size=4)
        option = timed(study, 0.5, 0.45, 0.55)
        assert (option.worth, option.because) == (Worth.UNPROVEN, "not the same work: workload.batch_size")

    def test_what_its_reference_chooses_too_changes_nothing(self, study: StudyResult) -> None:
        baseline, row = study.variant(study.baseline), study.variant(NAME)
        row.choices, row.config = baseline.choices, baseline.config
        option = timed(study, 1.3, 1.2, 1.4)
        assert (option.worth, option.because) == (Worth.UNPROVEN, REPEATS)
        assert {row.variant: row.evidence for row in rows_of(study)}[NAME].endswith(REPEATS)

    def test_of_several_shapes_one_that_is_slower_is_a_harm(self, study: StudyResult) -> None:
        owners: list[StudyResult | VariantResult] = [study, *study.variants]
        for owner in owners:
            reconfigure(owner, "workload", size=[64, 96])
        for row in study.variants:
            for measurement in row.measurements:
                measurement.shapes.append(replace(measurement.shapes[0]))
        edge = study.comparisons[0]
        for compared in study.comparisons:
            compared.shapes.append(ShapeRatios(floor=1.02))
        edge.shapes[0].speedup = Interval(1.3, 1.2, 1.4, 0.95, 3, "process")
        edge.shapes[1].speedup = Interval(1.2, 1.1, 1.3, 0.95, 3, "process")
        option = only(study)
        assert (option.worth, option.because) == (Worth.WORTH_IT, "faster at 64x64b1 and faster at 96x96b1")
        assert option.figure == "1.30× [1.20, 1.40] at 64x64b1, 1.20× [1.10, 1.30] at 96x96b1"
        assert "'workload.size=[64,96]'" in option.command
        edge.shapes[1].speedup = Interval(0.8, 0.7, 0.9, 0.95, 3, "process")
        option = only(study)
        assert (option.worth, option.because) == (Worth.HARMFUL, "slower at 96x96b1")

    def test_identical_images_need_no_judge(self, study: StudyResult) -> None:
        study.comparisons[0].quality["mse"] = Score(0.0, per_prompt=[0.0, 0.0])
        assert only(study).images == "images identical"

    def test_leaving_an_option_out_tells_what_it_contributes(self, study: StudyResult) -> None:
        baseline, full = study.variant(study.baseline), study.variant(NAME)
        left = deepcopy(baseline)
        left.name, left.role = "without layout=channels_last", "variant"
        study.variants.append(left)
        edge = study.comparisons[0]
        edge.candidate, edge.reference = left.name, full.name
        edge.shapes[0].speedup = Interval(1.2, 1.1, 1.3, 0.95, 3, "process")
        option = next(found for found in answer_of(study).options if found.variant == left.name)
        assert option.worth is Worth.HARMFUL
        edge.shapes[0].speedup = Interval(0.8, 0.75, 0.85, 0.95, 3, "process")
        option = next(found for found in answer_of(study).options if found.variant == left.name)
        assert option.worth is Worth.WORTH_IT
        assert option.figure == "1.25× [1.18, 1.33]"
        assert "layout=channels_last" in option.command


class TestBroken:
    @pytest.mark.parametrize("status", [Status.NOT_ENGAGED, Status.FAILED, Status.OUT_OF_MEMORY, Status.KILLED])
    def test_what_failed_or_took_no_effect_is_broken_whatever_its_times(
        self, study: StudyResult, status: Status
    ) -> None:
        study.variant(NAME).status, study.variant(NAME).reason = status, "the reason"
        option = timed(study, 1.5, 1.4, 1.6)
        assert option.worth is Worth.BROKEN
        assert "the reason" in option.because
        assert answer_of(study).sentence.startswith("Leave layout=channels_last off: it is broken")

    def test_broken_images_are_named(self, study: StudyResult) -> None:
        study.variant(NAME).trips = [BrokenImage("black", study.variant(NAME).images[0].path, "all zero")]
        assert timed(study, 1.5, 1.4, 1.6).worth is Worth.BROKEN
        assert "black" in only(study).because

    def test_what_was_skipped_or_interrupted_is_not_called_broken(self, study: StudyResult) -> None:
        study.variant(NAME).status = Status.SKIPPED
        assert timed(study, 1.5, 1.4, 1.6).worth is Worth.NOT_MEASURED


class TestWithAGate:
    def judged(self, study: StudyResult, verdict: Verdict, reason: str, gains: list[str]) -> OptionAnswer:
        timed(study, 1.21, 1.08, 1.35)
        rulings = [
            Ruling("at_most", "mse", Verdict.PASS, "small"),
            Ruling("must pay", "", verdict, reason, payoff=next((p for p in Payoff if reason.startswith(p)), None)),
        ]
        study.gate = "default"
        study.judgements = [
            Judgement(NAME, study.baseline, "layout=channels_last", Contract.EQUIVALENT, verdict, rulings, gains=gains)
        ]
        return only(study)

    def test_a_pass_with_a_gain_is_worth_it_and_its_images_are_equal(self, study: StudyResult) -> None:
        assert self.judged(study, Verdict.PASS, "it pays", ["speedup"]).worth is Worth.WORTH_IT
        assert answer_of(study).sentence == "Turn on layout=channels_last: 1.21× [1.08, 1.35], images equal."

    @pytest.mark.parametrize(
        ("verdict", "reason", "said"),
        [
            (Verdict.FAIL, "harm: speedup 0.9×", "harmful: speedup 0.9×"),
            (Verdict.FAIL, "no benefit: speedup 1×", "no gain: speedup 1×"),
            (Verdict.INCONCLUSIVE, "speedup 1.02× straddles", "unproven: speedup 1.02× straddles"),
            (Verdict.NOT_COMPARABLE, "the reference failed", "unproven: the reference failed"),
        ],
    )
    def test_the_gate_has_the_last_word_over_the_interval_and_says_it_once(
        self, study: StudyResult, verdict: Verdict, reason: str, said: str
    ) -> None:
        option = self.judged(study, verdict, reason, [])
        assert f"{option.worth}: {option.because}" == said

    def test_what_disturbed_several_rulings_is_said_once(self, study: StudyResult) -> None:
        self.judged(study, Verdict.INCONCLUSIVE, "speedup 1.21×", [])
        [judgement] = study.judgements
        judgement.rulings += [
            Ruling("at_least", "speedup", Verdict.INCONCLUSIVE, "1.1 reaches 0.95"),
            Ruling("at_most", "tail_ratio", Verdict.INCONCLUSIVE, "1.1 stays within 1.25"),
        ]
        for ruling in judgement.rulings[1:]:
            ruling.doubt = "other work disturbed it"
        judgement.rulings.append(Ruling("undisturbed", "", Verdict.INCONCLUSIVE, "other work disturbed it"))
        assert only(study).because == "other work disturbed it"

    def test_a_claim_that_fails_the_gate_is_never_called_unproven(self, study: StudyResult) -> None:
        """More processes may settle what is unproven; the gate fails only what they would not change."""
        self.judged(study, Verdict.FAIL, "no benefit: speedup 1×", [])
        assert exit_code(study.judgements, Gate()) == 1
        assert only(study).worth is Worth.NO_BENEFIT
        assert answer_of(study).sentence.startswith("Leave layout=channels_last off: 1.21× [1.08, 1.35], no gain (")
        assert variant_tags(study, study.variant(NAME))["worth"] == "no gain"

    def test_images_that_fail_are_harmful(self, study: StudyResult) -> None:
        self.judged(study, Verdict.PASS, "it pays", ["speedup"])
        study.judgements[0].verdict = study.judgements[0].rulings[0].verdict = Verdict.FAIL
        option = only(study)
        assert (option.worth, option.images) == (Worth.HARMFUL, "images worse than the gate allows")

    def test_the_best_of_several_comes_first_and_the_others_are_named(self) -> None:
        answer = answer_of(read_result(RECORD.parent / "fastest"))
        worth = [option for option in answer.options if option.worth is Worth.WORTH_IT]
        assert len(worth) > 1
        assert answer.best in worth
        first, others = answer.sentence.split("Also worth it, each on its own: ")
        assert first.startswith(f"Turn on {answer.best.option}: {answer.best.figure}, {answer.best.images}.")
        assert all(option.option in others for option in worth if option is not answer.best)


class TestAdoption:
    def test_the_command_measures_the_option_alone_with_the_work_of_its_preset(self, recorded: StudyResult) -> None:
        variant = deepcopy(recorded.variant("bfloat16"))
        variant.config = replace(variant.config, workload=replace(variant.config.workload, steps=20))
        command = command_of(variant, recorded.variant(recorded.baseline))
        assert command.startswith("sdopt run workload.steps=20 gate=default ")
        assert command.endswith(" precision=bf16")

    def test_the_command_names_what_a_preset_chose_for_both_sides(self, recorded: StudyResult) -> None:
        variant, baseline = deepcopy(recorded.variant("bfloat16")), deepcopy(recorded.variant(recorded.baseline))
        for side in (variant, baseline):
            side.choices |= {"scheduler": "plms", "layout": "channels_last", "caching": "deepcache(interval=2)"}
        command = command_of(variant, baseline)
        assert "scheduler=plms" in command
        assert "layout=channels_last" in command
        assert "'study.baseline=[caching:deepcache,layout:channels_last]'" in command
        assert command.endswith(" precision=bf16")

    def test_default_options_are_those_of_the_configuration(self) -> None:
        defaults = OmegaConf.load(CONF / "config.yaml").defaults
        found = {group: option for each in defaults if isinstance(each, DictConfig) for group, option in each.items()}
        assert {group: found[group] for group in PLAIN} == PLAIN

    def test_code_around_calls_goes_around_the_call(self, recorded: StudyResult) -> None:
        variant, baseline = deepcopy(recorded.variant("inference mode")), recorded.variant(recorded.baseline)
        variant.snippets = {"grad_mode": ["import torch", "with torch.inference_mode():"]}
        assert lines_of(variant, baseline) == [
            "import torch",
            "with torch.inference_mode():",
            "    image = pipe(prompt).images[0]",
        ]

    def test_what_only_sdopt_has_is_one_call_of_optimize(self, recorded: StudyResult) -> None:
        variant, baseline = deepcopy(recorded.variant("math attention")), recorded.variant(recorded.baseline)
        variant.choices |= {"memory.vae_slicing": "vae_slicing", "caching": "deepcache(interval=2)"}
        variant.promises |= dict.fromkeys(("memory.vae_slicing", "caching"), variant.promises["attention"])
        variant.snippets |= {"memory.vae_slicing": []}
        variant.overrides += ["caching=deepcache", "caching.interval=2"]
        assert lines_of(variant, baseline) == [
            "import sdopt",
            'sdopt.optimize(pipe, "caching.interval=2", caching="deepcache", attention="math", memory=["vae_slicing"])',
        ]
