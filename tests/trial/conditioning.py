"""Changes of the conditioning: other text, less of it, or none from some step on; for all prompts or for some."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from typing_extensions import override

from sdopt.optimizations import Proof, denoiser_of
from sdopt.reference import PROMPTS
from tests.trial.base import Sabotage

TITLE = "conditioning"


@dataclass(frozen=True)
class OtherGuidance(Sabotage):
    """Changes the guidance scale, and with it the weight of the prompt, without saying so."""

    guidance_scale: float = 1.5

    @override
    def call_kwargs(self) -> dict[str, Any]:
        return {"guidance_scale": self.guidance_scale}


@dataclass(frozen=True)
class OtherPrompts(Sabotage):
    """Replaces every `every`-th prompt by the next one of the packaged list."""

    every: int = 1

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        captions = json.loads(PROMPTS.read_text())["gate"]
        following = dict(list(zip(captions, captions[1:] + captions[:1], strict=True))[:: self.every])
        encode = pipe.encode_prompt

        def changed(prompt: Any, *arguments: Any, **options: Any) -> Any:
            prompts = [prompt] if isinstance(prompt, str) else prompt
            return encode([following.get(text, text) for text in prompts], *arguments, **options)

        pipe.encode_prompt = changed
        return super().apply(pipe)


@dataclass(frozen=True)
class CutPrompts(Sabotage):
    """Cuts every `every`-th prompt of the packaged list after `words` words."""

    words: int = 2
    every: int = 1

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        cut = set(json.loads(PROMPTS.read_text())["gate"][:: self.every])
        encode = pipe.encode_prompt

        def changed(prompt: Any, *arguments: Any, **options: Any) -> Any:
            prompts = [prompt] if isinstance(prompt, str) else prompt
            shorter = [" ".join(text.split()[: self.words]) if text in cut else text for text in prompts]
            return encode(shorter, *arguments, **options)

        pipe.encode_prompt = changed
        return super().apply(pipe)


@dataclass(frozen=True)
class LateText(Sabotage):
    """Conditions every `every`-th image on another text after the share `after` of the steps.

    `text` names the embedding that replaces the prompt's: `none` is the unconditional one, `next` that of the image
    after it in the batch.
    """

    after: float = 0.5
    every: int = 1
    text: str = "none"

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        denoiser, calls = denoiser_of(pipe), 0
        forward = denoiser.forward

        def changed(sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, *rest: Any, **options: Any) -> Any:
            nonlocal calls
            step, calls = calls % pipe.num_timesteps, calls + 1
            if step >= self.after * pipe.num_timesteps:
                without, of_text = encoder_hidden_states.chunk(2)
                other = of_text.clone()
                replaced = without if self.text == "none" else of_text.roll(-1, 0)
                other[:: self.every] = replaced[:: self.every]
                encoder_hidden_states = torch.cat([without, other])
            return forward(sample, timestep, encoder_hidden_states, *rest, **options)

        denoiser.forward = changed
        return super().apply(pipe)


SABOTAGES: dict[str, Sabotage] = {
    "guidance 1.5 instead of 4.5": OtherGuidance("lossy", caught_by="perceptual|clip_score|contrast"),
    "prompts shifted by one": OtherPrompts("lossy", caught_by="perceptual|clip_score|tripwires"),
    "every eighth prompt shifted": OtherPrompts("lossy", caught_by="perceptual", every=8),
    "prompts cut to two words": CutPrompts("lossy", caught_by="perceptual|clip_score"),
    "one prompt of 6 cut to one word": CutPrompts("lossy", caught_by="perceptual", words=1, every=6),
    "text dropped after half the steps": LateText("lossy", caught_by="perceptual|colour_error|contrast_error"),
    "text dropped late for one image of 6": LateText("lossy", caught_by="perceptual|colour_error", after=0.3, every=6),
    "text swapped late for one image of 6": LateText("lossy", caught_by="perceptual", after=0.3, every=6, text="next"),
    "text dropped in the last tenth": LateText("equivalent", caught_by="mse|latents_error", after=0.9),
}
