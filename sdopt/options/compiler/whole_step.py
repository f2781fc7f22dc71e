"""Compiles one denoising step to one graph: denoiser, guidance and scheduler."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from math import cos, sin
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from sdopt.measure import compilation
from sdopt.options import Context, Finding, Proof, Trace
from sdopt.options.assumptions import usual_guidance
from sdopt.options.base import Inputs
from sdopt.options.compiler.base import Compiler, replace_modules, unfit_for_inductor
from sdopt.options.conflicts import records_autograd
from sdopt.pipelines.loading import part_config
from sdopt.pipelines.parts import Pipeline, denoiser_of, is_called

if TYPE_CHECKING:
    import torch

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
        from sdopt.options.compiler.stepping import WholeStepModule

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


class Steps:
    """Replaces the steps of a scheduler by a table of coefficients.

    A step of DDIM or of Euler's method is `keep · latents + add · prediction`, where the denoiser's input is
    `scale · latents`. The three coefficients of each timestep are determined by calling a copy of the scheduler, so no
    scheduler's formula is repeated here. Raises ValueError if the scheduler's step has another form.

    Args:
        scheduler: the scheduler whose methods are replaced.
        active: returns whether its step is in the graph now; otherwise, as in a call of another pipeline that has the
            same scheduler, its own methods run.
    """

    def __init__(
        self, scheduler: Any, active: Callable[[], bool] = lambda: True
    ) -> None:
        import torch

        self._pristine = deepcopy(scheduler)
        self.table = torch.zeros(4, scheduler.config.num_train_timesteps)
        """float32 (4, training timesteps): timestep, scale, keep and add of each step; NaN if unused."""
        self._tables: dict[tuple[float, ...], torch.Tensor] = {}
        set_timesteps, scale, own_step = (
            scheduler.set_timesteps,
            scheduler.scale_model_input,
            scheduler.step,
        )
        takes_eta = "eta" in signature(own_step).parameters

        @wraps(set_timesteps)
        def set_and_read(*args: Any, **kwargs: Any) -> None:
            set_timesteps(*args, **kwargs)
            # Euler's last noise level, which a caller may give, has no timestep.
            levels = getattr(scheduler, "sigmas", scheduler.timesteps)
            key = (*scheduler.timesteps.tolist(), *levels.tolist())
            if key not in self._tables:
                self._tables[key] = self._read(*args, **kwargs).to(
                    scheduler.timesteps.device
                )
            self.table = self._tables[key]

        @wraps(own_step)
        def step(
            prediction: Any, timestep: Any, sample: Any, eta: float = 0.0, **others: Any
        ) -> Any:
            # A pipeline passes its caller's `eta` only to a step that takes one.
            if not active():
                return own_step(
                    prediction,
                    timestep,
                    sample,
                    **others | ({"eta": eta} if takes_eta else {}),
                )
            if eta and takes_eta:
                raise ValueError(
                    f"eta={eta}: compiler=whole_step adds no noise to a step; leave eta out"
                )
            if hasattr(scheduler, "_step_index"):
                # Inpainting reads the scheduler's step index to add noise to the unmasked area.
                if scheduler.step_index is None:
                    scheduler._init_step_index(timestep)
                scheduler._step_index += 1
            return (prediction.latents,)

        scheduler.set_timesteps = set_and_read
        scheduler.scale_model_input = lambda sample, timestep: (
            sample if active() else scale(sample, timestep)
        )
        scheduler.step = self._step = step

    def taken(self, scheduler: Any) -> bool:
        """Returns whether this object still replaces the steps of a scheduler."""
        return vars(scheduler).get("step") is self._step

    def _read(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the table for the timesteps that `set_timesteps` selects with these arguments."""
        import torch

        def asked(
            latents: Callable[[int], float], predictions: Callable[[int], float]
        ) -> torch.Tensor:
            """Returns timestep, scale and next latents of each step, shape (3, steps), for the given inputs by step."""
            scheduler = deepcopy(self._pristine)
            scheduler.set_timesteps(*args, **kwargs | {"device": "cpu"})
            timesteps = []
            for number, timestep in enumerate(scheduler.timesteps):
                sample, prediction = (
                    torch.full((1, 1, 1, 1), float(of(number)))
                    for of in (latents, predictions)
                )
                scale = scheduler.scale_model_input(torch.ones_like(sample), timestep)
                following = scheduler.step(
                    prediction, timestep, sample, return_dict=False
                )[0]
                timesteps.append([float(timestep), float(scale), float(following)])
            return torch.tensor(timesteps).T

        keep, add = asked(lambda _: 1, lambda _: 0), asked(lambda _: 0, lambda _: 1)
        # Inputs that vary by step reveal a scheduler that uses earlier inputs.
        changing = asked(
            lambda number: 3 * sin(number), lambda number: 2 * cos(7 * number)
        )
        numbers = torch.arange(keep.shape[1])
        expected = keep[2] * 3 * numbers.sin() + add[2] * 2 * (7 * numbers).cos()
        if not torch.allclose(changing[2], expected, rtol=1e-3, atol=1e-4):
            name = type(self._pristine).__name__
            raise ValueError(
                f"a step of this {name} is not a weighted sum of latents and prediction"
            )
        table = torch.full_like(self.table, torch.nan, device="cpu")
        table[:, : keep.shape[1]] = torch.stack([*keep, add[2]])
        return table
