"""Options on transformers: what each does to a tiny pipeline with random weights, and what it is refused for.

The pipelines are built in this process and called with two prompts of different lengths, as a study's quality pass
calls them.
"""

import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    PixArtSigmaPipeline,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    apply_pyramid_attention_broadcast,
)
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
)
from torch._dynamo.utils import counters

from sdopt.assembly import Assembly
from sdopt.errors import UsageError
from sdopt.measure.trace import trace_call
from sdopt.options import Contract, Optimization
from sdopt.options.attention import Default, FusedProjections, Sdpa, Vanilla
from sdopt.options.attention_backends import Dispatched
from sdopt.options.caching import (
    DeepCaching,
    FirstBlockCaching,
    GuidanceInterval,
    PyramidAttention,
    SpectralForecast,
    TaylorSeer,
    TokenMerging,
    WholeSteps,
)
from sdopt.options.compiler import Inductor, InductorDynamic
from sdopt.options.grad_mode import GradMode
from sdopt.options.layout import Layout
from sdopt.options.memory import (
    PrecomputedEmbeddings,
    SequentialGuidance,
    TinyVae,
    VaeTiling,
    WithoutT5,
)
from sdopt.options.offload import GroupOffload
from sdopt.options.precision import Precision
from sdopt.options.quantization import (
    QuantizedTextEncoders,
    Sdnq,
    multiplies_in_8_bits,
)
from sdopt.options.skipping import Calls
from sdopt.options.transformer import blocks_of
from tests.options.applied import PROMPTS, STEPS, Applied, context_of, far, model_of
from tests.options.walk import every_option
from tests.pipelines.tiny import TINY, bria, tiny

FAST = ("flux", "z_image")

EVERY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TINY
]


@pytest.fixture(scope="module")
def plain() -> Callable[[str], np.ndarray]:
    """Returns the images of a tiny pipeline without options, drawn once."""
    drawn: dict[str, np.ndarray] = {}

    def images(name: str) -> np.ndarray:
        if name not in drawn:
            drawn[name] = Applied(name, {"caching": WholeSteps()}).images()
        return drawn[name]

    return images


class TestCalls:
    def test_are_told_apart_by_step_and_branch(self) -> None:
        pipe = tiny("chroma")
        calls, seen = Calls(pipe), []
        forward = pipe.transformer.forward

        def noted(*args: Any, **others: Any) -> Any:
            seen.append(calls.next())
            return forward(*args, **others)

        pipe.transformer.forward = noted
        for _ in range(2):  # also of a second image
            calls.begin()
            seen.clear()
            pipe(
                ["a cat"],
                height=64,
                width=64,
                num_inference_steps=3,
                guidance_scale=4.0,
                output_type="np",
            )
            assert seen == [(step, branch) for step in range(3) for branch in range(2)]

    def test_blocks_are_those_after_the_inputs_are_refined(self) -> None:
        names = [name for name, _ in blocks_of(tiny("z_image").transformer)]
        assert names == [f"layers.{number}" for number in range(4)]
        names = [name for name, _ in blocks_of(tiny("flux").transformer)]
        assert names[1:3] == ["transformer_blocks.1", "single_transformer_blocks.0"]


