"""What a program says of its images by names of its own is compared, and so is what sdopt's records say of its own."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdopt.apps.exchange.pairing import other_settings
from sdopt.apps.exchange.pictures import (
    ImportedPicture,
    ImportedRow,
    read_folder,
    read_table,
)
from sdopt.apps.exchange.scores import export
from sdopt.apps.exchange.times import unlike_times
from sdopt.errors import UsageError
from sdopt.gate.trust import doubts_of
from sdopt.record.files import read_result, write_result
from sdopt.report.notes import caveats_of
from sdopt.report.summary import summary_of
from tests.apps.exchange.test_unlike_folders import judged, plain
from tests.apps.exchange.test_unlike_folders import web_ui as web_ui_folder
from tests.apps.exchange.test_unlike_settings import (
    invokeai,
    node,
    novelai,
    read,
    web_ui,
)
from tests.command import Finished
from tests.records import reconfigure

Chunks = Mapping[str, str]


def swarm(**more: Any) -> Chunks:
    values = {
        "prompt": "a harbour",
        "negativeprompt": "fog",
        "seed": 42,
        "steps": 30,
        "swarm_version": "0.9.6",
    }
    return {"parameters": json.dumps({"sui_image_params": values | more})}


def swarm_file(digest: str) -> Chunks:
    values = json.loads(swarm()["parameters"])
    values["sui_models"] = [{"name": "m", "param": "model", "hash": digest}]
    return {"parameters": json.dumps(values)}


def fooocus(**more: Any) -> Chunks:
    values = {
        "prompt": "a harbour",
        "negative_prompt": "fog",
        "seed": "42",
        "steps": 30,
        "base_model": "xl",
    }
    return {
        "parameters": json.dumps(
            values | {"metadata_scheme": "fooocus", "version": "Fooocus v2.5.5"} | more
        )
    }


def simple_fooocus(weight: float) -> Chunks:
    values = {
        "Prompt": "a harbour",
        "Negative Prompt": "fog",
        "Seed": "42",
        "Steps": 30,
        "Base Model": "xl.safetensors",
        "LoRA 1": f"True : ships : {weight}",
        "LoRA 2": "False : trains : 1.0",
        "Version": "Fooocus v2.5.5 SimpleSDXL2",
    }
    return {"parameters": json.dumps(values)}


def draw_things(**more: Any) -> Chunks:
    values = {
        "c": "a harbour",
        "uc": "fog",
        "seed": 42,
        "steps": 30,
        "v2": {"seedMode": 2, "id": 1} | more,
    }
    return {"Comment": json.dumps(values)}


def flux(guidance: float, clip_l: str = "ink") -> dict[str, Any]:
    return node(
        "CLIPTextEncodeFlux",
        t5xxl="a harbour",
        clip_l=clip_l,
        guidance=guidance,
        clip=["1", 1],
    )


def power_lora(**weights: float) -> dict[str, Any]:
    row = {"on": True, "lora": "ships.safetensors", **weights}
    off = {"on": False, "lora": "trains.safetensors", "strength": 1}
    return node("Power Lora Loader (rgthree)", model=["1", 0], lora_1=row, lora_2=off)


def canvas(weight: float) -> dict[str, Any]:
    adapter = {"model": {"name": "canny"}, "weight": weight}
    layer = {"id": f"layer:{weight}", "isEnabled": True, "controlAdapter": adapter}
    off = {"id": "b", "isEnabled": False, "controlAdapter": {"weight": weight}}
    return {"controlLayers": [layer, off], "rasterLayers": [{"opacity": weight}]}


def mflux(**more: Any) -> Chunks:
    values = {
        "mflux_version": "0.13.0",
        "prompt": "a harbour",
        "negative_prompt": "fog",
        "seed": 42,
        "base_model": "None",
    }
    return {"Comment": json.dumps(values | more)}


def cpp(commit: str = "228c707", **whole: Any) -> Chunks:
    """Returns the line of stable-diffusion.cpp with the JSON that it ends with."""
    values = {
        "schema": "sdcpp.image.params/v1",
        "generator": {"name": "stable-diffusion.cpp", "commit": commit},
        "seed": 42,
        "strength": 0.75,
        "clip_skip": -1,
        "sampling": {"steps": 30, "flow_shift": None, "scheduler": "discrete"},
        "models": {"clip_l": "clip_l.gguf", "t5xxl": "t5.gguf"},
    }
    line = (
        "TE: clip_l.gguf, TE: t5.gguf, Version: stable-diffusion.cpp, SDCPP: "
        + json.dumps(values | whole)
    )
    return web_ui(line, sampler="euler")


def shifted(shift: float) -> dict[str, Any]:
    return {"steps": 30, "flow_shift": shift, "guidance": {"txt_cfg": 7}}


def saved_as_web_ui(**parts: Any) -> Chunks:
    return {**comfy(**parts), **web_ui("Version: ComfyUI")}


def unknown_sampler(kind: str, loader: str = "a", **values: Any) -> Chunks:
    """Returns a graph whose sampler has neither prompts nor parts that are known."""
    graph = {
        "1": node("Loader", weights_of=loader),
        "2": node(kind, of=["1", 0], **values),
        "3": node("SaveImage", images=["2", 0]),
    }
    return {"prompt": json.dumps(graph)}


def lora(clip: float) -> dict[str, Any]:
    return node(
        "LoraLoader",
        lora_name="ships.safetensors",
        strength_model=1,
        strength_clip=clip,
        model=["1", 0],
        clip=["1", 1],
    )


def invokeai_2(steps: int) -> Chunks:
    prompt = [{"prompt": "a harbour [fog]", "weight": 1.0}]
    image = {"prompt": prompt, "steps": steps, "seed": 42, "sampler": "k_lms"}
    return {"sd-metadata": json.dumps({"model_weights": "m", "image": image})}


def dream(more: str = "") -> Chunks:
    return {"Dream": f'"a harbour [fog]" -s50 -S42 -A k_lms {more}'.strip()}


FORGE = "Version: f2.0.1v1.10.1-previous-1"


def tagged(tag: str, sampler: str = "Euler a", more: str = "Version: v1.9") -> Chunks:
    text = web_ui(more, sampler)["parameters"]
    return {"parameters": text.replace("a harbour", f"a harbour {tag}")}


def comfy(
    *,
    guide: Chunks | None = None,
    second: float | None = None,
    ends: int = 10000,
    text: Chunks | None = None,
    then: Chunks | None = None,
    prefix: str = "a",
    start: str = "",
) -> Chunks:
    graph: dict[str, Any] = {
        "1": node("CheckpointLoaderSimple", ckpt_name="m.safetensors"),
        "2": text or node("CLIPTextEncode", text="a harbour", clip=["1", 1]),
        "3": node("CLIPTextEncode", text="fog", clip=["1", 1]),
        "4": guide or node("Reroute", model=["1", 0]),
        "5": node("KSamplerAdvanced", noise_seed=42, steps=30, end_at_step=ends, model=["4", 0], positive=["2", 0],
                  negative=["3", 0]),
    }  # fmt: skip
    if start:
        graph["11"] = node("LoadImage", image=start)
        graph["12"] = node("VAEEncode", pixels=["11", 0], vae=["1", 2])
        graph["5"]["inputs"]["latent_image"] = ["12", 0]
    if second is not None:
        inputs = {"seed": 1, "steps": 12, "denoise": second, "model": ["4", 0]}
        inputs |= {"positive": ["2", 0], "negative": ["3", 0], "latent_image": ["5", 0]}
        graph["6"] = node("KSampler", **inputs)
    last = "5" if second is None else "6"
    graph["7"] = node("VAEDecode", samples=[last, 0], vae=["1", 2])
    graph["8"] = then or node("Reroute", image=["7", 0])
    graph["9"] = node("SaveImage", filename_prefix=prefix, images=["8", 0])
    graph["10"] = node("LoadImage", image=prefix)  # of no use to the image
    return {"prompt": json.dumps(graph)}


def nunchaku_lora(weight: float) -> Chunks:
    inputs = {"lora_name": "ships.safetensors", "lora_strength": weight}
    return node("NunchakuFluxLoraLoader", **inputs, model=["1", 0])


def saved_as(name: str) -> Chunks:
    graph: dict[str, Any] = json.loads(comfy()["prompt"])
    graph["20"] = node("StringConstant", string=name)
    graph["9"]["inputs"]["filename_prefix"] = ["20", 0]
    return {"prompt": json.dumps(graph)}


def guided(kind: str, **inputs: Any) -> Chunks:
    """Returns a graph whose sampler is in parts, with a guider of a kind."""
    graph: dict[str, Any] = json.loads(comfy()["prompt"])
    graph["5"] = node("SamplerCustomAdvanced", noise=["13", 0], guider=["14", 0])
    graph["13"] = node("RandomNoise", noise_seed=42)
    graph["14"] = node(kind, model=["1", 0], **inputs)
    return {"prompt": json.dumps(graph)}


def script(**call: Any) -> Chunks:
    values = {"prompt": "a harbour", "negative_prompt": "fog", "generator_seed": 42}
    return {"metadata": json.dumps({**values, "num_inference_steps": 30, **call})}


def fooocus_as_web_ui(weight: float) -> Chunks:
    hashes = 'Lora hashes: "ships: 4852686128, oil: 11aa"'
    weights = f'Lora weights: "ships: {weight}, oil: 0.1"'
    return web_ui(f"{hashes}, {weights}, Version: Fooocus v2.5.5")


def sdnext(more: str) -> Chunks:
    text = "a harbour\nNegative prompt: fog\nSteps: 30, Size: 64x64, Seed: 42, CFG scale: 6, App: SD.Next, "
    return {"parameters": text + more}


def saved_untold(steps: int) -> Chunks:
    """Returns a graph beside the text of a node that saves as A1111 does, and that nothing is joined to."""
    graph: dict[str, Any] = json.loads(comfy()["prompt"])
    graph["5"]["inputs"]["steps"] = steps
    own = "Steps: 20, Sampler: Euler, CFG scale: 7.0, Seed: 0, Size: 512x512, Version: ComfyUI"
    text = f"unknown\nNegative prompt: unknown\n{own}"
    return {"prompt": json.dumps(graph), "parameters": text}


def saved_told(path: str) -> Chunks:
    """Returns a graph whose node that saves images is told their prompts and seed."""
    graph: dict[str, Any] = json.loads(comfy()["prompt"])
    told = {"seed": 42, "steps": 30, "positive": "a harbour", "negative": "fog"}
    graph["9"] = node("SDPromptSaver", **told, path=path, images=["8", 0])
    return {"prompt": json.dumps(graph)}


def sampled(name: str) -> Chunks:
    graph: dict[str, Any] = json.loads(comfy()["prompt"])
    graph["5"]["inputs"]["sampler_name"] = name
    return {"prompt": json.dumps(graph)}


def sampled_and_saved(prefix: str) -> Chunks:
    """Returns a graph whose last node samples and saves."""
    graph: dict[str, Any] = json.loads(comfy()["prompt"])
    graph = {number: graph[number] for number in "12345"}
    graph["5"]["inputs"]["save_prefix"] = prefix
    return {"prompt": json.dumps(graph)}


def loader_beside_tag(weight: float) -> Chunks:
    graph: dict[str, Any] = json.loads(comfy(guide=lora(clip=1))["prompt"])
    graph["4"]["inputs"]["strength_model"] = weight
    text = "a harbour <lora:oil:0.5>"
    graph["2"] = node("PCLazyTextEncode", text=text, clip=["1", 1])
    return {"prompt": json.dumps(graph)}


def refined_in_tiles(denoise: float) -> Chunks:
    graph: dict[str, Any] = json.loads(comfy(second=denoise)["prompt"])
    graph["6"]["class_type"] = "BNK_TiledKSampler"
    return {"prompt": json.dumps(graph)}


def lora_manager(weight: float, expanded: bool) -> Chunks:
    row = {"name": "ships", "strength": weight, "active": True, "expanded": expanded}
    rows = {"__value__": [row]}
    return comfy(
        guide=node("Lora Loader (LoraManager)", loras=rows, model=["1", 0]),
    )


FREE_U = node("FreeU_V2", b1=1.3, b2=1.4, s1=0.9, s2=0.2, model=["1", 0])

UNLIKE: dict[str, tuple[Chunks, Chunks, str]] = {
    "A1111, faces restored": (
        web_ui("Version: v1.9"),
        web_ui("Face restoration: CodeFormer, Version: v1.9"),
        "Face restoration codeformer (baseline none)",
    ),
    "A1111, from an image": (
        web_ui("Version: v1.9"),
        web_ui("Denoising strength: 0.6, Version: v1.9"),
        "denoising strength 0.6 (baseline 1)",
    ),
    "A1111, noise that ends at zero": (
        web_ui("Schedule type: Karras, Version: v1.9"),
        web_ui(
            "Schedule type: Karras, Noise Schedule: Zero Terminal SNR, Version: v1.9"
        ),
        "Noise Schedule zero terminal snr (baseline none)",
    ),
    "A1111, faces restored afterwards": (
        web_ui("Version: v1.9"),
        {**web_ui("Version: v1.9"), "postprocessing": "GFPGAN visibility: 0.5"},
        "GFPGAN visibility 0.5 (baseline none)",
    ),
    "A1111, tiling": (
        web_ui("Version: v1.9"),
        web_ui("Tiling: True, Version: v1.9"),
        "Tiling true",
    ),
    "A1111, guidance of the second pass": (
        web_ui("Hires CFG Scale: 4, Version: v1.9"),
        web_ui("Hires CFG Scale: 8, Version: v1.9"),
        "Hires CFG Scale 8 (baseline 4)",
    ),
    "A1111, brackets without normalisation": (
        web_ui("Emphasis: No norm, Version: v1.9"),
        web_ui("Version: v1.9"),
        "Emphasis none (baseline no norm)",
    ),
    "A1111, an extension": (
        web_ui("Dynamic thresholding enabled: True, Mimic scale: 7, Version: v1.9"),
        web_ui("Dynamic thresholding enabled: True, Mimic scale: 10, Version: v1.9"),
        "Mimic scale 10 (baseline 7)",
    ),
    "A1111, a decoder in place of the VAE": (
        web_ui("VAE Decoder: TAESD, Version: v1.9"),
        web_ui("Version: v1.9"),
        "VAE Decoder none (baseline taesd)",
    ),
    "A1111, tiling before an update": (
        web_ui("Tiling: True, Version: v1.8"),
        web_ui("Version: v1.9"),
        "Tiling none (baseline true)",
    ),
    "A1111, a long text of an extension": (
        web_ui(f'ADetailer prompt: "{"eyes, " * 80}blue", Version: v1.9'),
        web_ui(f'ADetailer prompt: "{"eyes, " * 80}grey", Version: v1.9'),
        "ADetailer prompt eyes, ",
    ),
    "A1111, a LoRA that is weaker in the denoiser": (
        tagged("<lora:ships:0.8>"),
        tagged("<lora:ships:0.8:0.4>"),
        "LoRA ships:te 0.8 unet 0.4 (baseline ships:0.8)",
    ),
    "A1111, a LoRA whose weights are named": (
        tagged("<lora:ships:te=1:unet=1>"),
        tagged("<lora:ships:te=1:unet=0.4>"),
        "LoRA ships:te 1 unet 0.4 (baseline ships:1)",
    ),
    "A1111, a LoRA in some blocks": (
        tagged("<lora:ships:1:lbw=1,0,0,1>"),
        tagged("<lora:ships:1:lbw=1,1,0,1>"),
        "LoRA ships:1 lbw 1,1,0,1 (baseline ships:1 lbw 1,0,0,1)",
    ),
    "A1111 and Forge, clip skip": (
        web_ui("Clip skip: 2, Version: v1.9"),
        web_ui(FORGE),
        "clip skip 1 (baseline 2)",
    ),
    "A1111 and Forge, a second pass of other guidance": (
        web_ui("Hires CFG Scale: 4, Version: v1.9"),
        web_ui(f"Hires CFG Scale: 8, {FORGE}"),
        "Hires CFG Scale 8 (baseline 4)",
    ),
    "A1111 and Forge, tiling": (
        web_ui("Version: v1.9"),
        web_ui(f"Tiling: True, {FORGE}"),
        "Tiling true (baseline none)",
    ),
    "A1111 and ComfyUI, a LoRA": (
        tagged("<lora:ships:1>", sampler="Euler", more="Version: v1.9"),
        comfy(),
        "LoRA none (baseline ships:1)",
    ),
    "InvokeAI, seamless": (
        invokeai(),
        invokeai(seamless_x=True),
        "seamless_x true (baseline none)",
    ),
    "InvokeAI, a prompt for the style": (
        invokeai(positive_style_prompt="oil"),
        invokeai(positive_style_prompt="ink"),
        "positive_style_prompt ink (baseline oil)",
    ),
    "InvokeAI, an IP-Adapter": (
        invokeai(ipAdapters=[{"weight": 1, "image": {"image_name": "a.png"}}]),
        invokeai(),
        "ipAdapters none (baseline",
    ),
    "InvokeAI, another file of one name": (
        invokeai(model={"name": "m", "hash": "blake3:aa"}),
        invokeai(model={"name": "m", "hash": "blake3:bb"}),
        "model file bb (baseline aa)",
    ),
    "InvokeAI, another LoRA of one name": (
        invokeai(loras=[{"model": {"name": "l", "hash": "blake3:aa"}, "weight": 1}]),
        invokeai(loras=[{"model": {"name": "l", "hash": "blake3:bb"}, "weight": 1}]),
        "LoRA files blake3:bb (baseline blake3:aa)",
    ),
    "SwarmUI, another file of one name": (
        swarm_file("0xaa"),
        swarm_file("0xbb"),
        "model file bb (baseline aa)",
    ),
    "SwarmUI, how it refines": (
        swarm(refinermethod="PostApply"),
        swarm(refinermethod="StepSwap"),
        "refinermethod stepswap (baseline postapply)",
    ),
    "SwarmUI, guided by attention": (
        swarm(selfattentionguidancescale=0.5),
        swarm(),
        "selfattentionguidancescale none (baseline 0.5)",
    ),
    "InvokeAI, a layer of control on its canvas": (
        invokeai(canvas_v2_metadata=canvas(0.5)),
        invokeai(canvas_v2_metadata=canvas(1)),
        "canvas [",
    ),
    "mflux, fewer steps": (
        mflux(steps=14),
        mflux(steps=10),
        "steps 10 (baseline 14)",
    ),
    "mflux, a weaker LoRA": (
        mflux(lora_paths=["a/ships.safetensors"], lora_scales=[1.0]),
        mflux(lora_paths=["a/ships.safetensors"], lora_scales=[0.5]),
        "LoRA ships:0.5 (baseline ships:1)",
    ),
    "a script, guidance that is computed": (
        script(true_cfg_scale=4.0),
        script(true_cfg_scale=1.0),
        "true_cfg_scale 1 (baseline 4)",
    ),
    "a script, a weaker LoRA": (
        script(),
        script(cross_attention_kwargs={"scale": 0.5}),
        'cross_attention_kwargs {"scale": 0.5} (baseline none)',
    ),
    "a script, a refiner that begins early": (
        script(denoising_end=0.8),
        script(denoising_end=0.5),
        "denoising_end 0.5 (baseline 0.8)",
    ),
    "SwarmUI, a shift": (swarm(), swarm(sigmashift=3), "shift 3 (baseline none)"),
    "SwarmUI, from an image": (
        swarm(),
        swarm(initimagecreativity=0.6),
        "denoising strength 0.6 (baseline 1)",
    ),
    "ComfyUI, a shift": (
        comfy(),
        comfy(guide=node("ModelSamplingSD3", shift=6.0, model=["1", 0])),
        "shift 6 (baseline none)",
    ),
    "ComfyUI, FLUX's guidance in one of both": (
        comfy(),
        comfy(text=flux(2.0, clip_l="")),
        "distilled guidance 2 (baseline none)",
    ),
    "ComfyUI, another starting image": (
        comfy(start="a.png"),
        comfy(start="b.png"),
        "LoadImage image=b.png (baseline image=a.png)",
    ),
    "stable-diffusion.cpp, fewer layers for guidance": (
        web_ui("Version: stable-diffusion.cpp"),
        web_ui("Skip layer guidance: 2.5, Version: stable-diffusion.cpp"),
        "Skip layer guidance 2.5 (baseline none)",
    ),
    "SwarmUI, FreeU": (
        swarm(freeublockone=1.1),
        swarm(),
        "freeublockone none (baseline 1.1)",
    ),
    "Fooocus, sharpness": (
        fooocus(sharpness=2.0),
        fooocus(sharpness=10.0),
        "sharpness 10 (baseline 2)",
    ),
    "Fooocus, styles": (
        fooocus(styles="['V2']"),
        fooocus(styles="[]"),
        "styles none (baseline ['v2'])",
    ),
    "a fork of Fooocus, a weaker LoRA": (
        simple_fooocus(0.8),
        simple_fooocus(0.3),
        "LoRA ships:0.3 (baseline ships:0.8)",
    ),
    "Draw Things, how seeds are used": (
        draw_things(),
        draw_things(seedMode=0),
        "seedMode none (baseline 2)",
    ),
    "Draw Things, sharpness": (
        draw_things(sharpness=3),
        draw_things(),
        "sharpness none (baseline 3)",
    ),
    "NovelAI, thresholds": (
        novelai("XL"),
        {
            **novelai("XL"),
            "Comment": novelai("XL")["Comment"].replace(
                '"uc"', '"dynamic_thresholding": true, "uc"'
            ),
        },
        "dynamic_thresholding true (baseline none)",
    ),
    "ComfyUI, FreeU": (comfy(), comfy(guide=FREE_U), "FreeU_V2 b1=1.3, b2=1.4"),
    "ComfyUI, a second pass": (
        comfy(),
        comfy(second=0.5),
        "KSampler denoise=0.5, seed=1, steps=12 (baseline none)",
    ),
    "ComfyUI, another second pass": (
        comfy(second=0.3),
        comfy(second=0.5),
        "KSampler denoise=0.5, seed=1, steps=12 (baseline denoise=0.3",
    ),
    "ComfyUI, another prediction": (
        comfy(guide=node("ModelSamplingDiscrete", sampling="eps", model=["1", 0])),
        comfy(guide=node("ModelSamplingDiscrete", sampling="v", model=["1", 0])),
        "ModelSamplingDiscrete sampling=v (baseline sampling=eps)",
    ),
    "ComfyUI, a guide that nobody listed": (
        comfy(guide=node("SkimmedCFG", scale=4.0, model=["1", 0])),
        comfy(guide=node("SkimmedCFG", scale=7, model=["1", 0])),
        "SkimmedCFG scale=7 (baseline scale=4)",
    ),
    "ComfyUI, guided by attention": (
        comfy(),
        comfy(guide=node("PerturbedAttentionGuidance", scale=3, model=["1", 0])),
        "PerturbedAttentionGuidance scale=3 (baseline none)",
    ),
    "ComfyUI, a list in a node": (
        comfy(guide=node("Styles", names={"__value__": ["a", "b"]}, model=["1", 0])),
        comfy(guide=node("Styles", names={"__value__": ["a"]}, model=["1", 0])),
        "Styles names={'__value__': ['a']}",
    ),
    "ComfyUI, a LoRA that is weaker for texts": (
        comfy(guide=power_lora(strength=1, strengthTwo=1)),
        comfy(guide=power_lora(strength=1, strengthTwo=0.5)),
        "LoRA ships:te 0.5 unet 1 (baseline ships:1)",
    ),
    "ComfyUI, a patch without a value": (
        comfy(),
        comfy(guide=node("DifferentialDiffusion", model=["1", 0])),
        "DifferentialDiffusion in use (baseline none)",
    ),
    "ComfyUI, a LoRA for texts alone": (
        comfy(guide=lora(clip=1)),
        comfy(guide=lora(clip=0.5)),
        "LoraLoader strength_clip=0.5 (baseline strength_clip=1)",
    ),
    "ComfyUI, scaled after it was decoded": (
        comfy(then=node("ImageScaleBy", scale_by=1.0, image=["7", 0])),
        comfy(then=node("ImageScaleBy", scale_by=1.5, image=["7", 0])),
        "ImageScaleBy scale_by=1.5 (baseline scale_by=1)",
    ),
    "ComfyUI, FLUX's guidance in the node of the prompt": (
        comfy(text=flux(3.5)),
        comfy(text=flux(2)),
        "distilled guidance 2 (baseline 3.5)",
    ),
    "ComfyUI, another text for FLUX's other encoder": (
        comfy(text=flux(3.5)),
        comfy(text=flux(3.5, clip_l="oil")),
        "CLIPTextEncodeFlux clip_l=oil (baseline clip_l=ink)",
    ),
    "ComfyUI, saved as A1111 does": (
        {**comfy(), **web_ui("Version: ComfyUI")},
        {**comfy(guide=FREE_U), **web_ui("Version: ComfyUI")},
        "FreeU_V2 b1=1.3, b2=1.4",
    ),
    "ComfyUI, a sampler that ends early": (
        comfy(),
        comfy(ends=20),
        "last step 20 (baseline none)",
    ),
    "A1111, tiles of the denoiser": (
        web_ui('Tiled Diffusion: {"Method": "MultiDiffusion"}, Version: v1.9'),
        web_ui("Version: v1.9"),
        'Tiled Diffusion none (baseline {"method": "multidiffusion"})',
    ),
    "ComfyUI, tiles of the denoiser": (
        comfy(guide=node("TiledDiffusion", method="MultiDiffusion", model=["1", 0])),
        comfy(),
        "TiledDiffusion none (baseline method=multidiffusion)",
    ),
    "ComfyUI, fewer colours": (
        comfy(then=node("ImageQuantize", colors=16, image=["7", 0])),
        comfy(),
        "ImageQuantize none (baseline colors=16)",
    ),
    "ComfyUI, LoRAs of Nunchaku": (
        comfy(guide=node("NunchakuFluxLoraStack", lora_name_1="a", model=["1", 0])),
        comfy(guide=node("NunchakuFluxLoraStack", lora_name_1="b", model=["1", 0])),
        "NunchakuFluxLoraStack lora_name_1=b (baseline lora_name_1=a)",
    ),
    "ComfyUI, a LoRA of Nunchaku": (
        comfy(guide=nunchaku_lora(0.8)),
        comfy(guide=nunchaku_lora(0.3)),
        "LoRA ships:0.3 (baseline ships:0.8)",
    ),
    "ComfyUI, saved as A1111 does, a weaker LoRA": (
        saved_as_web_ui(guide=nunchaku_lora(0.8)),
        saved_as_web_ui(guide=nunchaku_lora(0.3)),
        "LoRA ships:0.3 (baseline ships:0.8)",
    ),
    "ComfyUI, saved as A1111 does, FLUX's guidance": (
        saved_as_web_ui(text=flux(3.5)),
        saved_as_web_ui(text=flux(2)),
        "distilled guidance 2 (baseline 3.5)",
    ),
    "stable-diffusion.cpp, a LoRA that is no tag": (
        cpp(loras=[{"name": "ships.safetensors", "multiplier": 0.8}]),
        cpp(loras=[{"name": "ships.safetensors", "multiplier": 0.3}]),
        "LoRA ships:0.3 (baseline ships:0.8)",
    ),
    "stable-diffusion.cpp, a shift": (
        cpp(sampling=shifted(3)),
        cpp(sampling=shifted(1)),
        "shift 1 (baseline 3)",
    ),
    "stable-diffusion.cpp, the second of its text encoders": (
        cpp(models={"clip_l": "clip_l.gguf", "t5xxl": "t5.gguf"}),
        cpp(models={"clip_l": "clip_l.gguf", "t5xxl": "t5_q4.gguf"}),
        "t5xxl t5_q4.gguf (baseline t5.gguf)",
    ),
    "InvokeAI 2": (invokeai_2(50), invokeai_2(30), "steps 30 (baseline 50)"),
    "InvokeAI 1, a variation": (dream(), dream("-V 7:0.2"), "V 7:0.2 (baseline none)"),
    "InvokeAI 1, tiles": (dream(), dream("--seamless"), "-seamless on (baseline"),
    "Krita, which knows no digest of a checkpoint": (
        web_ui("Model hash: unknown, Model: a.safetensors"),
        web_ui("Model hash: unknown, Model: b.safetensors"),
        "model b (baseline a)",
    ),
    "ComfyUI, another form of a sampler": (
        sampled("uni_pc"),
        sampled("uni_pc_bh2"),
        "sampler unipcbh2 (baseline unipc)",
    ),
    "ComfyUI, a sampler whose noise is drawn elsewhere": (
        sampled("dpmpp_2m_sde"),
        sampled("dpmpp_2m_sde_gpu"),
        "sampler dpm++2msdegpu (baseline dpm++2msde)",
    ),
    "ComfyUI, another checkpoint of Nunchaku": (
        comfy(guide=node("NunchakuFluxDiTLoader", model_path="dev")),
        comfy(guide=node("NunchakuFluxDiTLoader", model_path="krea")),
        "model krea (baseline dev)",
    ),
    "Fooocus as A1111, a weaker LoRA": (
        fooocus_as_web_ui(0.8),
        fooocus_as_web_ui(0.3),
        "Lora weights ships: 0.3, oil: 0.1 (baseline ships: 0.8, oil: 0.1)",
    ),
    "SD.Next, another sampler than its usual one": (
        sdnext("Model: m"),
        sdnext("Sampler: Euler a, Model: m"),
        "sampler eulera (baseline unnamed)",
    ),
    "ComfyUI, saved as A1111 does by a node that is told nothing": (
        saved_untold(30),
        saved_untold(15),
        "steps 15 (baseline 30)",
    ),
    "ComfyUI, a weaker LoRA beside one of a tag": (
        loader_beside_tag(0.8),
        loader_beside_tag(0.3),
        "LoRA oil:0.5, ships:0.3 (baseline oil:0.5, ships:0.8)",
    ),
    "ComfyUI, a second pass in tiles": (
        refined_in_tiles(0.1),
        refined_in_tiles(0.5),
        "BNK_TiledKSampler denoise=0.5, seed=1, steps=12 (baseline denoise=0.1",
    ),
    "ComfyUI, a weaker LoRA of a manager": (
        lora_manager(1, expanded=True),
        lora_manager(0.5, expanded=True),
        "Lora Loader (LoraManager) loras=",
    ),
    "InvokeAI, a choice that is automatic": (
        invokeai(dype_preset="auto"),
        invokeai(),
        "dype_preset none (baseline auto)",
    ),
    "mflux, another LoRA of full weight": (
        mflux(lora_paths=["a/ships.safetensors"]),
        mflux(lora_paths=["a/trains.safetensors"]),
        "LoRA trains:1 (baseline ships:1)",
    ),
    "a script, a LoRA's scale": (
        script(loras=[{"path": "a.safetensors", "scale": 0.8}]),
        script(loras=[{"path": "a.safetensors", "scale": 0.2}]),
        "LoRA a:0.2 (baseline a:0.8)",
    ),
    "a script, a LoRA that is named otherwise": (
        script(loras=[{"civitai": 5, "weight": 1}]),
        script(loras=[{"civitai": 6, "weight": 1}]),
        'LoRA {"civitai": 6, "weight": 1}:1',
    ),
    "a script, weights of LoRAs apart": (
        script(loras=["a"], lora_scales=[0.8]),
        script(loras=["a"], lora_scales=[0.2]),
        "lora_scales [0.2] (baseline [0.8])",
    ),
    "a script, another checkpoint": (
        script(pretrained_model_name_or_path="org/one"),
        script(pretrained_model_name_or_path="org/other"),
        "model other (baseline one)",
    ),
    "a script, a layer of CLIP that is left out": (
        script(clip_skip=1),
        script(),
        "clip skip 1 (baseline 2)",
    ),
    "a script, another image of a ControlNet": (
        script(control_image="a.png"),
        script(control_image="b.png"),
        "control_image b.png (baseline a.png)",
    ),
    "a script, in a chunk of its own name": (
        {"params": script()["metadata"]},
        {"params": script(num_inference_steps=15)["metadata"]},
        "steps 15 (baseline 30)",
    ),
    "stable-diffusion.cpp, layers in a list": (
        web_ui("Skip layers: [7, 8, 9], Version: stable-diffusion.cpp"),
        web_ui("Skip layers: [7, 9, 10], Version: stable-diffusion.cpp"),
        "Skip layers [7, 9, 10] (baseline [7, 8, 9])",
    ),
    "A1111 and Forge, a guidance that one of them has": (
        web_ui("Version: v1.10.1"),
        web_ui("sag_enabled: True, Version: f2.0.1v1.10.1"),
        "sag_enabled true (baseline none)",
    ),
    "A1111 and ComfyUI, a refiner": (
        web_ui("Refiner: xl, Refiner switch at: 0.8", sampler="Euler"),
        comfy(),
        "refiner none (baseline xl)",
    ),
    "SwarmUI in two versions, tiles that join": (
        swarm(),
        swarm(swarm_version="0.9.7", seamlesstileable="true"),
        "seamlesstileable true (baseline none)",
    ),
    "a script, a schedule of its scheduler": (
        script(),
        script(use_karras_sigmas=True),
        "use_karras_sigmas true (baseline none)",
    ),
}


def pictures(folder: Path, *sides: Chunks) -> list[list[ImportedPicture]]:
    return [
        [ImportedPicture(folder / "a.png", read(folder, chunks))] for chunks in sides
    ]


@pytest.mark.parametrize("situation", UNLIKE)
def test_one_thing_apart_is_said(tmp_path: Path, situation: str) -> None:
    *both, said = UNLIKE[situation]
    first, second = pictures(tmp_path, *both)
    assert first[0].made_from == second[0].made_from == ("a harbour", "fog", 42)
    words = other_settings(first, second)
    assert len(words) == 1
    assert words[0].startswith(said)
    again, _ = pictures(tmp_path, *both)
    assert other_settings(first, again) == []


def of_invokeai(steps: int, style: str = "oil") -> Chunks:
    """Returns the graph of a workflow of InvokeAI, whose seed is drawn by another node."""
    nodes = {
        "n": {"type": "noise", "id": "n", "seed": 0, "width": 64, "is_intermediate": True},
        "c": {"type": "compel", "id": "c", "prompt": style},
        "d": {"type": "denoise_latents", "id": "d", "steps": steps, "scheduler": "euler"},
    }  # fmt: skip
    ends = {"destination": {"node_id": "n", "field": "seed"}}
    graph = {"id": style, "nodes": nodes, "edges": [ends]}
    return {"invokeai_graph": json.dumps(graph)}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (of_invokeai(20), ["steps 20 (baseline 30)"]),
        (
            of_invokeai(30, "ink"),
            ['compel {"prompt": "ink"} (baseline {"prompt": "oil"})'],
        ),
    ],
)
def test_a_workflow_of_invokeai_is_compared(
    tmp_path: Path, other: Chunks, said: list[str]
) -> None:
    first, second = pictures(tmp_path, of_invokeai(30), other)
    assert first[0].seed is None, "another node draws it, and 0 stands there"
    assert other_settings(first, second) == said


def test_a_guider_without_a_scale_does_not_guide(tmp_path: Path) -> None:
    plain_guider = guided("BasicGuider", conditioning=["2", 0])
    with_scale = guided("CFGGuider", positive=["2", 0], negative=["3", 0], cfg=3.5)
    first, second = pictures(tmp_path, plain_guider, with_scale)
    assert other_settings(first, second) == ["guidance scale 3.5 (baseline 1)"]
    assert other_settings(first, first) == []


def joined(**links: tuple[str, int]) -> Chunks:
    """Returns a graph with a VAE, a LoRA, a layer to skip to and a ControlNet, in which single links may be others."""
    graph: dict[str, Any] = {
        "1": node("CheckpointLoaderSimple", ckpt_name="m.safetensors"),
        "2": node("VAELoader", vae_name="ft.safetensors"),
        "3": {**lora(clip=1)},
        "4": node("CLIPSetLastLayer", stop_at_clip_layer=-2, clip=["3", 1]),
        "5": node("CLIPTextEncode", text="a harbour", clip=["4", 0]),
        "6": node("CLIPTextEncode", text="fog", clip=["4", 0]),
        "7": node("ControlNetApplyAdvanced", strength=1, positive=["5", 0], negative=["6", 0]),
        "8": node("KSampler", seed=42, steps=9, model=["3", 0], positive=["7", 0], negative=["7", 1]),
        "9": node("VAEDecode", samples=["8", 0], vae=["2", 0]),
        "10": node("SaveImage", images=["9", 0]),
    }  # fmt: skip
    for place, source in links.items():
        number, _, name = place.partition("_")
        graph[number.removeprefix("n")]["inputs"][name] = [*source]
    return {"prompt": json.dumps(graph)}


OF_CONTROL = "ControlNetApplyAdvanced"


@pytest.mark.parametrize(
    ("links", "mine", "theirs"),
    [
        (
            {"n9_vae": ("1", 2)},
            ["VAEDecode.vae from VAELoader"],
            ["VAEDecode.vae from CheckpointLoaderSimple"],
        ),
        (
            {"n8_positive": ("7", 1), "n8_negative": ("7", 0)},
            [
                f"KSampler.negative from {OF_CONTROL} (output 1)",
                f"KSampler.positive from {OF_CONTROL}",
            ],
            [
                f"KSampler.negative from {OF_CONTROL}",
                f"KSampler.positive from {OF_CONTROL} (output 1)",
            ],
        ),
        (
            {"n4_clip": ("1", 1)},
            ["CLIPSetLastLayer.clip from LoraLoader (output 1)"],
            ["CLIPSetLastLayer.clip from CheckpointLoaderSimple"],
        ),
        (
            {"n6_clip": ("3", 1)},
            ["CLIPTextEncode.clip from CLIPSetLastLayer"],
            ["CLIPTextEncode.clip from LoraLoader (output 1)"],
        ),
    ],
    ids=["the VAE", "sides of a ControlNet", "a LoRA of texts", "a layer for one text"],
)
def test_graphs_of_the_same_nodes_are_compared_by_their_links(
    tmp_path: Path,
    links: dict[str, tuple[str, int]],
    mine: list[str],
    theirs: list[str],
) -> None:
    first, second = pictures(tmp_path, joined(), joined(**links))
    *_, said = other_settings(first, second)
    assert said == f"links {', '.join(theirs)} (baseline {', '.join(mine)})"
    assert other_settings(first, second, ["VAE", "links"]) == []


def test_links_past_what_makes_calls_faster_are_the_same(tmp_path: Path) -> None:
    graph = json.loads(joined()["prompt"])
    graph["11"] = node("TorchCompileModel", backend="inductor", model=["3", 0])
    graph["12"] = node("Reroute", **{"": ["11", 0]})
    graph["8"]["inputs"]["model"] = ["12", 0]
    graph["13"] = node("PreviewImage", images=["9", 0])
    sides = joined(), {"prompt": json.dumps(graph)}
    first, second = pictures(tmp_path, *sides)
    assert other_settings(first, second) == []


def test_a_graph_in_a_circle_or_without_an_end_says_nothing(tmp_path: Path) -> None:
    circle = joined(n3_model=("8", 0))
    endless = {str(n): node("A", of=[str(n + 1), 0]) for n in range(5000)}
    endless["a"] = node("SaveImage", images=["0", 0])
    first, second = pictures(tmp_path, circle, {"prompt": json.dumps(endless)})
    assert first[0].origin.wiring is not None
    assert second[0].origin.wiring is None


def test_of_two_samplers_in_a_graph_each_is_compared(tmp_path: Path) -> None:
    def beside(steps: int) -> Chunks:
        graph = json.loads(comfy()["prompt"])
        graph["9"] = node("KSampler", seed=5, steps=steps, positive=["2", 0])
        graph["10"] = node("SaveImage", images=["9", 0])
        return {"prompt": json.dumps(graph)}

    first, second = pictures(tmp_path, beside(30), beside(15))
    assert other_settings(first, second) == [
        "KSampler seed=5, steps=15 (baseline seed=5, steps=30)"
    ]
    assert other_settings(first, first) == []


@pytest.mark.parametrize(
    ("kind", "values", "changed", "said"),
    [
        (
            "XlabsSampler",
            {"noise_seed": 4, "steps": 25, "true_gs": 3.5},
            {"steps": 10},
            "steps 10 (baseline 25)",
        ),
        (
            "easy preSampling",
            {"seed": 4, "steps": 25, "pipe": ["1", 0]},
            {"loader": "b"},
            "Loader weights_of=b (baseline weights_of=a)",
        ),
        (
            "Everything",
            {"rounds": 25},
            {"rounds": 10},
            "Everything rounds=10 (baseline rounds=25)",
        ),
    ],
)
def test_a_sampler_that_nobody_knows_is_compared(
    tmp_path: Path,
    kind: str,
    values: dict[str, Any],
    changed: dict[str, Any],
    said: str,
) -> None:
    first, second = pictures(
        tmp_path,
        unknown_sampler(kind, **values),
        unknown_sampler(kind, **(values | changed)),
    )
    assert first[0].origin.program == "ComfyUI"
    assert other_settings(first, second) == [said]
    assert other_settings(first, first) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            web_ui("Token merging ratio: 0.5, NGMS: 0.2, Version: v1.9"),
            web_ui("Version: v1.9"),
        ),
        (web_ui("FP8 weight: Enable, Version: v1.9"), web_ui("Version: v1.9")),
        (
            web_ui("Time: 3.2 sec, User: a, Batch pos: 1, Version: v1.9"),
            web_ui("Time: 9 sec, User: b, Version: v1.9"),
        ),
        (
            web_ui("Face restoration: , CFG Rescale φ: 0, Version: v1.3"),
            web_ui("Version: v1.3"),
        ),
        (
            web_ui("Pad conds: True, Emphasis: No norm, Version: v1.9"),
            web_ui("Version: v1.10"),
        ),
        (
            web_ui("ADetailer version: 24.8, Version: v1.9"),
            web_ui("ADetailer version: 24.9, Version: v1.9"),
        ),
        (web_ui("Sharpness: 3"), invokeai(steps=30, cfg_scale=7, sharpness=9)),
        (
            swarm(date="2025-01-01", generation_time="3 s", images=4),
            swarm(date="2026-01-01", generation_time="9 s"),
        ),
        (
            mflux(generation_time_seconds=20.1, created_at="a", quantize=8),
            mflux(generation_time_seconds=9.5, created_at="b", quantize=4),
        ),
        (
            comfy(),
            comfy(guide=node("TorchCompileModel", backend="inductor", model=["1", 0])),
        ),
        (
            comfy(),
            comfy(guide=node("PathchSageAttentionKJ", mode="auto", model=["1", 0])),
        ),
        (
            comfy(),
            comfy(
                guide=node(
                    "ModelPatchTorchSettings",
                    enable_fp16_accumulation=True,
                    model=["1", 0],
                )
            ),
        ),
        (cpp(), cpp(cache={"mode": "easycache"}, vae_tiling={"enabled": True})),
        (web_ui("ToMe: 0.5, App: SD.Next"), web_ui("App: SD.Next")),
        (
            sdnext("Operations: txt2img; hires, Model: m"),
            sdnext("Operations: hires; txt2img, Model: m"),
        ),
        (saved_told("a"), saved_told("b")),
        (sampled_and_saved("a"), sampled_and_saved("b")),
        (lora_manager(1, expanded=True), lora_manager(1, expanded=False)),
        (web_ui("Clip skip: 2, Version: v1.9"), script(clip_skip=1)),
        (swarm(vaetilesize=512), swarm()),
        (comfy(), comfy(prefix="b")),
        (saved_as("run a"), saved_as("run b")),
        (script(score=0.5, path="a"), script(score=0.7, path="b")),
        (tagged("<lora:ships:1>"), tagged("<lora:ships:te=1.0:unet=1>")),
        (web_ui("VAE: ft, Version: v1.9"), web_ui(FORGE)),
        (
            tagged("<lora:ships:1>", sampler="Euler"),
            comfy(guide=node("LoRA Stacker", lora_name_1="ships", model=["1", 0])),
        ),
        (web_ui("Version: v1.9", sampler="Euler"), comfy()),
        (
            draw_things(profile={"duration": 9.5, "timings": []}),
            draw_things(profile={"duration": 3.1, "timings": []}),
        ),
        (
            web_ui("Batch: 1x4, Index: 1x2, App: SD.Next"),
            web_ui("App: SD.Next"),
        ),
        (
            swarm(wildcardseed=17, personalnote="x", nopreviews=True),
            swarm(wildcardseed=-1),
        ),
        tuple(
            invokeai(t5_encoder={"key": key, "hash": "blake3:ab", "name": "t5_base"})
            for key in ("0b5d", "77aa")
        ),
    ],
    ids=[
        *(
            "options of speed",
            "weights in 8 bits",
            "times and users",
            "what is off",
            "a version that says less",
        ),
        "an extension's version",
        *("two programs", "dates", "times of mflux", "ComfyUI, a compiler"),
        *("ComfyUI, another attention", "ComfyUI, sums in half precision"),
        *("stable-diffusion.cpp, a cache", "tokens of SD.Next", "passes of SD.Next"),
        *("a path that a node is told", "a path of a sampler", "rows of an editor"),
        "layers of two counts",
        "tiles of SwarmUI",
        "ComfyUI, what does not make the image",
        "ComfyUI, a file's name from a node",
        "a script's scores and paths",
        *("a weight that is named", "a VAE in a program that names it otherwise"),
        *("a LoRA in a node that is not known", "A1111 and ComfyUI without a LoRA"),
        *("times of Draw Things", "a batch of SD.Next", "notes and seeds of SwarmUI"),
        "InvokeAI, a model's number in each installation",
    ],
)
def test_options_times_and_versions_are_no_difference(
    tmp_path: Path, one: Chunks, other: Chunks
) -> None:
    first, second = pictures(tmp_path, one, other)
    assert other_settings(first, second) == []


def test_arguments_of_calls_in_a_table_are_compared(tmp_path: Path) -> None:
    folders = []
    for scale in (4, 1):
        folder = plain(tmp_path / str(scale))
        rows = [
            f"{file.name},{number},{scale},{number + scale}"
            for number, file in enumerate(sorted(folder.glob("*.png")))
        ]
        header = "file,seed,true_cfg_scale,score"
        (folder / "prompts.csv").write_text("\n".join([header, *rows]))
        folders.append(read_folder(folder))
    first, second = folders
    assert other_settings(first, second) == ["true_cfg_scale 1 (baseline 4)"]


@pytest.mark.parametrize(
    ("name", "value", "before"),
    [("num_images_per_prompt", "4", "1"), ("width", "1024", ""), ("gpus", "2", "")],
)
def test_what_a_call_makes_and_where_is_read_of_tables_of_times(
    name: str, value: str, before: str
) -> None:
    def times(**more: str) -> list[ImportedRow]:
        return [ImportedRow("times.csv:2", {"seconds": "1", **more})]

    said = [f"times.csv: {name} {value} (baseline {before or 512})"]
    first = times() if before else times(**{name: "512"})
    assert unlike_times(first, times(**{name: value}), ()) == said
    assert unlike_times(first, first, ()) == []


def test_the_last_of_many_values_in_tables_of_times_counts() -> None:
    def times(*threads: int) -> list[ImportedRow]:
        values = [{"seconds": "1", "threads": str(count)} for count in threads]
        return [ImportedRow("times.csv", row) for row in values]

    said = "times.csv: threads 1 and 2 and 3 and … (baseline 1 and 2 and 3 and …)"
    assert unlike_times(times(1, 2, 3, 4), times(1, 2, 3, 8), ()) == [said]


def test_what_is_meant_is_named_as_the_program_names_it(tmp_path: Path) -> None:
    base = web_ui_folder(tmp_path / "base")
    other = web_ui_folder(tmp_path / "other", 0, **{"Face restoration": "CodeFormer"})
    assert judged(base, other).candidates[0].unlike == [
        "Face restoration codeformer (baseline none)"
    ]
    assert judged(base, other, changes="face restoration").candidates[0].unlike == []
    with pytest.raises(
        UsageError,
        match=r"--changes speed: unknown setting; choose from .*Face restoration",
    ):
        judged(base, other, changes="speed")


def test_images_of_a_run_are_what_its_record_says(
    finished: Finished, tmp_path: Path
) -> None:
    """The folders of two runs, without a table beside the images: the record lies two folders above."""
    runs = []
    for name, steps in (("one", None), ("other", 7)):
        run = tmp_path / name
        result = read_result(finished.folder)
        for row in result.variants:
            if steps:
                reconfigure(row, "workload", steps=steps)
            for record in row.images:
                (run / record.path).parent.mkdir(parents=True, exist_ok=True)
                (run / record.path).write_bytes(
                    (finished.folder / record.path).read_bytes()
                )
        write_result(result, run)
        runs.append(run / Path(result.variant(result.baseline).images[0].path).parent)
    first, second = (read_folder(folder) for folder in runs)
    assert first[0].prompt == finished.result.variants[0].images[0].prompt
    before = finished.result.config.workload.steps
    assert other_settings(first, second) == [f"steps 7 (baseline {before})"]
    (runs[0].parent.parent / "result.json").write_text("{")  # damaged: it says nothing
    assert other_settings(read_folder(runs[0]), second) == []


def test_exported_times_are_those_of_one_image(
    finished: Finished, tmp_path: Path
) -> None:
    """A folder does not tell how many images a call made; that of another study may have had single ones."""
    result = read_result(finished.folder)
    for row in result.variants:
        reconfigure(row, "workload", batch_size=4)
    export(result, finished.folder, tmp_path / "out")
    [measured, *_] = result.baseline_variant.measurements
    calls = [call.seconds for call in measured.shapes[0].calls if not call.left_out]
    listed = read_table(tmp_path / "out" / result.baseline / "times.csv")
    times = [row.number("seconds") for row in listed]
    assert times[: len(calls)] == pytest.approx([seconds / 4 for seconds in calls])


def test_what_a_run_exports_tells_models_sizes_and_loras_apart(
    finished: Finished, tmp_path: Path
) -> None:
    option = {
        "_target_": "sdopt.options.lora.Fused",
        "path": "mine.safetensors",
        "weight_name": None,
        "scale": 0.5,
    }
    folders = []
    for name in ("one", "other"):
        result = read_result(finished.folder)
        row = result.variant(result.baseline)
        if name == "other":
            row.config = replace(
                row.config, options={**row.config.options, "lora": option}
            )
            row.inputs = {**row.inputs, "model": "0123456789abcdef"}
            options = {"use_karras_sigmas": True, "timestep_spacing": "trailing"}
            reconfigure(row, "scheduler", options=options, timesteps=[9, 1])
            reconfigure(row, "model", max_sequence_length=64)
            row.inputs["latents"] = "0123"
            result.environment.device["name"] = "another"
        export(result, finished.folder, tmp_path / name)
        folders.append(tmp_path / name / "baseline")
    first, second = (read_folder(folder) for folder in folders)
    times = [read_table(folder / "times.csv") for folder in folders]
    words = other_settings(first, second)
    assert [word.partition(" (")[0] for word in words] == [
        "schedule karras",
        "model hash 0123456789abcdef",
        "LoRA mine:0.5",
        'scheduler options {"timestep_spacing": "trailing"}',
        "timesteps [9, 1]",
        'input files {"latents": "0123"}',
        "tokens of a prompt 64",
    ]
    assert [
        word.partition(" (")[0] for word in unlike_times(times[0], times[1], ())
    ] == ["times.csv: device another"]


def test_two_programs_are_said_and_one_is_not(tmp_path: Path) -> None:
    """The same seed is other noise in another program, and brackets in a prompt weigh otherwise."""
    base, other = web_ui_folder(tmp_path / "base"), web_ui_folder(tmp_path / "other")
    assert not any(
        "Two programs" in note for note in caveats_of(summary_of(judged(base, other)))
    )
    for file in other.iterdir():
        seed = int(file.stem)
        graph = {
            "1": node(
                "KSampler", seed=seed, steps=30, positive=["2", 0], negative=["3", 0]
            )
        }
        graph |= {
            "2": node("CLIPTextEncode", text="a harbour, dusk"),
            "3": node("CLIPTextEncode", text="fog"),
        }
        info = PngInfo()
        info.add_text("prompt", json.dumps(graph))
        Image.open(file).save(file, pnginfo=info)
    notes = [*caveats_of(summary_of(judged(base, other)))]
    assert any(
        "baseline's images are by A1111, other by ComfyUI" in note for note in notes
    )


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        (
            "gpu",
            ("RTX 4090", "RTX 3090"),
            ["times.csv: gpu rtx 3090 (baseline rtx 4090)"],
        ),
        ("batch_size", (1, 4), ["times.csv: batch_size 4 (baseline 1)"]),
        (
            "num_inference_steps",
            (30, 20),
            ["times.csv: num_inference_steps 20 (baseline 30)"],
        ),
        (
            "true_cfg_scale",
            (4, 1),
            ["times.csv: true_cfg_scale 1 (baseline 4)"],
        ),
        ("torch", ("2.4", "2.4"), []),
        ("watts", (300, 200), []),
        ("steps", (30, "30.0"), []),
    ],
)
def test_tables_of_times_tell_of_machines_and_batches(
    tmp_path: Path, column: str, values: tuple[Any, Any], said: list[str]
) -> None:
    base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
    for folder, value in zip((base, other), values, strict=True):
        rows = [f"{number:05d}.png,{1 + number / 100},{value}" for number in range(8)]
        (folder / "times.csv").write_text("\n".join([f"file,seconds,{column}", *rows]))
    assert judged(base, other).candidates[0].unlike == said
    meant = "steps" if column == "num_inference_steps" else column
    if said:
        assert judged(base, other, changes=meant).candidates[0].unlike == []


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (("", "batch_size"), ["times.csv: batch_size 4 (baseline 1)"]),
        (("images", ""), ["times.csv: images 1 (baseline 4)"]),
        (("batch", "batch_size"), []),
        (("", "round"), []),
    ],
)
def test_a_table_that_says_nothing_of_batches_is_of_single_images(
    tmp_path: Path, columns: tuple[str, str], said: list[str]
) -> None:
    base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
    for folder, column in zip((base, other), columns, strict=True):
        names, value = (
            ("file,seconds", "") if not column else (f"file,seconds,{column}", ",4")
        )
        rows = [f"{number:05d}.png,{1 + number / 100}{value}" for number in range(8)]
        (folder / "times.csv").write_text("\n".join([names, *rows]))
    assert judged(base, other).candidates[0].unlike == said


def test_a_table_may_number_its_calls(tmp_path: Path) -> None:
    base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
    for folder, column in ((base, ""), (other, ",n")):
        rows = [
            f"{number:05d}.png,{1 + number / 100}{f',{number}' if column else ''}"
            for number in range(8)
        ]
        (folder / "times.csv").write_text("\n".join([f"file,seconds{column}", *rows]))
    assert judged(base, other).candidates[0].unlike == []


def test_two_versions_of_one_program_are_said(tmp_path: Path) -> None:
    base = web_ui_folder(tmp_path / "base", Version="v1.6.0")
    other = web_ui_folder(tmp_path / "other", Version="v1.10.1")
    notes = caveats_of(summary_of(judged(base, other)))
    [note] = [note for note in notes if note.startswith("Two versions of A1111")]
    assert "images are by v1.6.0, other by v1.10.1" in note
    same = web_ui_folder(tmp_path / "same", Version="v1.6.0")
    notes = caveats_of(summary_of(judged(base, same)))
    assert not any("Two versions" in note for note in notes)


def test_times_of_a_copied_table_are_doubtful(tmp_path: Path) -> None:
    base, again, other = (plain(tmp_path / name) for name in ("base", "again", "other"))
    for folder, more in ((base, 0.0), (again, 0.0), (other, 0.001)):
        rows = [f"{number:05d}.png,{1 + number / 100 + more}" for number in range(8)]
        (folder / "times.csv").write_text("\n".join(["file,seconds", *rows]))
    doubts = doubts_of(judged(base, other, again))
    assert len(doubts) == 1
    assert "its times are those of 'baseline' to the last digit" in doubts[0]
