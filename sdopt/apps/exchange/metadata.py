"""Reads what the program that wrote an image left in it: prompts, seed and settings.

Programs leave texts in PNG chunks, in the user comment of EXIF or XMP, or in a file beside the image. Which program it
was, is told by the form of the text. Whatever cannot be read says nothing, and is no error: people edit, strip and
convert images.

Libraries that read the same do not suffice: `sd-parsers` reads no samplers in parts, no SwarmUI and no WebP of ComfyUI,
splits values at commas in quotes, and may hand out one image's comment for the next one (it goes by `id(image)`);
`sd-prompt-reader` brings a graphical interface, and wants one version of Pillow.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.apps.exchange.graphs import facts_of_graph, others_of_graph
from sdopt.apps.exchange.hidden import hidden_text
from sdopt.apps.exchange.settings import (
    WEB_UIS,
    number_or_word,
    others_of,
    others_of_calls,
    plain_key,
    settings_of,
    shortened,
)
from sdopt.apps.exchange.texts import json_object, text_beside, texts_of
from sdopt.apps.exchange.wiring import Wiring, wiring_of
from sdopt.apps.exchange.workflows import graph_of_workflow, without_reroutes

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Origin:
    """What an image was made from; None or nothing where nobody tells it.

    Attributes:
        program: the program that says so.
        settings: by the names of `settings.SETTINGS`.
        others: what else the program says, by its own names; see `settings.others_of`.
        version: of the program, where it is told.
        wiring: how the nodes are joined of a graph that made it.
        batch: images of the call that made it, 1 where nobody says more.
    """

    program: str = ""
    prompt: str | None = None
    negative: str = ""
    seed: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    wiring: Wiring | None = None
    batch: int = 1


def origin_of(image: "Image", file: Path) -> Origin:
    """Returns what the program that wrote an image says of it: in the file, in one beside it, or in its pixels."""
    origin = _of_texts(dict(texts_of(image)))
    for suffix in _BESIDE:
        for beside in (file.with_suffix(suffix), Path(f"{file}{suffix}")):
            origin = origin or _of_file(text_beside(beside))
    return origin or _of_hidden(hidden_text(image)) or Origin()


_BESIDE = (".txt", ".json")
"""How files beside an image end, in place of its own suffix or after it."""


def _of_texts(texts: "Texts") -> Origin | None:
    for reader in _READERS:
        origin = reader(texts)
        if origin is not None:
            return _with_graph(origin, _graph(texts))
    return None


def _with_graph(origin: Origin, graph: Mapping[str, Any]) -> Origin:
    """Returns an origin with what a graph beside it says.

    Nodes that save as A1111 does tell less than their graph, and where nobody joins them to it, what they have by
    themselves: a seed of 0, 20 steps, an unknown prompt.
    """
    if not graph:
        return origin
    queued = origin_from("ComfyUI", facts_of_graph(graph))
    settings = {**origin.settings, **queued.settings}
    others = {**origin.others, **others_of_graph(graph)}
    seed = origin.seed if queued.seed is None else queued.seed
    joined = replace(
        origin, settings=settings, others=others, seed=seed, wiring=wiring_of(graph)
    )
    if origin.prompt in _UNTOLD and queued.prompt is not None:
        joined = replace(joined, prompt=queued.prompt, negative=queued.negative)
    if origin.program in WEB_UIS:
        return replace(joined, program="ComfyUI", version="")
    return joined


_UNTOLD = (None, "", "unknown")
"""Prompts of nodes that save images and were told none."""


def _of_file(text: str) -> Origin | None:
    graph = {}
    if text.lstrip().startswith("{"):
        graph = {"workflow" if "nodes" in json_object(text) else "prompt": text}
    return (
        _web_ui({"parameters": text})
        or _listed(text)
        or _of_json(json_object(text))
        or _of_texts(graph)
        or _within(json_object(text))
    )


def _within(values: Mapping[str, Any]) -> Origin | None:
    """Reads an object within that of a document, as in `{"meta": {"seed": 1}}`, or a text in A1111's form."""
    for value in values.values():
        origin = _of_json(_object(value)) or _web_ui({"parameters": str(value)})
        if origin is not None and origin.seed is not None:
            return origin
    return None


