"""The command and its mistakes; the loop; the LoRAs' updates; and every stage for a few steps (slow)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline
from torch import Tensor, nn

from runners.train_reference import main, training_config
from sdopt.apps.training import autoencoder
from sdopt.apps.training.autoencoder import (
    encode_all,
    load_autoencoder,
    normalise_latents,
    pixels,
)
from sdopt.apps.training.captions import generate
from sdopt.apps.training.config import STAGES, TrainingConfig
from sdopt.apps.training.data import Dataset, PictureRecord, draw_style, icon_key
from sdopt.apps.training.denoiser import join, loss_weights
from sdopt.apps.training.evaluation import Evaluation
from sdopt.apps.training.loop import (
    DivergenceError,
    generator,
    pick_device,
    pick_precision,
    train,
)
from sdopt.apps.training.loras import TARGETS, add_lora
from sdopt.apps.training.networks import build_autoencoder, build_denoiser
from sdopt.apps.training.packages import STYLES, Style
from sdopt.apps.training.stages import run
from sdopt.errors import UsageError
from sdopt.reference import MODEL
from tests.apps.training.test_evaluation import Thumbnails


def train_toy(
    folder: Path,
    *,
    steps: int,
    resume: bool,
    stop_at: int | None = None,
    batch_size: int = 16,
    nan: bool = False,
) -> nn.Module:
    """Fit a line; `stop_at` interrupts before that step, as a user would."""
    torch.manual_seed(0)
    network = nn.Linear(4, 1)

    def loss(step: int) -> Tensor:
        if step == stop_at:
            raise KeyboardInterrupt
        x = torch.randn(16, 4, generator=generator(0, 9, step))
        error: Tensor = network(x) - x.sum(dim=1, keepdim=True)
        return error.square().mean() * (math.nan if nan else 1.0)

    options = [
        f"folder={folder}",
        f"resume={resume}",
        "checkpoint_minutes=1e-9",
        "device=cpu",
    ]
    options += [
        f"autoencoder.{key}"
        for key in (f"steps={steps}", f"batch_size={batch_size}", "learning_rate=0.05")
    ]
    return train(training_config(options), "autoencoder", network, loss, pictures=16)


def state(folder: Path) -> dict[str, Any]:
    """What the checkpoint says."""
    kept: dict[str, Any] = json.loads(
        (folder / "autoencoder/checkpoint/state.json").read_text()
    )
    return kept


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = train_toy(tmp_path / "whole", steps=30, resume=False)
    with pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path / "parts", steps=30, resume=True, stop_at=17)
    assert state(tmp_path / "parts")["steps"] == 17
    parts = train_toy(tmp_path / "parts", steps=30, resume=True)
    assert state(tmp_path / "parts")["steps"] == 30
    for left, right in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(left, right)


def test_without_resume_a_run_starts_afresh_and_a_finished_one_is_not_repeated(
    tmp_path: Path,
) -> None:
    train_toy(tmp_path, steps=5, resume=False)
    train_toy(tmp_path, steps=5, resume=True, stop_at=0)
    train_toy(tmp_path, steps=3, resume=False)
    assert state(tmp_path)["steps"] == 3


def test_a_checkpoint_keeps_the_settings_and_those_before_them(tmp_path: Path) -> None:
    train_toy(tmp_path, steps=2, resume=True)
    assert state(tmp_path)["pictures"] == state(tmp_path)["batch_size"] == 16
    train_toy(tmp_path, steps=3, resume=True)
    assert state(tmp_path)["earlier"] == []
    train_toy(tmp_path, steps=4, resume=True, batch_size=8)
    assert state(tmp_path)["earlier"] == [{"until_step": 3, "batch_size": 16}]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="step 0"):
        train_toy(tmp_path, steps=5, resume=False, nan=True)


def test_the_rate_warms_up_and_reaches_zero_with_the_budget() -> None:
    timed = TrainingConfig(
        share=1.0, steps=None, batch_size=1, learning_rate=1.0, warmup_steps=10, background_share=0.0, ema=0.0
    )  # fmt: skip
    assert timed.progress(step=3, seconds=25, budget_s=100) == 0.25
    assert timed.rate(step=0, progress=0.0) == pytest.approx(0.1)
    assert timed.rate(step=50, progress=0.5) == pytest.approx(0.5)
    assert timed.rate(step=99, progress=1.0) == pytest.approx(0.0)
    counted = replace(timed, steps=4)
    assert counted.progress(step=1, seconds=99, budget_s=100) == 0.25


def test_loss_weights_cut_the_snr_and_keep_heavy_noise() -> None:
    weights = loss_weights(torch.tensor([0.99, 0.5, 0.001]), 5.0)
    assert torch.allclose(weights, torch.tensor([6 / 100, 1.0, 1.0]))


def test_losses_and_scores_by_hand() -> None:
    images = np.zeros((1, 64, 64, 3), np.uint8)
    black = pixels(images)
    assert black.shape == (1, 3, 64, 64)
    assert float(black.max()) == -1.0
    stripe = black.clone()
    stripe[..., 32:] = 1.0
    # Half of the pixels are off by 2: a mean error of 1, a squared one of 2, and one of 63 differences by 2.
    assert float(
        autoencoder.picture_loss(stripe, black, edge_weight=3.0)
    ) == pytest.approx(3 + 3 * 2 / 63)
    assert float(autoencoder.peak_signal_to_noise(black + 0.2, black)) == pytest.approx(
        20.0, abs=1e-4
    )
    scaling = autoencoder.scaling_factor(torch.tensor([-1.0, 1.0]), torch.zeros(2))
    assert scaling == pytest.approx(1 / math.sqrt(2))


def test_normalised_latents_leave_the_pictures_as_they_were() -> None:
    torch.manual_seed(0)
    network = build_autoencoder().eval().requires_grad_(False)
    images = np.random.default_rng(0).integers(0, 255, (12, 64, 64, 3), np.uint8)
    mean, deviation = encode_all(network, images)
    output = network.decode(mean).sample
    normalise_latents(network, mean)
    new_mean, new_deviation = encode_all(network, images)
    assert torch.allclose(new_mean.mean(dim=(0, 2, 3)), torch.zeros(8), atol=1e-4)
    assert torch.allclose(new_mean.std(dim=(0, 2, 3)), torch.ones(8), atol=1e-4)
    assert torch.allclose(
        new_deviation * mean.std(dim=(0, 2, 3))[:, None, None], deviation, rtol=1e-3
    )
    assert torch.allclose(network.decode(new_mean).sample, output, atol=1e-4)


def test_device_and_precision_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(UsageError, match="device=cuda"):
        pick_device("cuda")
    assert pick_precision("fp32", torch.device("cpu")) == "fp32"
    assert pick_precision("auto", torch.device("cpu")) in ("fp32", "bf16")


STAR = PictureRecord(
    "2B50", "star", ("night",), 5, "flat", held_out=False, unseen_background="red"
)


def test_icons_are_found_by_todays_name_or_by_the_characters() -> None:
    by_character, by_label = STYLES
    assert icon_key(STAR, by_label) == "star"
    assert icon_key(STAR, by_character) == "whitemediumstar"
    assert (
        icon_key(replace(STAR, concept="2B50-FE0F"), by_character) == "whitemediumstar"
    )
    assert icon_key(replace(STAR, concept="1F469-200D-2695-FE0F"), by_character) == ""


def test_a_style_has_only_what_the_denoiser_knows(
    dataset: Dataset, styles: tuple[Style, ...], work_folder: Path
) -> None:
    discs, triangles = (
        draw_style(
            style, dataset, work_folder / "packages", held_out_concepts=3, seed=0
        )
        for style in styles
    )
    known = {record.concept for record in dataset.records if not record.held_out}
    assert {record.concept for record in discs.records} == known
    assert len(discs) == len(triangles) == 12
    assert len(discs.indices(held_out=True)) == 3
    assert {record.style for record in discs.records} == {"fxemoji"}
    assert tuple(discs.images[0][32, 32]) == (0, 0, 0)
    assert tuple(triangles.images[0][32, 32]) == (0, 128, 0)
    with pytest.raises(
        UsageError, match=r"loras.held_out_concepts=12: .* only 12 concepts"
    ):
        draw_style(
            styles[0], dataset, work_folder / "packages", held_out_concepts=12, seed=0
        )


def test_only_the_updates_train_and_they_start_without_effect() -> None:
    denoiser = build_denoiser().eval()
    inputs = torch.randn(2, 8, 8, 8), torch.tensor([10, 900]), torch.randn(2, 24, 144)
    with torch.no_grad():
        before = denoiser(*inputs).sample
    updates = add_lora(denoiser, rank=2)
    trained = {
        name
        for name, parameter in denoiser.named_parameters()
        if parameter.requires_grad
    }
    assert len(trained) == len(updates) > 0
    assert all(".lora_" in name for name in trained)
    assert all(
        any(f"{target}.lora_A" in name for name in trained) for target in TARGETS
    )
    with torch.no_grad():
        assert torch.allclose(denoiser(*inputs).sample, before)


def losses(folder: Path) -> list[float]:
    """The logged losses of a stage."""
    return [
        json.loads(line)["loss"]
        for line in (folder / "log.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("styles")
def test_every_stage_trains_resumes_and_exports(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdopt.apps.training.loop.LINE_SECONDS", 0.0)
    small = {
        "autoencoder": 5,
        "denoiser": 5,
        "transformer": 5,
        "tiny_autoencoder": 5,
        "loras": None,
    }
    common = [
        f"folder={work_folder}",
        "device=cpu",
        "arithmetic=fp32",
        "loras.held_out_concepts=2",
    ]
    common += [f"{stage}.batch_size=8" for stage in small]
    common += [
        f"{stage}.warmup_steps={steps}" for stage, steps in small.items() if steps
    ]
    places = {
        "target": "emoji",
        "companions": "companions",
        "contact_sheet": "sheet.png",
    }
    common += [f"export.{key}={work_folder}/{place}" for key, place in places.items()]
    common += [
        f"transformer.target={work_folder}/emoji_dit",
        f"transformer.contact_sheet={work_folder}/sheet_dit.png",
    ]

    def train_stage(stage: str, *overrides: str) -> None:
        run(training_config([*common, f"stage={stage}", *overrides]))

    for stage in ("autoencoder", "tiny_autoencoder", "denoiser"):
        train_stage(stage, f"{stage}.steps=40")
        logged = losses(work_folder / stage)
        assert logged[-1] < 0.9 * logged[0], stage
    assert 0 < load_autoencoder(work_folder / "autoencoder").config.scaling_factor < 100

    train_stage("denoiser", "denoiser.steps=45")
    assert (
        json.loads((work_folder / "denoiser/checkpoint/state.json").read_text())[
            "steps"
        ]
        == 45
    )
    assert len(losses(work_folder / "denoiser")) == 45

    train_stage("transformer", "transformer.steps=40")
    assert (
        losses(work_folder / "transformer")[-1]
        < 0.9 * losses(work_folder / "transformer")[0]
    )
    train_stage("transformer", "transformer.steps=42")
    assert len(losses(work_folder / "transformer")) == 42
    assert (work_folder / "sheet_dit.png").exists()
    assert "42 steps of 8 latents" in (work_folder / "emoji_dit/README.md").read_text()
    flux = FluxPipeline.from_pretrained(
        work_folder / "emoji_dit", local_files_only=True
    )
    assert generate(flux, ["red square"], seed=0, num_inference_steps=2).shape == (
        1,
        64,
        64,
        3,
    )

    with pytest.raises(UsageError, match="stage=loras"):
        train_stage("export")
    train_stage("loras", "loras.steps=1")
    train_stage("few_steps", "few_steps.steps=2", "few_steps.trajectories=2")
    train_stage("export")
    exported = StableDiffusionPipeline.from_pretrained(
        work_folder / "emoji", local_files_only=True
    )
    assert exported.text_encoder.dtype == exported.unet.dtype == torch.float32
    assert (work_folder / "sheet.png").exists()
    prompts = json.loads((work_folder / "prompts.json").read_text())
    assert set(prompts) == {"gate", "held_out", "training", "contact_sheet"}
    card = (work_folder / "emoji/README.md").read_text()
    assert "45 steps of 8 latents" in card
    assert "4 concepts, chosen by seed, were held out" in card
    files = {
        "tiny_autoencoder": [
            "README.md",
            "recipe.json",
            "config.json",
            "diffusion_pytorch_model.safetensors",
        ],
        "loras": [
            "README.md",
            "recipe.json",
            "fxemoji.safetensors",
            "high_contrast.safetensors",
            "few_steps",
        ],
    }
    found = {
        str(file.relative_to(work_folder / "companions"))
        for file in work_folder.glob("companions/*/*")
    }
    assert found == {
        f"{folder}/{name}" for folder, names in files.items() for name in names
    }
    tiny, data = (
        work_folder / "companions/tiny_autoencoder",
        Dataset.load(work_folder / "data"),
    )
    assert "40 steps of 8 pictures" in (tiny / "README.md").read_text()
    captions = {"training": data.labels(held_out=False)[:4]}
    assert (
        len(Evaluation(exported, data, captions, Thumbnails()).tiny_autoencoder(tiny))
        == 3
    )


@pytest.mark.slow
def test_a_lora_learns_a_style_and_leaves_the_model_as_it_was(
    work_folder: Path, styles: tuple[Style, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the packaged weights: on those of a few steps there is nothing for a LoRA to restyle."""
    from safetensors.torch import save_file

    monkeypatch.setattr("sdopt.apps.training.loop.LINE_SECONDS", 0.0)
    monkeypatch.setattr("sdopt.apps.training.evaluation.COMPARED", 4)
    packaged = StableDiffusionPipeline.from_pretrained(MODEL, dtype=torch.float32)
    packaged.vae.save_pretrained(work_folder / "autoencoder/model")
    (work_folder / "denoiser/checkpoint").mkdir(parents=True)
    networks = join(packaged.unet, packaged.text_encoder).state_dict()
    save_file(
        {k: v.contiguous() for k, v in networks.items()},
        work_folder / "denoiser/checkpoint/average.safetensors",
    )
    exported = work_folder / "companions/loras"
    common = [
        f"folder={work_folder}",
        "stage=loras",
        "device=cpu",
        "arithmetic=fp32",
        "loras.held_out_concepts=2",
    ]
    common += [
        f"export.companions={exported.parent}",
        "loras.batch_size=16",
        "loras.warmup_steps=1",
        "loras.steps=30",
    ]
    run(training_config(common))
    recipe = json.loads((exported / "recipe.json").read_text())
    for style in styles:
        log = losses(work_folder / "loras" / style.name)
        assert log[-1] < 0.8 * log[0]
        assert recipe[style.name]["pictures"] == 10
    data = Dataset.load(work_folder / "data")
    evaluation = Evaluation(packaged, data, {}, Thumbnails())
    figures = {
        f.figure: f for f in evaluation.loras(exported, work_folder / "packages")
    }
    for style in styles:
        before, after = figures[
            f"{style.name}, 4 concepts trained on: distance to the style's drawing"
        ].values
        assert after < before


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("nonsense=1", "nonsense: "),
        ("denoiser.batchsize=1", "denoiser.batchsize: "),
        ("~clip.target", "clip.target: Field required"),
        (
            "stage=nonsense",
            "stage=nonsense: Input should be 'all', 'data', 'tokenizer'",
        ),
        ("clip=3", "clip=3: Input should be a dictionary"),
        (
            "tiny_autoencoder.latent_noise=-1",
            "tiny_autoencoder.latent_noise=-1: Input should be greater",
        ),
        ("export.companions=${folder}", "must be another folder than `folder`"),
    ],
)
def test_a_mistake_exits_with_2_and_names_the_key(
    override: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"folder={tmp_path}", override]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert "Traceback" not in shown.err
    assert not list(tmp_path.iterdir())


def test_all_wrong_values_are_reported_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = (
        "denoiser.ema",
        "autoencoder.share",
        "clip.hidden_patches",
        "threads",
        "seed",
    )
    values = (1, 2, 1, 0, "many")
    assert (
        main([f"{key}={value}" for key, value in zip(keys, values, strict=True)]) == 2
    )
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(keys)
    assert all(any(line.startswith(f"sdopt: {key}") for line in shown) for key in keys)


def test_a_stage_without_its_predecessor_says_which_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage in STAGES[1:]:
        assert main([f"folder={tmp_path}", f"stage={stage}"]) == 2
        assert "stage=data" in capsys.readouterr().err
    assert main([f"folder={tmp_path}", f"stage={stage}", f"start_from={tmp_path}"]) == 2
    assert "choose a pipeline folder" in capsys.readouterr().err


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in ("budget_minutes", "caption_dropout", *STAGES))
