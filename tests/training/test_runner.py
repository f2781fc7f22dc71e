"""The command line of `sdopt train-reference`: mistakes are named, nothing is trained by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runners.train_reference import main
from sdopt.training.config import STAGES


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("nonsense=1", "nonsense: unknown key; `sdopt train-reference --help` lists all"),
        ("denoiser.batchsize=1", "denoiser.batchsize: unknown key; did you mean denoiser.batch_size"),
        ("~clip.target", "clip.target: must be given"),
        (
            "stage=nonsense",
            "tokenizer, autoencoder, tiny_autoencoder, denoiser, loras, few_steps, clip, export",
        ),
        ("clip=3", "clip: must be a group of keys, not 3"),
        ("tiny_autoencoder.latent_noise=-1", "tiny_autoencoder.latent_noise=-1.0: must be at least 0"),
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


def test_all_wrong_values_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("denoiser.ema", "autoencoder.share", "clip.hidden_patches", "threads", "seed")
    values = (1, 2, 1, 0, "many")
    assert main([f"{key}={value}" for key, value in zip(keys, values, strict=True)]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(keys)
    assert all(any(line.startswith(f"sdopt: {key}") for line in shown) for key in keys)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "data"])
def test_a_stage_without_its_predecessor_says_which_to_run(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"folder={tmp_path}", f"stage={stage}"]) == 2
    assert "stage=data" in capsys.readouterr().err


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in ("budget_minutes", "caption_dropout", *STAGES))