class TestFirstBlock:
    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.walk(1)
    def test_skips_the_later_blocks_for_each_image_and_branch(
        self, name: str, plain: Callable[[str], np.ndarray]
    ) -> None:
        always = Applied(name, {"caching": FirstBlockCaching(threshold=10.0)})
        images, finding, _ = always.traced()
        assert finding.engaged, finding.summary
        assert finding.facts["whole"] < sum(
            finding.facts[kind] for kind in ("whole", "outer")
        )
        assert np.isfinite(images).all()
        assert far(images, plain(name)) > 1e-3
        assert far(always.images(PROMPTS[:1]), images[:1]) < 1e-3, "as alone"

    def test_changes_nothing_where_every_step_needs_the_blocks(
        self, plain: Callable[[str], np.ndarray]
    ) -> None:
        images, finding, _ = Applied(
            "flux", {"caching": FirstBlockCaching(threshold=1e-9)}
        ).traced()
        assert far(images, plain("flux")) == 0
        assert not finding.engaged, "nothing was skipped"

    def test_images_of_a_batch_decide_for_themselves(self) -> None:
        applied = Applied("flux", {"caching": FirstBlockCaching(threshold=1.0)})
        watching: Any = applied.pipe.transformer.forward
        decisions = iter(
            [[True, False], [False, False], [True, True], [False, True], [True, False]]
            * 2
        )
        decide = watching._decide

        def decided(added: torch.Tensor) -> None:
            decide(added)
            if watching._skips:
                watching._skips = next(decisions)[: len(added)]

        watching._decide = decided
        together = applied.images()
        assert watching.calls == {"whole": 2, "part": 3, "outer": 1}
        for number in range(2):
            decisions = iter(
                [
                    [row[number]]
                    for row in [
                        [True, False],
                        [False, False],
                        [True, True],
                        [False, True],
                        [True, False],
                    ]
                ]
            )
            noise = torch.Generator().manual_seed(number)
            given = {
                "prompt": [PROMPTS[number]],
                "generator": noise,
                "guidance_scale": 4.0,
                "num_inference_steps": STEPS,
            }
            with applied.assembly.entered():
                alone = applied.pipe(
                    **given, height=64, width=64, output_type="np"
                ).images
            assert far(alone, together[number : number + 1]) < 1e-4

    def test_finds_the_image_in_what_a_block_of_any_kind_returns(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Diffusers' registry says of Bria's blocks that the image comes first, and it comes after the text."""
        monkeypatch.setitem(TINY, "bria", bria)
        always = Applied("bria", {"caching": FirstBlockCaching(threshold=10.0)})
        images, finding, _ = always.traced()
        assert finding.engaged, finding.summary
        assert far(always.images(PROMPTS[:1]), images[:1]) < 1e-3, "as alone"

    def test_without_its_functions_is_told(self) -> None:
        applied = Applied("flux", {"caching": FirstBlockCaching(threshold=10.0)})
        for module in applied.pipe.transformer.modules():
            vars(module).pop("forward", None)
        assert not applied.traced()[1].engaged


class TestForecasts:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(n, marks=() if n == "flux" else pytest.mark.slow)
            for n in TINY
            if n != "pixart"
        ],
    )
    def test_run_no_layer_in_some_steps_of_each_branch(
        self, name: str, plain: Callable[[str], np.ndarray]
    ) -> None:
        images, finding, trace = Applied(
            name, {"caching": SpectralForecast(warmup=2)}
        ).traced()
        assert finding.engaged, finding.summary
        runs = SpectralForecast(warmup=2).runs(STEPS)
        branches = trace.denoiser.calls // STEPS
        assert finding.facts["whole"] == branches * sum(runs)
        assert finding.facts["forecast"] == branches * runs.count(False)
        assert far(images, plain(name)) > 1e-4
        assert np.isfinite(images).all()

    def test_begin_anew_where_a_callback_leaves_out_a_branch(self) -> None:
        """As `PipelineCallback` of diffusers ends guidance: predictions of two branches are none of one."""
        applied = Applied("sd3", {"caching": SpectralForecast(warmup=2)})

        def unguided(pipe: Any, step: int, _: Any, tensors: Any) -> Any:
            if step != 2:
                return tensors
            pipe._guidance_scale = 0.0
            return {name: tensor[-1:] for name, tensor in tensors.items()}

        names = ["latents", "prompt_embeds", "pooled_prompt_embeds"]
        ending = {"callback_on_step_end_tensor_inputs": names}
        images = applied.images(PROMPTS[:1], callback_on_step_end=unguided, **ending)
        assert len(images) == 1
        watching = applied.pipe.transformer.forward
        assert watching.calls == {"whole": STEPS - 1, "forecast": 1}

    @pytest.mark.slow
    def test_leave_a_compiler_one_graph(self) -> None:
        """TorchDynamo would compile NumPy and the sum of what is kept, for each step anew."""
        applied = Applied("flux", {"caching": SpectralForecast(warmup=2)})
        torch._dynamo.reset()
        counters.clear()
        applied.pipe.transformer.compile(backend="eager")
        applied.images()
        assert counters["stats"]["unique_graphs"] == 1
        torch._dynamo.reset()

    @pytest.mark.slow
    def test_leave_whole_calls_to_a_compiler(self) -> None:
        options = {"caching": SpectralForecast(warmup=2), "compiler": Inductor()}
        alone = {"caching": SpectralForecast(warmup=2)}
        pipe = tiny("chroma")
        for axis, option in options.items():
            assert (
                option.obstacles(
                    replace(context_of(pipe), chosen={axis: option, **options})
                )
                == []
            )
        compiled = Applied("chroma", options)
        images = compiled.images()
        assert far(images, Applied("chroma", alone).images()) < 1e-3
        trace = trace_call(compiled.pipe, compiled.images, cuda=False)
        for axis, finding in compiled.assembly.findings(trace).items():
            assert finding.engaged, f"{axis}: {finding.summary}"
        assert TaylorSeer().obstacles(
            replace(context_of(pipe), chosen=options | {"caching": TaylorSeer()})
        )

    def test_that_cannot_be_counted_are_refused(self) -> None:
        assert not hasattr(PixArtSigmaPipeline, "num_timesteps"), (
            "diffusers says it now: run it in these tests"
        )
        [reason] = SpectralForecast().obstacles(context_of(tiny("pixart")))
        assert "num_timesteps" in reason


class TestTaylorSeer:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(n, marks=() if n == "z_image" else pytest.mark.slow)
            for n in TINY
            if n != "pixart"
        ],
    )
    def test_runs_attention_in_some_steps_of_each_branch(
        self, name: str, plain: Callable[[str], np.ndarray]
    ) -> None:
        images, finding, trace = Applied(name, {"caching": TaylorSeer()}).traced()
        assert finding.engaged, finding.summary
        branches = trace.denoiser.calls // STEPS
        assert finding.facts["expanded"] == branches * TaylorSeer().runs(STEPS).count(
            False
        )
        assert far(images, plain(name)) > 1e-5
        assert np.isfinite(images).all()

    def test_expands_as_diffusers_does_where_a_step_is_one_call(self) -> None:
        ours = Applied("flux", {"caching": TaylorSeer(order=2)}).images()
        by_hand = Applied("flux", {"caching": WholeSteps()})
        config = TaylorSeerCacheConfig(
            cache_interval=3,
            disable_cache_before_step=3,
            max_order=2,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=[r".*blocks\.\d+\.attn"],
        )
        by_hand.pipe.transformer.enable_cache(config)
        assert far(ours, by_hand.images()) < 1e-4


class TestPyramidAttention:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(n, marks=() if n == "chroma" else pytest.mark.slow)
            for n in TINY
            if n != "pixart"
        ],
    )
    def test_reuses_outputs_of_each_branch(
        self, name: str, plain: Callable[[str], np.ndarray]
    ) -> None:
        applied = Applied(name, {"caching": PyramidAttention(spatial=2, cross=4)})
        images, finding, trace = applied.traced()
        assert finding.engaged, finding.summary
        watching: Any = applied.pipe.transformer.forward
        assert watching.calls.total() == trace.denoiser.calls
        assert watching.computed[False] == 2 * watching.reused[False], (
            "in two steps of six"
        )
        assert far(images, plain(name)) > 1e-4
        assert far(applied.images(PROMPTS[:1]), images[:1]) < 1e-3, "as alone"

    @pytest.mark.parametrize(
        "name", ["flux", pytest.param("sd3", marks=pytest.mark.slow)]
    )
    def test_reuses_them_as_diffusers_does_where_a_step_is_one_call(
        self, name: str
    ) -> None:
        ours = Applied(
            name, {"caching": PyramidAttention(spatial=2, cross=None)}
        ).images()
        by_hand = Applied(name, {"caching": WholeSteps()})
        steps = itertools.count()
        share = 0.0

        def begin(*_: Any) -> None:
            nonlocal share
            share = next(steps) / STEPS

        by_hand.pipe.transformer.register_forward_pre_hook(begin)
        chosen = PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(0.2, 0.9),
            current_timestep_callback=lambda: share,
        )
        apply_pyramid_attention_broadcast(by_hand.pipe.transformer, chosen)
        assert far(ours, by_hand.images()) < 1e-5

    @pytest.mark.slow
    def test_that_reuses_nothing_is_told(self) -> None:
        applied = Applied("flux", {"caching": PyramidAttention()})
        for module in applied.pipe.transformer.modules():
            vars(module).pop("forward", None)
        assert not applied.traced()[1].engaged
        no_layers = Applied(
            "flux", {"caching": PyramidAttention(spatial=None, cross=4)}
        )
        assert not no_layers.traced()[1].engaged, (
            "all of its layers attend to image and text at once"
        )


class TestGuidanceInterval:
    @pytest.mark.slow
    def test_with_a_call_for_each_branch_leaves_the_second_out_as_a_pipeline_does(
        self,
    ) -> None:
        interval = Applied("lumina2", {"caching": GuidanceInterval(start=0, stop=0.5)})
        images, finding, trace = interval.traced()
        assert finding.engaged, finding.summary
        assert finding.facts["left out"] == STEPS // 2
        assert trace.denoiser.runs == STEPS + STEPS // 2
        by_hand = Applied("lumina2", {"caching": WholeSteps()}).images(
            cfg_trunc_ratio=0.5
        )
        assert far(images, by_hand) == 0

    def test_with_both_branches_in_a_list_runs_the_prompt_alone(
        self, plain: Callable[[str], np.ndarray]
    ) -> None:
        interval = Applied("z_image", {"caching": GuidanceInterval(start=0, stop=0.4)})
        images, finding, trace = interval.traced()
        assert finding.engaged, finding.summary
        assert trace.denoiser.samples == [2, 4]
        assert far(images, plain("z_image")) > 1e-3
        # Its own truncation is at a timestep: between those of the third step and of the fourth one.
        third, fourth = (
            (1000 - interval.pipe.scheduler.timesteps[2:4]) / 1000
        ).tolist()
        by_hand = Applied("z_image", {"caching": WholeSteps()}).images(
            cfg_truncation=(third + fourth) / 2
        )
        assert far(images, by_hand) < 1e-4

    def test_leaves_calls_of_one_branch_as_they_are(self) -> None:
        """As those by which SD 3 is guided by skipped layers, in the same step."""
        interval = Applied("sd3", {"caching": GuidanceInterval(start=0, stop=0.5)})
        layers: dict[str, Any] = {
            "skip_guidance_layers": [1],
            "skip_layer_guidance_stop": 0.9,
        }
        images = interval.images(**layers)
        by_hand = Applied("sd3", {"caching": WholeSteps()})
        transformer, scheduler = by_hand.pipe.transformer, by_hand.pipe.scheduler
        forward = transformer.forward

        def unguided_at_last(*args: Any, **others: Any) -> Any:
            found = forward(*args, **others)[0]
            last = (scheduler.step_index or 0) >= STEPS // 2
            if last and others.get("skip_layers") is None:
                found = found.chunk(2)[1].repeat(2, 1, 1, 1)
            return (found,)

        transformer.forward = unguided_at_last
        assert far(images, by_hand.images(**layers)) < 1e-4
        assert far(images, interval.images()) > 1e-3

    def test_runs_what_a_pipeline_itself_does_not_guide_whole(self) -> None:
        early: dict[str, Any] = {"cfg_truncation": 0.3}
        interval = Applied("z_image", {"caching": GuidanceInterval(start=0, stop=0.6)})
        by_hand = Applied("z_image", {"caching": WholeSteps()})
        assert far(interval.images(**early), by_hand.images(**early)) < 1e-4

    @pytest.mark.slow
    def test_is_refused_where_the_scale_is_an_input_or_nothing(self) -> None:
        [embedded] = GuidanceInterval().obstacles(context_of(tiny("flux")))
        assert "takes the guidance scale as an input" in embedded
        [none] = GuidanceInterval().obstacles(context_of(tiny("flux2")))
        assert "distilled into the model's weights" in none


class TestSequentialGuidance:
    @pytest.mark.parametrize(
        "name",
        [
            "z_image",
            pytest.param("sd3", marks=pytest.mark.slow),
            pytest.param("sana", marks=pytest.mark.slow),
        ],
    )
    def test_runs_each_branch_alone(
        self, name: str, plain: Callable[[str], np.ndarray]
    ) -> None:
        images, finding, trace = Applied(
            name, {"memory.sequential_guidance": SequentialGuidance()}
        ).traced()
        assert finding.engaged, finding.summary
        assert max(trace.denoiser.samples) == len(PROMPTS)
        assert far(images, plain(name)) < 1e-3

    def test_leaves_the_positions_of_tokens_whole(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There are a multiple of the samples of them, as of a UNet's pictures for an IP-Adapter."""
        monkeypatch.setitem(TINY, "bria", bria)
        option = {"memory.sequential_guidance": SequentialGuidance()}
        images, finding, _ = Applied("bria", option).traced()
        assert finding.engaged, finding.summary
        whole = Applied("bria", {"caching": WholeSteps()}).images()
        assert far(images, whole) < 1e-3

    def test_leaves_a_forecast_its_proof(self) -> None:
        """Each layer runs twice in a step that is not forecast."""
        forecast = {"caching": SpectralForecast(warmup=2)}
        both = forecast | {"memory.sequential_guidance": SequentialGuidance()}
        halved = Applied("z_image", both)
        trace = trace_call(halved.pipe, halved.images, cuda=False)
        for finding in halved.assembly.findings(trace).values():
            assert finding.engaged, finding.summary
        whole = Applied("z_image", forecast)
        assert far(halved.images(), whole.images()) < 1e-3

    def test_has_nothing_to_do_where_each_branch_has_a_call(self) -> None:
        reasons = SequentialGuidance().obstacles(context_of(tiny("chroma")))
        assert any("for each branch anyway" in reason for reason in reasons)


class TestEmbeddings:
    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.walk(1)
    def test_are_what_the_pipeline_would_encode(
        self, name: str, plain: Callable[[str], np.ndarray]
    ) -> None:
        images, finding, _ = Applied(
            name, {"memory.precomputed_embeddings": PrecomputedEmbeddings()}
        ).traced()
        assert finding.engaged, finding.summary
        assert far(images, plain(name)) < 2e-3

    def test_of_several_lengths_are_refused_where_nothing_masks_what_fills_them_up(
        self,
    ) -> None:
        long = "a blue house at dawn " * 5
        applied = Applied("cogview4", {})
        applied.assembly = Assembly.of(
            applied.pipe, {"memory.precomputed_embeddings": PrecomputedEmbeddings()}
        )
        applied.assembly.prepare_inputs((PROMPTS[0], long, ""))
        assert np.isfinite(applied.images((long,), negative_prompt=[long])).all()
        with pytest.raises(UsageError, match="prompts of several lengths"):
            applied.images((PROMPTS[0], long))

    def test_are_of_the_length_that_the_calls_ask_for(self) -> None:
        shorter = Applied(
            "flux",
            {
                "memory.precomputed_embeddings": PrecomputedEmbeddings(
                    max_sequence_length=64
                )
            },
        )
        asked: dict[str, Any] = {"max_sequence_length": 64}
        by_hand = Applied("flux", {"caching": WholeSteps()}).images(**asked)
        assert far(shorter.images(**asked), by_hand) < 2e-3
        with pytest.raises(
            UsageError, match=r"max_sequence_length was not encoded: set memory"
        ):
            shorter.images(max_sequence_length=128)


class TestAttention:
    def test_projections_are_fused_without_a_change(
        self, plain: Callable[[str], np.ndarray]
    ) -> None:
        images, finding, _ = Applied("flux", {"attention": FusedProjections()}).traced()
        assert finding.engaged, finding.summary
        assert far(images, plain("flux")) < 1e-4

    def test_projections_whose_fusion_drops_a_norm_are_refused(self) -> None:
        normed, plain_layers, dual = (
            tiny("sd3"),
            tiny("sd3", qk_norm=None),
            tiny("sd3", dual=(0,)),
        )
        [reason] = FusedProjections().obstacles(context_of(normed))
        assert "leaves out the norm" in reason
        assert FusedProjections().obstacles(context_of(plain_layers)) == []
        [reason] = FusedProjections().obstacles(context_of(dual))
        assert "second attention" in reason
        before = Applied("sd3", {"caching": WholeSteps()}).images()
        changed = Applied("sd3", {"caching": WholeSteps()})
        changed.pipe.transformer.fuse_qkv_projections()
        assert far(changed.images(), before) > 1e-3, (
            "diffusers keeps the norm now: allow it"
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["qwen_image", "sana"])
    def test_projections_that_diffusers_does_not_fuse_are_told(self, name: str) -> None:
        assert not Applied(name, {"attention": FusedProjections()}).traced()[1].engaged

    def test_by_default_is_what_the_model_has(self) -> None:
        applied = Applied("flux", {"attention": Default()})
        assert applied.traced()[1].engaged
        applied.pipe.transformer.set_attention_backend("_native_math")
        assert not applied.traced()[1].engaged
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)

    def test_by_one_kernel_is_seen_in_the_operators(
        self, plain: Callable[[str], np.ndarray]
    ) -> None:
        images, finding, _ = Applied("flux", {"attention": Sdpa("math")}).traced()
        assert finding.engaged, finding.summary
        assert far(images, plain("flux")) < 1e-3

    @pytest.mark.parametrize(
        "name", ["flux", pytest.param("chroma", marks=pytest.mark.slow)]
    )
    def test_by_a_backend_of_diffusers_is_that_of_this_pipeline_alone(
        self, name: str, plain: Callable[[str], np.ndarray]
    ) -> None:
        before = _AttentionBackendRegistry.get_active_backend()[0]
        applied = Applied(name, {"attention": Dispatched("_native_math")})
        images, finding, _ = applied.traced()
        assert finding.engaged, finding.summary
        assert far(images, plain(name)) < 1e-3
        assert _AttentionBackendRegistry.get_active_backend()[0] is before
        _, later, _ = Applied(name, {"attention": Default()}).traced()
        assert later.engaged, later.summary
        applied.pipe.transformer.set_attention_backend("native")
        _AttentionBackendRegistry.set_active_backend(before)
        assert not applied.traced()[1].engaged, "another backend ran"

    def test_by_a_backend_of_diffusers_is_refused_where_it_would_do_nothing_or_fail(
        self,
    ) -> None:
        [reason] = Dispatched("native").obstacles(context_of(tiny("sd3")))
        assert "do not ask diffusers' dispatcher" in reason
        one = context_of(tiny("z_image"))
        two = replace(one, workload=replace(one.workload, batch_size=2))
        flash = Dispatched("_native_flash")
        assert flash.obstacles(one) == []
        assert flash.fixed_for(one.model), "prompts of several lengths come with a mask"
        [reason] = flash.obstacles(two)
        assert "takes no mask" in reason
        assert Dispatched("_native_math").obstacles(two) == []


