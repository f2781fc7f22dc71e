"""caching: skips computations of the denoiser, or reuses those of an earlier step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import ceil
from threading import get_ident
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.polynomial.chebyshev import chebvander
from pydantic import Field
from typing_extensions import override

from sdopt.contract import LATENCY
from sdopt.errors import UsageError
from sdopt.options import (
    Context,
    Contract,
    Finding,
    Optimization,
    Proof,
    Stage,
    Trace,
)
from sdopt.options.assumptions import (
    counted_steps,
    one_call_a_step,
    own_blocks,
    two_halves,
    unchanged_layers,
    ungated_blocks,
)
from sdopt.options.compiler import (
    Aot,
    CudaGraphs,
    Inductor,
    OnnxRuntime,
    OpenVino,
    Regional,
    TorchScript,
)
from sdopt.options.compiler.deepspeed import Attention as DeepSpeedAttention
from sdopt.options.conflicts import compiles, latent_side, unguided, untold
from sdopt.options.declarations import Excludes, Extra
from sdopt.pipelines.family import family_of_pipe
from sdopt.pipelines.loading import (
    denoiser_config,
    family_of,
    guidance_of,
    heads_by_level,
    part_config,
)
from sdopt.pipelines.parts import (
    STEPS,
    Pipeline,
    attention_layers,
    denoiser_name,
    denoiser_of,
    unwrapped,
)
from sdopt.schema import EveryNth, Factor, PositiveShare, Seed, Share, ShareBelowOne

if TYPE_CHECKING:
    from sdopt.options.skipping import Skipping
    from sdopt.options.transformer import Watching


_REPLACED_LAYERS = Excludes(
    "attention",
    "reuses outputs of diffusers' layers, which attention=deepspeed replaces: choose another",
    (DeepSpeedAttention,),
)
"""What those exclude that hook into diffusers' attention layers."""


class WholeSteps(Optimization):
    """Runs the whole denoiser on all samples in every step."""

    stage = Stage.CACHING

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        def proof(trace: Trace) -> Finding:
            calls, fewest = (
                trace.denoiser.calls,
                min(trace.denoiser.ran.values(), default=None),
            )
            whole = STEPS not in unwrapped(denoiser_of(pipe)).__dict__ and (
                fewest is None or fewest >= calls
            )
            return Finding(
                whole,
                "every step runs every layer",
                {"calls": calls, "fewest_calls_of_a_layer": fewest},
            )

        return proof


