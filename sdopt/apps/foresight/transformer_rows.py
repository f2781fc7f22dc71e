"""Reads published figures of diffusion transformers: model, precision and software by words."""

import re
from collections.abc import Mapping

from sdopt.apps.foresight.software import FUSED, TRANSFORMERS, Software
from sdopt.apps.foresight.storage import Storage

_MODELS = {
    r"control|\bedit\b|kontext|fill\b|ip-adapter": "",
    r"flux\.?2.*klein.*9b": "flux2_klein_9b",
    r"flux\.?2.*klein": "flux2_klein_4b",
    r"flux\.?2": "flux2_dev",
    r"flux.*schnell": "flux_schnell",
    r"flux": "flux_dev",
    r"z-?image.*turbo": "z_image_turbo",
    r"z-?image": "z_image",
    r"qwen": "qwen_image",
    r"(sd|stable diffusion) ?3\.5 large": "sd35_large",
    r"(sd|stable diffusion) ?3\.5": "sd35_medium",
    r"(sd|stable diffusion) ?3": "sd3_medium",
    r"pixart.*sigma": "pixart_sigma",
    r"sana.*0\.6": "sana_600m",
    r"sana": "sana_1600m",
    r"lumina": "lumina2",
    r"chroma": "chroma",
}
"""The architecture, by words of a model's name; the first that is found counts, and "" is none."""

_FEW_STEPS = r"turbo|schnell|lightning|hyper|distilled|klein"

_LAYERS = r"sequential|layerwise(?! casting)|group off|bucket|low.?vram|\bstream"

_NOT_DESCRIBED = {
    r"lora": "there are no figures of unfused LoRAs",
    r"\bthe same\b": "its software is told by another row",
    r"cache|taylor|\bscm\b|t-?gate|toma\b|skip": "it leaves out work that depends on the image",
    r"fa3|flash.?3|flash.?4|sage": "its attention is another",
    _LAYERS: "it moves weights in each step",
    r"tensorrt|\btrt\b|demo_txt2img|pruna|nunchaku|svdquant|onediff|nexfort|xla|onnx|openvino|mlx|comfy|forge": (
        "there are no figures of transformers in it"
    ),
    r"(2|4|8|two|four|eight) (gpus|cards)|ulysses|\bring\b|pipefusion|parallel": "it runs on several cards",
}

_FORMS = {
    r"nf4": ("nf4", "hidden"),
    r"llm\.int8|bitsandbytes.*8|8.?bit.*bitsandbytes": ("int8", "llm"),
    r"int4|uint4": ("int4", "int4"),
    r"fp6": ("fp6", "stored"),
    r"fp4|nvfp4|mxfp4": ("fp4", "stored"),
    r"q8_0": ("q8", "stored"),
    r"q[45]_": ("q4", "int4"),
    r"q[23]_": ("q2", "int4"),
    r"layerwise": ("cast8", "stored"),
    r"(fp8|float8).*(dynamic|row|tensor)": ("fp8", "fp8"),
    r"int8.*dynamic": ("int8", "int8"),
    r"fp8|float8": ("fp8", "stored"),
    r"int8": ("int8", "stored"),
}
"""How weights are stored, and how products run: in eight bits, or with weights that are unpacked for each use.

The kernels of bitsandbytes hide that of `nf4`: on an H100 and an RTX 4090 such calls take no longer.
"""

_UNTIMED = {
    "int4": "kernels for 4-bit weights differ tenfold between packages",
    "llm": "its products treat outliers apart",
}


def architecture_of(model: str) -> str | None:
    """Returns the architecture that a model's name means; None if sdopt has none of it."""
    text = model.lower()
    return (
        next(
            (name for pattern, name in _MODELS.items() if re.search(pattern, text)),
            None,
        )
        or None
    )


def is_transformer(model: str) -> bool:
    """Returns whether a name means a diffusion transformer, whether sdopt has it or not."""
    return bool(
        re.search(
            r"flux|z-?image|qwen|\b3\.5|sd ?3|diffusion ?3|pixart|sana|lumina|chroma|dit\b",
            model.lower(),
        )
    )