class TestOffload:
    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.walk(1)
    def test_what_returns_from_disk_is_what_went_there(
        self, name: str, plain: Callable[[str], np.ndarray]
    ) -> None:
        """Also T5's embeddings, which two layers share, and statistics that FLUX.2 reads without running a layer."""
        images, finding, _ = Applied(
            name, {"memory.group_offload": GroupOffload()}
        ).traced()
        assert finding.engaged, finding.summary
        assert far(images, plain(name)) < 1e-4


class TestGradients:
    def test_change_how_t5_attends_and_no_more_than_that(
        self, plain: Callable[[str], np.ndarray]
    ) -> None:
        """Its positions are added to the scores as a mask, which a fused kernel does not take where they are learned."""
        images, finding, _ = Applied(
            "flux", {"grad_mode": GradMode("enabled")}
        ).traced()
        assert finding.engaged, finding.summary
        assert 0 < far(images, plain("flux")) < 1e-4
        assert GradMode("enabled").contract is Contract.EQUIVALENT

    @pytest.mark.slow
    def test_are_seen_in_a_list_of_predictions(self) -> None:
        assert (
            Applied("z_image", {"grad_mode": GradMode("enabled")}).traced()[1].engaged
        )
        assert (
            not Applied("z_image", {"grad_mode": GradMode("inference_mode")})
            .traced()[2]
            .denoiser.grad_enabled
        )


