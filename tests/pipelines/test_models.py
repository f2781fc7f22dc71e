"""Where models come from: architectures, random weights, folders, files; schedulers; and at their full size (slow)."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdopt.config.composer import HydraComposer
from sdopt.config.paths import CONF
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from sdopt.pipelines.parts import networks_of
from sdopt.pipelines.random_weights import build_pipeline, empty_network
from sdopt.pipelines.sampling import scheduler_class
from sdopt.pipelines.weights import load_tokenizer
from sdopt.record.records import Status
from sdopt.schema import Model
from tests.command import sdopt
from tests.fixtures import Compose, operations_of
from tests.pipelines.loaded import latents, load, problem
from tests.pipelines.single_file import edit

Composers = type[HydraComposer]
EMOJI = PACKAGED / "emoji"
FULL = ("sd15", "sd21", "sd21_base", "sdxl")


def parameters(name: str, component: str) -> int:
    library, class_name = json.loads(
        (ARCHITECTURES / name / "model_index.json").read_text()
    )[component]
    network = empty_network(ARCHITECTURES / name / component, library, class_name)
    assert all(parameter.is_meta for parameter in network.parameters())
    return sum(parameter.numel() for parameter in network.parameters())


HALF_LARGEST = torch.finfo(torch.float16).max


def largest_outputs(pipe: Any) -> dict[str, float]:
    """Keeps the largest number that each module of a pipeline puts out from now on."""
    largest: dict[str, float] = {}

    def note(path: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                largest[path] = max(largest.get(path, 0.0), output.abs().max().item())

        return hook

    for key, network in networks_of(pipe).items():
        for path, module in network.named_modules():
            module.register_forward_hook(note(f"{key}.{path}"))
    return largest


class TestArchitectures:
    @pytest.mark.parametrize(
        ("name", "component", "count"),
        [
            ("sd15", "unet", 859_520_964),
            ("sd15", "vae", 83_653_863),
            ("sd15", "text_encoder", 123_060_480),
            ("sd21", "unet", 865_910_724),
            ("sd21", "text_encoder", 340_387_840),
            ("sdxl", "unet", 2_567_463_684),
            ("sdxl", "text_encoder_2", 694_659_840),
        ],
    )
    def test_have_the_published_number_of_parameters(
        self, name: str, component: str, count: int
    ) -> None:
        assert parameters(name, component) == count

    @pytest.mark.parametrize(
        ("name", "size"),
        [("sd15", 512), ("sd21", 768), ("sd21_base", 512), ("sdxl", 1024)],
    )
    def test_are_run_at_the_size_that_they_were_trained_at(
        self, composer: Composers, name: str, size: int
    ) -> None:
        variant = composer([f"model={name}", "model.weights=random"]).variant(None)
        sample = json.loads(
            (ARCHITECTURES / name / "unet" / "config.json").read_text()
        )["sample_size"]
        assert variant.size == size == 8 * sample
        assert variant.guidance_scale == (5.0 if name == "sdxl" else 7.5)
        assert variant.prompts[0].startswith("a lighthouse")

    def test_each_has_an_option_and_each_option_its_architecture(self) -> None:
        options = {path.stem for path in (CONF / "model").glob("*.yaml")}
        options -= {"emoji", "emoji_dit", "folder", "factory", "altdiffusion"}
        options -= {
            "sd_turbo",
            "sdxl_turbo",
            "sd35_large_turbo",
        }  # distilled from others, whose architecture they have
        assert (
            options
            == {path.parent.name for path in ARCHITECTURES.glob("*/model_index.json")}
            > set(FULL)
        )


class TestTokenizer:
    def test_starts_and_ends_prompts_as_clip_does(self) -> None:
        tokenizer = load_tokenizer(ARCHITECTURES / "sd15" / "tokenizer")
        cat, dog = (
            tokenizer(text).input_ids
            for text in ("a photo of a cat", "a photo of a dog")
        )
        assert cat[0] == dog[0] == 49406
        assert cat[-1] == dog[-1] == 49407
        assert cat != dog
        assert cat[1:-1] == [
            320,
            1125,
            539,
            320,
            2368,
        ]  # as CLIP's authors publish them

    @pytest.mark.parametrize(
        ("folder", "pad"),
        [
            ("sd15/tokenizer", 49407),
            ("sd21/tokenizer", 0),
            ("sdxl/tokenizer", 49407),
            ("sdxl/tokenizer_2", 0),
        ],
    )
    def test_pads_as_each_model_learnt_it(self, folder: str, pad: int) -> None:
        tokenizer = load_tokenizer(ARCHITECTURES / folder)
        assert tokenizer.model_max_length == 77
        ids = tokenizer(
            ["a cat", "日本 " * 90],
            padding="max_length",
            max_length=77,
            truncation=True,
        ).input_ids
        assert [len(row) for row in ids] == [77, 77]
        end = ids[0].index(49407)
        assert ids[0][0] == 49406
        assert set(ids[0][end + 1 :]) == {pad}
        assert ids[1][-1] == 49407
        assert max(max(row) for row in ids) == 49407


@pytest.fixture(scope="module")
def random_pipe() -> Any:
    """The reference model's architecture with random weights, in single precision."""
    return load(Model(weights="random"))


