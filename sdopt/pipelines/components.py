"""Builds the parts of a model without their weights, to find their errors before a worker starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sdopt.errors import UsageError, one_line
from sdopt.pipelines.catalog import (
    NOT_RUN,
    once_per_state,
    part_class,
    parts_in,
    path_of,
    read_json,
)
from sdopt.pipelines.families import further_inputs
from sdopt.pipelines.hub import NETWORK_WEIGHTS
from sdopt.pipelines.loading import folder_of, network_config
from sdopt.pipelines.parts import TEXT_ENCODERS, quiet
from sdopt.pipelines.random_weights import empty_network
from sdopt.pipelines.transformer_files import (
    is_transformer,
    parts_apart,
)
from sdopt.pipelines.transformer_files import problems as problems_of_files
from sdopt.pipelines.weights import (
    Header,
    lacking_vocabulary,
    variants_of,
    weight_files,
    wrong_numbers,
)
from sdopt.schema import Model

if TYPE_CHECKING:
    import torch


def require_parts(model: Model) -> None:
    """Checks that each part of a pipeline can be built from its configuration, and that its weights fit it exactly.

    Call it in a process that may import the model's libraries. It reads the weights once.

    Raises:
        UsageError: a line for each faulty part, with the file and the reason.
    """
    folder = folder_of(model)
    if is_transformer(model):
        lines: Iterable[str] = [
            *_problems(folder, model),
            *problems_of_files(model, folder),
        ]
    elif model.weights == "path" and folder != path_of(model):
        lines = _problems_in_file(path_of(model), folder)
    else:
        lines = _problems(folder, model)
    problems = [f"{model.origin}: {problem}" for problem in lines]
    if problems:
        raise UsageError(problems)


def network_problems(folder: Path, key: str) -> list[str]:
    """Returns what is wrong with a standalone diffusers network, such as a VAE; [] if it can be loaded as it is.

    `key` is the option's key that names the folder, for messages.
    """
    problems = _network_problems(folder / NETWORK_WEIGHTS)
    return [f"{key}: {problem}" for problem in problems]


@once_per_state
def _network_problems(file: Path) -> tuple[str, ...]:
    import diffusers

    folder = file.parent
    try:
        class_name = network_config(folder)["_class_name"]
        Header.of(file, "")
        network, misfits = _laid_out(getattr(diffusers, class_name), folder, None)
        return (
            *_differing("vae", NETWORK_WEIGHTS, network, misfits),
            *wrong_numbers(file),
        )
    except UsageError as error:
        return tuple(problem.removeprefix(": ") for problem in error.problems)
    except Exception as error:
        return (_unmade("network", error),)


def _unmade(what: str, error: Exception) -> str:
    """Returns what a constructor says of a configuration that it does not support."""
    reason = one_line(error)
    return (
        f"no {what} can be made of its configuration ({type(error).__name__}: {reason})"
    )


def count_weights(model: Model) -> int:
    """Returns the number of parameters of a model's networks, built without their weights: like `require_parts`.

    Raises:
        UsageError: the model's files are not there.
    """
    folder = folder_of(model)
    count = 0
    for name, parts in _run(folder):
        if not _is_no_network(name):
            network = empty_network(folder / name, *parts)
            count += sum(weight.numel() for weight in network.parameters())
    return count


def _run(folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """Returns the names of the parts that sdopt loads, each with its library and its class."""
    return [part for part in parts_in(folder).items() if part[0] not in NOT_RUN]


def _is_no_network(name: str) -> bool:
    return name == "scheduler" or name.startswith("tokenizer")


def _problems(folder: Path, model: Model) -> Iterator[str]:
    """Yields what is wrong with the parts of a pipeline in a folder."""
    parts: dict[str, Any] = {}
    faultless = True
    apart = parts_apart(model, folder)
    read = [part for part in _run(folder) if part[0] not in apart]
    for problem in chain.from_iterable(
        _of_part(folder, model, parts, *part) for part in read
    ):
        faultless = False
        yield problem
    if faultless:
        yield from _mismatches(parts)


def _mismatches(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yields where one part of a pipeline does not fit another, and no call or not every call would say so."""
    unet = parts.get("unet")
    if unet is not None:
        latent = parts["vae"].config.latent_channels
        if further := further_inputs(unet.config.in_channels, latent):
            yield further
    for name in parts.keys() & {*TEXT_ENCODERS}:
        tokenizer = name.replace("text_encoder", "tokenizer")
        config = parts[name].config
        known = (
            getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
        )
        if (words := len(parts.get(tokenizer, ()))) > known:
            yield f"{tokenizer}/ has {words} tokens, and {name}/ knows {known}: they are of two models"


