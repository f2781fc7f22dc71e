"""The scheduler's steps as a table, and the module that computes a whole step with it, for `compiler=whole_step`.

Imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from inspect import signature
from math import cos, sin
from typing import Any

import torch

from sdopt.errors import UsageError
from sdopt.options.compiler.graphs import StandIn
from sdopt.pipelines.parts import Pipeline, is_called


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


class WholeStepModule(StandIn):
    """Replaces the denoiser: computes the latents after the step, and passes them through the pipeline's code."""

    def __init__(
        self, pipe: Pipeline, denoiser: torch.nn.Module, steps: Steps, mode: str
    ) -> None:
        super().__init__(denoiser)
        self._pipe = pipe
        self._steps = steps
        self._step = torch.compile(_step, mode=mode, fullgraph=True)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: Any,
        encoder_hidden_states: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns the latents after the step as a prediction; outside of the pipeline's call, the denoiser's own."""
        pipe = self._pipe
        if not is_called(pipe):
            return self._orig_mod(sample, timestep, encoder_hidden_states, **kwargs)
        if not self._steps.taken(pipe.scheduler):
            raise UsageError(
                "compiler=whole_step: the graph has the steps of the scheduler that the pipeline had, and the program "
                "has exchanged it since: call sdopt.undo(pipe), exchange it, and apply the options again"
            )
        channels = pipe.vae.config.latent_channels
        guidance = pipe.guidance_scale if pipe.do_classifier_free_guidance else None
        kwargs["return_dict"] = False
        call = (sample, timestep, encoder_hidden_states, kwargs)
        return (
            _Prediction(
                self._step(self._orig_mod, *call, self._steps.table, channels, guidance)
            ),
        )


def _step(
    denoiser: Any,
    sample: torch.Tensor,
    timestep: torch.Tensor,
    states: torch.Tensor,
    kwargs: dict[str, Any],
    table: torch.Tensor,
    channels: int,
    guidance: float | None,
) -> torch.Tensor:
    """Returns the latents after a step.

    `sample` holds the latents, repeated if there is guidance, and the further channels of an inpainting model.
    """
    scale, keep, add = (
        torch.where(table[0] == timestep, table[1:], 0).sum(dim=1).unbind()
    )
    latents = sample[:, :channels].float()
    scaled = (latents * scale).to(sample.dtype)
    whole = torch.cat([scaled, sample[:, channels:]], dim=1)
    prediction = denoiser(whole, timestep, encoder_hidden_states=states, **kwargs)[0]
    if guidance is not None:
        without, guided = prediction.chunk(2)
        prediction = without + guidance * (guided - without)
        latents = latents.chunk(2)[0]
    following: torch.Tensor = keep * latents + add * prediction.float()
    return following.to(sample.dtype)


class _Prediction:
    """Carries the new latents as the prediction through the pipeline's code, where guidance has no further effect."""

    def __init__(self, latents: torch.Tensor) -> None:
        self.latents = latents

    def chunk(self, count: int) -> tuple[_Prediction, ...]:
        return (self,) * count

    def _same(self, _other: Any) -> _Prediction:
        return self

    __add__ = __sub__ = __rmul__ = _same
