"""cache-dit's DBCache: the blocks that it skips in each branch, against cache-dit's own, and what it is refused for."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sdopt.errors import UsageError
from sdopt.options.caching import WholeSteps
from sdopt.options.dbcache import DualBlockCache
from tests.fixtures import CPU
from tests.options.applied import PROMPTS, STEPS, Applied, context_of, far
from tests.pipelines.tiny import tiny

cache_dit = pytest.importorskip("cache_dit", reason="cache-dit is not installed")

ONE = PROMPTS[:1]

ALWAYS = DualBlockCache(threshold=0.99, warmup=2)
"""With random weights no two steps are alike."""

GUIDED: dict[str, Any] = {"true_cfg_scale": 4.0, "negative_prompt": [""]}


@pytest.fixture
def plain_call() -> Iterator[None]:
    """Puts back the call of FluxPipeline, which cache-dit replaces for the whole class."""
    from diffusers import FluxPipeline

    before = FluxPipeline.__call__
    yield
    FluxPipeline.__call__ = before
    for name in ("_original_call", "_is_cached"):
        if name in vars(FluxPipeline):
            delattr(FluxPipeline, name)


@pytest.mark.parametrize("guided", [False, True])
def test_each_branch_has_a_state_of_its_own_as_cache_dit_has_where_it_is_told_so(
    guided: bool, plain_call: None
) -> None:
    call = GUIDED if guided else {}
    applied = Applied(
        "flux", {"caching": DualBlockCache(threshold=0.99, warmup=1, most=1)}
    )
    ours = applied.images(ONE, **call)
    counts = applied.pipe.transformer.forward.calls
    assert counts["outer"] > 0
    assert counts["whole"] > 1 + guided
    by_hand = Applied("flux", {"caching": WholeSteps()})
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        residual_diff_threshold=0.99,
        max_warmup_steps=1,
        max_continuous_cached_steps=1,
        enable_separate_cfg=guided,
    )
    cache_dit.enable_cache(by_hand.pipe, cache_config=config)
    assert far(ours, by_hand.images(ONE, **call)) < 1e-5


@pytest.mark.parametrize(
    "option", [ALWAYS, replace(ALWAYS, last_blocks=2, order=1), replace(ALWAYS, most=1)]
)
@pytest.mark.walk(2)
def test_runs_of_blocks_are_skipped_and_another_image_begins_anew(
    option: DualBlockCache,
) -> None:
    applied = Applied("flux", {"caching": option})
    images, finding, trace = _traced(applied)
    assert finding.engaged, finding.summary
    blocks = len(applied.pipe.transformer.forward.names)
    skipped = 2 if option.most == 1 else STEPS - option.warmup
    assert finding.facts["skipped"] == skipped * (
        blocks - option.first_blocks - option.last_blocks
    )
    assert trace.denoiser.calls == STEPS
    assert far(images, Applied("flux", {"caching": WholeSteps()}).images(ONE)) > 1e-4
    assert np.array_equal(applied.images(ONE), images)


def test_without_a_skipped_step_the_image_is_the_same() -> None:
    applied = Applied("flux", {"caching": DualBlockCache(threshold=1e-9, warmup=1)})
    images, finding, _ = _traced(applied)
    assert not finding.engaged, "nothing was skipped"
    assert far(images, Applied("flux", {"caching": WholeSteps()}).images(ONE)) < 1e-5


def test_blocks_that_run_all_the_same_are_told() -> None:
    applied = Applied("flux", {"caching": ALWAYS})
    applied.pipe.transformer.forward._groups = dict.fromkeys(
        applied.pipe.transformer.forward._groups, 1
    )
    assert not _traced(applied)[1].engaged


def test_is_refused_where_images_would_depend_on_each_other_or_nothing_is_skipped() -> (
    None
):
    ctx = context_of(tiny("flux"))
    assert DualBlockCache().obstacles(ctx) == []
    [reason] = DualBlockCache().obstacles(
        replace(ctx, workload=replace(ctx.workload, batch_size=2))
    )
    assert "workload.batch_size=1" in reason
    with pytest.raises(UsageError, match="leave no block to skip"):
        Applied("flux", {"caching": DualBlockCache(first_blocks=6)})
    assert CPU.type == "cpu"


@pytest.mark.parametrize("kind", ["flux", "pixart"])
def test_a_call_of_several_images_is_refused(kind: str) -> None:
    """A program may call its pipeline so, of which no study knows."""
    applied = Applied(kind, {"caching": ALWAYS})
    applied.images(ONE)
    with pytest.raises(UsageError, match="each would depend on the others"):
        applied.images(PROMPTS[:2])


def _traced(applied: Applied) -> Any:
    """Draws one image, and returns it with what the trace shows."""
    images = applied.images
    applied.images = lambda *_: images(ONE)  # type: ignore[method-assign]
    try:
        return applied.traced()
    finally:
        applied.images = images  # type: ignore[method-assign]