class Caching(Optimization):
    """The base class of options that make a step cheaper than the whole denoiser."""

    stage = Stage.CACHING
    saves_operations: ClassVar[bool | None] = True
    contract = Contract.LOSSY
    claims = LATENCY
    compilers: ClassVar[Mapping[str, type[Optimization]]] = {}
    """Compatible compilers, by their names in the group; they compile only code that does not depend on the step."""
    leaves_calls_whole = False
    """Whether a call of a transformer runs all of it or none, so that compilers may have it."""
    batch_sizes: ClassVar[int] = 1
    """Number of batch sizes of the denoiser in one image."""
    idle: ClassVar[str]
    """Why none of `steps` steps is cheaper than the whole denoiser, where `skips` says so."""
    asks_for: ClassVar[tuple[str, ...]] = ()
    """What it asks diffusers' pipeline for, which not every one says."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        config, is_unet = denoiser_config(ctx.model), family_of(ctx.model).is_unet
        reasons = untold(ctx, *self.asks_for)
        if (
            is_unet
            and config
            and config.get("_class_name", "UNet2DConditionModel")
            != "UNet2DConditionModel"
        ):
            reasons.append(
                f"needs a UNet2DConditionModel as denoiser, not a {config['_class_name']}"
            )
        compilers = self.compilers if is_unet or self.leaves_calls_whole else {}
        if compiles(ctx, *compilers.values()):
            others = f"eager, {', '.join(compilers)}" if compilers else "eager"
            if is_unet and not compilers:
                others += ", or caching=deepcache"
            reasons.append(
                f"changes from step to step, which this compiler cannot capture: choose compiler={others}"
            )
        return reasons

    def skips(self, steps: int) -> bool:
        """Returns whether one of `steps` steps is cheaper than the whole denoiser."""
        return True

    @property
    def fewest(self) -> int:
        """The fewest steps of which one is cheaper; 2 if no number is enough."""
        return next((steps for steps in range(2, 1000) if self.skips(steps)), 2)

    @property
    @override
    def traced_calls(self) -> int:
        return self.fewest

    @override
    def ineffective(self, ctx: Context) -> list[str]:
        if self.skips(ctx.steps):
            return []
        fewest, why = self.fewest, self.idle.format(steps=ctx.steps, self=self)
        way = (
            f": set workload.steps to {ceil(fewest / ctx.task.strength)} or more"
            if self.skips(fewest)
            else ""
        )
        return [f"{why}{way}"]

    @override
    @contextmanager
    def context(self, pipe: Pipeline) -> Iterator[None]:
        state = unwrapped(denoiser_of(pipe)).__dict__.get(STEPS)
        if state is None:
            yield
            return
        state.begin()  # the next step is the first of an image
        try:
            yield
        finally:
            state.end()  # who calls the denoiser now, as another pipeline may, begins nothing


class SkippedLayers(Caching):
    """The base class of options under which a step runs the whole UNet, or some of its layers, or none."""

    compilers: ClassVar[Mapping[str, type[Optimization]]] = {
        "inductor": Inductor,
        "regional": Regional,
        "trace": TorchScript,
        "aot": Aot,
        "cuda_graphs": CudaGraphs,
        "openvino": OpenVino,
        "onnxruntime": OnnxRuntime,
    }
    idle: ClassVar[str] = "the first step skips nothing"
    begins = True
    """Whether every step runs the UNet's first layer."""
    others: ClassVar[str]
    """What the steps do that do not run the whole UNet."""

    @override
    def skips(self, steps: int) -> bool:
        return steps > 1

    def _watching(self, pipe: Pipeline, denoiser: Any) -> "Watching":
        """Returns the function that replaces a transformer's forward."""
        raise NotImplementedError

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        unet = denoiser_of(pipe)
        if denoiser_name(pipe) != "unet":
            return on_transformer(pipe, self._watching(pipe, unet), self.others)
        skipping = unet.__dict__[STEPS] = self._skipping(pipe, unet)
        unet.forward = skipping

        def proof(trace: Trace) -> Finding:
            calls, ran, facts = (
                trace.denoiser.calls,
                trace.denoiser.ran,
                dict(skipping.calls),
            )
            whole = facts.setdefault("whole", 0)
            engaged = whole < sum(facts.values()) == calls
            if (
                ran
            ):  # each layer was recorded: the middle layers ran only on whole steps
                facts["runs_of_the_first_layer"], facts["runs_of_the_middle"] = (
                    ran["conv_in"],
                    min(ran.values()),
                )
                inner = whole + facts.get("part", 0)
                # memory=sequential_guidance runs each layer twice.
                calls_each = 1 if self.begins or ran["conv_in"] == inner else 2
                engaged = engaged and min(ran.values()) == calls_each * inner
                engaged = engaged and ran["conv_in"] == (
                    calls if self.begins else calls_each * inner
                )
            return Finding(
                engaged,
                f"of {calls} traced steps {whole} ran whole, {calls - whole} {self.others}",
                facts,
            )

        return proof

    def _skipping(self, pipe: Pipeline, unet: Any) -> "Skipping":
        """Returns the function that replaces the UNet's forward."""
        raise NotImplementedError


