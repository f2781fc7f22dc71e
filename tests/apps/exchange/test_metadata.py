"""What programs leave in images is read, in the form in which each of them writes it."""

import gzip
import html
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdopt.apps.exchange.formats import format_of
from sdopt.apps.exchange.metadata import Origin, origin_of
from sdopt.apps.exchange.settings import SETTINGS, differing, settings_of
from sdopt.record.images import open_image

Write = Callable[[Path], Path]


def chunks(texts: dict[str, str]) -> Write:
    """Writes a PNG with texts in chunks of these very names."""

    def write(folder: Path) -> Path:
        info = PngInfo()
        for name, text in texts.items():
            info.add_text(name, text)
        Image.new("RGB", (16, 16)).save(folder / "a.png", pnginfo=info)
        return folder / "a.png"

    return write


def commented(
    comment: bytes | str, suffix: str = ".jpg", tag: int = 0x9286, inner: bool = True
) -> Write:
    """Writes a JPEG or WebP with a tag of EXIF, in its inner folder or in the outer one."""

    def write(folder: Path) -> Path:
        exif = Image.Exif()
        if inner:
            exif.get_ifd(0x8769)[tag] = comment
        else:
            exif[tag] = comment
        Image.new("RGB", (16, 16)).save(folder / f"a{suffix}", exif=exif)
        return folder / f"a{suffix}"

    return write


def with_file(name: str, text: bytes | str) -> Write:
    """Writes an image that says nothing, and a file beside it."""

    def write(folder: Path) -> Path:
        Image.new("RGB", (16, 16)).save(folder / "a.png")
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder / "a.png"

    return write


def plain_chunk(name: str, text: str) -> Write:
    """Writes a PNG with UTF-8 in a chunk that is Latin-1 by the standard."""

    def write(folder: Path) -> Path:
        info = PngInfo()
        info.add(b"tEXt", name.encode() + b"\0" + text.encode())
        Image.new("RGB", (16, 16)).save(folder / "a.png", pnginfo=info)
        return folder / "a.png"

    return write


def hidden(text: str, signature: str) -> Write:
    """Writes a PNG with a text in the lowest bits of its pixels, column by column."""

    def write(folder: Path) -> Path:
        content = text.encode()
        if signature.endswith("comp"):
            content = gzip.compress(content)
        length = (8 * len(content)).to_bytes(4, "big")
        bits = np.unpackbits(
            np.frombuffer(signature.encode() + length + content, dtype=np.uint8)
        )
        pixels = np.full((64, 128, 4), 254, dtype=np.uint8)
        channels = slice(3) if "rgb" in signature else slice(3, 4)
        columns = pixels[..., channels].transpose(1, 0, 2).copy()
        columns.reshape(-1)[: len(bits)] |= bits
        pixels[..., channels] = columns.transpose(1, 0, 2)
        Image.fromarray(pixels).save(folder / "a.png")
        return folder / "a.png"

    return write


def packed(parameters: str) -> Write:
    """Writes a WebP with XMP as stable-diffusion.cpp does."""
    packet = (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description><sdcpp:parameters>'
        f"{html.escape(parameters)}</sdcpp:parameters></rdf:Description></rdf:RDF></x:xmpmeta>"
    )

    def write(folder: Path) -> Path:
        Image.new("RGB", (16, 16)).save(folder / "a.webp", xmp=packet.encode())
        return folder / "a.webp"

    return write


def xmp(comment: dict[str, Any]) -> Write:
    """Writes a PNG with XMP as Draw Things does."""
    escaped = json.dumps(comment).replace("&", "&amp;").replace('"', "&quot;")
    text = (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description><exif:UserComment><rdf:Alt>'
        f'<rdf:li xml:lang="x-default">{escaped}</rdf:li></rdf:Alt></exif:UserComment></rdf:Description></rdf:RDF>'
        "</x:xmpmeta>"
    )
    return chunks({"XML:com.adobe.xmp": text})


WEB_UI = (
    "a harbour, dusk <lora:ships_v2:0.8>\nNegative prompt: fog\nSteps: 30, Sampler: DPM++ 2M Karras, CFG scale: 7, "
    "Seed: 42, Size: 512x768, Model hash: 6ce0161689, Model: v1-5-pruned, Denoising strength: 0.5, Clip skip: 2, "
    'Hires upscale: 2, Lora hashes: "ships_v2: 5ca3e3b1c5a7, CFG scale: 99", Version: v1.8.0'
)

