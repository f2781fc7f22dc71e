"""The command line of `sdopt train-reference`: mistakes are named, nothing is trained by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runners.train_reference import configure, main
from sdopt.training.config import Stage


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("nonsense=1", "nonsense"),
        ("autoencoder.nonsense=1", "autoencoder.nonsense"),
        ("stage=nonsense", "all, data, tokenizer, autoencoder, tiny_autoencoder, denoiser, loras, clip, export"),
        ("device=tpu", "auto, cpu, cuda"),
        ("seed=many", "seed"),
        ("denoiser.batch_size=1.5", "denoiser.batch_size"),
        ("denoiser.batch_size=0", "denoiser.batch_size=0: must be positive"),
        ("loras.rank=0", "loras.rank=0: must be positive"),
        ("loras.held_out_concepts=0", "loras.held_out_concepts"),
        ("tiny_autoencoder.latent_noise=-1", "tiny_autoencoder.latent_noise=-1.0: must be 0 or more"),
        ("budget_minutes=-1", "budget_minutes"),
        ("seed=", "seed"),
        ("(", "("),
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


def test_all_values_out_of_range_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["denoiser.ema=1", "autoencoder.share=2", "clip.hidden_patches=1", "threads=0"]) == 2
    shown = capsys.readouterr().err
    assert all(key in shown for key in ("denoiser.ema", "autoencoder.share", "clip.hidden_patches", "threads"))


@pytest.mark.parametrize(
    "stage", ["tokenizer", "autoencoder", "tiny_autoencoder", "denoiser", "loras", "clip", "export"]
)
def test_a_stage_without_its_predecessor_says_which_to_run(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"folder={tmp_path}", f"stage={stage}"]) == 2
    assert "stage=data" in capsys.readouterr().err


def test_data_that_cannot_be_fetched_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([f"folder={tmp_path}", "stage=data"]) == 3
    assert "npm" in capsys.readouterr().err


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in ("budget_minutes", "caption_dropout", "every_minutes"))


def test_defaults_and_overrides_are_typed() -> None:
    config = configure(["stage=denoiser", "denoiser.steps=7"])
    assert config.stage is Stage.denoiser
    assert config.denoiser.steps == 7
    assert config.autoencoder.learning_rate == 1e-3