@dataclass(frozen=True)
class DeepCaching(SkippedLayers):
    """Runs the whole UNet on every `interval`-th step, and only its outer layers on the others (DeepCache)."""

    assumes = (own_blocks, one_call_a_step)
    keeps_structure = True
    unet_only = (
        "no skip connection leads around its inner blocks: choose caching=first_block"
    )
    others = "only the outer layers"

    interval: EveryNth = 3
    """The whole UNet runs once per this number of steps."""
    branch: Annotated[int, Field(ge=0, le=1000)] = 0
    """The layers that run on the other steps, numbered as in the paper: 0 is only the outermost layer; each increment
    adds a layer on the way down and one on the way up."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons, config = super().conflicts(ctx), part_config(ctx.model, "unet")
        if config is not None:
            # The innermost place has only the mid block behind it.
            last = len(_branches(config)) - (
                2 if config.get("mid_block_type", "") is None else 1
            )
            if self.branch > last:
                return [
                    *reasons,
                    f"caching.branch={self.branch}: this model has the branches 0 to {last}",
                ]
            reasons += _uncut(config, _branches(config)[self.branch][0])
        return reasons

    def runs(self, steps: int) -> list[bool]:
        """Returns for each of `steps` steps whether the whole UNet runs."""
        return [step % self.interval == 0 for step in range(steps)]

    @override
    def _skipping(self, pipe: Pipeline, unet: Any) -> "Skipping":
        from sdopt.options.skipping import DeepCache

        return DeepCache(unet, self.interval, *_branches(unet.config)[self.branch])


@dataclass(frozen=True)
class FirstBlockCaching(SkippedLayers):
    """Runs the inner layers only if what the first layer adds has changed, and the outermost ones in each step.

    How many steps that are depends on the image: one that changes much skips nothing, and `not_engaged` says so.
    """

    assumes = (own_blocks, two_halves)
    keeps_structure = True
    saves_operations = None
    others = "only the outermost layers, at least for some images"

    threshold: Annotated[float, Field(gt=0, le=10)] = 0.2
    """The change of what the first layer adds, relative to its mean, from which the inner layers run again."""

    @property
    @override
    def traced_calls(self) -> int:
        return 20

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx) + _uncut(
            part_config(ctx.model, "unet") or {}, 0
        )
        images = ctx.workload.batch_size * ctx.workload.images_per_prompt
        if images > 1 and compiles(ctx):
            several = f"each of {images} images decides for itself, and a graph has a fixed batch"
            reasons.append(
                f"{several}: choose compiler=eager, or workload.batch_size=1"
            )
        return reasons

    @override
    def _skipping(self, pipe: Pipeline, unet: Any) -> "Skipping":
        from sdopt.options.skipping import FirstBlock

        return FirstBlock(pipe, unet, self.threshold)

    @override
    def _watching(self, pipe: Pipeline, denoiser: Any) -> "Watching":
        from sdopt.options.block_caches import FirstBlockByBranch

        return FirstBlockByBranch(pipe, denoiser, self.threshold)


@dataclass(frozen=True)
class SpectralForecast(SkippedLayers):
    """Runs no layer on some steps, and forecasts the prediction by Chebyshev polynomials over the steps (Spectrum).

    The steps that run lie closer at the start: `warmup` steps first, then one in `window`, which grows by `growth` with
    each, and all steps from `stop` on.
    """

    assumes = (counted_steps, one_call_a_step)
    begins = False
    leaves_calls_whole = True
    others = "were forecast"
    idle = "all of {steps} steps run, and none is forecast"
    asks_for = ("num_timesteps",)

    warmup: EveryNth = 4
    """Number of steps at the start that run."""
    window: Annotated[float, Field(ge=2, le=1000)] = 2.0
    """After them, one step runs per this number of steps, rounded down."""
    growth: Factor = 0.5
    """What is added to `window` after each such step."""
    stop: PositiveShare = 0.9
    """Share of the steps after which all run."""
    degree: Annotated[int, Field(ge=1, le=10)] = 3
    """Degree of the polynomials."""
    ridge: Annotated[float, Field(ge=1e-6, le=100)] = 0.1
    """Weight of the squared coefficients in the fit."""
    blend: Share = 0.3
    """Share of the polynomials in the forecast; the rest is a line through the last two steps that ran."""

    def runs(self, steps: int) -> list[bool]:
        """Returns for each of `steps` steps whether it runs."""
        computed, window, since = [], self.window, 0
        for step in range(steps):
            within = self.warmup <= step < self.stop * steps
            since = since + 1 if within else 0
            computed.append(not within or since % int(window) == 0)
            if computed[-1] and within:
                window, since = window + self.growth, 0
        return computed

    def weights(self, known: Sequence[int], step: int, steps: int) -> list[float]:
        """Returns the weights of the predictions of some steps in that of a later one.

        Args:
            known: the steps that ran, in their order; at least two.
            step: the step to forecast.
            steps: the number of steps of the image.
        """
        at = np.array([*known, step]) / max(steps - 1, 1) * 2 - 1
        *basis, target = chebvander(at, self.degree)
        design = np.array(basis)
        fit = design @ np.linalg.solve(
            design.T @ design + self.ridge * np.eye(self.degree + 1), target
        )
        line = np.zeros(len(known))
        ahead = (step - known[-1]) / (known[-1] - known[-2])
        line[-2:] = -ahead, 1 + ahead
        return [float(weight) for weight in self.blend * fit + (1 - self.blend) * line]

    @override
    def skips(self, steps: int) -> bool:
        return not all(self.runs(steps))

    @override
    def _skipping(self, pipe: Pipeline, unet: Any) -> "Skipping":
        from sdopt.options.skipping import Spectrum

        return Spectrum(pipe, unet, self)

    @override
    def _watching(self, pipe: Pipeline, denoiser: Any) -> "Watching":
        from sdopt.options.transformer import Forecasts

        return Forecasts(pipe, denoiser, self)


@dataclass(frozen=True)
class PyramidAttention(Caching):
    """Reuses the outputs of attention layers from earlier steps (pyramid attention broadcast)."""

    assumes = (counted_steps, one_call_a_step)
    idle = "no step of {steps} reuses an output between the shares {self.start} and {self.stop}"
    asks_for = ("num_timesteps",)
    excludes = (_REPLACED_LAYERS,)

    spatial: EveryNth | None = 2
    """Self-attention is computed once per this number of steps; null computes it on every step."""
    cross: EveryNth | None = 4
    """Cross-attention to the text is computed once per this number of steps; null computes it on every step."""
    start: ShareBelowOne = 0.2
    """Share of the steps, at the start, that compute all attention."""
    stop: PositiveShare = 0.9
    """Share of the steps after which all attention is computed again, until the end."""

    @override
    def skips(self, steps: int) -> bool:
        """Returns whether each kind of attention that is to be reused is so in one of `steps` steps."""
        chosen = [every for every in (self.spatial, self.cross) if every is not None]
        between = [i for i in range(1, steps) if self.start < i / steps < self.stop]
        for every in chosen:
            if not any(step % every for step in between):
                return False
        return bool(chosen)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx)
        if self.spatial is None and self.cross is None:
            reasons.append(
                "caching.spatial and caching.cross are both null, so that nothing is reused: set one"
            )
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        if denoiser_name(pipe) != "unet":
            return self._apply_to_transformer(pipe)
        from diffusers import (
            PyramidAttentionBroadcastConfig,
            apply_pyramid_attention_broadcast,
        )

        unet = denoiser_of(pipe)
        state = unet.__dict__[STEPS] = _Broadcast(pipe, unet)
        # The range is in the unit of the callback. Shares of the steps do not depend on the scheduler's timesteps.
        between = (self.start, self.stop)
        chosen = PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=self.spatial,
            cross_attention_block_skip_range=self.cross,
            spatial_attention_timestep_skip_range=between,
            cross_attention_timestep_skip_range=between,
            current_timestep_callback=state.share,
        )
        apply_pyramid_attention_broadcast(unet, chosen)

        def proof(trace: Trace) -> Finding:
            # The last module of every attention layer, independent of the attention implementation.
            ran = {kind: trace.denoiser.runs_of(f"{kind}.to_out.1") for kind in _KINDS}
            layers = sum(
                name.endswith("attn1.to_out.1") for name, _ in unet.named_modules()
            )
            whole = layers * trace.denoiser.calls
            chosen = [
                kind
                for kind, every in zip(_KINDS, (self.spatial, self.cross), strict=True)
                if every is not None
            ]
            engaged = trace.denoiser.calls > 0 and all(
                ran[kind] < whole for kind in chosen
            )
            summary = f"self-attention computed {ran['attn1']}, cross-attention {ran['attn2']} of {whole} times"
            return Finding(
                engaged,
                summary,
                {"self_attention": ran["attn1"], "cross_attention": ran["attn2"]},
            )

        return proof

    def _apply_to_transformer(self, pipe: Pipeline) -> Proof:
        """Applies it to a transformer, whose layers may attend to image and text at once, and count as spatial then."""
        from sdopt.options.attention_caches import Broadcasts, is_cross

        denoiser = denoiser_of(pipe)
        layers = {layer: is_cross(layer) for layer in attention_layers(denoiser)}
        names = {
            name: layers[layer]
            for name, layer in denoiser.named_modules()
            if layer in layers
        }
        watching = denoiser.__dict__[STEPS] = Broadcasts(pipe, denoiser, self)
        denoiser.forward = watching

        def proof(trace: Trace) -> Finding:
            ran = {False: 0, True: 0}
            for name, cross in names.items():
                ran[cross] += max(trace.denoiser.runs_within(name), default=0)
            every = {False: self.spatial, True: self.cross}
            chosen = [kind for kind in set(names.values()) if every[kind] is not None]
            computed, reused = watching.computed, watching.reused
            is_told = trace.denoiser.calls == watching.calls.total() and all(
                ran[kind] == computed[kind] for kind in ran
            )
            engaged = (
                is_told and bool(chosen) and all(reused[kind] > 0 for kind in chosen)
            )
            total = {kind: computed[kind] + reused[kind] for kind in ran}
            summary = f"self-attention computed {ran[False]} of {total[False]} times"
            if total[True]:
                summary += f", cross-attention {ran[True]} of {total[True]}"
            return Finding(
                engaged,
                summary,
                {"self_attention": ran[False], "cross_attention": ran[True]},
            )

        return proof


_KINDS = ("attn1", "attn2")
"""diffusers' names of self-attention and of cross-attention in a transformer block."""


