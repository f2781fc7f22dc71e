"""The options of the group `caching`: what they leave out, what they prove, and that no image depends on the last."""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.hooks import HookRegistry
from diffusers.models.attention_processor import AttnProcessor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from sdopt.config.paths import CONF
from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.options.caching import SpectralForecast, _branches
from sdopt.options.compiler.aot import digest
from sdopt.options.compiler.graphs import Tensors
from sdopt.options.skipping import DeepCache, FirstBlock
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from sdopt.pipelines.parts import attention_layers
from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import evidence, forward_is_its_own, image, proved

OF_TRANSFORMERS = {"magcache", "dbcache"}
OPTIONS = sorted(
    {path.stem for path in (CONF / "caching").glob("*.yaml")}
    - {"none"}
    - OF_TRANSFORMERS
)
STEPS = "workload.steps=10"
needs_published = pytest.mark.skipif(
    find_spec("DeepCache") is None, reason="DeepCache is not installed"
)


def no_broadcast(host: Any) -> None:
    for layer in host._pipe.unet.modules():
        if hasattr(layer, "_diffusers_hook"):
            layer._diffusers_hook.remove_hook("pyramid_attention_broadcast")


def no_merging(host: Any) -> None:
    import tomesd

    tomesd.remove_patch(host._pipe)


def no_expansion(host: Any) -> None:
    for layer in attention_layers(host._pipe.unet):
        del layer.forward


def guided_always(host: Any) -> None:
    host._pipe.unet.forward._chosen = SimpleNamespace(guides=lambda *_: True)


WALKED: dict[str, tuple[list[Callable[[Any], None]], dict[str, Any]]] = {
    "deepcache": (
        [forward_is_its_own],
        {
            "whole": 4,
            "outer": 6,
            "runs_of_the_first_layer": 10,
            "runs_of_the_middle": 4,
        },
    ),
    "first_block": ([forward_is_its_own], {}),
    "guidance_interval": (
        [guided_always, forward_is_its_own],
        {"guided": 7, "unguided": 3, "batches": [1, 2]},
    ),
    # Steps 0 to 2 and 9 lie outside; of those between, the even ones are computed, or 4 and 8. There are 7 layers.
    "pyramid_attention": (
        [no_broadcast],
        {"self_attention": 7 * 7, "cross_attention": 6 * 7},
    ),
    "spectrum": (
        [forward_is_its_own],
        {
            "whole": 7,
            "forecast": 3,
            "runs_of_the_first_layer": 7,
            "runs_of_the_middle": 7,
        },
    ),
    # After three steps, one in three runs: step 4 and step 7.
    "taylorseer": (
        [no_expansion, forward_is_its_own],
        {"whole": 5, "expanded": 5, "runs_of_a_layer": 5},
    ),
    "tome": ([no_merging], {}),
}
"""What undoes each option, and what it counts in ten steps."""


@pytest.fixture(scope="module")
def kept() -> dict[str, np.ndarray]:
    """The images of ten steps without an option."""
    return {}


class TestEveryOption:
    @pytest.mark.parametrize("option", OPTIONS)
    @pytest.mark.walk(2)
    def test_proves_itself_until_it_is_undone_and_no_image_depends_on_the_last(
        self, session: Load, kept: dict[str, np.ndarray], option: str
    ) -> None:
        if option == "tome":
            pytest.importorskip("tomesd")
        loaded = session(f"caching={option}", STEPS)
        assert loaded._variant.conflicts(CPU) == []
        assert loaded._variant.contract is Contract.LOSSY
        assert loaded._variant.optimizations["caching"].claims == {"latency"}
        assert isinstance(loaded._pipe.unet, UNet2DConditionModel)
        whole = image(loaded)
        if not kept:
            kept[STEPS] = image(session(STEPS))
        assert 0 < np.abs(whole - kept[STEPS]).mean() < 0.2

        def stop(_pipe: Any, step: int, *_: Any) -> dict[str, Any]:
            if step == 4:
                raise InterruptedError
            return {}

        with pytest.raises(InterruptedError):
            loaded._call(callback_on_step_end=stop)
        assert np.array_equal(image(loaded), whole), "nor on one that broke off"
        found = proved(loaded, "caching")
        assert found.engaged, found
        undone, facts = WALKED[option]
        assert facts.items() <= found.facts.items(), found
        for undo in undone:
            undo(loaded)
            assert not evidence(loaded, "caching").engaged

    def test_a_scheduler_that_calls_the_denoiser_once_more_is_counted(
        self, session: Load
    ) -> None:
        found = proved(
            session("caching=deepcache", "scheduler=plms", "workload.steps=4"),
            "caching",
        )
        assert found.engaged, found
        assert {"whole": 2, "outer": 3}.items() <= found.facts.items()

    @pytest.mark.parametrize(
        "option",
        [
            "deepcache",
            pytest.param("guidance_interval", marks=pytest.mark.slow),
            pytest.param("pyramid_attention", marks=pytest.mark.slow),
            pytest.param("spectrum", marks=pytest.mark.slow),
        ],
    )
    def test_operations_saved_are_those_of_a_call_that_really_runs(
        self, session: Load, variant: Compose, option: str
    ) -> None:
        """With attention as two matrix products, which are counted on a CPU as well, and as few steps as save some."""
        fewest = variant(f"caching={option}").optimizations["caching"].traced_calls
        found = []
        for chosen in ("none", option):
            loaded = session(
                f"caching={chosen}", f"workload.steps={fewest}", "attention=vanilla"
            )
            with FlopCounterMode(display=False) as counter:
                loaded._call(output_type="latent")
            found.append((counter.get_total_flops() / 1e12, loaded.count_operations()))
        (ran, counted), (fewer, counted_fewer) = found
        assert 0 < counted_fewer < counted
        assert counted - counted_fewer == pytest.approx(ran - fewer)

    def test_none_runs_every_layer_on_every_step(self, session: Load) -> None:
        loaded = session(STEPS)
        assert evidence(loaded, "caching").engaged
        HookRegistry.check_if_exists_or_initialize(loaded._pipe.unet)
        unet = loaded._pipe.unet
        unet.forward = cached = DeepCache(unet, 3, 0, 0)
        cached.begin()
        assert not evidence(loaded, "caching").engaged


