"""Models that a function of a user's file builds: `model.factory=my_file.py:make`.

Like a model on the hub, such a model is unknown until it is there: before anything is measured, a process of its own
builds it once and describes it. Each worker builds it again, and checks that it is the same one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.errors import UsageError, with_type
from sdopt.pipelines.catalog import PIPELINES, text_to_image
from sdopt.pipelines.families import (
    further_inputs,
    latent_channels_of,
    settings_of,
    side_of,
)
from sdopt.pipelines.family import family_named
from sdopt.pipelines.functions import loaded
from sdopt.pipelines.loras import lora_layers
from sdopt.pipelines.parts import (
    Pipeline,
    casting_hook,
    denoiser_of,
    digest_of,
    moves_weights,
    networks_of,
    quantized_layer,
)
from sdopt.pipelines.tasks import task_of
from sdopt.schema import Model, Task

if TYPE_CHECKING:
    import torch

KEY = "model.factory"


@dataclass(frozen=True)
class Built:
    """What a function has built.

    Attributes:
        class_name: of the text-to-image pipeline with the same parts.
        configs: the configurations of its networks and its scheduler that diffusers defines, by part.
        digest: of all its weights.
        left_out: what options would leave out of what the function has changed, in a line each.
        begins: the first numbers of each of its weights.
    """

    class_name: str
    configs: dict[str, dict[str, Any]]
    digest: str
    left_out: tuple[str, ...] = ()
    begins: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int | None:
        """The height of the images that its denoiser was made for, in pixels; None if it does not say."""
        denoiser = self.configs.get(family_named(self.class_name).denoiser, {})
        index = {"_class_name": self.class_name}
        return (
            int(settings_of(index, denoiser, self.configs.get("vae", {}))["size"])
            if side_of(denoiser)
            else None
        )


_BUILT: dict[Model, Built] = {}


def build(model: Model, task: Task) -> Pipeline:
    """Returns the pipeline that a model's function builds.

    Raises:
        UsageError: the function is not there, it fails, or it returns no pipeline that sdopt runs for this task.
    """
    at = f"{KEY}={model.factory}"
    try:
        pipe = loaded(str(model.factory), KEY)()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{at}: {with_type(error)}") from error
    kind = known_class(pipe)
    if kind is None:
        raise UsageError(
            f"{at}: returns a {type(pipe).__name__}; sdopt runs {', '.join(PIPELINES)} of diffusers"
        )
    if (other := task_of(kind)).kind != task.kind:
        raise UsageError(
            f"{at}: returns a {kind}; choose task={other.kind}, or return one for task={task.kind}"
        )
    if problem := _unfinished(pipe):
        raise UsageError(f"{at}: returns a pipeline {problem}")
    return pipe


def _unfinished(pipe: Pipeline) -> str | None:
    """Returns what keeps a pipeline from being moved, cast and called as others are; None if nothing does."""
    family = family_named(text_to_image(known_class(pipe)))
    needed = (family.denoiser, "vae", family.encoders[0], family.tokenizers[0])
    if lacking := [name for name in needed if getattr(pipe, name, None) is None]:
        return f"without {' and '.join(lacking)}: sdopt calls it with prompts, and takes images from it"
    denoiser = denoiser_of(pipe)
    channels = denoiser.config.in_channels // (
        1 if family.latents.layout == "spatial" else 4
    )
    if further := further_inputs(
        channels, latent_channels_of(pipe.vae.config) or channels
    ):
        return f"that cannot be called with prompts alone: {further}"
    projecting = ("encoder_hid_proj", "image_proj")  # the latter of SD 3
    if any(getattr(denoiser, name, None) is not None for name in projecting):
        return "with an IP-Adapter, whose pictures sdopt does not give: return it without, or call sdopt.optimize on it"
    problems = [_unfit(name, part) for name, part in networks_of(pipe).items()]
    return next(filter(None, problems), None)


def _unfit(name: str, network: "torch.nn.Module") -> str | None:
    """Returns what keeps a network of a pipeline from being moved and cast; None if nothing does."""
    if moves_weights(network):
        return f"whose {name} is moved while it runs (offloading): return it without, and choose memory=…"
    if lora_layers(network):
        return (
            f"with a LoRA beside the weights of its {name}: fuse it there (pipe.fuse_lora(), "
            "pipe.unload_lora_weights()), or return it without, and choose lora=…"
        )
    cast = next(
        (layer for layer, inner in network.named_modules() if casting_hook(inner)),
        None,
    )
    if layer := cast or quantized_layer(network):
        return f"whose {name} is quantized (such as {layer}): return it without that, and choose precision or memory=…"
    return None


def describe(
    model: Model,
    task: Task,
    left_out: Callable[[Pipeline], list[str]] = lambda _: [],
) -> Built:
    """Builds a model and describes it; call it in a process of its own. Raises UsageError as `build` does."""
    from diffusers.utils.logging import disable_progress_bar
    from transformers.utils.logging import (
        disable_progress_bar as disable_bar_of_weights,
    )

    disable_progress_bar()
    disable_bar_of_weights()
    pipe = build(model, task)
    weights = _weights_of(pipe)
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UsageError(
                f"{model.origin}: holds numbers in {name} that are not finite (NaN or infinite)"
            )
    return Built(
        text_to_image(known_class(pipe)),
        configs_of(pipe),
        digest_of(weights)[:16],
        tuple(left_out(pipe)),
        _begins_of(weights),
    )


def require_same(model: Model, pipe: Pipeline) -> None:
    """Checks that a function has built the model that it built before, if it did so for this process.

    Raises:
        UsageError: its weights are other ones.
    """
    described = built(model)
    if described is None:
        return
    begins = _begins_of(_weights_of(pipe))
    for name, before in described.begins.items():
        if name not in begins or not np.allclose(
            begins[name], before, rtol=0, atol=_ROUNDING * np.abs(before).max(initial=0)
        ):
            raise UsageError(
                f"{model.origin}: builds other weights each time ({name}), so that variants would be other models: let "
                "the function seed what it draws (torch, numpy, random), or save the pipeline once"
            )


_BEGIN, _ROUNDING = 16, 0.02
"""Numbers of a weight that tell it from another one, and by which share of their largest a type or a thread may round."""


def _begins_of(weights: Mapping[str, "torch.Tensor"]) -> dict[str, np.ndarray]:
    begins = {}
    for name, weight in weights.items():
        begins[name] = weight.detach().flatten()[:_BEGIN].float().cpu().numpy()
    return begins


def _weights_of(pipe: Pipeline) -> dict[str, "torch.Tensor"]:
    """Returns the weights of all networks, by the names of the networks and their own."""
    weights = {}
    for name, part in networks_of(pipe).items():
        for key, weight in part.state_dict().items():
            weights[f"{name}.{key}"] = weight
    return weights


def remember(model: Model, built: Built) -> None:
    """Keeps the description of a model for this process."""
    _BUILT[model] = built


def built(model: Model) -> Built | None:
    """Returns the description of a model; None if nothing has built it yet."""
    return _BUILT.get(model)


def configs_of(pipe: Pipeline) -> dict[str, dict[str, Any]]:
    """Returns the configurations of a pipeline's networks and its scheduler, of those that diffusers defines.

    The pipeline's own is that of the part "".
    """
    parts: dict[str, Any] = {**networks_of(pipe), "scheduler": pipe.scheduler, "": pipe}
    return {
        key: json.loads(part.to_json_string())
        for key, part in parts.items()
        if hasattr(part, "to_json_string")
    }


def known_class(pipe: Any) -> str | None:
    """Returns the class of diffusers that a pipeline is of; None if it is none that sdopt runs."""
    names = (base.__name__ for base in type(pipe).__mro__)
    return next((name for name in names if text_to_image(name) in PIPELINES), None)
