"""Programs of the packaged transformer, by the same measure: the image that a worker made, in plain diffusers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdopt.config.paths import CONF
from sdopt.programs.loading import from_files
from sdopt.schema import Model, Task
from tests.fixtures import CPU, Composers, Tiny
from tests.pipelines.tiny import TINY, tiny
from tests.pipelines.web_files import gguf_file, original, save, scaled
from tests.programs.test_programs import _options, _word, made, of

DIT = "model=emoji_dit"

SITUATIONS = {
    "as it is": "",
    "negative prompts of a file": "workload.prompts={files}/prompts.csv workload.guidance_scale=4",
    "a negative prompt and a cache": "workload.negative_prompt=grey workload.guidance_scale=4 caching=first_block",
    "half precision and joined projections": "precision=bf16 attention=fused_qkv",
    "steps skipped by measured ratios": "caching=magcache caching.threshold=0.1 workload.steps=25",
    "a picture": "task=img2img task.strength=0.7 workload.steps=6 attention=math",
    "a picture and a mask": "task=inpaint task.strength=0.7 workload.steps=6",
    "a batch of several images": "workload.batch_size=2 workload.images_per_prompt=2 grad_mode=inference_mode",
    "another scheduler": "scheduler=flow_unipc precision=bf16 workload.steps=4",
    "embeddings in advance": "memory=[precomputed_embeddings] workload.seed=77",
    "a small decoder": "memory=[tiny_vae] precision=bf16",
    "tiles": "workload.size=128 memory=[vae_tiling,vae_slicing] workload.batch_size=2",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("größer als sonst")
    (folder / "prompts.csv").write_text(
        'prompt,negative_prompt\n"it\'s ""big""","blurry, grey"\na blue fish,red\n'
    )
    return folder


def draws(composer: Composers, folder: Path, *words: str) -> None:
    torch._dynamo.reset()
    variant = of(composer, DIT, *words)
    if conflicts := variant.conflicts(CPU):
        pytest.skip("; ".join(conflicts))
    found, program = made(variant, folder)
    assert program.draws, f"{program.reason}\n{found.text}"


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.walk(3)
def test_draws_what_was_measured(
    composer: Composers, files: Path, tmp_path: Path, situation: str
) -> None:
    draws(
        composer,
        tmp_path,
        *(_word(word, files) for word in SITUATIONS[situation].split()),
    )


FAST = ("sana", "z_image")
"""Autoencoders with other squares of pixels, and language models that count positions by rates that are computed."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in TINY],
)
def test_draws_what_was_measured_with_each_kind_of_pipeline(
    variant_of: Tiny, tmp_path: Path, name: str, precision: str
) -> None:
    found, program = made(variant_of(name, f"precision={precision}"), tmp_path)
    assert program.draws, f"{program.reason}\n{found.text}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("option", _options())
def test_every_option(composer: Composers, tmp_path: Path, option: str) -> None:
    draws(composer, tmp_path, option, "workload.steps=10")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "scheduler", [path.stem for path in sorted((CONF / "scheduler").glob("*.yaml"))]
)
def test_every_scheduler(
    composer: Composers, tmp_path: Path, scheduler: str, precision: str
) -> None:
    if scheduler == "flow_dpmpp_2m":
        # FLUX gives a shift by size, which DPM-Solver refuses where the model's own is fixed, as this one's.
        with pytest.raises(AssertionError):
            draws(composer, tmp_path, f"scheduler={scheduler}", "workload.steps=4")
        return
    draws(
        composer,
        tmp_path,
        f"scheduler={scheduler}",
        f"precision={precision}",
        "workload.steps=4",
    )


def scaled_file(folder: Path) -> Path:
    written, _ = scaled(original(tiny("flux").transformer), ".weight_scale", rows=True)
    return save(written, folder / "scaled.safetensors", "diffusion_model.")


def file_of_blocks(folder: Path) -> Path:
    pytest.importorskip("gguf")
    file = folder / "flux.gguf"
    gguf_file(original(tiny("flux").transformer), file, "Q8_0")
    return file


@pytest.mark.parametrize("written", [scaled_file, file_of_blocks])
@pytest.mark.walk(1)
def test_reads_a_file_of_the_web_as_a_worker_does(
    variant_of: Tiny,
    tiny_folder: Callable[[str], Path],
    tmp_path: Path,
    written: Callable[[Path], Path],
) -> None:
    file = written(tmp_path)
    variant = variant_of(file, f"model.base={tiny_folder('flux')}")
    assert variant.conflicts(CPU) == []
    found, program = made(variant, tmp_path / "program")
    assert program.draws, f"{program.reason}\n{found.text}"


def test_names_the_whole_paths_of_parts_in_files(
    tiny_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, base = scaled_file(tmp_path), tiny_folder("flux")
    monkeypatch.chdir(tmp_path)
    Path("vae.safetensors").symlink_to(base / "vae/diffusion_pytorch_model.safetensors")
    parts: dict[str, str | None] = {"vae": "vae.safetensors"}
    model = Model("flux_dev", "path", file.name, base=str(base), parts=parts)
    text = "".join(from_files(model, Task(), "float32").lines)
    assert f"{{'vae': '{tmp_path / 'vae.safetensors'}'}}" in text


@pytest.mark.parametrize("option", ["loaded", "fused"])
@pytest.mark.walk(1)
def test_reads_a_lora_with_the_settings_beside_it(
    variant_of: Tiny, tmp_path: Path, option: str
) -> None:
    """Diffusers would read the file, and not the scale."""
    ends = {"lora_A": torch.randn(4, 64) / 8, "lora_B": torch.randn(64, 4)}
    tensors = {
        f"transformer.x_embedder.{end}.weight": each for end, each in ends.items()
    }
    file = save(tensors, tmp_path / "adapter_model.safetensors")
    settings = json.dumps({"r": 4, "lora_alpha": 16})
    file.with_name("adapter_config.json").write_text(settings)
    variant = variant_of("flux", f"lora={option}", f"lora.path={file}")
    assert variant.conflicts(CPU) == []
    found, program = made(variant, tmp_path / "program")
    assert program.draws, f"{program.reason}\n{found.text}"