class TestRandomWeights:
    def test_are_the_same_in_every_type_and_every_time(self, random_pipe: Any) -> None:
        half = load(Model(weights="random"), dtype=torch.bfloat16)
        for name in ("unet", "vae", "text_encoder"):
            theirs = dict(getattr(half, name).named_parameters())
            for key, parameter in getattr(random_pipe, name).named_parameters():
                assert theirs[key].dtype == torch.bfloat16
                assert torch.equal(parameter.bfloat16(), theirs[key])

    def test_keep_the_scale_of_what_passes(self, random_pipe: Any) -> None:
        pipe = random_pipe
        layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].ff.net[2]
        states = torch.randn(64, layer.in_features)
        assert layer(states).std().item() == pytest.approx(1, rel=0.1)
        assert pipe.unet.conv_norm_out.weight.eq(1).all()
        assert pipe.unet.conv_norm_out.bias.eq(0).all()
        two = [
            pipe.unet.conv_in.weight.flatten()[:500],
            pipe.unet.conv_out.weight.flatten()[:500],
        ]
        assert not torch.equal(*two)

    def test_see_the_prompt(self, random_pipe: Any) -> None:
        """A pipeline that ignored it would hide what an option does to the text encoder."""
        fox, boat = (latents(random_pipe, text, steps=1) for text in ("fox", "boat"))
        assert (fox - boat).abs().mean() > 1e-3

    def test_stay_far_from_what_float16_overflows_at(self, random_pipe: Any) -> None:
        """In float32, whose layers are fast on a CPU: what each of them puts out is seen."""
        largest = largest_outputs(pipe := random_pipe)
        found = latents(pipe, steps=10)
        assert found.abs().max() < 1000
        pipe.vae.decode(found / pipe.vae.config.scaling_factor)
        assert 1 < max(largest.values()) < HALF_LARGEST / 10


