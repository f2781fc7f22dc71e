"""What a transformer's blocks add, which is kept from step to step, for each branch of guidance its own."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdopt.errors import UsageError
from sdopt.options.transformer import (
    Given,
    Watched,
    Watching,
    blocks_of,
    guidance_of_call,
)
from sdopt.pipelines.parts import Pipeline


class _Form(NamedTuple):
    """The form of a block's output.

    Attributes:
        is_tuple: whether it is a tensor of the image and one of the text.
        place: at which place the image's is.
        without_text: whether the text's is None.
    """

    is_tuple: bool
    place: int
    without_text: bool


class WatchedBlocks(Watching):
    """The base class of what runs blocks in some steps only."""

    def __init__(self, pipe: Pipeline, denoiser: Any) -> None:
        blocks = blocks_of(denoiser)
        last = len(blocks) - 1
        self._forms: dict[int, _Form] = {}
        for number, (_, block) in enumerate(blocks):
            place = "inner"
            if number == 0:
                place = "first"
            elif number == last:
                place = "last"
            block.forward = _Block(self, place, number, block)
        super().__init__(pipe, denoiser)

    def run(self, block: "_Block", given: Given) -> Any:
        """Runs a block, or returns what stands for its output."""
        raise NotImplementedError

    def hidden_of(self, block: "_Block", output: Any, given: Given) -> Tensor:
        """Returns the image's part of a block's output; notes its form, by which a block that is left out answers."""
        if isinstance(output, Tensor):
            self._forms[block.number] = _Form(False, 0, False)
            return output
        index = _hidden_index(block.kind, output, given)
        text = output[1 - index]
        self._forms[block.number] = _Form(True, index, text is None)
        hidden: Tensor = output[index]
        return hidden

    def formed(self, block: "_Block", hidden: Tensor, given: Given) -> Any:
        """Returns a tensor in the form of a block's output."""
        form = self._forms[block.number]
        if not form.is_tuple:
            return hidden
        text = given.text
        if form.without_text:
            text = None
        if form.place == 1:
            return text, hidden
        return hidden, text

    def changed(self, block: "_Block", output: Any, hidden: Tensor) -> Any:
        """Returns a block's output with another image's part."""
        if isinstance(output, Tensor):
            return hidden
        parts = list(output)
        parts[self._forms[block.number].place] = hidden
        return tuple(parts)


class _Block(Watched):
    """The forward of a block, which its transformer's watcher runs or leaves out."""

    def __init__(
        self, watcher: WatchedBlocks, place: str, number: int, block: nn.Module
    ) -> None:
        super().__init__(watcher, block)
        self.place = place
        self.number = number
        self.kind = type(block)


def _hidden_index(block: type, output: Sequence[Any], given: Given) -> int:
    """Returns at which place of its output a block has the image's part: that of the shape that it was given.

    Where image and text have as many tokens, it is where diffusers' registry says, which is wrong of some blocks. Of
    those that are not registered, it is the second, after the text's.
    """
    from diffusers.hooks._helpers import TransformerBlockRegistry

    shape = given.hidden.shape
    alike = [
        place
        for place, part in enumerate(output)
        if part is not None and part.shape == shape
    ]
    if len(alike) == 1:
        return alike[0]
    try:
        metadata = TransformerBlockRegistry.get(block)
    except ValueError:
        return 1
    return int(metadata.return_hidden_states_index or 0)


