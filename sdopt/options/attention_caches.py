"""Outputs of a transformer's attention layers that are kept from step to step, for each branch of guidance its own."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdopt.options.transformer import Given, Watched, Watching
from sdopt.pipelines.parts import Pipeline, attention_layers

Place = tuple["_Layer", int]
"""An attention layer and a branch of guidance."""


def is_cross(layer: nn.Module) -> bool:
    """Returns whether a layer attends to the text alone; one that attends to image and text at once does not."""
    return bool(getattr(layer, "is_cross_attention", False))


class Layers(Watching):
    """The base class of what runs attention layers in some steps only."""

    def __init__(self, pipe: Pipeline, denoiser: Any) -> None:
        for layer in attention_layers(denoiser):
            layer.forward = _Layer(self, layer)
        super().__init__(pipe, denoiser)

    def _forget(self) -> None:
        self._kept: dict[Place, Any] = {}
        self._samples = 0
        self._steps = 0

    def _predict(self, given: Given) -> Any:
        self._step, self._branch = self._at.next()
        samples = len(given.hidden)
        if samples != self._samples:  # a callback may leave out a part of the batch
            self._forget()
            self._samples = samples
        self._steps = 0
        if self._on:
            self._steps = int(self._pipe.num_timesteps)
        self._begin_call()
        prediction = self._whole(given)
        self._count_call()
        return prediction

    def _begin_call(self) -> None:
        """Decides what layers do in a call."""

    def _count_call(self) -> None:
        """Counts a call by what its layers did."""

    def run(self, layer: "_Layer", given: Given) -> Any:
        """Runs a layer, or returns what stands for its output."""
        raise NotImplementedError


class _Layer(Watched):
    """The forward of an attention layer, which its watcher calls or leaves out."""

    several = False
    dtype = torch.float32

    def __init__(self, watcher: Layers, layer: nn.Module) -> None:
        super().__init__(watcher, layer)
        self.cross = is_cross(layer)


class Broadcasts(Layers):
    """Reuses the outputs of attention layers for some steps.

    Pyramid attention broadcast (Zhao et al. 2024, https://arxiv.org/abs/2408.12588), in the steps in which diffusers'
    hooks do it. These keep one output for both branches where each has a call of its own.

    Attributes:
        computed: number of runs of a layer since `begin`, by whether it attends to the text alone.
        reused: number of outputs used again, in the same way.
    """

    def __init__(self, pipe: Pipeline, denoiser: Any, chosen: Any) -> None:
        self._chosen = chosen
        super().__init__(pipe, denoiser)

    def begin(self) -> None:
        """Resets the state and the counts: the next call is in the first step of an image."""
        super().begin()
        self.computed: Counter[bool] = Counter()
        self.reused: Counter[bool] = Counter()

    def _begin_call(self) -> None:
        self._reused_before = self.reused.total()

    def _count_call(self) -> None:
        reuses = self.reused.total() > self._reused_before
        self.calls["part" if reuses else "whole"] += 1

    def run(self, layer: _Layer, given: Given) -> Any:
        """Runs a layer and keeps its output, or returns the one that it kept."""
        place = layer, self._branch
        if place in self._kept and self._reuses(layer.cross):
            self.reused[layer.cross] += 1
            return self._kept[place]
        output = layer.forward(*given.args, **given.others)
        self.computed[layer.cross] += 1
        if self._on:
            self._kept[place] = output
        return output

    def _reuses(self, cross: bool) -> bool:
        every = self._chosen.cross if cross else self._chosen.spatial
        if every is None or not self._steps:
            return False
        done = self._step / self._steps
        if not self._chosen.start < done < self._chosen.stop:
            return False
        return bool(self._step % every)


class Expansions(Layers):
    """Expands the outputs of attention layers in a Taylor series over the steps, for each branch from its own.

    TaylorSeer (Liu et al. 2025, https://arxiv.org/abs/2503.06923): a step that runs the layers gives the differences to
    the last such step, and each later step adds them up. As diffusers' hooks do, which need pipelines that name the
    branch of each call.
    """

    def __init__(self, pipe: Pipeline, denoiser: Any, chosen: Any) -> None:
        self._chosen = chosen
        self._runs = True
        super().__init__(pipe, denoiser)

    def _begin_call(self) -> None:
        self._runs = True
        branches = {branch for _, branch in self._kept}
        if self._branch in branches and self._step < self._steps:
            runs = self._chosen.runs(self._steps)
            self._runs = runs[self._step]

    def _count_call(self) -> None:
        self.calls["whole" if self._runs else "expanded"] += 1

    def run(self, layer: _Layer, given: Given) -> Any:
        """Runs a layer and notes how its output changes, or returns what that makes of it."""
        place = (layer, self._branch)
        if not self._runs:
            since, factors = self._kept[place]
            expanded = []
            for orders in factors:
                output = _series(orders, self._step - since)
                expanded.append(output.to(layer.dtype))
            if layer.several:
                return tuple(expanded)
            return expanded[0]
        output = layer.forward(*given.args, **given.others)
        if self._on:
            layer.several = isinstance(output, tuple)
            outputs = output if layer.several else [output]
            layer.dtype = outputs[0].dtype
            self._kept[place] = (self._step, self._factors(place, outputs))
        return output

    def _factors(self, place: Place, outputs: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns for each output of a layer itself, and its differences up to the chosen order."""
        nothing: list[list[Tensor]] = [[] for _ in outputs]
        since, before = self._kept.get(place, (0, nothing))
        factors = []
        for output, earlier in zip(outputs, before, strict=True):
            difference = output.float()
            orders = [difference]
            for factor in earlier[: self._chosen.order]:
                difference = (difference - factor) / (self._step - since)
                orders.append(difference)
            factors.append(orders)
        return factors


def _series(factors: Sequence[Tensor], ahead: int) -> Tensor:
    """Returns a Taylor series from its differences, so many steps ahead."""
    total = torch.zeros_like(factors[0])
    for order, factor in enumerate(factors):
        weight = ahead**order / math.factorial(order)
        total = total + factor * weight
    return total
