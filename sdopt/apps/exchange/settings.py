"""Holds the settings with which images were made against each other, whichever program names them.

Programs call one thing by several names: `Steps`, `num_inference_steps`, `-s`. A row of `SETTINGS` has them all, and
how its values are made alike.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sdopt.errors import UsageError

_FILE = re.compile(r"\.(safetensors|ckpt|pt|pth|bin|gguf|sft|fp16)$")


def number_or_word(value: Any) -> str:
    """Returns a number in one form, or a text in lower case."""
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return _word(value)


def _layers(value: Any) -> str:
    """Returns which of the last layers of CLIP counts; ComfyUI and SwarmUI count from the end, below zero."""
    return number_or_word(value).removeprefix("-")


def _step(value: Any) -> str:
    """Returns the step at which a sampler begins or ends; ComfyUI writes 0 and 10000 for the whole schedule."""
    return "" if number_or_word(value) in ("0", "10000") else number_or_word(value)


def _word(value: Any) -> str:
    return " ".join(str(value).lower().split())


def _text(value: Any) -> str:
    """Returns a value of any form, in which names of files, weights and modes differ where images do."""
    return _word(
        json.dumps(value, sort_keys=True, default=str)
        if isinstance(value, list | dict)
        else value
    )


def _weights(value: Any) -> str:
    """Returns the name of a file of weights without its folders and its suffix."""
    if isinstance(value, dict):
        names = (value.get(key) for key in ("name", "model_name", "key", "Model"))
        value = next((name for name in names if name), "")
    name = re.split(r"[/\\]", str(value).strip())[-1].lower()
    return _FILE.sub("", _FILE.sub("", name))


def _digest(value: Any) -> str:
    """Returns the digest of a file; "" of what is none, as in `unknown`."""
    digest = str(value).lower().rpartition(":")[2].removeprefix("0x")
    return digest if re.fullmatch(r"[0-9a-f]+", digest) else ""


_SCHEDULES = (
    "karras",
    "exponential",
    "polyexponential",
    "sgm uniform",
    "simple",
    "beta",
    "ays",
)


def _sampler(value: Any) -> str:
    """Returns a sampler's name as the others write it: `k_dpmpp_2m`, `DPM++ 2M Karras` and `dpmpp_2m` are one."""
    name = _word(value).replace("dpmpp", "dpm++").removeprefix("k_")
    schedule = _schedule_in(name)
    if schedule is not None:
        name = name[: -len(schedule)]
    name = (
        re.sub(r"[^a-z0-9+]", "", name)
        .removesuffix("scheduler")
        .removesuffix("discrete")
    )
    return name.replace("ancestral", "a")


def _schedule_in(sampler: str) -> str | None:
    """Returns the schedule with which a sampler's name ends, as in `DPM++ 2M Karras` and `dpmpp_2m_karras`."""
    spaced = sampler.lower().replace("_", " ")
    return next(
        (schedule for schedule in _SCHEDULES if spaced.endswith(f" {schedule}")), None
    )


_SAME_SAMPLERS = {
    "dpmsolvermultistep": "dpm++2m",
    "dpm++2msdegpu": "dpm++2msde",
    "dpm++sdegpu": "dpm++sde",
    "unipcmultistep": "unipc",
    "unipcbh2": "unipc",
}
"""What samplers of one program are called that others have by another name; one program may have both."""

_SAMPLERS = (
    "euler", "eulera", "heun", "lms", "ddim", "ddpm", "plms", "pndm", "dpm2", "dpm2a", "dpm++2m", "dpm++sde",
    "dpm++2msde", "dpm++2sa", "dpm++3msde", "unipc", "lcm",
)  # fmt: skip
"""Samplers that are called alike by all programs; of others nobody knows whether two names are one."""


def _size(value: Any) -> str:
    sides = re.findall(r"\d+", str(value))
    return "×".join(sides[:2])


_WEIGHED = re.compile(r":\s*(te -?[\d.]+ unet )?-?[\d.]+\s*$")
"""How the weights of a LoRA end its entry in a list: one, or one for each network."""


_NAMES_OF_LORAS = (
    *("model", "lora", "name", "lora_name", "adapter_name"),
    *("file", "filename", "path"),
)

_WEIGHTS = ("weight", "strength", "scale", "multiplier", "strength_model")