def _of_hidden(text: str) -> Origin | None:
    """Reads what stood in chunks as well: the one of A1111, or all of them as NovelAI hides them."""
    chunks = _as_chunks(json_object(text))
    return _of_texts({"parameters": text}) or _of_texts(chunks)


def _as_chunks(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns what stood in chunks, and is now in one object."""
    texts = {}
    for name, value in values.items():
        if isinstance(value, str):
            texts[str(name).lower()] = value
    return texts


def origin_from(program: str, values: Mapping[str, Any]) -> Origin:
    """Returns what values under the names of any program say."""
    named = {plain_key(key): value for key, value in values.items()}
    prompt = _first(named, ("positiveprompt", "prompt", "c", "text", "caption"))
    negative = _first(named, ("negativeprompt", "negative", "uc"))
    settings = settings_of(values)
    if isinstance(prompt, str):
        prompt, tags = _without_tags(prompt)
        if tags:
            settings["LoRA"] = _with_tagged(settings.get("LoRA", ""), tags)
    skipped = settings.get("clip skip", "")
    if program in _OF_SCRIPTS and skipped.isdigit():
        # diffusers counts the layers that are left out; of others, 1 is the last one.
        settings["clip skip"] = str(int(skipped) + 1)
    return Origin(
        program,
        prompt if isinstance(prompt, str) else None,
        negative.strip() if isinstance(negative, str) else "",
        _whole(_first(named, _SEEDS)),
        settings,
        _others_of(program, values),
        str(_first(named, ("version", "appversion", "swarmversion")) or ""),
        batch=prod(_whole(named.get(name)) or 1 for name in _BATCHES),
    )


_BATCHES = ("batchsize", "numimagesperprompt", "nsamples", "numoutputs")
"""What tells how many images a call made: diffusers multiplies the first two, NovelAI and Easy Diffusion have one."""


_SEEDS = ("seed", "noiseseed", "generatorseed", "manualseed", "randomseed")
"""What a seed is called; the latter ones by scripts."""


def _others_of(program: str, values: Mapping[str, Any]) -> dict[str, str]:
    if program in _OF_ANYTHING:
        return {}
    return others_of_calls(values) if program in _OF_SCRIPTS else others_of(values)


_OF_ANYTHING = ("ComfyUI", "Tensor.Art", "sdopt")
"""Where values have no names of a program's own."""

_OF_SCRIPTS = ("", "table", "JSON")
"""Where values hold scores, times and paths, too."""


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    return None


def _whole(value: Any) -> int | None:
    """Returns a seed; None for one that was left to chance (-1)."""
    text = str(value).strip().removesuffix(".0")
    return int(text) if re.fullmatch(r"\d{1,40}", text) else None


_TAG = re.compile(r"[\s,]*<(?:lora|lyco|locon):([^:>]+)(?::([^>]*))?>")


def _without_tags(prompt: str) -> tuple[str, list[dict[str, str]]]:
    """Returns a prompt without the tags that load LoRAs, and those as other programs list them."""
    loras = []
    for name, arguments in _TAG.findall(prompt):
        loras.append({"name": name, "weight": _weight_of(arguments)})
    return _TAG.sub("", prompt).strip(" \n,"), loras


def _with_tagged(listed: str, tags: list[dict[str, str]]) -> str:
    """Returns the LoRAs that a program lists, and those that tags load, of which it may list some as well."""
    loras = listed.split(", ") if listed else []
    names = [lora.partition(":")[0] for lora in loras]
    for lora in settings_of({"lora": tags})["LoRA"].split(", "):
        if lora.partition(":")[0] not in names:
            loras.append(lora)
    return ", ".join(sorted(loras))


_NETWORKS = ("te", "unet", "dyn")
"""What the unnamed arguments of a tag are, in order: weights of the text encoder and the denoiser, and a rank."""


def _weight_of(arguments: str) -> str:
    """Returns the arguments of a tag in one form: the weight alone where it is the same in both networks."""
    named: dict[str, str] = {}
    unnamed = iter(_NETWORKS)
    for argument in arguments.split(":"):
        name, equals, value = argument.partition("=")
        if not equals:
            name, value = next(unnamed, ""), argument
        if value.strip():
            named[name.strip().lower()] = number_or_word(value)
    encoder = named.pop("te", "1")
    denoiser = named.pop("unet", encoder)
    weight = encoder if denoiser == encoder else f"te {encoder} unet {denoiser}"
    further = [f"{name} {value}" for name, value in sorted(named.items())]
    return " ".join([weight, *further])


# ---- the forms of the programs, the most specific ones first ---------------------------------------------------------

Texts = Mapping[str, str]


def _invokeai(texts: Texts) -> Origin | None:
    values = json_object(texts.get("invokeai_metadata"))
    if values:
        named = {}
        for key, value in values.items():
            named[_INVOKEAI.get(key, key)] = _without_numbers(value)
        if isinstance(named.get("clip_skip"), int):
            named["clip_skip"] += 1  # of others, 1 is the last layer
        loras = [lora.get("model") for lora in _dicts(values.get("loras"))]
        named["canvas"] = _of_canvas(values.get("canvas_v2_metadata"))
        named["model_file"] = _hashes([values.get("model")])
        named["lora_hashes"] = _hashes(loras)
        return origin_from("InvokeAI", named)
    values = json_object(texts.get("sd-metadata"))
    image = values.get("image")
    if isinstance(image, dict):
        del values["image"]
        prompt = image.get("prompt")
        if isinstance(prompt, list):
            prompts = _dicts(prompt[:1])
            prompt = prompts[0].get("prompt") if prompts else None
        return _bracketed(values | image, prompt)
    return _of_invokeai_graph(json_object(texts.get("invokeai_graph")))


_OF_NODES = frozenset((
    "id", "type", "is_intermediate", "use_cache", "workflow", "metadata", "board", "version", "fp32", "tiled",
    "tile_size",
))  # fmt: skip
"""What a node of InvokeAI has beside what it does, and options of speed."""


def _of_invokeai_graph(graph: Mapping[str, Any]) -> Origin | None:
    """Returns what the nodes of a workflow say, of which InvokeAI leaves the graph alone, without seeds by chance.

    A value that comes from another node is not that of the image.
    """
    nodes = _object(graph.get("nodes"))
    linked = set[tuple[Any, Any]]()
    for edge in _dicts(graph.get("edges")):
        end = _object(edge.get("destination"))
        linked.add((end.get("node_id"), end.get("field")))
    told: dict[str, Any] = {}
    by_kind: dict[str, list[str]] = {}
    for name, node in nodes.items():
        if not isinstance(node, dict):
            continue
        values: dict[str, Any] = {}
        for key, value in node.items():
            if key not in _OF_NODES and (name, key) not in linked:
                values[_INVOKEAI.get(key) or key] = _without_numbers(value)
        if "steps" in node or "seed" in values:
            told |= values
        elif values:
            text = json.dumps(values, sort_keys=True)
            by_kind.setdefault(str(node.get("type")), []).append(text)
    if not told:
        return None
    origin = origin_from("InvokeAI", told)
    others = {}
    for kind, texts_of_kind in by_kind.items():
        others[kind] = shortened("; ".join(sorted(texts_of_kind)))
    return replace(origin, others={**origin.others, **others})


_ON_CANVAS = ("controlLayers", "regionalGuidance", "referenceImages")
"""What acts on an image from InvokeAI's canvas, whether or not it is made there."""


def _of_canvas(canvas: Any) -> list[Any]:
    """Returns the layers in use that InvokeAI's canvas lays over an image, without their numbers."""
    layers = []
    for name in _ON_CANVAS:
        for layer in _dicts(canvas.get(name) if isinstance(canvas, dict) else None):
            if layer.get("isEnabled", True):
                layers.append(_without_numbers(layer))
    return layers


def _without_numbers(value: Any) -> Any:
    """Returns a value without what only one installation calls a layer or, beside its name, a model."""
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    numbers = {"id", "key"} if "name" in value else {"id"}
    rest = {}
    for key, item in value.items():
        if key not in numbers:
            rest[key] = _without_numbers(item)
    return rest


def _dicts(value: Any) -> list[dict[str, Any]]:
    """Returns the objects in what may be a list of them."""
    listed = value if isinstance(value, list) else []
    return [item for item in listed if isinstance(item, dict)]


def _hashes(files: list[Any]) -> str:
    """Returns the digests of files of weights: one name may stand for several files."""
    digests = [str(file["hash"]) for file in _dicts(files) if "hash" in file]
    return ", ".join(sorted(digests))


_INVOKEAI = {"scheduler": "sampler", "guidance": "distilled_guidance"}
"""What it calls otherwise than the rest: it has a guidance scale beside the guidance that FLUX takes as an input."""

_DREAM = {
    "s": "steps",
    "S": "seed",
    "W": "width",
    "H": "height",
    "C": "cfg",
    "A": "sampler",
    "f": "strength",
}


_SWITCH = re.compile(r"(?:^|\s)-(-[\w-]+|\w)(?:[ =]*([^\s-]\S*))?")
"""A switch of early InvokeAI's command, with its value: `-s50`, `-U 2`, `--seamless`."""


def _dream(texts: Texts) -> Origin | None:
    command = re.match(r'(?s)\s*"(.*?)"\s*(-.*)', texts.get("dream", ""))
    if command is None:
        return None
    values = {}
    for switch, value in _SWITCH.findall(command[2]):
        values[_DREAM.get(switch, switch)] = value or "on"
    return _bracketed(values, command[1])


def _bracketed(values: Mapping[str, Any], prompt: Any) -> Origin:
    """Returns what an early InvokeAI said, which put what not to show into brackets."""
    text = prompt if isinstance(prompt, str) else ""
    negative = ", ".join(part.strip() for part in re.findall(r"\[([^\]]*)\]", text))
    asked = " ".join(re.sub(r"\[[^\]]*\]", "", text).split())
    prompts = {"prompt": asked or None, "negative_prompt": negative}
    return origin_from("InvokeAI", {**values, **prompts})


def _json_settings(texts: Texts) -> Origin | None:
    """Reads SwarmUI, Fooocus, Draw Things, Easy Diffusion, and scripts that leave JSON."""
    for name in (
        "parameters",
        "usercomment",
        "comment",
        "description",
        "metadata",
        "generation_data",
    ):
        within = texts
        values = json_object(texts.get(name))
        if isinstance(values.get("Comment"), str):  # the chunks of NovelAI's PNG
            within = {**texts, **_as_chunks(values)}
            values = json_object(values["Comment"])
        origin = _of_json(values, within)
        if origin is not None:
            return origin
    return None


def _of_json(values: Mapping[str, Any], texts: Texts | None = None) -> Origin | None:
    if not values or any(map(_is_node, values.values())):
        return None
    texts = texts or {}
    program = "JSON"
    if texts.get("software", "").startswith("NovelAI"):
        beside = {"prompt": texts.get("description"), "model": texts.get("source")}
        program, values = "NovelAI", {**beside, **values}
    for is_of, name, in_the_form_of_others in _FORMS:
        if program == "JSON" and is_of(values):
            program, values = name, in_the_form_of_others(values)
    origin = origin_from(program, values)
    return origin if origin.seed is not None or origin.settings else None


def _swarm(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns SwarmUI's values, with the weights of LoRAs, which it lists apart, and digests of files beside names."""
    values = whole["sui_image_params"]
    loras = values.get("loras")
    weights = values.get("loraweights")
    if isinstance(loras, str) and isinstance(weights, str):
        loras = loras.split(",")
        weights = weights.split(",")
    if isinstance(loras, list) and isinstance(weights, list):
        loras = _weighted(loras, weights)
        weights = None
    models: list[Any] = []
    others: list[Any] = []
    for file in _dicts(whole.get("sui_models")):
        if file.get("param") == "model":
            models.append(file)
        else:
            others.append(file)
    digests = {"model_file": _hashes(models), "lora_hashes": _hashes(others)}
    return {**values, "loras": loras, "loraweights": weights, **digests}


def _weighted(names: list[Any], weights: list[Any]) -> list[dict[str, Any]]:
    """Returns LoRAs whose names and weights a program lists apart, in the form of others."""
    loras = []
    for name, weight in zip(names, weights, strict=False):
        loras.append({"name": name, "weight": weight})
    return loras


def _draw_things(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Draw Things' values with those of its whole configuration, which it keeps apart."""
    whole = values.get("v2")
    more = whole if isinstance(whole, dict) else {}
    further = {key: value for key, value in more.items() if key not in values}
    return {**further, **values, "v2": None}


def _fooocus(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Fooocus' values with its LoRAs, each a list of name, weight and digest, in the form of others."""
    loras = []
    files = []
    for lora in values.get("loras") or ():
        if not isinstance(lora, list) or len(lora) < 2:
            continue
        name, weight, *digest = lora
        loras.append({"name": name, "weight": weight})
        if digest:
            files.append({"hash": digest[0]})
    prompt = values.get("prompt")
    return {
        **values,
        "loras": loras,
        "lora_hashes": _hashes(files),
        "prompt": "\n".join(prompt) if isinstance(prompt, list) else prompt,
    }


_LORA = re.compile(r"lora", re.IGNORECASE)
"""How keys of LoRAs begin: `lora_combined_1`, or `LoRA 1`."""


def with_loras(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Fooocus' values with all LoRAs under one key, of which each has one of its own, as `name : weight`.

    Forks write before it whether a LoRA is in use.
    """
    loras = []
    others: dict[str, Any] = {}
    for key, value in values.items():
        if not _LORA.match(key):
            others[key] = value
            continue
        named, _, weight = str(value).rpartition(" : ")
        used, _, name = named.rpartition(" : ")
        if name and name != "None" and used != "False":
            loras.append({"name": name, "weight": weight})
    return {**others, "loras": loras}


def _mflux(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mflux's values, which list files of LoRAs and their weights apart, and the family as a base model."""
    others = dict(values)
    others.pop("base_model", None)
    files = others.pop("lora_paths", None)
    weights = others.pop("lora_scales", None)
    loras = []
    if isinstance(files, list):
        loras = _weighted(files, weights or [1] * len(files))
    return {**others, "version": values["mflux_version"], "loras": loras}


def _ruined_fooocus(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns RuinedFooocus' values, whose LoRAs are lists of a digest and of a text `0.8 - name`."""
    loras = []
    for lora in values.get("loras") or ():
        if isinstance(lora, list) and lora:
            weight, _, name = str(lora[-1]).partition(" - ")
            loras.append({"name": name, "weight": weight})
    return {**values, "loras": loras}


def _tensor_art(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Tensor.Art's values, which list all files of weights as models."""
    loras = []
    for model in _dicts(values.get("models")):
        if model.get("type") == "LORA":
            name = model.get("modelFileName")
            loras.append({"name": name, "weight": model.get("weight", 1)})
    model = values["baseModel"].get("modelFileName")
    return {**values, "model": model, "loras": loras}


_FORMS: tuple[
    tuple[
        Callable[[Mapping[str, Any]], bool],
        str,
        Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ],
    ...,
] = (
    (lambda values: isinstance(values.get("sui_image_params"), dict), "SwarmUI", _swarm),
    (lambda values: "mflux_version" in values, "mflux", _mflux),
    (lambda values: "base_model" in values, "Fooocus", _fooocus),
    (lambda values: "metadata_scheme" in values, "Fooocus", _fooocus),
    # Forks write what its log has.
    (lambda values: "Fooocus" in str(values.get("Version")), "Fooocus", with_loras),
    (lambda values: values.get("software") == "RuinedFooocus", "RuinedFooocus", _ruined_fooocus),
    (lambda values: isinstance(values.get("baseModel"), dict), "Tensor.Art", _tensor_art),
    (lambda values: "c" in values and "uc" in values, "Draw Things", _draw_things),
    (lambda values: "use_stable_diffusion_model" in values, "Easy Diffusion", dict),
)  # fmt: skip
"""By what the JSON of a program is told from that of others, and what gives its values the form of theirs."""


def _is_node(node: Any) -> bool:
    return isinstance(node, dict) and "inputs" in node


_LAST_LINE = re.compile(r"(?s)(.*(?:^|\n))\s*(Steps: \d.*)")
"""Prompts, and then settings on the last line that begins as they do: prompts may hold such words, too."""

_ONE_LINE = re.compile(
    r"(?s)(.*\S)\s+(Steps: \d+, (?:Sampler|Schedule type|CFG scale|Seed|Size): .*)"
)
"""The same in one line, as it is where line breaks were lost on the way."""

_ENTRY = re.compile(
    r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|\{[^{}]*\}|\[\{.*?\}\]|\[[^\[\]]*\]|[^,]*)(?:,|$)'
)
"""One of A1111's settings, as its own reader has it; that one cuts JSON at its commas."""


_SETTINGS = re.compile(r", (?:Seed|Sampler): ")


def _web_ui(texts: Texts) -> Origin | None:
    """Reads A1111's web UI, its forks, and the many that write as it does."""
    for name in ("parameters", "usercomment", "comment", "description"):
        text = texts.get(name, "")
        between = "\n"
        parts = _LAST_LINE.match(text)
        if parts is None:
            between = " "
            parts = _ONE_LINE.match(text)
        if parts is None or not _SETTINGS.search(parts[2]):
            continue
        prompts = f"{between}{parts[1]}"
        prompt, _, negative = prompts.partition(f"{between}Negative prompt:")
        settings, _, _ = parts[2].partition("\n")
        settings, _, whole = settings.partition(", SDCPP: ")
        # What the tab "Extras" has done to the finished image.
        further = texts.get("postprocessing") or texts.get("extras", "")
        entries: dict[str, str] = {}
        for line in (settings, further):
            for key, value in _ENTRY.findall(line):
                entries.setdefault(key.strip(), value.strip().strip('"'))
        if entries.get("App") == "SD.Next":
            entries = _sdnext(entries)
        asked = {"prompt": prompt.strip(), "negative_prompt": negative.strip()}
        weights = _weights_of(entries)
        if _TAG.search(prompt):
            weights.pop("lora", None)
        further_values = {**weights, **_beyond_line(json_object(whole))}
        return origin_from(_fork(entries), {**entries, **further_values, **asked})
    return None


def _sdnext(entries: dict[str, str]) -> dict[str, str]:
    """Returns SD.Next's settings as others name theirs; it leaves out its usual sampler, and has no order of passes."""
    named = {"Sampler": "unnamed", **entries}
    if calls := re.fullmatch(r"\d+x(\d+)", entries.get("Batch", "")):
        named.setdefault("Batch size", calls[1])
    if "Operations" in entries:
        named["Operations"] = "; ".join(sorted(entries["Operations"].split("; ")))
    return named


_ON_THE_LINE = frozenset((
    "schema", "mode", "generator", "seed", "width", "height", "prompt", "clip_skip", "rng", "sampler_rng", "hires",
    "steps", "eta", "method", "scheduler", "extra_sample_args", "custom_sigmas", "txt_cfg", "distilled_guidance", "slg",
    "model", "diffusion_model", "uncond_diffusion_model", "vae", "cache", "vae_tiling", "sampling", "guidance",
    "models", "loras",
))  # fmt: skip
"""What stable-diffusion.cpp writes of an image before its JSON as well; the parts of that; and options of speed."""


def _beyond_line(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the JSON at the end of stable-diffusion.cpp's line says beyond that line."""
    if not whole:
        return {}
    sampling = _object(whole.get("sampling"))
    guidance = _object(sampling.get("guidance"))
    values: dict[str, Any] = {}
    for part in (whole, sampling, guidance, _object(whole.get("models"))):
        for key, value in part.items():
            if key not in _ON_THE_LINE:
                values[key] = value
    values["TE"] = None  # the line has one key for each of the text encoders
    # The strength stands there where no image is changed, too.
    values["image strength"] = values.pop("strength", None)
    values["shift"] = values.pop("flow_shift", None)
    values["lora"] = []
    for lora in _dicts(whole.get("loras")):
        weight = lora.get("multiplier", 1)
        values["lora"].append({"name": lora.get("name"), "weight": weight})
    values["Version"] = _object(whole.get("generator")).get("commit")
    return values


_RESOURCE = ("modelName", "modelVersionName", "modelVersionId")


def _weights_of(entries: Mapping[str, str]) -> dict[str, Any]:
    """Returns the files of weights that lists of digests or of Civitai's resources name.

    Tags in the prompt say more of LoRAs, where they are left in.
    """
    named: dict[str, Any] = {}
    if entries.get("Lora hashes"):
        named["lora"] = []
        for part in entries["Lora hashes"].split(","):
            name, _, _ = part.partition(":")
            named["lora"].append({"name": name.strip(), "weight": ""})
    try:
        resources = json.loads(entries.get("Civitai resources", "[]"))
    except (ValueError, RecursionError):
        return named
    loras = []
    for resource in resources:
        if not isinstance(resource, dict):
            continue
        name = " ".join(str(resource.get(key, "")) for key in _RESOURCE)
        if resource.get("type") == "checkpoint":
            named["model"] = name
        elif resource.get("type") in ("lora", "lycoris", "dora"):
            loras.append({"name": name, "weight": resource.get("weight", 1)})
    if loras:
        named["lora"] = loras
    return named


def _fork(entries: Mapping[str, str]) -> str:
    """Returns the program whose settings these are; forks leave out other things than A1111 does."""
    if entries.get("App"):
        return entries["App"]
    version = entries.get("Version", "")
    if "fooocus" in version.lower():
        return "Fooocus"
    if version.startswith(_CPP):
        return _CPP
    return "Forge" if re.match(r"f\d", version) else "A1111"


_CPP = "stable-diffusion.cpp"
"""How versions begin of the program of this name."""


def _comfyui(texts: Texts) -> Origin | None:
    graph = _graph(texts)
    facts = facts_of_graph(graph)
    if not facts and not others_of_graph(graph):
        return None
    return origin_from("ComfyUI", facts)


def _graph(texts: Texts) -> dict[str, Any]:
    """Returns the graph that was queued, or else what the editor saved of it: each in a text, or both in a comment."""
    graph = _graph_in(texts)
    for name in ("usercomment", "comment"):
        if not graph:
            values = json_object(texts.get(name))
            nodes = {key: value for key, value in values.items() if _is_node(value)}
            graph = nodes or _graph_in(values)
    return graph


def _graph_in(values: Mapping[str, Any]) -> dict[str, Any]:
    queued = _object(values.get("prompt"))
    saved = _object(values.get("workflow"))
    return without_reroutes(queued) or graph_of_workflow(saved)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else json_object(value)


_LINE = re.compile(r"(?m)^([A-Za-z][\w /()-]{2,40}):[ \t]*(.*)$")


def _chunks(texts: Texts) -> Origin | None:
    """Reads programs that leave each setting in a chunk of its own: Easy Diffusion, and scripts such as kohya's."""
    if "flux:seed" in texts:
        values = {"seed": texts["flux:seed"], "model": texts.get("flux:model")}
        return origin_from("iris", values)
    if "seed" not in texts or not ("prompt" in texts or settings_of(texts)):
        return None
    program = "a script"
    values = {}
    for name, text in texts.items():
        values[_LABELS.get(name, name)] = text
        if "model" in name:
            program = "Easy Diffusion"
    return origin_from(program, values)


_LABELS = {
    "guidance scale": "cfg",
    "stable diffusion model": "model",
    "prompt strength": "strength",
}


def _listed(text: str) -> Origin | None:
    """Reads a text of lines `Name: value`, as Easy Diffusion and Mochi Diffusion write them."""
    lines = {name.lower(): value.strip() for name, value in _LINE.findall(text)}
    return _chunks(lines)


def _elsewhere(texts: Texts) -> Origin | None:
    """Reads JSON or A1111's form in a chunk of any name, as small programs and scripts leave it."""
    for name, text in texts.items():
        if name in ("prompt", "workflow"):
            continue
        values = json_object(text)
        origin = _of_json(values) or _within(values) or _web_ui({"parameters": text})
        if origin is not None:
            return origin
    return None


_READERS: tuple[Callable[[Texts], Origin | None], ...] = (
    _invokeai,
    _dream,
    _json_settings,
    _web_ui,
    _comfyui,
    _chunks,
    _elsewhere,
)