class _Broadcast:
    """Counts the steps for the hooks of pyramid attention broadcast, and resets these hooks between images."""

    def __init__(self, pipe: Pipeline, unet: Any) -> None:
        self._pipe, self._unet = pipe, unet
        self._step, self._on, self._batch, self._thread = -1, False, 0, 0
        unet.register_forward_pre_hook(self._next)

    def begin(self) -> None:
        self._step, self._on, self._thread = -1, True, get_ident()
        self._forget()

    def _forget(self) -> None:
        from diffusers.hooks import HookRegistry

        HookRegistry.check_if_exists_or_initialize(self._unet).reset_stateful_hooks()

    def end(self) -> None:
        self._on = False

    def share(self) -> float:
        """Returns the share of the steps that is done, or -1 outside of a call: no output is reused there."""
        return self._step / int(self._pipe.num_timesteps) if self._on else -1.0

    def _next(self, _unet: Any, inputs: tuple[Any, ...]) -> None:
        if self._on and self._thread != get_ident():
            other = "another pipeline runs this UNet in another thread, and diffusers' hooks would mix their steps"
            raise UsageError(
                f"caching=pyramid_attention: {other}: call one after the other"
            )
        self._step += 1
        if (
            len(inputs[0]) != self._batch
        ):  # a callback may leave out a part of the batch
            self._batch = len(inputs[0])
            self._forget()


