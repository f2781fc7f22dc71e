"""Kinds of pipelines: the rows of data are what diffusers does, and each kind is measured as diffusers draws it."""

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import parts_in, parts_of, read_json, text_to_image
from sdopt.pipelines.checks import require_model
from sdopt.pipelines.components import require_parts
from sdopt.pipelines.family import (
    FAMILIES,
    Family,
    Latents,
    family_named,
    family_of_class,
)
from sdopt.pipelines.latents import laid_out, spatial
from sdopt.pipelines.loading import load_part
from sdopt.pipelines.parts import cast, kept_in_float32
from sdopt.pipelines.prompts import _lengths, remarks_on_length
from sdopt.pipelines.random_weights import empty_network, random_network
from sdopt.schema import Model
from sdopt.variant import Variant
from sdopt.worker.draws import drawing_batch
from sdopt.worker.host import PipelineHost
from tests.fixtures import CPU, Tiny
from tests.pipelines.tiny import TINY, saved, tiny

TWO_PROMPTS = (
    "workload.prompts=[a red circle,a far longer prompt about a blue house at dawn]"
)

FAST = ("flux", "z_image")
"""Those that the tests of every run take; the others are marked slow."""

EVERY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TINY
]


def images_of(host: PipelineHost) -> np.ndarray:
    return host._read_inputs(host._inputs[0], 64)[0]


class TestRows:
    @pytest.mark.parametrize(
        "family", FAMILIES[:2] + FAMILIES[3:], ids=lambda family: family.pipeline
    )
    def test_name_what_diffusers_has(self, family: Family) -> None:
        cls = getattr(diffusers, family.pipeline)
        call = inspect.signature(cls.__call__).parameters
        parts = inspect.signature(cls.__init__).parameters
        assert {*family.parts} <= parts.keys()
        assert {
            family.guidance.argument,
            family.latents.last,
            "latents",
            "generator",
            *family.call,
        } <= call.keys()
        named = {name for name in family.encoding.returns if name}
        if family.guidance.form != "embedded":
            named |= {
                f"negative_{name}" for name in named if not name.startswith("negative_")
            }
        assert named <= call.keys()
        if family.guidance.takes_negative:
            assert "negative_prompt" in call
        for name in family.tasks.values():
            drawing: Any = inspect.unwrap(getattr(diffusers, name).__call__)
            names = drawing.__code__.co_names
            gives = "prepare_extra_step_kwargs" in names
            assert gives == family.seeds_steps, "a generator, to its scheduler"
            assert ("upcast_vae" in names) == family.upcasts_vae
            assert family_of_class(name) is family
            assert text_to_image(name) == family.pipeline

    def test_pipelines_with_further_networks_are_of_their_family(self) -> None:
        assert family_named("FluxControlNetPipeline").pipeline == "FluxPipeline"
        assert (
            family_named("StableDiffusionXLControlNetPipeline").pipeline
            == "StableDiffusionXLPipeline"
        )
        assert (
            family_named("StableDiffusion3PAGPipeline").pipeline
            == "StableDiffusion3Pipeline"
        )
        assert family_named("StableDiffusionGLIGENPipeline").is_unet

    def test_say_when_a_scale_runs_both_branches(self) -> None:
        batched, above_zero = (
            family_named("StableDiffusion3Pipeline").guidance,
            family_named("ZImagePipeline").guidance,
        )
        assert (
            batched.samples_a_call(1.0),
            batched.samples_a_call(1.1),
            batched.calls_a_step(7.0),
        ) == (1, 2, 1)
        assert (above_zero.samples_a_call(0.0), above_zero.samples_a_call(0.5)) == (
            1,
            2,
        )
        sequential = family_named("QwenImagePipeline").guidance
        assert (
            sequential.samples_a_call(4.0),
            sequential.calls_a_step(4.0),
            sequential.calls_a_step(1.0),
        ) == (1, 2, 1)
        embedded = family_named("FluxPipeline").distilled
        assert not embedded.guides(3.5)
        assert embedded.counts(3.5)


class TestLatents:
    def test_are_laid_out_as_diffusers_does(self) -> None:
        noise = torch.randn(2, 16, 8, 8)
        flux = diffusers.FluxPipeline._pack_latents(noise, 2, 16, 8, 8)
        assert laid_out(noise, Latents("packed")).equal(flux)
        flux2 = diffusers.Flux2KleinPipeline._patchify_latents(noise)
        assert laid_out(noise, Latents("patchified")).equal(flux2)
        assert laid_out(noise, Latents()) is noise

    def test_are_found_again_in_what_a_callback_gets(self) -> None:
        noise = torch.randn(2, 16, 8, 8)
        assert spatial(laid_out(noise, Latents("packed")), Latents("packed")).equal(
            noise
        )
        packed = diffusers.Flux2KleinPipeline._pack_latents(
            laid_out(noise, Latents("patchified"))
        )
        assert spatial(packed, Latents("patchified")).equal(noise)


