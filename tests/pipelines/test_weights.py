"""Weights against the networks that they are for, before a worker starts: files, names, shapes, parts that fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from sdopt.pipelines.checks import require_model
from sdopt.pipelines.components import require_parts
from sdopt.pipelines.families import family_of
from sdopt.pipelines.hub import NETWORK_WEIGHTS, _files
from sdopt.reference import TINY_AUTOENCODER
from sdopt.schema import Model
from tests.command import SMOKE, refused
from tests.fixtures import CPU, Compose
from tests.pipelines.loaded import load
from tests.pipelines.single_file import edit, original_layout, original_names

EMOJI = PACKAGED / "emoji"
UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
NAME = "diffusion_pytorch_model"
LAYER = "up_blocks.1.attentions.0.transformer_blocks.0.norm1.weight"

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMOJI, tmp_path / "model"))


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model in one file, in the layout in which Stable Diffusion was published."""
    path = tmp_path_factory.mktemp("original") / "emoji.safetensors"
    original_layout(load(Model()), path)
    return path


@pytest.fixture(scope="module")
def original(single: Path) -> Tensors:
    """The tensors of that file."""
    return dict(load_file(single))


def check(path: Path, variant: str | None = None) -> None:
    model = Model(
        weights="path",
        path=str(path),
        variant=variant,
        name="folder" if path.is_dir() else "emoji",
    )
    require_model(model)
    require_parts(model)