class TestRefusals:
    def test_of_a_layout_that_kernels_for_video_do_not_have(self) -> None:
        assert Layout("channels_last").obstacles(context_of(tiny("flux"))) == []
        [reason] = Layout("channels_last").obstacles(context_of(tiny("qwen_image")))
        assert "have three dimensions" in reason

    @pytest.mark.parametrize(
        "option",
        [DeepCaching(), TokenMerging(), Vanilla(), InductorDynamic()],
        ids=lambda option: type(option).__name__,
    )
    def test_of_what_needs_a_unet_are_declared(self, option: Optimization) -> None:
        [reason] = option.obstacles(context_of(tiny("flux")))
        assert (
            reason
            == f"not for FLUX.1, whose denoiser is a transformer: {option.unet_only}"
        )

    @pytest.mark.parametrize(
        "name", ["z_image", "qwen_image", "sana", "lumina2", "cogview4"]
    )
    def test_of_a_type_that_overflows(self, name: str) -> None:
        reasons = Precision("float16").obstacles(context_of(tiny(name)))
        assert any("choose precision=bf16" in reason for reason in reasons)

    def test_of_a_type_that_is_clipped_or_large_enough(self) -> None:
        assert Precision("float16").obstacles(context_of(tiny("flux"))) == []
        assert Precision("bfloat16").obstacles(context_of(tiny("z_image"))) == []
        packed = Sdnq(weights="uint4", activations=False, others="float16")
        [reason] = packed.obstacles(context_of(tiny("z_image")))
        assert "choose precision.others=bfloat16" in reason

    @pytest.mark.slow
    def test_of_a_tiny_autoencoder_for_other_latents(self) -> None:
        [reason] = TinyVae().obstacles(context_of(tiny("sana")))
        assert "set memory.tiny_vae.path" in reason


