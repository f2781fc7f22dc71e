"""LoRAs: which files are taken, what shows that they changed the images, and that one replaces another."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

from sdopt.config.composer import HydraComposer
from sdopt.measure.compilation import compilation
from sdopt.measure.trace import trace_call
from sdopt.options.compiler import TorchScript
from sdopt.options.lora import Distilled, Hotswap, Loaded
from sdopt.pipelines.lora_files import lora_file, rank_of
from sdopt.reference import LORAS, MODEL
from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import evidence, image, proved
from tests.pipelines.test_hub import MINE, in_cache, offline

OPTIONS = ("loaded", "fused", "hotswap")
STEPS = "workload.steps=2"

FEW_STEPS = [
    "lcm_sd15",
    "tcd_sdxl",
    "hyper_sd15",
    "lcm_emoji",
    "lightning_sdxl",
    "dmd2_sdxl",
]


class TestFiles:
    def test_of_a_repository_are_those_of_the_commit_that_was_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its main branch may move: a program that is handed out would draw other images."""
        folder = in_cache(tmp_path, LORAS, "somebody/styles")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        lora = Loaded(path="somebody/styles", weight_name="fxemoji.safetensors")
        first, _ = lora.diffusers_lines
        assert f"weight_name='fxemoji.safetensors', revision='{folder.name}'" in first

    @pytest.mark.parametrize("option", OPTIONS)
    def test_the_packaged_ones_fit_the_packaged_model(
        self, variant: Compose, option: str
    ) -> None:
        assert variant(f"lora={option}").conflicts(CPU) == []
        [found] = variant(
            f"lora={option}", "model=sd15", "model.weights=random"
        ).conflicts(CPU)
        assert (
            found
            == f"lora={option}: the LoRAs that come with sdopt are for model=emoji: set lora.path"
        )

    @pytest.mark.slow
    def test_of_another_model(self, variant: Compose, tmp_path: Path) -> None:
        chosen = (
            "lora=loaded",
            f"lora.path={LORAS / 'fxemoji.safetensors'}",
            "model=sdxl",
        )
        assert (
            variant(*chosen).conflicts(CPU) == []
        )  # nothing is known of a model that is not fetched yet
        [found] = variant(*chosen, "model.weights=random").conflicts(CPU)
        assert (
            "fxemoji.safetensors cannot be loaded into this model: its update of unet.down_blocks"
            in found
        )
        assert (
            "from 160 to 160 channels, and this model's layer from 640 to 640" in found
        )
        # A layer of the name is in both text encoders, and the original program's names are SDXL's too.
        part = {
            n: t
            for n, t in text_lora("lora_te1_text_model_encoder", 768).items()
            if "q_proj" in n
        }
        matrices = {"down": torch.ones(4, 1280), "up": torch.ones(1280, 4)}
        part |= {
            f"lora_unet_middle_block_1_proj_in.lora_{name}.weight": each
            for name, each in matrices.items()
        }
        save_file(part, tmp_path / "part.safetensors")
        [found] = variant(
            *chosen[::2],
            "model.weights=random",
            f"lora.path={tmp_path}/part.safetensors",
        ).conflicts(CPU)
        assert found.endswith(
            "this model: (ValueError: Could not automatically infer state dict type)"
        )

    @pytest.mark.parametrize(
        ("overrides", "reason"),
        [
            (["lora.weight_name=no.safetensors"], "no such file"),
            (["lora.path=/nowhere/at/all.safetensors"], "no such file"),
            ([f"lora.path={LORAS}"], "lora.weight_name: name a file of"),
            (["lora.path=STYLE.SAFETENSORS"], "from .safetensors files only"),
            (["lora.path=loras/style.pt"], "from .safetensors files only"),
            (
                [f"lora.path={LORAS}", "lora.weight_name=README.md"],
                "from .safetensors files only",
            ),
            (
                [
                    f"lora.path={LORAS / 'fxemoji.safetensors'}",
                    "lora.weight_name=a.safetensors",
                ],
                "lora.weight_name=a.safetensors: only applies",
            ),
        ],
    )
    def test_that_cannot_be_read(
        self, variant: Compose, overrides: list[str], reason: str
    ) -> None:
        [found] = variant("lora=loaded", *overrides).conflicts(CPU)
        assert reason in found

    def test_that_is_broken(self, variant: Compose, tmp_path: Path) -> None:
        (tmp_path / "broken.safetensors").write_bytes(b"nothing")
        chosen = variant("lora=loaded", f"lora.path={tmp_path / 'broken.safetensors'}")
        [found] = chosen.conflicts(CPU)
        assert "broken.safetensors cannot be read" in found
        assert chosen.optimizations["lora"].diffusers_lines == (), (
            "a study of other variants asks for them too"
        )

    @pytest.mark.parametrize("name", ["it.safetensors", None])
    def test_on_the_hub_are_fetched_before_they_are_looked_at(
        self,
        variant: Compose,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        name: str | None,
    ) -> None:
        asked = []

        def download(repository: str, name: str, local_files_only: bool) -> str:
            asked.append((repository, name, local_files_only))
            return str(tmp_path / name)

        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        options = (
            "lora=loaded",
            "lora.path=some/style",
            *([f"lora.weight_name={name}"] if name else []),
        )
        file = tmp_path / (name or "pytorch_lora_weights.safetensors")
        chosen = variant(*options)
        assert chosen.conflicts(CPU) == []
        for fetch in (True, False):
            assert chosen.optimizations["lora"].files(chosen.model, fetch) == [file]
        assert asked == [
            ("some/style", file.name, local) for local in (True, False, True)
        ]
        save_file(load_file(LORAS / "fxemoji.safetensors"), file)
        [found] = variant(*options, "model=sd15", "model.weights=random").conflicts(CPU)
        assert f"{file.name} cannot be loaded into this model" in found
        assert lora_file(str(tmp_path), name) == file

    def test_is_looked_at_again_when_its_model_is_there(
        self, variant: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        offline(monkeypatch, tmp_path)
        tensors = load_file(LORAS / "fxemoji.safetensors")
        for which, shape in (("A", (4, 8)), ("B", (8, 4))):
            tensors[f"unet.down_blocks.9.lora_{which}.weight"] = torch.ones(shape)
        file = tmp_path / "more.safetensors"
        save_file(tensors, file)
        words = ("model.weights=hub", MINE, "model.name=small", "workload.size=32")
        chosen = variant(*words, "lora=loaded", f"lora.path={file}")
        assert chosen.conflicts(CPU) == []
        in_cache(tmp_path, MODEL, MINE.partition("=")[2])
        [found] = chosen.conflicts(CPU)
        assert "the update of unet.down_blocks.9, which diffusers would leave" in found

    def test_of_the_time_when_loras_were_attention_processors(
        self, variant: Compose, session: Load, tmp_path: Path
    ) -> None:
        def older(name: str) -> str:
            name = re.sub(r"\.(to_\w+)(\.0)?\.lora_", r".processor.\1_lora.", name)
            return name.replace("_lora.A.", "_lora.down.").replace(
                "_lora.B.", "_lora.up."
            )

        file = tmp_path / "older.safetensors"
        attention = {
            name: each
            for name, each in load_file(LORAS / "fxemoji.safetensors").items()
            if ".to_" in name
        }
        save_file({older(name): each for name, each in attention.items()}, file)
        assert rank_of(file) == 4
        chosen = (
            "lora=hotswap",
            f"lora.path={tmp_path}",
            f"lora.weight_name={file.name}",
            f"lora.other={file.name}",
        )
        assert variant(*chosen).conflicts(CPU) == []
        [found] = variant(*chosen, "lora.target_rank=2").conflicts(CPU)
        assert found.endswith(": lora.target_rank=2: the files have ranks up to 4")
        [found] = variant(*chosen, "model=sd15", "model.weights=random").conflicts(CPU)
        assert "older.safetensors cannot be loaded into this model" in found
        assert evidence(
            session("lora=loaded", f"lora.path={file}", STEPS), "lora"
        ).engaged

    @pytest.mark.parametrize(
        "overrides",
        [
            [f"lora.path={LORAS / 'fxemoji.safetensors'}"],
            [f"lora.path={LORAS}", "lora.weight_name=fxemoji.safetensors"],
            [f"lora.path={LORAS}", "lora.other=fxemoji.safetensors"],
            ["lora.path=some/repository"],
        ],
    )
    def test_a_swap_needs_two(self, variant: Compose, overrides: list[str]) -> None:
        [found] = variant("lora=hotswap", *overrides).conflicts(CPU)
        keys = "and lora.weight_name and lora.other to the two files"
        assert found.endswith(
            f": needs two LoRAs: set lora.path to their folder or repository, {keys}"
        )

    def test_a_swap_for_one_of_more_layers(
        self, variant: Compose, tmp_path: Path
    ) -> None:
        save_file(packaged(), tmp_path / "whole.safetensors")
        save_file(
            {n: t for n, t in packaged().items() if "attn" in n},
            tmp_path / "part.safetensors",
        )
        save_file(kohya(alpha=None), tmp_path / "kohya.safetensors")

        def found(first: str, other: str) -> list[str]:
            names = (
                f"lora.weight_name={first}.safetensors",
                f"lora.other={other}.safetensors",
            )
            return variant("lora=hotswap", f"lora.path={tmp_path}", *names).conflicts(
                CPU
            )

        assert found("whole", "part") == found("whole", "kohya") == []
        [reason] = found("part", "whole")
        assert (
            "whole.safetensors cannot take the place of part.safetensors, which lacks some of its layers"
            in reason
        )

    def test_of_a_text_encoder_cannot_be_exchanged(
        self, variant: Compose, tmp_path: Path
    ) -> None:
        tensors = load_file(LORAS / "fxemoji.safetensors")
        for name in ("a", "b"):
            save_file(
                tensors | text_lora("text_encoder.text_model.encoder"),
                tmp_path / f"{name}.safetensors",
            )
        found = variant(
            "lora=hotswap",
            f"lora.path={tmp_path}",
            "lora.weight_name=a.safetensors",
            "lora.other=b.safetensors",
        ).conflicts(CPU)
        for name, reason in zip("ab", found, strict=True):
            assert reason.endswith(
                f"{name}.safetensors updates the text encoder too, which cannot be hot-swapped"
            )


MODULE = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
KOHYA = "lora_unet_" + MODULE.replace(".", "_")

Tensors = dict[str, torch.Tensor]


def packaged() -> Tensors:
    return {
        name: each.float()
        for name, each in load_file(LORAS / "fxemoji.safetensors").items()
    }


def kohya(alpha: float | None = 2, rank: int = 4) -> Tensors:
    """The packaged LoRA by kohya's names."""
    found: Tensors = {}
    for name, tensor in packaged().items():
        module, _, kind = (
            name.removeprefix("unet.").removesuffix(".weight").rpartition(".")
        )
        base = "lora_unet_" + module.replace(".", "_")
        found[f"{base}.{'lora_down' if kind == 'lora_A' else 'lora_up'}.weight"] = (
            tensor
        )
        if alpha is not None:
            found[f"{base}.alpha"] = torch.tensor(float(alpha))
    return found


def text_lora(prefix: str = "lora_te_text_model_encoder", width: int = 144) -> Tensors:
    made, found = torch.Generator().manual_seed(0), {}
    dot, names = (
        ("_", ("lora_down", "lora_up"))
        if prefix.startswith("lora")
        else (".", ("lora_A", "lora_B"))
    )
    for layer in ("q_proj", "k_proj", "v_proj", "out_proj"):
        base = dot.join((prefix, "layers", "0", "self_attn", layer))
        for name, size in zip(names, ((2, width), (width, 2)), strict=True):
            found[f"{base}.{name}.weight"] = torch.randn(size, generator=made)
    return found


def beside(**tensors: torch.Tensor) -> Tensors:
    """The packaged LoRA, with other tensors for one module."""
    return kohya() | {
        f"{KOHYA}.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()
    }


def of_all_kinds() -> Tensors:
    """Twice the rank in every third module, with an alpha of its own; none in self-attention; and a convolution."""
    found = kohya()
    for number, base in enumerate(
        [name.removesuffix(".alpha") for name in found if name.endswith(".alpha")][::3]
    ):
        for name, way in (("lora_down", 0), ("lora_up", 1)):
            found[f"{base}.{name}.weight"] = torch.cat(
                [found[f"{base}.{name}.weight"]] * 2, dim=way
            )
        found[f"{base}.alpha"] = torch.tensor(3.0 + number)
    base = "lora_unet_mid_block_resnets_0_conv1"
    found |= {
        f"{base}.lora_down.weight": torch.randn(4, 160, 3, 3),
        f"{base}.lora_up.weight": torch.randn(160, 4, 1, 1),
    }
    return {
        name: each
        for name, each in found.items()
        if not (name.endswith(".alpha") and "attn1" in name)
    }


def in_8_bits() -> Tensors:
    return {
        name: each.to(torch.float8_e4m3fn) if each.ndim > 1 else each
        for name, each in kohya().items()
    }


def peft_with_alphas() -> Tensors:
    return packaged() | {
        n.replace("lora_A.weight", "alpha"): torch.tensor(2.0)
        for n in packaged()
        if "lora_A" in n
    }


def peft_with_kohyas_matrices() -> Tensors:
    return {
        n.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): t
        for n, t in peft_with_alphas().items()
    }


