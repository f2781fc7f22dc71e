"""Initial noise from a file, for protocols that fix it: MLPerf Inference has one latent for all images."""

import json
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import architecture_folder
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.schema import Model, Task, Workload

if TYPE_CHECKING:
    from torch import Tensor


def read_latents(file: str) -> "Tensor":
    """Reads the only tensor in a .pt or .safetensors file: float32 (n, channels, height, width), n ≥ 1, on the CPU.

    Raises:
        UsageError: the file cannot be read, or does not hold exactly one such tensor.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(file).expanduser()
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        elif path.suffix == ".pt":
            content = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise UsageError(f"workload.latents={file}: give a .safetensors or a .pt file")
    except (OSError, RuntimeError, ValueError, LookupError, SafetensorError, EOFError, UnpicklingError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(f"workload.latents={file}: cannot be read as tensors ({reason})") from error
    tensors = list(content.values()) if isinstance(content, dict) else [content]
    if len(tensors) != 1 or not isinstance(tensors[0], torch.Tensor):
        raise UsageError(f"workload.latents={file}: must hold one tensor, and holds {len(tensors)} values")
    latents = tensors[0]
    if latents.ndim != 4 or not len(latents) or not latents.is_floating_point():
        raise UsageError(
            f"workload.latents={file}: must be floats (n, channels, height / 8, width / 8), "
            f"not {latents.dtype} {tuple(latents.shape)}"
        )
    if not latents.isfinite().all():
        raise UsageError(f"workload.latents={file}: some values are NaN or infinite")
    return latents.float()


def require_latents(workload: Workload, task: Task, model: Model) -> None:
    """Checks a workload's latents as far as possible without loading the model.

    Raises:
        UsageError: as in `read_latents` and `take`; or another key is set that latents make ineffective.
    """
    if workload.latents is None:
        return
    if task.kind != "txt2img":
        raise UsageError(
            f"workload.latents={workload.latents}: task={task.kind} starts from its image, not from latents"
        )
    if workload.seed:
        raise UsageError(f"workload.seed={workload.seed}: has no effect on noise that workload.latents gives")
    latents = read_latents(workload.latents)
    images = range(len(resolve_prompts(workload, model)) * workload.images_per_prompt)
    for side in dict.fromkeys(shape.size // 8 for shape in workload.shapes(model)):
        take(latents, images, (_channels(model) or latents.shape[1], side, side), workload.latents)


def _channels(model: Model) -> int | None:
    """Returns the number of latent channels, or None if the config is not local."""
    folder = Path(model.path or "") if model.weights == "path" else architecture_folder(model)
    config = folder / "vae" / "config.json" if folder else None
    if config is None or not config.is_file():
        return None
    try:
        return int(json.loads(config.read_text(encoding="utf-8"))["latent_channels"])
    except (OSError, ValueError, TypeError, LookupError):
        return None  # other checks report errors of the model itself


def take(latents: "Tensor", images: Sequence[int], shape: tuple[int, ...], file: str) -> "list[Tensor]":
    """Returns the latents (1, channels, height, width) of the numbered images; a single latent serves all.

    Raises:
        UsageError: their shape does not fit the model, or there are too few.
    """
    if tuple(latents.shape[1:]) != tuple(shape):
        has, needs = ("×".join(map(str, part)) for part in (latents.shape[1:], shape))
        raise UsageError(f"workload.latents={file}: holds latents of {has}; this model and size need {needs}")
    if len(latents) == 1:
        return [latents] * len(images)
    if max(images) >= len(latents):
        raise UsageError(
            f"workload.latents={file}: holds {len(latents)} latents; give one for all images, or one for each "
            f"of at least {max(images) + 1}"
        )
    return [latents[image : image + 1] for image in images]
