"""The module that computes a whole denoising step, for `compiler=whole_step`. Imports PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sdopt.errors import UsageError
from sdopt.options.compiler.graphs import StandIn
from sdopt.pipelines.parts import Pipeline, is_called

if TYPE_CHECKING:
    from sdopt.options.compiler.whole_step import Steps


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
