"""Transformers in files of the web: each is known by its tensors, and generates what its weights do in a folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file, save_file

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.pipelines.checks import require_model
from sdopt.pipelines.components import require_parts
from sdopt.pipelines.families import family_of
from sdopt.pipelines.loading import load_part
from sdopt.pipelines.originals import pipeline_in, renamed
from sdopt.pipelines.random_weights import empty_network
from sdopt.schema import Model
from sdopt.worker.host import PipelineHost
from tests.fixtures import CPU, Tiny
from tests.pipelines.single_file import autoencoder_name
from tests.pipelines.tiny import saved, tiny
from tests.pipelines.web_files import PREFIX, Tensors, gguf_file, original, save, scaled

FAST = ("flux", "z_image")

OF_THE_WEB = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in ("flux", "z_image", "sd3", "flux2", "qwen_image", "chroma", "lumina2")
]

Folder = Callable[[str], Path]

WEIGHTS = "diffusion_pytorch_model.safetensors"


def host_of(variant: Any) -> PipelineHost:
    host = PipelineHost(variant, CPU)
    host.prepare()
    return host


def images_of(variant: Any) -> np.ndarray:
    assert variant.conflicts(CPU) == []
    host = host_of(variant)
    return host._read_inputs(host._inputs[0], 64)[0]


def are_same(images: np.ndarray, others: np.ndarray) -> bool:
    """Tells whether images are of the same weights, which files place in memory at other addresses.

    Without AVX-512, products of a matrix and a vector add up in another order where the matrix lies elsewhere.
    """
    return np.allclose(images, others, rtol=0, atol=1e-5)


def with_weights(folder: Path, tensors: Tensors, to: Path) -> Path:
    """Copies a pipeline, with other weights of its transformer."""
    shutil.copytree(folder, to)
    save_file(tensors, to / "transformer" / WEIGHTS)
    return to


def problems_of(path: Path, base: Path, **parts: str | None) -> list[str]:
    """Returns what is wrong with a file beside the pipeline of its base, whichever check finds it."""
    model = Model("folder", "path", path=str(path), base=str(base), parts=parts)
    try:
        require_model(model)
        require_parts(model)
    except UsageError as error:
        return error.problems
    return []


class TestNames:
    @pytest.mark.parametrize("name", ["sd3", "flux2", "z_image"])
    def test_are_those_of_diffusers_own_converters(self, name: str) -> None:
        convert = getattr(
            single_file_utils,
            {
                "sd3": "convert_sd3",
                "flux2": "convert_flux2",
                "z_image": "convert_z_image",
            }[name]
            + "_transformer_checkpoint_to_diffusers",
        )
        network = tiny(name).transformer
        written, weights = original(network), network.state_dict()
        assert_equal(convert(dict(written)), weights)
        found, left = renamed(written, network)
        assert not left
        assert_equal(found, weights)

    @pytest.mark.parametrize("name", ["flux", "chroma"])
    def test_are_those_of_converters_for_one_width(self, name: str) -> None:
        # Both are made for 3072 channels, and part rows alone: one column of each matrix is enough.
        folder = Path(single_file_utils.__file__).parent
        assert folder.is_dir()
        convert = getattr(
            single_file_utils, f"convert_{name}_transformer_checkpoint_to_diffusers"
        )
        network = type(tiny(name).transformer)
        config = dict(tiny(name).transformer.config) | {
            "num_layers": 1,
            "num_single_layers": 1,
        }
        with torch.device("meta"):
            wide = network.from_config(
                config | {"attention_head_dim": 128, "num_attention_heads": 24}
            )
        narrow = {
            key: torch.randn(value.shape[:1])
            for key, value in wide.state_dict().items()
        }
        written = original_of(narrow, wide)
        found, left = renamed(written, wide)
        assert not left
        assert_equal(found, narrow)
        assert_equal(convert(dict(written)), narrow)

    def test_of_lumina_are_those_of_the_converter_for_its_width(self) -> None:
        config = dict(tiny("lumina2").transformer.config) | {
            "hidden_size": 2304,
            "num_attention_heads": 24,
            "num_kv_heads": 8,
            "axes_dim_rope": [32, 32, 32],
            "num_layers": 1,
        }
        network = type(tiny("lumina2").transformer)
        with torch.device("meta"):
            wide = network.from_config(config)
        narrow = {
            key: torch.randn(value.shape[:1])
            for key, value in wide.state_dict().items()
        }
        written = original_of(narrow, wide)
        assert "layers.0.attention.qkv.weight" in written
        found, left = renamed(written | {"norm_final.weight": torch.ones(1)}, wide)
        assert not left
        assert_equal(found, narrow)
        converted = single_file_utils.convert_lumina2_to_diffusers(dict(written))
        assert_equal(converted, narrow)

    def test_tell_the_families_apart(self) -> None:
        kinds = {
            name: pipeline_in(original(tiny(name).transformer))
            for name in ("flux", "flux2", "chroma", "sd3", "z_image", "lumina2")
        }
        assert kinds == {
            "flux": "FluxPipeline",
            "flux2": "Flux2KleinPipeline",
            "chroma": "ChromaPipeline",
            "sd3": "StableDiffusion3Pipeline",
            "z_image": "ZImagePipeline",
            "lumina2": "Lumina2Pipeline",
        }
        assert pipeline_in(["model.diffusion_model.input_blocks.0.0.weight"]) is None


def original_of(tensors: Tensors, network: Any) -> Tensors:
    """Returns tensors of one column, written as those of a network of full size."""

    class Holder:
        def __init__(self) -> None:
            self.named_modules = network.named_modules

        def state_dict(self) -> Tensors:
            return tensors

    Holder.__name__ = type(network).__name__
    return original(Holder())


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)


class TestFiles:
    @pytest.mark.parametrize("name", OF_THE_WEB)
    @pytest.mark.parametrize("prefix", ["", PREFIX])
    @pytest.mark.walk(2)
    @pytest.mark.numeric
    def test_generate_what_the_folder_does(
        self,
        variant_of: Tiny,
        tiny_folder: Folder,
        tmp_path: Path,
        name: str,
        prefix: str,
    ) -> None:
        folder = tiny_folder(name)
        file = save(
            original(tiny(name).transformer),
            tmp_path / "transformer.safetensors",
            prefix,
        )
        base = with_weights(folder, zeros(folder), tmp_path / "base")
        assert problems_of(file, base) == []
        from_file = images_of(variant_of(file, f"model.base={base}"))
        assert are_same(from_file, images_of(variant_of(name)))

    def test_need_no_transformer_in_their_base(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        base = shutil.copytree(tiny_folder("flux"), tmp_path / "base")
        file = save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")
        (base / "transformer" / WEIGHTS).unlink()
        assert problems_of(file, base) == []
        (base / "vae" / WEIGHTS).unlink()
        assert any("vae/ holds no" in problem for problem in problems_of(file, base))

    def test_of_published_models_are_known_by_their_shapes(
        self, tmp_path: Path
    ) -> None:
        names = {
            "double_blocks.18.img_attn.norm.key_norm.scale": [128],
            "double_blocks.0.img_attn.norm.key_norm.scale": [128],
            "single_blocks.37.norm.key_norm.scale": [128],
            "vector_in.in_layer.bias": [3072],
            "img_in.weight": [1, 64],
            "txt_in.weight": [1, 4096],
        }
        file = tmp_path / "flux.safetensors"
        save_file({name: torch.zeros(shape) for name, shape in names.items()}, file)
        assert family_of(file) == "flux_schnell"
        save_file(
            {
                name: torch.zeros(shape)
                for name, shape in (names | {"guidance_in.x": [1]}).items()
            },
            file,
        )
        assert family_of(file) == "flux_dev"
        save_file(
            {
                name: torch.zeros(shape)
                for name, shape in (names | {"img_in.weight": [1, 384]}).items()
            },
            file,
        )
        assert family_of(file) is None, "FLUX.1 Fill takes a picture and a mask, too"

    def test_that_may_be_of_two_models_are_not_guessed(self, tmp_path: Path) -> None:
        names = {
            "cap_pad_token": [1, 3840],
            "cap_embedder.0.weight": [2560],
            "noise_refiner.0.x": [1],
        }
        names |= {f"layers.{number}.x": [1] for number in range(30)}
        file = tmp_path / "z.safetensors"
        save_file({name: torch.zeros(shape) for name, shape in names.items()}, file)
        with pytest.raises(
            UsageError, match="choose model=z_image or model=z_image_turbo beside"
        ):
            family_of(file)

    def test_without_a_base_ask_for_one(self, tmp_path: Path) -> None:
        file = save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")
        with pytest.raises(
            UsageError,
            match=r"holds FLUX\.1 without all of its encoders.*model\.base=FOLDER",
        ):
            require_model(Model("folder", "path", path=str(file)))

    def test_beside_the_name_of_another_family(self, tmp_path: Path) -> None:
        file = save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")
        with pytest.raises(UsageError, match=r"holds FLUX\.1, not Stable Diffusion 1"):
            require_model(Model("sd15", "path", path=str(file), hub_id="owner/name"))

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (
                lambda t: t.pop("single_blocks.3.linear2.bias"),
                "lacks single_transformer_blocks.3.proj_out.bias",
            ),
            (
                lambda t: t.update({"img_in.lokr": torch.ones(2, 2)}),
                "holds img_in.lokr, which FluxTransformer2DModel",
            ),
            (
                lambda t: t.update({"img_in.weight": torch.ones(64, 32)}),
                "x_embedder.weight of shape",
            ),
            (
                lambda t: t.update(
                    {"double_blocks.0.img_attn.qkv.weight": torch.ones(96, 64)}
                ),
                "img_attn.qkv.weight",
            ),
        ],
        ids=["missing", "unknown", "other shape", "other rows"],
    )
    def test_that_do_not_fit_are_refused(
        self,
        tiny_folder: Folder,
        tmp_path: Path,
        change: Callable[[Tensors], Any],
        reason: str,
    ) -> None:
        tensors = original(tiny("flux").transformer)
        change(tensors)
        file = save(tensors, tmp_path / "flux.safetensors")
        [problem] = problems_of(file, tiny_folder("flux"))
        assert reason in problem


def zeros(folder: Path) -> Tensors:
    """Returns weights that generate nothing, so that those of a file must have been read."""
    return {
        name: torch.zeros_like(tensor)
        for name, tensor in load_file(folder / "transformer" / WEIGHTS).items()
    }


class TestEightBits:
    @pytest.mark.parametrize(
        ("end", "rows"), [(".scale_weight", False), (".weight_scale", True)]
    )
    @pytest.mark.walk(1)
    @pytest.mark.numeric
    def test_are_multiplied_by_their_scales(
        self,
        variant_of: Tiny,
        tiny_folder: Folder,
        tmp_path: Path,
        end: str,
        rows: bool,
    ) -> None:
        written, _ = scaled(original(tiny("flux").transformer), end, rows)
        marks = (
            {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
            if not rows
            else {}
        )
        marks |= {f"img_in{end.replace('weight', 'input')}": torch.ones(())}
        file = save(written | marks, tmp_path / "scaled.safetensors")
        _, meant = scaled(original(tiny("flux").transformer), end, rows)
        by_hand, _ = renamed(meant, tiny("flux").transformer)
        folder = with_weights(tiny_folder("flux"), by_hand, tmp_path / "by_hand")
        assert problems_of(file, tiny_folder("flux")) == []
        images = images_of(variant_of(file, f"model.base={tiny_folder('flux')}"))
        assert are_same(images, images_of(variant_of(folder)))
        assert not are_same(images, images_of(variant_of("flux"))), (
            "8 bits are not the weights themselves"
        )

    def test_without_scales_are_the_weights(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        tensors = {
            name: tensor.to(torch.float8_e4m3fn)
            for name, tensor in original(tiny("flux").transformer).items()
        }
        file = save(tensors, tmp_path / "fp8.safetensors")
        model = Model("folder", "path", path=str(file), base=str(tiny_folder("flux")))
        network = load_part(model, "transformer", torch.float32)
        wanted = tensors["single_blocks.0.linear2.weight"].float()
        assert network.state_dict()[
            "single_transformer_blocks.0.proj_out.weight"
        ].equal(wanted)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda t: t.pop("img_in.scale_weight"), "none for img_in.weight"),
            (
                lambda t: t.pop("img_in.weight"),
                "holds img_in.scale_weight, and no img_in.weight",
            ),
            (
                lambda t: t.update({"img_in.scale_weight": torch.ones(64, 4)}),
                "scales of blocks",
            ),
            (
                lambda t: t.update({"img_in.scale_weight": torch.ones(1, 64)}),
                "scales of blocks or columns",
            ),
            (lambda t: t.update({"img_in.weight_scale_2": torch.ones(())}), "nvfp4"),
            (
                lambda t: t.update(
                    {"img_in.weight": torch.ones(64, 32, dtype=torch.uint8)}
                ),
                "in U8",
            ),
            (
                lambda t: t.update({"img_in.weight.absmax": torch.ones(8)}),
                "bitsandbytes",
            ),
        ],
        ids=[
            "no scale",
            "no weight",
            "blocks",
            "columns",
            "nvfp4",
            "packed",
            "bitsandbytes",
        ],
    )
    def test_that_are_not_read_are_refused(
        self,
        tiny_folder: Folder,
        tmp_path: Path,
        change: Callable[[Tensors], Any],
        reason: str,
    ) -> None:
        tensors, _ = scaled(original(tiny("flux").transformer))
        change(tensors)
        [problem] = problems_of(
            save(tensors, tmp_path / "a.safetensors"), tiny_folder("flux")
        )
        assert reason in problem


class TestBlocksOfFewBits:
    @pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
    def test_of_256_weights_are_those_that_the_format_defines(
        self, tiny_folder: Folder, tmp_path: Path, kind: str
    ) -> None:
        pytest.importorskip("gguf")
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        file, transformer = tmp_path / "flux.gguf", tiny("flux").transformer
        by_hand, _ = renamed(gguf_file(original(transformer), file, kind), transformer)
        model = Model("folder", "path", path=str(file), base=str(tiny_folder("flux")))
        network = load_part(model, "transformer", torch.float32)
        in_blocks = 0
        for name, weight in network.named_parameters():
            if weight.dtype != torch.uint8:
                continue
            in_blocks += 1
            assert weight.quant_type.name == kind
            wanted = by_hand[name]
            # diffusers multiplies scales in float16.
            assert (
                dequantize_gguf_tensor(weight).float() - wanted
            ).abs().max() < 5e-3 * wanted.abs().max(), name
            assert wanted.std() > 0.01
        assert in_blocks == 6, (
            "feed-forwards of both blocks, and what embeds timestep and guidance"
        )

    @pytest.mark.parametrize(
        "kind", ["Q8_0", "Q4_0", pytest.param("Q2_K", marks=pytest.mark.slow), "Q4_K"]
    )
    @pytest.mark.walk(1)
    def test_generate_what_their_weights_do(
        self, variant_of: Tiny, tiny_folder: Folder, tmp_path: Path, kind: str
    ) -> None:
        pytest.importorskip("gguf")
        file, transformer = tmp_path / "flux.gguf", tiny("flux").transformer
        meant = gguf_file(original(transformer), file, kind)
        by_hand, left = renamed(meant, transformer)
        assert not left
        folder = with_weights(tiny_folder("flux"), by_hand, tmp_path / "by_hand")
        assert problems_of(file, tiny_folder("flux")) == []
        images = images_of(variant_of(file, f"model.base={tiny_folder('flux')}"))
        assert np.abs(images - images_of(variant_of(folder))).max() < 1e-3
        assert np.abs(images - images_of(variant_of("flux"))).max() > 1e-3

    def test_of_a_download_that_was_not_complete_are_told(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        """Some programs make room for the whole file first: its blocks are zeros, which are weights of zero."""
        pytest.importorskip("gguf")
        file, transformer = tmp_path / "flux.gguf", tiny("flux").transformer
        gguf_file(original(transformer), file, "Q8_0")
        content = file.read_bytes()
        there = len(content) // 2
        file.write_bytes(content[:there] + bytes(len(content) - there))
        [problem] = problems_of(file, tiny_folder("flux"))
        assert "flux.gguf: holds nothing but zeros in" in problem

    def test_stay_in_memory_as_blocks(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        pytest.importorskip("gguf")
        file = tmp_path / "flux.gguf"
        gguf_file(original(tiny("flux").transformer), file, "Q8_0")
        model = Model("folder", "path", path=str(file), base=str(tiny_folder("flux")))
        network = load_part(model, "transformer", torch.bfloat16)
        assert network.single_transformer_blocks[0].proj_out.weight.dtype == torch.uint8
        plain = load_part(
            Model("folder", "path", path=str(tiny_folder("flux"))),
            "transformer",
            torch.bfloat16,
        )
        assert network.get_memory_footprint() < 0.7 * plain.get_memory_footprint()


class TestSeveralNetworks:
    @pytest.mark.slow
    def test_in_one_file_are_all_read(
        self, variant_of: Tiny, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        pipe = tiny("sd3")
        tensors: Tensors = {}
        networks = {
            PREFIX: original(pipe.transformer),
            "first_stage_model.": pipe.vae.state_dict(),
            "text_encoders.clip_l.transformer.": pipe.text_encoder.state_dict(),
            "text_encoders.clip_g.transformer.": pipe.text_encoder_2.state_dict(),
            "text_encoders.t5xxl.transformer.": pipe.text_encoder_3.state_dict(),
        }
        for prefix, own in networks.items():
            tensors |= {
                f"{prefix}{name}": tensor
                for name, tensor in own.items()
                if "embed_tokens" not in name
            }
        file = save(tensors, tmp_path / "sd3.safetensors")
        base = shutil.copytree(tiny_folder("sd3"), tmp_path / "base")
        for weights in base.glob("*/*.safetensors"):
            weights.unlink()
        assert problems_of(file, base) == []
        # A base without weights does not say that they are in float32.
        chosen = ("precision=fp32", f"model.base={base}")
        images = images_of(variant_of(file, *chosen))
        assert are_same(images, images_of(variant_of("sd3", "precision=fp32")))

    def test_beside_one_another(
        self, variant_of: Tiny, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        pipe = tiny("flux")
        files = {
            "transformer": save(
                original(pipe.transformer), tmp_path / "flux.safetensors"
            ),
            "text_encoder": save(
                clip_names(pipe.text_encoder), tmp_path / "clip_l.safetensors"
            ),
            "text_encoder_2": save(
                t5_names(pipe.text_encoder_2), tmp_path / "t5xxl.safetensors"
            ),
            "vae": save(vae_names(pipe.vae), tmp_path / "ae.safetensors"),
        }
        base = shutil.copytree(tiny_folder("flux"), tmp_path / "base")
        for weights in base.glob("*/*.safetensors"):
            weights.unlink()
        file = files.pop("transformer")
        parts = ",".join(f"{part}: {path}" for part, path in files.items())
        images = images_of(
            variant_of(
                file,
                "precision=fp32",
                f"model.base={base}",
                f"model.parts={{{parts}}}",
            )
        )
        assert are_same(images, images_of(variant_of("flux", "precision=fp32")))

    def test_a_text_encoder_for_another_part_is_refused(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        file = save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")
        clip = save(
            clip_names(tiny("flux").text_encoder), tmp_path / "clip_l.safetensors"
        )
        [problem] = problems_of(file, tiny_folder("flux"), text_encoder_2=str(clip))
        assert "clip_l.safetensors: lacks" in problem

    def test_a_text_encoder_of_other_shapes_is_refused(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        """As LongCLIP's, whose places for tokens transformers would fill with random numbers."""
        file = save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")
        tensors = clip_names(tiny("flux").text_encoder)
        [places] = [name for name in tensors if "position_embedding" in name]
        tensors[places] = torch.ones(248, 32)
        clip = save(tensors, tmp_path / "long_clip.safetensors")
        [problem] = problems_of(file, tiny_folder("flux"), text_encoder=str(clip))
        assert (
            "position_embedding.weight of shape [248, 32], and the text_encoder of the base has [77, 32]"
            in problem
        )

    @pytest.mark.parametrize(
        ("scale", "refused"), [(1.0, False), (0.3611 / 1.5305, True), (4.24, True)]
    )
    def test_a_vae_whose_latents_are_of_another_size_is_refused(
        self, tiny_folder: Folder, tmp_path: Path, scale: float, refused: bool
    ) -> None:
        """As FLUX.1's is for SD 3, and SD 3's for FLUX.1: of those, too, only a configuration says the scale."""
        base = shutil.copytree(tiny_folder("flux"), tmp_path / "base")
        own = PACKAGED / "emoji" / "vae"
        config = json.loads((own / "config.json").read_text())
        config["scaling_factor"] *= scale
        (base / "vae" / "config.json").write_text(json.dumps(config))
        file = save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")
        problems = problems_of(file, base, vae=str(own / WEIGHTS))
        assert len(problems) == refused
        assert all("the VAE of another family" in problem for problem in problems)

    @pytest.mark.parametrize("turned", [False, True])
    def test_a_vae_whose_latents_the_base_does_not_decode_is_refused(
        self, tiny_folder: Folder, tmp_path: Path, turned: bool
    ) -> None:
        """As that of Stable Diffusion 1.x for SDXL's latents: the tensors are the same, and the sizes nearly so."""
        base = shutil.copytree(tiny_folder("flux"), tmp_path / "base")
        own = PACKAGED / "emoji" / "vae"
        shutil.copytree(own, base / "vae", dirs_exist_ok=True)
        file = save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")
        tensors = load_file(own / WEIGHTS)
        if turned:
            tensors |= with_other_latents(tensors)
        vae = save(tensors, tmp_path / "vae.safetensors")
        problems = problems_of(file, base, vae=str(vae))
        assert len(problems) == turned
        assert all("the VAE of the base does not decode" in line for line in problems)

    def test_sd3_runs_without_t5(self, variant_of: Tiny, tmp_path: Path) -> None:
        whole, without = (
            saved("sd3", tmp_path / f"t5_{t5}", t5=t5) for t5 in (True, False)
        )
        shutil.copytree(
            whole / "transformer", without / "transformer", dirs_exist_ok=True
        )
        file = save(original(tiny("sd3").transformer), tmp_path / "sd3.safetensors")
        images = images_of(
            variant_of(
                file, f"model.base={whole}", "model.parts={text_encoder_3: null}"
            )
        )
        for part in ("vae", "text_encoder", "text_encoder_2"):
            shutil.copytree(whole / part, without / part, dirs_exist_ok=True)
        assert are_same(images, images_of(variant_of(without)))
        [problem] = problems_of(file, whole, text_encoder=None)
        assert "SD 3 does not run without it" in problem


