"""Reads published figures of diffusion transformers: model, precision and software by words."""

import re
from collections.abc import Mapping

from sdopt.apps.foresight.software import FUSED, TRANSFORMERS, Software
from sdopt.apps.foresight.storage import GGUF, Outputs, Storage
from sdopt.pipelines.parts import TEXT_ENCODERS
from sdopt.text_files import first_match

_MODELS = {
    # What changes the network, or what it is given, of a model that has another name beside it.
    r"control|\bedit\b|kontext|\bfill\b|ip adapter|redux|layered|inpaint|radiance": "",
    r"\blite\b|\bmini\b|sprint|4\.8b|video|alpha|\u03b1|next|qwen image 2\.\d": "",
    r"flux ?\.?2.*klein.*9b": "flux2_klein_9b",
    r"flux ?\.?2.*klein": "flux2_klein_4b",
    r"flux ?\.?2\b": "flux2_dev",
    r"flux.*schnell": "flux_schnell",
    r"flux": "flux_dev",
    r"z ?image.*turbo": "z_image_turbo",
    r"z ?image": "z_image",
    r"qwen": "qwen_image",
    r"(sd|diffusion) ?v?3\.?5.*large": "sd35_large",
    r"(sd|diffusion) ?v?3\.?5": "sd35_medium",
    r"(sd|diffusion) ?v?3": "sd3_medium",
    r"pixart.*(sigma|\u03c3)": "pixart_sigma",
    r"sana.*0\.6": "sana_600m",
    r"sana": "sana_1600m",
    r"lumina.*2": "lumina2",
    r"chroma": "chroma",
}
"""The architecture, by words of a model's plain name; the first that is found counts, and "" is none."""

_TRANSFORMERS = (
    r"flux|z ?image|qwen|(sd|diffusion) ?v?3|pixart|sana|lumina|chroma|dit\b|hidream"
)

_FEW_STEPS = r"turbo|schnell|lightning|hyper|distilled|klein(?!.*\bbase\b)"

_UNGUIDED = (
    r"\b(no|without) (true )?(guidance|cfg)\b(?! is)"
    r"|\b(guidance|cfg)( scale)?[ =:]*(0|1|off)\b(?!\.?[1-9])"
)

_TWO_BRANCHES = r"true cfg( scale)?[ =:]*([2-9]|1\.[1-9])"

_LAYERS = r"sequential|layerwise(?! casting)|group off|bucket|low.?vram|\bstream"

_NETWORKS = r"model (cpu )?off|(?<!sequential )\bcpu off"

_NOT_DESCRIBED = {
    r"lora": "there are no figures of unfused LoRAs",
    r"\bthe same\b": "its software is told by another row",
    r"cache|taylor|\bscm\b|t-?gate|toma\b|skip": "it leaves out work that depends on the image",
    r"fa3|fa4|flash.?(attention.?|attn.?)?[34]|sage|flex": "its attention is another",
    _LAYERS: "it moves weights in each step",
    r"tensorrt|\btrt\b|demo_txt2img|pruna|nunchaku|svdquant|onediff|nexfort|xla|onnx|openvino|mlx|comfy|forge|"
    r"stable.diffusion.cpp|sglang|vllm|xdit.*cards": "there are no figures of transformers in it",
    r"(2|4|8|two|four|eight) (gpus|cards)|ulysses|\bring\b|pipefusion|parallel": "it runs on several cards",
}

_FORMS = {
    r"\bnf4": ("nf4", "hidden"),
    r"llm\.?int8|(bitsandbytes|bnb).*8|8.*(bitsandbytes|bnb)": ("int8", "llm"),
    r"svdquant|nunchaku|w4a4": ("int4", "svd"),
    r"q8(_|\b)": ("q8", "stored"),
    r"q6(_|\b)": ("q6", "int4"),
    r"q5_1": ("q5_1", "int4"),
    r"q5(_|\b)": ("q5", "int4"),
    r"q4_1": ("q4_1", "int4"),
    r"q4(_|\b)": ("q4", "int4"),
    r"q3(_|\b)": ("q3", "int4"),
    r"q2(_|\b)": ("q2", "int4"),
    r"int4|4.?bit": ("int4", "int4"),
    r"fp6": ("fp6", "stored"),
    r"fp4": ("fp4", "stored"),
    r"layerwise": ("cast8", "stored"),
    r"(fp8|float8|e4m3)\w*[ ,]*(weight|wo\b)": ("fp8", "stored"),
    r"int8\w*[ ,]*(weight|wo\b)|int8wo": ("int8", "stored"),
    r"(fp8|float8|e4m3).*(dynamic|row|tensor|dq|w8a8)|w8a8.*(fp8|float8)": (
        "fp8",
        "fp8",
    ),
    r"int8.*(dynamic|dq|w8a8)|w8a8": ("int8", "int8"),
    r"fp8|float8|e4m3": ("fp8", "stored"),
    r"int8|8.?bit": ("int8", "stored"),
}
"""How weights are stored, and how products run: in eight bits, or with weights that are unpacked for each use.

The kernels of bitsandbytes hide that of `nf4`: on an H100 and an RTX 4090 such calls take no longer.
"""

_NO_COMPILER = r"\b(no|not|without|un)[ -]?(torch\.?)?(compil\w*|inductor)"

_UNTIMED = {
    "int4": "kernels for 4-bit weights differ tenfold between packages",
    "llm": "its products treat outliers apart",
    "svd": "there are no figures of products in 4 bits",
}


def architecture_of(model: str) -> str | None:
    """Returns the architecture that a model's name means; None if sdopt has none of it."""
    return first_match(_MODELS, _plain(model)) or None