@dataclass(frozen=True)
class TaylorSeer(Caching):
    """Runs attention layers in some steps, and expands their outputs in a Taylor series over the steps in the others.

    As TaylorSeer of diffusers does, and for each branch of guidance on its own.
    """

    assumes = (
        counted_steps,
        one_call_a_step,
        unchanged_layers,
    )
    keeps_structure = True
    idle = "all of {steps} steps run every layer"
    asks_for = ("num_timesteps",)
    excludes = (_REPLACED_LAYERS,)

    interval: EveryNth = 3
    """After the steps at the start, the layers run once per this number of steps."""
    warmup: EveryNth = 3
    """Number of steps at the start in which they run."""
    order: Annotated[int, Field(ge=1, le=5)] = 1
    """Order of the series: 1 is a line through the last two steps in which they ran."""

    def runs(self, steps: int) -> list[bool]:
        """Returns for each of `steps` steps whether the layers run."""
        return [
            step < self.warmup or (step - self.warmup - 1) % self.interval == 0
            for step in range(steps)
        ]

    @override
    def skips(self, steps: int) -> bool:
        return not all(self.runs(steps))

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.attention_caches import Expansions

        denoiser = denoiser_of(pipe)
        layers = set(attention_layers(denoiser))
        names = [name for name, layer in denoiser.named_modules() if layer in layers]
        watching = denoiser.__dict__[STEPS] = Expansions(pipe, denoiser, self)
        denoiser.forward = watching

        def proof(trace: Trace) -> Finding:
            calls, facts = trace.denoiser.calls, dict(watching.calls)
            runs_of_each = map(trace.denoiser.runs_within, names)
            most = max(chain.from_iterable(runs_of_each), default=0)
            whole = facts.setdefault("whole", 0)
            engaged = most == whole < calls == watching.calls.total()
            summary = f"of {calls} traced calls {whole} ran the attention layers, and {calls - whole} expanded them"
            return Finding(engaged, summary, facts | {"runs_of_a_layer": most})

        return proof


