"""Loads the pipeline of a `Model`, or single networks of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import (
    ALT_DIFFUSION,
    NOT_RUN,
    architecture_folder,
    class_name_of,
    class_named,
    is_in_a_file,
    part_class,
    parts_in,
    path_of,
    read_json,
    text_to_image,
)
from sdopt.pipelines.factory import Built, build, built, require_same
from sdopt.pipelines.families import (
    guidance_from,
    name_of_folder,
    predicts_noise,
)
from sdopt.pipelines.family import (
    Family,
    Guidance,
    family_named,
    unknown_transformer,
)
from sdopt.pipelines.hub import base_folder, hub_folder
from sdopt.pipelines.parts import Pipeline, cast, place
from sdopt.pipelines.random_weights import build_pipeline, random_network
from sdopt.pipelines.sampling import (
    is_flow,
    late_start,
    marks_in,
    misnamed,
    remarks,
    scheduler_like,
    unread_by,
    unseeded,
    unsuited,
)
from sdopt.pipelines.tasks import adapt, pipeline_class
from sdopt.pipelines.transformer_files import (
    is_transformer,
    load_parts,
    load_stored,
    stored_parts,
)
from sdopt.pipelines.weights import Header, load_tokenizer
from sdopt.schema import Model, Scheduler, Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadedModel(Model):
    """The model of a pipeline that a program has loaded, and in which it may have replaced parts.

    Without a path, `weights=path` is a model of unknown origin: a single file, or a pipeline that was built by hand.
    """

    class_name: str = ""
    """Class name of the pipeline."""
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    """The configurations of its networks and its scheduler, of those that diffusers defines, by part."""
    networks: Mapping[str, Any] = field(
        default_factory=dict, hash=False, compare=False, repr=False
    )
    """Its networks, by part."""

    @property
    def is_known(self) -> bool:
        """Whether the pipeline says where its weights come from."""
        return self.weights != "path" or self.path is not None


def part_config(model: Model, part: str) -> dict[str, Any] | None:
    """Returns the configuration of a part such as `unet` or `scheduler` without loading it; None if it is not local.

    The part "" is the pipeline itself.
    """
    if (described := _described(model)) is not None:
        return described.configs.get(part)
    names = {"scheduler": "scheduler_config.json", "": "model_index.json"}
    try:
        path = folder_of(model) / part / names.get(part, "config.json")
    except UsageError:
        return None  # conflicts are checked before anything is fetched, or built by a function
    if not path.is_file():
        return None
    config = dict(read_json(path))
    if part != "scheduler":
        return config
    return config | _of_index(folder_of(model)) | marks_of(model)


def _of_index(folder: Path) -> dict[str, str]:
    """Returns the class of a pipeline's scheduler: diffusers loads that of the index, whatever the scheduler's file says."""
    _, class_name = parts_in(folder).get("scheduler", ("", ""))
    return {"_class_name": class_name} if class_name else {}


def _described(model: Model) -> LoadedModel | Built | None:
    """Returns what describes a model that is loaded or built, and not read from files."""
    return model if isinstance(model, LoadedModel) else built(model)


def architecture_config(model: Model, part: str) -> dict[str, Any] | None:
    """Returns the configuration of a part as the model's name says, local or not; None if sdopt does not have it."""
    folder = architecture_folder(model)
    if folder is None:
        return None
    return (
        dict(read_json(folder / "model_index.json"))
        if part == ""
        else network_config(folder / part)
    )


def marks_of(model: Model) -> dict[str, Any]:
    """Returns what the file of a model says of how it was trained; {} for a folder, which has a configuration."""
    return marks_in(path_of(model)) if is_original(model) else {}


def sampling_problems(model: Model, scheduler: Scheduler, steps: int = 20) -> list[str]:
    """Returns why a scheduler cannot sample a model as the model says; [] if it can, or if the model is not local."""
    config = part_config(model, "scheduler")
    if config is None:
        return []
    named = misnamed(name_of(model), config, scheduler)
    family = family_of(model)
    if (
        family.sampling == "flow"
        and not unsuited(config, scheduler, steps)
        and scheduler.class_name not in family.schedulers
    ):
        why = f"is not called by diffusers' {family.pipeline}, or draws nonsense there"
        return [
            f"scheduler.class_name={scheduler.class_name}: {why}: choose {' or '.join(family.schedulers)}"
        ]
    return [
        *unsuited(config, scheduler, steps),
        *unread_by(family, config, scheduler),
        *unseeded(family, config, scheduler),
        *named,
        *_contradicted(model, scheduler),
        *clip_skip_of(model)[1],
    ]


