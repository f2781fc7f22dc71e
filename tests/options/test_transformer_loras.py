"""LoRAs for transformers in the names of each trainer: all of them arrive, and do what the same update by hand does."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounter

import sdopt
from sdopt.errors import UsageError
from sdopt.library.state import _defaults_of
from sdopt.options.lora import Distilled, Hotswap, Loaded
from sdopt.pipelines.lora_checks import misfits_in
from sdopt.pipelines.loras import reads_itself
from sdopt.pipelines.originals import renamed
from sdopt.pipelines.transformer_loras import Scales, converted, scales_beside
from sdopt.worker.host import PipelineHost
from tests.fixtures import CPU, Compose, Composers, Tiny
from tests.options.applied import Applied, far
from tests.options.hosts import proved
from tests.pipelines.tiny import tiny
from tests.pipelines.web_files import Tensors, original

RANK, ALPHA = 4, 2.0

LAYERS = {
    "flux": [
        *(
            "double_blocks.1.img_attn.qkv",
            "double_blocks.0.txt_mlp.2",
            "double_blocks.0.img_mod.lin",
        ),
        *(
            "single_blocks.3.linear1",
            "single_blocks.2.linear2",
            "final_layer.adaLN_modulation.1",
            "txt_in",
        ),
    ],
    "flux2": [
        "double_blocks.1.txt_attn.qkv",
        "single_blocks.3.linear1",
        "double_stream_modulation_img.lin",
    ],
    "chroma": [
        "double_blocks.1.txt_attn.qkv",
        "single_blocks.3.linear1",
        "distilled_guidance_layer.layers.0.in_layer",
    ],
    "sd3": [
        "joint_blocks.1.context_block.attn.qkv",
        "joint_blocks.2.context_block.adaLN_modulation.1",
    ],
    "z_image": [
        "layers.3.attention.qkv",
        "context_refiner.0.attention.out",
        "final_layer.linear",
    ],
    "lumina2": [
        "layers.2.attention.qkv",
        "context_refiner.0.feed_forward.w3",
        "noise_refiner.0.adaLN_modulation.1",
        "cap_embedder.1",
        "final_layer.linear",
    ],
    "qwen_image": [
        "transformer_blocks.1.attn.add_q_proj",
        "transformer_blocks.0.img_mod.1",
        "txt_in",
    ],
}
"""Layers that a LoRA updates, as the original program names them: joined ones, and those with exchanged halves."""

Names = Callable[[str, str], str]


def kohya(layer: str, which: str) -> str:
    return f"lora_unet_{layer.replace('.', '_')}.lora_{which}.weight"


def lycoris(layer: str, which: str) -> str:
    return f"lycoris_{layer.replace('.', '_')}.lora_{which}.weight"


def plain(layer: str, which: str) -> str:
    return f"{layer}.lora_{which}.weight"


def toolkit(layer: str, which: str) -> str:
    return f"diffusion_model.{layer}.lora_{'A' if which == 'down' else 'B'}.weight"


def peft(layer: str, which: str) -> str:
    return f"base_model.model.{layer}.lora_{'A' if which == 'down' else 'B'}.weight"


def peft_unsaved(layer: str, which: str) -> str:
    return f"base_model.model.{layer}.lora_{'A' if which == 'down' else 'B'}.default.weight"


def of_diffusers(layer: str, which: str) -> str:
    return f"transformer.{layer}.lora_{'A' if which == 'down' else 'B'}.weight"


TRAINERS: tuple[Names, ...] = (kohya, lycoris, plain, toolkit, peft, peft_unsaved)


def _drawn(pipe: Any) -> np.ndarray:
    noise = torch.Generator().manual_seed(0)
    call = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "np"}
    images: np.ndarray = pipe("a cat", generator=noise, **call).images
    return images


@cache
def transformer(name: str) -> Any:
    return tiny(name).transformer


def lora(
    name: str, written: Names, alpha: float | None, layers: list[str]
) -> tuple[Tensors, Tensors]:
    """Returns the tensors of a LoRA, and the updates that they mean, by the names of the original program."""
    weights = original(transformer(name))
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    updates: Tensors = {}
    for layer in layers:
        rows, columns = weights[f"{layer}.weight"].shape
        down = torch.randn(RANK, columns, generator=generator) / columns**0.5
        up = torch.randn(rows, RANK, generator=generator)
        tensors |= {written(layer, "down"): down, written(layer, "up"): up}
        scale = 1.0
        if alpha is not None:
            tensors[written(layer, "up").rpartition(".lora_")[0] + ".alpha"] = (
                torch.tensor(alpha)
            )
            scale = alpha / RANK
        updates[f"{layer}.weight"] = scale * up @ down
    return tensors, updates


def assert_means(found: Tensors, updates: Tensors, network: Any) -> None:
    """Checks a LoRA in diffusers' names against updates under the original names, which the table of files parts."""
    wanted, left = renamed(updates, network)
    assert not left
    modules = {
        name.removeprefix("transformer.").removesuffix(".lora_A.weight")
        for name in found
        if "lora_A" in name
    }
    assert {f"{module}.weight" for module in modules} == wanted.keys()
    for module in modules:
        down, up = (
            found[f"transformer.{module}.lora_{which}.weight"] for which in "AB"
        )
        assert torch.allclose(up @ down, wanted[f"{module}.weight"], atol=1e-5), module


