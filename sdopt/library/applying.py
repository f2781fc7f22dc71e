"""Applies options to a program's own pipeline, proves from a call that they took effect, and takes them back."""

import gc
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sdopt.assembly import Assembly
from sdopt.errors import UsageError, require_texts
from sdopt.library.planning import plan_for
from sdopt.library.process import ProcessChanges
from sdopt.library.state import (
    APPLIED,
    OPTIMIZED,
    Optimized,
    as_prompts,
    keep,
    named_as_chosen,
    require_one_attention,
    require_plain,
    state_of,
    whole_process,
)
from sdopt.measure.generators import kept_generators
from sdopt.measure.trace import trace_call
from sdopt.options.base import Optimization, loading_arguments
from sdopt.pipelines.parts import cast, device_of, place
from sdopt.pipelines.snapshot import Snapshot
from sdopt.record.choices import as_choice
from sdopt.record.samples import Evidence

if TYPE_CHECKING:
    import pandas as pd
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class Report:
    """The evidence for each option that was applied to a pipeline, from the trace of a call."""

    evidence: tuple[Evidence, ...]
    process: tuple[str, ...] = ()
    """A line for each setting of the whole process that the options left changed; `undo` puts them back."""
    broken: str = ""
    """What is wrong with the images of the traced call, whichever option it comes from; "" if nothing is seen."""
    scheduler: str = ""
    """The class of the scheduler that sampled them."""

    @property
    def engaged(self) -> bool:
        """Whether every option took effect."""
        return all(evidence.engaged for evidence in self.evidence)

    def table(self) -> "pd.DataFrame":
        """Returns a row per option: its axis, its name, whether it took effect, and what shows it."""
        import pandas as pd

        columns = ["axis", "option", "engaged", "summary"]
        return pd.DataFrame(
            [asdict(evidence) for evidence in self.evidence],
            columns=[*columns, "facts"],
        )[columns]

    def __str__(self) -> str:
        """Returns a line for broken images, for each option, and for each setting of the process that they changed."""
        lines = [f"IMAGES BROKEN: {self.broken}"] if self.broken else []
        if not self.evidence:
            lines.append(f"scheduler: {self.scheduler}; no other option was applied")
        for evidence in self.evidence:
            effect = "" if evidence.engaged else "NO EFFECT: "
            choice = as_choice(evidence.axis, evidence.option)
            lines.append(f"{choice}: {effect}{evidence.summary}")
        lines += [f"changed in the whole process: {line}" for line in self.process]
        return "\n".join(lines)


@kept_generators()
def optimize(
    pipe: "DiffusionPipeline",
    *overrides: str,
    prompts: Iterable[str] | None = (),
    config_dir: str | Path | None = None,
    **groups: str | Sequence[str],
) -> "DiffusionPipeline":
    """Applies options to a pipeline in place, as a study applies them; its calls then run with what the options add.

    >>> pipe = sdopt.optimize(pipe, precision="bf16", attention="flash", memory=["vae_slicing"])

    Args:
        pipe: a Stable Diffusion pipeline of diffusers, on its device.
        overrides: keys of the options as on the command line, for example `"compiler.mode=max-autotune"`.
        prompts: all prompts of the calls to come, for `memory=precomputed_embeddings`, and their negative prompts.
        config_dir: a folder with groups of your own, as `--config-dir` names it.
        groups: the option of each group, or the options of a group that combine, as in `conf/README.md`; and
            the scheduler.

    Returns:
        The same pipeline. `prove` says whether the options took effect, and `undo` takes them back. For `undo`, the
        parts that options replace or remove stay in memory; a pipeline from `load` keeps none. Calls of several threads
        wait for each other where an option of any pipeline sets what the whole process uses, as `attention=flash` does.

    Raises:
        UsageError: there is no such option or key, it cannot apply to a pipeline, a file of it is missing and cannot be
            downloaded, or options were applied to this pipeline before; nothing was changed.
        ConflictError: an option cannot run on this device, with this model or beside the others; nothing was changed.
        UnavailableError: an option cannot be applied here, for example because a compiler's cache cannot be written;
            the pipeline is as it was before. Where weights were changed already, a note on the error says so.
    """
    require_plain(pipe)
    require_texts("optimize", overrides)
    prompts = as_prompts(prompts)
    if not groups:
        raise UsageError('name an option, as in sdopt.optimize(pipe, precision="bf16")')
    assembly, ctx, parts = plan_for(
        pipe,
        groups,
        overrides,
        prompts,
        None if config_dir is None else Path(config_dir),
    )
    require_one_attention(pipe, assembly)
    before, process = Snapshot.of(pipe), ProcessChanges()
    try:
        with whole_process(), process.noted():
            _apply(assembly, parts, prompts)
    except Exception as error:
        process.put_back()
        begun = dict(islice(assembly.options.items(), len(assembly.proofs) + 1))
        if _lost(begun, assembly.choices, before):
            error.add_note(
                "The pipeline has been changed and cannot be restored: load it again."
            )
        else:
            before.restore(pipe)
        raise
    keep(pipe, Optimized(assembly, ctx, before, prompts, process=process))
    return pipe


def _apply(
    assembly: Assembly, parts: Mapping[str, Any], prompts: Sequence[str]
) -> None:
    """Applies options to a pipeline: first what they ask for at loading, then they themselves."""
    pipe = assembly.pipe
    # Options ask where the pipeline computes, and the device of offloaded weights does not show that.
    place(pipe, str(pipe.device), on_host=False)
    if dtype := loading_arguments(assembly.options.values()).get("dtype"):
        cast(pipe, dtype)
    for name, part in parts.items():
        setattr(
            pipe,
            name,
            part.to(device_of(pipe)) if isinstance(part, torch.nn.Module) else part,
        )
    assembly.apply()
    if prompts:
        assembly.prepare_inputs(prompts)