def with_other_latents(vae: Tensors) -> Tensors:
    """Returns the last tensors of an encoder and the first ones of a decoder with the latents in another order."""
    changed = {}
    for name in vae:
        last = "quant_conv" if "quant_conv.weight" in vae else "encoder.conv_out"
        first = "post_quant_conv" if last == "quant_conv" else "decoder.conv_in"
        if name.startswith(f"{last}."):
            means, spreads = vae[name].chunk(2)
            changed[name] = torch.cat([means.roll(1, 0), spreads.roll(1, 0)])
        elif name == f"{first}.weight":
            changed[name] = vae[name].roll(1, 1)
    return changed


def clip_names(encoder: Any) -> Tensors:
    """Returns the tensors of a text encoder of CLIP's as its makers name them."""
    return {
        f"text_model.{name.removeprefix('text_model.')}": each
        for name, each in encoder.state_dict().items()
    }


def vae_names(vae: Any) -> Tensors:
    """Returns the tensors of a VAE as its makers name them, with attention as convolutions of one pixel."""
    found = {}
    for name, tensor in vae.state_dict().items():
        there = autoencoder_name(name, len(vae.config.block_out_channels))
        one_pixel = ".attn_1." in there and tensor.ndim == 2
        found[there] = tensor[:, :, None, None] if one_pixel else tensor
    return found


def t5_names(encoder: Any) -> Tensors:
    return {
        name: tensor
        for name, tensor in encoder.state_dict().items()
        if "embed_tokens" not in name
    }


def test_an_empty_network_has_the_names_of_a_whole_one(tiny_folder: Folder) -> None:
    """What is checked before a worker starts is what the worker fills."""
    folder = tiny_folder("flux")
    network = empty_network(
        folder / "transformer", "diffusers", "FluxTransformer2DModel"
    )
    assert (
        network.state_dict().keys()
        == load_file(folder / "transformer" / WEIGHTS).keys()
    )