class TestWalk:
    @pytest.mark.parametrize("name", EVERY)
    def test_every_option_says_whether_it_is_for_a_transformer(self, name: str) -> None:
        ctx = context_of(tiny(name))
        for chosen, (axis, option) in every_option().items():
            reasons = option.obstacles(replace(ctx, chosen={axis: option}))
            assert all(isinstance(reason, str) for reason in reasons), chosen
            if option.unet_only is not None:
                assert [reason.startswith("not for") for reason in reasons] == [True], (
                    chosen
                )


class TestTextEncoders:
    @pytest.mark.slow
    def test_of_sd3_draws_without_t5_what_diffusers_draws_without_it(self) -> None:
        option = WithoutT5()
        without = tiny("sd3")
        with_t5 = Applied("sd3", {"caching": WholeSteps()}).images()
        pipe = tiny("sd3")
        pipe.register_modules(**option.parts(model_of(pipe), torch.float32))
        assembly = Assembly.of(pipe, {"memory.without_t5": option})
        given: dict[str, Any] = {
            "height": 64,
            "width": 64,
            "num_inference_steps": 2,
            "output_type": "np",
        }

        def images(of: Any) -> np.ndarray:
            drawn: np.ndarray = of(
                list(PROMPTS), generator=torch.Generator().manual_seed(0), **given
            ).images
            return drawn

        without.text_encoder_3 = without.tokenizer_3 = None
        drawn: list[np.ndarray] = []
        trace = trace_call(pipe, lambda: drawn.append(images(pipe)), cuda=False)
        [finding] = assembly.findings(trace).values()
        assert finding.engaged, finding
        assert np.array_equal(drawn[0], images(without))
        assert (
            far(with_t5, Applied("sd3", {"memory.without_t5": option}).images()) == 0
        ), "`parts` leaves it out"

    def test_without_t5_is_for_models_that_run_without_one(self) -> None:
        assert WithoutT5().obstacles(context_of(tiny("flux")))
        pipe = tiny("sd3")
        assert not WithoutT5().obstacles(context_of(pipe))
        pipe.register_modules(text_encoder_3=None, tokenizer_3=None)
        assert WithoutT5().obstacles(context_of(pipe))

    def test_a_t5_that_is_still_there_is_no_evidence(self) -> None:
        _, finding, _ = Applied("sd3", {"memory.without_t5": WithoutT5()}).traced()
        assert not finding.engaged
        assert "text_encoder_3" in finding.summary

    def test_each_is_quantized_by_itself(self) -> None:
        pipe = tiny("sd3")
        config = type(pipe.text_encoder_3.config)(
            **pipe.text_encoder_3.config.to_dict() | {"d_ff": 512}
        )
        wide = type(pipe.text_encoder_3)(
            config
        ).eval()  # SDNQ passes smaller layers over
        pipe.register_modules(text_encoder_3=wide)
        assembly = Assembly.of(
            pipe,
            {"memory.quantized_text_encoders": QuantizedTextEncoders(encoders=[3])},
        )

        def call() -> Any:
            return pipe(
                "a cat", height=64, width=64, num_inference_steps=2, output_type="np"
            )

        [finding] = assembly.findings(trace_call(pipe, call, cuda=False)).values()
        assert finding.engaged, finding
        counts = finding.facts["by_encoder"]
        assert counts["text_encoder_3"]
        assert not counts["text_encoder"]
        assert not counts["text_encoder_2"]

    def test_one_without_quantized_layers_is_no_evidence(self) -> None:
        _, finding, _ = Applied(
            "sd3", {"memory.quantized_text_encoders": QuantizedTextEncoders()}
        ).traced()
        assert not finding.engaged

    def test_a_number_that_no_encoder_has_is_refused(self) -> None:
        option = QuantizedTextEncoders(encoders=[3])
        assert any(
            "encoders=[3]" in reason
            for reason in option.incompatible(context_of(tiny("flux")))
        )
        assert not option.incompatible(context_of(tiny("sd3")))