class FirstBlockByBranch(WatchedBlocks):
    """Runs the blocks after the first only for images for which what the first one adds has changed.

    The test is that of ParaAttention (https://github.com/chengzeyi/ParaAttention): the mean absolute difference of what
    the first block adds to that of the last call that ran all blocks, relative to its mean. Below `threshold`, what the
    later blocks added then is added again. Each image decides for itself, and so does each branch that has calls of its
    own: if some images of a batch need the blocks, they run on all, and the others keep what they would have alone.
    One value for each sample is read from the device.
    """

    def __init__(self, pipe: Pipeline, denoiser: Any, threshold: float) -> None:
        self._threshold = threshold
        super().__init__(pipe, denoiser)

    def _forget(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._skips: list[bool] = []
        self._samples = 0

    def _predict(self, given: Given) -> Any:
        self._branch = self._at.next()[1]
        prediction = self._whole(given)
        ran = "whole"
        if self._all_skip:
            ran = "outer"
        elif any(self._skips):
            ran = "part"
        self.calls[ran] += 1
        return prediction

    @property
    def _all_skip(self) -> bool:
        return bool(self._skips) and all(self._skips)

    def run(self, block: _Block, given: Given) -> Any:
        """Runs a block, or returns its input in its place."""
        hidden = given.hidden
        if block.place != "first" and self._all_skip:
            if block.place == "last":
                _, rest = self._kept[self._branch]
                hidden = hidden + rest
            return self.formed(block, hidden, given)
        output = block.forward(*given.args, **given.others)
        after = self.hidden_of(block, output, given)
        if block.place == "first":
            self._decide(_without_filling(after - hidden, given))
            self._after_first = (after, output)
        elif block.place == "last" and self._on:
            output = self._keep(block, output, after)
        return output

    def _decide(self, added: Tensor) -> None:
        """Notes for each sample whether it skips the other blocks."""
        self._added = added
        self._skips = []
        self._samples = self._samples or len(added)
        before, _ = self._kept.get(self._branch, (None, None))
        if not self._on or before is None:
            return
        if before.shape != added.shape:
            return
        change = _mean_size(added - before) / _mean_size(before)
        both = guidance_of_call(self._pipe).form == "batched"
        guided = getattr(self._pipe, "do_classifier_free_guidance", False)
        # Further calls of a step, or steps without guidance, have one branch alone.
        doubled = len(change) == self._samples and len(change) % 2 == 0
        if both and guided and doubled:
            change = change.view(2, -1).mean(dim=0).repeat(2)
        self._skips = (change < self._threshold).tolist()

    def _keep(self, block: _Block, output: Any, after: Tensor) -> Any:
        """Keeps what the blocks added for the samples that needed them; returns the output with what others keep."""
        passed = self._passed(after)
        added, rest = self._added, after - passed
        if any(self._skips):
            before, residual = self._kept[self._branch]
            further = [1] * (after.ndim - 1)
            rows = torch.tensor(self._skips, device=after.device)
            rows = rows.view(-1, *further)
            rest = torch.where(rows, residual, rest)
            added = torch.where(rows, before, added)
            output = self.changed(block, output, passed + rest)
        self._kept[self._branch] = (added, rest)
        return output

    def _passed(self, after: Tensor) -> Tensor:
        """Returns the output of the first block in the shape of the last one's: some join text and image in between."""
        hidden, output = self._after_first
        if hidden.shape == after.shape or not isinstance(output, tuple):
            return hidden
        others = [
            part for part in output if isinstance(part, Tensor) and part is not hidden
        ]
        return torch.cat([*others, hidden], dim=1)


def _without_filling(added: Tensor, given: Given) -> Tensor:
    """Returns what a block adds, with zeros for what fills up the shorter sequences of a batch.

    Blocks of joined image and text get a mask of the tokens as their second argument if sequences differ in length. An
    image would else decide by the prompts beside its own.
    """
    mask = given.args[1] if len(given.args) > 1 else None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return added
    if mask.shape != added.shape[:2]:
        return added
    return added.masked_fill(~mask[..., None], 0)


def _mean_size(tensor: Tensor) -> Tensor:
    """Returns the mean absolute value of each sample."""
    return tensor.abs().flatten(1).mean(1)


class WholeStacks(WatchedBlocks):
    """The base class of what runs all blocks of a call or none: in the latter, what they added last is added again."""

    def _forget(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._samples: dict[int, int] = {}
        self._skips = False

    def _predict(self, given: Given) -> Any:
        self._step, self._branch = self._at.next()
        samples = len(given.hidden)
        if self._on and self._step == 0 and self._branch == 0:
            self._begin_image()
        # A callback may leave out a part of the batch.
        same = self._samples.get(self._branch) == samples
        self._skips = self._on and same and not self._needs_blocks()
        self._samples[self._branch] = samples
        prediction = self._whole(given)
        ran = "outer" if self._skips else "whole"
        self.calls[ran] += 1
        return prediction

    def _begin_image(self) -> None:
        """Looks at the steps of an image, before the first of them."""

    def _needs_blocks(self) -> bool:
        """Returns whether the blocks run in the current step and branch, which ran them in an earlier step."""
        return True

    def run(self, block: _Block, given: Given) -> Any:
        """Runs a block, or returns its input in its place."""
        hidden = given.hidden
        if self._skips:
            if block.place == "last":
                hidden = hidden + self._kept[self._branch]
            return self.formed(block, hidden, given)
        if block.place == "first":
            self._before = hidden, given.text
        output = block.forward(*given.args, **given.others)
        after = self.hidden_of(block, output, given)
        if block.place == "last" and self._on:
            self._keep(after - self._passed(after))
        return output

    def _passed(self, after: Tensor) -> Tensor:
        """Returns the input of the first block in the shape of the last one's: some join text and image in between."""
        hidden: Tensor = self._before[0]
        text = self._before[1]
        if hidden.shape == after.shape:
            return hidden
        return torch.cat([text, hidden], dim=1)

    def _keep(self, added: Tensor) -> None:
        """Keeps what all blocks added to text and image."""
        self._kept[self._branch] = added


class Magnitude(WholeStacks):
    """Skips the blocks in the steps that magnitudes of earlier images allow: MagCache (Ma et al. 2025).

    https://arxiv.org/abs/2506.09045. `chosen` has the settings; `measured` the magnitudes that fit the denoiser, of
    which those count that were measured at the timesteps of the image.
    """

    def __init__(
        self, pipe: Pipeline, denoiser: Any, chosen: Any, measured: Sequence[Any]
    ) -> None:
        self._chosen, self._measured = chosen, measured
        self._runs: list[list[bool]] = []
        super().__init__(pipe, denoiser)

    def _begin_image(self) -> None:
        self._runs = []
        at = timesteps_of(self._pipe)
        if len(at) == 1:  # no step to skip
            return
        for magnitudes in self._measured:
            if not at:  # only operations are counted, of so many steps
                fits = len(magnitudes.timesteps) == self._pipe._num_timesteps
            else:
                fits = _equal(at, magnitudes.timesteps)
            if fits:
                self._runs = [self._chosen.runs(ratios) for ratios in magnitudes.ratios]
                return
        lengths = {str(len(magnitudes.timesteps)) for magnitudes in self._measured}
        has = " or ".join(sorted(lengths))
        raise UsageError(
            f"caching=magcache: its ratios are of the timesteps of {has} steps, and these are {len(at)} others: "
            "sample as they were measured, or run `sdopt calibrate --magnitudes` with these"
        )

    def _needs_blocks(self) -> bool:
        if not self._runs:
            return True
        if self._branch >= len(self._runs):
            raise UsageError(
                "caching=magcache: its ratios were measured without this branch of guidance: measure them with it"
            )
        return self._runs[self._branch][self._step]


class MagnitudeMeter(WholeStacks):
    """Runs all blocks, and measures the magnitudes by which `Magnitude` skips them.

    Attributes:
        ratios: for each branch, and each step of it, the length of what the blocks add to a token of the image,
            relative to that in the step before: the mean over tokens and images. The first is 1.
        timesteps: those of the image.
    """

    def __init__(self, pipe: Pipeline, denoiser: Any) -> None:
        self.ratios: list[list[float]] = []
        self.timesteps: list[float] = []
        super().__init__(pipe, denoiser)

    def _begin_image(self) -> None:
        self.ratios = []
        self.timesteps = timesteps_of(self._pipe)

    def _keep(self, added: Tensor) -> None:
        tokens = self._before[0].shape[1]
        lengths = torch.linalg.vector_norm(added[:, -tokens:].float(), dim=-1)
        before = self._kept.get(self._branch)
        if self._branch == len(self.ratios):
            self.ratios.append([])
        ratio = 1.0
        if before is not None and before.shape == lengths.shape:
            changes = lengths / (before + 1e-8)
            ratio = float(changes.mean())
        self.ratios[self._branch].append(ratio)
        self._kept[self._branch] = lengths


def timesteps_of(pipe: Pipeline) -> list[float]:
    """Returns the timesteps of the image that is about to be drawn; [] where the scheduler is not there to draw one."""
    first = getattr(pipe.scheduler, "begin_index", None) or 0
    timesteps = getattr(pipe.scheduler, "timesteps", [])
    return [float(timestep) for timestep in timesteps[first:]]


def _equal(some: Sequence[float], others: Sequence[float]) -> bool:
    if len(some) != len(others):
        return False
    pairs = zip(some, others, strict=True)
    return all(
        math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3) for one, other in pairs
    )


_TENSORS, _NUMBERS = 64, 4


def weights_sample(denoiser: nn.Module) -> list[float]:
    """Returns some numbers of a denoiser's weights, by which it is known whatever their type.

    They are four of each of 64 matrices, which lie evenly over the denoiser.
    """
    matrices = [weight for weight in denoiser.parameters() if weight.ndim > 1]
    count = min(_TENSORS, len(matrices))
    numbers: list[float] = []
    for index in range(count):
        matrix = matrices[index * len(matrices) // count]
        flat = matrix.detach().flatten()
        places = [place * flat.numel() // _NUMBERS for place in range(_NUMBERS)]
        numbers += flat[places].float().tolist()
    return [float(f"{number:.6g}") for number in numbers]


def same_weights(some: Sequence[float], others: Sequence[float]) -> bool:
    """Returns whether two samples are of the same weights: bfloat16 rounds them by 0.4 % at most."""
    if len(some) != len(others):
        return False
    size = math.hypot(*others)
    return math.dist(some, others) <= _TOLERANCE * size


_TOLERANCE = 0.005