class TestNames:
    @pytest.mark.parametrize("written", TRAINERS, ids=lambda each: each.__name__)
    @pytest.mark.parametrize("name", LAYERS)
    def test_of_every_trainer_arrive_at_the_same_layers(
        self, name: str, written: Names
    ) -> None:
        alpha = ALPHA if written in (kohya, plain) else None
        tensors, updates = lora(name, written, alpha, LAYERS[name])
        found = converted(tensors, {"transformer": transformer(name)})
        assert found.problems() == []
        assert_means(found.tensors, updates, transformer(name))

    @pytest.mark.parametrize(
        "written", [of_diffusers, peft, toolkit, kohya], ids=lambda each: each.__name__
    )
    @pytest.mark.parametrize("name", LAYERS)
    def test_of_diffusers_layers_arrive_at_them(
        self, name: str, written: Names
    ) -> None:
        layers = [
            key
            for key, each in transformer(name).named_modules()
            if isinstance(each, torch.nn.Linear)
        ]
        shapes = {
            key: transformer(name).get_submodule(key).weight.shape for key in layers
        }
        tensors: Tensors = {}
        wanted: Tensors = {}
        for key, (rows, columns) in shapes.items():
            pair = torch.randn(RANK, columns), torch.randn(rows, RANK)
            tensors |= dict(
                zip((written(key, "down"), written(key, "up")), pair, strict=True)
            )
            wanted |= dict(
                zip(
                    (of_diffusers(key, "down"), of_diffusers(key, "up")),
                    pair,
                    strict=True,
                )
            )
        found = converted(tensors, {"transformer": transformer(name)})
        assert found.problems() == []
        assert found.tensors.keys() == wanted.keys()
        assert all(found.tensors[key].equal(wanted[key]) for key in wanted)

    def test_of_xlabs_are_of_attention_processors(self) -> None:
        width = 64
        shapes = {
            "double_blocks.1.processor.qkv_lora1": (width, 3 * width),
            "double_blocks.1.processor.qkv_lora2": (width, 3 * width),
            "double_blocks.0.processor.proj_lora2": (width, width),
            "single_blocks.2.processor.qkv_lora": (width, 3 * width),
            "single_blocks.2.processor.proj_lora": (5 * width, width),
        }
        tensors: Tensors = {}
        for name, (columns, rows) in shapes.items():
            tensors |= {
                f"{name}.down.weight": torch.randn(RANK, columns),
                f"{name}.up.weight": torch.randn(rows, RANK),
            }
        found = converted(tensors, {"transformer": transformer("flux")})
        assert found.problems() == []
        by_diffusers = diffusers.loaders.lora_conversion_utils._convert_xlabs_flux_lora_to_diffusers(
            dict(tensors)
        )
        assert found.tensors.keys() == by_diffusers.keys()
        assert all(found.tensors[key].equal(by_diffusers[key]) for key in by_diffusers)

    def test_of_the_text_encoder_that_diffusers_updates(self) -> None:
        pipe = tiny("flux")
        networks = {"transformer": pipe.transformer, "text_encoder": pipe.text_encoder}
        name = "lora_te1_text_model_encoder_layers_1_self_attn_q_proj"
        pair = {
            "lora_down.weight": torch.randn(RANK, 32),
            "lora_up.weight": torch.randn(32, RANK),
        }
        found = converted(
            {f"{name}.{end}": tensor for end, tensor in pair.items()}, networks
        )
        assert found.problems() == []
        pipe.load_lora_weights(dict(found.tensors))
        assert [
            key
            for key, _ in pipe.text_encoder.named_modules()
            if key.endswith("layers.1.self_attn.q_proj.lora_A")
        ]
        t5 = converted(
            {
                f"{name.replace('te1', 'te2')}.{end}": tensor
                for end, tensor in pair.items()
            },
            networks,
        )
        assert "for which this model has no layer" in t5.problems()[0]

    def test_of_a_text_encoder_that_diffusers_cannot_load_are_told_in_its_words(
        self, tmp_path: Path
    ) -> None:
        """It tells a LoRA of CLIP by the attention that it updates."""
        name = "lora_te1_text_model_encoder_layers_1_mlp_fc1"
        pair = {"lora_down": torch.randn(RANK, 32), "lora_up": torch.randn(64, RANK)}
        file = tmp_path / "style.safetensors"
        save_file({f"{name}.{end}.weight": each for end, each in pair.items()}, file)
        [problem] = misfits_in(tiny("flux"), file)
        assert "cannot be loaded into this model (ValueError: " in problem

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (
                lambda t: t.update(
                    {kohya("double_blocks_9_img_attn_qkv", "up"): torch.ones(1, 1)}
                ),
                "double_blocks_9",
            ),
            (
                lambda t: t.update({"lora_unet_txt_in.oft_blocks": torch.ones(1, 1)}),
                "oft_blocks",
            ),
            (
                lambda t: t.pop(kohya("txt_in", "up")),
                "lora_unet_txt_in.lora_down.weight",
            ),
            (
                lambda t: t.update({kohya("txt_in", "up"): torch.ones(63, RANK)}),
                "from 64 to 63 channels",
            ),
            (
                lambda t: t.update({kohya("txt_in", "up"): torch.ones(64, 5)}),
                "lora_unet_txt_in are of ranks 4 and 5",
            ),
            (
                lambda t: t.update(
                    {kohya("txt_in", "down"): torch.ones(RANK, 64, 3, 3)}
                ),
                "lora_unet_txt_in has a kernel of [3, 3]",
            ),
            (
                lambda t: t.update({"lora_unet_nothing.alpha": torch.ones(())}),
                "lora_unet_nothing.alpha",
            ),
            (
                lambda t: t.update(
                    {
                        "txt_in.lora_A.one.weight": torch.ones(RANK, 64),
                        "txt_in.lora_B.one.weight": torch.ones(64, RANK),
                        "txt_in.lora_A.two.weight": torch.ones(RANK, 64),
                        "txt_in.lora_B.two.weight": torch.ones(64, RANK),
                    }
                ),
                "txt_in.lora_A.two.weight",
            ),
            (
                lambda t: t.update(
                    {name: t[name] * 0 for name in t if "lora_up" in name}
                ),
                "changes nothing",
            ),
            (
                lambda t: t.update(
                    {name: t[name] * 0 for name in t if "lora_down" in name}
                ),
                "changes nothing",
            ),
        ],
        ids=[
            "unknown layer",
            "unknown kind",
            "half",
            "other width",
            "other rank",
            "other kernel",
            "alpha alone",
            "two adapters",
            "zero",
            "zero before",
        ],
    )
    def test_that_would_be_left_out_are_named(
        self, change: Callable[[Tensors], Any], reason: str
    ) -> None:
        tensors, _ = lora("flux", kohya, ALPHA, LAYERS["flux"])
        change(tensors)
        [problem] = converted(tensors, {"transformer": transformer("flux")}).problems()
        assert reason in problem

    @pytest.mark.parametrize("name", LAYERS)
    def test_of_kohya_are_not_left_to_diffusers(
        self, tmp_path: Path, name: str
    ) -> None:
        """It knows those of a few widths, and a program that is handed out would not load them."""
        tensors, _ = lora(name, kohya, ALPHA, LAYERS[name])
        save_file(tensors, tmp_path / "style.safetensors")
        assert not reads_itself(tmp_path / "style.safetensors")

    def test_of_one_pixel_are_those_of_linear_layers(self) -> None:
        tensors, updates = lora("flux", kohya, ALPHA, LAYERS["flux"])
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = tensor[:, :, None, None]
        found = converted(tensors, {"transformer": transformer("flux")})
        assert found.problems() == []
        assert_means(found.tensors, updates, transformer("flux"))

    def test_of_a_convolution_have_its_kernel(self) -> None:
        layer = transformer("sd3").pos_embed.proj
        pair = {
            "lora_A": torch.randn(RANK, *layer.weight.shape[1:]),
            "lora_B": torch.randn(layer.weight.shape[0], RANK, 1, 1),
        }
        names = {f"transformer.pos_embed.proj.{end}.weight": end for end in pair}
        stored = {name: pair[end] for name, end in names.items()}
        found = converted(stored, {"transformer": transformer("sd3")})
        assert found.problems() == []
        assert all(found.tensors[name].equal(stored[name]) for name in stored)