class TestWeights:
    def test_of_one_embedding_by_two_names_are_counted_and_drawn_once(
        self, tmp_path: Path
    ) -> None:
        sizes = {"d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(
            vocab_size=32128, feed_forward_proj="gated-gelu", **sizes
        )
        config.save_pretrained(tmp_path)
        published = sum(
            weight.numel()
            for weight in transformers.T5EncoderModel(config).parameters()
        )
        named = ("transformers", "T5EncoderModel")
        assert (
            sum(
                weight.numel()
                for weight in empty_network(tmp_path, *named).parameters()
            )
            == published
        )
        drawn: Any = random_network(tmp_path, *named, "text_encoder_2", torch.bfloat16)
        assert drawn.shared.weight is drawn.encoder.embed_tokens.weight
        assert sum(weight.numel() for weight in drawn.parameters()) == published

    def test_that_overflow_in_float16_stay_in_float32(
        self, tiny_folder: Callable[[str], Path]
    ) -> None:
        folder = tiny_folder("flux")
        model = Model("folder", "path", path=str(folder))
        loaded = load_part(model, "text_encoder_2", torch.float16)
        pipe = tiny("flux")
        assert kept_in_float32(pipe.text_encoder_2, torch.float16)
        cast(pipe, torch.float16)
        types = [
            {name: str(weight.dtype) for name, weight in t5.named_parameters()}
            for t5 in (loaded, pipe.text_encoder_2)
        ]
        assert types[0] == types[1]
        assert {*types[0].values()} == {"torch.float16", "torch.float32"}
        assert pipe.transformer.dtype == torch.float16
        cast(pipe, torch.bfloat16)
        assert {weight.dtype for weight in pipe.text_encoder_2.parameters()} == {
            torch.bfloat16
        }

    @pytest.mark.parametrize(
        ("name", "part"), [("sd3", "transformer"), ("flux2", "vae")]
    )
    def test_that_are_drawn_are_of_the_types_of_loaded_ones(
        self, tiny_folder: Callable[[str], Path], name: str, part: str
    ) -> None:
        """Positions and statistics are buffers, which are not drawn."""
        folder = tiny_folder(name)
        model = Model("folder", "path", path=str(folder))
        loaded = load_part(model, part, torch.bfloat16)
        named = parts_in(folder)[part]
        drawn = random_network(folder / part, *named, part, torch.bfloat16)
        types = []
        for network in (drawn, loaded):
            tensors = network.state_dict().items()
            types.append({key: tensor.dtype for key, tensor in tensors})
        assert types[0] == types[1]

    @pytest.mark.parametrize("name", ["z_image", "sana"])
    def test_keep_what_is_computed_as_loading_does(
        self, tiny_folder: Callable[[str], Path], name: str
    ) -> None:
        """Rates of rotary positions, which are in no file: rounded to bfloat16, later words are misplaced."""
        model = Model("folder", "path", path=str(tiny_folder(name)))
        loaded = load_part(model, "text_encoder", torch.bfloat16)
        pipe = tiny(name)
        cast(pipe, torch.bfloat16)
        wanted = dict(loaded.named_buffers())
        found = dict(pipe.text_encoder.named_buffers())
        rates = [key for key in wanted if key.endswith("inv_freq")]
        assert rates
        for key in rates:
            assert found[key].dtype == torch.float32
            assert found[key].equal(wanted[key])