def _loras(value: Any) -> str:
    """Returns names and weights of LoRAs, sorted, from the forms in which programs list them."""
    entries = value if isinstance(value, list) else str(value).split(",")
    names = []
    for entry in entries:
        file: Any = entry
        weight: Any = 1
        if isinstance(entry, dict):
            weight = next((entry[key] for key in _WEIGHTS if key in entry), 1)
            file = next((entry[key] for key in _NAMES_OF_LORAS if entry.get(key)), None)
            file = _text(entry) if file is None else file
        elif isinstance(entry, str) and _WEIGHED.search(entry):
            file, _, weight = entry.rpartition(":")
        if name := _weights(file):
            names.append(f"{name}:{number_or_word(weight)}".removesuffix(":"))
    return ", ".join(sorted(names))


@dataclass(frozen=True)
class Setting:
    """One setting of an image.

    Attributes:
        name: in words.
        keys: what programs call it, in lower case, letters and digits alone.
        alike: makes its values alike.
        default: the value of a program that leaves the setting out; None if each one names it.
        known: the values that mean the same in each program; () if all do.
    """

    name: str
    keys: tuple[str, ...]
    alike: Callable[[Any], str] = _word
    default: str | None = None
    known: tuple[str, ...] = ()


_MODELS = (
    "model", "modelname", "basemodel", "usestablediffusionmodel", "stablediffusionmodel", "modelweights", "checkpoint",
    "ckptname", "sdmodel", "modelid", "basemodelname", "pretrainedmodelnameorpath", "modelnameorpath", "modelpath",
    "repoid",
)  # fmt: skip

SETTINGS = (
    Setting(
        "steps",
        ("steps", "numinferencesteps", "inferencesteps", "numsteps"),
        number_or_word,
    ),
    Setting(
        "sampler",
        ("sampler", "samplername", "comfyuisampler", "autowebuisampler"),
        _sampler,
        known=_SAMPLERS,
    ),
    Setting(
        "schedule",
        ("scheduletype", "scheduler", "schedulername", "noiseschedule"),
        default="automatic",
        known=("karras", "exponential"),
    ),
    Setting(
        "guidance scale",
        ("cfgscale", "cfg", "guidancescale", "guidance", "scale"),
        number_or_word,
    ),
    Setting(
        "distilled guidance",
        ("distilledcfgscale", "distilledguidance", "fluxguidance", "fluxguidancescale"),
        number_or_word,
        default="none",
    ),
    Setting(
        "guidance rescale",
        ("cfgrescalemultiplier", "cfgrescale", "guidancerescale"),
        number_or_word,
        default="0",
    ),
    Setting(
        "shift", ("shift", "sigmashift", "fluxshift"), number_or_word, default="none"
    ),
    Setting("eta", ("eta", "etaddim"), number_or_word, default="none"),
    Setting("size", ("size", "resolution"), _size),
    Setting("model", _MODELS, _weights),
    Setting("model hash", ("modelhash", "basemodelhash", "sdmodelhash"), _digest),
    Setting("model file", ("modelfile",), _digest),
    Setting("clip skip", ("clipskip", "clipstopatlayer"), _layers, default="1"),
    Setting(
        "denoising strength",
        (
            "denoisingstrength",
            "denoise",
            "strength",
            "promptstrength",
            "initimagecreativity",
        ),
        number_or_word,
        default="1",
    ),
    Setting(
        "VAE",
        ("vae", "vaemodel", "usevaemodel", "vaename"),
        _weights,
        default="automatic",
    ),
    Setting(
        "LoRA", ("lora", "loras", "useloramodel", "loramodel"), _loras, default="none"
    ),
    Setting("VAE file", ("vaehash",), _digest),
    Setting("LoRA files", ("lorahashes",), _text),
    Setting("embeddings", ("tihashes",), _text, default="none"),
    Setting(
        "hires upscale",
        ("hiresupscale", "refinerupscale"),
        number_or_word,
        default="none",
    ),
    Setting("hires steps", ("hiressteps", "hiresteps"), number_or_word, default="none"),
    Setting(
        "hires upscaler", ("hiresupscaler", "ultimatesdupscaleupscaler"), default="none"
    ),
    Setting("refiner", ("refiner", "refinermodel"), _weights, default="none"),
    Setting(
        "refiner switch",
        (
            "refinerswitchat",
            "refinerswitch",
            "refinerstart",
            "refinercontrolpercentage",
        ),
        number_or_word,
        default="none",
    ),
    Setting(
        "ControlNet",
        ("controlnet", "controlnet0", "controlnets", "usecontrolnetmodel"),
        _text,
        default="none",
        known=("none",),
    ),
    Setting("ADetailer", ("adetailermodel",), default="none"),
    Setting("variation seed", ("variationseed",), number_or_word, default="none"),
    Setting(
        "variation strength",
        ("variationseedstrength", "variationstrength"),
        number_or_word,
        default="0",
    ),
    Setting(
        "noise source",
        ("rng", "noisesource", "randdevice"),
        default="gpu",
        known=("cpu", "nv"),
    ),
    Setting(
        "noise seed delta", ("ensd", "etanoiseseeddelta"), number_or_word, default="0"
    ),
    Setting("first step", ("startatstep",), _step, default="none"),
    Setting("last step", ("endatstep",), _step, default="none"),
    Setting("task", ("task",)),
    Setting("scheduler options", ("scheduleroptions",), _text, default="none"),
    Setting("timesteps", ("timesteps",), _text, default="none"),
    Setting("input files", ("inputfiles",), _text, default="none"),
    Setting(
        "tokens of a prompt", ("maxsequencelength",), number_or_word, default="none"
    ),
)
"""Settings that decide what an image shows or how long it takes. What only makes it faster is the option's own."""