@pytest.fixture(scope="session")
def small_xl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an SDXL in everything but its widths, with random weights."""
    folder = tmp_path_factory.mktemp("xl") / "small"
    shutil.copytree(ARCHITECTURES / "sdxl", folder)
    few: dict[str, Any] = {"num_attention_heads": 2, "num_hidden_layers": 2}
    edit(
        folder / "text_encoder" / "config.json",
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        **few,
    )
    edit(
        folder / "text_encoder_2" / "config.json",
        hidden_size=48,
        intermediate_size=96,
        projection_dim=48,
        **few,
    )
    vae = {
        "block_out_channels": [16, 16, 32, 32],
        "norm_num_groups": 8,
        "layers_per_block": 1,
        "sample_size": 64,
    }
    edit(folder / "vae" / "config.json", **vae)
    edit(
        folder / "unet" / "config.json",
        block_out_channels=[32, 32, 64],
        attention_head_dim=[2, 2, 4],
        cross_attention_dim=80,
        transformer_layers_per_block=[1, 1, 1],
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=48 + 6 * 8,
        sample_size=8,
    )
    from diffusers import StableDiffusionXLPipeline

    build_pipeline(
        folder, StableDiffusionXLPipeline, "cpu", torch.float32
    ).save_pretrained(folder)
    return folder


def test_two_text_encoders_pool_at_the_end_of_the_text(small_xl: Path) -> None:
    pipe = load(Model("folder", "path", str(small_xl)))
    ids = pipe.tokenizer_2(
        ["fox", "a fox asleep"],
        padding="max_length",
        max_length=77,
        return_tensors="pt",
    ).input_ids
    ends = (ids == 49407).int().argmax(dim=1)
    assert 0 < ends[0] < ends[1] < 76
    output = pipe.text_encoder_2(ids)
    expected = pipe.text_encoder_2.text_projection(
        output.last_hidden_state[torch.arange(2), ends]
    )
    assert torch.allclose(output.text_embeds, expected, atol=1e-5)


class TestFolders:
    def test_of_one_variant(self, composer: Composers, tmp_path: Path) -> None:
        shutil.copytree(EMOJI, tmp_path / "model")
        for file in (tmp_path / "model").glob("*/*.safetensors"):
            file.rename(file.with_suffix(".fp16.safetensors"))
        chosen = ["model=folder", f"model.path={tmp_path / 'model'}"]
        assert "only files of a variant (fp16)" in problem(composer, *chosen)
        model = composer([*chosen, "model.variant=fp16"]).current.model
        assert model.variant == "fp16"
        assert torch.equal(latents(load(model)), latents(load(Model())))
        wrong = ("model=folder", f"model.path={EMOJI}", "model.variant=fp16")
        assert "no part holds files of model.variant=fp16" in problem(composer, *wrong)

    def test_of_another_architecture_than_is_named(self, composer: Composers) -> None:
        found = problem(
            composer, "model=sdxl", "model.weights=path", f"model.path={EMOJI}"
        )
        assert (
            "not of the architecture model=sdxl: a StableDiffusionPipeline with cross_attention_dim=144"
            in found
        )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "model=sd15 model.weights=packaged",
            "model.name=sd15: packaged models are emoji, emoji_dit; choose model.weights=hub",
        ),
        ("model.weights=hub", "model.hub_id: must be given with model.weights=hub"),
        (
            "model=folder model.path=null model.weights=random",
            "model.weights=random: the architecture of 'folder'",
        ),
        (
            "model=sdxl model.weights=path",
            "model.path: must be given with model.weights=path",
        ),
        ("model.path=x", "model.path=x: there is no such file or folder"),
        (
            "model=x.safetensors",
            "model=x.safetensors: there is no such file or folder; the named models are",
        ),
        (
            "model=https://civitai.com/models/1",
            "model=https://civitai.com/models/1: there is no such file or folder",
        ),
        (
            "model.path=x model.weights=hub",
            "model.path=x: only applies to model.weights=path",
        ),
        (
            "model=sd15 model.weights=random model.revision=v",
            "model.revision=v: only applies to model.weights=hub",
        ),
        (
            "model.weights=random model.variant=fp16",
            "model.variant=fp16: only applies to a repository or a folder",
        ),
        ("model.size=100", "model.size=100: Input should be a multiple of 8"),
        (
            "model=sdxl model.weights=download",
            "model.weights=download: Input should be 'packaged', 'hub'",
        ),
    ],
)
def test_weights_that_a_model_does_not_offer(
    composer: Composers, overrides: str, said: str
) -> None:
    assert problem(composer, *overrides.split()).startswith(said)


def test_a_file_of_an_architecture_that_sdopt_does_not_have(
    composer: Composers, tmp_path: Path
) -> None:
    path = tmp_path / "other.safetensors"
    names = [
        "model.diffusion_model.attn2.to_k.weight",
        "first_stage_model.a",
        "cond_stage_model.a",
    ]
    save_file({name: torch.zeros(4, 7) for name in names}, path)
    assert "its denoiser reads 7 channels of text" in problem(composer, f"model={path}")
    (link := tmp_path / "link.safetensors").symlink_to(path)
    path.unlink()
    assert "there is no such file or folder" in problem(composer, f"model={link}")


SCHEDULERS = ["ddim", "plms", "euler", "dpmpp_2m", "unipc"]


@pytest.mark.parametrize("architecture", ["sd21", "sdxl", "emoji"])
@pytest.mark.parametrize("option", SCHEDULERS)
def test_every_scheduler_finds_what_a_perfect_denoiser_predicts(
    composer: Composers, architecture: str, option: str
) -> None:
    """Whatever the model was trained to predict, noise or velocity (Salimans and Ho 2022), and however it is spaced."""
    chosen = composer([f"scheduler={option}"]).current.scheduler
    folder = (
        (PACKAGED if architecture == "emoji" else ARCHITECTURES)
        / architecture
        / "scheduler"
    )
    config = json.loads((folder / "scheduler_config.json").read_text())
    scheduler = scheduler_class(chosen).from_config(config, **chosen.options)
    assert scheduler.config.prediction_type == config["prediction_type"]
    assert (scheduler.config.beta_start, scheduler.config.beta_end) == (0.00085, 0.012)
    scheduler.set_timesteps(30)
    clean = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(1))
    sample = (
        torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(0))
        * scheduler.init_noise_sigma
    )
    for step in scheduler.timesteps:
        scaled = scheduler.scale_model_input(sample, step)
        kept = scheduler.alphas_cumprod[int(step)]
        noise = (scaled - kept.sqrt() * clean) / (1 - kept).sqrt()
        velocity = kept.sqrt() * noise - (1 - kept).sqrt() * clean
        predicted = velocity if config["prediction_type"] == "v_prediction" else noise
        sample = scheduler.step(predicted, step, sample).prev_sample
    assert (sample - clean).abs().mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_activations_are_far_from_the_limit_of_half_precision(name: str) -> None:
    """Every module's output, in the first steps and for latents as large as fifty of them can make: see `_draw`."""
    pipe = load(Model(name, "random"), dtype=torch.bfloat16)
    largest = largest_outputs(pipe)
    noise = torch.randn(
        (1, 4, 8, 8), generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    size = {"height": 64, "width": 64, "output_type": "latent", "guidance_scale": 7.5}
    pipe("a red fox", num_inference_steps=2, latents=noise, **size)
    # Deterministic sampling adds, over all steps, at most the noise's range times what is predicted: below 15 times 10.
    found = pipe("a red fox", num_inference_steps=1, latents=noise * 150, **size).images
    pipe.vae.decode(found / pipe.vae.config.scaling_factor)
    assert len(largest) > 500
    assert not any(math.isnan(value) for value in largest.values())
    assert (
        max(value for path, value in largest.items() if not path.startswith("vae"))
        < HALF_LARGEST / 20
    )
    assert max(largest.values()) < HALF_LARGEST / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tflop"), [("sd15", 0.803), ("sd21", 2.149), ("sdxl", 6.761)]
)
def test_operations_are_the_published_ones(
    variant: Compose, name: str, tflop: float
) -> None:
    """Of one forward pass per sample; two samples a step with guidance."""
    chosen = variant(f"model={name}", "model.weights=random")
    index = json.loads((ARCHITECTURES / name / "model_index.json").read_text())

    class Pipe:
        config = index
        tokenizer = type("Tokenizer", (), {"model_max_length": 77})
        scheduler = type(
            "Steps",
            (),
            {
                "config": {},
                "set_timesteps": lambda self, steps: None,
                "timesteps": range(1),
            },
        )()

    for component in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if component in index:
            setattr(
                Pipe,
                component,
                empty_network(ARCHITECTURES / name / component, *index[component]),
            )
    pipe: Any = Pipe()
    counted = operations_of(pipe, chosen)
    assert counted["denoiser"] == pytest.approx(2 * tflop, rel=1e-3)
    decoder = {"sd15": 2.51, "sd21": 5.75, "sdxl": 10.47}[name]
    assert counted["vae_decoder"] == pytest.approx(decoder, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        ("model=sd15",),
        # T5 takes most of a call of 300 tokens.
        ("model=pixart_sigma", "model.max_sequence_length=32"),
        ("model=sd35_medium", "model.max_sequence_length=32"),
    ],
    ids=lambda chosen: chosen[0].removeprefix("model="),
)
def test_a_full_size_model_finishes_on_a_cpu(
    tmp_path: Path, chosen: tuple[str, ...]
) -> None:
    """Up to 16 GiB of weights."""
    finished = sdopt(
        tmp_path,
        *(
            "run",
            *chosen,
            "model.weights=random",
            "workload.steps=2",  # DDIM begins a single one at no noise
            "workload.size=256",
            "protocol=smoke",
        ),
        *("quality=none", "tracking=none", "hardware=cpu", "workload.prompt_count=1"),
    )
    assert finished.code == 0, finished.err
    assert [row.status for row in finished.result.variants] == [Status.OK] * 2
    assert "Random weights" in finished.shown
    assert (finished.result.variants[0].tflop_per_image or 0) > 0.5