@pytest.mark.parametrize("name", ["flux", "qwen_image", "sana"])
@pytest.mark.walk(2)
def test_tiles_are_as_large_as_was_asked_for(name: str) -> None:
    option = VaeTiling(tile_size=32)
    _, finding, _ = Applied(name, {"memory.vae_tiling": option}).traced()
    assert finding.engaged, finding
    assert finding.facts["tile"] == 32


@pytest.mark.parametrize("name", ["flux", "qwen_image", "sana"])
@pytest.mark.walk(1)
def test_code_of_tiles_sets_what_the_option_sets(name: str) -> None:
    """Half precision would not tell tiles of another size from those that were measured."""
    option = VaeTiling(tile_size=32)
    by_hand, by_option = deepcopy(tiny(name)), deepcopy(tiny(name))
    lines = option.lines_for(model_of(by_hand))
    exec("\n".join(lines), {"pipe": by_hand})
    option.apply(by_option)
    hand, own = (
        {key: value for key, value in vars(pipe.vae).items() if "til" in key}
        for pipe in (by_hand, by_option)
    )
    assert hand == own
    assert hand["use_tiling"]


@pytest.mark.parametrize("name", EVERY)
def test_no_product_in_8_bits_has_a_row_for_each_sample_alone(name: str) -> None:
    """On a card such a product takes 17 rows at least, and TorchAO would compute others on the host."""
    applied = Applied(name, {"caching": WholeSteps()})
    rows: dict[str, int] = {}

    def note(layer: str, given: torch.Tensor) -> None:
        rows[layer] = given.numel() // given.shape[-1]

    for layer, module in applied.pipe.transformer.named_modules():
        if multiplies_in_8_bits(module, layer):
            module.register_forward_pre_hook(
                lambda _, given, layer=layer: note(layer, given[0])
            )
    applied.images(num_inference_steps=1)
    assert rows
    few = [layer for layer, count in rows.items() if count <= 2 * len(PROMPTS)]
    assert few == []
