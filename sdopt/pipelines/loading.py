"""From a `Model` to a pipeline on its device."""

import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError
from sdopt.schema import Model, Scheduler

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PACKAGED = Path(__file__).parents[1] / "reference"


def model_folder(model: Model) -> Path:
    """Where the model's files are. Raises UsageError where they are not, or are not safetensors."""
    if model.weights == "packaged":
        folder = PACKAGED / model.name
        if not (folder / "model_index.json").is_file():
            names = sorted(path.parent.name for path in PACKAGED.glob("*/model_index.json"))
            raise UsageError(f"model.name={model.name}: packaged models are {', '.join(names) or 'missing'}")
        return folder
    if model.path is None:
        raise UsageError("model.path: model.weights=path needs the folder of a diffusers pipeline")
    folder = Path(model.path).expanduser()
    if not (folder / "model_index.json").is_file():
        raise UsageError(
            f"model.path={folder}: there is no model_index.json; save a pipeline there with save_pretrained"
        )
    kind = _pipeline_class(folder)
    if kind not in ("StableDiffusionPipeline", None):
        raise UsageError(f"model.path={folder}: a {kind}; this version runs StableDiffusionPipeline (SD 1.x and 2.x)")
    weights = [path.name for path in folder.glob("unet/*.safetensors")]
    if not weights:
        raise UsageError(f"model.path={folder}: unet/ holds no .safetensors file; sdopt loads no pickled weights")
    if not any(re.fullmatch(r"diffusion_pytorch_model(-\d+-of-\d+)?\.safetensors", name) for name in weights):
        raise UsageError(f"model.path={folder}: unet/ holds only a variant ({weights[0]}); save it without variant=")
    return folder


def _pipeline_class(folder: Path) -> str | None:
    try:
        index = json.loads((folder / "model_index.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path={folder}: model_index.json cannot be read ({error})") from error
    return index.get("_class_name") if isinstance(index, dict) else None


def fewest_heads(model: Model) -> int | None:
    """Attention heads of the UNet's layer with the fewest, where its configuration can be read without loading it."""
    path = model_folder(model) / "unet" / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    # What UNets call the dimension of a head is, for historical reasons, the number of heads.
    heads = config.get("num_attention_heads") or config.get("attention_head_dim", 8)
    return min(heads) if isinstance(heads, list) else int(heads)


def scheduler_class(scheduler: Scheduler) -> Any:
    """Raises UsageError where diffusers has no scheduler of that name."""
    import diffusers

    found = getattr(diffusers, scheduler.class_name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
        raise UsageError(f"scheduler.class_name={scheduler.class_name}: no scheduler of diffusers is so called")
    return found


def require_options(scheduler: Scheduler) -> None:
    """Raises UsageError for options that the scheduler does not have: diffusers would ignore them."""
    known = inspect.signature(scheduler_class(scheduler).__init__).parameters
    unknown = [name for name in scheduler.options if name not in known]
    if unknown:
        has = ", ".join(name for name in known if name != "self")
        problems = [f"scheduler.options.{name}: {scheduler.class_name} has {has}" for name in unknown]
        raise UsageError(problems)


def load_pipeline(model: Model, scheduler: Scheduler, device: str, load_kwargs: dict[str, Any]) -> "DiffusionPipeline":
    """Loads a pipeline without touching a hub, and moves it to `device`.

    The safety checker that Stable Diffusion 1.x comes with is left out: it is another model, and would be timed too.
    """
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(
        model_folder(model),
        use_safetensors=True,
        local_files_only=True,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **load_kwargs,
    )
    pipe.scheduler = scheduler_class(scheduler).from_config(pipe.scheduler.config, **scheduler.options)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)
