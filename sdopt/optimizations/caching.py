"""caching: what the denoiser leaves out or takes over from an earlier step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from typing_extensions import override

from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Contract, Finding, Optimization, Proof, Stage
from sdopt.optimizations.compiler import Aot, CudaGraphs, Inductor, OnnxRuntime, OpenVino, TorchScript
from sdopt.optimizations.conflicts import compiles, missing_packages
from sdopt.pipelines.loading import part_config
from sdopt.pipelines.parts import STEPS, denoiser_of, unwrapped
from sdopt.schema import SEEDS, bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class State(Protocol):
    """What an option keeps from step to step."""

    def begin(self) -> None:
        """Forgets everything: the next step is the first one of an image."""


@dataclass(frozen=True)
class WholeSteps(Optimization):
    """Every step runs the whole denoiser on all samples."""

    stage: ClassVar[Stage] = Stage.CACHING

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        def proof(trace: Trace) -> Finding:
            calls, fewest = trace.denoiser.calls, min(trace.denoiser.ran.values(), default=None)
            whole = STEPS not in unwrapped(denoiser_of(pipe)).__dict__ and (fewest is None or fewest >= calls)
            return Finding(whole, "every step runs every layer", {"calls": calls, "fewest_calls_of_a_layer": fewest})

        return proof


@dataclass(frozen=True)
class Caching(Optimization):
    """The base class of options that make a step cheaper than the whole denoiser."""

    stage: ClassVar[Stage] = Stage.CACHING
    saves_operations: ClassVar[bool] = True
    compilers: ClassVar[Mapping[str, type[Optimization]]] = {}
    """Those that take only what does not depend on the step, by their names in the group."""

    @property
    @override
    def contract(self) -> Contract:
        return Contract.LOSSY

    @property
    @override
    def claims(self) -> frozenset[str]:
        return frozenset({"latency"})

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        config = part_config(ctx.model, "unet")
        found = []
        if config is not None and config.get("_class_name", "UNet2DConditionModel") != "UNet2DConditionModel":
            found.append(f"needs a UNet2DConditionModel as denoiser, not a {config['_class_name']}")
        if compiles(ctx, *self.compilers.values()):
            others = f"eager, {', '.join(self.compilers)}" if self.compilers else "eager, or caching=deepcache"
            found.append(f"decides at each step what runs, which this compiler would fix: choose compiler={others}")
        return found

    @override
    @contextmanager
    def context(self, pipe: "DiffusionPipeline") -> Iterator[None]:
        state: State | None = unwrapped(denoiser_of(pipe)).__dict__.get(STEPS)
        if state is not None:
            state.begin()
        yield


@dataclass(frozen=True)
class DeepCaching(Caching):
    """Runs the whole UNet on every `interval`-th step, and its outermost layers alone between them (DeepCache)."""

    compilers: ClassVar[Mapping[str, type[Optimization]]] = {
        "inductor": Inductor,
        "trace": TorchScript,
        "aot": Aot,
        "cuda_graphs": CudaGraphs,
        "openvino": OpenVino,
        "onnxruntime": OnnxRuntime,
    }

    interval: int = bounded(3, ge=2, le=1000)
    """Every so many steps the whole UNet runs."""
    branch: int = bounded(0, ge=0, le=1000)
    """Which layers run on the other steps, numbered as in the paper: 0 is the outermost one alone, and each one more
    adds a layer on the way down and one on the way up."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found, config = super().conflicts(ctx), part_config(ctx.model, "unet")
        if config is not None:
            last = len(_branches(config)) - 1
            if self.branch > last:
                found.append(f"caching.branch={self.branch}: this model has the branches 0 to {last}")
        return found

    @override
    def ineffective(self, ctx: Context) -> list[str]:
        return [] if ctx.workload.steps > 1 else ["the first step runs whole: set workload.steps to 2 or more"]

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        # It imports the compiler, which takes seconds that a command of other options need not spend.
        from sdopt.optimizations.deepcache import DeepCache

        unet = denoiser_of(pipe)
        cached = unet.__dict__[STEPS] = DeepCache(unet, self.interval, *_branches(unet.config)[self.branch])
        unet.forward = cached

        def proof(trace: Trace) -> Finding:
            calls, ran = trace.denoiser.calls, trace.denoiser.ran
            facts = {"whole": cached.calls["whole"], "outer": cached.calls["outer"]}
            engaged = facts["outer"] > 0 and sum(facts.values()) == calls
            if ran:  # each layer was seen: those of the middle ran on whole steps only
                facts["runs_of_the_first_layer"], facts["runs_of_the_middle"] = ran["conv_in"], min(ran.values())
                engaged = engaged and min(ran.values()) == facts["whole"] < ran["conv_in"] == calls
            summary = f"of {calls} traced steps {facts['whole']} ran whole, {facts['outer']} the outer layers alone"
            return Finding(engaged, summary, facts)

        return proof