def _of_part(
    folder: Path, model: Model, parts: dict[str, Any], name: str, named: tuple[str, str]
) -> Iterator[str]:
    at, (library, class_name) = model.origin, named
    try:
        cls = part_class(library, class_name)
        config = "scheduler_config.json" if name == "scheduler" else "config.json"
        if name.startswith("tokenizer"):
            if lacking := lacking_vocabulary(folder / name):
                yield f"{name}/ {lacking}"
                return
            parts[name] = cls.from_pretrained(folder / name, local_files_only=True)
        elif not (folder / name / config).is_file():
            yield f"{name}/ holds no {config}; fetch it, or save the model again"
        elif name == "scheduler":
            cls.from_pretrained(folder / name, local_files_only=True)
        else:
            files = weight_files(folder / name, library, model.variant, at)
            if read_json(folder / name / "config.json").get("quantization_config"):
                yield f"{name}/ is quantized, as its config.json says; give the model in float32, float16 or bfloat16"
                return
            variant = None
            if model.variant in variants_of(folder / name, library):
                variant = model.variant
            network, misfits = _laid_out(cls, folder / name, variant)
            parts[name] = network
            where = f"{name}/{files[0].name}" if len(files) == 1 else f"{name}/"
            yield from _differing(name, where, network, misfits)
            for file in files:
                yield from wrong_numbers(file, f"{name}/{file.name}")
    except UsageError as error:
        yield from (problem.removeprefix(f"{at}: ") for problem in error.problems)
    except Exception as error:
        yield f"{name}/: {_unmade(class_name, error)}"


class _Misfits(NamedTuple):
    """How the tensors of a file differ from those of a network."""

    missing: Collection[str]
    """Names of tensors that the file lacks."""
    unknown: Collection[str]
    """Names of tensors that the network does not have."""
    misshapen: Collection[tuple[str, Sequence[int], Sequence[int]]]
    """Name, shape in the file, and shape in the network."""


def _differing(
    part: str,
    where: str,
    network: Any,
    misfits: _Misfits,
    way: str = "fetch or save the model again",
) -> Iterator[str]:
    """Yields how the tensors of a file differ from those of a network, under the names that the library gives them.

    Those that a text encoder does not have are ignored, as its library does.

    Args:
        part: the network's name in the pipeline.
        where: the file.
        network: the network.
        misfits: the tensors that differ.
        way: what to do if tensors are missing.
    """
    class_name = type(network).__name__
    missing, unknown, misshapen = misfits
    if len(missing) >= len(network.state_dict()):
        yield f"{where}: holds weights of another network: none of their names belongs to {class_name}"
        return
    if missing:
        yield f"{where}: lacks {_listed(missing)}, which {class_name} needs, and nothing is filled in; {way}"
    if misshapen:
        name, stored, needed = min(misshapen)
        yield (
            f"{where}: {len(misshapen)} tensors are of other shapes than its config.json says, such as "
            f"{name}: {list(stored)}, not {list(needed)}"
        )
    if unknown and not part.startswith("text_encoder"):
        yield (
            f"{where}: holds {_listed(unknown)}, which {class_name} of this configuration does not have: the "
            "model is of another kind, and would be run without them"
        )


def _listed(names: Collection[str]) -> str:
    some = ", ".join(sorted(names)[:3])
    return (
        f"the tensor {some}"
        if len(names) == 1
        else f"{len(names)} tensors, such as {some}"
    )


