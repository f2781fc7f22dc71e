"""What files of the web say of their weights beside the names: prefixes, marks of 8 bits, averages, tokenizers."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from safetensors.torch import save_file

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import ARCHITECTURES, class_name_of, parts_in
from sdopt.pipelines.checks import require_model
from sdopt.pipelines.families import family_of
from sdopt.pipelines.loading import load_part
from sdopt.pipelines.originals import pipeline_in, renamed
from sdopt.pipelines.random_weights import empty_network
from sdopt.pipelines.stored import header_of
from sdopt.pipelines.transformer_files import _placed
from sdopt.schema import Model
from tests.pipelines.test_web_files import (
    Folder,
    clip_names,
    problems_of,
    t5_names,
    vae_names,
)
from tests.pipelines.tiny import tiny
from tests.pipelines.web_files import PREFIX, Tensors, gguf_file, original, save, scaled


@pytest.fixture
def loaded(tiny_folder: Folder) -> Callable[..., Any]:
    """Loads a part of a file beside the pipeline in a folder, after all checks."""

    def load(name: str, file: Path, part: str = "transformer", **parts: str) -> Any:
        base = tiny_folder(name)
        assert problems_of(file, base, **parts) == []
        model = Model("folder", "path", path=str(file), base=str(base), parts={**parts})
        return load_part(model, part, torch.float32)

    return load


def assert_same(network: Any, weights: Tensors) -> None:
    found = network.state_dict()
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weights[name]) for name in weights)


@pytest.fixture
def flux_file(tmp_path: Path) -> Path:
    return save(original(tiny("flux").transformer), tmp_path / "flux.safetensors")


class TestPrefixes:
    @pytest.mark.parametrize("prefix", ["diffusion_model.", "transformer.", "model."])
    @pytest.mark.parametrize(
        "written", [original, lambda network: network.state_dict()]
    )
    @pytest.mark.walk(3)
    def test_of_other_programs_are_read(
        self,
        loaded: Callable[..., Any],
        tmp_path: Path,
        prefix: str,
        written: Callable[[Any], Tensors],
    ) -> None:
        transformer = tiny("flux").transformer
        file = save(written(transformer), tmp_path / "a.safetensors", prefix)
        assert_same(loaded("flux", file), transformer.state_dict())

    def test_of_averages_are_those_of_training_alone(
        self, loaded: Callable[..., Any], tmp_path: Path
    ) -> None:
        transformer = tiny("flux").transformer
        tensors = original(transformer)
        averages = {f"model_ema.{name}": 2 * each for name, each in tensors.items()}
        own = {f"{PREFIX}{name}": each for name, each in tensors.items()}
        file = save(own | averages, tmp_path / "a.safetensors")
        assert_same(loaded("flux", file), transformer.state_dict())


def layers_of(tensors: Tensors) -> list[str]:
    """Returns the names of the layers that have a scale."""
    end = ".weight_scale"
    return [name.removesuffix(end) for name in tensors if name.endswith(end)]


def described(tensors: Tensors, **says: Any) -> Tensors:
    """Returns tensors in 8 bits with what ComfyUI writes beside each of them."""
    text = json.dumps({"format": "float8_e4m3fn"} | says)
    mark = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return tensors | {f"{layer}.comfy_quant": mark for layer in layers_of(tensors)}


def with_header(tensors: Tensors, path: Path, **says: Any) -> Path:
    """Writes tensors in 8 bits with what makers of models write into the header."""
    entry = {"format": "float8_e4m3fn"} | says
    layers = dict.fromkeys(layers_of(tensors), entry)
    text = json.dumps({"format_version": "1.0", "layers": layers})
    save_file(tensors, path, {"_quantization_metadata": text})
    return path


class TestFormats:
    @pytest.mark.parametrize("rows", [False, True])
    @pytest.mark.parametrize("in_header", [False, True])
    def test_of_8_bits_are_multiplied(
        self, loaded: Callable[..., Any], tmp_path: Path, rows: bool, in_header: bool
    ) -> None:
        transformer = tiny("z_image").transformer
        written, meant = scaled(original(transformer), ".weight_scale", rows)
        file = tmp_path / "a.safetensors"
        if in_header:
            with_header(written, file)
        else:
            save(described(written, full_precision_matrix_mult=True), file)
        by_hand, left = renamed(meant, transformer)
        assert not left
        assert_same(loaded("z_image", file), by_hand)

    @pytest.mark.parametrize("in_header", [False, True])
    @pytest.mark.parametrize(
        ("says", "reason"),
        [
            ({"convrot": True}, "as float8_e4m3fn with convrot"),
            ({"format": "mxfp8"}, "as mxfp8"),
            ({"format": "int8_tensorwise"}, "as int8_tensorwise"),
        ],
    )
    def test_that_are_not_read_are_refused(
        self,
        tiny_folder: Folder,
        tmp_path: Path,
        says: dict[str, Any],
        reason: str,
        in_header: bool,
    ) -> None:
        """Turned weights have the shapes and the types of plain ones, and would draw noise."""
        written, _ = scaled(original(tiny("flux").transformer), ".weight_scale", True)
        file = tmp_path / "a.safetensors"
        if in_header:
            with_header(written, file, **says)
        else:
            save(described(written, **says), file)
        [problem] = problems_of(file, tiny_folder("flux"))
        assert reason in problem

    def test_that_are_not_read_are_refused_before_a_base_is_fetched(
        self, tmp_path: Path
    ) -> None:
        """Its text encoders are gigabytes."""
        written, _ = scaled(original(tiny("flux").transformer), ".weight_scale", True)
        file = save(described(written, convrot=True), tmp_path / "a.safetensors")
        model = Model("flux_dev", "path", path=str(file), hub_id="owner/name")
        with pytest.raises(UsageError, match="as float8_e4m3fn with convrot"):
            require_model(model)

    @pytest.mark.parametrize("in_header", [False, True])
    def test_whose_scales_are_lost_are_refused(
        self, tiny_folder: Folder, tmp_path: Path, in_header: bool
    ) -> None:
        written, _ = scaled(original(tiny("flux").transformer), ".weight_scale")
        file = tmp_path / "a.safetensors"
        marked = described(written)
        lost = {n: each for n, each in marked.items() if not n.endswith("weight_scale")}
        if in_header:
            entry = {"format": "float8_e4m3fn"}
            layers = dict.fromkeys(layers_of(written), entry)
            text = json.dumps({"layers": layers})
            bare = {n: each for n, each in lost.items() if not n.endswith("quant")}
            save_file(bare, file, {"_quantization_metadata": text})
        else:
            save(lost, file)
        [problem] = problems_of(file, tiny_folder("flux"))
        assert "speaks of scales, but holds none for" in problem

    def test_whose_scales_are_lost_beside_a_mark_of_the_whole_file_are_refused(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        """The mark has no prefix where the file holds several networks, or that of an encoder."""
        pipe, mark = tiny("flux"), torch.zeros(2).to(torch.float8_e4m3fn)
        tensors = {PREFIX + n: each for n, each in original(pipe.transformer).items()}
        start = "text_encoders.t5xxl"
        for name, each in t5_names(pipe.text_encoder_2).items():
            tensors[f"{start}.transformer.{name}"] = each
        lost = {
            "scaled_fp8": f"{PREFIX}txt_in.weight",
            f"{start}.scaled_fp8": f"{start}.transformer.shared.weight",
        }
        for number, (marked, weight) in enumerate(lost.items()):
            bits = {marked: mark, weight: tensors[weight].to(torch.float8_e4m3fn)}
            file = save(tensors | bits, tmp_path / f"{number}.safetensors")
            [problem] = problems_of(file, tiny_folder("flux"))
            assert "speaks of scales, but holds none for" in problem

    @pytest.mark.parametrize("mark", ["[1, 2]", "{", '"float8_e4m3fn"'])
    def test_that_cannot_be_read_are_refused(
        self, tiny_folder: Folder, tmp_path: Path, mark: str
    ) -> None:
        written, _ = scaled(original(tiny("flux").transformer), ".weight_scale")
        text = torch.tensor(list(mark.encode()), dtype=torch.uint8)
        file = save(written | {"img_in.comfy_quant": text}, tmp_path / "a.safetensors")
        [problem] = problems_of(file, tiny_folder("flux"))
        assert "img_in is stored as unreadable" in problem

    @pytest.mark.parametrize("said", ["[]", "{}", '{"layers": ["img_in"]}', "{"])
    def test_of_a_header_that_cannot_be_read_are_refused(
        self, tiny_folder: Folder, tmp_path: Path, said: str
    ) -> None:
        written, _ = scaled(original(tiny("flux").transformer), ".weight_scale")
        save_file(written, tmp_path / "a.safetensors", {"_quantization_metadata": said})
        [problem] = problems_of(tmp_path / "a.safetensors", tiny_folder("flux"))
        assert "is stored as unreadable" in problem

    @pytest.mark.parametrize(("of_header", "of_file"), [("", PREFIX), (PREFIX, "")])
    def test_may_be_named_with_another_prefix_than_that_of_the_file(
        self, tiny_folder: Folder, tmp_path: Path, of_header: str, of_file: str
    ) -> None:
        written, _ = scaled(original(tiny("flux").transformer), ".weight_scale")
        layers = {f"{of_header}img_in": {"format": "float8_e4m3fn", "convrot": True}}
        text = json.dumps({"layers": layers})
        prefixed = {f"{of_file}{name}": tensor for name, tensor in written.items()}
        file = tmp_path / "a.safetensors"
        save_file(prefixed, file, {"_quantization_metadata": text})
        [problem] = problems_of(file, tiny_folder("flux"))
        assert "img_in is stored as float8_e4m3fn with convrot" in problem

    def test_of_blocks_as_many_as_rows_are_refused(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        written, _ = scaled(original(tiny("flux").transformer), ".weight_scale")
        written["img_in.weight_scale"] = torch.ones(4, 16)
        file = save(written, tmp_path / "a.safetensors")
        [problem] = problems_of(file, tiny_folder("flux"))
        assert "img_in.weight_scale of shape [4, 16]" in problem

    def test_of_two_scales_of_one_weight_are_refused(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        """By the names of two programs; the one that came last in the file was taken."""
        written, _ = scaled(original(tiny("flux").transformer), ".scale_weight")
        written["img_in.weight_scale"] = 2 * written["img_in.scale_weight"]
        file = save(written, tmp_path / "a.safetensors")
        [problem] = problems_of(file, tiny_folder("flux"))
        assert "holds two scales of img_in.weight" in problem


def test_weights_of_another_program_are_named(tmp_path: Path) -> None:
    """No family is known by nunchaku's names of FLUX.1."""
    names = {"qweight": torch.ones(2, 2).char(), "wscales": torch.ones(2, 2)}
    block = "transformer_blocks.0.qkv_proj"
    tensors = {f"{block}.{name}": each for name, each in names.items()}
    file = save(tensors, tmp_path / "svdq-int4_r32-flux.1-dev.safetensors")
    with pytest.raises(UsageError, match="by SVDQuant"):
        family_of(file)


