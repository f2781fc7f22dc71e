"""DeepCache (Ma et al. 2024) with two fixed graphs: one for the steps that run the whole UNet, one for the others."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sdopt.errors import UsageError

Conditions = tuple[Tensor, Tensor, Tensor, Tensor | None, dict[str, Tensor] | None]
"""Arguments of a UNet: latents, timestep, text states, and the further conditions of distilled models and of SDXL."""


class DeepCache:
    """Replaces the forward function of a UNet for `caching=deepcache`.

    Runs the whole UNet on every `interval`-th step, and only the outer layers on the others.

    The features that the inner layers return to the outer ones change little from step to step, so they are cached. As
    in the published implementation (https://github.com/horseee/DeepCache), the outer layers are those before layer
    `layer` of block `block` on the way down, and those after it on the way up.

    Python chooses between the two kinds of step outside of both modules. Compilers get `whole` and `outer`, each free
    of branches, and no value is read from the device.

    Attributes:
        whole: computes a step with the whole UNet; a compiler may replace it by a graph.
        outer: computes a step with the outer layers; a compiler may replace it too.
        calls: number of runs of each of the two since `begin`.
    """

    parts = ("whole", "outer")
    """Names of the attributes that a compiler may replace."""

    def __init__(self, unet: Any, interval: int, block: int, layer: int) -> None:
        self._interval = interval
        self.whole: torch.nn.Module = Whole(unet, block, layer)
        self.outer: torch.nn.Module = Outer(unet, block, layer)
        self.begin()
        self.end()

    def begin(self) -> None:
        """Resets the state: the next step is the first of an image."""
        self._step = 0
        self._kept: Tensor | None = None
        self._on = True
        self.calls: Counter[str] = Counter()

    def end(self) -> None:
        """Lets each step run whole, until the next call begins."""
        self._kept, self._on = None, False

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        return_dict: bool = True,
        **others: Any,
    ) -> Any:
        """Replaces `UNet2DConditionModel.forward`. Raises UsageError for inputs that it cannot pass on."""
        unknown = [name for name, value in others.items() if value is not None]
        if unknown:
            raise UsageError(f"caching=deepcache: cannot pass {', '.join(unknown)} on to the UNet; leave it out")
        inputs = (sample, timestep, encoder_hidden_states, timestep_cond, added_cond_kwargs)
        # A callback may leave out a part of the batch.
        fits = self._on and self._kept is not None and len(self._kept) == len(sample)
        if not fits or self._step % self._interval == 0:
            noise, kept = self.whole(inputs)
            # The next replay of a CUDA graph overwrites its outputs.
            self._kept = kept.clone() if self._on else None
            self.calls["whole"] += 1
        else:
            noise = self.outer(inputs, self._kept)
            self.calls["outer"] += 1
        self._step += 1
        if not return_dict:
            return (noise,)
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        return UNet2DConditionOutput(sample=noise)


class _Step(torch.nn.Module):
    """The base class of the two kinds of step.

    Args:
        unet: the UNet whose layers run.
        block: the block on the way down in which the inner layers begin.
        layer: the first inner layer in that block.
    """

    def __init__(self, unet: Any, block: int, layer: int) -> None:
        super().__init__()
        self._unet = unet
        self._block, self._layer = block, layer

    @override
    def extra_repr(self) -> str:
        return f"block={self._block}, layer={self._layer}"

    def _down(self, inputs: Conditions) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Returns time embedding, text states, and the last and all outputs of the outer layers on the way down."""
        unet = self._unet
        sample, timestep, states, timestep_cond, added = inputs
        temb = unet.time_embedding(unet.get_time_embed(sample=sample, timestep=timestep), timestep_cond)
        more = unet.get_aug_embed(emb=temb, encoder_hidden_states=states, added_cond_kwargs=added)
        temb = temb if more is None else temb + more
        temb = temb if unet.time_embed_act is None else unet.time_embed_act(temb)
        states = unet.process_encoder_hidden_states(encoder_hidden_states=states, added_cond_kwargs=added)
        hidden = unet.conv_in(2 * sample - 1.0 if unet.config.center_input_sample else sample)
        skips = [hidden]
        for block in unet.down_blocks[: self._block]:
            hidden, outputs = block(hidden, temb, **_states_for(block, states))
            skips += outputs
        outputs = _layers(unet.down_blocks[self._block], slice(0, self._layer), hidden, temb, states)
        return temb, states, [hidden, *outputs][-1], skips + outputs

    def _inner(self, hidden: Tensor, outer: list[Tensor], temb: Tensor, states: Tensor, odd: bool) -> Tensor:
        """Returns the features that the inner layers return to the outer ones; uses only the sizes of `outer`."""
        unet, block = self._unet, self._unet.down_blocks[self._block]
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
        return _up_layers(unet.up_blocks[last], slice(0, inner), hidden, skips, temb, states)

    def _up(self, hidden: Tensor, skips: list[Tensor], temb: Tensor, states: Tensor, odd: bool) -> Tensor:
        """Returns the predicted noise from the features of the inner layers."""
        unet = self._unet
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
        odd = _is_odd(self._unet, inputs[0])
        temb, states, hidden, skips = self._down(inputs)
        kept = self._inner(hidden, skips, temb, states, odd)
        return self._up(kept, skips, temb, states, odd), kept


class Outer(_Step):
    """A step that runs only the outer layers."""

    def forward(self, inputs: Conditions, kept: Tensor) -> Tensor:
        """Returns the predicted noise, given the features of the inner layers from an earlier step."""
        temb, states, _, skips = self._down(inputs)
        return self._up(kept, skips, temb, states, _is_odd(self._unet, inputs[0]))


def _is_odd(unet: Any, sample: Tensor) -> bool:
    """Returns whether a side is odd on some level, so that upsampling blocks need the target size."""
    return any(side % 2**unet.num_upsamplers for side in sample.shape[2:])


def _states_for(block: Any, states: Tensor) -> dict[str, Tensor]:
    return {"encoder_hidden_states": states} if getattr(block, "has_cross_attention", False) else {}


def _layers(block: Any, which: slice, hidden: Tensor, temb: Tensor, states: Tensor) -> list[Tensor]:
    """Returns the outputs of the layers `which` of a down block."""
    outputs = []
    for number in range(len(block.resnets))[which]:
        hidden = _layer(block, number, hidden, temb, states)
        outputs.append(hidden)
    return outputs


def _up_layers(block: Any, which: slice, hidden: Tensor, skips: list[Tensor], temb: Tensor, states: Tensor) -> Tensor:
    """Returns the output of the layers `which` of an up block; pops their skip connections from `skips`."""
    for number in range(len(block.resnets))[which]:
        hidden = _layer(block, number, torch.cat([hidden, skips.pop()], dim=1), temb, states)
    return hidden


def _layer(block: Any, number: int, hidden: Tensor, temb: Tensor, states: Tensor) -> Tensor:
    hidden = block.resnets[number](hidden, temb)
    if getattr(block, "has_cross_attention", False):
        hidden = block.attentions[number](hidden, encoder_hidden_states=states, return_dict=False)[0]
    return hidden


def _up_block(block: Any, hidden: Tensor, skips: list[Tensor], temb: Tensor, states: Tensor, odd: bool) -> Tensor:
    """Returns the output of a whole up block; pops its skip connections from `skips`."""
    count = len(block.resnets)
    taken = tuple(skips[-count:])
    del skips[-count:]
    size = skips[-1].shape[2:] if odd and skips else None
    output: Tensor = block(hidden, taken, temb, upsample_size=size, **_states_for(block, states))
    return output
