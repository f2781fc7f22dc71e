"""`sdopt optimize FILE` of transformers as the web has them: what it would try of each format, and one answer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdopt.search.record import read_record
from tests.command import SMALL, Finished, sdopt
from tests.pipelines.test_web_files import clip_names, t5_names, vae_names
from tests.pipelines.tiny import tiny
from tests.pipelines.web_files import PREFIX, Tensors, gguf_file, original, save, scaled

pytestmark = pytest.mark.slow

Folder = Callable[[str], Path]

Written = Callable[[str, Path], Path]


def plain(name: str, folder: Path) -> Path:
    return save(original(tiny(name).transformer), folder / f"{name}.safetensors")


def in_float8(name: str, folder: Path) -> Path:
    tensors = original(tiny(name).transformer)
    for key, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[key] = tensor.to(torch.float8_e4m3fn)
    return save(tensors, folder / f"{name}_fp8_e4m3fn.safetensors")


def with_scales(name: str, folder: Path) -> Path:
    tensors, _ = scaled(original(tiny(name).transformer))
    tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return save(tensors, folder / f"{name}_fp8_scaled.safetensors", PREFIX)


def in_blocks(kind: str) -> Written:
    def write(name: str, folder: Path) -> Path:
        file = folder / f"{name}-{kind}.gguf"
        gguf_file(original(tiny(name).transformer), file, kind)
        return file

    return write


def all_in_one(t5: bool) -> Written:
    def write(name: str, folder: Path) -> Path:
        pipe = tiny(name)
        largest = "text_encoder_2" if name == "flux" else "text_encoder_3"
        networks = {
            PREFIX: original(pipe.transformer),
            "vae.": vae_names(pipe.vae),
            "text_encoders.clip_l.transformer.": clip_names(pipe.text_encoder),
        }
        if name == "sd3":
            second = clip_names(pipe.text_encoder_2)
            networks["text_encoders.clip_g.transformer."] = second
        if t5:
            third = t5_names(getattr(pipe, largest))
            networks["text_encoders.t5xxl.transformer."] = third
        tensors: Tensors = {}
        for prefix, own in networks.items():
            tensors |= {f"{prefix}{key}": tensor for key, tensor in own.items()}
        return save(tensors, folder / f"{name}_all_in_one.safetensors")

    return write


FORMATS = {
    "flux alone": ("flux", plain),
    "z_image alone": ("z_image", plain),
    "flux in float8": ("flux", in_float8),
    "z_image with scales": ("z_image", with_scales),
    "flux in Q8_0": ("flux", in_blocks("Q8_0")),
    "flux in Q2_K": ("flux", in_blocks("Q2_K")),
    "flux all in one": ("flux", all_in_one(t5=True)),
    "sd3 with T5": ("sd3", all_in_one(t5=True)),
    "sd3 without T5": ("sd3", all_in_one(t5=False)),
}


def optimize(folder: Path, file: Path, *overrides: str) -> Finished:
    return sdopt(folder, "optimize", str(file), *overrides)


@pytest.mark.parametrize("name", FORMATS)
def test_begins_with_what_can_be_tried(
    tmp_path: Path, tiny_folder: Folder, name: str
) -> None:
    pytest.importorskip("gguf")
    model, write = FORMATS[name]
    base = f"model.base={tiny_folder(model)}"
    work = ("hardware=cpu", "workload.size=64", "workload.steps=6")
    file = write(model, tmp_path)
    found = optimize(tmp_path, file, base, *work, "dry_run=true")
    assert found.code == 0, found.shown
    tried = found.out.partition("cannot run")[0]
    assert all(option in tried for option in ("bf16", "first_block", "inductor"))
    # In blocks of few bits there are no weights to quantize once more, or to join.
    in_few_bits = file.suffix == ".gguf"
    assert ("int8_sdnq" in tried) != in_few_bits
    if model == "flux":
        assert ("fused_qkv" in tried) != in_few_bits


@pytest.mark.parametrize("name", ["flux in Q8_0", "z_image with scales"])
def test_ends_with_an_answer(tmp_path: Path, tiny_folder: Folder, name: str) -> None:
    pytest.importorskip("gguf")
    model, write = FORMATS[name]
    base = f"model.base={tiny_folder(model)}"
    chosen = (
        "search.groups=[attention]",
        "search.options={attention: [default, flash, math]}",
        "search.races=0",
        "gate=none",
    )
    small = [key for key in SMALL if not key.startswith(("protocol.rep", "workload.s"))]
    size = ("workload.size=64", "workload.steps=2", "protocol.replicates=2")
    found = optimize(tmp_path, write(model, tmp_path), base, *chosen, *small, *size)
    assert found.code in (0, 3), found.shown
    [folder] = (tmp_path / "outputs" / "searches").iterdir()
    record = read_record(folder)
    assert record.sentence in found.shown
    assert {entry.name for entry in record.entries} == {
        "attention=flash",
        "attention=math",
    }
    assert all(entry.speedup for entry in record.entries)