class TestNames:
    def test_say_which_of_two_models_with_the_same_tensors(
        self, tmp_path: Path
    ) -> None:
        """FLUX.2 [klein] is published with guidance, and distilled to 4 steps without."""
        shapes = {
            "double_stream_modulation_img.lin.weight": [1, 1],
            "img_in.weight": [1, 128],
            "txt_in.weight": [1, 7680],
            "double_blocks.4.x": [1],
            "double_blocks.0.x": [1],
            "single_blocks.19.x": [1],
        }
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        distilled = save(tensors, tmp_path / "flux-2-klein-4b.safetensors")
        assert family_of(distilled) == "flux2_klein_4b"
        base = save(tensors, tmp_path / "flux-2-klein-base-4b.safetensors")
        with pytest.raises(UsageError, match="its name says base"):
            family_of(base)

    @pytest.mark.slow
    def test_of_each_published_size_are_told_apart(self, tmp_path: Path) -> None:
        """By files of the published shapes, which take no room: they are holes behind a header."""
        file, found = tmp_path / "model.safetensors", {}
        for name in PUBLISHED:
            folder = ARCHITECTURES / name / "transformer"
            kind = class_name_of(ARCHITECTURES / name)
            network = empty_network(folder, *parts_in(folder.parent)["transformer"])
            hollow(original(network), file)
            assert pipeline_in(header_of(file).shapes) == kind
            found[name] = family_of(file)
        assert found == {name: name for name in PUBLISHED}

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("model", "name", "said"),
        [
            ("flux_dev", "flux1-dev-kontext_fp8_scaled", "kontext"),
            ("qwen_image", "qwen_image_edit_2509_fp8_e4m3fn", "edit"),
        ],
    )
    def test_of_a_relative_that_does_other_work_are_refused(
        self, tmp_path: Path, model: str, name: str, said: str
    ) -> None:
        folder = ARCHITECTURES / model
        parts = parts_in(folder)["transformer"]
        file = tmp_path / f"{name}.safetensors"
        hollow(original(empty_network(folder / "transformer", *parts)), file)
        with pytest.raises(UsageError, match=f"its name says {said}"):
            family_of(file)