@dataclass(frozen=True)
class PyramidAttention(Caching):
    """Takes the outputs of attention layers over from earlier steps (pyramid attention broadcast)."""

    spatial: int | None = bounded(2, ge=2, le=1000)
    """Self-attention is computed on every so many steps; null computes it on all."""
    cross: int | None = bounded(4, ge=2, le=1000)
    """Attention to the text is computed on every so many steps; null computes it on all."""
    start: float = bounded(0.2, ge=0, lt=1)
    """Share of the steps that compute all attention before anything is taken over."""
    stop: float = bounded(0.9, gt=0, le=1)
    """Share of the steps after which all attention is computed again."""

    @property
    @override
    def traced_calls(self) -> int:
        return next((n for n in range(2, 1000) if self._reuses(n)), 2)

    def _reuses(self, steps: int) -> bool:
        """Returns whether any of so many steps takes an output over."""
        every = [number for number in (self.spatial, self.cross) if number is not None]
        return any(self.start < i / steps < self.stop and any(i % n for n in every) for i in range(1, steps))

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = super().conflicts(ctx)
        if self.spatial is None and self.cross is None:
            found.append("caching.spatial and caching.cross are both null, so that nothing is taken over: set one")
        if getattr(ctx.chosen.get("attention"), "replaces_layers", False):
            found.append("takes outputs of diffusers' layers over, which attention=deepspeed replaces: choose another")
        return found

    @override
    def ineffective(self, ctx: Context) -> list[str]:
        if self._reuses(ctx.workload.steps):
            return []
        between = f"{self.start} and {self.stop}"
        return [f"no step of {ctx.workload.steps} takes anything over between the shares {between}: set more steps"]

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        from diffusers import PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast

        unet = denoiser_of(pipe)
        state = unet.__dict__[STEPS] = _Broadcast(pipe, unet)
        # The range is in the unit of the callback: shares of the steps do not depend on how a scheduler counts.
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
            # The last thing in every attention layer, whatever computes it.
            seen = trace.denoiser.ran.items()
            ran = {kind: sum(n for name, n in seen if name.endswith(f"{kind}.to_out.1")) for kind in _KINDS}
            layers = sum(name.endswith("attn1.to_out.1") for name, _ in unet.named_modules())
            whole = layers * trace.denoiser.calls
            chosen = [kind for kind, every in zip(_KINDS, (self.spatial, self.cross), strict=True) if every is not None]
            engaged = trace.denoiser.calls > 0 and any(ran[kind] < whole for kind in chosen)
            summary = f"self-attention computed {ran['attn1']}, attention to the text {ran['attn2']} of {whole} times"
            return Finding(engaged, summary, {"self_attention": ran["attn1"], "cross_attention": ran["attn2"]})

        return proof


_KINDS = ("attn1", "attn2")
"""What diffusers calls a transformer block's attention to itself and to the text."""


class _Broadcast:
    """Counts the steps for the hooks of pyramid attention broadcast, and makes them forget between images."""

    def __init__(self, pipe: "DiffusionPipeline", unet: Any) -> None:
        self._pipe, self._unet = pipe, unet
        self._step = -1
        unet.register_forward_pre_hook(self._next)

    def begin(self) -> None:
        from diffusers.hooks import HookRegistry

        self._step = -1
        HookRegistry.check_if_exists_or_initialize(self._unet).reset_stateful_hooks()

    def share(self) -> float:
        """Returns how much of the steps is done."""
        return self._step / int(self._pipe.num_timesteps)

    def _next(self, *_: Any) -> None:
        self._step += 1


@dataclass(frozen=True)
class GuidanceInterval(Caching):
    """Guides between two shares of the steps only; the others run the denoiser on half of the samples."""

    compilers: ClassVar[Mapping[str, type[Optimization]]] = {"inductor": Inductor}

    start: float = bounded(0.1, ge=0, lt=1)
    """Share of the steps before guidance begins."""
    stop: float = bounded(0.8, gt=0, le=1)
    """Share of the steps after which it has ended."""

    def guides(self, step: int, steps: int) -> bool:
        """Returns whether a step, counted from 0, is guided."""
        return self.start <= step / steps < self.stop

    @property
    @override
    def traced_calls(self) -> int:
        return next((n for n in range(2, 1000) if any(not self.guides(i, n) for i in range(n))), 2)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found, own = super().conflicts(ctx), ctx.workload.guidance_scale
        if (ctx.model.guidance_scale if own is None else own) <= 1:
            found.append("there is no guidance to leave out: set workload.guidance_scale above 1")
        if self.start >= self.stop:
            found.append(f"caching.start={self.start} must be less than caching.stop={self.stop}")
        return found

    @override
    def ineffective(self, ctx: Context) -> list[str]:
        steps = ctx.workload.steps
        if any(not self.guides(step, steps) for step in range(steps)):
            return []
        return [f"all of {steps} steps lie between caching.start={self.start} and caching.stop={self.stop}"]

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        denoiser = denoiser_of(pipe)
        halved = denoiser.__dict__[STEPS] = _HalfBatches(pipe, denoiser.forward, self)
        denoiser.forward = halved

        def proof(trace: Trace) -> Finding:
            batches = sorted(trace.denoiser.batches)
            engaged = halved.unguided > 0 and (not batches or 2 * batches[0] == batches[-1] or halved.guided == 0)
            summary = f"{halved.guided} steps with guidance, {halved.unguided} without"
            facts = {"guided": halved.guided, "unguided": halved.unguided, "batches": batches}
            return Finding(engaged, f"{summary}; batches of {' and '.join(map(str, batches)) or 'a graph'}", facts)

        return proof