@kept_generators()
def prove(
    pipe: "DiffusionPipeline", prompt: str | Sequence[str] | None = None, **call: Any
) -> Report:
    """Traces a short call of an optimized pipeline; says of each option whether it took effect, and of broken images.

    Args:
        pipe: a pipeline from `optimize` or `load`.
        prompt: of the traced call, one or several; None is a prompt that works with every option, twice where an option
            needs a batch, or none beside `prompt_embeds`.
        call: further arguments of the call; the default of `num_inference_steps` is the smallest number of steps that
            can show every option.

    Raises:
        UsageError: no options were applied to this pipeline.
    """
    optimized = state_of(pipe)
    parameter = inspect.signature(type(pipe).__call__).parameters.get("strength")
    strength = call.get(
        "strength",
        optimized.usual.get("strength", parameter.default) if parameter else 1.0,
    )
    steps = optimized.assembly.traced_steps(strength)
    prompts = prompt if isinstance(prompt, str) else [*as_prompts(prompt)] or None
    if prompts is None and call.get("prompt_embeds") is None:
        per_prompt = call.get(
            "num_images_per_prompt", optimized.usual.get("num_images_per_prompt", 1)
        )
        prompts = optimized.prompts_that_show(per_prompt)
    arguments = {"prompt": prompts, "num_inference_steps": steps, **call}
    if isinstance(prompts, list) and isinstance(
        negative := call.get("negative_prompt"), str
    ):
        arguments["negative_prompt"] = [negative] * len(
            prompts
        )  # diffusers wants as many
    if any(option.compiles for option in optimized.assembly.options.values()):
        # An option compiles in the first call, a part of which still runs uncompiled. Inductor records CUDA graphs only
        # when a module runs for the second time (`CUDAGraphTreeManager._run`).
        for _ in range(2):
            pipe(**arguments)

    outputs: list[Any] = []

    def traced() -> Any:
        # Options compare images of several calls, which must start from the same noise.
        noise = (
            {}
            if {"generator", "latents"} & call.keys()
            else {"generator": torch.Generator().manual_seed(0)}
        )
        outputs.append(pipe(**arguments | noise))
        return outputs[-1]

    trace = trace_call(pipe, traced, device_of(pipe).type == "cuda")
    findings = optimized.assembly.findings(trace)
    return Report(
        tuple(
            Evidence(
                axis,
                optimized.assembly.choices[axis],
                finding.engaged,
                finding.summary,
                finding.facts,
            )
            for axis, finding in findings.items()
        ),
        tuple(optimized.process.lines()),
        _broken(outputs[-1]),
        type(pipe.scheduler).__name__,
    )


def _broken(output: Any) -> str:
    """Returns what is wrong with the images of a call: NaN, which becomes black where pictures are made of it."""
    # Of a pipeline of videos these are frames; the call of a program's own class may return images, or one, alone.
    images = output[0] if isinstance(output, tuple | Mapping) else output
    images = (
        images if isinstance(images, list | np.ndarray | torch.Tensor) else [images]
    )
    black = False
    for image in images:
        if not isinstance(image, torch.Tensor):
            image = torch.as_tensor(np.array(image))  # noqa: PLW2901
        if not image.isfinite().all():
            return "they hold numbers that are not finite (NaN or infinite)"
        black = black or not image.any()
    return "they are black" if black else ""


@kept_generators()
def undo(pipe: "DiffusionPipeline") -> "DiffusionPipeline":
    """Takes back, in place, the options that were applied to a pipeline, and what else was changed in it since.

    Settings of the whole process that the options left changed are put back too (see `Report.process`).

    Returns:
        The same pipeline, as it was before.

    Raises:
        UsageError: no options were applied to it; it is a copy of a pipeline that has some; they came with `load`;
            options were applied since to another pipeline that shares its parts; or they changed what cannot be
            restored, as weights that were rounded, fused or offloaded: then nothing is taken back, and the pipeline has
            to be loaded anew.
    """
    optimized = state_of(pipe)
    if optimized.before is None:
        raise UsageError(
            "cannot be undone: sdopt.load applied the options at loading; load the baseline instead"
        )
    if optimized.shared_later():
        gc.collect()  # the other pipeline may be waiting to be freed
        if optimized.shared_later():
            raise UsageError(
                "cannot be undone: another pipeline of the same parts has options applied since: undo it"
            )
    applied = optimized.assembly
    if lost := _lost(applied.options, applied.choices, optimized.before):
        raise UsageError(
            [
                f"cannot be undone: {problem}; load the pipeline again"
                for problem in lost
            ]
        )
    optimized.before.restore(pipe)
    APPLIED.discard(optimized)
    optimized.process.put_back([other.process for other in tuple(APPLIED)])
    delattr(pipe, OPTIMIZED)
    return pipe


def _lost(
    options: Mapping[str, Optimization], choices: Mapping[str, str], before: Snapshot
) -> list[str]:
    """Returns why a pipeline cannot be put back into the state before its options were applied."""
    moving = [
        name
        for name, option in named_as_chosen(options, choices).items()
        if option.loads_on_host
    ]
    return [
        f"{name} has moved the weights of the pipeline" for name in moving
    ] or before.lost()
