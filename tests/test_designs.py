"""Which variants a design measures, and which it compares."""

import pytest

from sdopt.config import HydraComposer
from sdopt.designs import BASELINE, Design, Edge, Plan, difference
from sdopt.errors import UsageError

Composers = type[HydraComposer]


def plan(composer: Composers, *overrides: str) -> Plan:
    job = composer(overrides)
    return job.current.study.plan(job)


def explicit(composer: Composers, variants: str, *overrides: str) -> Plan:
    return plan(composer, "study=explicit", f"study.variants={{{variants}}}", *overrides)


class TestPair:
    def test_the_composed_configuration_against_a_plain_baseline(self, composer: Composers) -> None:
        found = plan(composer, "precision=bf16", "attention=math", "workload.steps=3")
        baseline, candidate = found.variants
        assert found.baseline is baseline
        assert baseline.name == BASELINE
        assert baseline.choices == composer([]).variant("default").choices
        assert baseline.optimizations == composer([]).variant("default").optimizations
        assert baseline.workload.steps == candidate.workload.steps == 3
        assert found.edges == (Edge(candidate.name, BASELINE, "precision=bf16, attention=math"),)

    def test_a_baseline_can_be_written_out(self, composer: Composers) -> None:
        found = plan(composer, "precision=bf16", "study.baseline=['precision=bf16','attention=vanilla']")
        assert found.baseline.choices["precision"] == "bf16"
        assert found.baseline.choices["attention"] == "vanilla"
        assert found.edges[0].credit == "attention=default"

    @pytest.mark.parametrize("overrides", [[], ["precision=fp32", "grad_mode=no_grad"], ["workload.steps=3"]])
    def test_the_baseline_itself_is_compared_with_its_control_alone(
        self, composer: Composers, overrides: list[str]
    ) -> None:
        found = plan(composer, *overrides)
        assert [variant.name for variant in found.variants] == [BASELINE]
        assert found.edges == ()

    def test_a_written_baseline_of_another_workload_is_compared(self, composer: Composers) -> None:
        """The optimizations are the same, but the user asked for this comparison."""
        found = plan(composer, "workload.steps=3", "study.baseline=['workload.steps=6']")
        assert [variant.workload.steps for variant in found.variants] == [6, 3]
        assert len(found.edges) == 1

    def test_a_mistake_in_the_baseline_names_it(self, composer: Composers) -> None:
        with pytest.raises(UsageError, match=r"variant 'baseline': .*workload\.steps=0"):
            plan(composer, "precision=bf16", "study.baseline=['workload.steps=0']")


class TestExplicit:
    def test_each_is_compared_with_the_first(self, composer: Composers) -> None:
        found = explicit(composer, "plain: [], half: ['precision=bf16'], both: ['precision=bf16','attention=math']")
        assert [variant.name for variant in found.variants] == ["plain", "half", "both"]
        assert found.edges == (
            Edge("half", "plain", "precision=bf16"),
            Edge("both", "plain", "precision=bf16, attention=math"),
        )

    def test_edges_can_be_written_out_with_credits_or_without(self, composer: Composers) -> None:
        found = explicit(
            composer,
            "plain: [], half: ['precision=bf16'], both: ['precision=bf16','attention=math']",
            "study.edges=[{candidate: both, reference: half}, {candidate: half, reference: plain, credit: half of it}]",
        )
        assert found.edges == (Edge("both", "half", "attention=math"), Edge("half", "plain", "half of it"))

    def test_an_edge_credits_going_back_to_the_default(self, composer: Composers) -> None:
        found = explicit(composer, "half: ['precision=bf16'], plain: []")
        assert found.edges == (Edge("plain", "half", "precision=fp32"),)

    def test_unknown_names_are_all_reported_with_the_known_ones(self, composer: Composers) -> None:
        with pytest.raises(UsageError) as caught:
            explicit(
                composer,
                "plain: [], half: ['precision=bf16']",
                "study.edges=[{candidate: hafl, reference: plain}, {candidate: half, reference: plian}]",
            )
        assert [problem.split(";")[0] for problem in caught.value.problems] == [
            "study.edges: no variant is called 'hafl'",
            "study.edges: no variant is called 'plian'",
        ]
        assert all("there are plain, half" in problem for problem in caught.value.problems)

    def test_an_edge_needs_both_ends(self, composer: Composers) -> None:
        with pytest.raises(UsageError, match=r"study.*reference"):
            explicit(composer, "plain: []", "study.edges=[{candidate: plain}]")

    def test_needs_a_variant(self, composer: Composers) -> None:
        with pytest.raises(UsageError, match=r"study\.variants: .* at least one"):
            plan(composer, "study=explicit")

    def test_one_variant_is_compared_with_its_control_alone(self, composer: Composers) -> None:
        assert explicit(composer, "plain: []").edges == ()

    def test_mistakes_name_the_variant(self, composer: Composers) -> None:
        with pytest.raises(UsageError, match=r"variant 'broken': workload\.steps=0: must be at least 1"):
            explicit(composer, "plain: [], broken: ['workload.steps=0']")
        with pytest.raises(UsageError, match=r"variant 'broken': .*workload\.stesp"):
            explicit(composer, "plain: [], broken: ['workload.stesp=1']")
        with pytest.raises(UsageError, match=r"broken.*precision"):
            explicit(composer, "plain: [], broken: ['precision']")

    def test_an_unknown_option_lists_the_choices(self, composer: Composers) -> None:
        with pytest.raises(UsageError) as caught:
            explicit(composer, "plain: [], broken: ['attention=nope']")
        for option in ("nope", "default", "flash", "vanilla"):
            assert option in str(caught.value)

    def test_a_variant_cannot_take_the_controls_name(self, composer: Composers) -> None:
        with pytest.raises(UsageError, match="A/A control"):
            explicit(composer, "plain: [], 'baseline (A/A control)': ['precision=bf16']")


def test_a_choice_that_only_the_reference_has_is_none() -> None:
    assert difference({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == {"b": "2", "c": "none"}


def test_a_design_without_a_plan_says_so(composer: Composers) -> None:
    with pytest.raises(NotImplementedError):
        Design().plan(composer([]))