class _HalfBatches:
    """The forward of a denoiser that gets each sample twice, without the prompt and with it, and may run only one.

    Where it runs those with the prompt alone, it returns the prediction for both: guidance between equals is none, so
    that the pipeline needs no change.
    """

    def __init__(self, pipe: "DiffusionPipeline", forward: Any, chosen: GuidanceInterval) -> None:
        self._pipe, self._forward, self._chosen = pipe, forward, chosen
        self.begin()

    def begin(self) -> None:
        self.guided = self.unguided = 0

    # Its graphs are those of the denoiser, one for each size of batch.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
        return_dict: bool = True,
        **others: Any,
    ) -> Any:
        more = {"added_cond_kwargs": added_cond_kwargs, "return_dict": return_dict, **others}
        if self._chosen.guides(self.guided + self.unguided, int(self._pipe.num_timesteps)):
            self.guided += 1
            return self._forward(sample, timestep, encoder_hidden_states, **more)
        self.unguided += 1
        half = len(sample) // 2
        if added_cond_kwargs is not None:
            more["added_cond_kwargs"] = {name: value[half:] for name, value in added_cond_kwargs.items()}
        output = self._forward(sample[half:], timestep, encoder_hidden_states[half:], **more)
        if not return_dict:
            return (torch.cat([output[0]] * 2),)
        output.sample = torch.cat([output.sample] * 2)
        return output


@dataclass(frozen=True)
class TokenMerging(Caching):
    """Merges tokens that are alike before each self-attention, and takes them apart after it (ToMe, package tomesd)."""

    ratio: float = bounded(0.5, gt=0, le=0.75)
    """Share of the tokens that are merged into others."""
    max_downsample: int = bounded(1, choices=(1, 2, 4, 8))
    """Layers whose latents are at most so many times smaller merge; 1 is the largest ones alone."""
    random: bool = True
    """Whether the tokens that others are merged into are drawn at random; batches of an odd size never do."""
    seed: int = bounded(0, **SEEDS)
    """Seed of that draw: each call of the pipeline draws the same."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return super().conflicts(ctx) + missing_packages(ctx, "tome", "tomesd")

    def left_of(self, tokens: int, level: int) -> int:
        """Returns how many tokens of a self-attention are left where latents were halved `level` times."""
        return tokens - int(tokens * self.ratio) if 2**level <= self.max_downsample else tokens

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        import tomesd

        unet = denoiser_of(pipe)
        tomesd.apply_patch(unet, ratio=self.ratio, max_downsample=self.max_downsample, use_rand=self.random)
        unet.__dict__[STEPS] = _Seeded(unet, self.seed)

        def proof(trace: Trace) -> Finding:
            merged = trace.denoiser.operators["aten::scatter_reduce"]
            summary = f"tokens merged in {merged} attention layers of {trace.denoiser.calls} calls"
            return Finding(merged >= trace.denoiser.calls > 0, summary, {"merged": merged})

        return proof


class _Seeded:
    """Gives tomesd, which would take PyTorch's state and go on from it, the same random numbers for each image."""

    def __init__(self, unet: Any, seed: int) -> None:
        self._unet, self._seed = unet, seed
        self.begin()

    def begin(self) -> None:
        device = self._unet.device
        on = "cpu" if device.type == "meta" else device
        self._unet._tome_info["args"]["generator"] = torch.Generator(on).manual_seed(self._seed)


def _branches(config: Any) -> list[tuple[int, int]]:
    """Returns the block and the layer of each place at which a UNet can be cut, from the outermost one on."""
    blocks, layers = len(config["down_block_types"]), config["layers_per_block"]
    each = layers if isinstance(layers, list | tuple) else [layers] * blocks
    return [(block, layer) for block, count in enumerate(each) for layer in range(count + 1)]