def is_guided(row: Mapping[str, str]) -> bool:
    """Returns whether both branches run in each step, where the model can."""
    text = f"{row['model']} {row['note']}".lower()
    return not re.search(
        rf"no guidance|guidance (0|1|off)\b|without (true )?cfg(?! is)|no cfg|{_FEW_STEPS}",
        text,
    )


def why_untimed(row: Mapping[str, str]) -> str:
    """Returns why no time is told for a row's software; "" if one is."""
    text = " ".join(
        row[name] for name in ("model", "precision", "backend", "note")
    ).lower()
    reason = next(
        (
            reason
            for pattern, reason in _NOT_DESCRIBED.items()
            if re.search(pattern, text)
        ),
        "",
    )
    if reason:
        return reason
    _, kind = _form(row["precision"])
    if kind == "int8" and not _compiles(row):
        return "int8 products without a compiler run 20 times slower"
    return _UNTIMED.get(kind, "")


def moves_layers(row: Mapping[str, str]) -> bool:
    """Returns whether single layers or blocks wait in the host's memory."""
    return bool(re.search(_LAYERS, f"{row['backend']} {row['note']}".lower()))


def software_of_row(row: Mapping[str, str]) -> Software | None:
    """Returns the class of a row's software; None if its precision is not known."""
    numbers = re.search(r"bf16|bfloat16|fp16|float16|half", row["precision"].lower())
    if numbers is None:
        return None
    _, kind = _form(row["precision"])
    base = "bf16" if numbers[0].startswith("b") else "fp16"
    text = row["backend"].lower()
    compiled = _compiles(row)
    graphs = "cuda graphs" in text or (
        compiled and "max-autotune" in text and "no-cudagraphs" not in text
    )
    version = re.search(r"torch v?(\d+)\.(\d+)", text)
    torch = (int(version[1]), int(version[2])) if version else (2, 5)
    products = kind if kind in ("fp8", "int8") else base
    name = f"blocks_{'compiled' if compiled else 'eager'}"
    stored = kind in ("stored", "int4", "llm")
    return Software(
        TRANSFORMERS, name, FUSED, False, products, compiled, graphs, torch, stored
    )


def storage_of_row(row: Mapping[str, str]) -> Storage:
    """Returns how a row's weights are stored, and where."""
    form, _ = _form(row["precision"])
    text, note = f"{row['precision']} {row['backend']}".lower(), row["note"].lower()
    where = f"{text} {note}"
    texts, numbers = "", tuple[int, ...]()
    if re.search(
        r"t5 quantized|t5 in nf4|transformer and t5|text encoders? q|text encoders quantized",
        note,
    ):
        texts = "nf4" if "t5 in nf4" in note else form
        texts = (
            ""
            if re.search(r"none quantized", note)
            or (form in ("q8", "q4", "q2", "cast8"))
            else texts
        )
        listed = note.partition("text encoders quantized:")[2]
        numbers = (
            tuple(int(number) for number in re.findall(r"\d", listed))
            if "sd" in row["model"].lower()
            else ()
        )
    if "t5 in 8 bits" in note:
        texts, numbers = "int8", (3,)
    return Storage(
        form,
        texts,
        numbers,
        ("text_encoder_3",) if "no t5" in where else (),
        "model" if "model offload" in where else "",
        "diffusers-torchao" in row["source"],
        "fused qkv" in text,
        ""
        if "quanto" in text
        else "float32"
        if re.search(r"bitsandbytes|llm\.int8", where)
        else "whole",
    )


def memory_kind(row: Mapping[str, str]) -> str:
    """Returns which memory a row is of: `weights` after a call, `allocated`, `reserved`, or `device`."""
    text = f"{row['source']} {row['note']}".lower()
    return next(
        (kind for pattern, kind in _KINDS.items() if re.search(pattern, text)),
        "allocated",
    )


_KINDS = {
    "quanto-diffusers": "weights",
    "diffusers-quantization|reserved": "reserved",
    "offload.md|nvidia-smi|says gib": "device",
}
"""What publishers mean by the memory of a GPU; most give the most that was allocated."""


def _form(precision: str) -> tuple[str, str]:
    text = precision.lower()
    return next(
        (found for pattern, found in _FORMS.items() if re.search(pattern, text)),
        ("", ""),
    )


def _compiles(row: Mapping[str, str]) -> bool:
    return bool(re.search(r"compil|inductor|blocks only", row["backend"].lower()))
