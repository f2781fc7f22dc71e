"""Builds the reference model's networks, 9.4 million parameters, and its tokenizer, CLIP's byte-level BPE."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DDIMScheduler,
    UNet2DConditionModel,
)
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
)

from sdopt.apps.training.data import IMAGE_SIZE
from sdopt.apps.training.loop import missing_stage
from sdopt.errors import UsageError
from sdopt.pipelines.weights import Header

VOCABULARY = 2048
"""Entries of the vocabulary, including the two special tokens."""

LENGTH = 24
"""Tokens of a caption after truncation or padding. The cost of cross-attention grows with this length, and the longest
training caption has about 20 tokens."""

LATENT_CHANNELS = 8
"""Four channels, as in Stable Diffusion, would give 256 numbers per 64×64 picture, too few for outlines."""

LATENT_SIZE = IMAGE_SIZE // 8

TEXT_WIDTH = 144

CLIP_WIDTH = 128
"""Dimension of a CLIP embedding. FID's covariance needs more pictures than this number."""


def build_autoencoder() -> AutoencoderKL:
    """Builds an untrained autoencoder: (n, 3, 64, 64) in [-1, 1] to latents (n, 8, 8, 8) and back."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=IMAGE_SIZE,
    )


def build_tiny_autoencoder() -> AutoencoderTiny:
    """Builds an untrained tiny autoencoder: (n, 3, 64, 64) to *scaled* latents (n, 8, 8, 8) and back.

    A decoder spends most of its time at full resolution, so blocks are only at low resolutions. Sixteen channels are
    the width of a vector register; more channels were slower than their operation count suggests.
    """
    return AutoencoderTiny(
        encoder_block_out_channels=(16,) * 4,
        decoder_block_out_channels=(16,) * 4,
        num_encoder_blocks=(1, 3, 3, 3),
        num_decoder_blocks=(4, 4, 2, 0),
        latent_channels=LATENT_CHANNELS,
    )


def build_denoiser() -> UNet2DConditionModel:
    """Builds an untrained denoiser for latents (n, 8, 8, 8), with cross-attention at both resolutions (8 and 4)."""
    return UNet2DConditionModel(
        sample_size=LATENT_SIZE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(96, 160),
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=TEXT_WIDTH,
        norm_num_groups=16,
    )


def build_text_encoder() -> CLIPTextModel:
    """Builds an untrained text encoder: token ids (n, 24) to states (n, 24, 144)."""
    return CLIPTextModel(CLIPTextConfig(**_text_config(TEXT_WIDTH, TEXT_WIDTH)))


def build_clip() -> CLIPModel:
    """Builds an untrained CLIP: pictures (n, 3, 64, 64) in [-1, 1] and token ids (n, ≤ 24) to embeddings (n, 128)."""
    vision = {
        "hidden_size": 128,
        "intermediate_size": 4 * 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": IMAGE_SIZE,
        "patch_size": 8,
        "hidden_act": "quick_gelu",
        "projection_dim": CLIP_WIDTH,
    }
    text = _text_config(96, CLIP_WIDTH)
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=CLIP_WIDTH)
    )


def _text_config(width: int, projection: int) -> dict[str, Any]:
    """Returns the settings of a text encoder of the family: three layers over the family's tokens."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
        "hidden_act": "quick_gelu",
        "projection_dim": projection,
        "bos_token_id": VOCABULARY - 2,
        "eos_token_id": VOCABULARY - 1,
        "pad_token_id": VOCABULARY - 1,
    }


def build_scheduler() -> DDIMScheduler:
    """Builds a scheduler with Stable Diffusion's noise schedule and v-prediction.

    Timesteps are spaced backwards from the last one (`trailing`, Lin et al. 2023), so that runs of few steps start at
    full noise. All multistep solvers of diffusers accept its config.
    """
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
    )


def parameters(folder: Path) -> dict[str, int]:
    """Returns the number of parameters by network of a pipeline folder, from the headers of the weight files."""
    return {
        file.parent.name: count_parameters(file)
        for file in sorted(folder.glob("*/*.safetensors"))
    }


def count_parameters(file: Path) -> int:
    """Returns the number of parameters in a safetensors file, from its header."""
    return sum(map(math.prod, Header.of_any(file, str(file)).shapes.values()))


# ---- tokenizer -------------------------------------------------------------------------------------------------------

START = "<|startoftext|>"

END = "<|endoftext|>"

WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
"""Pattern of a word, without the special tokens (Radford et al. 2021, `simple_tokenizer.py`)."""


def train_tokenizer(captions: Iterable[str], folder: Path) -> CLIPTokenizer:
    """Learns merges from `captions`, saves a tokenizer to `folder`, and returns the tokenizer loaded from there.

    The special tokens have the last two ids, as in CLIP, and the end token is also the padding token.

    Raises:
        UsageError: the captions have too few distinct words to fill the vocabulary.
    """
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    # Normalization and splitting must match those of `CLIPTokenizer`.
    learner.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase()]
    )
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Includes every byte twice, also at a word's end, so that no prompt in any language has unknown tokens.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    learner.train_from_iterator(captions, trainer)
    learnt = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learnt["merges"]]
    entries = list(
        dict.fromkeys(
            [
                *alphabet,
                *(f"{byte}</w>" for byte in alphabet),
                *("".join(p) for p in merges),
            ]
        )
    )
    entries = entries[: VOCABULARY - 2]
    if len(entries) < VOCABULARY - 2:
        raise UsageError(
            f"the captions give {len(entries) + 2} tokens; the vocabulary needs {VOCABULARY}"
        )
    kept = set(entries)
    merges = [pair for pair in merges if "".join(pair) in kept]
    vocabulary = {token: index for index, token in enumerate([*entries, START, END])}
    tokenizer = CLIPTokenizer(
        vocab=vocabulary,
        merges=merges,
        bos_token=START,
        eos_token=END,
        unk_token=END,
        pad_token=END,
        model_max_length=LENGTH,
    )
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    """Loads the tokenizer that `train_tokenizer` saved in `folder`."""
    if not (folder / "tokenizer.json").exists():
        raise missing_stage("tokenizer", folder / "tokenizer.json")
    return CLIPTokenizer.from_pretrained(folder)
