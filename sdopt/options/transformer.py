"""What options need to know of transformers as denoisers: their calls by step and branch, and their blocks.

Nothing here knows a pipeline by its name. Import it where a pipeline is at hand: it needs diffusers.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from sdopt.options.skipping import Calls, OfOneCall, Own, Predictions
from sdopt.pipelines.family import Guidance, family_of_pipe
from sdopt.pipelines.parts import Pipeline, unwrapped

Block = tuple[str, nn.Module]
"""A block of a transformer, with its name."""


class Given(NamedTuple):
    """The arguments of a call of a denoiser, of a block or of a layer."""

    args: tuple[Any, ...]
    others: dict[str, Any]

    @property
    def hidden(self) -> Any:
        """What the call is about: latents, or the tokens of the image; the first argument, or `hidden_states`."""
        return self.args[0] if self.args else self.others["hidden_states"]

    @property
    def text(self) -> Any:
        """The tokens of the text: the second argument of a block, or `encoder_hidden_states`."""
        if "encoder_hidden_states" in self.others:
            return self.others["encoder_hidden_states"]
        return self.args[1] if len(self.args) > 1 else None


def blocks_of(denoiser: nn.Module) -> list[Block]:
    """Returns the blocks that a transformer runs one after the other, without those that refine its inputs first."""
    blocks = []
    for name, layers in denoiser.named_children():
        if isinstance(layers, nn.ModuleList) and (
            name.endswith("blocks") or name == "layers"
        ):
            blocks += [
                (f"{name}.{number}", block) for number, block in enumerate(layers)
            ]
    return blocks


def block_classes(denoiser: nn.Module) -> list[str]:
    """Returns the distinct class names of a transformer's blocks, in their order."""
    return list(dict.fromkeys(type(block).__name__ for _, block in blocks_of(denoiser)))


def guidance_of_call(pipe: Pipeline) -> Guidance:
    """Returns how a pipeline is guided when its denoiser runs both branches."""
    return family_of_pipe(pipe).guidance


class Watching(OfOneCall):
    """Replaces the forward of a transformer: the base class of what knows the step and the branch of each call.

    Attributes:
        calls: number of calls since `begin`, by what they ran: `whole` for all blocks, and another name for fewer.
    """

    parts: tuple[str, ...] = ()
    """Names of the attributes that a compiler may replace by graphs, which then run whole calls."""

    def __init_subclass__(cls) -> None:
        # As of `__call__`: TorchDynamo would compile it anew for each step and branch.
        cls._predict = torch.compiler.disable(cls._predict, recursive=False)  # type: ignore[method-assign]

    def __init__(self, pipe: Pipeline, denoiser: Any) -> None:
        self._pipe, self._forward = pipe, denoiser.forward
        self._plain = denoiser.forward
        self._at = Calls(pipe)
        self.begin()
        self.end()

    def begin(self) -> None:
        """Resets the state: the next call is in the first step of an image."""
        self._begin()
        self.calls: Counter[str] = Counter()
        self._at.begin()
        self._forget()

    def end(self) -> None:
        """Lets each call run whole, until the next image begins."""
        self._on = False
        self._forget()

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler has replaced what runs whole calls, so that no trace shows their layers."""
        return any(
            unwrapped(getattr(self, part)) is not getattr(self, part)
            for part in self.parts
        )

    @property
    def idle(self) -> int:
        """Returns the number of calls that ran no layer."""
        return self.calls["forecast"] + self.calls["left out"]

    def _forget(self) -> None:
        """Drops what was kept of earlier calls."""

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, return_dict: bool = True, **others: Any) -> Any:
        """Replaces the denoiser's forward."""
        if self.is_elsewhere:
            return self._plain(*args, return_dict=return_dict, **others)
        prediction = self._predict(Given(args, others))
        if not return_dict:
            return (prediction,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=prediction)

    def _predict(self, given: Given) -> Any:
        """Returns the prediction of a call: a tensor, or a tensor for each sample in a list."""
        raise NotImplementedError

    def _whole(self, given: Given) -> Any:
        return self._forward(*given.args, return_dict=False, **given.others)[0]


class Watched:
    """The forward of a layer or of a block, which a `watcher` with `is_elsewhere` and `run` runs or leaves out."""

    def __init__(self, watcher: Any, part: torch.nn.Module) -> None:
        self._watcher = watcher
        self.forward = part.forward

    def __call__(self, *args: Any, **others: Any) -> Any:
        """Replaces the part's forward."""
        if self._watcher.is_elsewhere:
            return self.forward(*args, **others)
        return self._watcher.run(self, Given(args, others))


class SecondCalls(Watching):
    """Leaves out the branch without the prompt in some steps, where each branch has a call of its own.

    The prompt's prediction stands for both then, for which the guidance formula has no effect.
    """

    def __init__(
        self, pipe: Pipeline, denoiser: Any, guides: Callable[[int, int], bool]
    ) -> None:
        self._guides = guides
        super().__init__(pipe, denoiser)

    def _forget(self) -> None:
        self._kept: Any = None

    def _predict(self, given: Given) -> Any:
        step, branch = self._at.next()
        if (
            self._on
            and branch
            and not self._guides(step, int(self._pipe.num_timesteps))
        ):
            self.calls["left out"] += 1
            return self._kept
        prediction = self._whole(given)
        self._kept = prediction if self._on else None
        self.calls["guided" if branch else "whole"] += 1
        return prediction


class Forecasts(Watching):
    """Forecasts the predictions of some steps from those of earlier ones, for each branch from its own.

    As `skipping.Spectrum` does for a UNet, whose steps are one call.
    """

    parts = ("whole",)

    def __init__(self, pipe: Pipeline, denoiser: Any, chosen: Any) -> None:
        self._chosen = chosen
        self.whole: nn.Module = Own(denoiser)
        super().__init__(pipe, denoiser)

    def _whole(self, given: Given) -> Any:
        return self.whole(*given.args, return_dict=False, **given.others)[0]

    def _forget(self) -> None:
        self._kept: dict[int, Predictions] = {}

    def _predict(self, given: Given) -> Any:
        step, branch = self._at.next()
        predictions = self._kept.setdefault(branch, Predictions(self._chosen))
        steps = int(self._pipe.num_timesteps) if self._on else 0
        forecast = predictions.forecast(len(given.hidden), step, steps)
        if forecast is not None:
            self.calls["forecast"] += 1
            return forecast
        prediction = self._whole(given)
        if self._on:
            predictions.keep(step, prediction)
        self.calls["whole"] += 1
        return prediction