class TestScales:
    def test_are_those_of_pefts_settings_beside_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "adapter_model.safetensors"
        tensors, updates = lora("flux", peft, None, LAYERS["flux"])
        said = {"lora_alpha": 8, "r": RANK, "alpha_pattern": {"txt_in": 2}}
        (tmp_path / "adapter_config.json").write_text(json.dumps(said))
        scales = scales_beside(file, {})
        found = converted(tensors, {"transformer": transformer("flux")}, scales)
        meant = {
            name: update * (0.5 if name == "txt_in.weight" else 2)
            for name, update in updates.items()
        }
        assert_means(found.tensors, meant, transformer("flux"))
        assert scales_beside(tmp_path / "other.safetensors", {}) == {}

    def test_of_layers_are_found_by_patterns_as_in_peft(self) -> None:
        scales = Scales(8, {r"transformer_blocks\.\d+\.attn\.to_q": 2, "proj_out": 1})
        assert scales.of("transformer_blocks.3.attn.to_q", RANK) == 0.5
        assert scales.of("single_transformer_blocks.3.proj_out", RANK) == 0.25
        assert scales.of("transformer_blocks.3.attn.to_k", RANK) == 2

    def test_of_a_text_encoder_are_its_own(self) -> None:
        said = {"transformer.lora_alpha": 8, "text_encoder.lora_alpha": 2}
        header = {"lora_adapter_metadata": json.dumps(said)}
        scales = scales_beside(Path("x.safetensors"), header)
        pipe = tiny("flux")
        networks = {"transformer": pipe.transformer, "text_encoder": pipe.text_encoder}
        ends = {"lora_A": torch.ones(RANK, 32), "lora_B": torch.ones(32, RANK)}
        layer = "text_encoder.text_model.encoder.layers.1.self_attn.q_proj"
        tensors = {f"{layer}.{end}.weight": each for end, each in ends.items()}
        tensors["transformer.x_embedder.lora_A.weight"] = torch.ones(RANK, 64)
        tensors["transformer.x_embedder.lora_B.weight"] = torch.ones(64, RANK)
        found = converted(tensors, networks, scales)
        assert found.problems() == []
        seen = {}
        for name, tensor in found.tensors.items():
            if "lora_B" in name:
                seen[name.partition(".")[0]] = float(tensor[0, 0])
        assert seen == {"text_encoder": 0.5, "transformer": 2.0}

    def test_are_those_in_the_header_as_diffusers_saves_them(self) -> None:
        said = {
            "transformer.lora_alpha": 8,
            "transformer.r": RANK,
            "transformer.use_rslora": True,
        }
        scales = scales_beside(
            Path("x.safetensors"), {"lora_adapter_metadata": json.dumps(said)}
        )
        assert scales["transformer"].of("x_embedder", RANK) == 4.0

    @pytest.mark.parametrize("text", ["{", "[1]", "version https://git-lfs"])
    def test_that_cannot_be_read_are_told(self, tmp_path: Path, text: str) -> None:
        """Without them, an update would be of another strength."""
        file = tmp_path / "adapter_model.safetensors"
        with pytest.raises(UsageError, match="in its header is no JSON object"):
            scales_beside(file, {"lora_adapter_metadata": text})
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(UsageError, match=r"adapter_config\.json is no JSON object"):
            scales_beside(file, {})