WEB_UI_SETTINGS = {
    "steps": "30",
    "sampler": "dpm++2m",
    "schedule": "karras",
    "guidance scale": "7",
    "size": "512×768",
    "model": "v1-5-pruned",
    "model hash": "6ce0161689",
    "clip skip": "2",
    "denoising strength": "0.5",
    "LoRA": "ships_v2:0.8",
    "LoRA files": "ships_v2: 5ca3e3b1c5a7, cfg scale: 99",
    "hires upscale": "2",
}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


ADVANCED = {
    "1": node("CheckpointLoaderSimple", ckpt_name="sd\\v1-5.safetensors"),
    "2": node(
        "LoraLoader",
        lora_name="ships.safetensors",
        strength_model=0.8,
        model=["1", 0],
        clip=["1", 1],
    ),
    "3": node("CLIPSetLastLayer", stop_at_clip_layer=-2, clip=["2", 1]),
    "4": node("CLIPTextEncode", text="a harbour", clip=["3", 0]),
    "5": node("CLIPTextEncode", text="fog", clip=["3", 0]),
    "6": node("RandomNoise", noise_seed=42),
    "7": node(
        "CFGGuider", model=["2", 0], positive=["4", 0], negative=["5", 0], cfg=6.5
    ),
    "8": node("KSamplerSelect", sampler_name="dpmpp_2m"),
    "9": node(
        "BasicScheduler", scheduler="karras", steps=30, denoise=1.0, model=["2", 0]
    ),
    "10": node("EmptyLatentImage", width=512, height=768, batch_size=1),
    "11": node(
        "SamplerCustomAdvanced",
        noise=["6", 0],
        guider=["7", 0],
        sampler=["8", 0],
        sigmas=["9", 0],
        latent_image=["10", 0],
    ),
    "12": node("VAEDecode", samples=["11", 0], vae=["1", 2]),
}

# A few-step model, whose negative prompt is the other one without what it says.
EMPTIED = {
    "1": node("UNETLoader", unet_name="z_image_turbo.safetensors"),
    "4": node("CLIPTextEncode", text="a harbour", clip=["9", 0]),
    "5": node("ConditioningZeroOut", conditioning=["4", 0]),
    "7": node(
        "KSampler", seed=42, steps=9, cfg=1, model=["1", 0], positive=["4", 0], negative=["5", 0]
    ),
}  # fmt: skip

# Two samplers in a row, of which the second one refines what the first one began.
IN_A_ROW = {
    "1": node("CheckpointLoaderSimple", ckpt_name="base.safetensors"),
    "4": node("CLIPTextEncode", text="a harbour", clip=["1", 1]),
    "5": node("CLIPTextEncode", text="fog", clip=["1", 1]),
    "6": node(
        "KSamplerAdvanced",
        noise_seed=42, steps=25, cfg=8, sampler_name="euler_ancestral", scheduler="normal",
        model=["1", 0], positive=["4", 0], negative=["5", 0], latent_image=["8", 0],
    ),
    "7": node(
        "KSamplerAdvanced",
        noise_seed=0, steps=25, cfg=8, sampler_name="euler", scheduler="normal",
        model=["1", 0], positive=["4", 0], negative=["5", 0], latent_image=["6", 0],
    ),
    "8": node("EmptyLatentImage", width=["9", 0], height=1024),
    "9": node("PrimitiveInt", value=1024),
}  # fmt: skip

OF_ADVANCED = {
    "steps": "30",
    "sampler": "dpm++2m",
    "schedule": "karras",
    "guidance scale": "6.5",
    "size": "512×768",
    "model": "v1-5",
    "clip skip": "2",
    "denoising strength": "1",
    "LoRA": "ships:0.8",
}
"""The settings of `ADVANCED`."""

INVOKE = {
    "generation_mode": "txt2img",
    "positive_prompt": "a harbour",
    "negative_prompt": "fog",
    "width": 512,
    "height": 768,
    "seed": 42,
    "cfg_scale": 7.5,
    "steps": 30,
    "scheduler": "euler_a",
    "clip_skip": 0,
    "model": {
        "key": "1f",
        "hash": "blake3:aa",
        "name": "stable-diffusion-v1-5",
        "base": "sd-1",
    },
    "loras": [{"model": {"name": "ships"}, "weight": 0.8}],
    "strength": None,
}