class TestArrival:
    """A file arrives in the networks as a whole, or is refused before a worker starts."""

    @pytest.mark.parametrize(
        ("tensors", "marks", "words"),
        [
            (
                lambda: beside(dora_scale=torch.ones(160, 1)),
                {},
                "to_k.dora_scale, which is a DoRA's",
            ),
            (lambda: beside(hada_w1_a=torch.ones(160, 4)), {}, "which is a LoHa"),
            (lambda: beside(lokr_w1=torch.ones(8, 8)), {}, "which is a LoKr"),
            (
                lambda: beside(lora_mid__weight=torch.ones(4, 4, 3, 3)),
                {},
                "a LoCon with a third matrix",
            ),
            (
                lambda: beside(diff=torch.ones(160, 144)),
                {},
                "a full difference of weights",
            ),
            (lambda: beside(oft_blocks=torch.ones(4, 4, 4)), {}, "an OFT or a BOFT"),
            (lambda: beside(a1__weight=torch.ones(4, 4)), {}, "a GLoRA"),
            (lambda: beside(on_input=torch.tensor(True)), {}, "an IA³"),
            (
                lambda: (
                    kohya() | {"bundle_emb.cat.string_to_param.*": torch.ones(1, 144)}
                ),
                {},
                "trained words",
            ),
            (lambda: {"emb_params": torch.ones(2, 144)}, {}, "trained words"),
            (
                lambda: {"model.diffusion_model.out.weight": torch.ones(1)},
                {},
                "no matrix of a LoRA",
            ),
            (lambda: {"a.alpha": torch.ones(1)}, {}, "holds no LoRA"),
            (
                lambda: {
                    name: each
                    for name, each in kohya().items()
                    if name != f"{KOHYA}.lora_up.weight"
                },
                {},
                "only one",
            ),
            (
                lambda: (
                    kohya()
                    | {f"{KOHYA}.lora_up.weight": torch.full((160, 4), torch.nan)}
                ),
                {},
                "not finite",
            ),
            (
                lambda: {name: each * 0 for name, each in kohya().items()},
                {},
                "changes nothing",
            ),
            (lambda: kohya(alpha=0), {}, "changes nothing"),
            (
                lambda: text_lora("lora_te2_text_model_encoder"),
                {},
                "would leave out: this model's networks have no",
            ),
            (
                lambda: text_lora(width=768),
                {},
                "from 768 to 768 channels, and this model's layer from 144 to 144",
            ),
            (
                lambda: (
                    kohya()
                    | {n.replace("mid_", "mid_9_"): t for n, t in kohya().items()}
                ),
                {},
                "would leave out",
            ),
            (
                lambda: kohya() | {n: t for n, t in packaged().items() if "mid" in n},
                {},
                "would leave out",
            ),
            (
                lambda: {
                    n.replace("unet.", "diffusion_model."): t
                    for n, t in packaged().items()
                },
                {},
                "and 83 more",
            ),
            (
                lambda: {
                    n.replace("unet.", "base_model.model."): t
                    for n, t in packaged().items()
                },
                {},
                "such as unet.;",
            ),
            (
                lambda: packaged() | {f"unet.{MODULE}.lora_B.bias": torch.ones(160)},
                {},
                "would stay empty",
            ),
            (
                kohya,
                {"ss_base_model_version": "sdxl_base_v1-0"},
                "it is for SDXL, and this model is Stable Diffusion 1.x",
            ),
            (
                kohya,
                {"modelspec.architecture": "stable-diffusion-v2-768-v/lora"},
                "it is for Stable Diffusion 2.x",
            ),
        ],
    )
    def test_what_would_be_lost_is_refused_by_name(
        self,
        variant: Compose,
        tmp_path: Path,
        tensors: Callable[[], Tensors],
        marks: dict[str, str],
        words: str,
    ) -> None:
        save_file(
            {name: each.clone() for name, each in tensors().items()},
            tmp_path / "it.safetensors",
            marks,
        )
        [found] = variant(
            "lora=loaded", f"lora.path={tmp_path / 'it.safetensors'}"
        ).conflicts(CPU)
        assert "it.safetensors " in found
        assert words in found

    def test_biases_cannot_be_fused(self, variant: Compose, tmp_path: Path) -> None:
        biases = {
            n.replace("B.weight", "B.bias"): t.float().sum(1)
            for n, t in packaged().items()
            if "B.weight" in n
        }
        save_file(
            {
                name: each.flatten() if "bias" in name else each
                for name, each in (packaged() | biases).items()
            },
            tmp_path / "it.safetensors",
        )
        loaded, fused = (
            variant(f"lora={how}", f"lora.path={tmp_path}/it.safetensors")
            for how in ("loaded", "fused")
        )
        assert loaded.conflicts(CPU) == []
        assert "has biases, which peft cannot fuse: choose lora=loaded" in str(
            fused.conflicts(CPU)
        )

    @pytest.mark.parametrize(
        "tensors",
        [of_all_kinds, in_8_bits, peft_with_alphas, peft_with_kohyas_matrices],
    )
    def test_what_arrives_is_the_formula(
        self,
        variant: Compose,
        session: Load,
        tmp_path: Path,
        tensors: Callable[[], Tensors],
    ) -> None:
        file, given = tmp_path / "it.safetensors", tensors()
        save_file(
            {name: each.clone() for name, each in given.items()},
            file,
            {"ss_base_model_version": "sd_v1"},
        )
        chosen = ("lora=loaded", f"lora.path={file}", STEPS)
        assert variant(*chosen).conflicts(CPU) == []
        unet = session(*chosen)._pipe.unet
        layers = {
            name: layer
            for name, layer in unet.named_modules()
            if hasattr(layer, "lora_A")
        }
        assert len(layers) == sum(
            name.endswith(("lora_down.weight", "lora_A.weight")) for name in given
        )
        for name, layer in layers.items():
            peft = f"unet.{name}.alpha" in given
            base = f"unet.{name}" if peft else "lora_unet_" + name.replace(".", "_")
            names = "AB" if f"{base}.lora_A.weight" in given else ("down", "up")
            down, up = (given[f"{base}.lora_{which}.weight"].float() for which in names)
            scale = float(given.get(f"{base}.alpha", torch.tensor(len(down)))) / len(
                down
            )
            wanted = scale * (up.flatten(1) @ down.flatten(1))
            assert torch.allclose(
                layer.get_delta_weight("sdopt").flatten(1), wanted, atol=1e-5
            ), name

    @pytest.mark.parametrize(
        ("option", "memory"),
        [("loaded", []), ("fused", ["memory=[precomputed_embeddings]"])],
    )
    @pytest.mark.walk(1)
    def test_of_the_text_encoder_alone_counts(
        self, session: Load, tmp_path: Path, option: str, memory: list[str]
    ) -> None:
        save_file(text_lora(), tmp_path / "it.safetensors")
        loaded = session(
            f"lora={option}", f"lora.path={tmp_path / 'it.safetensors'}", *memory, STEPS
        )
        assert np.abs(image(loaded) - image(session(*memory, STEPS))).mean() > 0.01
        assert all(item.engaged for item in loaded.prove().evidence)


