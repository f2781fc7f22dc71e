"""caching: cache-dit's DBCache, which skips the blocks in the middle while the first ones add nearly the same."""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import override

from sdopt.errors import UsageError
from sdopt.options import Context, Finding, Proof, Trace
from sdopt.options.assumptions import one_call_a_step, own_blocks
from sdopt.options.caching import Caching
from sdopt.options.declarations import Extra
from sdopt.options.transformer import Given, Watching, guidance_of_call
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.parts import STEPS, Pipeline, denoiser_of
from sdopt.schema import Fraction, UpTo1000

_TOGETHER = "cache-dit decides for all images of a batch at once, so that each would depend on the others"


@dataclass(frozen=True)
class DualBlockCache(Caching):
    """Runs the first and the last blocks, and those between them where the first ones add what they did not before.

    DBCache of the package cache-dit (https://github.com/vipshop/cache-dit), with a state for each branch of guidance.
    How many steps that are depends on the image: one that changes much skips nothing, and `not_engaged` says so.
    """

    needs = (Extra("cache-dit", ("cache_dit",)),)
    assumes = (own_blocks, one_call_a_step)
    keeps_structure = True
    saves_operations = None
    fixed_batch = True
    idle = "all of {steps} steps are among the first caching.warmup={self.warmup}"

    first_blocks: UpTo1000 = 1
    """Number of blocks at the start that run in each step, and by which the others are skipped (F)."""
    last_blocks: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of blocks at the end that run in each step (B)."""
    threshold: Fraction = 0.08
    """The change of what the first blocks add, relative to its mean, from which the others run again."""
    warmup: UpTo1000 = 8
    """Number of steps at the start that skip nothing."""
    most: UpTo1000 | None = None
    """The most steps in a row that skip blocks; null sets no limit."""
    order: Annotated[int, Field(ge=1, le=5)] | None = None
    """Order of a Taylor series that extrapolates what the skipped blocks would add; null adds what they added last."""

    @property
    @override
    def traced_calls(self) -> int:
        return max(20, self.warmup + 12)

    @override
    def skips(self, steps: int) -> bool:
        return steps > self.warmup

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        if family_of(ctx.model).is_unet:
            return [
                "cache-dit knows the blocks of transformers alone: choose caching=deepcache"
            ]
        problems = super().conflicts(ctx)
        if ctx.workload.batch_size * ctx.workload.images_per_prompt > 1:
            problems.append(
                f"{_TOGETHER}: set workload.batch_size=1 and workload.images_per_prompt=1"
            )
        return problems

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        denoiser = denoiser_of(pipe)
        blocks = DualBlocks(pipe, denoiser, self)
        denoiser.__dict__[STEPS] = blocks
        denoiser.forward = blocks

        def proof(trace: Trace) -> Finding:
            runs_of_each = map(trace.denoiser.runs_within, blocks.names)
            runs = sum(min(inner, default=0) for inner in runs_of_each)
            calls, skipped = trace.denoiser.calls, blocks.skipped
            every = calls * len(blocks.names)
            engaged = (
                skipped > 0
                and calls == blocks.calls.total()
                and runs == every - skipped
            )
            summary = f"of {every} runs of a block in {calls} traced calls {every - runs} were skipped"
            return Finding(
                engaged, summary, {**blocks.calls, "runs": runs, "skipped": skipped}
            )

        return proof


class DualBlocks(Watching):
    """The forward of a transformer with cache-dit's blocks, which has a state for each branch of guidance.

    Attributes:
        names: of all blocks.
        skipped: number of runs of a block since `begin` that cache-dit left out, by its own count.
    """

    def __init__(self, pipe: Pipeline, denoiser: Any, chosen: DualBlockCache) -> None:
        from cache_dit import DBCacheConfig, TaylorSeerCalibratorConfig
        from cache_dit.caching import (
            BlockAdapterRegister,
            CachedAdapter,
            FakeDiffusionPipeline,
        )

        adapter = BlockAdapterRegister.get_adapter(pipe)
        if adapter is None:
            raise UsageError(
                f"caching=dbcache: cache-dit does not know the blocks of a {type(denoiser).__name__}"
            )
        plain = denoiser.forward
        config = DBCacheConfig(
            Fn_compute_blocks=chosen.first_blocks,
            Bn_compute_blocks=chosen.last_blocks,
            residual_diff_threshold=chosen.threshold,
            max_warmup_steps=chosen.warmup,
            max_continuous_cached_steps=-1 if chosen.most is None else chosen.most,
            enable_separate_cfg=False,  # each branch has a state of its own instead
        )
        series = (
            None
            if chosen.order is None
            else TaylorSeerCalibratorConfig(taylorseer_order=chosen.order)
        )
        # Without the pipeline, of whose class it would replace the call, for all pipelines of that class; and not by
        # `enable_cache`, which may choose another attention backend besides.
        adapter.pipe = FakeDiffusionPipeline(denoiser)
        adapter = CachedAdapter.cachify(
            adapter, cache_config=config, calibrator_config=series
        )
        self._manager: Any = denoiser._context_manager
        self._groups = {
            group: len(blocks) - chosen.first_blocks - chosen.last_blocks
            for group, blocks in zip(
                adapter.unique_blocks_name[0], adapter.blocks[0], strict=True
            )
        }
        if min(self._groups.values()) < 1:
            raise UsageError(
                "caching.first_blocks and caching.last_blocks leave no block to skip: "
                f"there are {min(self._groups.values()) + chosen.first_blocks + chosen.last_blocks}"
            )
        cached = set(map(id, chain.from_iterable(adapter.blocks[0])))
        self.names = [
            name for name, module in denoiser.named_modules() if id(module) in cached
        ]
        super().__init__(pipe, denoiser)
        self._plain = plain

    def _forget(self) -> None:
        self._states: dict[int, dict[str, Any]] = {}

    def begin(self) -> None:
        """Resets the state and the counts: the next call is in the first step of an image."""
        super().begin()
        self.skipped = 0

    def _predict(self, given: Given) -> Any:
        branch = self._at.next()[1]
        if not self._on:
            return self._plain(*given.args, return_dict=False, **given.others)[0]
        self._require_one_image(len(given.hidden))
        if branch not in self._states:
            self._states[branch] = {
                group: self._new_state(group) for group in self._groups
            }
        states = self._states[branch]
        self._manager._cached_context_manager.update(states)
        before = {group: len(state.cached_steps) for group, state in states.items()}
        prediction = self._whole(given)
        skipped = 0
        for group, state in states.items():
            skipped += (len(state.cached_steps) - before[group]) * self._groups[group]
        self.skipped += skipped
        self.calls["outer" if skipped else "whole"] += 1
        return prediction

    def _require_one_image(self, samples: int) -> None:
        """Raises UsageError for a call of several images; `samples` are those of both branches where they are joined."""
        joined = guidance_of_call(self._pipe).form == "batched"
        guided = getattr(self._pipe, "do_classifier_free_guidance", True)
        if samples > (2 if joined and guided else 1):
            raise UsageError(f"caching=dbcache: {_TOGETHER}: make one image in a call")

    def _new_state(self, group: str) -> Any:
        settings = self._manager.get_context(group)._init_kwargs
        return self._manager.new_context(**settings)
