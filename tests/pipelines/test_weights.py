"""Weights against the networks that they are for, before a worker starts: files, names, shapes, parts that fit."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdopt.errors import UsageError
from sdopt.hardware.probe import probe_device
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from sdopt.pipelines.checks import require_model
from sdopt.pipelines.components import require_parts
from sdopt.pipelines.families import family_of
from sdopt.pipelines.hub import NETWORK_WEIGHTS, _files
from sdopt.pipelines.loading import load_pipeline
from sdopt.pipelines.random_weights import empty_network
from sdopt.reference import TINY_AUTOENCODER
from sdopt.schema import Model, Scheduler, Task
from tests.command import SMOKE, sdopt
from tests.pipelines.single_file import edit, original_layout, original_names

EMOJI = PACKAGED / "emoji"
UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
LAYER = "up_blocks.1.attentions.0.transformer_blocks.0.norm1.weight"

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMOJI, tmp_path / "model"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model in one file, in the layout in which Stable Diffusion was published."""
    path = tmp_path_factory.mktemp("original") / "emoji.safetensors"
    original_layout(load(Model()), path)
    return path


@pytest.fixture(scope="module")
def original(single: Path) -> Tensors:
    """The tensors of that file."""
    return dict(load_file(single))


def load(model: Model) -> Any:
    return load_pipeline(model, Scheduler(), Task(), "cpu", {"dtype": torch.float32})


def check(path: Path, variant: str | None = None) -> None:
    model = Model(weights="path", path=str(path), variant=variant, name="folder" if path.is_dir() else "emoji")
    require_model(model)
    require_parts(model)