PUBLISHED = (
    *("flux_dev", "flux_schnell", "flux2_klein_4b", "flux2_klein_9b", "flux2_dev"),
    *("sd3_medium", "sd35_medium", "sd35_large", "qwen_image", "chroma", "lumina2"),
)
"""Those of published models with transformers whose tensors are of no other model's shapes."""


def hollow(tensors: Tensors, file: Path) -> None:
    """Writes a file of these shapes in bfloat16, without any number in it."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        shape = list(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as written:
        written.write(struct.pack("<Q", len(text)) + text)
        written.truncate(8 + len(text) + end)


class TestTextEncoders:
    def test_have_tokenizers_and_counts_beside_them(
        self, loaded: Callable[..., Any], flux_file: Path, tmp_path: Path
    ) -> None:
        pipe = tiny("flux")
        words = {"spiece_model": torch.zeros(9000, dtype=torch.uint8)}
        t5 = save(t5_names(pipe.text_encoder_2) | words, tmp_path / "t5.safetensors")
        counts = {
            "text_model.embeddings.position_ids": torch.arange(77)[None],
            "logit_scale": torch.ones(()),
        }
        names = clip_names(pipe.text_encoder)
        clip = save(names | counts, tmp_path / "clip_l.safetensors")
        parts = {"text_encoder": str(clip), "text_encoder_2": str(t5)}
        for part in parts:
            network = loaded("flux", flux_file, part, **parts)
            assert_same(network, getattr(pipe, part).state_dict())

    @pytest.mark.parametrize("name", ["flux2", "qwen_image"])
    def test_draw_the_same_without_a_head(
        self, loaded: Callable[..., Any], tmp_path: Path, name: str
    ) -> None:
        """What predicts words is not read: ComfyUI saves language models without it."""
        pipe = tiny(name)
        file = save(original(pipe.transformer), tmp_path / "a.safetensors")
        own = dict(pipe.text_encoder.state_dict())
        own.pop("lm_head.weight")
        without = save(own, tmp_path / "encoder.safetensors")
        encoder = loaded(name, file, "text_encoder", text_encoder=str(without))
        tokens = torch.arange(1, 9)[None]
        mask = torch.ones_like(tokens)
        states = []
        for network in (encoder, pipe.text_encoder):
            with torch.no_grad():
                given = {"input_ids": tokens, "attention_mask": mask}
                states.append(network(**given, output_hidden_states=True).hidden_states)
        assert all(map(torch.equal, *states))

    def test_may_have_a_head_that_is_not_run(
        self, loaded: Callable[..., Any], tmp_path: Path
    ) -> None:
        pipe = tiny("z_image")
        file = save(original(pipe.transformer), tmp_path / "a.safetensors")
        own = pipe.text_encoder.state_dict()
        named = {f"model.{key}": each for key, each in own.items()}
        whole = named | {"lm_head.weight": own["embed_tokens.weight"]}
        encoder = save(whole, tmp_path / "encoder.safetensors")
        network = loaded("z_image", file, "text_encoder", text_encoder=str(encoder))
        assert_same(network, own)


class TestAutoencoders:
    def test_of_flux2_are_read_by_the_names_of_its_makers(
        self, loaded: Callable[..., Any], tmp_path: Path
    ) -> None:
        """They write `encoder.quant_conv`; how many batches its statistics are of is read in training alone."""
        pipe = tiny("flux2")
        tensors = vae_names(pipe.vae)
        for end, name in (("encoder", "quant_conv"), ("decoder", "post_quant_conv")):
            for leaf in ("weight", "bias"):
                tensors[f"{end}.{name}.{leaf}"] = tensors.pop(f"{name}.{leaf}")
        tensors.pop("bn.num_batches_tracked")
        vae = save(tensors, tmp_path / "flux2-vae.safetensors")
        file = save(original(pipe.transformer), tmp_path / "flux2.safetensors")
        network = loaded("flux2", file, "vae", vae=str(vae))
        assert_same(network, pipe.vae.state_dict())

    def test_of_qwen_image_are_read_by_the_names_of_its_makers(self) -> None:
        layout = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "z_dim": 4}
        vae = AutoencoderKLQwenImage(base_dim=8, **layout)
        tensors = wan_names(vae)
        placed, left = _placed(tensors, "vae", vae)
        assert not left
        own = vae.state_dict()
        assert placed.keys() == own.keys()
        assert all(placed[name].equal(own[name]) for name in own)
        further = {"loss.logvar": torch.zeros(2)}
        assert _placed(tensors | further, "vae", vae)[1] == ["loss.logvar"]


def wan_names(vae: Any) -> Tensors:
    """Returns the tensors of Qwen-Image's VAE as those of Wan are named: blocks are counted through all levels."""
    found = {}
    for name, tensor in vae.state_dict().items():
        there = re.sub(
            r"up_blocks\.(\d)\.(resnets\.(\d)|upsamplers\.0)",
            lambda at: f"upsamples.{4 * int(at[1]) + int(at[3] or 3)}",
            name,
        )
        for pattern, other in _OF_WAN.items():
            there = re.sub(pattern, other, there)
        found[there] = tensor
    return found