SWARM = {
    "sui_image_params": {
        "prompt": "a harbour",
        "negativeprompt": "fog",
        "model": "Official/sd_xl_base_1.0",
        "seed": 42,
        "steps": 20,
        "cfgscale": 7.0,
        "width": 1024,
        "height": 1024,
        "sampler": "dpmpp_2m_sde_gpu",
        "scheduler": "karras",
        "automaticvae": True,
        "loras": ["ships"],
        "loraweights": ["0.8"],
    },
    "sui_extra_data": {"generation_time": "4.84 sec"},
}

FOOOCUS = {
    "base_model": "juggernautXL_v8",
    "base_model_hash": "aeb7e9e689",
    "guidance_scale": 4,
    "loras": [["ships.safetensors", 0.8, "4852686128"]],
    "metadata_scheme": "fooocus",
    "negative_prompt": "fog",
    "performance": "Speed",
    "prompt": "a harbour",
    "refiner_model": "None",
    "resolution": "(896, 1152)",
    "sampler": "dpmpp_2m_sde_gpu",
    "scheduler": "karras",
    "seed": "42",
    "steps": 30,
    "vae": "Default (model)",
    "version": "Fooocus v2.5.5",
}

SWARM_SETTINGS = {
    "steps": "20",
    "sampler": "dpm++2msdegpu",
    "schedule": "karras",
    "guidance scale": "7",
    "size": "1024×1024",
    "model": "sd_xl_base_1.0",
    "LoRA": "ships:0.8",
}

PLAIN = ("a harbour", "fog", 42)

EASY = {
    "prompt": "a harbour",
    "negative_prompt": "fog",
    "seed": "42",
    "use_stable_diffusion_model": "sd-v1-5",
    "sampler_name": "euler_a",
    "num_inference_steps": "25",
    "guidance_scale": "7.5",
    "width": "512",
    "height": "512",
    "clip_skip": "False",
}

EASY_SETTINGS = {
    "steps": "25",
    "sampler": "eulera",
    "guidance scale": "7.5",
    "size": "512×512",
    "model": "sd-v1-5",
}

UTF16 = WEB_UI.replace("harbour", "hafen im Nebel: 港").encode("utf-16-be")

