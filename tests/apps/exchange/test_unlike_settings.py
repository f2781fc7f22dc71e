"""Pairs of images whose writers name one thing that differs: it is said, whichever way a program writes it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdopt.apps.exchange.metadata import Origin, origin_of
from sdopt.apps.exchange.settings import differing
from sdopt.record.images import open_image

Chunks = Mapping[str, str]


def web_ui(more: str = "Version: v1.9", sampler: str = "Euler a") -> Chunks:
    text = f"a harbour\nNegative prompt: fog\nSteps: 30, Sampler: {sampler}, CFG scale: 7, Seed: 42, Size: 512x768, "
    return {"parameters": text + more}


def civitai(version: int, weight: float) -> Chunks:
    resources = [
        {
            "type": "checkpoint",
            "modelVersionId": version,
            "modelName": "Harbours",
            "modelVersionName": f"v{version}",
        },
        {
            "type": "lora",
            "weight": weight,
            "modelVersionId": 5,
            "modelName": "Ships",
            "modelVersionName": "1",
        },
    ]
    return web_ui(
        f"Clip skip: 2, Civitai resources: {json.dumps(resources)}, Civitai metadata: {{}}"
    )


def invokeai(**more: Any) -> Chunks:
    values = {
        "positive_prompt": "a harbour",
        "negative_prompt": "fog",
        "seed": 42,
        "steps": 30,
        "cfg_scale": 7.5,
    }
    return {"invokeai_metadata": json.dumps(values | more)}


def ruined_fooocus(model: str, lora: str) -> Chunks:
    values = {
        "Prompt": "a harbour",
        "Negative": "fog",
        "steps": 30,
        "cfg": 8.0,
        "seed": 42,
        "software": "RuinedFooocus",
    }
    return {
        "parameters": json.dumps(
            values | {"base_model_name": model, "loras": [["ab", lora]]}
        )
    }


def tensor_art(model: str, weight: float) -> Chunks:
    loras = [{"type": "LORA", "weight": weight, "modelFileName": "ships", "hash": "AB"}]
    base = {"type": "BASE_MODEL", "modelFileName": model, "hash": "CD"}
    values = {
        "prompt": "a harbour",
        "negativePrompt": "fog",
        "seed": "42",
        "steps": 28,
        "models": loras,
    }
    return {"generation_data": json.dumps(values | {"baseModel": base}) + "\0"}


def novelai(source: str) -> Chunks:
    comment = {
        "prompt": "a harbour",
        "steps": 28,
        "scale": 5,
        "seed": 42,
        "uc": "fog",
        "sampler": "k_euler_ancestral",
    }
    return {
        "Software": "NovelAI",
        "Description": "a harbour",
        "Source": source,
        "Comment": json.dumps(comment),
    }


def space(model: str) -> Chunks:
    values = {
        "prompt": "a harbour",
        "negative_prompt": "fog",
        "seed": 42,
        "num_inference_steps": 28,
    }
    return {
        "metadata": json.dumps(values | {"Model": {"Model": model, "Model hash": "ab"}})
    }


def pipeline(scheduler: str) -> Chunks:
    return {
        "prompt": "a harbour",
        "negative_prompt": "fog",
        "seed": "42",
        "scheduler": scheduler,
    }


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def comfy_flux(guidance: float = 3.5, shift: float = 1.15) -> Chunks:
    graph = {
        "1": node("UNETLoader", unet_name="flux1-dev.sft"),
        "2": node("ModelSamplingFlux", max_shift=shift, base_shift=0.5, model=["1", 0]),
        "3": node("CLIPTextEncode", text="a harbour", clip=["9", 0]),
        "4": node("FluxGuidance", guidance=guidance, conditioning=["3", 0]),
        "5": node("BasicGuider", model=["2", 0], conditioning=["4", 0]),
        "6": node("RandomNoise", noise_seed=42),
        "7": node(
            "BasicScheduler", scheduler="simple", steps=20, denoise=1, model=["2", 0]
        ),
        "8": node(
            "SamplerCustomAdvanced", noise=["6", 0], guider=["5", 0], sigmas=["7", 0]
        ),
    }
    return {"prompt": json.dumps(graph)}


def comfy_efficient(clip_skip: int = -2, width: int = 512) -> Chunks:
    loader = {
        "ckpt_name": "m.safetensors",
        "vae_name": "Baked VAE",
        "clip_skip": clip_skip,
        "positive": "a harbour",
    }
    loader |= {
        "negative": "fog",
        "empty_latent_width": width,
        "empty_latent_height": 768,
    }
    sampler = {
        "seed": 42,
        "steps": 30,
        "model": ["1", 0],
        "positive": ["1", 1],
        "negative": ["1", 2],
    }
    graph = {
        "1": node("Efficient Loader", **loader),
        "2": node("KSampler", **sampler, latent_image=["1", 3]),
    }
    return {"prompt": json.dumps(graph)}


def comfy_controlnet(strength: float | None) -> Chunks:
    graph = {
        "1": node("CLIPTextEncode", text="a harbour", clip=["9", 1]),
        "2": node("CLIPTextEncode", text="fog", clip=["9", 1]),
        "3": node("ControlNetLoader", control_net_name="canny.safetensors"),
        "4": node(
            "ControlNetApply",
            conditioning=["1", 0],
            control_net=["3", 0],
            strength=strength,
        ),
        "5": node(
            "KSampler",
            seed=42,
            steps=25,
            positive=["1" if strength is None else "4", 0],
            negative=["2", 0],
        ),
    }
    return {"prompt": json.dumps(graph)}


UNLIKE: dict[str, tuple[Chunks, Chunks, str]] = {
    "Civitai, another checkpoint": (
        civitai(1, 0.9),
        civitai(2, 0.9),
        "model harbours v2 2 (baseline harbours v1 1)",
    ),
    "Civitai, a weaker LoRA": (
        civitai(1, 0.9),
        civitai(1, 0.2),
        "LoRA ships 1 5:0.2 (baseline ships 1 5:0.9)",
    ),
    "Forge, guidance of FLUX": (
        web_ui("Distilled CFG Scale: 3.5, Version: f2.0"),
        web_ui("Distilled CFG Scale: 2, Version: f2.0"),
        "distilled guidance 2 (baseline 3.5)",
    ),
    "A1111, noise of an ancestral sampler": (
        web_ui("Eta: 0.5, Version: v1.9"),
        web_ui(),
        "eta none (baseline 0.5)",
    ),
    "A1111, a ControlNet": (
        web_ui(
            'ControlNet 0: "Module: canny, Model: control_v11p, Weight: 1", Version: v1.9'
        ),
        web_ui(),
        "ControlNet none (baseline module: canny, model: control_v11p, weight: 1)",
    ),
    "A1111, faces drawn again": (
        web_ui("ADetailer model: face.pt, Version: v1.9"),
        web_ui(),
        "ADetailer none",
    ),
    "A1111, tiles drawn again": (
        web_ui(
            "Ultimate SD upscale upscaler: 4x, Ultimate SD upscale tile_width: 512, Version: v1.9"
        ),
        web_ui(),
        "hires upscaler none (baseline 4x)",
    ),
    "A1111, another switch to the refiner": (
        web_ui("Refiner: xl_refiner [7440], Refiner switch at: 0.8"),
        web_ui("Refiner: xl_refiner [7440], Refiner switch at: 0.5"),
        "refiner switch 0.5 (baseline 0.8)",
    ),
    "A1111, a LoRA whose tag was cut": (
        web_ui('Lora hashes: "ships: 5ca3"'),
        web_ui(),
        "LoRA none (baseline ships)",
    ),
    "A1111, other files of one name": (
        web_ui('Lora hashes: "ships: 5ca3", Version: v1.9'),
        web_ui('Lora hashes: "ships: 77aa", Version: v1.9'),
        "LoRA files ships: 77aa (baseline ships: 5ca3)",
    ),
    "A1111, another VAE of one name": (
        web_ui("VAE hash: 735e4c3a44, VAE: mse.safetensors, Version: v1.9"),
        web_ui("VAE hash: 1111111111, VAE: mse.safetensors, Version: v1.9"),
        "VAE file 1111111111 (baseline 735e4c3a44)",
    ),
    "A1111, an embedding that was not found": (
        web_ui('TI hashes: "easyneg: c74b4e810b03", Version: v1.9'),
        web_ui("Version: v1.9"),
        "embeddings none (baseline easyneg: c74b4e810b03)",
    ),
    "stable-diffusion.cpp, another distilled guidance": (
        web_ui("Guidance: 3.5, Version: stable-diffusion.cpp"),
        web_ui("Guidance: 2.0, Version: stable-diffusion.cpp"),
        "distilled guidance 2 (baseline 3.5)",
    ),
    "RuinedFooocus, another model": (
        ruined_fooocus("a.safetensors", "0.8 - ships"),
        ruined_fooocus("b.safetensors", "0.8 - ships"),
        "model b (baseline a)",
    ),
    "RuinedFooocus, a weaker LoRA": (
        ruined_fooocus("a.safetensors", "0.8 - ships"),
        ruined_fooocus("a.safetensors", "0.3 - ships"),
        "LoRA ships:0.3 (baseline ships:0.8)",
    ),
    "Tensor.Art, another model": (
        tensor_art("a", 0.8),
        tensor_art("b", 0.8),
        "model b (baseline a)",
    ),
    "Tensor.Art, a weaker LoRA": (
        tensor_art("a", 0.8),
        tensor_art("a", 0.1),
        "LoRA ships:0.1 (baseline ships:0.8)",
    ),
    "NovelAI, another model": (
        novelai("XL 7B"),
        novelai("XL C1"),
        "model xl c1 (baseline xl 7b)",
    ),
    "a space of the hub": (
        space("Animagine 3"),
        space("Animagine 4"),
        "model animagine 4 (baseline animagine 3)",
    ),
    "a script of diffusers": (
        pipeline("EulerDiscreteScheduler"),
        pipeline("DDIMScheduler"),
        "sampler ddim (base",
    ),
    "InvokeAI, noise made elsewhere": (
        invokeai(rand_device="cpu"),
        invokeai(rand_device="cuda"),
        "noise source cuda",
    ),
    "InvokeAI, a ControlNet": (
        invokeai(
            controlnets=[{"control_model": {"name": "canny"}, "control_weight": 1}]
        ),
        invokeai(controlnets=[]),
        "ControlNet none (baseline",
    ),
    "InvokeAI, rescaled guidance": (
        invokeai(cfg_rescale_multiplier=0.7),
        invokeai(),
        "guidance rescale 0 (base",
    ),
    "InvokeAI, guidance of FLUX": (
        invokeai(guidance=4.0),
        invokeai(guidance=2.0),
        "distilled guidance 2 (baseline 4)",
    ),
    "ComfyUI, guidance of FLUX": (
        comfy_flux(),
        comfy_flux(guidance=2),
        "distilled guidance 2 (baseline 3.5)",
    ),
    "ComfyUI, shifted noise": (
        comfy_flux(),
        comfy_flux(shift=2),
        "shift 2 (baseline 1.15)",
    ),
    "ComfyUI, one node for all, its CLIP": (
        comfy_efficient(),
        comfy_efficient(clip_skip=-1),
        "clip skip 1 (base",
    ),
    "ComfyUI, one node for all, its size": (
        comfy_efficient(),
        comfy_efficient(width=768),
        "size 768×768 (base",
    ),
    "ComfyUI, a ControlNet": (
        comfy_controlnet(0.8),
        comfy_controlnet(None),
        "ControlNet none (baseline canny",
    ),
    "ComfyUI, a weaker ControlNet": (
        comfy_controlnet(0.8),
        comfy_controlnet(0.3),
        "ControlNet canny.safetensors:0.3",
    ),
}


def read(folder: Path, chunks: Chunks) -> Origin:
    info = PngInfo()
    for name, text in chunks.items():
        info.add_text(name, text)
    Image.new("RGB", (16, 16)).save(folder / "a.png", pnginfo=info)
    return origin_of(open_image(folder / "a.png"), folder / "a.png")


@pytest.mark.parametrize("situation", UNLIKE)
def test_one_setting_apart_is_said(tmp_path: Path, situation: str) -> None:
    *both, said = UNLIKE[situation]
    first, second = (read(tmp_path, chunks) for chunks in both)
    assert (
        (first.prompt, first.seed) == (second.prompt, second.seed) == ("a harbour", 42)
    )
    assert first.negative == second.negative
    words = differing(
        [((first.program, first.settings), (second.program, second.settings))]
    )
    assert len(words) == 1
    assert words[0].startswith(said)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            web_ui(sampler="dpmpp_2m_karras"),
            web_ui("Schedule type: Karras", sampler="DPM++ 2M"),
        ),
        (web_ui('Hashes: {"model": "ab", "lora:ships": "cd"}'), web_ui()),
        (
            web_ui('ControlNet 0: "Module: canny"'),
            invokeai(steps=30, cfg_scale=7, controlnets=[{"name": "canny"}]),
        ),
    ],
    ids=[
        "a schedule in a sampler's name",
        "digests in a text",
        "ControlNets of two programs",
    ],
)
def test_what_is_written_otherwise_is_no_difference(
    tmp_path: Path, one: Chunks, other: Chunks
) -> None:
    first, second = (read(tmp_path, chunks) for chunks in (one, other))
    assert (
        differing(
            [((first.program, first.settings), (second.program, second.settings))]
        )
        == []
    )
