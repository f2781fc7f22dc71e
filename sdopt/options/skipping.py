"""Functions that replace a UNet's forward: they run fewer layers in some steps, or one half of the batch at a time.

Python chooses between the kinds of step outside of the modules that compute them. Compilers get these modules, each
free of branches. Import it where a pipeline is at hand: TorchDynamo comes with it, for which each command would wait.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from typing_extensions import override

from sdopt.errors import UsageError
from sdopt.pipelines.family import family_of_pipe
from sdopt.pipelines.parts import denoiser_name, is_called

Conditions = tuple[Tensor, Tensor, Tensor, Tensor | None, dict[str, Tensor] | None]
"""Arguments of a UNet: latents, timestep, text states, and the further conditions of distilled models and of SDXL."""


class OfOneCall:
    """What a denoiser keeps from step to step of one call.

    Another pipeline may have the denoiser too, and call it in another thread: its steps are none of this call.
    """

    _on = False
    _thread = 0

    def _begin(self) -> None:
        """Notes that a call begins in this thread."""
        self._on, self._thread = True, get_ident()

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread makes the call: the denoiser is to run as it did before."""
        return self._on and self._thread != get_ident()


class Calls:
    """Tells the calls of a denoiser apart by the step, and within a step by the branch: the prompt's comes first.

    A step ends when the scheduler has made it, which is known without a look at any tensor.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.begin()

    def begin(self) -> None:
        """Resets the count: the next call is in the first step of an image."""
        self.step, self.branch, self._index = -1, 0, -1

    def next(self) -> tuple[int, int]:
        """Returns the step and the branch of the call that begins, both from 0."""
        scheduler = self._pipe.scheduler
        index = getattr(scheduler, "step_index", None)
        if (
            not hasattr(scheduler, "step_index")
            or (index or 0) != self._index
            or self.step < 0
        ):
            self.step, self.branch, self._index = self.step + 1, 0, index or 0
        else:
            self.branch += 1
        return self.step, self.branch


class Skipping(OfOneCall):
    """Replaces the forward function of a UNet, and leaves out layers in some steps of an image.

    Attributes:
        calls: number of steps since `begin`, by what they ran: `whole` for all layers, and another name for fewer.
    """

    parts: ClassVar[tuple[str, ...]]
    """Names of the attributes that a compiler may replace by graphs."""

    def __init_subclass__(cls) -> None:
        # As of `__call__`: TorchDynamo would compile it anew for each number of steps so far.
        cls._predict = torch.compiler.disable(cls._predict, recursive=False)  # type: ignore[method-assign]

    def __init__(self, unet: Any) -> None:
        self._own = unet.forward
        self.begin()
        self.end()

    def begin(self) -> None:
        """Resets the state: the next step is the first of an image."""
        self._begin()
        self.calls: Counter[str] = Counter()
        self._forget()

    def end(self) -> None:
        """Lets each step run whole, until the next call begins."""
        self._on = False
        self._forget()

    @property
    def idle(self) -> int:
        """Returns the number of steps that ran no layer."""
        return self.calls["forecast"]

    def _forget(self) -> None:
        """Drops what was kept of earlier steps."""
        raise NotImplementedError

    def _predict(
        self, sample: Tensor, timestep: Any, states: Tensor, others: dict[str, Any]
    ) -> Tensor:
        """Returns the prediction of a step, and counts it in `calls`."""
        raise NotImplementedError

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(
        self,
        sample: Tensor,
        timestep: Any,
        encoder_hidden_states: Tensor,
        return_dict: bool = True,
        **others: Any,
    ) -> Any:
        """Replaces `UNet2DConditionModel.forward`. Raises UsageError for inputs that it cannot pass on."""
        if self.is_elsewhere:
            return self._own(
                sample,
                timestep,
                encoder_hidden_states,
                return_dict=return_dict,
                **others,
            )
        return _output(
            self._predict(sample, timestep, encoder_hidden_states, others), return_dict
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _output(noise: Tensor, return_dict: bool) -> Any:
    """Returns a prediction in the form in which `UNet2DConditionModel.forward` does."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

    return UNet2DConditionOutput(sample=noise) if return_dict else (noise,)


