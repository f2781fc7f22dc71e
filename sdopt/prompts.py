"""Where prompts come from."""

import json
from collections.abc import Sequence
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.pipelines.loading import PACKAGED
from sdopt.schema import Model, Workload

_GENERAL = Path(__file__).parent / "general_prompts.txt"


def resolve_prompts(workload: Workload, model: Model) -> tuple[str, ...]:
    """The prompts of a workload, as many as `prompt_count` allows; by default those that suit the model.

    Raises:
        UsageError: there is no such file, or it holds no prompt.
    """
    source = workload.prompts
    if isinstance(source, Sequence) and not isinstance(source, str):
        prompts = [str(prompt) for prompt in source]
    elif source == "packaged" and not (PACKAGED / model.name).is_dir():
        prompts = _GENERAL.read_text(encoding="utf-8").splitlines()
    elif source == "packaged":
        prompts = json.loads((PACKAGED / "prompts.json").read_text())["contact_sheet"]
    else:
        try:
            lines = Path(str(source)).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"workload.prompts={source}: cannot be read as text ({error}); "
                "give 'packaged', a list of prompts, or a file with one prompt a line"
            ) from error
        prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"workload.prompts={source}: there is no prompt in it")
    return tuple(prompts[: workload.prompt_count])