def _laid_out(cls: Any, folder: Path, variant: str | None) -> tuple[Any, _Misfits]:
    """Loads a network onto the meta device, as its library loads it but without values."""
    with quiet():
        network, info = cls.from_pretrained(
            folder,
            variant=variant,
            use_safetensors=True,
            local_files_only=True,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    misshapen = info["mismatched_keys"]
    # Of each tensor of another shape, transformers reports as missing what it would have filled in.
    missing = {*info["missing_keys"]} - {key for key, _, _ in misshapen}
    return network, _Misfits(missing, info["unexpected_keys"], misshapen)


def _problems_in_file(file: Path, folder: Path) -> Iterator[str]:
    """Yields what is wrong with a single file, whose configurations lie in `folder`."""
    import torch

    shapes = Header.of(file, f"model.path={file}").shapes
    for name, (library, class_name) in _run(folder):
        if not _is_no_network(name):
            network = empty_network(folder / name, library, class_name)
            tensors = {
                key: torch.empty(shape, device="meta") for key, shape in shapes.items()
            }
            try:
                converted = _converted(dict(tensors), name, network)
            except LookupError as error:
                yield f"{file.name}: lacks {error} of the {name}, and nothing is filled in; fetch the model again"
                continue
            needed = {
                key: tuple(tensor.shape) for key, tensor in network.state_dict().items()
            }
            stored = {
                key: tuple(tensor.shape)
                for key, tensor in converted.items()
                if tensor is not None
            }
            used = set()
            for tensor in converted.values():
                used.add(id(tensor if tensor._base is None else tensor._base))
            unread = [
                key
                for key in tensors
                if key.startswith(_KNOWN.get(name, ())) and id(tensors[key]) not in used
            ]
            if name == "text_encoder" and not any(
                key.startswith(_READ_AS_TEXT) for key in shapes
            ):
                yield f"{file.name}: {_OLDER_NAMES}"
                continue
            misshapen = []
            for key in needed.keys() & stored.keys():
                if stored[key] != needed[key]:
                    misshapen.append((key, stored[key], needed[key]))
            misfits = _Misfits(
                needed.keys() - stored.keys(),
                {*(stored.keys() - needed.keys()), *unread},
                misshapen,
            )
            yield from _differing(
                name,
                file.name,
                network,
                misfits,
                "fetch the model again; one that was made with fewer layers, as SSD-1B, is read from its folder",
            )
    yield from wrong_numbers(file)


_KNOWN = {
    "unet": ("model.diffusion_model.",),
    "vae": (
        *("first_stage_model.encoder.", "first_stage_model.decoder."),
        *("vae.encoder.", "vae.decoder."),
    ),
}
"""Prefixes of tensors in a single file that a network must know; a VAE's file may hold what it was trained with."""


_READ_AS_TEXT = (
    "cond_stage_model.transformer.text_model.",
    "cond_stage_model.model.",
    "conditioner.embedders.",
)
"""Prefixes by which diffusers finds a text encoder in a single file."""

_OLDER_NAMES = (
    "names its text encoder as merges of 2022 do (cond_stage_model.transformer.…), which diffusers does not find: "
    "rename these tensors to cond_stage_model.transformer.text_model.…, or save it again with A1111's checkpoint merger"
)


def _converted(
    tensors: dict[str, torch.Tensor], part: str, network: Any
) -> dict[str, torch.Tensor]:
    """Renames the tensors of a single file as diffusers does when it loads one network of it."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
    from diffusers.loaders.single_file_utils import (
        convert_ldm_clip_checkpoint,
        convert_open_clip_checkpoint,
    )

    if not part.startswith("text_encoder"):
        convert = SINGLE_FILE_LOADABLE_CLASSES[type(network).__name__][
            "checkpoint_mapping_fn"
        ]
        return dict(convert(config=dict(network.config), checkpoint=tensors))
    prefix = (
        "conditioner.embedders.1.model."
        if part.endswith("_2")
        else "cond_stage_model.model."
    )
    if any(name.startswith(prefix) for name in tensors):
        converted = convert_open_clip_checkpoint(network, tensors, prefix=prefix)
    else:
        converted = convert_ldm_clip_checkpoint(tensors)
    outer = "" if hasattr(network, "text_model") else "text_model."
    return {name.removeprefix(outer): tensor for name, tensor in converted.items()}
