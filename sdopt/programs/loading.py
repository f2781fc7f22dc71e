"""Writes how a program loads the pipeline of a variant, as a worker does."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdopt.hardware.device import Device
from sdopt.hardware.probe import default_threads
from sdopt.options.precision import FLOATS, Precision
from sdopt.pipelines.catalog import class_name_of, is_in_a_file, path_of
from sdopt.pipelines.hub import commit_of
from sdopt.pipelines.loading import (
    absent_in,
    clip_skip_of,
    family_of,
    folder_of,
    left_out,
    part_config,
)
from sdopt.pipelines.tasks import pipeline_class
from sdopt.pipelines.transformer_files import base_of, is_transformer, without_parts
from sdopt.pipelines.weights import has_vocabulary, tokenizer_settings
from sdopt.programs.code import Piece, function_code, literal
from sdopt.reference import VOCABULARY
from sdopt.schema import Model, Task
from sdopt.variant import Variant


def cast_of(variant: Variant) -> str | None:
    """Returns the type that all weights have from the start; None if the precision treats some of them otherwise."""
    option = variant.optimizations.get("precision")
    if type(option) is Precision:
        return option.weights
    return None


def has_half_encoders(model: Model) -> bool:
    """Returns whether text encoders of a pipeline begin in half precision where nothing is said: all else is float32."""
    for name in family_of(model).encoders:
        config = part_config(model, name) or {}
        if config.get("dtype", config.get("torch_dtype")) in FLOATS[1:]:
            return True
    return False


def loading_of(variant: Variant, device: Device) -> Piece:
    """Returns code that leaves the model's pipeline as `pipe`, in the host's memory.

    Raises:
        UsageError: the model's files are missing.
    """
    start = _threads(variant.hardware.threads or _fewer_threads(), device)
    model = variant.model
    if model.weights == "factory":
        return start + function_code(str(model.factory), "pipe = {}()")
    dtype = cast_of(variant) or "float32"
    if model.weights == "random":
        return start + _untrained(variant, dtype, device)
    return start + from_files(model, variant.task, dtype)


def own_threads(variant: Variant, device: Device) -> Piece:
    """Returns code that sets the threads of a variant that has other ones than its model by itself."""
    threads = variant.hardware.threads
    return _threads(None if threads == variant.model.threads else threads, device)


def _threads(threads: int | None, device: Device) -> Piece:
    if not threads or device.is_cuda:
        return Piece()
    return Piece(("import torch",), (f"torch.set_num_threads({threads})",))


def _fewer_threads() -> int | None:
    """Returns the threads of a worker, where PyTorch by itself takes one for each core of a machine that is not all here.

    A container may have two cores of 64: there a program is many times slower with 64 threads.
    """
    import torch

    threads = default_threads()
    return threads if threads < torch.get_num_threads() else None


def from_files(model: Model, task: Task, dtype: str) -> Piece:
    """Returns code that loads the pipeline of a model in files, for a task, with weights of a type of PyTorch."""
    folder = folder_of(model)
    cls = pipeline_class(class_name_of(folder), task)
    if is_transformer(model):
        return _with_files(model, folder, cls, dtype)
    single = is_in_a_file(model)
    imports = ["import torch", f"from diffusers import {cls.__name__}"]
    if single:
        method = "from_single_file"
        arguments = list(_single_file(model, folder))
    else:
        method = "from_pretrained"
        arguments = list(_repository(model, folder))
    if single and any(tokenizers_of(model)):
        imports.append("from transformers import CLIPTokenizer")
    # Where nothing is said, each part keeps the type in which it was saved.
    arguments.append(f"dtype=torch.{dtype}")
    absent = {} if single else absent_in(folder)
    for name, value in (absent | left_out(cls)).items():
        arguments.append(f"{name}={value!r}")
    lines = [f"pipe = {cls.__name__}.{method}("]
    lines += [f"    {argument}," for argument in arguments]
    lines.append(")")
    return Piece(tuple(imports), tuple(lines))


def layers_left_out(model: Model) -> Piece:
    """Returns code that leaves out the last layers of a text encoder, where a file says so: diffusers does not."""
    skipped = clip_skip_of(model)[0]
    if not skipped:
        return Piece()
    # The argument `clip_skip` of a call fails where transformers has no `text_model` in a text encoder any more.
    lines = (
        'encoder = getattr(pipe.text_encoder, "text_model", pipe.text_encoder).encoder',
        f"encoder.layers = encoder.layers[:-{skipped}]  # clip skip, as the file says",
    )
    return Piece(lines=lines)


def _with_files(model: Model, folder: Path, cls: Any, dtype: str) -> Piece:
    """Returns code that loads a pipeline, some of whose networks lie in files.

    diffusers' own readers know no scales, one width of FLUX.1, and leave out what they do not know.
    """
    imports = (
        *(
            "import torch",
            "from pathlib import Path",
            f"from diffusers import {cls.__name__}",
        ),
        *(
            "from sdopt.pipelines.transformer_files import load_parts",
            "from sdopt.schema import Model",
        ),
    )
    parts = {
        name: file and _absolute(file) for name, file in (model.parts or {}).items()
    }
    whole = replace(model, path=_absolute(str(model.path)), parts=parts or None)
    base, without = base_of(model), without_parts(model, folder)
    lines = [
        f"base = {literal(str(folder.absolute()))}",
        f"parts = load_parts({whole!r}, Path(base), torch.{dtype})",
        f"pipe = {cls.__name__}.from_pretrained(",
        *(f"    {argument}," for argument in _repository(base, folder)),
        "    **parts,",
        *(
            f"    {name}={value!r},"
            for name, value in absent_in(folder).items()
            if name not in without
        ),
        f"    dtype=torch.{dtype},",
        *(f"    {name}={value!r}," for name, value in left_out(cls).items()),
        ")",
    ]
    return Piece(imports, tuple(lines))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _repository(model: Model, folder: Path) -> Iterator[str]:
    """Yields the arguments for a folder, or for a repository of the hub at the commit that was measured."""
    if model.weights == "hub":
        yield literal(str(model.hub_id))
        revision = commit_of(folder) or model.revision
        if revision:
            yield f"revision={literal(revision)}"
    else:
        yield literal(str(folder.absolute()))
    if model.variant:
        yield f"variant={literal(model.variant)}"
    yield "use_safetensors=True"


def _single_file(model: Model, folder: Path) -> Iterator[str]:
    """Yields the arguments for a single file; its configuration comes with sdopt, and diffusers asks the hub for it."""
    yield literal(str(path_of(model).absolute()))
    yield f"config={literal(str(folder))}"
    for name, tokenizer in tokenizers_of(model):
        yield f"{name}={tokenizer}"


def tokenizers_of(model: Model) -> Iterator[tuple[str, str]]:
    """Yields the tokenizers that a single file is given, each with code that loads it."""
    vocabulary = VOCABULARY
    if model.tokenizer is not None:
        vocabulary = Path(model.tokenizer).expanduser().absolute()
    for folder in sorted(folder_of(model).glob("tokenizer*")):
        if model.tokenizer is None and has_vocabulary(folder):
            continue  # it comes with the configuration
        arguments = [literal(str(vocabulary))]
        for name, value in tokenizer_settings(folder).items():
            arguments.append(f"{name}={value!r}")
        yield folder.name, f"CLIPTokenizer.from_pretrained({', '.join(arguments)})"


def _untrained(variant: Variant, dtype: str, device: Device) -> Piece:
    """Returns code that builds a model with random weights, which only sdopt can.

    They are drawn where a worker draws them: on another device they would be others.
    """
    place = device.torch_name
    if any(option.loads_on_host for _, option in variant.applied):
        place = "cpu"
    imports = (
        "import torch",
        "from sdopt.pipelines.loading import load_pipeline",
        "from sdopt.schema import Model, Scheduler, Task",
    )
    what = f"{variant.model!r}, {variant.scheduler!r}, {variant.task!r}"
    how = f'"{place}", {{"dtype": torch.{dtype}}}'
    return Piece(imports, (f"pipe = load_pipeline({what}, {how})",))