@dataclass(frozen=True)
class GuidanceInterval(Caching):
    """Applies guidance only between two shares of the steps; other steps run the denoiser on half of the samples."""

    assumes = (two_halves,)
    compilers: ClassVar[Mapping[str, type[Optimization]]] = {"inductor": Inductor}
    batch_sizes = 2
    idle = "all of {steps} steps lie between caching.start={self.start} and caching.stop={self.stop}"
    asks_for = ("num_timesteps",)

    start: ShareBelowOne = 0.1
    """Share of the steps before guidance begins."""
    stop: PositiveShare = 0.8
    """Share of the steps at which guidance ends."""

    def guides(self, step: int, steps: int) -> bool:
        """Returns whether a step, counted from 0, is guided."""
        return self.start <= step / steps < self.stop

    @override
    def skips(self, steps: int) -> bool:
        return not all(self.guides(step, steps) for step in range(steps))

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx) + unguided(ctx, "guidance to skip")
        if guidance_of(ctx.model).form == "batched":
            reasons += untold(ctx, "do_classifier_free_guidance")
        if self.start >= self.stop:
            reasons.append(
                f"caching.start={self.start} must be less than caching.stop={self.stop}"
            )
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.skipping import HalfBatches

        denoiser = denoiser_of(pipe)
        if family_of_pipe(pipe).guidance.form == "sequential":
            from sdopt.options.transformer import SecondCalls

            return on_transformer(
                pipe, SecondCalls(pipe, denoiser, self.guides), "without guidance"
            )
        halved = denoiser.__dict__[STEPS] = HalfBatches(pipe, denoiser.forward, self)
        denoiser.forward = halved

        def proof(trace: Trace) -> Finding:
            batches = trace.denoiser.samples
            engaged = halved.unguided > 0 and (
                not batches or 2 * batches[0] == batches[-1] or halved.guided == 0
            )
            summary = f"{halved.guided} steps with guidance, {halved.unguided} without"
            facts = {
                "guided": halved.guided,
                "unguided": halved.unguided,
                "batches": batches,
            }
            return Finding(
                engaged,
                f"{summary}; batches of {' and '.join(map(str, batches)) or 'a graph'}",
                facts,
            )

        return proof


_LARGEST_RATIO = 0.75
"""tomesd merges into one of four tokens."""


