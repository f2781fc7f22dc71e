"""Compiles one denoising step to one graph: denoiser, guidance and scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from sdopt.measure import compilation
from sdopt.options import Context, Finding, Proof, Trace
from sdopt.options.assumptions import usual_guidance
from sdopt.options.base import Inputs
from sdopt.options.compiler.base import Compiler, replace_modules, unfit_for_inductor
from sdopt.options.conflicts import records_autograd
from sdopt.pipelines.loading import part_config
from sdopt.pipelines.parts import Pipeline, denoiser_of, is_called

_SCHEDULERS = ("DDIMScheduler", "EulerDiscreteScheduler")
"""Schedulers whose step is linear in the current latents and prediction, and depends on nothing else: see `Steps`."""

_NONLINEAR = ("clip_sample", "thresholding")
"""Scheduler options that make a step nonlinear."""


@dataclass(frozen=True)
class WholeStep(Compiler):
    """Compiles a whole denoising step with Inductor: scaling, denoiser, guidance and scheduler in one graph.

    The scheduler's step becomes a weighted sum of latents and prediction, with weights that are determined from the
    scheduler before the first step. This is exact for DDIM and Euler's method without noise or clipping.
    """

    unet_only = (
        "its graph has the guidance and the step of a UNet's pipeline: choose inductor"
    )

    assumes = (usual_guidance,)

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of `torch.compile`."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = unfit_for_inductor(ctx) + records_autograd(ctx, "a whole step")
        chosen = ctx.scheduler.class_name
        if chosen not in _SCHEDULERS:
            reasons.append(
                f"{chosen} uses earlier predictions or adds noise, so a step is not a sum of latents and prediction: "
                "choose scheduler=ddim or euler"
            )
        for name in _NONLINEAR:
            # Other schedulers only keep such keys of the configuration that they were made from.
            if chosen == "DDIMScheduler" and _is_set(ctx, name):
                reasons.append(
                    f"{chosen} has {name}=true, which makes the step nonlinear: choose scheduler=ddim with "
                    f"+scheduler.options.{name}=false, or compiler=inductor"
                )
        return reasons

    @override
    def refusals(self, call: Inputs) -> list[str]:
        asked = [name for name in ("eta", "guidance_rescale") if call.get(name)]
        lacks = "the compiled step has neither noise nor rescaling; leave it out"
        return [f"{name}={call[name]}: {lacks}" for name in asked]

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.compiler.stepping import Steps, WholeStepModule

        compilation.reset()
        steps = Steps(pipe.scheduler, lambda: is_called(pipe))
        replaced = replace_modules(
            pipe,
            ["denoiser"],
            lambda unet: WholeStepModule(pipe, unet, steps, self.mode),
        )
        [whole] = replaced["denoiser"]

        def proof(trace: Trace) -> Finding:
            from torch._dynamo.utils import counters

            regions, calls = trace.denoiser.compiled_regions, trace.denoiser.calls
            breaks = sum(counters["graph_break"].values())
            count = steps.taken(pipe.scheduler)
            facts = {
                "compiled_regions_run": regions,
                "steps": calls,
                "graph_breaks": breaks,
                "steps_in_graph": count,
            }
            summary = f"{regions} graphs run in {calls} steps, {breaks} breaks"
            summary += (
                f"; the scheduler's step is {'in' if count else 'not in'} the graph"
            )
            inside = denoiser_of(pipe) is whole and regions == calls > 0 and not breaks
            return Finding(inside and count, summary, facts)

        return proof


def _is_set(ctx: Context, name: str) -> bool:
    """Returns whether a DDIM scheduler will have an option of `_NONLINEAR`; False where that is not known."""
    config = part_config(ctx.model, "scheduler") or {}
    return bool(ctx.scheduler.options.get(name, config.get(name)))