def is_transformer(model: str) -> bool:
    """Returns whether a name means a diffusion transformer, whether sdopt has it or not."""
    return bool(re.search(_TRANSFORMERS, _plain(model)))


def _plain(text: str) -> str:
    """Returns a text in lower case, with spaces for what else stands between words."""
    return " ".join(re.sub(r"[-_/\[\]()]+", " ", text.lower()).split())


def is_undistilled(model: str) -> bool:
    """Returns whether a name means the base of a model whose architecture stands for its distilled one."""
    return bool(re.search(r"klein.*\bbase\b|\bbase\b.*klein", _plain(model)))


def runs_twice(row: Mapping[str, str]) -> bool:
    """Returns whether a step calls a denoiser twice that reads its guidance scale: with true guidance."""
    return bool(re.search(_TWO_BRANCHES, _plain(row["note"])))


def is_guided(row: Mapping[str, str]) -> bool:
    """Returns whether both branches run in each step, where the model can."""
    text = _plain(f"{row['model']} {row['note']}")
    return not re.search(f"{_UNGUIDED}|{_FEW_STEPS}", text)


def why_untimed(row: Mapping[str, str]) -> str:
    """Returns why no time is told for a row's software; "" if one is."""
    text = " ".join(
        row[name] for name in ("model", "precision", "backend", "note")
    ).lower()
    if reason := first_match(_NOT_DESCRIBED, text):
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
    precision = row["precision"].lower()
    numbers = re.search(r"bf16|bfloat16|fp16|float16|half", precision)
    form, kind = _form(precision)
    if numbers is None and not form:
        return None
    base = "bf16" if numbers is None or numbers[0].startswith("b") else "fp16"
    text = row["backend"].lower()
    compiled = _compiles(row)
    graphs = "cuda graphs" in text or (
        compiled and "max-autotune" in text and "no-cudagraphs" not in text
    )
    version = re.search(r"torch ?(?:v|==)?(\d+)\.(\d+)", text)
    torch = (int(version[1]), int(version[2])) if version else (2, 5)
    products = kind if kind in ("fp8", "int8") else base
    name = f"blocks_{'compiled' if compiled else 'eager'}"
    stored = kind in ("stored", "int4", "llm", "svd")
    # The outputs are scaled where the weights are not.
    scaled = form == "int8" or "quanto" in f"{precision} {text}"
    return Software(
        TRANSFORMERS,
        name,
        FUSED,
        False,
        products,
        compiled,
        graphs,
        torch,
        stored,
        kind == "stored" and scaled and not compiled,
    )


def storage_of_row(row: Mapping[str, str]) -> Storage:
    """Returns how a row's weights are stored, and where."""
    form, _ = _form(row["precision"])
    software = f"{row['precision']} {row['backend']}".lower()
    where = _plain(re.sub(_NO_OFFLOAD, " ", f"{software} {row['note'].lower()}"))
    texts, numbers = _texts_of(row, form)
    without: tuple[str, ...] = ()
    if re.search(_ENCODERS_ELSEWHERE, where):
        without = TEXT_ENCODERS
    elif re.search(_WITHOUT_T5, where):
        without = ("text_encoder_3",)
    outputs: Outputs = "whole"
    if "quanto" in software:
        outputs = ""
    elif re.search(r"bitsandbytes|bnb|llm\.?int8|nf4", where):
        outputs = "float32"
    return Storage(
        form,
        texts,
        numbers,
        without,
        "model" if re.search(_NETWORKS, where) else "",
        "diffusers-torchao" in row["source"],
        "fused qkv" in software,
        outputs,
    )


def _texts_of(row: Mapping[str, str], form: str) -> tuple[str, tuple[int, ...]]:
    """Returns the form of the text encoders, and which of them have it; () is all.

    Args:
        row: of the file.
        form: of the transformer, which encoders have that are "quantized".
    """
    note, of_sd3 = row["note"].lower(), "sd" in row["model"].lower()
    if named := re.search(_ENCODERS_IN, note):
        t5_of_sd3 = of_sd3 and named[1] == "t5"
        return _form(named[2])[0], (3,) if t5_of_sd3 else ()
    if "none quantized" in note or not re.search(_ENCODERS_TOO, note):
        return "", ()
    if form in GGUF or form == "cast8":  # which are of the transformer alone
        return "", ()
    listed = note.partition("text encoders quantized:")[2]
    numbers = re.findall(r"\d", listed) if of_sd3 else []
    return form, tuple(map(int, numbers))


_ENCODERS_TOO = r"t5 quantized|transformer and t5|text encoders quantized"

_ENCODERS_IN = (
    r"(t5|encoders?)\)? (?:(?:in|as|to|quantized (?:in|as|to|with)) )?"
    r"(q?float8|q?int[48]|nf4|fp8|uint4|[48].?bits?)"
)

_ENCODERS_ELSEWHERE = (
    r"(remote|precomputed|separate) (text|prompt|embed|encod)"
    r"|(text encoders?|t5) (on (the )?cpu|elsewhere|removed|off the)"
)

_WITHOUT_T5 = r"(no|without|drops?|dropping) t5|t5 (dropped|left out)"

_NO_OFFLOAD = r"\b(no|without) (cpu |model )*offload\w*"


def memory_kind(row: Mapping[str, str]) -> str:
    """Returns which memory a row is of: `weights` after a call, `allocated`, `reserved`, or `device`."""
    text = f"{row['source']} {row['note']}".lower()
    return first_match(_KINDS, text, "allocated")


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
    backend = re.sub(_NO_COMPILER, " ", row["backend"].lower())
    return bool(re.search(r"compil|inductor|blocks only", backend))