class TestFolders:
    @pytest.mark.parametrize("name", EVERY)
    def test_are_found_complete(
        self, tiny_folder: Callable[[str], Path], name: str
    ) -> None:
        model = Model("folder", "path", path=str(tiny_folder(name)))
        require_model(model)
        require_parts(model)

    def test_are_refused_where_a_part_is_missing(
        self, tiny_folder: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder = shutil.copytree(tiny_folder("flux"), tmp_path / "flux")
        (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
        with pytest.raises(UsageError, match="transformer"):
            require_model(Model("folder", "path", path=str(folder)))

    def test_of_sd3_may_lack_the_largest_text_encoder(self, tmp_path: Path) -> None:
        folder = saved("sd3", tmp_path / "sd3", t5=False)
        require_model(Model("folder", "path", path=str(folder)))
        assert "text_encoder_3" not in parts_of(read_json(folder / "model_index.json"))
        assert "text_encoder_3" in parts_of({"_class_name": "StableDiffusion3Pipeline", "text_encoder_3": ["a", "B"]}
                                            | {"tokenizer_3": ["a", "B"]})  # fmt: skip


class TestCalls:
    @pytest.mark.parametrize("name", EVERY)
    def test_draw_what_diffusers_draws_from_the_same_noise(
        self, variant_of: Tiny, name: str
    ) -> None:
        variant = variant_of(name, TWO_PROMPTS, "workload.batch_size=2")
        assert variant.conflicts(CPU) == []
        host = PipelineHost(variant, CPU)
        host.prepare()
        given = host._inputs[0]
        prompts = list(given["prompt"])
        images = images_of(host)
        assert given["prompt"] == prompts, "the list of prompts is the caller's"
        assert images_of(host).tobytes() == images.tobytes(), (
            "a second call with the same inputs draws the same"
        )
        plain = diffusers.DiffusionPipeline.from_pretrained(variant.model.path)
        plain.scheduler = type(host._pipe.scheduler).from_config(
            host._pipe.scheduler.config
        )
        plain.set_progress_bar_config(disable=True)
        family = family_named(type(plain).__name__)
        seeds = [generator.initial_seed() for generator in given["generator"]]
        arguments = {
            key: value
            for key, value in given.items()
            if key not in ("latents", "generator")
        }
        arguments |= {family.guidance.argument: variant.guidance_scale, **family.call}
        if name == "flux":  # its scale is an input of the denoiser
            arguments["guidance_scale"] = arguments.pop("true_cfg_scale")
        drawn = plain(
            num_inference_steps=3,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="np",
            **arguments,
        ).images
        assert np.abs(images - drawn).max() < 1e-5, (
            "also where the pipeline draws the noise itself"
        )
        assert host._last is not None
        stored, side = (
            spatial(host._last, family.latents),
            64 // host._pipe.vae_scale_factor,
        )
        assert stored.shape[2:] == (side, side)

    def test_a_prompt_is_drawn_the_same_beside_a_longer_one(
        self, variant_of: Tiny
    ) -> None:
        alone, beside = (
            images_of(
                _prepared(
                    variant_of("z_image", TWO_PROMPTS, f"workload.batch_size={size}")
                )
            )
            for size in (1, 2)
        )
        assert np.abs(alone[0] - beside[0]).max() < 1e-3

    @pytest.mark.parametrize("name", EVERY)
    def test_say_whether_diffusers_mixes_masks(self, name: str) -> None:
        """Of several images of each of several prompts; once it does no longer, such workloads are none to refuse."""
        pipe = tiny(name)
        encoding = family_named(type(pipe).__name__).encoding
        names = [returned for returned in encoding.returns if returned[-4:] == "mask"]
        if encoding.masks == "never" or not names:
            assert not encoding.mixes
            return
        prompts = ["a cat", "a much longer prompt about a blue house"]
        encoded = pipe.encode_prompt(prompt=prompts, num_images_per_prompt=2)
        mask = encoded[encoding.returns.index(names[0])]
        assert mask[0].equal(mask[1]) != encoding.mixes

    def test_of_several_prompts_do_not_make_several_images_of_each_with_mixed_masks(
        self, variant_of: Tiny
    ) -> None:
        two = "workload.images_per_prompt=2"
        [reason] = variant_of("sana", "workload.batch_size=2", two).conflicts(CPU)
        assert "the masks of other prompts of their batch" in reason
        alone = variant_of("sana", two)
        assert alone.conflicts(CPU) == []
        assert drawing_batch([alone], 4, judged=False) is None
        assert drawing_batch([variant_of("sana")], 4, judged=False) == 4

    def test_say_how_much_of_a_prompt_each_encoder_reads(
        self, variant_of: Tiny
    ) -> None:
        variant = variant_of("flux", f"workload.prompts=[{'a red circle and ' * 40}]")
        remarks = remarks_on_length(variant.workload, variant.model)
        assert [
            remark for remark in remarks if "reads 77 tokens and cuts 1 of 1" in remark
        ]
        assert [
            remark for remark in remarks if "reads 512 tokens and cuts 1 of 1" in remark
        ]
        short = variant_of("flux", "workload.prompts=[a red circle]")
        assert remarks_on_length(short.workload, short.model) == []

    @pytest.mark.parametrize(
        ("name", "lengths"),
        [
            ("z_image", (512,)),
            *(
                pytest.param(name, lengths, marks=pytest.mark.slow)
                for name, lengths in (
                    ("sd3", (77, 256)),
                    ("lumina2", (256,)),
                    ("pixart", (300,)),
                    ("chroma", (512,)),
                )
            ),
        ],
    )
    def test_cut_what_no_encoder_reads(
        self, variant_of: Tiny, name: str, lengths: tuple[int, ...]
    ) -> None:
        variant = variant_of(name, f"workload.prompts=[{'a red circle and ' * 160}]")
        remarks = remarks_on_length(variant.workload, variant.model)
        for length in lengths:
            assert [
                remark
                for remark in remarks
                if f"reads {length} tokens and cuts 1 of 1" in remark
            ], remarks

    @pytest.mark.parametrize(("name", "limit"), [("lumina2", 256), ("z_image", 512)])
    def test_count_what_a_call_writes_around_a_prompt(
        self, variant_of: Tiny, name: str, limit: int
    ) -> None:
        """Lumina 2 begins with an instruction, and a chat has marks of its turns."""
        tokenizer = tiny(name).tokenizer
        each = len(tokenizer("red ")["input_ids"])
        whole, cut = ("red " * (count // each) for count in (limit // 2, limit))
        assert len(tokenizer(cut)["input_ids"]) <= limit
        for text, remarks in ((whole, 0), (cut, 1)):
            variant = variant_of(name, f"workload.prompts=['{text}']")
            found = remarks_on_length(variant.workload, variant.model)
            assert len(found) == remarks, found

    def test_count_what_flux2_tells_its_encoder_first(self) -> None:
        """Whose tokenizer is a part of what prepares pictures, too."""
        before = family_named("Flux2Pipeline").encoding.before
        assert SYSTEM_MESSAGE in before
        tokenizer = tiny("z_image").tokenizer
        prepares: Any = SimpleNamespace(tokenizer=tokenizer)
        model = Model("flux2_dev", "random")
        limit, [count] = _lengths(model, prepares, 512, ["red"])
        assert limit == 512
        assert count == len(tokenizer(f"{before}red")["input_ids"])

    def test_count_by_the_tokenizers_of_a_files_base(
        self, variant_of: Tiny, tiny_folder: Callable[[str], Path], tmp_path: Path
    ) -> None:
        from tests.pipelines.web_files import original, save

        file = save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")
        words = f"workload.prompts=[{'a red circle and ' * 40}]"
        variant = variant_of(file, f"model.base={tiny_folder('flux')}", words)
        alone = variant_of("flux", words)
        found = remarks_on_length(variant.workload, variant.model)
        assert found == remarks_on_length(alone.workload, alone.model) != []


def _prepared(variant: Variant) -> PipelineHost:
    host = PipelineHost(variant, CPU)
    host.prepare()
    return host


class TestRefusals:
    @pytest.mark.parametrize(
        "scheduler", ["ddim", "euler", "ays", "dpmpp_2m_karras", "unipc"]
    )
    @pytest.mark.parametrize(
        "name",
        [
            "flux",
            pytest.param("sd3", marks=pytest.mark.slow),
            pytest.param("sana", marks=pytest.mark.slow),
        ],
    )
    def test_of_schedulers_with_levels_that_would_draw_nonsense(
        self, variant_of: Tiny, name: str, scheduler: str
    ) -> None:
        [reason] = variant_of(name, f"scheduler={scheduler}").conflicts(CPU)
        assert "choose scheduler=flow_euler" in reason

    def test_of_a_flow_scheduler_that_the_pipeline_does_not_call(
        self, variant_of: Tiny
    ) -> None:
        [reason] = variant_of("z_image", "scheduler=flow_unipc").conflicts(CPU)
        assert "FlowMatchEulerDiscreteScheduler" in reason
        assert variant_of("flux", "scheduler=flow_unipc").conflicts(CPU) == []

    def test_of_a_negative_prompt_that_nothing_reads(self, variant_of: Tiny) -> None:
        with pytest.raises(
            UsageError, match=r"workload\.negative_prompt: has no effect"
        ):
            variant_of("flux", "workload.negative_prompt=blurry")
        with pytest.raises(UsageError, match=r"workload\.guidance_scale above 0"):
            variant_of(
                "z_image",
                "workload.negative_prompt=blurry",
                "workload.guidance_scale=0",
            )
        assert variant_of("z_image", "workload.negative_prompt=blurry").negatives

    @pytest.mark.slow
    def test_of_a_guidance_scale_that_was_distilled_into_the_weights(
        self, variant_of: Tiny
    ) -> None:
        with pytest.raises(
            UsageError, match=r"workload\.guidance_scale=4: has no effect"
        ):
            variant_of("flux2", "workload.guidance_scale=4")

    def test_of_a_size_that_leaves_half_a_token(self, variant_of: Tiny) -> None:
        assert any(
            "multiple of 16" in reason
            for reason in variant_of("flux", "workload.size=72").conflicts(CPU)
        )

    def test_of_a_task_that_diffusers_does_not_have(self, variant_of: Tiny) -> None:
        variant = variant_of("flux")
        assert "inpaint" in family_named("FluxPipeline").tasks
        assert variant.conflicts(CPU) == []
        assert family_named("Lumina2Pipeline").tasks.keys() == {"txt2img"}
