"""Which variants a design measures, and which it compares."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sdopt.config.composer import HydraComposer
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.record.choices import difference
from sdopt.reference import LORAS
from sdopt.report.header import _planned_variants, header_of
from sdopt.report.notes import caveats_of, lora_apart
from sdopt.report.summary import summary_of
from sdopt.schema import Edge
from sdopt.study.designs import BASELINE, Design, Plan
from sdopt.study.plan import plan_result, unused_options
from sdopt.variant import Variant
from sdopt.worker.machine import Machine
from tests.fixtures import CPU, Composers


def plan(composer: Composers, *overrides: str) -> Plan:
    job = composer(overrides)
    return job.current.study.plan(job)


def explicit(composer: Composers, variants: str, *overrides: str) -> Plan:
    return plan(
        composer, "study=explicit", f"study.variants={{{variants}}}", *overrides
    )


BOTH = ("memory=[vae_slicing,vae_tiling]", "memory.vae_tiling.tile_size=64")


def memory_of(variant: Variant) -> dict[str, str]:
    """The choices within the group whose options combine."""
    return {
        axis: option
        for axis, option in variant.choices.items()
        if axis.startswith("memory")
    }


class TestPair:
    def test_the_composed_configuration_against_a_plain_baseline(
        self, composer: Composers
    ) -> None:
        found = plan(composer, "precision=bf16", "attention=math", "workload.steps=3")
        baseline, candidate = found.variants
        assert found.baseline is baseline
        assert baseline.name == BASELINE
        assert baseline.choices == composer([]).variant("default").choices
        assert baseline.optimizations == composer([]).variant("default").optimizations
        assert baseline.workload.steps == candidate.workload.steps == 3
        assert found.edges == (
            Edge(candidate.name, BASELINE, "precision=bf16, attention=math"),
        )

    def test_is_named_by_what_differs_from_its_baseline(
        self, composer: Composers
    ) -> None:
        found = plan(composer, "model=emoji_dit", "attention=math")
        baseline, candidate = found.variants
        assert candidate.name == "attention=math"
        assert candidate.choices["scheduler"] == baseline.choices["scheduler"]
        picture = ("task=img2img", "task.strength=0.7")
        _, candidate = plan(composer, "attention=math", *picture).variants
        assert candidate.name == "attention=math"
        found = plan(composer, "attention=math", "study.baseline=[attention:vanilla]")
        assert found.variants[1].name == "attention=math"

    def test_what_a_study_records_of_the_work_is_its_baselines(
        self, composer: Composers
    ) -> None:
        """Headers, tags, and the calibration are of what was measured, and not of what the command composes."""
        job = composer(
            [
                "study=explicit",
                "study.variants={plain: ['workload.steps:10'], math: ['workload.steps:10','attention:math']}",
            ]
        )
        found = job.current.study.plan(job)
        machine = Machine(CPU, {}, preloaded=True, bad_fork=False)
        result = plan_result(found, "s", "explicit", job.current.recorded, machine, [])
        assert result.config.workload.steps == 10
        assert "10 steps" in header_of(result)[0]

    def test_a_lora_of_all_variants_is_part_of_the_work(
        self, composer: Composers
    ) -> None:
        lora = "lora=loaded"
        job = composer(["study.baseline=[lora:loaded]", lora, "attention=math"])
        alone = composer([lora])
        machine = Machine(CPU, {}, preloaded=True, bad_fork=False)
        headers = []
        for composed in (job, alone):
            found = composed.current.study.plan(composed)
            recorded = composed.current.recorded
            result = plan_result(found, "s", "single", recorded, machine, [])
            headers.append(header_of(result)[0])
            [row, *_] = _planned_variants(result).rows
            assert row[1] == ("lora=loaded" if composed is job else "")
        assert "emoji with LoRA packaged 64×64" in headers[0]
        assert "LoRA" not in headers[1], "which its candidate adds"
        baseline = result.baseline_variant
        baseline.choices["lora"] = "loaded(path=style.safetensors)"
        baseline.config.options["lora"] = {"path": "/my/style.safetensors"}
        assert "emoji with LoRA style.safetensors 64×64" in header_of(result)[0]

    def test_a_baseline_can_be_written_out(self, composer: Composers) -> None:
        found = plan(
            composer,
            "precision=bf16",
            "study.baseline=['precision=bf16','attention=vanilla']",
        )
        assert found.baseline.choices["precision"] == "bf16"
        assert found.baseline.choices["attention"] == "vanilla"
        assert found.edges[0].credit == "attention=default"

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ("caching=deepcache", True),
            ("caching=deepcache study.baseline=[lora:loaded]", False),
            ("scheduler=euler", False),
        ],
    )
    def test_a_lora_in_the_variant_alone_is_said(
        self, composer: Composers, more: str, said: bool
    ) -> None:
        file = f"lora.path={LORAS}"
        words = ["lora=loaded", file, "lora.weight_name=fxemoji.safetensors"]
        job = composer([*words, *more.split()])
        found = job.current.study.plan(job)
        machine = Machine(CPU, {}, preloaded=True, bad_fork=False)
        result = plan_result(found, "s", "pair", job.current.recorded, machine, [])
        remarks = lora_apart(result)
        notes = [note for note in caveats_of(summary_of(result)) if "LoRA" in note]
        way = "study.baseline=[lora:loaded] gives it to the baseline"
        assert [way in remark for remark in remarks] == [True] * said
        assert [way in note for note in notes] == [True] * said
        if not said and found.baseline.choices["lora"] != "none":
            [baseline, candidate] = found.variants
            assert baseline.optimizations["lora"] == candidate.optimizations["lora"]

    @pytest.mark.parametrize(
        "overrides", [[], ["precision=fp32", "grad_mode=no_grad"], ["workload.steps=3"]]
    )
    def test_the_baseline_itself_is_compared_with_its_control_alone(
        self, composer: Composers, overrides: list[str]
    ) -> None:
        found = plan(composer, *overrides)
        assert [variant.name for variant in found.variants] == [BASELINE]
        assert found.edges == ()

    def test_a_written_baseline_of_another_workload_is_compared(
        self, composer: Composers
    ) -> None:
        """The optimizations are the same, but the user asked for this comparison."""
        found = plan(
            composer, "workload.steps=3", "study.baseline=['workload.steps=6']"
        )
        assert [variant.workload.steps for variant in found.variants] == [6, 3]
        assert len(found.edges) == 1


class TestExplicit:
    def test_each_replaces_what_the_job_chose_and_is_compared_with_the_first(
        self, composer: Composers
    ) -> None:
        variants = "plain: ['memory=[]'], one: ['memory=vae_tiling'], both: ['memory=vae_tiling','memory=vae_slicing']"
        found = explicit(composer, variants, *BOTH)
        assert [
            (variant.name, list(memory_of(variant))) for variant in found.variants
        ] == [
            ("plain", []),
            ("one", ["memory.vae_tiling"]),
            ("both", ["memory.vae_tiling", "memory.vae_slicing"]),
        ]
        assert found.edges == (
            Edge("one", "plain", "memory=vae_tiling(tile_size=64)"),
            Edge(
                "both", "plain", "memory=vae_tiling(tile_size=64), memory=vae_slicing"
            ),
        )

    def test_edges_can_be_written_out_with_credits_or_without(
        self, composer: Composers
    ) -> None:
        found = explicit(
            composer,
            "plain: [], half: ['precision=bf16'], both: ['precision=bf16','attention=math']",
            "study.edges=[{candidate: both, reference: half}, {candidate: half, reference: plain, credit: half of it}]",
        )
        assert found.edges == (
            Edge("both", "half", "attention=math"),
            Edge("half", "plain", "half of it"),
        )

    def test_unknown_names_are_all_reported_with_the_known_ones(
        self, composer: Composers
    ) -> None:
        with pytest.raises(UsageError) as caught:
            explicit(
                composer,
                "plain: [], half: ['precision=bf16']",
                "study.edges=[{candidate: hafl, reference: plain}, {candidate: half, reference: plian}]",
            )
        assert [problem.split(";")[0] for problem in caught.value.problems] == [
            "study.edges: no variant 'hafl'",
            "study.edges: no variant 'plian'",
        ]
        assert all(
            "choose from plain, half" in problem for problem in caught.value.problems
        )

    def test_some_of_the_variants_alone(self, composer: Composers) -> None:
        """Where the reference is left out, the first of them takes its place."""
        both = "both: ['precision=bf16','attention=math']"
        given = f"plain: [], half: ['precision=bf16'], math: ['attention=math'], {both}"
        edges = (
            "study.edges=[{candidate: half, reference: plain}, {candidate: math, reference: plain}, "
            "{candidate: both, reference: half}, {candidate: both, reference: math}]"
        )
        found = explicit(composer, given, edges, "study.only=[math,both,half]")
        assert [variant.name for variant in found.variants] == [
            "half",
            "math",
            "both",
        ], "in the study's own order"
        compared = [(edge.candidate, edge.reference) for edge in found.edges]
        assert compared == [("both", "half"), ("both", "math"), ("math", "half")]
        found = explicit(composer, given, edges, "study.only=[plain,both]")
        assert [(edge.candidate, edge.reference) for edge in found.edges] == [
            ("both", "plain")
        ]


def test_a_choice_that_only_the_reference_has_is_none() -> None:
    assert difference({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == {
        "b": "2",
        "c": "none",
    }


def said_of(made: HydraComposer, design: Design) -> list[str]:
    """What of a job its design leaves out, as that is said."""
    found = unused_options(design, design.plan(made), made.chosen(), made.changed)
    return [remark.partition(": no variant")[0] for remark in found]


class TestOneAtATime:
    def test_each_option_alone_on_the_baseline(self, composer: Composers) -> None:
        """Those that the job chose are left out, also where options combine; its workload stays."""
        options = "study.options=[precision:bf16,memory:vae_tiling]"
        job = ("memory=vae_slicing", "layout=channels_last", "workload.steps=3")
        found = plan(composer, "study=one_at_a_time", options, *job)
        assert [variant.name for variant in found.variants] == [
            BASELINE,
            "precision=bf16",
            "memory=vae_tiling",
        ]
        assert [
            (edge.candidate, edge.reference, edge.credit) for edge in found.edges
        ] == [
            ("precision=bf16", BASELINE, "precision=bf16"),
            ("memory=vae_tiling", BASELINE, "memory=vae_tiling"),
        ]
        plain = dict(composer([]).variant("plain").choices)
        assert found.variants[1].choices == plain | {"precision": "bf16"}
        assert found.variants[2].choices == plain | {"memory.vae_tiling": "vae_tiling"}
        assert all(variant.workload.steps == 3 for variant in found.variants)

    @pytest.mark.parametrize(
        ("study", "left_out"),
        [
            ("one_at_a_time study.options=[attention:math,layout:channels_last]", True),
            ("cumulative study.options=[attention:math,layout:channels_last]", True),
            ("one_at_a_time study.options=[precision:bf16,lora:fused]", False),
            ("leave_one_out", False),
            ("pair", False),
            ("explicit study.variants={a:['precision:fp32'],b:['lora:none']}", False),
        ],
    )
    def test_what_the_job_chose_and_no_variant_has_is_said(
        self, composer: Composers, study: str, left_out: bool
    ) -> None:
        """Who asks for options on top of bfloat16 would read figures of float32."""
        job = ("precision=bf16", "lora=fused")
        made = composer([*job, *f"study={study}".split()])
        design = made.current.study
        assert said_of(made, design) == (list(job) if left_out else [])

    @pytest.mark.parametrize(
        ("study", "left_out"),
        [
            ("one_at_a_time study.options=[caching,memory]", [0, 1]),
            ("factorial study.options=[caching:deepcache,memory:vae_tiling]", [0, 1]),
            ("cumulative study.options=[caching:deepcache,caching.interval:5]", [1]),
        ],
    )
    def test_so_is_a_key_that_no_variant_has(
        self, composer: Composers, study: str, left_out: list[int]
    ) -> None:
        """An option that is added has the keys of its file."""
        keys = ["caching.interval=5", "memory.vae_tiling.tile_size=128"]
        job = ["caching=deepcache", "memory=[vae_tiling]", *keys]
        made = composer([*job, *f"study={study}".split()])
        said = [line for line in said_of(made, made.current.study) if "." in line]
        assert said == [keys[number] for number in left_out]

    def test_a_group_is_all_of_its_options(self, composer: Composers) -> None:
        found = plan(
            composer,
            "study=one_at_a_time",
            "study.options=[memory,grad_mode,precision:bf16]",
        )
        memory = [f"memory={option}" for option in options_of("memory")]
        others = ["grad_mode=enabled", "grad_mode=inference_mode", "precision=bf16"]
        assert [variant.name for variant in found.variants] == [
            BASELINE,
            *memory,
            *others,
        ]


class TestCumulative:
    def test_each_step_adds_to_the_one_before_and_is_compared_with_it(
        self, composer: Composers
    ) -> None:
        options = "[memory:vae_tiling,'memory.vae_tiling.tile_size:64',precision:bf16,memory:vae_slicing]"
        found = plan(composer, "study=cumulative", f"study.options={options}")
        tiling = {"memory.vae_tiling": "vae_tiling(tile_size=64)"}
        assert [memory_of(variant) for variant in found.variants] == [
            {},
            {"memory.vae_tiling": "vae_tiling"},
            *[tiling] * 2,
            tiling | {"memory.vae_slicing": "vae_slicing"},
        ]
        assert [variant.choices["precision"] for variant in found.variants] == [
            "fp32"
        ] * 3 + ["bf16"] * 2
        added = [
            "memory=vae_tiling",
            "memory.vae_tiling.tile_size=64",
            "precision=bf16",
            "memory=vae_slicing",
        ]
        steps = [BASELINE, *(f"+ {option}" for option in added)]
        assert [variant.name for variant in found.variants] == steps
        assert found.edges == tuple(map(Edge, steps[1:], steps, added))

    def test_a_later_option_replaces_one_of_its_axis_and_an_empty_list_a_whole_group(
        self, composer: Composers
    ) -> None:
        options = "[precision:fp16,precision:bf16,memory:vae_tiling,'memory:[]',memory:vae_slicing]"
        found = plan(composer, "study=cumulative", f"study.options={options}")
        assert [variant.choices["precision"] for variant in found.variants] == [
            "fp32",
            "fp16",
            *["bf16"] * 4,
        ]
        assert found.edges[1].reference == "+ precision=fp16"
        chosen = [list(memory_of(variant)) for variant in found.variants[3:]]
        assert chosen == [["memory.vae_tiling"], [], ["memory.vae_slicing"]]


class TestLeaveOneOut:
    def test_the_whole_and_it_again_without_each_option(
        self, composer: Composers
    ) -> None:
        found = plan(composer, "study=leave_one_out", *BOTH, "precision=bf16")
        baseline, full, *left = found.variants
        assert (baseline.name, memory_of(baseline)) == (BASELINE, {})
        tiling = {"memory.vae_tiling": "vae_tiling(tile_size=64)"}
        assert {variant.name: memory_of(variant) for variant in left} == {
            "without precision=bf16": {"memory.vae_slicing": "vae_slicing"} | tiling,
            "without memory=vae_slicing": tiling,
            "without memory=vae_tiling": {"memory.vae_slicing": "vae_slicing"},
        }
        [single] = [
            variant for variant in left if variant.name == "without precision=bf16"
        ]
        assert single.choices == dict(full.choices) | {
            "precision": baseline.choices["precision"]
        }
        assert (found.edges[0].candidate, found.edges[0].reference) == (
            "full",
            BASELINE,
        )
        assert all(edge.reference == "full" for edge in found.edges[1:])
        assert [f"without {edge.credit}" for edge in found.edges[1:]] == [
            variant.name for variant in left
        ]

    def test_an_option_with_a_changed_key_goes_whole(self, composer: Composers) -> None:
        found = plan(
            composer,
            "study=leave_one_out",
            "precision=bf16",
            "compiler=inductor",
            "compiler.mode=max-autotune",
        )
        [without] = [
            variant
            for variant in found.variants
            if variant.name.startswith("without compiler")
        ]
        assert without.choices["compiler"] == "eager"
        assert without.choices["precision"] == "bf16"


class TestFactorial:
    def test_options_of_one_axis_exclude_each_other(self, composer: Composers) -> None:
        found = plan(
            composer,
            "study=factorial",
            "study.options=[precision:bf16,precision:fp16,attention:math]",
        )
        assert len(found.variants) == 3 * 2
        assert {variant.choices["precision"] for variant in found.variants} == {
            "fp32",
            "bf16",
            "fp16",
        }

    def test_every_combination_also_of_options_that_combine(
        self, composer: Composers
    ) -> None:
        found = plan(
            composer,
            "study=factorial",
            "study.options=[memory:vae_slicing,memory:vae_tiling,precision:bf16]",
        )
        assert found.factors == (
            "memory=vae_slicing",
            "memory=vae_tiling",
            "precision=bf16",
        )
        assert len(found.variants) == 8
        assert (
            len({tuple(sorted(variant.choices.items())) for variant in found.variants})
            == 8
        )
        both = next(
            v
            for v in found.variants
            if v.name == "memory=vae_slicing, memory=vae_tiling"
        )
        assert memory_of(both) == {
            "memory.vae_slicing": "vae_slicing",
            "memory.vae_tiling": "vae_tiling",
        }
        assert (found.baseline.name, memory_of(found.baseline)) == (BASELINE, {})
        assert [edge.reference for edge in found.edges] == [BASELINE] * 7

    def test_options_that_combine_are_taken_one_by_one(
        self, composer: Composers
    ) -> None:
        options = "study.options=['memory:[vae_slicing,vae_tiling]','memory:[]','precision:bf16']"
        with pytest.raises(UsageError) as caught:
            plan(composer, "study=factorial", options)
        assert caught.value.problems == [
            "study.options: 'memory=[vae_slicing,vae_tiling]' is 2 options; study=factorial takes them one by one",
            "study.options: 'memory=[]' is 0 options; study=factorial takes them one by one",
        ]


class TestOptionsOfOwnGroups:
    """A group without a default, which takes a plus."""

    @pytest.fixture
    def own(self, composer: Composers, tmp_path: Path) -> Callable[..., Plan]:
        target = "_target_: sdopt.options.grad_mode.GradMode\nmode: enabled\n"
        (tmp_path / "mine").mkdir()
        for name in ("a", "b"):
            (tmp_path / "mine" / f"{name}.yaml").write_text(
                f"# @package mine.{name}\n{target}"
            )
        (tmp_path / "mine" / "a_again.yaml").write_text(f"# @package mine.a\n{target}")
        (tmp_path / "mine" / "whole.yaml").write_text(target)

        def plan_of(*overrides: str) -> Plan:
            job = composer(overrides, [f"hydra.searchpath=[file://{tmp_path}]"])
            return job.current.study.plan(job)

        return plan_of

    def test_can_be_left_out(self, own: Callable[..., Plan]) -> None:
        found = own("study=leave_one_out", "+mine=[a,b]")
        left = {
            variant.name: [axis for axis in variant.choices if "mine" in axis]
            for variant in found.variants[2:]
        }
        assert left == {"without mine=a": ["mine.b"], "without mine=b": ["mine.a"]}

    @pytest.mark.slow
    def test_of_one_axis_are_rivals_though_their_group_combines(
        self, own: Callable[..., Plan]
    ) -> None:
        found = own(
            "study=factorial", "study.options=['+mine:a','+mine:a_again','+mine:b']"
        )
        assert len(found.variants) == 3 * 2
        assert {variant.choices.get("mine.a") for variant in found.variants} == {
            None,
            "a",
            "a_again",
        }
        with pytest.raises(
            UsageError,
            match=r"mine=\[a,a_again\]: both set mine\.a; choose one of them",
        ):
            own("+mine=[a,a_again]")

    @pytest.mark.slow
    def test_that_sets_the_whole_group_combines_with_none(
        self, own: Callable[..., Plan]
    ) -> None:
        with pytest.raises(
            UsageError, match=r"begin the file with `# @package mine\.whole`"
        ):
            own("+mine=[whole,a]")
        with pytest.raises(
            UsageError, match=r"begin the file with `# @package mine\.whole`"
        ):
            own("study=cumulative", "study.options=['+mine:whole','+mine:a']")


def test_a_group_is_a_factor_if_a_variant_has_one_of_its_options(
    composer: Composers,
) -> None:
    found = plan(
        composer, "study=factorial", "study.options=[grad_mode,layout:channels_last]"
    )
    assert len(found.variants) == (1 + len(composer([]).options("grad_mode"))) * 2


HALF_PLAIN = "half: ['precision=bf16'], plain: []"

REFUSED = [
    ("study=pair precision=bf16 study.baseline=['workload.steps=0']", r"variant 'baseline': .*workload\.steps=0"),
    ("study=explicit", r"study\.variants: .* at least one"),
    (f"study=explicit study.variants={{{HALF_PLAIN}}} study.edges=[{{candidate: half, reference: plain}}]",
     r"'half' is the baseline, .*: write \{candidate: plain, reference: half\}"),
    (f"study=explicit study.variants={{{HALF_PLAIN}}} study.only=[hafl]", r"study\.only: .*'hafl'.* half, plain"),
    ("study=explicit study.variants={plain: []} study.edges=[{candidate: plain}]",
     r"study\.edges\[0\]\.reference: Field required"),
    ("study=explicit study.variants={a: [], broken: ['workload.steps=0']}", r"variant 'broken': workload\.steps=0: "),
    ("study=explicit study.variants={a: [], broken: ['precision']}", "broken.*precision"),
    ("study=explicit study.variants={a: [], 'repeated baseline': ['precision=bf16']}", "repeated baseline"),
    ("study=one_at_a_time study.options=[attentoin]", r"study\.options: unknown group 'attentoin'; .* attention, "),
    ("study=one_at_a_time", r"study\.options: one_at_a_time needs them"),
    ("study=one_at_a_time study.options=[precision:bf16,precision:bf16]", "'precision=bf16' is listed twice"),
    ("study=one_at_a_time study.options=[attention:nope]", "attention=nope: .*vanilla"),
    ("study=one_at_a_time study.options=['precison:bf16']", "precison: "),
    ("study=one_at_a_time study.options=['study.name:x']", r"study\.name applies to the whole study"),
    ("study=cumulative study.options=[precision]", "'precision' is no option; write group:option"),
    ("study=one_at_a_time study.options=attention", r"study\.options=attention: Input should be a valid list"),
    ("study=one_at_a_time study.options=[{attention: math}]", r"study\.options\[0\]: Input should be a valid string"),
    ("study=explicit study.variants={a: null}", r"study\.variants\.a: Input should be a valid list"),
    ("study=leave_one_out precision=bf16", "study=leave_one_out: choose at least two"),
    ("study=factorial study.options=['workload.steps:3','attention:math']", r"workload\.steps"),
    ("study=factorial study.options=[memory,precision:bf16]", "'memory' is a group whose options combine"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_a_mistake_names_its_key_and_the_choices(
    composer: Composers, overrides: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan(composer, *re.split(r" (?=study|precision=)", overrides))