@pytest.mark.parametrize(
    "lora_first", [pytest.param(True, marks=pytest.mark.slow), False]
)
@pytest.mark.slow
def test_a_graph_from_before_the_lora_is_no_evidence(
    session: Load, lora_first: bool
) -> None:
    """It runs without the LoRA, whose layers are all active."""
    loaded, lora = session(STEPS), Loaded()
    proof = lora.apply(loaded._pipe) if lora_first else None
    TorchScript().apply(loaded._pipe)
    image(loaded)
    if proof is None:
        graphs = loaded._pipe.unet
        loaded._pipe.unet = graphs._orig_mod
        proof = lora.apply(loaded._pipe)
        loaded._pipe.unet = graphs
    found = proof(trace_call(loaded._pipe, loaded._call, cuda=False))
    assert found.facts["active"] == found.facts["layers"] == 84
    assert found.engaged is lora_first, found


class TestProof:
    def test_all_draw_the_same_images_and_not_the_models(self, session: Load) -> None:

        def drawn(*chosen: str) -> np.ndarray:
            return image(session(*chosen, STEPS))

        plain, whole, half = (
            drawn(),
            drawn("lora=loaded"),
            drawn("lora=loaded", "lora.scale=0.5"),
        )
        assert np.abs(whole - plain).mean() > 0.01
        assert 0 < np.abs(half - plain).mean() < np.abs(whole - plain).mean()
        assert np.abs(drawn("lora=hotswap") - whole).max() < 1e-3
        assert np.abs(drawn("lora=fused", "lora.scale=0.5") - half).max() < 1e-3
        joined = session("lora=fused", "attention=fused_qkv", STEPS)
        assert np.abs(image(joined) - whole).max() < 1e-3
        assert all(item.engaged for item in joined.prove().evidence)