_BY_KEY: dict[str, Setting] = {}
for _setting in SETTINGS:
    _BY_KEY |= dict.fromkeys(_setting.keys, _setting)

_NOT_SAID = (
    "",
    "none",
    "null",
    "automatic",
    "baked vae",
    "auto",
    "default",
    "0x0",
    "-1x-1",
    "[]",
    "{}",
    "nan",
)
"""What programs write where nothing was chosen."""


def settings_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings among the values that a program left, with values that are alike in every program."""
    settings: dict[str, str] = {}
    for key, value in values.items():
        setting = _BY_KEY.get(plain_key(key))
        if setting is None or value is None or isinstance(value, bool):
            continue
        if _word(value) not in _NOT_SAID and (text := setting.alike(value)):
            settings.setdefault(setting.name, text)
    # stable-diffusion.cpp names both, and FLUX reads the one that is distilled.
    plain = {plain_key(key): value for key, value in values.items()}
    if "guidance" in plain and not plain.keys().isdisjoint(("cfgscale", "cfg")):
        settings.setdefault("distilled guidance", number_or_word(plain["guidance"]))
    # diffusers calls its samplers schedulers.
    if settings.get("schedule", "").endswith("scheduler"):
        settings.setdefault("sampler", _sampler(settings.pop("schedule")))
    sides = {plain_key(key): str(value) for key, value in values.items()}
    if sides.get("width", "").isdigit() and sides.get("height", "").isdigit():
        settings.setdefault("size", f"{sides['width']}×{sides['height']}")
    # Programs had one name for both, as in "DPM++ 2M Karras".
    for key, value in values.items():
        if _BY_KEY.get(plain_key(key)) is _BY_KEY["sampler"]:
            schedule = _schedule_in(_word(value))
            if schedule is not None:
                settings.setdefault("schedule", schedule)
    return settings


_NOT_OF_IMAGES = frozenset((
    "version", "app", "appversion", "swarmversion", "metadataversion", "metadatascheme", "createdby", "software",
    "time", "date", "createddate", "createdat", "generationtime", "generationtimeseconds", "preptime", "user", "id",
    "sessionid", "requestid", "requesttype", "signedhash", "hashes", "civitairesources", "civitaimetadata", "remixof",
    "sourceidentifier", "template", "negativetemplate", "wildcardprompt", "batchsize", "batchpos", "batchcount",
    "images", "numoutputs", "nsamples", "outputformat", "outputquality", "vramusagelevel", "streamprogressupdates",
    "showonlyfilteredimage", "blocknsfw", "usedrandomseed", "savetodiskpath", "activetags", "inactivetags",
    "generationmode", "canvasv2metadata", "aspectratio", "sidelength", "width", "height", "seed", "noiseseed",
    "positiveprompt", "prompt", "c", "text", "caption", "negativeprompt", "negative", "uc", "rawprompt",
    "rawnegativeprompt", "models", "basemodel", "profile", "personalnote", "nopreviews", "imageformat",
    "batch", "index", "wildcardseed", "originalprompt", "usedwildcards",
))  # fmt: skip
"""What tells of a file, a queue or a person; and what is read by other means."""

OF_CALLS = frozenset((
    "truecfgscale", "guidancescale2", "imageguidancescale", "priorguidancescale", "priornuminferencesteps", "pagscale",
    "pagadaptivescale", "skipguidancelayers", "skiplayerguidancescale", "skiplayerguidancestart",
    "skiplayerguidancestop", "cfgnormalization", "cfgtruncation", "cfgtruncratio", "sigmas", "denoisingstart",
    "denoisingend", "prompt2", "prompt3", "prompt4", "negativeprompt2", "negativeprompt3", "negativeprompt4",
    "systemprompt", "complexhumaninstruction", "cleancaption", "originalsize", "targetsize", "cropscoordstopleft",
    "negativeoriginalsize", "negativetargetsize", "negativecropscoordstopleft", "aestheticscore",
    "negativeaestheticscore", "controlnetconditioningscale", "controlguidancestart", "controlguidanceend",
    "controlmode", "guessmode", "ipadapterscale", "lorascale", "crossattentionkwargs", "jointattentionkwargs",
    "attentionkwargs", "paddingmaskcrop", "noiselevel", "originalinferencesteps", "useresolutionbinning",
    "loraweight", "loraweights", "lorascales", "lorastrength", "lorastrengths", "adapterweights", "controlimage",
    "initimage", "maskimage", "ipadapterimage", "usekarrassigmas", "useexponentialsigmas", "usebetasigmas",
    "uselusigmas", "useflowsigmas", "timestepspacing", "algorithmtype", "solverorder", "solvertype", "predictiontype",
    "rescalebetaszerosnr", "finalsigmastype", "clipsample", "highnoisefrac", "numframes",
))  # fmt: skip
"""Arguments of calls and schedulers of diffusers beyond `SETTINGS`, as scripts write them down."""

_OPTIONS = re.compile(
    r"tokenmerging|^to[md][eo]$|vaetil|ngms|skipearlycfg|padconds|fp8|fp16|bf16|lowbits|hypertile|dtype|quanti|compile|"
    r"attention(?!scale|guidance|couple)|teacache|cache|tiled(?!diffusion)|offload|backend|precision"
)
"""What makes calls faster or smaller: the option that is judged, in programs that name it."""

_OFF = ("", "none", "null", "0x0", "-1x-1", "[]", "{}", "nan", "false", "0")
"""Values of what is not in use."""

_LONGEST, _BEGIN = 300, 60
"""Characters of a value that is shown whole, and of the begin of a longer one."""


def others_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns by a program's own names what it says of an image beyond `SETTINGS`: of use beside its own images alone.

    Where something is off, empty or 0, programs leave it out as well.
    """
    others: dict[str, str] = {}
    settings = settings_of(values)
    for key, value in values.items():
        plain = plain_key(key)
        known = plain in _NOT_OF_IMAGES or plain.endswith("version")
        known = known or _is_told(plain, value, settings)
        option = _OPTIONS.search(plain) and plain not in OF_CALLS
        if not plain or known or option:
            continue
        text = (
            number_or_word(value)
            if isinstance(value, str | int | float)
            else _text(value)
        )
        if text not in _OFF:
            shown = text if len(text) <= _LONGEST else shortened(text)
            others[" ".join(str(key).split())] = shown
    return others