def refusal(path: Path, variant: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        check(path, variant)
    assert all(problem.startswith(f"model.path={path}: ") for problem in caught.value.problems)
    return "\n".join(caught.value.problems)


def rewrite(file: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def shard(file: Path, form: str, index: str | None) -> None:
    """Splits a file into two; `form` takes the number of each."""
    tensors = load_file(file)
    places: dict[str, str] = {}
    names = sorted(tensors)
    file.unlink()
    for number, half in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        name = form.format(f"0000{number}-of-00002")
        save_file({key: tensors[key] for key in half}, file.with_name(name), {"format": "pt"})
        places |= dict.fromkeys(half, name)
    if index is not None:
        file.with_name(index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


class TestFolder:
    @pytest.mark.parametrize(
        ("file", "lost"), [(UNET, LAYER), (VAE, "decoder.conv_out.bias"), (TEXT, "encoder.layers.1.mlp.fc1.bias")]
    )
    def test_that_lost_a_tensor(self, folder: Path, file: str, lost: str) -> None:
        rewrite(folder / file, lambda tensors: tensors.pop(lost))
        found = refusal(folder)
        assert f"{file}: lacks the tensor {lost}" in found

    @pytest.mark.parametrize(
        ("file", "name", "value"),
        [
            (UNET, LAYER, float("nan")),
            (VAE, "encoder.conv_in.weight", float("-inf")),
            (TEXT, "encoder.layers.1.mlp.fc1.bias", float("nan")),
        ],
    )
    def test_with_numbers_that_are_not_finite(self, folder: Path, file: str, name: str, value: float) -> None:
        rewrite(folder / file, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
        assert f"{file}: holds numbers in {name} that are not finite" in refusal(folder)

    def test_cut_short(self, folder: Path) -> None:
        (folder / VAE).write_bytes((folder / VAE).read_bytes()[:-1])
        assert f"{VAE} is not a complete safetensors file" in refusal(folder)

    def test_with_zeros_where_a_download_ended(self, folder: Path) -> None:
        def cut(tensors: Tensors) -> None:
            for name in list(tensors)[-len(tensors) // 4 :]:
                tensors[name].zero_()

        rewrite(folder / UNET, cut)
        said = refusal(folder)
        assert re.search(rf"{UNET}: holds nothing but zeros in \d+ matrices, such as \S+, as a download", said)

    def test_with_what_its_network_does_not_have(self, folder: Path) -> None:
        """As of a latent consistency model whose configuration was exchanged: it would be left out."""
        name = "time_embedding.cond_proj.weight"
        rewrite(folder / UNET, lambda tensors: tensors.update({name: torch.zeros(96, 16)}))
        assert f"{UNET}: holds the tensor {name}" in refusal(folder)
        edit(folder / "unet" / "config.json", time_cond_proj_dim=16)
        check(folder)

    def test_with_what_is_ignored_rightly(self, folder: Path) -> None:
        def older(tensors: Tensors) -> None:
            for name in list(tensors):
                tensors[f"text_model.{name.removeprefix('text_model.')}"] = tensors.pop(name)
            tensors["text_model.embeddings.position_ids"] = torch.arange(24)[None]

        rewrite(folder / TEXT, older)
        edit(folder / "text_encoder" / "config.json", num_hidden_layers=2)  # skips the last layer, as some do
        check(folder)

    def test_quantized(self, folder: Path) -> None:
        edit(folder / "unet" / "config.json", quantization_config={"quant_method": "bitsandbytes"})
        assert "unet/ is quantized" in refusal(folder)
        rewrite(folder / VAE, lambda t: t.update({"decoder.conv_out.weight": t["decoder.conv_out.weight"].char()}))
        assert f"{VAE} holds quantized weights, such as decoder.conv_out.weight (I8)" in refusal(folder)

    def test_of_parts_of_two_models(self, folder: Path) -> None:
        file = folder / "text_encoder" / "config.json"
        edit(file, hidden_size=96, num_attention_heads=2)
        narrow = empty_network(folder / "text_encoder", "transformers", "CLIPTextModel").to_empty(device="cpu")
        save_file(
            {name: torch.ones_like(tensor) for name, tensor in narrow.state_dict().items()},
            folder / TEXT,
            {"format": "pt"},
        )
        assert "text_encoder/ gives 96 channels, and unet/ takes 144" in refusal(folder)

    def test_with_a_tokenizer_that_gives_too_much(self, folder: Path) -> None:
        edit(folder / "tokenizer" / "tokenizer_config.json", model_max_length=77)
        assert "text_encoder/ has places for 24 tokens, and tokenizer/ gives it 77" in refusal(folder)

    def test_for_inpainting_only(self, folder: Path) -> None:
        def widen(tensors: Tensors) -> None:
            tensors["conv_in.weight"] = torch.zeros(96, 17, 3, 3)

        rewrite(folder / UNET, widen)
        edit(folder / "unet" / "config.json", in_channels=17)
        edit(folder / "model_index.json", _class_name="StableDiffusionInpaintPipeline")
        assert "takes 17 channels, but latents have 8: a model for inpainting only" in refusal(folder)

    def test_saved_for_another_task(self, folder: Path) -> None:
        edit(folder / "model_index.json", _class_name="StableDiffusionImg2ImgPipeline")
        check(folder)
        refiner = {"text_encoder": [None, None], "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
        edit(folder / "model_index.json", _class_name="StableDiffusionXLImg2ImgPipeline", **refiner)
        assert "as an SDXL refiner" in refusal(folder)

    def test_with_parts_that_are_not_run(self, folder: Path) -> None:
        """Neither the safety checker nor the image encoder of an IP-Adapter needs to be there."""
        vision = ["transformers", "CLIPVisionModelWithProjection"]
        checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
        edit(folder / "model_index.json", image_encoder=vision, safety_checker=checker, requires_safety_checker=True)
        check(folder)
        model = Model(weights="path", path=str(folder), name="folder")
        pipe = load(model)
        assert pipe.image_encoder is pipe.safety_checker is None


UNKNOWN = [
    ["my_module", "UNet"],
    ["diffusers", 3],
    ["os", "system"],
    "UNet",
    None,
    [],
    [None, None],
    ["transformers", "B"],
]
"""What is no class of the libraries."""


class TestParts:
    @pytest.mark.parametrize(
        ("file", "damage", "said"),
        [
            *(("model_index.json", {"unet": value}, f"names {json.dumps(value)} as its unet") for value in UNKNOWN),
            (
                "model_index.json",
                {"unet": ["diffusers", "NoSuchModel"]},
                "unet/: no NoSuchModel can be made of its con",
            ),
            (
                "model_index.json",
                {"_class_name": "FluxPipeline"},
                "is a FluxPipeline; sdopt runs StableDiff",
            ),
            ("model_index.json", b"{", "model_index.json cannot be read"),
            ("model_index.json", b"[]", "is a None"),
            ("unet/config.json", {"block_out_channels": "wide"}, "unet/: no UNet2DConditionModel can be made"),
            ("unet/config.json", {"down_block_types": ["NoBlock"]}, "unet/: no UNet2DConditionModel can be made"),
            ("unet/config.json", {"in_channels": 5}, "1 tensors are of other shapes than its config.json says"),
            ("unet/config.json", None, "config.json cannot be read"),
            ("vae/config.json", {"latent_channels": -3}, "vae/: no AutoencoderKL can be made"),
            ("vae/config.json", b"{", "vae/: no AutoencoderKL can be made"),
            ("text_encoder/config.json", {"hidden_size": "x"}, "text_encoder/: no CLIPTextModel can be made"),
            ("scheduler/scheduler_config.json", {"num_train_timesteps": "x"}, "scheduler/: no DDIMScheduler can be"),
            ("scheduler/scheduler_config.json", None, "scheduler/: no DDIMScheduler can be made"),
            ("tokenizer/tokenizer.json", b"{}", "tokenizer/: no CLIPTokenizer can be made"),
            ("tokenizer/tokenizer.json", None, "tokenizer/ holds neither tokenizer.json nor vocab.json"),
        ],
    )
    def test_that_are_damaged_or_missing(self, folder: Path, file: str, damage: Any, said: str) -> None:
        if isinstance(damage, dict):
            edit(folder / file, **damage)
        elif damage is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(damage)
        assert said in refusal(folder)

    def test_with_weights_of_something_else(self, folder: Path) -> None:
        save_file({f"x.{name}": tensor for name, tensor in load_file(folder / VAE).items()}, folder / UNET)
        assert f"{UNET}: holds weights of another network" in refusal(folder)

    def test_the_command_says_so_before_a_worker_starts(self, folder: Path, tmp_path: Path) -> None:
        check(folder)
        edit(folder / "unet" / "config.json", down_block_types=["NoBlock"])
        finished = sdopt(tmp_path, "run", *SMOKE, "model=folder", f"model.path={folder}")
        assert finished.code == 2
        assert "unet/: no UNet2DConditionModel can be made of its configuration" in finished.err
        assert "Traceback" not in finished.err
        assert not list(tmp_path.rglob("result.json"))


class TestShards:
    @pytest.mark.parametrize(
        ("variant", "form", "index"),
        [
            (None, "diffusion_pytorch_model-{}.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
            (
                "fp16",
                "diffusion_pytorch_model.fp16-{}.safetensors",
                "diffusion_pytorch_model.safetensors.index.fp16.json",
            ),
            (
                "fp16",
                "diffusion_pytorch_model-{}.fp16.safetensors",
                "diffusion_pytorch_model.safetensors.fp16.index.json",
            ),
        ],
    )
    def test_by_all_names_that_diffusers_reads(self, folder: Path, variant: str | None, form: str, index: str) -> None:
        """Only the denoiser has the variant: of the other parts, the files without one are read."""
        shard(folder / UNET, form, index)
        check(folder, variant)
        last = folder / "unet" / form.format("00002-of-00002")
        rewrite(last, lambda tensors: tensors.pop(LAYER))
        assert f"lacks 1 tensors that {index} names, such as {LAYER} in {last.name}" in refusal(folder, variant)
        last.unlink()
        assert f"lacks 1 of the 2 files in its {index}, such as {last.name}" in refusal(folder, variant)

    def test_of_a_text_encoder(self, folder: Path) -> None:
        shard(folder / TEXT, "model-{}.safetensors", "model.safetensors.index.json")
        check(folder)

    def test_of_two_savings(self, folder: Path) -> None:
        """Diffusers takes the tensor of the file that it reads last, whatever the index says."""
        shard(folder / UNET, "diffusion_pytorch_model-{}.safetensors", f"{NETWORK_WEIGHTS}.index.json")
        first, last = (folder / "unet" / f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2))
        name = min(load_file(first))
        rewrite(last, lambda tensors: tensors.update({name: load_file(first)[name]}))
        assert f"{last.name} holds {name} too, which" in refusal(folder)

    def test_without_their_index(self, folder: Path) -> None:
        shard(folder / UNET, "diffusion_pytorch_model-{}.safetensors", None)
        assert "shards without diffusion_pytorch_model.safetensors.index.json" in refusal(folder)


class TestVariants:
    def test_that_no_single_value_finds(self, folder: Path) -> None:
        """The hint of one would be the error of the other."""
        for file, variant in ((UNET, "fp16"), (VAE, "ema")):
            (folder / file).rename((folder / file).with_suffix(f".{variant}.safetensors"))
        for chosen in (None, "fp16", "ema"):
            assert "no value of model.variant finds all of them" in refusal(folder, chosen)

    def test_are_fetched_part_by_part(self) -> None:
        parts: dict[str, object] = {"unet": ["diffusers", ""], "vae": ["diffusers", ""]}
        names = [UNET, UNET.replace(".s", ".fp16.s"), VAE]
        wanted = _files(parts, "fp16", names)
        assert [name in wanted for name in names] == [False, True, True]


class TestVaeGivenApart:
    @pytest.mark.parametrize("from_hub", [False, True])
    def test_that_lost_a_tensor(
        self, composer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_hub: bool
    ) -> None:
        folder = Path(shutil.copytree(TINY_AUTOENCODER, tmp_path / "tiny"))
        monkeypatch.setattr("sdopt.options.memory.hub_network", lambda *_, **__: folder)
        given = "hub_id=somebody/tiny" if from_hub else f"path={folder}"
        chosen = ["memory=tiny_vae", f"memory.tiny_vae.{given}"]
        device = probe_device("cpu")
        assert not composer(chosen).variant("x", chosen).conflicts(device)
        rewrite(folder / NETWORK_WEIGHTS, lambda tensors: tensors.pop("decoder.layers.0.weight"))
        [found] = composer(chosen).variant("x", chosen).conflicts(device)
        assert "lacks the tensor decoder.layers.0.weight" in found


class TestPaths:
    def test_of_a_hub_cache(self, folder: Path, tmp_path: Path) -> None:
        repository = tmp_path / "hub" / "models--somebody--small"
        snapshot = repository / "snapshots" / "0123"
        shutil.copytree(folder, snapshot)
        for path in (repository, repository.parent):
            assert f"give model={snapshot}" in refusal(path)
        check(snapshot)
        (snapshot / UNET).unlink()
        (snapshot / UNET).symlink_to(tmp_path / "gone")
        assert f"{UNET} is a link to a file that is gone" in refusal(snapshot)

    def test_of_what_is_near_a_pipeline(self, folder: Path) -> None:
        assert f"give model={folder}" in refusal(folder / "unet")
        assert f"give model={folder}" in refusal(folder.parent)
        said = refusal(folder / UNET)
        assert f"give model={folder}" in said
        assert "it has no denoiser and no VAE and no text encoder" in said

    def test_of_a_lora(self, tmp_path: Path) -> None:
        file = tmp_path / "style.safetensors"
        save_file({"lora_unet_a.lora_down.weight": torch.zeros(4, 4)}, file)
        assert f"give it as lora=loaded lora.path={file}" in refusal(file)


class TestSingleFile:
    def test_has_the_same_weights(self, single: Path) -> None:
        """Read with the configurations in the package, without a hub."""
        ours, theirs = load(Model(weights="path", path=str(single))), load(Model())
        for name in ("unet", "vae", "text_encoder"):
            for key, tensor in getattr(theirs, name).state_dict().items():
                assert torch.equal(getattr(ours, name).state_dict()[key], tensor)

    @pytest.mark.parametrize("kept", [0, 100, -1])
    def test_cut_short(self, single: Path, tmp_path: Path, kept: int) -> None:
        short = tmp_path / "short.safetensors"
        short.write_bytes(single.read_bytes()[:kept])
        assert "short.safetensors is not a complete safetensors file" in refusal(short)

    def test_that_is_something_else(self, tmp_path: Path) -> None:
        """Pickled, it is refused by its name, and under another name by its content; nothing runs it."""
        pickled = tmp_path / "model.ckpt"
        torch.save({"state_dict": {}}, pickled)
        assert "a pickled file can run any code" in refusal(pickled)
        renamed = pickled.rename(tmp_path / "model.safetensors")
        assert "not a complete safetensors file" in refusal(renamed)
        (other := tmp_path / "model.gguf").write_bytes(b"GGUF")
        assert "neither the folder of a diffusers pipeline nor a .safetensors file" in refusal(other)

    def test_of_another_architecture(self, single: Path) -> None:
        said = "not of the architecture model=sd15: a StableDiffusionPipeline with 144 text channels"
        with pytest.raises(UsageError, match=said):
            require_model(Model("sd15", "path", str(single)))

    @pytest.mark.parametrize(
        ("lost", "named"),
        [
            ("model.diffusion_model.output_blocks.2.1.norm.weight", "up_blocks.1.attentions.0.norm.weight"),
            ("first_stage_model.decoder.mid.attn_1.q.weight", "decoder.mid_block.attentions.0.to_q.weight"),
            ("cond_stage_model.transformer.text_model.final_layer_norm.bias", "final_layer_norm.bias"),
        ],
    )
    def test_that_lost_a_tensor(self, original: Tensors, tmp_path: Path, lost: str, named: str) -> None:
        file = tmp_path / "merged.safetensors"
        save_file({name: tensor for name, tensor in original.items() if name != lost}, file)
        assert f"merged.safetensors: lacks the tensor {named}" in refusal(file)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("model.diffusion_model.time_embed.cond_proj.weight", "does not have"),
            ("model.diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.scale_weight", "holds quantized"),
            ("control_model.input_blocks.0.0.weight", "of a further network"),
            ("somebody.adds.this.weight", "of a further network"),
        ],
    )
    def test_with_what_would_be_left_out(self, original: Tensors, tmp_path: Path, name: str, said: str) -> None:
        save_file(original | {name: torch.zeros(1, 1)}, tmp_path / "other.safetensors")
        found = refusal(tmp_path / "other.safetensors")
        assert said in found
        assert name in found

    def test_with_numbers_that_are_not_finite(self, original: Tensors, tmp_path: Path) -> None:
        file, name = tmp_path / "other.safetensors", "first_stage_model.decoder.conv_out.bias"
        save_file(original | {name: original[name] * float("nan")}, file)
        assert f"holds numbers in {name} that are not finite" in refusal(file)
        # Averages are left out: only training uses them.
        save_file(original | {"model_ema.decay": torch.tensor(float("nan"))}, file)
        check(file)

    def test_with_what_is_ignored_rightly(self, original: Tensors, tmp_path: Path) -> None:
        beside = ("alphas_cumprod", "model_ema.decay", "model_ema.diffusion_modelinput_blocks00weight")
        trained = ("first_stage_model.loss.logvar", "cond_stage_model.logit_scale")
        file = tmp_path / "ema.safetensors"
        save_file(original | {name: torch.zeros(1) for name in (*beside, *trained)}, file)
        check(file)

    @pytest.mark.parametrize(("channels", "kind"), [(17, "for inpainting only"), (16, "edits an image")])
    def test_with_a_further_input(self, original: Tensors, tmp_path: Path, channels: int, kind: str) -> None:
        first = {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(96, channels, 3, 3)}
        save_file(original | first, tmp_path / "other.safetensors")
        found = refusal(tmp_path / "other.safetensors")
        assert kind in found
        assert f"takes {channels} channels" in found

    @pytest.mark.parametrize("name", ["sd15", "sd21", pytest.param("sdxl", marks=pytest.mark.slow)])
    def test_of_a_published_size_passes(self, name: str, tmp_path: Path) -> None:
        """Its family is found, and every tensor after diffusers' renaming; a sparse file has the header alone."""
        file = tmp_path / f"{name}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for key, shape in original_names(ARCHITECTURES / name).items():
            stop = start + 2 * torch.Size(shape).numel()
            header[key] = {"dtype": "F16", "shape": shape, "data_offsets": [start, stop]}
            start = stop
        content = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(len(content).to_bytes(8, "little") + content)
            out.truncate(8 + len(content) + start)
            for key in header.keys() - {"__metadata__"}:
                out.seek(8 + len(content) + header[key]["data_offsets"][0])
                out.write(b"\x00\x3c")  # a one in each: zeros alone are a broken download
        if name == "sd21":
            with pytest.raises(UsageError, match="model=sd21 or model=sd21_base"):
                family_of(file)
        else:
            assert family_of(file) == name
        model = Model(name, "path", str(file))
        require_model(model)
        require_parts(model)
