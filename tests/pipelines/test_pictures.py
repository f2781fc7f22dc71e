"""Transformers that begin with a picture: the steps that run, the images of diffusers, and the operations."""

from functools import partial
from itertools import product

import diffusers
import numpy as np
import pytest
import torch

from sdopt.options import Context
from sdopt.pipelines.family import family_named
from sdopt.pipelines.loading import guidance_of
from sdopt.schema import Model, Task, Workload
from sdopt.worker.host import PipelineHost
from sdopt.worker.operations import tflop, tflop_per_image
from tests.fixtures import CPU, Tiny
from tests.options.applied import model_of
from tests.pipelines.test_family import FAST, TWO_PROMPTS, images_of
from tests.pipelines.tiny import TINY, tiny


class TestSteps:
    @pytest.mark.parametrize("name", ["flux", "z_image", "sd3", "qwen_image", "chroma"])
    def test_from_an_image_are_as_many_as_diffusers_runs(
        self, variant_of: Tiny, name: str
    ) -> None:
        """Those of transformers round up what those of Stable Diffusion round down."""
        pipe = tiny(name)
        family = family_named(type(pipe).__name__)
        from_image = getattr(diffusers, family.tasks["img2img"])(**pipe.components)
        for steps, strength in product((3, 25, 28), (0.1, 0.3, 0.5, 0.55, 0.7, 1.0)):
            shifted = pipe.scheduler.config.use_dynamic_shifting
            pipe.scheduler.set_timesteps(steps, **({"mu": 1.0} if shifted else {}))
            timesteps, _ = from_image.get_timesteps(steps, strength, "cpu")
            assert family.steps_of(steps, strength) == len(timesteps)

    def test_of_a_context_are_those_that_run(
        self, inputs: dict[str, list[str]]
    ) -> None:
        for name, steps in (("flux", 13), ("emoji", 12)):
            model = (
                Model(weights="packaged") if name == "emoji" else model_of(tiny(name))
            )
            task = Task("img2img", strength=0.5)
            ctx = Context(CPU, model, Workload(steps=25), {}, task=task)
            assert ctx.steps == steps

    def test_may_be_one_where_stable_diffusion_has_none(
        self, variant_of: Tiny, inputs: dict[str, list[str]]
    ) -> None:
        chosen = variant_of("flux", *inputs["img2img"], "task.strength=0.3")
        host = PipelineHost(chosen, CPU)
        host.prepare()
        assert images_of(host).shape == (1, 64, 64, 3)


WITHOUT_TASKS = ("pixart", "sana", "lumina2", "aura_flow", "cogview4")

TASKS = [
    pytest.param(name, task, marks=() if name in FAST else pytest.mark.slow)
    for name in TINY
    for task in ("img2img", "inpaint")
    if name not in WITHOUT_TASKS
    and (name, task) not in (("flux2", "img2img"), ("chroma", "inpaint"))
]


class TestPictures:
    @pytest.mark.parametrize(("name", "task"), TASKS)
    @pytest.mark.walk(2)
    def test_begin_as_in_diffusers(
        self, variant_of: Tiny, inputs: dict[str, list[str]], name: str, task: str
    ) -> None:
        steps = ("workload.steps=5", "task.strength=0.5")
        two = (TWO_PROMPTS, "workload.prompt_count=2", "workload.batch_size=2")
        variant = variant_of(name, *two, *inputs[task], *steps)
        assert variant.conflicts(CPU) == []
        host = PipelineHost(variant, CPU)
        host.prepare()
        given = dict(host._inputs[0])
        seeds = [generator.initial_seed() for generator in given.pop("generator")]
        images = images_of(host)
        loaded = diffusers.DiffusionPipeline.from_pretrained(variant.model.path)
        family = family_named(type(loaded).__name__)
        plain = getattr(diffusers, family.tasks[task])(**loaded.components)
        if name == "flux2":
            plain.register_to_config(is_distilled=True)
        plain.set_progress_bar_config(disable=True)
        plain.scheduler = type(host._pipe.scheduler).from_config(
            host._pipe.scheduler.config
        )
        scale = guidance_of(variant.model).argument
        given |= {scale: variant.guidance_scale, **family.call}
        drawn = plain(
            num_inference_steps=5,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="np",
            **given,
        ).images
        assert np.abs(images - drawn).max() < 1e-5
        assert np.abs(images[0] - images[1]).max() > 1e-2

    def test_count_what_encodes_them(
        self, variant_of: Tiny, inputs: dict[str, list[str]]
    ) -> None:
        counted = {}
        for task in ("txt2img", "img2img"):
            variant = variant_of("flux", *inputs[task])
            host = PipelineHost(variant, CPU)
            host.prepare()
            once = partial(host._call, num_inference_steps=1)
            counted[task] = tflop_per_image(host._pipe, variant, once)
        with torch.device("meta"):
            vae = diffusers.AutoencoderKL.from_config(host._pipe.vae.config)
            encoding = tflop(vae.encode, torch.empty(1, 3, 64, 64))
        assert counted["txt2img"]["vae_encoder"] == 0
        assert counted["img2img"]["vae_encoder"] == pytest.approx(encoding)
        assert counted["img2img"]["total"] == pytest.approx(
            counted["txt2img"]["total"] + encoding
        )
        assert "encode" not in vars(host._pipe.vae)
        # What counts leaves the networks as they were: later images are those of a call.
        for encoder in (host._pipe.text_encoder, host._pipe.text_encoder_2):
            assert encoder.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("name", ["sd3", "z_image"])
    def test_operations_are_those_of_any_type(
        self, variant_of: Tiny, name: str
    ) -> None:
        """Of encoders that are given masks, too."""
        counted = []
        for precision in ("fp32", "bf16"):
            host = PipelineHost(variant_of(name, f"precision={precision}"), CPU)
            host.prepare()
            counted.append(host.count_operations())
        assert counted[0] > 0
        assert counted[1] == counted[0]
