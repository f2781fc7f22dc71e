"""What options need to know of transformers as denoisers: their calls by step and branch, and their blocks.

Nothing here knows a pipeline by its name. Import it where a pipeline is at hand: it needs diffusers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdopt.options.skipping import OfOneCall, Own
from sdopt.pipelines.family import Guidance, family_named
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
    found = []
    for name, layers in denoiser.named_children():
        if isinstance(layers, nn.ModuleList) and (name.endswith("blocks") or name == "layers"):
            found += [(f"{name}.{number}", block) for number, block in enumerate(layers)]
    return found


def block_classes(denoiser: nn.Module) -> list[str]:
    """Returns the distinct class names of a transformer's blocks, in their order."""
    return list(dict.fromkeys(type(block).__name__ for _, block in blocks_of(denoiser)))


def guidance_of_call(pipe: Pipeline) -> Guidance:
    """Returns how a pipeline is guided when its denoiser runs both branches."""
    return family_named(type(pipe).__name__).guidance


class Calls:
    """Tells the calls of a denoiser apart by the step, and within a step by the branch: the prompt's comes first.

    A step ends when the scheduler has made it, which is known without a look at any tensor.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self.begin()

    def begin(self) -> None:
        """Resets the count: the next call is in the first step of an image."""
        self.step, self.branch, self._index = -1, 0, -1

    def next(self) -> tuple[int, int]:
        """Returns the step and the branch of the call that begins, both from 0."""
        scheduler = self._pipe.scheduler
        index = getattr(scheduler, "step_index", None)
        if not hasattr(scheduler, "step_index") or (index or 0) != self._index or self.step < 0:
            self.step, self.branch, self._index = self.step + 1, 0, index or 0
        else:
            self.branch += 1
        return self.step, self.branch


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
        return any(unwrapped(getattr(self, part)) is not getattr(self, part) for part in self.parts)

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
            return self._forward(*args, return_dict=return_dict, **others)
        found = self._predict(Given(args, others))
        if not return_dict:
            return (found,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=found)

    def _predict(self, given: Given) -> Any:
        """Returns the prediction of a call: a tensor, or a tensor for each sample in a list."""
        raise NotImplementedError

    def _whole(self, given: Given) -> Any:
        return self._forward(*given.args, return_dict=False, **given.others)[0]


class SecondCalls(Watching):
    """Leaves out the branch without the prompt in some steps, where each branch has a call of its own.

    The prompt's prediction stands for both then, for which the guidance formula has no effect.
    """

    def __init__(self, pipe: Pipeline, denoiser: Any, guides: Callable[[int, int], bool]) -> None:
        self._guides = guides
        super().__init__(pipe, denoiser)

    def _forget(self) -> None:
        self._kept: Any = None

    def _predict(self, given: Given) -> Any:
        step, branch = self._at.next()
        if self._on and branch and not self._guides(step, int(self._pipe.num_timesteps)):
            self.calls["left out"] += 1
            return self._kept
        found = self._whole(given)
        self._kept = found if self._on else None
        self.calls["guided" if branch else "whole"] += 1
        return found


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
        self._kept: dict[int, list[tuple[int, list[Tensor]]]] = {}

    def _predict(self, given: Given) -> Any:
        step, branch = self._at.next()
        kept = self._kept.setdefault(branch, [])
        steps = int(self._pipe.num_timesteps) if self._on else 0
        if len(kept) > 1 and step < steps and not self._chosen.runs(steps)[step]:
            self.calls["forecast"] += 1
            return self._forecast(kept, self._chosen.weights([known for known, _ in kept], step, steps))
        found = self._whole(given)
        if self._on:
            samples = found if isinstance(found, list) else [found]
            self._form = found
            kept.append((step, [sample.to(torch.float32, copy=True) for sample in samples]))
        self.calls["whole"] += 1
        return found

    def _forecast(self, kept: Sequence[tuple[int, list[Tensor]]], weights: Sequence[float]) -> Any:
        listed = isinstance(self._form, list)
        dtype = self._form[0].dtype if listed else self._form.dtype
        found = []
        for samples in zip(*(samples for _, samples in kept), strict=True):
            forecast = torch.zeros_like(samples[0])
            for sample, weight in zip(samples, weights, strict=True):
                forecast.add_(sample, alpha=weight)
            found.append(forecast.to(dtype))
        return found if listed else found[0]


class FirstBlockByBranch(Watching):
    """Runs the blocks after the first only for images for which what the first one adds has changed.

    The test is that of ParaAttention (https://github.com/chengzeyi/ParaAttention): the mean absolute difference of what
    the first block adds to that of the last call that ran all blocks, relative to its mean. Below `threshold`, what the
    later blocks added then is added again. Each image decides for itself, and so does each branch that has calls of its
    own: if some images of a batch need the blocks, they run on all, and the others keep what they would have alone.
    One value for each sample is read from the device.
    """

    def __init__(self, pipe: Pipeline, denoiser: Any, threshold: float) -> None:
        self._threshold = threshold
        blocks = [block for _, block in blocks_of(denoiser)]
        self._forms: dict[int, tuple[bool, int, bool]] = {}
        for number, block in enumerate(blocks):
            place = "first" if number == 0 else "last" if number == len(blocks) - 1 else "inner"
            block.forward = _Watched(self, place, number, block)
        super().__init__(pipe, denoiser)

    def _forget(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._skips: list[bool] = []

    def _predict(self, given: Given) -> Any:
        self._branch = self._at.next()[1]
        found = self._whole(given)
        self.calls["outer" if self._all_skip else "part" if any(self._skips) else "whole"] += 1
        return found

    @property
    def _all_skip(self) -> bool:
        return bool(self._skips) and all(self._skips)

    def run(self, block: "_Watched", given: Given) -> Any:
        """Runs a block, or returns its input in its place."""
        place, number = block.place, block.number
        hidden = given.hidden
        if place != "first" and self._all_skip:
            if place == "last":
                hidden = hidden + self._kept[self._branch][1]
            return self._formed(number, hidden, given)
        output = block.forward(*given.args, **given.others)
        after = self._hidden_of(block, output)
        if place == "first":
            self._decide(after - hidden)
            self._after_first = (after, output)
        elif place == "last" and self._on:
            output = self._keep(number, output, after)
        return output

    def _decide(self, added: Tensor) -> None:
        """Notes for each sample whether it skips the other blocks."""
        self._added = added
        before = self._kept.get(self._branch, (None, None))[0]
        if not self._on or before is None or before.shape != added.shape:
            self._skips = []
            return
        change = (added - before).abs().flatten(1).mean(1) / before.abs().flatten(1).mean(1)
        both = guidance_of_call(self._pipe).form == "batched"
        if both and getattr(self._pipe, "do_classifier_free_guidance", False) and len(change) % 2 == 0:
            change = change.view(2, -1).mean(dim=0).repeat(2)
        self._skips = (change < self._threshold).tolist()

    def _keep(self, number: int, output: Any, after: Tensor) -> Any:
        """Keeps what the blocks added for the samples that needed them; returns the output with what others keep."""
        passed = self._passed(after)
        added, rest = self._added, after - passed
        if any(self._skips):
            before, kept = self._kept[self._branch]
            rows = torch.tensor(self._skips, device=after.device).view(-1, *[1] * (after.ndim - 1))
            rest, added = torch.where(rows, kept, rest), torch.where(rows, before, added)
            after = passed + rest
            _, index, _ = self._forms[number]
            output = _with(output, index, after)
        self._kept[self._branch] = (added, rest)
        return output

    def _passed(self, after: Tensor) -> Tensor:
        """Returns the output of the first block in the shape of the last one's: some join text and image in between."""
        hidden, output = self._after_first
        if hidden.shape == after.shape or not isinstance(output, tuple):
            return hidden
        others = [part for part in output if isinstance(part, Tensor) and part is not hidden]
        return torch.cat([*others, hidden], dim=1)

    def _hidden_of(self, block: "_Watched", output: Any) -> Tensor:
        """Returns the image's part of a block's output; notes its form, by which a block that is left out answers."""
        if isinstance(output, Tensor):
            self._forms[block.number] = (False, 0, False)
            return output
        index = _hidden_index(block.kind)
        self._forms[block.number] = (True, index, output[1 - index] is None)
        found: Tensor = output[index]
        return found

    def _formed(self, number: int, hidden: Tensor, given: Given) -> Any:
        """Returns a tensor in the form of a block's output."""
        is_tuple, index, without_text = self._forms[number]
        if not is_tuple:
            return hidden
        text = None if without_text else given.text
        return (text, hidden) if index == 1 else (hidden, text)


class _Watched:
    """The forward of a block, which its transformer's watcher runs or leaves out."""

    def __init__(self, watcher: FirstBlockByBranch, place: str, number: int, block: nn.Module) -> None:
        self._watcher = watcher
        self.place, self.number, self.kind, self.forward = place, number, type(block), block.forward

    def __call__(self, *args: Any, **others: Any) -> Any:
        if self._watcher.is_elsewhere:
            return self.forward(*args, **others)
        return self._watcher.run(self, Given(args, others))


def _with(output: Any, index: int, hidden: Tensor) -> Any:
    """Returns a block's output with another image's part."""
    if isinstance(output, Tensor):
        return hidden
    return tuple(hidden if place == index else part for place, part in enumerate(output))


def _hidden_index(block: type) -> int:
    """Returns at which place of its output a block has the image's part, as diffusers' registry says of it.

    Of blocks that are not registered, it is the second, after the text's.
    """
    from diffusers.hooks._helpers import TransformerBlockRegistry

    try:
        metadata = TransformerBlockRegistry.get(block)
    except ValueError:
        return 1
    return int(metadata.return_hidden_states_index or 0)