_OF_WAN = {
    r"^quant_conv": "conv1",
    r"^post_quant_conv": "conv2",
    r"down_blocks": "downsamples",
    r"mid_block\.attentions\.0": "middle.1",
    r"mid_block\.resnets\.0": "middle.0",
    r"mid_block\.resnets\.1": "middle.2",
    r"\.norm1\.": ".residual.0.",
    r"\.conv1\.(?=weight|bias)": ".residual.2.",
    r"\.norm2\.": ".residual.3.",
    r"\.conv2\.": ".residual.6.",
    r"conv_shortcut": "shortcut",
    r"norm_out": "head.0",
    r"conv_out": "head.2",
    r"conv_in": "conv1",
}


class TestBlocks:
    def test_that_diffusers_does_not_read_are_refused_before_loading(
        self, tiny_folder: Folder, tmp_path: Path
    ) -> None:
        pytest.importorskip("gguf")
        file = tmp_path / "flux.gguf"
        gguf_file(original(tiny("flux").transformer), file, "MXFP4")
        [problem] = problems_of(file, tiny_folder("flux"))
        assert "in MXFP4, which diffusers does not read" in problem

    @pytest.mark.parametrize(
        ("name", "flat"), [("z_image", "pad_token"), ("sd3", "pos_embed")]
    )
    def test_may_leave_out_dimensions_of_one(
        self, loaded: Callable[..., Any], tmp_path: Path, name: str, flat: str
    ) -> None:
        """As programs beside llama.cpp write them."""
        pytest.importorskip("gguf")
        transformer = tiny(name).transformer
        tensors = original(transformer)
        names = [each for each in tensors if each.endswith(flat)]
        for each in names:
            tensors[each] = tensors[each].squeeze(0)
        file = tmp_path / f"{name}.gguf"
        meant = gguf_file(tensors, file, "Q8_0")
        whole = {each: meant[each].unsqueeze(0) for each in names}
        expected, _ = renamed(whole, transformer)
        found = loaded(name, file).state_dict()
        assert len(expected) == len(names) > 0
        assert all(
            torch.allclose(found[each], expected[each], rtol=1e-3, atol=1e-4)
            for each in expected
        )

    def test_of_a_text_encoder_are_read_as_numbers(
        self, loaded: Callable[..., Any], tmp_path: Path
    ) -> None:
        pytest.importorskip("gguf")
        pipe = tiny("z_image")
        own = pipe.text_encoder.state_dict()
        start = "text_encoders.qwen3_4b.transformer.model."
        tensors = {f"{start}{name}": each for name, each in own.items()}
        for name, each in original(pipe.transformer).items():
            tensors[PREFIX + name] = each
        file = tmp_path / "all.gguf"
        meant = gguf_file(tensors, file, "Q8_0")
        found = loaded("z_image", file, "text_encoder").state_dict()
        for name in own:
            assert torch.allclose(found[name], meant[start + name], atol=1e-3), name

    @pytest.mark.parametrize(
        ("name", "part", "architecture"),
        [
            ("flux", "text_encoder_2", "t5encoder"),
            ("z_image", "text_encoder", "qwen3"),
        ],
    )
    def test_of_a_text_encoder_apart_as_llama_cpp_writes_it(
        self,
        loaded: Callable[..., Any],
        tmp_path: Path,
        name: str,
        part: str,
        architecture: str,
    ) -> None:
        gguf = pytest.importorskip("gguf")
        pipe = tiny(name)
        own = getattr(pipe, part).state_dict()
        kinds = {said: kind for kind, said in gguf.MODEL_ARCH_NAMES.items()}
        known = gguf.get_tensor_name_map(kinds[architecture], 8)
        there, named = {}, {}
        for key, tensor in own.items():
            for wanted in (key, f"model.{key}"):
                stored = known.get_name(wanted, try_suffixes=(".weight", ".bias"))
                if stored:
                    named[key], there[stored] = stored, tensor
        file = tmp_path / "encoder.gguf"
        meant = gguf_file(there, file, "Q8_0", architecture=architecture)
        whole = save(original(pipe.transformer), tmp_path / "whole.safetensors")
        found = loaded(name, whole, part, **{part: str(file)}).state_dict()
        assert len(named) > len(own) / 2
        for key, stored in named.items():
            assert torch.allclose(found[key], meant[stored], rtol=1e-3, atol=1e-4), key

    def test_of_a_text_encoder_that_is_stored_otherwise_is_refused(
        self, tiny_folder: Folder, flux_file: Path, tmp_path: Path
    ) -> None:
        pytest.importorskip("gguf")
        own = tiny("flux").text_encoder_2.state_dict()
        file = tmp_path / "encoder.gguf"
        gguf_file(own, file, "Q8_0", architecture="llama")
        [problem] = problems_of(
            flux_file, tiny_folder("flux"), text_encoder_2=str(file)
        )
        assert "of the architecture llama" in problem