def of_several_ranks(file: Path, seed: int, says: bool) -> None:
    """Writes a LoRA of ranks 4, 8 and 16; its header may say alphas of some of its layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    packed = load_file(LORAS / "fxemoji.safetensors")
    modules = sorted({name.partition(".lora_")[0] for name in packed})
    layers = [module.removeprefix("unet.") for module in modules]
    ranks = {layer: (4, 8, 16)[number % 3] for number, layer in enumerate(layers)}
    for module, layer in zip(modules, layers, strict=True):
        for end, dimension in (("lora_A", 0), ("lora_B", 1)):
            like = packed[f"{module}.{end}.weight"].float()
            shape = list(like.shape)
            shape[dimension] = ranks[layer]
            random = torch.randn(shape, generator=generator)
            tensors[f"{module}.{end}.weight"] = random * like.std()
    said = {
        "r": 4,
        "lora_alpha": 4,
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != 4},
        "alpha_pattern": dict.fromkeys(layers[::5], 24),
        "target_modules": layers,
    }
    text = json.dumps({f"unet.{key}": value for key, value in said.items()})
    save_file(tensors, file, {"lora_adapter_metadata": text} if says else None)


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.walk(1)
def test_of_several_ranks_take_turns(session: Load, tmp_path: Path, says: bool) -> None:
    """Peft alone refuses other ranks or alphas of single layers, or scales such a layer as all others."""
    of_several_ranks(tmp_path / "one.safetensors", 1, says)
    of_several_ranks(tmp_path / "two.safetensors", 2, not says)
    names = ("one.safetensors", "two.safetensors")
    alone = []
    for name in names:
        loaded = session("lora=loaded", f"lora.path={tmp_path / name}", STEPS)
        alone.append(image(loaded))
    assert np.abs(alone[0] - alone[1]).mean() > 0.01
    chosen = (f"lora.weight_name={names[0]}", f"lora.other={names[1]}")
    host = session("lora=hotswap", f"lora.path={tmp_path}", *chosen, STEPS)
    assert np.abs(image(host) - alone[0]).max() < 1e-3
    option = Hotswap(str(tmp_path), *names)
    for number in (1, 0):
        option._load(host._pipe, names[number], hotswap=True)
        assert np.abs(image(host) - alone[number]).max() < 1e-3
    assert proved(host, "lora").engaged


class TestUndone:
    def test_a_swap_for_which_a_graph_is_made(
        self, session: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By any compiler, such as one that captures a graph anew."""
        loaded, load = session("lora=hotswap", STEPS), Hotswap._load

        def compiling(option: Hotswap, *given: Any, **how: Any) -> None:
            with compilation():
                load(option, *given, **how)

        monkeypatch.setattr(Hotswap, "_load", compiling)
        found = proved(loaded, "lora")
        assert not found.engaged
        assert found.facts["recompiles"] == 2

    def test_another_that_changes_nothing(self, session: Load, tmp_path: Path) -> None:
        for name in ("a", "b"):
            save_file(
                load_file(LORAS / "fxemoji.safetensors"),
                tmp_path / f"{name}.safetensors",
            )
        names = ("lora.weight_name=a.safetensors", "lora.other=b.safetensors")
        assert not proved(
            session("lora=hotswap", f"lora.path={tmp_path}", *names, STEPS), "lora"
        ).engaged