@dataclass(frozen=True)
class TokenMerging(Caching):
    """Merges similar tokens before each self-attention, and unmerges them afterwards (ToMe, package tomesd)."""

    needs = (Extra("tome", ("tomesd",)),)
    assumes = (ungated_blocks, unchanged_layers)
    unet_only = "tomesd merges tokens in the blocks of a UNet alone"

    ratio: Annotated[float, Field(gt=0, le=_LARGEST_RATIO)] = 0.5
    """Share of the tokens to merge into others."""
    max_downsample: Literal[1, 2, 4, 8] = 1
    """Largest downsampling factor of the layers that merge tokens; 1 is only the layers at full latent size."""
    random: bool = True
    """Whether the tokens to merge into are chosen at random; never without guidance or with sequential guidance."""
    seed: Seed = 0
    """Seed of that choice, which is the same in each pipeline call."""

    @override
    def lacking(self, ctx: Context) -> list[str]:
        if (
            first := 2 ** min(heads_by_level(ctx.model), default=0)
        ) <= self.max_downsample:
            return []
        merges = f"merges no token: this model has attention only from a downsampling by {first} on"
        return [f"{merges}: set caching.max_downsample={first}"]

    @override
    def ineffective(self, ctx: Context) -> list[str]:
        side = latent_side(ctx)
        levels = [
            level
            for level in heads_by_level(ctx.model)
            if 2**level <= self.max_downsample
        ]
        tokens = max(((side // 2**level) ** 2 for level in levels), default=0)
        if tokens == 0 or int(tokens * self.ratio):
            return super().ineffective(ctx)
        least = 1.01 / tokens
        way = "set a larger workload.size"
        if least <= _LARGEST_RATIO:
            way = f"set caching.ratio to {least:.2g} or more"
        return [f"merges none of {tokens} tokens: {way}"]

    def left_of(self, tokens: int, level: int) -> int:
        """Returns the number of tokens after merging, in a layer whose latents were halved `level` times."""
        return (
            tokens - int(tokens * self.ratio)
            if 2**level <= self.max_downsample
            else tokens
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import tomesd

        unet = denoiser_of(pipe)
        tomesd.apply_patch(
            unet,
            ratio=self.ratio,
            max_downsample=self.max_downsample,
            use_rand=self.random,
        )
        unet.__dict__[STEPS] = _Seeded(unet, self.seed)
        if self.random:
            _choose_by_guidance(pipe)

        def proof(trace: Trace) -> Finding:
            merged = trace.denoiser.operators["aten::scatter_reduce"]
            summary = f"tokens merged in {merged} attention layers of {trace.denoiser.calls} calls"
            return Finding(
                merged >= trace.denoiser.calls > 0, summary, {"merged": merged}
            )

        return proof


def _choose_by_guidance(pipe: Pipeline) -> None:
    """Lets tomesd choose at random where both branches are in a batch, whatever number of images a call makes.

    By itself it asks whether the batch is even: without guidance two images would be merged otherwise than one.
    """
    from sdopt.options.skipping import EachHalf

    unet = denoiser_of(pipe)
    merging = unet._tome_info
    halved = isinstance(vars(unet).get("forward"), EachHalf)

    def choose(*_: Any) -> None:
        guided = getattr(pipe, "do_classifier_free_guidance", True)
        merging["args"]["use_rand"] = guided and not halved

    merging["hooks"].append(unet.register_forward_pre_hook(choose))


class _Seeded:
    """Gives tomesd, which would otherwise continue from PyTorch's random state, the same random numbers per image."""

    def __init__(self, unet: Any, seed: int) -> None:
        self._unet, self._seed = unet, seed
        self.begin()

    def begin(self) -> None:
        import torch

        device = self._unet.device
        on = "cpu" if device.type == "meta" else device
        self._unet._tome_info["args"]["generator"] = torch.Generator(on).manual_seed(
            self._seed
        )

    def end(self) -> None:
        """Merging needs no end."""


def on_transformer(pipe: Pipeline, watching: "Watching", others: str) -> Proof:
    """Replaces a transformer's forward; returns the proof that some calls ran fewer of its blocks, by what ran."""
    from sdopt.options.transformer import blocks_of

    denoiser = denoiser_of(pipe)
    denoiser.__dict__[STEPS] = watching
    denoiser.forward = watching
    last = blocks_of(denoiser)[-1][0]

    def proof(trace: Trace) -> Finding:
        traced, facts = trace.denoiser.calls, dict(watching.calls)
        calls = watching.calls.total()
        cheaper = sum(
            facts.get(kind, 0) for kind in ("outer", "part", "forecast", "left out")
        )
        runs = trace.denoiser.runs_within(last)
        facts["runs_of_the_last_block"] = min(runs, default=0)
        left_out = sum(facts.get(kind, 0) for kind in ("outer", "forecast", "left out"))
        # memory=sequential_guidance makes two calls of one.
        engaged = cheaper > 0 and calls in (traced, 2 * traced)
        compiled = watching.is_compiled or trace.is_compiled(denoiser_of(pipe))
        unseen = compiled and not runs  # a graph shows no blocks
        engaged = engaged and (
            unseen or facts["runs_of_the_last_block"] == calls - left_out
        )
        whole = calls - cheaper
        return Finding(
            engaged,
            f"of {calls} traced calls {whole} ran whole, {cheaper} {others}",
            facts,
        )

    return proof


def _uncut(config: Mapping[str, Any], block: int) -> list[str]:
    """Returns the conflict, if any, of running only some layers of a block on the way down, and of the one opposite."""
    kinds = [kind for key, place in (("down_block_types", block), ("up_block_types", -1 - block))
             if (kind := config.get(key, _CUT)[place]) not in _CUT]  # fmt: skip
    return [f"runs layers of {kind} blocks one by one, whose code it does not know: choose caching=spectrum or none"
            for kind in kinds]  # fmt: skip


_CUT = ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
"""The kinds of blocks whose layers can run one by one."""


def _branches(config: Any) -> list[tuple[int, int]]:
    """Returns (block, layer) of each place at which a UNet can be cut, starting with the outermost."""
    blocks, layers = len(config["down_block_types"]), config["layers_per_block"]
    counts = layers if isinstance(layers, list | tuple) else [layers] * blocks
    places = []
    for block, count in enumerate(counts):
        places += [(block, layer) for layer in range(count + 1)]
    return places