def refusal(path: Path, variant: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        check(path, variant)
    assert all(
        problem.startswith(f"model.path={path}: ") for problem in caught.value.problems
    )
    return "\n".join(caught.value.problems)


def rewrite(file: Path, change: Change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def shard(file: Path, form: str, index: str | None) -> None:
    """Splits a file into two; `form` takes the number of each."""
    tensors = load_file(file)
    places: dict[str, str] = {}
    names = sorted(tensors)
    file.unlink()
    for number, half in enumerate(
        (names[: len(names) // 2], names[len(names) // 2 :]), 1
    ):
        name = form.format(f"0000{number}-of-00002")
        save_file(
            {key: tensors[key] for key in half}, file.with_name(name), {"format": "pt"}
        )
        places |= dict.fromkeys(half, name)
    if index is not None:
        file.with_name(index).write_text(
            json.dumps({"metadata": {}, "weight_map": places})
        )


class TestFolder:
    def test_with_what_its_network_does_not_have(self, folder: Path) -> None:
        """As of a latent consistency model whose configuration was exchanged: it would be left out."""
        name = "time_embedding.cond_proj.weight"
        rewrite(
            folder / UNET, lambda tensors: tensors.update({name: torch.zeros(96, 16)})
        )
        assert f"{UNET}: holds the tensor {name}" in refusal(folder)
        edit(folder / "unet" / "config.json", time_cond_proj_dim=16)
        check(folder)

    @pytest.mark.parametrize(
        "name",
        ["model_index.json", "unet/config.json", "scheduler/scheduler_config.json"],
    )
    def test_whose_configuration_an_editor_has_marked(
        self, folder: Path, name: str
    ) -> None:
        """As Windows' does; diffusers cannot read it, which it would say after a baseline of another model."""
        file = folder / name
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        assert f"{file} cannot be read (Unexpected UTF-8 BOM" in refusal(folder)

    def test_with_what_is_ignored_rightly(self, folder: Path) -> None:
        def older(tensors: Tensors) -> None:
            for name in list(tensors):
                tensors[f"text_model.{name.removeprefix('text_model.')}"] = tensors.pop(
                    name
                )
            tensors["text_model.embeddings.position_ids"] = torch.arange(24)[None]

        rewrite(folder / TEXT, older)
        edit(
            folder / "text_encoder" / "config.json", num_hidden_layers=2
        )  # skips the last layer, as some do
        check(folder)

    def test_whose_denoiser_says_its_width_block_by_block(self, folder: Path) -> None:
        edit(folder / "unet" / "config.json", cross_attention_dim=[144, 144])
        check(folder)

    def test_whose_text_encoder_is_not_clip_s(self, folder: Path) -> None:
        """As of Chinese models, whose tokenizer has all of its words in one text file."""
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
        shutil.rmtree(folder / "tokenizer")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.txt").write_text("\n".join(words))
        (folder / "tokenizer" / "tokenizer_config.json").write_text(
            '{"model_max_length": 24}'
        )
        sizes = {
            "hidden_size": 144,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "max_position_embeddings": 24,
        }
        BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(
            folder / "text_encoder"
        )
        named = {
            "text_encoder": ["transformers", "BertModel"],
            "tokenizer": ["transformers", "BertTokenizer"],
        }
        edit(folder / "model_index.json", **named)
        check(folder)

    def test_for_inpainting_only(self, folder: Path) -> None:
        def widen(tensors: Tensors) -> None:
            tensors["conv_in.weight"] = torch.zeros(96, 17, 3, 3)

        rewrite(folder / UNET, widen)
        edit(folder / "unet" / "config.json", in_channels=17)
        edit(folder / "model_index.json", _class_name="StableDiffusionInpaintPipeline")
        assert (
            "takes 17 channels, but latents have 8: a model for inpainting only"
            in refusal(folder)
        )

    def test_saved_for_another_task(self, folder: Path) -> None:
        for kind in (
            "StableDiffusionImg2ImgPipeline",
            "LatentConsistencyModelPipeline",
        ):
            edit(folder / "model_index.json", _class_name=kind)
            check(folder)
        refiner = {
            "text_encoder": [None, None],
            "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        }
        edit(
            folder / "model_index.json",
            _class_name="StableDiffusionXLImg2ImgPipeline",
            **refiner,
        )
        assert "as an SDXL refiner" in refusal(folder)

    def test_with_parts_that_are_not_run(self, folder: Path) -> None:
        """Neither the safety checker nor the image encoder of an IP-Adapter needs to be there."""
        vision = ["transformers", "CLIPVisionModelWithProjection"]
        checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
        edit(
            folder / "model_index.json",
            image_encoder=vision,
            safety_checker=checker,
            requires_safety_checker=True,
        )
        check(folder)
        pipe = load(Model("folder", "path", str(folder)))
        assert pipe.image_encoder is pipe.safety_checker is None


UNKNOWN: list[Any] = [["os", "system"], ["diffusers", 3], [None, None], "UNet", []]
"""What is no class of the libraries."""


def lose(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def spoil(name: str, value: float) -> Change:
    return lambda tensors: tensors[name].view(-1)[-1:].fill_(value)


def end_early(tensors: Tensors) -> None:
    for name in list(tensors)[-len(tensors) // 4 :]:
        tensors[name].zero_()


def rename(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"x.{name}"] = tensors.pop(name)


def quantize(tensors: Tensors) -> None:
    tensors["decoder.conv_out.weight"] = tensors["decoder.conv_out.weight"].char()


LAST, FIRST, BIAS = (
    "decoder.conv_out.bias",
    "encoder.conv_in.weight",
    "encoder.layers.1.mlp.fc1.bias",
)


class TestParts:
    @pytest.mark.parametrize(
        ("file", "damage", "said"),
        [
            (UNET, lose(LAYER), f"{UNET}: lacks the tensor {LAYER}"),
            (TEXT, lose(BIAS), f"{TEXT}: lacks the tensor {BIAS}"),
            (
                VAE,
                spoil(FIRST, float("-inf")),
                f"{VAE}: holds numbers in {FIRST} that are not finite",
            ),
            (
                TEXT,
                spoil(BIAS, float("nan")),
                f"{TEXT}: holds numbers in {BIAS} that are not finite",
            ),
            (
                UNET,
                lambda tensors: tensors.update(
                    {f"{LAYER}.base_layer.bias": torch.ones(1)}
                ),
                "does not have: the model is of another kind",
            ),
            (UNET, end_early, "holds nothing but zeros in"),
            (UNET, rename, f"{UNET}: holds weights of another network"),
            (VAE, b"\x08", f"{VAE} cannot be read"),
            (
                VAE,
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                f"{VAE} is a pointer of Git LFS",
            ),
            (
                VAE,
                quantize,
                f"{VAE} holds quantized weights, such as decoder.conv_out.weight (I8)",
            ),
            (
                "unet/config.json",
                {"quantization_config": {"quant_method": "bitsandbytes"}},
                "unet/ is quantized",
            ),
            *(
                (
                    "model_index.json",
                    {"unet": value},
                    f"names {json.dumps(value)} as its unet",
                )
                for value in UNKNOWN
            ),
            (
                "model_index.json",
                {"unet": ["diffusers", "NoSuchModel"]},
                "unet/: no NoSuchModel can be made",
            ),
            (
                "model_index.json",
                {"_class_name": "KolorsPipeline"},
                "is a KolorsPipeline; sdopt runs StableDiff",
            ),
            ("model_index.json", b"{", "model_index.json cannot be read"),
            ("model_index.json", b"[]", "is a None"),
            (
                "unet/config.json",
                {"down_block_types": ["NoBlock"]},
                "unet/: no UNet2DConditionModel can be made",
            ),
            (
                "unet/config.json",
                {"in_channels": 5},
                "1 tensors are of other shapes than its config.json says",
            ),
            ("unet/config.json", None, "config.json cannot be read"),
            ("vae/config.json", b"{", "vae/config.json cannot be read"),
            (
                "text_encoder/config.json",
                {"hidden_size": "x"},
                "text_encoder/: no CLIPTextModel can be made",
            ),
            (
                "scheduler/scheduler_config.json",
                None,
                "scheduler/ holds no scheduler_config.json; fetch it",
            ),
            (
                "tokenizer/tokenizer.json",
                b"{}",
                "tokenizer/: no CLIPTokenizer can be made",
            ),
            (
                "tokenizer/tokenizer.json",
                None,
                "tokenizer/ holds neither tokenizer.json nor vocab.json",
            ),
        ],
    )
    def test_that_are_damaged_or_missing(
        self, folder: Path, file: str, damage: Any, said: str
    ) -> None:
        if callable(damage):
            rewrite(folder / file, damage)
        elif isinstance(damage, dict):
            edit(folder / file, **damage)
        elif damage is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(damage)
        assert said in refusal(folder)

    def test_the_command_says_so_before_a_worker_starts(
        self, folder: Path, tmp_path: Path
    ) -> None:
        check(folder)
        edit(folder / "unet" / "config.json", down_block_types=["NoBlock"])
        said = "unet/: no UNet2DConditionModel can be made of its configuration"
        refused(
            tmp_path, "run", *SMOKE, "model=folder", f"model.path={folder}", says=said
        )


class TestShards:
    @pytest.mark.parametrize(
        ("variant", "form", "index"),
        [
            (None, f"{NAME}-{{}}.safetensors", f"{NAME}.safetensors.index.json"),
            (
                "fp16",
                f"{NAME}.fp16-{{}}.safetensors",
                f"{NAME}.safetensors.index.fp16.json",
            ),
            (
                "fp16",
                f"{NAME}-{{}}.fp16.safetensors",
                f"{NAME}.safetensors.fp16.index.json",
            ),
        ],
    )
    def test_by_all_names_that_diffusers_reads(
        self, folder: Path, variant: str | None, form: str, index: str
    ) -> None:
        """Only the denoiser has the variant: of the other parts, the files without one are read."""
        shard(folder / UNET, form, index)
        check(folder, variant)
        last = folder / "unet" / form.format("00002-of-00002")
        rewrite(last, lambda tensors: tensors.pop(LAYER))
        assert (
            f"lacks 1 tensors that {index} names, such as {LAYER} in {last.name}"
            in refusal(folder, variant)
        )
        last.unlink()
        assert f"unet/{last.name} cannot be read" in refusal(folder, variant)

    def test_of_two_savings_or_without_their_index(self, folder: Path) -> None:
        """Diffusers takes the tensor of the file that it reads last, whatever the index says."""
        shard(folder / TEXT, "model-{}.safetensors", "model.safetensors.index.json")
        check(folder)
        index = f"{NETWORK_WEIGHTS}.index.json"
        shard(folder / UNET, f"{NAME}-{{}}.safetensors", index)
        first, last = (
            folder / "unet" / f"{NAME}-0000{n}-of-00002.safetensors" for n in (1, 2)
        )
        name = min(load_file(first))
        rewrite(last, lambda tensors: tensors.update({name: load_file(first)[name]}))
        assert f"{last.name} holds {name} too, which" in refusal(folder)
        (folder / "unet" / index).unlink()
        assert f"shards without {index}" in refusal(folder)


class TestVariants:
    def test_that_no_single_value_finds(self, folder: Path) -> None:
        for file, variant in ((UNET, "fp16"), (VAE, "ema")):
            (folder / file).rename(
                (folder / file).with_suffix(f".{variant}.safetensors")
            )
        for chosen, lacking in ((None, UNET), ("fp16", VAE), ("ema", UNET)):
            part = lacking.partition("/")[0]
            assert f"{part}/ holds only files of a variant" in refusal(folder, chosen)

    def test_are_fetched_part_by_part(self) -> None:
        parts: dict[str, object] = {"unet": ["diffusers", ""], "vae": ["diffusers", ""]}
        names = [UNET, UNET.replace(".s", ".fp16.s"), VAE]
        wanted = _files(parts, "fp16", names)
        assert [name in wanted for name in names] == [False, True, True]


def test_a_vae_given_apart_lost_a_tensor(
    variant: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(TINY_AUTOENCODER, tmp_path / "tiny"))
    monkeypatch.setattr("sdopt.options.memory.hub_network", lambda *_, **__: folder)
    assert not variant("memory=tiny_vae", f"memory.tiny_vae.path={folder}").conflicts(
        CPU
    )
    rewrite(
        folder / NETWORK_WEIGHTS, lambda tensors: tensors.pop("decoder.layers.0.weight")
    )
    for given in (f"path={folder}", "hub_id=somebody/tiny"):
        [found] = variant("memory=tiny_vae", f"memory.tiny_vae.{given}").conflicts(CPU)
        assert "lacks the tensor decoder.layers.0.weight" in found


class TestPaths:
    def test_of_a_hub_cache(self, folder: Path, tmp_path: Path) -> None:
        snapshot = tmp_path / "hub" / "models--somebody--small" / "snapshots" / "0123"
        shutil.copytree(folder, snapshot)
        check(snapshot)
        (snapshot / UNET).unlink()
        (snapshot / UNET).symlink_to(tmp_path / "gone")
        assert f"{UNET} cannot be read" in refusal(snapshot)

    def test_of_what_is_near_a_pipeline(self, folder: Path) -> None:
        for near in (folder / "unet", folder.parent):
            assert "holds no model_index.json" in refusal(near)
        for part in ("unet", "vae"):
            [file] = (folder / part).glob("*.safetensors")
            assert "holds a single network in diffusers' names" in refusal(file)

    def test_of_a_modular_pipeline(self, tmp_path: Path) -> None:
        index = '{"_class_name": "Flux3ModularPipeline"}'
        (tmp_path / "modular_model_index.json").write_text(index)
        assert "is a Flux3ModularPipeline" in refusal(tmp_path)

    def test_of_a_transformer_in_diffusers_names(self, tmp_path: Path) -> None:
        file = tmp_path / "alone.safetensors"
        save_file({"transformer_blocks.0.attn.to_q.weight": torch.zeros(4, 4)}, file)
        assert "holds a single network in diffusers' names" in refusal(file)

    def test_of_a_lora(self, tmp_path: Path) -> None:
        file = tmp_path / "style.safetensors"
        save_file({"lora_unet_a.lora_down.weight": torch.zeros(4, 4)}, file)
        assert "it has no denoiser and no VAE and no text encoder" in refusal(file)


def add(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(shape or (1, 1))})


def as_in_2022(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".text_model." in name]:
        tensors[name.replace(".text_model.", ".")] = tensors.pop(name)


OF_UNET, OF_VAE, OF_TEXT = (
    "model.diffusion_model.",
    "first_stage_model.",
    "cond_stage_model.transformer.text_model.",
)


class TestSingleFile:
    def test_has_the_same_weights(self, single: Path) -> None:
        """Read with the configurations in the package, without a hub."""
        ours, theirs = load(Model(weights="path", path=str(single))), load(Model())
        for name in ("unet", "vae", "text_encoder"):
            for key, tensor in getattr(theirs, name).state_dict().items():
                assert torch.equal(getattr(ours, name).state_dict()[key], tensor)

    def test_cut_short(self, single: Path, tmp_path: Path) -> None:
        short = tmp_path / "short.safetensors"
        for kept in (0, 100, -1):
            short.write_bytes(single.read_bytes()[:kept])
            assert "short.safetensors cannot be read" in refusal(short)

    def test_that_is_something_else(self, tmp_path: Path) -> None:
        """Pickled, it is refused by its name, and under another name by its content; nothing runs it."""
        pickled = tmp_path / "model.ckpt"
        torch.save({"state_dict": {}}, pickled)
        assert "a pickled file can run any code" in refusal(pickled)
        renamed = pickled.rename(tmp_path / "model.safetensors")
        assert "model.safetensors cannot be read" in refusal(renamed)
        (other := tmp_path / "model.gguf").write_bytes(b"GGUF")
        assert "GGUF" in refusal(other)

    def test_of_another_architecture(self, single: Path) -> None:
        said = "not of the architecture model=sd15: a StableDiffusionPipeline with cross_attention_dim=144"
        with pytest.raises(UsageError, match=said):
            require_model(Model("sd15", "path", str(single)))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                lose(f"{OF_UNET}output_blocks.2.1.norm.weight"),
                "lacks the tensor up_blocks.1.attentions.0.norm.weight",
            ),
            (
                lose(f"{OF_VAE}decoder.mid.attn_1.q.weight"),
                "lacks the tensor decoder.mid_block.attentions.0.to_q",
            ),
            (
                lose(f"{OF_TEXT}final_layer_norm.bias"),
                "one that was made with fewer layers",
            ),
            (as_in_2022, "names its text encoder as merges of 2022 do"),
            (add(f"{OF_UNET}time_embed.cond_proj.weight"), "does not have"),
            (
                add(
                    f"{OF_UNET}middle_block.1.transformer_blocks.0.attn1.to_q.scale_weight"
                ),
                "holds quantized",
            ),
            (add("control_model.input_blocks.0.0.weight"), "of a further network"),
            (
                add(f"{OF_UNET}input_blocks.0.0.weight", 96, 17, 3, 3),
                "for inpainting only",
            ),
            (add(f"{OF_UNET}input_blocks.0.0.weight", 96, 16, 3, 3), "edits an image"),
            (
                spoil(f"{OF_VAE}{LAST}", float("nan")),
                f"holds numbers in {OF_VAE}{LAST} that are not finite",
            ),
        ],
    )
    def test_that_does_not_fit(
        self, original: Tensors, tmp_path: Path, change: Change, said: str
    ) -> None:
        changed = {
            name: tensor.clone() if name.endswith(LAST) else tensor
            for name, tensor in original.items()
        }
        change(changed)
        save_file(changed, tmp_path / "other.safetensors")
        assert said in refusal(tmp_path / "other.safetensors")

    def test_with_what_is_ignored_rightly(
        self, original: Tensors, tmp_path: Path
    ) -> None:
        beside = ("alphas_cumprod", "model_ema.diffusion_modelinput_blocks00weight")
        trained = ("first_stage_model.loss.logvar", "cond_stage_model.logit_scale")
        more = {name: torch.zeros(1) for name in (*beside, *trained)} | {
            "embedding_manager.a": torch.zeros(1, 144)
        }
        # Averages and levels of noise are left out, whatever they are: only training uses them.
        odd = dict.fromkeys(
            ("model_ema.decay", "sqrt_recip_alphas_cumprod", "denoiser.sigmas"),
            float("inf"),
        )
        more |= {name: torch.tensor([value]) for name, value in odd.items()}
        save_file(original | more, tmp_path / "ema.safetensors")
        check(tmp_path / "ema.safetensors")

    @pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
    @pytest.mark.walk(2)
    def test_of_a_published_size_passes(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its family is found, and every tensor after diffusers' renaming; a sparse file has the header alone."""
        monkeypatch.setattr("sdopt.pipelines.components.wrong_numbers", lambda *_: [])
        file = tmp_path / f"{name}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for key, shape in original_names(ARCHITECTURES / name).items():
            stop = start + 2 * torch.Size(shape).numel()
            header[key] = {
                "dtype": "F16",
                "shape": shape,
                "data_offsets": [start, stop],
            }
            start = stop
        content = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(len(content).to_bytes(8, "little") + content)
            out.truncate(8 + len(content) + start)
        if name == "sd21":
            with pytest.raises(UsageError, match="model=sd21 or model=sd21_base"):
                family_of(file)
        else:
            assert family_of(file) == name
        model = Model(name, "path", str(file))
        require_model(model)
        require_parts(model)