@pytest.fixture
def style(tmp_path: Path) -> tuple[Path, Tensors]:
    """A LoRA of kohya's for FLUX.1, and the updates that it means."""
    tensors, updates = lora("flux", kohya, ALPHA, LAYERS["flux"])
    save_file(tensors, tmp_path / "style.safetensors")
    return tmp_path / "style.safetensors", updates


def host_of(variant: Any) -> PipelineHost:
    assert variant.conflicts(CPU) == []
    host = PipelineHost(variant, CPU)
    host.prepare()
    return host


def images_of(host: PipelineHost) -> np.ndarray:
    return host._read_inputs(host._inputs[0], 64)[0]


class TestOptions:
    @pytest.mark.parametrize("option", ["loaded", "fused"])
    @pytest.mark.walk(1)
    def test_generate_what_the_update_by_hand_does(
        self, variant_of: Tiny, style: tuple[Path, Tensors], option: str
    ) -> None:
        file, updates = style
        host = host_of(variant_of("flux", f"lora={option}", f"lora.path={file}"))
        by_hand = host_of(variant_of("flux"))
        own = images_of(by_hand)
        wanted, _ = renamed(updates, by_hand._pipe.transformer)
        with torch.no_grad():
            for name, update in wanted.items():
                by_hand._pipe.transformer.get_parameter(name).add_(update)
        assert np.abs(images_of(host) - images_of(by_hand)).max() < 1e-4
        assert np.abs(images_of(host) - own).max() > 1e-2
        assert proved(host, "lora").engaged

    def test_one_in_the_weights_is_not_scaled_by_a_call(
        self, style: tuple[Path, Tensors]
    ) -> None:
        pipe = tiny("flux")
        sdopt.optimize(pipe, f"lora.path={style[0]}", lora="fused")
        with pytest.raises(UsageError, match="joint_attention_kwargs cannot scale it"):
            pipe("a cat", joint_attention_kwargs={"scale": 0.5})

    def test_one_that_is_taken_back_leaves_no_weight_frozen(
        self, style: tuple[Path, Tensors]
    ) -> None:
        """Peft freezes the weights beside a LoRA: a program could train none of them after `undo`."""
        pipe = tiny("flux")
        sdopt.optimize(pipe, f"lora.path={style[0]}", lora="loaded")
        sdopt.undo(pipe)
        assert all(weight.requires_grad for weight in pipe.transformer.parameters())

    @pytest.mark.slow
    def test_one_takes_the_place_of_another(
        self, variant_of: Tiny, tmp_path: Path
    ) -> None:
        for number, name in enumerate(("one", "two")):
            tensors, _ = lora("flux", toolkit, None, LAYERS["flux"])
            save_file(
                {key: each * (1 + number) for key, each in tensors.items()},
                tmp_path / f"{name}.safetensors",
            )
        chosen = (
            "lora=hotswap",
            f"lora.path={tmp_path}",
            "lora.weight_name=one.safetensors",
        )
        host = host_of(variant_of("flux", *chosen, "lora.other=two.safetensors"))
        finding = proved(host, "lora")
        assert finding.engaged
        assert finding.facts["other_images"]

    @pytest.mark.parametrize("name", ["flux", "z_image"])
    @pytest.mark.walk(1)
    @pytest.mark.slow
    def test_the_other_one_does_in_compiled_code_what_it_does_alone(
        self, tmp_path: Path, name: str
    ) -> None:
        """Of other ranks and another scale, and for fewer layers: those that it lacks are switched off."""
        whole = LAYERS[name]
        files = {
            "one": lora(name, toolkit, 2.0, whole)[0],
            "two": lora(name, toolkit, 6.0, whole[:2])[0],
        }
        of_first = [key for key in files["two"] if whole[0] in key]
        assert len(of_first) < len(files["two"])
        for key in of_first:
            tensor = files["two"][key]
            if "lora_A" in key:
                files["two"][key] = torch.cat([tensor, tensor.flip(1)])
            elif "lora_B" in key:
                files["two"][key] = torch.cat([tensor, tensor.flip(0)], 1)
        for stem, tensors in files.items():
            save_file(tensors, tmp_path / f"{stem}.safetensors")
        plain = {}
        for stem in files:
            path = str(tmp_path / f"{stem}.safetensors")
            plain[stem] = Applied(name, {"lora": Loaded(path=path)}).images()
        assert far(plain["one"], plain["two"]) > 1e-2
        names = {stem: f"{stem}.safetensors" for stem in files}
        option = Hotswap(str(tmp_path), names["one"], names["two"])
        swapping = Applied(name, {"lora": option})
        pipe, graphs = swapping.pipe, CompileCounter()
        pipe.transformer.forward = torch.compile(
            pipe.transformer.forward, backend=graphs
        )
        assert far(swapping.images(), plain["one"]) < 1e-4
        compiled = graphs.frame_count
        assert compiled
        for stem in ("two", "one"):
            option._load(pipe, names[stem], hotswap=True)
            assert far(swapping.images(), plain[stem]) < 1e-4
        assert graphs.frame_count == compiled, "nothing was compiled anew"

    def test_a_program_swaps_in_one_of_any_trainer(self, tmp_path: Path) -> None:
        """Diffusers knows none of the names, logs that, and would go on to draw with the first one."""
        for stem, alpha in (("one", 2.0), ("two", 6.0)):
            tensors, _ = lora("flux", toolkit, alpha, LAYERS["flux"])
            save_file(tensors, tmp_path / f"{stem}.safetensors")
        names = ("lora.weight_name=one.safetensors", "lora.other=two.safetensors")
        pipe = tiny("flux")
        sdopt.optimize(pipe, f"lora.path={tmp_path}", *names, lora="hotswap")
        swap: dict[str, Any] = {"adapter_name": "sdopt", "hotswap": True}
        pipe.load_lora_weights(tmp_path, weight_name="two.safetensors", **swap)
        by_hand = tiny("flux")
        path = f"lora.path={tmp_path / 'two.safetensors'}"
        sdopt.optimize(by_hand, path, lora="loaded")
        assert far(_drawn(pipe), _drawn(by_hand)) < 1e-4

        other, _ = lora("z_image", toolkit, None, LAYERS["z_image"])
        save_file(other, tmp_path / "other.safetensors")
        with pytest.raises(UsageError, match="for which this model has no layer"):
            pipe.load_lora_weights(tmp_path, weight_name="other.safetensors", **swap)
        sdopt.undo(pipe)
        assert "load_lora_weights" not in vars(type(pipe))

    def test_a_file_for_another_model_is_refused(
        self, variant_of: Tiny, style: tuple[Path, Tensors]
    ) -> None:
        [reason] = variant_of(
            "z_image", "lora=loaded", f"lora.path={style[0]}"
        ).conflicts(CPU)
        assert "for which this model has no layer" in reason

    @pytest.mark.parametrize(
        ("start", "refused"), [("pissa_niter_4", 1), ("loftq", 1), ("gaussian", 0)]
    )
    def test_one_beside_changed_weights_is_refused(
        self, variant_of: Tiny, tmp_path: Path, start: str, refused: int
    ) -> None:
        """What they lack is in the LoRA: added to the published weights, it would count twice."""
        said = {"transformer.init_lora_weights": start, "transformer.lora_alpha": RANK}
        tensors, _ = lora("flux", toolkit, None, LAYERS["flux"])
        file = tmp_path / "style.safetensors"
        save_file(tensors, file, {"lora_adapter_metadata": json.dumps(said)})
        reasons = variant_of("flux", "lora=loaded", f"lora.path={file}").conflicts(CPU)
        assert len(reasons) == refused
        assert all(f"init_lora_weights={start}" in reason for reason in reasons)

    def test_a_lora_for_few_steps_is_for_one_family(self, variant_of: Tiny) -> None:
        [reason] = variant_of(
            "flux", "lora=lcm_sdxl", "scheduler=flow_euler"
        ).conflicts(CPU)
        assert "FLUX.1" in reason

    def test_a_lora_for_few_steps_names_its_steps(self, variant: Compose) -> None:
        chosen = ("model=flux_dev", "model.weights=random", "lora=hyper_flux")
        assert variant(*chosen, "workload.steps=8").conflicts(CPU) == []
        assert any(
            "set workload.steps=8" in reason
            for reason in variant(*chosen).conflicts(CPU)
        )
        qwen = (
            "model=qwen_image",
            "model.weights=random",
            "lora=lightning_qwen",
            "workload.steps=8",
        )
        assert len(variant(*qwen).conflicts(CPU)) == 2, "another shift, and no guidance"
        fitting = ("scheduler=flow_lightning", "workload.guidance_scale=1")
        assert variant(*qwen, *fitting).conflicts(CPU) == []
        [reason] = variant(
            "model=sd35_large", "model.weights=random", *chosen[2:]
        ).conflicts(CPU)
        assert "it is for FLUX.1" in reason

    def test_loras_for_few_steps_are_one_choice_in_an_experiment(
        self, composer: Composers
    ) -> None:
        job = composer(["experiment=few_steps_qwen", "model.weights=random"])
        variants = job.current.study.plan(job).variants
        assert [each.workload.steps for each in variants] == [50, 8, 8, 4]
        assert all(each.conflicts(CPU) == [] for each in variants)

    @pytest.mark.parametrize(
        ("pipeline", "most", "fitting", "wrong"),
        [
            (
                "FluxPipeline",
                3.5,
                {"guidance_scale": 3.5, "true_cfg_scale": 1.0},
                {"guidance_scale": 7.0},
            ),
            (
                "QwenImagePipeline",
                1.0,
                {"true_cfg_scale": 4.0},
                {"true_cfg_scale": 4.0, "negative_prompt": " "},
            ),
            (
                "QwenImagePipeline",
                1.0,
                {"true_cfg_scale": 1.0, "negative_prompt": " "},
                {"guidance_scale": 2.0},
            ),
        ],
    )
    def test_a_lora_for_few_steps_is_told_the_guidance_of_a_call(
        self, pipeline: str, most: float, fitting: dict[str, Any], wrong: dict[str, Any]
    ) -> None:
        option = Distilled(pipeline=pipeline, steps=[8, 8], guidance_scale=most)
        steps = {"num_inference_steps": 8}
        assert option.refusals(steps | fitting) == []
        [reason] = option.refusals(steps | wrong)
        argument = next(name for name in wrong if name.endswith("scale"))
        assert f"set {argument}={most:g} or less" in reason

    def test_a_lora_for_few_steps_knows_what_a_call_is_by_default(self) -> None:
        defaults = _defaults_of(diffusers.FluxImg2ImgPipeline)
        assert defaults["guidance_scale"] == 7.0
        option = Distilled(pipeline="FluxPipeline", steps=[8, 8], guidance_scale=3.5)
        [reason] = option.refusals(defaults | {"num_inference_steps": 8})
        assert "set guidance_scale=3.5 or less" in reason