class Halves:
    """Replaces the forward function of a denoiser, and runs it on one half of the batch at a time.

    A pipeline with guidance passes each sample twice, without and with the prompt. Where only one half runs, it stands
    for both, for which the guidance formula has no effect.
    """

    def __init_subclass__(cls) -> None:
        cls._which = torch.compiler.disable(cls._which)  # type: ignore[method-assign]  # as `Skipping._predict`

    def __init__(self, pipe: Any, forward: Any) -> None:
        self._pipe, self._forward = pipe, forward

    def _which(self, batch: int) -> Sequence[int]:
        """Returns the halves of a batch that run, 0 without and 1 with the prompt; () for all of it at once."""
        raise NotImplementedError

    # A compiler captures the denoiser itself, with one graph per batch size.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, return_dict: bool = True, **others: Any) -> Any:
        """Replaces the denoiser's forward; another pipeline with this denoiser may have no two halves.

        The latents are its first argument, or `hidden_states`: a batch, or a list with a tensor for each sample.
        """
        sample = args[0] if args else others["hidden_states"]
        which = self._which(len(sample))
        if not which:
            return self._forward(*args, return_dict=return_dict, **others)
        predictions: list[Any] = []
        several = denoiser_name(self._pipe) == "unet"
        for number in which:
            arguments, more = half((args, others), len(sample), number, several)
            predictions.append(self._forward(*arguments, return_dict=False, **more)[0])
        whole = predictions * (2 // len(predictions))
        if isinstance(predictions[0], list):
            return ([*chain.from_iterable(whole)],)
        return _output(torch.cat(whole), return_dict)


class HalfBatches(Halves, OfOneCall):
    """Runs steps without guidance, as `chosen` says, on only the half of the batch with the prompt.

    Calls of half of the first one's samples have one branch already: Stable Diffusion 3 makes further ones in a step to
    guide by skipped layers, and Z-Image ends guidance at a timestep.
    """

    def __init__(self, pipe: Any, forward: Any, chosen: Any) -> None:
        super().__init__(pipe, forward)
        self._chosen = chosen
        self._at = Calls(pipe)
        self.begin()
        self.end()

    def begin(self) -> None:
        """Resets the counts: the next step is the first of an image."""
        self._begin()
        self._at.begin()
        self._both = 0
        self.guided, self.unguided = 0, 0

    def end(self) -> None:
        """Lets each step run as without it, until the next call begins."""
        self._on = False

    @override
    def _which(self, batch: int) -> Sequence[int]:
        if self.is_elsewhere:
            return ()
        step, _ = self._at.next()
        self._both = self._both or batch
        # Without guidance, as in a call with guidance_scale=1, the batch has no second half.
        whole = not (self._on and self._pipe.do_classifier_free_guidance)
        whole = whole or 2 * batch == self._both
        if whole or self._chosen.guides(step, int(self._pipe.num_timesteps)):
            self.guided += 1
            return ()
        self.unguided += 1
        return (family_of_pipe(self._pipe).guidance.prompt_half,)


class EachHalf(Halves):
    """Runs both halves, one after the other.

    Attributes:
        halved: the number of calls that were made as two.
    """

    halved = 0

    @override
    def _which(self, batch: int) -> Sequence[int]:
        if (
            not (is_called(self._pipe) and self._pipe.do_classifier_free_guidance)
            or batch % 2
        ):
            return ()
        self.halved += 1
        return (0, 1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def half(arguments: Any, batch: int, which: int, several: bool) -> Any:
    """Returns the arguments of a denoiser for the first (0) or the second (1) half of its batch.

    Text states, further conditions, and what other networks (ControlNet) add have a row per sample too; `several` says
    whether some may have more, as the pictures of a UNet's IP-Adapter. Positions of a transformer have one per token,
    which are none of a sample's. A list has a tensor for each sample only where the latents are one; a ControlNet's has
    one for each layer.
    """
    args, others = arguments
    listed = isinstance(args[0] if args else others["hidden_states"], list)

    def cut(tensor: Tensor) -> Tensor:
        rows = len(tensor) if tensor.ndim else 1
        of_samples = rows == batch or (several and rows % batch == 0)
        return tensor.chunk(2)[which] if of_samples else tensor

    def part(value: Any) -> Any:
        if listed and isinstance(value, list) and len(value) == batch:
            return value[which * batch // 2 : (which + 1) * batch // 2]
        return tree_map_only(Tensor, cut, value)

    return tuple(map(part, args)), {name: part(value) for name, value in others.items()}


def _conditions(
    name: str, sample: Tensor, timestep: Any, states: Tensor, others: dict[str, Any]
) -> Conditions:
    """Returns the arguments of blocks that an option runs itself. Raises UsageError for those that they do not take."""
    unknown = [
        key
        for key in others.keys() - {"timestep_cond", "added_cond_kwargs"}
        if others[key] is not None
    ]
    if unknown:
        raise UsageError(
            f"caching={name}: cannot pass {', '.join(sorted(unknown))} on to the UNet; leave it out"
        )
    return (
        sample,
        timestep,
        states,
        others.get("timestep_cond"),
        others.get("added_cond_kwargs"),
    )


class DeepCache(Skipping):
    """Runs the whole UNet on every `interval`-th step, and only the outer layers on the others (Ma et al. 2024).

    The features that the inner layers return to the outer ones change little from step to step, so they are cached. As
    in the published implementation (https://github.com/horseee/DeepCache), the outer layers are those before layer
    `layer` of block `block` on the way down, and those after it on the way up. No value is read from the device.
    """

    parts = ("whole", "outer")

    def __init__(self, unet: Any, interval: int, block: int, layer: int) -> None:
        self._interval = interval
        self.whole: torch.nn.Module = Whole(unet, block, layer)
        self.outer: torch.nn.Module = Outer(unet, block, layer)
        super().__init__(unet)

    @override
    def _forget(self) -> None:
        self._kept: Tensor | None = None

    @override
    def _predict(
        self, sample: Tensor, timestep: Any, states: Tensor, others: dict[str, Any]
    ) -> Tensor:
        inputs = _conditions("deepcache", sample, timestep, states, others)
        # A callback may leave out a part of the batch.
        fits = self._kept is not None and len(self._kept) == len(sample)
        noise: Tensor
        if fits and self.calls.total() % self._interval:
            noise = self.outer(inputs, self._kept)
            self.calls["outer"] += 1
        else:
            noise, kept = self.whole(inputs)
            # The next replay of a CUDA graph overwrites its outputs.
            self._kept = kept.clone() if self._on else None
            self.calls["whole"] += 1
        return noise


class FirstBlock(Skipping):
    """Runs the outermost layers of a UNet in each step, and the inner ones only if what the first layer adds changed.

    The test is that of ParaAttention and Comfy-WaveSpeed (https://github.com/chengzeyi/Comfy-WaveSpeed): the mean
    absolute difference of what the first layer adds to that of the last step that ran the inner layers, relative to its
    mean. Below `threshold`, the features that the inner layers returned then are used again, as `DeepCache` does; the
    former add what all later layers added instead, which is cheaper and draws far worse images.

    Each image of a batch decides for itself, by its samples without and with the prompt; the inner layers run on the
    samples of the images that need them. One value for each image is read from the device.
    """

    parts = ("first", "inner", "last")

    def __init__(self, pipe: Any, unet: Any, threshold: float) -> None:
        self._pipe, self._threshold = pipe, threshold
        self.first: torch.nn.Module = First(unet, 0, 1)
        self.inner: torch.nn.Module = Inner(unet, 0, 1)
        self.last: torch.nn.Module = Last(unet, 0, 0)
        super().__init__(unet)

    @override
    def _forget(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    @override
    def _predict(
        self, sample: Tensor, timestep: Any, states: Tensor, others: dict[str, Any]
    ) -> Tensor:
        further = self.first(
            _conditions("first_block", sample, timestep, states, others)
        )
        hidden, skips = further[0], further[3]
        added = hidden - skips[0]
        if self._kept is None or len(self._kept[0]) != len(sample):
            kept, chosen = self.inner(*further).clone(), [True]
        else:
            before, kept = self._kept
            stale = self._changed(added, before)
            chosen = stale.tolist()
            if all(chosen):
                kept = self.inner(*further).clone()
            elif any(chosen):
                rows = stale.nonzero()[:, 0]
                kept = kept.index_copy(
                    0,
                    rows,
                    self.inner(
                        *tree_map_only(Tensor, lambda each: each[rows], further)
                    ),
                )
                added = before.index_copy(0, rows, added[rows])
            else:
                added = before
        self._kept = (added, kept) if self._on else None
        self.calls["whole" if all(chosen) else "part" if any(chosen) else "outer"] += 1
        noise: Tensor = self.last(kept, *further[1:3], skips[0])
        return noise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _changed(self, added: Tensor, before: Tensor) -> Tensor:
        """Returns for each sample whether its image needs the inner layers."""
        change = (added - before).abs().mean(dim=(1, 2, 3)) / before.abs().mean(
            dim=(1, 2, 3)
        )
        if self._pipe.do_classifier_free_guidance and len(change) % 2 == 0:
            change = change.view(2, -1).mean(dim=0).repeat(2)
        return change >= self._threshold


class Spectrum(Skipping):
    """Forecasts the prediction of a UNet on some steps, by a fit to those of the steps that ran it.

    Han et al. 2026 (https://arxiv.org/abs/2603.01623) fit the features before the last layer. As in
    stable-diffusion.cpp (#1322), it is the prediction here, so that no layer runs. All samples of a batch have the same
    steps and weights.
    """

    parts = ("whole",)

    def __init__(self, pipe: Any, unet: Any, chosen: Any) -> None:
        self._pipe, self._chosen = pipe, chosen
        self.whole: torch.nn.Module = Own(unet)
        super().__init__(unet)

    @override
    def _forget(self) -> None:
        self._kept = Predictions(self._chosen)

    @override
    def _predict(
        self, sample: Tensor, timestep: Any, states: Tensor, others: dict[str, Any]
    ) -> Tensor:
        step = self.calls.total()
        steps = int(self._pipe.num_timesteps) if self._on else 0
        noise: Tensor | None = self._kept.forecast(len(sample), step, steps)
        if noise is not None:
            self.calls["forecast"] += 1
            return noise
        noise = self.whole(sample, timestep, states, return_dict=False, **others)[0]
        if self._on:
            self._kept.keep(step, noise)
        self.calls["whole"] += 1
        return noise


class Predictions:
    """The predictions of one branch in the steps that ran, from which those of other steps are forecast.

    No compiler is to look in: TorchDynamo would compile NumPy, and the sum of what is kept, for each step anew.
    """

    def __init__(self, chosen: Any) -> None:
        self._chosen = chosen
        self._batch = 0
        self._kept: dict[int, Any] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forecast(self, batch: int, step: int, steps: int) -> Any:
        """Returns the prediction of a step for a batch, in the form of those that are kept; None if the step runs."""
        if batch != self._batch:  # a callback may leave out a part of it
            self._kept, self._batch = {}, batch
        if len(self._kept) < 2 or step >= steps or self._chosen.runs(steps)[step]:
            return None
        weights = self._chosen.weights([*self._kept], step, steps)

        def summed(*predictions: Tensor) -> Tensor:
            total = torch.zeros_like(predictions[0])
            for prediction, weight in zip(predictions, weights, strict=True):
                total.add_(prediction, alpha=weight)
            return total.to(self._dtype)

        return tree_map(summed, *self._kept.values())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(self, step: int, prediction: Any) -> None:
        """Keeps the prediction of a step in float32: a tensor, or a tensor for each sample in a list."""
        self._dtype = tree_leaves(prediction)[0].dtype
        self._kept[step] = tree_map(
            lambda each: each.to(torch.float32, copy=True), prediction
        )


class _Step(torch.nn.Module):
    """The base class of the two kinds of step."""

    def __init__(self, unet: Any, block: int, layer: int) -> None:
        super().__init__()
        self._unet = unet
        self._block, self._layer = block, layer

    def _down(self, inputs: Conditions) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Returns the last output of the outer layers on the way down, time embedding, text states, and all outputs."""
        unet = self._unet
        sample, timestep, states, timestep_cond, added = inputs
        temb = unet.time_embedding(
            unet.get_time_embed(sample=sample, timestep=timestep), timestep_cond
        )
        more = unet.get_aug_embed(
            emb=temb, encoder_hidden_states=states, added_cond_kwargs=added
        )
        temb = temb if more is None else temb + more
        temb = temb if unet.time_embed_act is None else unet.time_embed_act(temb)
        states = unet.process_encoder_hidden_states(
            encoder_hidden_states=states, added_cond_kwargs=added
        )
        hidden = unet.conv_in(
            2 * sample - 1.0 if unet.config.center_input_sample else sample
        )
        skips = [hidden]
        for block in unet.down_blocks[: self._block]:
            hidden, outputs = block(hidden, temb, **_states_for(block, states))
            skips += outputs
        outputs = _layers(
            unet.down_blocks[self._block], slice(0, self._layer), hidden, temb, states
        )
        return [hidden, *outputs][-1], temb, states, skips + outputs

    def _inner(
        self, hidden: Tensor, temb: Tensor, states: Tensor, outer: list[Tensor]
    ) -> Tensor:
        """Returns the features that the inner layers return to the outer ones; uses only the sizes of `outer`."""
        unet, block, odd = (
            self._unet,
            self._unet.down_blocks[self._block],
            _is_odd(self._unet, outer[0]),
        )
        outputs = _layers(block, slice(self._layer, None), hidden, temb, states)
        hidden, skips = [hidden, *outputs][-1], outer + outputs
        for downsampler in block.downsamplers or ():
            hidden = downsampler(hidden)
            skips.append(hidden)
        for block in unet.down_blocks[self._block + 1 :]:
            hidden, outputs = block(hidden, temb, **_states_for(block, states))
            skips += outputs
        if unet.mid_block is not None:
            hidden = unet.mid_block(hidden, temb, **_states_for(unet.mid_block, states))
        last = len(unet.up_blocks) - 1 - self._block
        for block in unet.up_blocks[:last]:
            hidden = _up_block(block, hidden, skips, temb, states, odd)
        inner = len(unet.up_blocks[last].resnets) - 1 - self._layer
        return _up_layers(
            unet.up_blocks[last], slice(0, inner), hidden, skips, temb, states
        )

    def _up(
        self, hidden: Tensor, temb: Tensor, states: Tensor, skips: list[Tensor]
    ) -> Tensor:
        """Returns the predicted noise from the features of the inner layers."""
        unet, odd = self._unet, _is_odd(self._unet, skips[0])
        first = len(unet.up_blocks) - 1 - self._block
        block = unet.up_blocks[first]
        inner = len(block.resnets) - 1 - self._layer
        hidden = _up_layers(block, slice(inner, None), hidden, skips, temb, states)
        for upsampler in block.upsamplers or ():
            hidden = upsampler(hidden, skips[-1].shape[2:] if odd else None)
        for block in unet.up_blocks[first + 1 :]:
            hidden = _up_block(block, hidden, skips, temb, states, odd)
        if unet.conv_norm_out:
            hidden = unet.conv_act(unet.conv_norm_out(hidden))
        noise: Tensor = unet.conv_out(hidden)
        return noise


class Whole(_Step):
    """A step that runs every layer."""

    def forward(self, inputs: Conditions) -> tuple[Tensor, Tensor]:
        """Returns the predicted noise, and the features of the inner layers."""
        hidden, temb, states, skips = self._down(inputs)
        states_inside = self._inner(hidden, temb, states, skips)
        return self._up(states_inside, temb, states, skips), states_inside


class Outer(_Step):
    """A step that runs only the outer layers."""

    def forward(self, inputs: Conditions, kept: Tensor) -> Tensor:
        """Returns the predicted noise, given the features of the inner layers from an earlier step."""
        return self._up(kept, *self._down(inputs)[1:])


class First(_Step):
    """The first layers on the way down, which run in each step."""

    def forward(
        self, inputs: Conditions
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Returns their features, and what later layers need too: time embedding, text states, skip connections."""
        return self._down(inputs)


class Inner(_Step):
    """The layers between the first ones and the last one."""

    def forward(
        self, hidden: Tensor, temb: Tensor, states: Tensor, skips: list[Tensor]
    ) -> Tensor:
        """Returns the features that the last layer gets, from what `First` returns."""
        hidden = self._inner(hidden, temb, states, skips)
        block = self._unet.up_blocks[-1]
        last = len(block.resnets) - 1
        return _up_layers(
            block, slice(last - self._layer, last), hidden, [*skips], temb, states
        )


class Last(_Step):
    """The last layer on the way up, and those after all blocks, which run in each step."""

    def forward(
        self, hidden: Tensor, temb: Tensor, states: Tensor, skip: Tensor
    ) -> Tensor:
        """Returns the predicted noise, given the first skip connection."""
        return self._up(hidden, temb, states, [skip])


class Own(torch.nn.Module):
    """A denoiser with the forward function that it had."""

    def __init__(self, denoiser: Any) -> None:
        super().__init__()
        self._denoiser, self._forward = denoiser, denoiser.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the denoiser would."""
        return self._forward(*args, **kwargs)


def _is_odd(unet: Any, sample: Tensor) -> bool:
    """Returns whether a side is odd on some level, so that upsampling blocks need the target size."""
    return any(side % 2**unet.num_upsamplers for side in sample.shape[2:])


def _states_for(block: Any, states: Tensor) -> dict[str, Tensor]:
    return (
        {"encoder_hidden_states": states}
        if getattr(block, "has_cross_attention", False)
        else {}
    )


def _layers(
    block: Any, which: slice, hidden: Tensor, temb: Tensor, states: Tensor
) -> list[Tensor]:
    """Returns the outputs of the layers `which` of a down block."""
    outputs = []
    for number in range(len(block.resnets))[which]:
        hidden = _layer(block, number, hidden, temb, states)
        outputs.append(hidden)
    return outputs


def _up_layers(
    block: Any,
    which: slice,
    hidden: Tensor,
    skips: list[Tensor],
    temb: Tensor,
    states: Tensor,
) -> Tensor:
    """Returns the output of the layers `which` of an up block; pops their skip connections from `skips`."""
    for number in range(len(block.resnets))[which]:
        hidden = _layer(
            block, number, torch.cat([hidden, skips.pop()], dim=1), temb, states
        )
    return hidden


def _layer(
    block: Any, number: int, hidden: Tensor, temb: Tensor, states: Tensor
) -> Tensor:
    hidden = block.resnets[number](hidden, temb)
    if getattr(block, "has_cross_attention", False):
        hidden = block.attentions[number](
            hidden, encoder_hidden_states=states, return_dict=False
        )[0]
    return hidden


def _up_block(
    block: Any,
    hidden: Tensor,
    skips: list[Tensor],
    temb: Tensor,
    states: Tensor,
    odd: bool,
) -> Tensor:
    """Returns the output of a whole up block; pops its skip connections from `skips`."""
    count = len(block.resnets)
    own_skips = tuple(skips[-count:])
    del skips[-count:]
    size = skips[-1].shape[2:] if odd and skips else None
    output: Tensor = block(
        hidden, own_skips, temb, upsample_size=size, **_states_for(block, states)
    )
    return output