def name_of(model: Model) -> str:
    """Returns what the author called a model: its function, file, folder or repository; "" of those of sdopt."""
    if model.factory is not None:
        return model.factory.rpartition(":")[2]
    if model.weights == "hub":
        return str(model.hub_id)
    if model.path is None:
        return ""
    return name_of_folder(Path(model.path).expanduser().absolute())


def _contradicted(model: Model, scheduler: Scheduler) -> list[str]:
    """Returns a problem if a file of Stable Diffusion 2.x says, but not as a mark, that it is sampled otherwise."""
    if (
        model.name not in _OF_SD2
        or not is_original(model)
        or {"prediction_type"} & {*marks_of(model), *scheduler.options}
    ):
        return []
    says = predicts_noise(path_of(model))
    if says is None or says == _OF_SD2[model.name]:
        return []
    other = next(name for name, noise in _OF_SD2.items() if noise == says)
    return [
        f"{model.origin}: is of model={other}, as its size or its number of steps says: choose that"
    ]


_OF_SD2 = {"sd21": False, "sd21_base": True}
"""Architectures that have the same tensors, and whether they predict noise."""


def clip_skip_of(model: Model) -> tuple[int, list[str]]:
    """Returns how many of its text encoder's last layers a single file leaves out, and why that cannot be done.

    `modelspec.encoder_layer` counts from the end, so that 1 is the last layer. The architectures of SDXL and of Stable
    Diffusion 2.x leave out one anyway.
    """
    said = (
        Header.of(path_of(model), "").metadata.get(_LAYER, "")
        if is_original(model)
        else ""
    )
    if not said.strip():
        return 0, []
    layers = int((part_config(model, "text_encoder") or {})["num_hidden_layers"])
    usual = 2 if is_sdxl(model) or layers == _LAYERS_OF_SD2 else 1
    # Trainers write their own setting, 1 or 2, which they do not heed for these architectures.
    count = int(said) - 1 if said.strip().isdigit() else -1
    if 0 <= count < (layers if usual == 1 else usual):
        return (count if usual == 1 else 0), []
    return 0, [
        f"{model.origin}: says {_LAYER}={said}, and this architecture reads layer {usual} from the end"
    ]


_LAYER, _LAYERS_OF_SD2 = "modelspec.encoder_layer", 23


def leave_out_layers(text_encoder: Any, count: int) -> None:
    """Takes the last layers off a text encoder: what is called clip skip, where it is not said for each call."""
    encoder = getattr(text_encoder, "text_model", text_encoder).encoder
    if count:
        encoder.layers = encoder.layers[:-count]
        text_encoder.config.num_hidden_layers -= count


def is_original(model: Model) -> bool:
    """Returns whether a model is one file that holds all networks of a Stable Diffusion."""
    return is_in_a_file(model) and not is_transformer(model)


def sampling_remarks(model: Model, scheduler: Scheduler, steps: int = 20) -> list[str]:
    """Returns what a user should know of how a model is sampled, for each a line that names the model."""
    config, marks = part_config(model, "scheduler"), marks_of(model)
    lines = remarks(config, marks, scheduler) if config else []
    if config:
        lines += late_start(config, scheduler, steps)
    if scheduler.timesteps is not None:
        from diffusers.schedulers import AysSchedules

        other, mine = ("", "ays_xl") if is_sdxl(model) else ("XL", "ays")
        if scheduler.timesteps == AysSchedules[f"StableDiffusion{other}Timesteps"]:
            lines.append(
                f"these timesteps were chosen for another family of models; scheduler={mine} has its own"
            )
    chosen = {"_class_name": scheduler.class_name, **scheduler.options}
    if config and is_flow(chosen) and not is_flow(config):
        lines.append(
            "its own scheduler has levels of noise, and this one samples a flow: images are nonsense unless it fits"
        )
    if family_of(model).guidance.above == 0:
        lines.append(
            "a guidance scale of 3 here is what other models call 4: cond + 3 · (cond - uncond)"
        )
    if skipped := clip_skip_of(model)[0]:
        said = f"is marked {_LAYER}={1 + skipped} (clip skip)"
        lines.append(
            f"{said}: its text encoder is used without the last layers: {skipped}"
        )
    return [f"{model.origin}: {remark}" for remark in lines]


def pipeline_of(model: Model) -> str:
    """Returns the class name of a model's pipeline; if it is not local, by the model's name, and "" if that is none."""
    if (described := _described(model)) is not None:
        return described.class_name
    try:
        return class_name_of(folder_of(model))
    except (
        UsageError,
        OSError,
        ValueError,
        KeyError,
    ):  # `require_model` says what is wrong with a folder
        return class_named(model) or ""


