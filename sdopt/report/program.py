"""Writes a Python program that makes an image as a measured variant does, in diffusers' own code as far as it goes."""

import re
from collections.abc import Iterator
from pathlib import Path

from sdopt.pipelines.catalog import class_name_of
from sdopt.pipelines.loading import clip_skip_of, folder_of, marks_of, part_config
from sdopt.pipelines.sampling import unclipped
from sdopt.pipelines.weights import has_vocabulary, tokenizer_settings
from sdopt.record.choices import NONE, option_name
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import StudyResult, VariantResult
from sdopt.reference import VOCABULARY
from sdopt.schema import Model
from sdopt.statistics.adoption import PLAIN, SPREAD, code_of, steps_argument

_OFFLOADING = ("memory.model_offload", "memory.sequential_offload", "memory.group_offload")
"""Axes of options that move weights to the device themselves."""


def program_of(result: StudyResult, variant: VariantResult) -> str:
    """Returns a program that loads the model, applies a variant's options, and saves an image.

    It is for text-to-image with weights from a file, a folder, the hub or a function, which must be there; "" for
    others.
    """
    config = variant.config
    if config.model.weights == "random" or config.task.kind != "txt2img":
        return ""
    built = config.model.weights == "factory"
    chosen = {axis: option_name(option) for axis, option in variant.choices.items()}
    own = [axis for axis, option in chosen.items() if option != PLAIN.get(axis, NONE)]
    imports, changes, contexts = code_of(variant, own)
    # What a function has built is there before its type can be chosen.
    whole = [line for line in changes if not built and re.fullmatch(r"pipe\.to\(torch\.\w+\)", line)]
    dtype = whole[0][len("pipe.to(") : -1] if whole else ""
    changes = [line for line in changes if line not in whole]
    device = config.hardware.device if config.hardware.device.startswith("cuda") else "cuda"
    on_cpu = result.environment.device["type"] == "cpu"
    moved = [] if on_cpu or any(axis in own for axis in _OFFLOADING) else [f'pipe.to("{device}")']
    threads = [f"torch.set_num_threads({config.hardware.threads})"] if on_cpu and config.hardware.threads else []
    kind = "" if built else class_name_of(folder_of(config.model))
    scheduler = config.scheduler.class_name
    call = f"image = pipe(prompt, {_listed(_call(config))}).images[0]"
    lines = [
        *dict.fromkeys(
            (*(["import runpy"] if built else []), *(["import torch"] if threads or dtype else []), *imports)
        ),
        f"from diffusers import {', '.join(filter(None, sorted((kind, scheduler))))}",
        *(["from transformers import CLIPTokenizer"] if any(_tokenizers(config.model)) else []),
        *([SPREAD] if "spread(" in call else []),
        "",
        *threads,
        *_loading(config.model, kind, dtype),
        f"pipe.scheduler = {scheduler}.from_config({_listed(_scheduler(config))})",
        *moved,
        *changes,
        "",
        f"prompt = {variant.images[0].prompt if variant.images else 'a lighthouse on a rocky coast at dusk'!r}",
        *([f"with {', '.join(contexts)}:", f"    {call}"] if contexts else [call]),
        'image.save("image.png")',
    ]
    return "\n".join(lines) + "\n"


def _loading(model: Model, kind: str, dtype: str) -> Iterator[str]:
    if model.weights == "factory":
        file, _, function = str(model.factory).rpartition(":")
        yield f"pipe = runpy.run_path({file!r})[{function!r}]()"
        return
    folder = folder_of(model)
    single = model.weights == "path" and Path(str(model.path)).expanduser().is_file()
    source = str(model.hub_id) if model.weights == "hub" else str(model.path or folder)
    yield f"pipe = {kind}.{'from_single_file' if single else 'from_pretrained'}("
    yield f"    {source!r},"
    if single:
        yield f"    config={str(folder)!r},  # comes with sdopt; without it, diffusers asks the hub"
        yield from (f"    {name}={loaded}," for name, loaded in _tokenizers(model))
    given = {"revision": model.revision, "variant": model.variant}
    yield from (f"    {name}={value!r}," for name, value in given.items() if value)
    if dtype:
        yield f"    dtype={dtype},"
    yield "    add_watermarker=False," if "XL" in kind else "    safety_checker=None, requires_safety_checker=False,"
    yield ")"
    if skipped := clip_skip_of(model)[0]:
        # The argument `clip_skip` of a call fails where transformers has no `text_model` in a text encoder any more.
        yield 'encoder = getattr(pipe.text_encoder, "text_model", pipe.text_encoder).encoder'
        yield f"encoder.layers = encoder.layers[:-{skipped}]  # clip skip, as the file says"


def _tokenizers(model: Model) -> Iterator[tuple[str, str]]:
    """Yields the tokenizers of a single file that sdopt has no vocabulary of its architecture for, but CLIP's."""
    if model.weights == "path" and Path(str(model.path)).expanduser().is_file():
        for folder in sorted(folder_of(model).glob("tokenizer*")):
            if not has_vocabulary(folder):
                settings = _listed([f"{name}={value!r}" for name, value in tokenizer_settings(folder).items()])
                yield folder.name, f"CLIPTokenizer.from_pretrained({str(VOCABULARY)!r}, {settings})"


def _scheduler(config: RecordedConfig) -> list[str]:
    own = part_config(config.model, "scheduler") or {}
    options = {**unclipped(own, config.scheduler), **marks_of(config.model), **config.scheduler.options}
    return ["pipe.scheduler.config", *(f"{key}={value!r}" for key, value in options.items())]


def _call(config: RecordedConfig) -> Iterator[str]:
    workload, size = config.workload, config.shapes[0].size
    yield steps_argument(config)
    yield f"guidance_scale={workload.guidance(config.model)}"
    yield f"height={size}, width={size}"
    if workload.negative_prompt:
        yield f"negative_prompt={workload.negative_prompt!r}"


def _listed(arguments: "list[str] | Iterator[str]") -> str:
    return ", ".join(arguments)