def small_unet(name: str) -> UNet2DConditionModel:
    """A UNet with the blocks and layers of a published architecture, and few channels."""
    if name == "emoji":
        return UNet2DConditionModel.from_pretrained(PACKAGED / "emoji" / "unet")
    config = json.loads((ARCHITECTURES / name / "unet" / "config.json").read_text())
    channels = [8 * (i + 1) for i in range(len(config["block_out_channels"]))]
    heads = {"attention_head_dim": 2, "num_attention_heads": None}
    depth = config.get("transformer_layers_per_block", 1)
    smaller = {
        **config,
        "block_out_channels": channels,
        "norm_num_groups": 4,
        "cross_attention_dim": 16,
        **heads,
    }
    smaller["transformer_layers_per_block"] = (
        [min(n, 2) for n in depth] if isinstance(depth, list) else depth
    )
    if config.get("addition_embed_type"):
        smaller |= {
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 16 + 6 * 4,
        }
    torch.manual_seed(0)
    return UNet2DConditionModel.from_config(smaller).eval()


def given(unet: UNet2DConditionModel, side: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    added = None
    if unet.config.addition_embed_type:
        added = {
            "text_embeds": torch.randn(2, 16, generator=generator),
            "time_ids": torch.ones(2, 6),
        }
    states = torch.randn(2, 7, unet.config.cross_attention_dim, generator=generator)
    return {
        "encoder_hidden_states": states,
        "added_cond_kwargs": added,
        "return_dict": False,
    }


def predictions(
    unet: UNet2DConditionModel, steps: int, side: int
) -> list[torch.Tensor]:
    """What a denoiser predicts in a DDIM loop without guidance, from fixed noise."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(steps)
    inputs, found = given(unet, side), []
    latents = torch.randn(
        2,
        unet.config.in_channels,
        side,
        side,
        generator=torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            found.append(unet(latents, timestep, **inputs)[0])
            latents = scheduler.step(found[-1], timestep, latents).prev_sample
    return found


GUIDED, UNGUIDED = (
    SimpleNamespace(do_classifier_free_guidance=guided) for guided in (True, False)
)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("emoji", 16),
        pytest.param("sd15", 18, marks=pytest.mark.slow),
        pytest.param("sd21", 16, marks=pytest.mark.slow),
        ("sdxl", 18),
    ],
)
def test_a_whole_step_is_the_models_own(name: str, side: int) -> None:
    unet = small_unet(name)
    [expected] = predictions(unet, 1, side)
    branches = _branches(unet.config)
    assert len(branches) == sum(len(block.resnets) + 1 for block in unet.down_blocks)
    kinds: list[Any] = [partial(DeepCache, unet, 3, *branch) for branch in branches]
    for made in (*kinds, partial(FirstBlock, GUIDED, unet, 0.1)):
        unet.forward = made()
        assert torch.equal(predictions(unet, 1, side)[0], expected), made
        del unet.forward


class TestDeepCache:
    @needs_published
    @pytest.mark.parametrize(
        "name", ["emoji", pytest.param("sd15", marks=pytest.mark.slow), "sdxl"]
    )
    def test_every_step_is_that_of_the_published_implementation(
        self, name: str
    ) -> None:
        from DeepCache import DeepCacheSDHelper

        unet = small_unet(name)
        scheduler = DDIMScheduler()
        scheduler.set_timesteps(4)
        numbers = (
            [0, 1] if name == "emoji" else [0, 1, 2, 3, 5]
        )  # it takes each block to have two layers
        for number in numbers:
            helper = DeepCacheSDHelper(SimpleNamespace(unet=unet, scheduler=scheduler))
            helper.set_params(cache_interval=3, cache_branch_id=number)
            helper.enable()
            expected = predictions(_Positional(unet), 4, 16)
            helper.disable()
            del unet.forward
            unet.forward = cached = DeepCache(unet, 3, *_branches(unet.config)[number])
            cached.begin()
            for mine, theirs in zip(predictions(unet, 4, 16), expected, strict=True):
                assert torch.equal(mine, theirs), number
            del unet.forward

    def test_what_controls_the_denoiser_from_outside_is_refused(self) -> None:
        unet = small_unet("emoji")
        unet.forward = DeepCache(unet, 3, 0, 0)
        with pytest.raises(
            UsageError, match="cannot pass mid_block_additional_residual on"
        ):
            unet(
                torch.randn(1, 8, 8, 8),
                1,
                torch.randn(1, 4, 144),
                mid_block_additional_residual=torch.zeros(1),
            )

    def test_compiled_packages_of_its_steps_are_not_taken_for_each_other(self) -> None:
        unet, inputs = (
            small_unet("emoji"),
            (torch.randn(2, 8, 8, 8), torch.tensor(1), torch.randn(2, 4, 144)),
        )
        steps = [
            DeepCache(unet, 3, *branch).whole for branch in _branches(unet.config)[:2]
        ]
        steps += [DeepCache(unet, 3, *_branches(unet.config)[0]).outer]
        found = [digest(Tensors(step, (inputs,), {})) for step in [*steps, unet]]
        unet.set_attn_processor(AttnProcessor())
        assert len({*found, digest(Tensors(steps[0], (inputs,), {}))}) == 5


class TestFirstBlock:
    def test_what_has_changed_enough_runs_again(self) -> None:
        unet = small_unet("emoji")
        expected = predictions(unet, 5, 16)
        own = unet.forward
        unet.forward = cached = FirstBlock(GUIDED, unet, 1e-6)
        cached.begin()
        assert all(map(torch.equal, predictions(unet, 5, 16), expected))
        assert cached.calls == {"whole": 5}
        unet.forward = own
        unet.forward = cached = FirstBlock(GUIDED, unet, 10)
        cached.begin()
        first, second, *_ = predictions(unet, 5, 16)
        assert torch.equal(first, expected[0])
        assert not torch.equal(second, expected[1])
        assert cached.calls == {"whole": 1, "outer": 4}

    def test_no_image_depends_on_its_neighbours(self) -> None:
        """The second one changes so much in each step that its inner layers run, and those of the first do not."""
        unet, generator = small_unet("emoji"), torch.Generator().manual_seed(0)
        steady, states = (
            torch.randn(1, 8, 8, 8, generator=generator),
            torch.randn(1, 24, 144, generator=generator),
        )
        wild = torch.randn(4, 1, 8, 8, 8, generator=generator)
        unet.forward = cached = FirstBlock(UNGUIDED, unet, 0.3)

        def run(samples: list[torch.Tensor]) -> torch.Tensor:
            cached.begin()
            with torch.no_grad():
                found = [
                    unet(
                        each, 500, states.expand(len(each), -1, -1), return_dict=False
                    )[0]
                    for each in samples
                ]
            return torch.stack([each[0] for each in found])

        still = [steady * (1 + 0.01 * step) for step in range(4)]
        alone = run(still)
        assert cached.calls == {"whole": 1, "outer": 3}
        beside = run([torch.cat([each, wild[step]]) for step, each in enumerate(still)])
        assert cached.calls == {"whole": 1, "part": 3}
        assert torch.allclose(alone, beside, atol=1e-5)

    def test_the_two_samples_of_an_image_decide_together(self) -> None:
        cached = FirstBlock(GUIDED, small_unet("emoji"), 0.2)
        before = torch.ones(4, 1, 1, 1)
        added = torch.tensor([1.3, 1.1, 1.2, 1.1]).view(4, 1, 1, 1)
        assert cached._changed(added, before).tolist() == [True, False, True, False]
        cached = FirstBlock(UNGUIDED, small_unet("emoji"), 0.25)
        assert cached._changed(added, before).tolist() == [True, False, False, False]


class TestSpectrum:
    def test_takes_the_published_steps(self) -> None:
        """stable-diffusion.cpp, pull request 1322: 1.82× with 20 steps and 2.14× with 30."""
        published = SpectralForecast(warmup=4, window=2, growth=0.5, stop=0.9)
        assert [sum(published.runs(steps)) for steps in (20, 30)] == [11, 14]
        assert all(published.runs(4))

    def test_forecasts_polynomials_of_its_degree(self) -> None:
        known, values = (
            [0, 1, 2, 3, 5],
            [1 + 2 * step - 0.3 * step**3 for step in (0, 1, 2, 3, 5, 7)],
        )
        weights = SpectralForecast(degree=3, ridge=1e-12, blend=1).weights(known, 7, 20)
        assert float(np.dot(weights, values[:5])) == pytest.approx(values[5], rel=1e-4)
        assert SpectralForecast(blend=0).weights(known, 7, 20) == [0, 0, 0, -1, 2]


@pytest.mark.parametrize("option", ["first_block", "spectrum"])
@pytest.mark.walk(1)
def test_an_image_of_a_batch_is_that_drawn_alone(session: Load, option: str) -> None:
    work = [f"caching={option}", "workload.guidance_scale=4.5", STEPS]
    [alone] = image(session(*work))
    assert (
        np.abs(image(session(*work, "workload.batch_size=3"))[0] - alone).max() < 1e-3
    )


@pytest.mark.parametrize(
    ("option", "graphs", "steps"),
    [
        ("deepcache", 2, 4),
        pytest.param("first_block", 3, 10, marks=pytest.mark.slow),
        ("spectrum", 1, 6),
    ],
)
@pytest.mark.walk(1)
def test_is_traced_to_fixed_graphs(
    session: Load, option: str, graphs: int, steps: int
) -> None:
    """What decides which of them a step runs lies outside of them: the images are those of eager code."""
    work = f"workload.steps={steps}"
    eager = image(session(f"caching={option}", work))
    loaded = session(f"caching={option}", "compiler=trace", work)
    assert np.array_equal(image(loaded), eager)
    found = {item.axis: item for item in loaded.prove().evidence}
    assert all(item.engaged for item in found.values()), found
    assert found["compiler"].facts["graphs"] == graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "graphs"),
    [
        ("caching=deepcache", 2),
        ("caching=deepcache compiler.fullgraph=true", 2),
        ("caching=guidance_interval", 2),
        ("caching=first_block", 3),
        ("caching=spectrum", 1),
    ],
)
def test_inductor_makes_a_graph_of_each_kind_of_step_without_a_break(
    session: Load, chosen: str, graphs: int
) -> None:
    eager = image(session(chosen.split(maxsplit=1)[0], STEPS))
    torch._dynamo.reset()
    loaded = session("compiler=inductor", *chosen.split(), STEPS)
    assert np.abs(image(loaded) - eager).max() < 0.02
    for item in loaded.prove().evidence:
        assert item.engaged, item
    assert np.array_equal(image(loaded), image(loaded))
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


class _Positional:
    """Calls a UNet whose forward the published implementation has wrapped."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.config, self._unet = unet.config, unet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._unet(*args, **kwargs)


def test_guidance_interval_without_any_is_a_call_without_guidance(
    session: Load,
) -> None:
    """From the second step on: the first one is always within."""
    loaded = session("caching=guidance_interval", STEPS)
    loaded._pipe.unet.forward._chosen = SimpleNamespace(guides=lambda *_: False)
    alone = session("workload.guidance_scale=1", STEPS)
    assert np.abs(image(loaded) - image(alone)).max() < 1e-4


@pytest.mark.skipif(find_spec("tomesd") is None, reason="tomesd is not installed")
def test_token_merging_depends_on_its_seed_and_not_on_the_process(
    session: Load,
) -> None:
    drawn = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)
        drawn.append(
            image(session("caching=tome", f"caching.seed={seed}", "workload.steps=2"))
        )
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


@pytest.mark.skipif(find_spec("tomesd") is None, reason="tomesd is not installed")
@pytest.mark.parametrize(
    "changed", ["workload.guidance_scale=1", "memory=sequential_guidance"]
)
def test_token_merging_does_not_depend_on_the_number_of_images(
    session: Load, changed: str
) -> None:
    """Of two images, tomesd merged other tokens than of one; a quality pass and a server make more than timed calls."""
    settings = ("caching=tome", changed, "workload.steps=2")
    alone = image(session(*settings))
    among = image(session(*settings, "workload.batch_size=2"))
    assert np.abs(alone[0] - among[0]).max() < 1e-4