def family_of(model: Model) -> Family:
    """Returns the family of a model; if it is not local, by its name, and Stable Diffusion's of an unknown one.

    A program's pipeline with a transformer may be of a kind that sdopt does not know.
    """
    name = text_to_image(pipeline_of(model))
    family = family_named(name)
    networks = model.networks if isinstance(model, LoadedModel) else {}
    if family.is_unet and "transformer" in networks:
        encoders = tuple(part for part in networks if part.startswith("text_encoder"))
        return unknown_transformer(name, encoders)
    return family


def call_arguments(model: Model) -> dict[str, Any]:
    """Returns the arguments that each call of a model's pipeline has, whatever the workload."""
    length = (
        {}
        if model.max_sequence_length is None
        else {"max_sequence_length": model.max_sequence_length}
    )
    return {**family_of(model).call, **length}


def denoiser_config(model: Model) -> dict[str, Any] | None:
    """Returns the configuration of a model's denoiser, without loading it; None if it is not local."""
    return part_config(model, family_of(model).denoiser)


def published_denoiser(model: Model) -> dict[str, Any]:
    """Returns the configuration of a model's denoiser, or its architecture's if it is not local; {} without both."""
    return (
        denoiser_config(model)
        or architecture_config(model, family_of(model).denoiser)
        or {}
    )


def guidance_of(model: Model) -> Guidance:
    """Returns how a model is guided, by its configurations; by its architecture's, if they are not local."""
    family = family_of(model)
    if family.distilled_if is None:
        return family.guidance
    part = family.distilled_if[0]
    return guidance_from(
        family,
        {part: part_config(model, part) or architecture_config(model, part) or {}},
    )


def is_sdxl(model: Model) -> bool:
    """Returns whether a model is of the SDXL family; if it is not local, by the name of its architecture."""
    return family_of(model).pipeline == "StableDiffusionXLPipeline"