@pytest.mark.slow
def test_another_lora_takes_the_place_of_a_compiled_one(session: Load) -> None:
    torch._dynamo.reset()
    loaded = session("lora=hotswap", "compiler=inductor", STEPS)
    image(loaded)
    assert counters["stats"]["unique_graphs"] == 1
    for item in loaded.prove().evidence:
        assert item.engaged, item
    assert evidence(loaded, "lora").facts["recompiles"] == 0
    assert counters["stats"]["unique_graphs"] == 1


class TestFewSteps:
    """A scheduler for few steps and the LoRA that was made for it are two choices."""

    @pytest.mark.parametrize("scheduler", ["lcm", "turbo", "tcd", "dmd2"])
    def test_need_a_distilled_model(self, variant: Compose, scheduler: str) -> None:
        [found] = variant(f"scheduler={scheduler}").conflicts(CPU)
        assert found.startswith(
            f"scheduler={scheduler}: needs a model distilled to a few steps"
        )
        assert variant(f"scheduler={scheduler}", "lora=fused").conflicts(CPU) == []
        assert (
            variant(f"scheduler={scheduler}", "model.distilled=true").conflicts(CPU)
            == []
        )

    @pytest.mark.parametrize("model", ["sd_turbo", "sdxl_turbo"])
    def test_a_distilled_model_says_how_it_is_sampled(
        self, variant: Compose, composer: type[HydraComposer], model: str
    ) -> None:
        few = composer([f"model={model}"]).variant(None)
        assert (few.workload.steps, few.guidance_scale, few.shapes[0].size) == (
            4,
            0,
            512,
        )
        assert (
            variant(
                f"model={model}", "model.weights=random", "scheduler=turbo"
            ).conflicts(CPU)
            == []
        )
        width = {"sd_turbo": "sd15", "sdxl_turbo": "sdxl"}[model]
        assert variant(f"model={model}", f"lora=lcm_{width}").conflicts(CPU) != []

    @pytest.mark.parametrize("option", FEW_STEPS)
    def test_a_lora_for_few_steps_names_what_goes_with_it(
        self, variant: Compose, option: str
    ) -> None:
        model = option.rpartition("_")[2]
        given = [f"model={model}", f"lora={option}"] + (
            [] if model == "emoji" else ["model.weights=random"]
        )
        option_made = variant(*given).optimizations["lora"]
        assert isinstance(option_made, Distilled)
        found = variant(*given).conflicts(CPU)
        keys = [reason.partition(": ")[2] for reason in found]
        [scheduler, steps, guidance] = keys
        assert (
            scheduler
            == f"it was distilled for another scheduler: choose scheduler={option_made.scheduler}"
        )
        assert "set workload.steps=4" in steps
        assert (
            f"set workload.guidance_scale={option_made.guidance_scale:g} or less"
            in guidance
        )
        few = [
            f"scheduler={option_made.scheduler}",
            "workload.steps=4",
            "workload.guidance_scale=1",
        ]
        assert variant(*given, *few).conflicts(CPU) == []
        other = "sd15" if model == "sdxl" else "sdxl"
        [found_there] = variant(f"model={other}", f"lora={option}", *few).conflicts(CPU)
        assert "it is for models that read" in found_there

    def test_a_call_of_a_program_is_refused_other_steps(self) -> None:
        option = Distilled(steps=[2, 8])
        assert option.refusals({"num_inference_steps": 4, "guidance_scale": 1}) == []
        assert (
            "set guidance_scale=1 or less"
            in option.refusals({"num_inference_steps": 4})[0]
        )
        assert "set num_inference_steps=4" in option.refusals({"guidance_scale": 0})[0]

    @pytest.mark.parametrize(
        ("experiment", "distilled"),
        [("few_steps", 2), ("few_steps_sd15", 4), ("few_steps_sdxl", 5)],
    )
    def test_are_one_choice_in_an_experiment(
        self, composer: type[HydraComposer], experiment: str, distilled: int
    ) -> None:
        plan = (chosen := composer([f"experiment={experiment}"])).current.study.plan(
            chosen
        )
        assert plan.variants[0].workload.steps == 25
        assert all(each.conflicts(CPU) == [] for each in plan.variants)
        few = [
            each
            for each in plan.variants
            if isinstance(each.optimizations["lora"], Distilled)
        ]
        assert len(few) == distilled
        assert all(
            each.workload.steps <= 8 and each.guidance_scale <= 1 for each in few
        )

    def test_draw_the_same_noise_in_each_call_and_any_batch(
        self, session: Load
    ) -> None:
        """Latent consistency draws noise at every step but the last."""
        few = (
            "scheduler=lcm",
            "lora=fused",
            "workload.steps=4",
            "workload.guidance_scale=1",
        )
        loaded, pair = (
            session(*few),
            session(*few, "workload.batch_size=2", "workload.prompt_count=2"),
        )
        torch.manual_seed(1)
        first = image(loaded)
        torch.manual_seed(2)
        assert np.array_equal(image(loaded), first)
        assert np.abs(image(pair)[:1] - first).max() < 1e-3