def _is_told(plain: str, value: Any, settings: Mapping[str, str]) -> bool:
    """Returns whether a value is that of a setting: of two values under names of one setting, the first is."""
    setting = _BY_KEY.get(plain)
    if setting is None:
        return False
    # Beside a scale, guidance is the distilled one.
    return plain == "guidance" or settings.get(setting.name) in (
        None,
        setting.alike(value),
    )


def others_of_calls(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns of `others_of` the arguments of diffusers' calls alone: tables and scripts list scores and times, too."""
    return {
        name: text
        for name, text in others_of(values).items()
        if plain_key(name) in OF_CALLS
    }


def shortened(text: str) -> str:
    """Returns a value, of a long text its begin and a digest."""
    if len(text) <= _BEGIN:
        return text
    return f"{text[:_BEGIN]}… ({zlib.crc32(text.encode()):08x})"


def others_apart(
    pairs: Iterable[tuple[Mapping[str, str], Mapping[str, str]]],
    meant: Collection[str],
) -> list[str]:
    """Returns in words in which values of `others_of` the images of one program differ, as `differing` does."""
    counts: dict[str, Counter[tuple[str, str]]] = {}
    allowed = {plain_key(name) for name in meant}
    total = 0
    for first, second in pairs:
        total += 1
        for name in dict.fromkeys((*first, *second)):
            values = first.get(name, "none"), second.get(name, "none")
            if values[0] != values[1] and plain_key(name) not in allowed:
                counts.setdefault(name, Counter())[values] += 1
    return [_in_words(name, count, total) for name, count in counts.items()]


def _in_words(name: str, counts: Counter[tuple[str, str]], total: int) -> str:
    """Returns the most frequent values of a setting, as in `steps 20 (baseline 30) in 2 of 8 images`."""
    (baseline, candidate), _ = counts.most_common(1)[0]
    several = counts.total()
    often = "" if several == total else f" in {several} of {total} images"
    return f"{name} {candidate} (baseline {baseline}){often}"


def plain_key(key: str) -> str:
    """Returns a key's letters and digits in lower case."""
    return re.sub(r"[^a-z0-9]", "", str(key).lower())


WEB_UIS = ("A1111", "Forge")
"""Programs that write one form, and leave out the same settings where nothing was chosen."""


def are_one_form(first_program: str, second_program: str) -> bool:
    """Returns whether two programs name settings alike, so that one that is left out has its default."""
    return first_program == second_program or (
        first_program in WEB_UIS and second_program in WEB_UIS
    )


def differing(
    pairs: Iterable[
        tuple[tuple[str, Mapping[str, str]], tuple[str, Mapping[str, str]]]
    ],
    meant: Collection[str] = (),
) -> list[str]:
    """Returns in words which settings of two folders are not the same, as in `steps 20 (baseline 30)`.

    Args:
        pairs: of each image of the baseline and its partner: the program and its settings.
        meant: names of the settings that the candidate changes on purpose.
    """
    counts: dict[str, Counter[tuple[str, str]]] = {}
    total = 0
    for (first_program, first), (second_program, second) in pairs:
        total += 1
        apart = _apart(first, second, are_one_form(first_program, second_program))
        named = first.get("VAE"), second.get("VAE")
        if first_program != second_program and None in named:
            apart.pop("VAE", None)  # which forks choose by other means
        for name, values in apart.items():
            counts.setdefault(name, Counter())[values] += 1
    words = []
    for setting in SETTINGS:
        if setting.name not in counts or setting.name in meant:
            continue
        words.append(_in_words(setting.name, counts[setting.name], total))
    return words


def _apart(
    first: Mapping[str, str], second: Mapping[str, str], one_program: bool
) -> dict[str, tuple[str, str]]:
    """Returns the settings that differ between two images: those that both name, or that one program left out once."""
    apart: dict[str, tuple[str, str]] = {}
    for setting in SETTINGS:
        values = first.get(setting.name), second.get(setting.name)
        if one_program:
            values = values[0] or setting.default, values[1] or setting.default
        else:
            values = _of_all(values[0]), _of_all(values[1])
            if setting.known and not {*values} <= {*setting.known}:
                continue
        if values[0] is not None and values[1] is not None and values[0] != values[1]:
            apart[setting.name] = values[0], values[1]
    for file, name in (
        ("model file", "model"),
        ("VAE file", "VAE"),
        ("LoRA files", "LoRA"),
    ):
        if name in apart:
            apart.pop(file, None)
    hashes = first.get("model hash"), second.get("model hash")
    if None not in hashes:
        if _one_digest(hashes[0] or "", hashes[1] or ""):
            apart.pop("model", None)
            apart.pop("model hash", None)
        elif "model" in apart or not _of_one_kind(hashes[0] or "", hashes[1] or ""):
            apart.pop("model hash", None)
    return apart


def _of_all(value: str | None) -> str | None:
    """Returns a value as most programs name it."""
    return None if value is None else _SAME_SAMPLERS.get(value, value)


def _one_digest(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _of_one_kind(one: str, other: str) -> bool:
    """Returns whether two digests are comparable: the early ones of A1111, of 8 digits, are of a part of the file."""
    return (len(one) == 8) == (len(other) == 8)


def named_settings(text: str) -> list[str]:
    """Returns the settings that a list with commas names; a program's own name stays as it is."""
    by_name = {plain_key(setting.name): setting.name for setting in SETTINGS}
    return [by_name.get(plain_key(word), word.strip()) for word in text.split(",")]


def require_known(names: Collection[str], others: Collection[str]) -> None:
    """Raises UsageError if one of the names is neither a setting nor among `others`, which images have."""
    known = [setting.name for setting in SETTINGS]
    columns = {plain_key(name) for name in others}
    for name in names:
        if name not in known and plain_key(name) not in columns:
            raise UsageError(
                f"--changes {name}: unknown setting; choose from {', '.join((*known, *others))}"
            )