def network_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a standalone network, without loading it."""
    return dict(read_json(folder / "config.json"))


def load_vae(folder: Path, dtype: torch.dtype, random: bool) -> Any:
    """Loads a VAE that lies in a folder of its own, on the CPU, or builds it with random weights."""
    class_name = network_config(folder)["_class_name"]
    if random:
        return random_network(folder, "diffusers", class_name, "vae", dtype)
    import diffusers

    cls: Any = getattr(diffusers, class_name)
    return cls.from_pretrained(
        folder, use_safetensors=True, local_files_only=True, dtype=dtype
    )


def load_part(model: Model, part: str, dtype: torch.dtype) -> Any:
    """Loads one network of a model, such as `vae`, on the CPU, with weights of the given type."""
    folder = folder_of(model)
    library, class_name = parts_in(folder)[part]
    if model.weights == "random":
        return random_network(folder / part, library, class_name, part, dtype)
    if is_transformer(model) and (stored := stored_parts(model, folder).get(part)):
        return load_stored(model, part, stored, folder, dtype)
    cls = part_class(library, class_name)
    if is_original(model):
        return cls.from_single_file(
            str(path_of(model)),
            config=str(folder),
            subfolder=part,
            torch_dtype=dtype,
            local_files_only=True,
        )
    return cls.from_pretrained(
        folder,
        subfolder=part,
        variant=model.variant,
        use_safetensors=True,
        local_files_only=True,
        dtype=dtype,
    )


def heads_by_level(model: Model) -> dict[int, int]:
    """Returns the number of heads of the UNet's attention layers by the number of downsamplings before them.

    It is {} if its configuration is not local, and for a transformer.
    """
    config = denoiser_config(model)
    if config is None or "down_block_types" not in config:
        return {}
    # For historical reasons, diffusers' UNets call the number of heads `attention_head_dim`.
    heads = config.get("num_attention_heads") or config.get("attention_head_dim", 8)
    attends = ["CrossAttn" in block for block in config["down_block_types"]]
    attends[-1] = attends[-1] or "CrossAttn" in (
        config.get("mid_block_type", "CrossAttn") or ""
    )
    heads_each = heads if isinstance(heads, list) else [int(heads)] * len(attends)
    return {level: heads_each[level] for level, used in enumerate(attends) if used}


def head_dimensions(model: Model) -> list[int]:
    """Returns the distinct channel counts of the denoiser's attention heads; empty if they are not known."""
    if by_level := head_dimensions_by_level(model):
        return sorted(set(by_level.values()))
    config = denoiser_config(model) or {}
    if family_of(model).is_unet:
        return []
    if channels := config.get("attention_head_dim"):
        return [int(channels)]
    width = config.get("dim") or config.get("hidden_size")
    heads = config.get("n_heads") or config.get("num_attention_heads")
    return [int(width // heads)] if width and heads else []


def head_dimensions_by_level(model: Model) -> dict[int, int]:
    """Returns the channels of attention heads by the number of downsamplings; {} without a local configuration."""
    config = denoiser_config(model) or {}
    return {
        level: config["block_out_channels"][level] // heads
        for level, heads in heads_by_level(model).items()
    }


def load_pipeline(
    model: Model,
    scheduler: Scheduler,
    task: Task,
    device: str,
    load_kwargs: dict[str, Any],
    on_host: bool = False,
) -> Pipeline:
    """Loads or builds the task's pipeline without touching a hub, and moves it to `device`.

    The safety checker of Stable Diffusion 1.x and the watermark of SDXL are left out, because they would be timed too.
    With `on_host` the weights stay in the host's memory, and an option moves them to the device.

    Raises:
        UsageError: the files are missing.
    """
    if model.factory is not None:
        pipe = _as_built(model, task, load_kwargs)
    else:
        pipe = _from_files(model, task, load_kwargs, "cpu" if on_host else device)
    pipe.scheduler = scheduler_like(pipe.scheduler, scheduler, marks_of(model))
    pipe.set_progress_bar_config(disable=True)
    adapt(pipe, task)
    place(pipe, device, on_host)
    return pipe


def _from_files(
    model: Model, task: Task, load_kwargs: dict[str, Any], device: str
) -> Pipeline:
    """Returns a pipeline on the CPU; one with random weights on the device, where they are drawn."""
    import torch

    folder = folder_of(model)
    cls = pipeline_class(class_name_of(folder), task)
    arguments = left_out(cls) | load_kwargs
    if model.weights == "random":
        return build_pipeline(
            folder, cls, device, arguments.pop("dtype", torch.float32), **arguments
        )
    if is_original(model):
        tokenizers = {
            path.name: load_tokenizer(path, model.tokenizer)
            for path in folder.glob("tokenizer*")
        }
        file = str(path_of(model))
        pipe = cls.from_single_file(
            file, config=str(folder), local_files_only=True, **tokenizers | arguments
        )
        leave_out_layers(pipe.text_encoder, clip_skip_of(model)[0])
        return pipe
    more: dict[str, Any] = {}
    arguments = absent_in(folder) | arguments
    if is_transformer(model):
        dtype = arguments.get("dtype", torch.float32)
        arguments = load_parts(model, folder, dtype, {*arguments}) | arguments
    if class_name_of(folder) == ALT_DIFFUSION:
        # diffusers neither finds the class of its text encoder, nor accepts one in place of what it cannot find.
        more["text_encoder"] = load_part(
            model, "text_encoder", arguments.get("dtype", torch.float32)
        )
        arguments["text_encoder"] = None
    pipe = cls.from_pretrained(
        folder,
        variant=model.variant,
        use_safetensors=True,
        local_files_only=True,
        **arguments,
    )
    pipe.register_modules(**more)
    return pipe


def absent_in(folder: Path) -> dict[str, None]:
    """Returns as arguments the parts that the pipeline in a folder runs without, such as T5 of SD 3.

    diffusers saves such a pipeline, and loads it only where it is told again that they are None.
    """
    there = parts_in(folder)
    return {
        name: None
        for name in family_named(class_name_of(folder)).optional
        if name not in there
    }


def left_out(cls: Any) -> dict[str, Any]:
    """Returns the arguments with which a pipeline's class loads none of the parts that are not run."""
    accepted = inspect.signature(cls.__init__).parameters
    parts: dict[str, Any] = {name: None for name in NOT_RUN if name in accepted}
    return parts | {name: False for name in _SWITCHES if name in accepted}


_SWITCHES = ("add_watermarker", "requires_safety_checker")
"""Arguments of a pipeline's class that switch off what would be timed too."""


def _as_built(model: Model, task: Task, load_kwargs: dict[str, Any]) -> Pipeline:
    """Returns the pipeline that a function builds, in the type of the chosen precision."""
    pipe = build(model, task)
    require_same(model, pipe)
    parts = {name: part for name, part in load_kwargs.items() if name != "dtype"}
    if others := sorted(parts.keys() - pipe.components.keys()):
        raise UsageError(
            f"{model.origin}: an option gives {', '.join(others)} to what loads a model: do so in the function"
        )
    if "dtype" in load_kwargs:
        cast(pipe, load_kwargs["dtype"])
    pipe.register_modules(**parts)
    return pipe


def folder_of(model: Model) -> Path:
    """Returns the pipeline's folder; for random weights or a single file, the folder of the architecture."""
    if model.weights == "hub":
        return hub_folder(model, fetch=False)
    if model.weights == "factory":
        raise UsageError(
            f"{model.origin}: a function builds it, and it has no files to read; save it with save_pretrained and give "
            "model=FOLDER"
        )
    if model.weights == "path" and path_of(model).is_dir():
        return path_of(model)
    if is_transformer(model):
        return base_folder(model)
    if (folder := architecture_folder(model)) is None:
        raise UsageError(
            f"{model.origin}: sdopt has no architecture named {model.name}"
        )
    return folder
