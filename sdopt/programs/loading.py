"""Writes how a program loads the pipeline of a variant, as a worker does."""

from collections.abc import Iterator
from pathlib import Path

from sdopt.hardware.device import Device
from sdopt.options.precision import Precision
from sdopt.pipelines.catalog import class_name_of
from sdopt.pipelines.loading import clip_skip_of, folder_of, left_out, path_of
from sdopt.pipelines.tasks import pipeline_class
from sdopt.pipelines.weights import has_vocabulary, tokenizer_settings
from sdopt.programs.code import Code, function_code, literal
from sdopt.reference import VOCABULARY
from sdopt.schema import Model, Task
from sdopt.variant import Variant


def cast_of(variant: Variant) -> str | None:
    """Returns the type that all weights have from the start; None if the precision treats some of them otherwise."""
    option = variant.optimizations.get("precision")
    return option.weights if type(option) is Precision else None


def loading_of(variant: Variant, device: Device) -> Code:
    """Returns code that leaves the model's pipeline as `pipe`, in the host's memory.

    Raises:
        UsageError: the model's files are missing.
    """
    threads = variant.hardware.threads
    limit = (
        Code(("import torch",), (f"torch.set_num_threads({threads})",)) if threads and not device.is_cuda else Code()
    )
    model = variant.model
    if model.weights == "factory":
        return limit + function_code(str(model.factory), "pipe = {}()")
    dtype = cast_of(variant) or "float32"
    if model.weights == "random":
        # Where a worker draws them: on another device they would be others.
        on_host = any(option.loads_on_host for _, option in variant.applied)
        return limit + _untrained(variant, dtype, "cpu" if on_host else device.torch_name)
    return limit + from_files(model, variant.task, dtype)


def from_files(model: Model, task: Task, dtype: str) -> Code:
    """Returns code that loads the pipeline of a model in files, for a task, with weights of a type of PyTorch."""
    folder = folder_of(model)
    cls = pipeline_class(class_name_of(folder), task)
    single = model.weights == "path" and path_of(model).is_file()
    arguments = list(_single_file(model, folder) if single else _repository(model, folder))
    # What the file does not say is loaded in the type in which it was saved, of each part.
    arguments.append(f"dtype=torch.{dtype}")
    arguments += [f"{name}={value!r}" for name, value in left_out(cls).items()]
    method = "from_single_file" if single else "from_pretrained"
    lines = [f"pipe = {cls.__name__}.{method}(", *(f"    {argument}," for argument in arguments), ")"]
    if skipped := clip_skip_of(model)[0]:
        # The argument `clip_skip` of a call fails where transformers has no `text_model` in a text encoder any more.
        lines.append('encoder = getattr(pipe.text_encoder, "text_model", pipe.text_encoder).encoder')
        lines.append(f"encoder.layers = encoder.layers[:-{skipped}]  # clip skip, as the file says")
    tokenizers = ["from transformers import CLIPTokenizer"] if single and any(tokenizers_of(model)) else []
    return Code(("import torch", f"from diffusers import {cls.__name__}", *tokenizers), tuple(lines))


def _repository(model: Model, folder: Path) -> Iterator[str]:
    """Yields the arguments for a folder, or for a repository of the hub at the commit that was measured."""
    if model.weights != "hub":
        yield literal(str(folder.absolute()))
    else:
        yield literal(str(model.hub_id))
        if revision := folder.name if folder.parent.name == "snapshots" else model.revision:
            yield f"revision={literal(revision)}"
    if model.variant:
        yield f"variant={literal(model.variant)}"
    yield "use_safetensors=True"


def _single_file(model: Model, folder: Path) -> Iterator[str]:
    yield literal(str(path_of(model).absolute()))
    yield f"config={literal(str(folder))}"  # comes with sdopt; without it, diffusers asks the hub
    yield from (f"{name}={loaded}" for name, loaded in tokenizers_of(model))


def tokenizers_of(model: Model) -> Iterator[tuple[str, str]]:
    """Yields the tokenizers that a single file is given, each with code that loads it."""
    for folder in sorted(folder_of(model).glob("tokenizer*")):
        if model.tokenizer is not None or not has_vocabulary(folder):
            vocabulary = VOCABULARY if model.tokenizer is None else Path(model.tokenizer).expanduser().absolute()
            settings = "".join(f", {name}={value!r}" for name, value in tokenizer_settings(folder).items())
            yield folder.name, f"CLIPTokenizer.from_pretrained({literal(str(vocabulary))}{settings})"


def _untrained(variant: Variant, dtype: str, device: str) -> Code:
    """Returns code that builds a model with random weights, which only sdopt can."""
    imports = (
        "import torch",
        "from sdopt.pipelines.loading import load_pipeline",
        "from sdopt.schema import Model, Scheduler, Task",
    )
    parts = f"{variant.model!r}, {variant.scheduler!r}, {variant.task!r}"
    return Code(imports, (f'pipe = load_pipeline({parts}, "{device}", {{"dtype": torch.{dtype}}})',))