LEFT: dict[str, tuple[Write, str, tuple[str | None, str, int | None], dict[str, str]]] = {
    "A1111": (chunks({"parameters": WEB_UI}), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS),
    "A1111, its JPEG": (
        commented(b"UNICODE\0" + UTF16), "A1111", ("a hafen im Nebel: 港, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "A1111, its WebP": (
        commented(b"UNICODE\0" + UTF16, ".webp"), "A1111", ("a hafen im Nebel: 港, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "A1111, little-endian": (
        commented(b"UNICODE\0" + WEB_UI.encode("utf-16-le")), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "A1111, in ASCII": (
        commented(b"ASCII\0\0\0" + WEB_UI.encode()), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "A1111, in UTF-8 under another name": (
        commented(b"UNICODE\0" + WEB_UI.encode()), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "A1111, beside it, a prompt of two lines of Windows": (
        with_file("a.txt", WEB_UI.replace("a harbour, dusk", "a harbour,\ndusk").replace("\n", "\r\n").encode()),
        "A1111",
        ("a harbour,\ndusk", "fog", 42),
        WEB_UI_SETTINGS,
    ),
    "A1111, beside it": (with_file("a.txt", WEB_UI), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS),
    "A1111, beside it, of Windows": (
        with_file("a.txt", WEB_UI.replace("\n", "\r\n").encode("utf-16")),
        "A1111",
        ("a harbour, dusk", "fog", 42),
        WEB_UI_SETTINGS,
    ),
    "A1111, as a description in EXIF": (
        commented(WEB_UI, tag=0x010E, inner=False), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "A1111, without its seed": (
        chunks({"parameters": "a harbour\nSteps: 20, Sampler: Euler a, CFG scale: 7, Size: 64x64"}),
        "A1111",
        ("a harbour", "", None),
        {"steps": "20", "sampler": "eulera", "guidance scale": "7", "size": "64×64"},
    ),
    "A1111, hidden in the alpha": (
        hidden(WEB_UI, "stealth_pnginfo"), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "A1111, hidden in the colours": (
        hidden(WEB_UI, "stealth_rgbcomp"), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "A1111, in a description of XMP": (
        chunks({"XML:com.adobe.xmp": "<dc:description><rdf:Alt><rdf:li xml:lang='x-default'>"
                f"{html.escape(WEB_UI)}</rdf:li></rdf:Alt></dc:description>"}),
        "A1111",
        ("a harbour, dusk", "fog", 42),
        WEB_UI_SETTINGS,
    ),
    "A1111, in one line": (
        chunks({"parameters": WEB_UI.replace("\n", " ")}),
        "A1111",
        ("a harbour, dusk", "fog", 42),
        WEB_UI_SETTINGS,
    ),
    "stable-diffusion.cpp, whose chunk is UTF-8": (
        plain_chunk("parameters", "ein Hafen in Köln\nSteps: 20, CFG scale: 7.0, Guidance: 3.5, Seed: 42, Size: 64x64, "
                    "Model: m, Version: stable-diffusion.cpp"),
        "stable-diffusion.cpp",
        ("ein Hafen in Köln", "", 42),
        {"steps": "20", "guidance scale": "7", "distilled guidance": "3.5", "size": "64×64", "model": "m"},
    ),
    "stable-diffusion.cpp, its WebP": (
        packed("a <harbour>\nNegative prompt: fog\nSteps: 20, CFG scale: 7.0, Seed: 42, Size: 64x64, Sampler: euler, "
               'Version: stable-diffusion.cpp, SDCPP: {"prompt":{"positive":"a harbour\\nSteps: 9, Seed: 7"}}'),
        "stable-diffusion.cpp",
        ("a <harbour>", "fog", 42),
        {"steps": "20", "guidance scale": "7", "size": "64×64", "sampler": "euler"},
    ),
    "iris": (
        chunks({"flux:seed": "42", "flux:model": "FLUX.2-klein-4B", "Software": "flux"}),
        "iris",
        (None, "", 42),
        {"model": "flux.2-klein-4b"},
    ),
    "Forge": (
        chunks({"parameters": "a harbour\nSteps: 20, Sampler: Euler, Schedule type: Simple, CFG scale: 1, Seed: 42, "
                              "Size: 64x64, Version: f2.0.1v1.10.1"}),
        "Forge",
        ("a harbour", "", 42),
        {"steps": "20", "sampler": "euler", "schedule": "simple", "guidance scale": "1", "size": "64×64"},
    ),
    "SD.Next": (
        chunks({"parameters": "a harbour\nNegative prompt: fog\nSteps: 20, Size: 64x64, Seed: 42, CFG scale: 6, App: "
                              "SD.Next, Version: 2a1b, Pipeline: StableDiffusionPipeline, Model: v1-5, "
                              "Sampler: UniPC"}),
        "SD.Next",
        PLAIN,
        {"steps": "20", "sampler": "unipc", "guidance scale": "6", "size": "64×64", "model": "v1-5"},
    ),
    "ComfyUI, in parts": (
        chunks({"prompt": json.dumps(ADVANCED), "workflow": "{}"}),
        "ComfyUI",
        PLAIN,
        OF_ADVANCED,
    ),
    "ComfyUI, without a negative prompt": (
        chunks({"prompt": json.dumps(EMPTIED)}),
        "ComfyUI",
        ("a harbour", "", 42),
        {"steps": "9", "guidance scale": "1", "model": "z_image_turbo"},
    ),
    "ComfyUI, in a row, WebP": (
        commented(f"prompt:{json.dumps(IN_A_ROW)}", ".webp", 0x0110, inner=False),
        "ComfyUI",
        PLAIN,
        {
            "steps": "25",
            "sampler": "eulera",
            "schedule": "normal",
            "guidance scale": "8",
            "size": "1024×1024",
            "model": "base",
        },
    ),
    "ComfyUI, graph and workflow in a comment": (
        commented(b"ASCII\0\0\0" + json.dumps({"prompt": ADVANCED, "workflow": {}}).encode()),
        "ComfyUI",
        PLAIN,
        OF_ADVANCED,
    ),
    "ComfyUI, as Civitai leaves it in a comment": (
        commented(b"ASCII\0\0\0" + json.dumps(ADVANCED | {"extra": {}, "extraMetadata": "{}"}).encode()),
        "ComfyUI",
        PLAIN,
        OF_ADVANCED,
    ),
    "ComfyUI, its API's file beside it": (
        with_file("a.png.json", json.dumps(ADVANCED)),
        "ComfyUI",
        PLAIN,
        OF_ADVANCED,
    ),
    "InvokeAI": (
        chunks({"invokeai_metadata": json.dumps(INVOKE)}),
        "InvokeAI",
        PLAIN,
        {
            "steps": "30",
            "sampler": "eulera",
            "guidance scale": "7.5",
            "size": "512×768",
            "model": "stable-diffusion-v1-5",
            "clip skip": "1",
            "LoRA": "ships:0.8",
            "model file": "aa",
        },
    ),
    "InvokeAI 2": (
        chunks({
            "Dream": "ignored",
            "sd-metadata": json.dumps({
                "model_weights": "sd-v1-5",
                "image": {
                    "prompt": [{"prompt": "a harbour [fog]", "weight": 1.0}], "steps": 30, "cfg_scale": 7.5,
                    "seed": 42, "sampler": "k_euler_a", "width": 512, "height": 768,
                },
            }),
        }),
        "InvokeAI",
        PLAIN,
        {"steps": "30", "sampler": "eulera", "guidance scale": "7.5", "size": "512×768", "model": "sd-v1-5"},
    ),
    "InvokeAI 1": (
        chunks({"Dream": '"a harbour [fog]" -s 50 -S 42 -W 512 -H 512 -C 7.5 -A k_lms'}),
        "InvokeAI",
        PLAIN,
        {"steps": "50", "sampler": "lms", "guidance scale": "7.5", "size": "512×512"},
    ),
    "SwarmUI": (chunks({"parameters": json.dumps(SWARM)}), "SwarmUI", PLAIN, SWARM_SETTINGS),
    "SwarmUI, its JPEG": (
        commented(b"UNICODE\0" + json.dumps(SWARM).encode("utf-16-le")), "SwarmUI", PLAIN, SWARM_SETTINGS
    ),
    "SwarmUI, long ago": (
        commented(json.dumps(SWARM), tag=0x0110, inner=False), "SwarmUI", PLAIN, SWARM_SETTINGS
    ),
    "Fooocus": (
        chunks({"parameters": json.dumps(FOOOCUS), "fooocus_scheme": "fooocus"}),
        "Fooocus",
        PLAIN,
        {
            "steps": "30",
            "sampler": "dpm++2msdegpu",
            "schedule": "karras",
            "guidance scale": "4",
            "size": "896×1152",
            "model": "juggernautxl_v8",
            "model hash": "aeb7e9e689",
            "VAE": "default (model)",
            "LoRA": "ships:0.8",
            "LoRA files": "4852686128",
        },
    ),
    "Fooocus, its JPEG": (
        commented(json.dumps({"base_model": "x", "prompt": "a harbour", "negative_prompt": "fog", "seed": "42"}),
                  inner=False),
        "Fooocus",
        PLAIN,
        {"model": "x"},
    ),
    "Fooocus as A1111": (
        chunks({"parameters": "a harbour\nNegative prompt: fog\nSteps: 30, Sampler: DPM++ 2M SDE Karras, Seed: 42, "
                              "Size: 896x1152, CFG scale: 4, Version: Fooocus v2.5.5"}),
        "Fooocus",
        PLAIN,
        {"steps": "30", "sampler": "dpm++2msde", "schedule": "karras", "guidance scale": "4", "size": "896×1152"},
    ),
    "Draw Things": (
        xmp({"c": "a harbour", "uc": "fog", "seed": 42, "steps": 20, "scale": 4.5, "model": "sdxl_base_f16.ckpt",
             "sampler": "DPM++ 2M Karras", "size": "1024x1024", "strength": 1}),
        "Draw Things",
        PLAIN,
        {
            "steps": "20",
            "sampler": "dpm++2m",
            "schedule": "karras",
            "guidance scale": "4.5",
            "size": "1024×1024",
            "model": "sdxl_base_f16",
            "denoising strength": "1",
        },
    ),
    "NovelAI": (
        chunks({
            "Software": "NovelAI",
            "Description": "a harbour",
            "Comment": json.dumps({"steps": 28, "sampler": "k_euler_ancestral", "seed": 42, "scale": 11.0, "uc": "fog",
                                   "strength": 0.69}),
        }),
        "NovelAI",
        PLAIN,
        {"steps": "28", "sampler": "eulera", "guidance scale": "11", "denoising strength": "0.69"},
    ),
    "NovelAI, its WebP": (
        commented(b"ASCII\0\0\0" + json.dumps({
            "Software": "NovelAI",
            "Description": "a harbour",
            "Comment": json.dumps({"steps": 28, "seed": 42, "scale": 11.0, "uc": "fog"}),
        }).encode(), ".webp"),
        "NovelAI",
        PLAIN,
        {"steps": "28", "guidance scale": "11"},
    ),
    "NovelAI, hidden in the alpha": (
        hidden(json.dumps({
            "Software": "NovelAI",
            "Description": "a harbour",
            "Comment": json.dumps({"steps": 28, "seed": 42, "scale": 11.0, "uc": "fog"}),
        }), "stealth_pngcomp"),
        "NovelAI",
        PLAIN,
        {"steps": "28", "guidance scale": "11"},
    ),
    "Easy Diffusion": (chunks(EASY), "Easy Diffusion", PLAIN, EASY_SETTINGS | {"clip skip": "false"}),
    "kohya's script": (
        chunks({"prompt": "a harbour", "negative-prompt": "fog", "seed": "42", "steps": "25", "scale": "7.5"}),
        "a script",
        PLAIN,
        {"steps": "25", "guidance scale": "7.5"},
    ),
    "Easy Diffusion, its JPEG": (
        commented(b"UNICODE\0" + json.dumps(EASY).encode("utf-16-be")),
        "Easy Diffusion",
        PLAIN,
        EASY_SETTINGS | {"clip skip": "false"},
    ),
    "Easy Diffusion, beside it": (
        with_file("a.txt", "Prompt: a harbour\nNegative Prompt: fog\nSeed: 42\nStable Diffusion model: sd-v1-5\n"
                           "Sampler: euler_a\nSteps: 25\nGuidance Scale: 7.5\nWidth: 512\nHeight: 512\n"),
        "Easy Diffusion",
        PLAIN,
        EASY_SETTINGS,
    ),
    "a script of diffusers": (
        with_file("a.json", json.dumps({"prompt": "a harbour", "negative_prompt": "fog", "seed": 42,
                                        "num_inference_steps": 25, "guidance_scale": 7.5,
                                        "scheduler": "EulerDiscreteScheduler"})),
        "JSON",
        PLAIN,
        {"steps": "25", "guidance scale": "7.5", "sampler": "euler"},
    ),
    "a script, a setting in each line": (
        with_file("a.txt", "prompt: a harbour\nnegative prompt: fog\nseed: 42\nsteps: 25\n"),
        "a script",
        PLAIN,
        {"steps": "25"},
    ),
    "a script, an object within another one": (
        with_file("a.json", json.dumps({"id": 5, "meta": {"prompt": "a harbour", "negativePrompt": "fog", "seed": 42,
                                                          "steps": 25}})),
        "JSON",
        PLAIN,
        {"steps": "25"},
    ),
    "A1111, within a document": (
        with_file("a.json", json.dumps({"images": 1, "info": WEB_UI})),
        "A1111",
        ("a harbour, dusk", "fog", 42),
        WEB_UI_SETTINGS,
    ),
    "A1111, under another name": (
        chunks({"Title": WEB_UI}), "A1111", ("a harbour, dusk", "fog", 42), WEB_UI_SETTINGS
    ),
    "a script, chunks without a prompt": (
        chunks({"Seed": "42", "Steps": "25"}), "a script", (None, "", 42), {"steps": "25"}
    ),
}  # fmt: skip
"""By who wrote it: an image, and what it must be read as."""


class TestOrigins:
    @pytest.mark.parametrize("writer", LEFT)
    def test_are_read(self, tmp_path: Path, writer: str) -> None:
        write, program, asked, settings = LEFT[writer]
        file = write(tmp_path)
        origin = origin_of(open_image(file), file)
        assert (origin.prompt, origin.negative, origin.seed) == asked
        assert origin.program == program
        assert dict(origin.settings) == settings

    @pytest.mark.parametrize(
        "write",
        [
            chunks({"parameters": "{" * 100_000}),
            chunks({"parameters": '{"sui_image_params": [1]}'}),
            chunks({"parameters": "upscaled with 4x, Seed: none"}),
            chunks(
                {
                    "invokeai_metadata": "null",
                    "sd-metadata": '{"image": 5}',
                    "Dream": "-s",
                }
            ),
            chunks(
                {"prompt": '{"1": {"inputs": {"guider": ["1", 0], "noise": ["1", 0]}}}'}
            ),
            chunks({"Comment": "Created with GIMP", "Software": "NovelAI"}),
            chunks({"XML:com.adobe.xmp": "<exif:UserComment>{&quot;c&quot;"}),
            commented(b"UNICODE\0\xd8"),
            commented(b"\xff\xfe\x00"),
            with_file("a.txt", b"\xff\xfe\x00\xd8\x00"),
            with_file("a.txt", "a caption for training: a harbour at dusk"),
            with_file("a.json", "[1, 2]"),
            hidden("x", "stealth_pngcomp"),
            hidden("{", "stealth_pnginfo"),
            with_file("a.json", '{"license": "CC0", "prompt": null, "model": {}}'),
        ],
    )
    def test_that_cannot_be_read_say_nothing(
        self, tmp_path: Path, write: Write
    ) -> None:
        file = write(tmp_path)
        origin = origin_of(open_image(file), file)
        assert (origin.seed, dict(origin.settings)) == (None, {})


def apart(
    first: dict[str, Any],
    second: dict[str, Any],
    programs: tuple[str, str] = ("A1111", "A1111"),
) -> list[str]:
    sides = [
        (program, settings_of(values))
        for program, values in zip(programs, (first, second), strict=True)
    ]
    return differing([(sides[0], sides[1])])


class TestSettings:
    def test_no_key_means_two_of_them(self) -> None:
        keys = [key for setting in SETTINGS for key in setting.keys]
        assert len(keys) == len({*keys})

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"CFG scale": "7"}, {"CFG scale": "7.0"}),
            (
                {"Sampler": "DPM++ 2M Karras"},
                {"Sampler": "DPM++ 2M", "Schedule type": "Karras"},
            ),
            ({"Clip skip": "1"}, {}),
            ({"VAE": "Automatic"}, {"VAE": "None"}),
            (
                {"Model": "a.safetensors", "Model hash": "6ce0161689"},
                {"Model": "b", "Model hash": "6ce01616"},
            ),
            ({"Token merging ratio": "0.5"}, {}),  # which is an option
            ({"Version": "v1.8.0"}, {"Version": "v1.10.1"}),
        ],
    )
    def test_of_one_program_that_mean_the_same(
        self, first: dict[str, Any], second: dict[str, Any]
    ) -> None:
        assert apart(first, second) == []

    @pytest.mark.parametrize(
        ("first", "second", "said"),
        [
            ({"Steps": "30"}, {"Steps": "20"}, "steps 20 (baseline 30)"),
            ({}, {"Clip skip": "2"}, "clip skip 2 (baseline 1)"),
            (
                {"Sampler": "Euler a"},
                {"Sampler": "Euler"},
                "sampler euler (baseline eulera)",
            ),
            ({}, {"RNG": "CPU"}, "noise source cpu (baseline gpu)"),
            ({"lora": "a:1"}, {"lora": "a:0.5"}, "LoRA a:0.5 (baseline a:1)"),
            ({}, {"Hires upscale": "2"}, "hires upscale 2 (baseline none)"),
            (
                {"Model hash": "6ce0161689"},
                {"Model hash": "cc6cb27103"},
                "model hash cc6cb27103 (baseline 6ce0161689)",
            ),
            ({"VAE": "vae-ft-mse.pt"}, {}, "VAE automatic (baseline vae-ft-mse)"),
        ],
    )
    def test_of_one_program_that_differ(
        self, first: dict[str, Any], second: dict[str, Any], said: str
    ) -> None:
        assert apart(first, second) == [said]

    @pytest.mark.parametrize(
        ("first", "second", "said"),
        [
            (
                {"Sampler": "Euler a", "Schedule type": "Automatic"},
                {"sampler": "euler_ancestral"},
                [],
            ),
            (
                {"Sampler": "Restart"},
                {"sampler": "res_multistep"},
                [],
            ),  # nobody knows whether they are one
            (
                {"Sampler": "DPM++ 2M SDE"},
                {"sampler": "dpmpp_2m_sde_gpu"},
                [],
            ),  # which draws its noise elsewhere
            ({"Clip skip": "2"}, {}, []),  # nor what the other one leaves out
            ({"Clip skip": "2"}, {"stop": 1, "clip_skip": -2}, []),
            ({"Steps": "30"}, {"steps": 20}, ["steps 20 (baseline 30)"]),
            (
                {"Sampler": "Euler a"},
                {"sampler": "euler"},
                ["sampler euler (baseline eulera)"],
            ),
        ],
    )
    def test_of_two_programs(
        self, first: dict[str, Any], second: dict[str, Any], said: list[str]
    ) -> None:
        assert apart(first, second, ("A1111", "ComfyUI")) == said

    def test_that_are_meant_to_differ_are_left_out_and_the_others_counted(self) -> None:
        same = ("A1111", {"steps": "30", "clip skip": "1"})
        other = ("A1111", {"steps": "20", "clip skip": "2"})
        assert differing([(same, other), (same, same)], ["steps"]) == [
            "clip skip 2 (baseline 1) in 1 of 2 images"
        ]


class TestFormats:
    @pytest.mark.parametrize(
        ("name", "options", "said", "lossy"),
        [
            ("a.png", {}, "PNG", False),
            ("a.bmp", {}, "BMP", False),
            ("a.jpg", {"quality": 60}, "JPEG of quality 60", True),
            ("a.jpg", {"quality": 95}, "JPEG of quality 95", True),
            (
                "a.jpg",
                {"quality": 95, "subsampling": 0},
                "JPEG of quality 95 with whole colours (4:4:4)",
                True,
            ),
            ("a.webp", {"quality": 80}, "lossy WebP", True),
            ("a.webp", {"lossless": True}, "lossless WebP", False),
            (
                "a.webp",
                {"lossless": True, "exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"},
                "lossless WebP",
                False,
            ),
            ("a.gif", {}, "GIF of 1 colours", True),
        ],
    )
    def test_are_told(
        self, tmp_path: Path, name: str, options: dict[str, Any], said: str, lossy: bool
    ) -> None:
        Image.new("RGB", (16, 16), "teal").save(tmp_path / name, **options)
        written = format_of(open_image(tmp_path / name), tmp_path / name)
        assert (written.name, written.lossy) == (said, lossy)

    @pytest.mark.parametrize(
        ("depth", "said", "lossy"), [(8, "PNG", False), (16, "PNG of 16 bits", True)]
    )
    def test_colours_of_16_bits_are_cut_to_8(
        self, tmp_path: Path, depth: int, said: str, lossy: bool
    ) -> None:
        """Pillow keeps the upper halves, and who saved 8 bits rounded: up to a level apart."""
        file = tmp_path / "a.png"
        file.write_bytes(grey_in_colours(depth))
        written = format_of(open_image(file), file)
        assert (written.name, written.lossy) == (said, lossy)

    @pytest.mark.parametrize(
        ("mode", "name", "said"),
        [
            ("L", "a.png", "PNG in grey"),
            ("L", "a.jpg", "JPEG of quality 75 in grey"),
            ("CMYK", "a.tif", "TIFF in CMYK"),
        ],
    )
    def test_name_colours_that_are_not_kept(
        self, tmp_path: Path, mode: str, name: str, said: str
    ) -> None:
        file = tmp_path / name
        Image.new("RGB", (16, 16), "teal").convert(mode).save(file)
        written = format_of(open_image(file), file)
        assert (written.name, written.lossy) == (said, True)

    def test_name_a_profile_of_other_colours(self, tmp_path: Path) -> None:
        from PIL import ImageCms

        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
        Image.new("RGB", (16, 16)).save(tmp_path / "a.png", icc_profile=profile)
        written = format_of(open_image(tmp_path / "a.png"), tmp_path / "a.png")
        assert "profile" in written.name
        assert written.lossy, "its colours are made those of sRGB"


def grey_in_colours(depth: int) -> bytes:
    """A PNG of one pixel with three samples of so many bits, which Pillow cannot write."""
    row = bytes([0, *[200] * (3 * depth // 8)])
    header = struct.pack(">IIBBBBB", 1, 1, depth, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in (
        (b"IHDR", header),
        (b"IDAT", zlib.compress(row)),
        (b"IEND", b""),
    ):
        file += struct.pack(">I", len(content)) + kind + content
        file += struct.pack(">I", zlib.crc32(kind + content))
    return file


def test_an_origin_says_nothing_by_itself() -> None:
    assert Origin().settings == {}
