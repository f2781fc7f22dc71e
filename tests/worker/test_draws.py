"""Which images are drawn together: several small ones, by all variants alike, unless an option fixed its batch."""

import pytest

from sdopt.worker.draws import draw_of, drawing_batch, floor_draws, timed_draw
from tests.fixtures import Composers, Tiny


def test_timed_calls_are_given_what_the_quality_pass_draws(composer: Composers) -> None:
    variant = composer(["workload.prompt_count=3", "quality.prompt_count=10"]).variant(
        None
    )
    assert timed_draw(variant) == draw_of(variant)
    assert draw_of(variant).calls == 10
    fewer = composer(["workload.prompt_count=5", "quality.prompt_count=2"]).variant(
        None
    )
    assert timed_draw(fewer).prompts[:2] == draw_of(fewer).prompts
    assert timed_draw(fewer).calls == 5


@pytest.mark.parametrize(
    ("overrides", "calls", "processes"),
    [
        (["quality=none"], 0, 3),
        (["quality=none", "quality.prompt_count=2"], 2, 3),
        (["workload.prompts=[red apple,cat face]", "quality.prompt_count=9"], 2, 3),
        (["gate=default"], 96, 3),
        (["gate=default", "quality.prompt_count=20", "protocol.replicates=2"], 20, 2),
    ],
)
def test_as_many_are_drawn_as_metrics_or_a_gate_need(
    composer: Composers, overrides: list[str], calls: int, processes: int
) -> None:
    variant = composer(overrides).variant(None)
    assert draw_of(variant).calls == calls
    assert draw_of(variant).prompts[:2] == timed_draw(variant).prompts[: min(calls, 2)]
    assert variant.protocol.replicates == processes


def test_floors_change_the_order_of_computation_or_the_noise(
    composer: Composers,
) -> None:
    variant = composer([]).variant(None)
    draws = floor_draws(draw_of(variant), variant, 5, threads=2)
    assert {len(draw.prompts) for ways in draws.values() for draw in ways} == {5}
    assert [
        (draw.batch_size, draw.seed, draw.threads) for draw in draws["numerical"]
    ] == [(4, 0, 1), (2, 0, 1)]
    assert [draw.batch_size for draw in draws["sampling"]] == [1]
    assert draws["sampling"][0].seed != 0
    assert (
        list(draws)[-1] == "numerical"
    )  # what may find no memory, and sets the number of threads, comes last
    # The numerical one makes the change from the batch and the threads of timed calls, whichever are drawn with.
    for threads, others in ((None, 1), (1, 2)):
        floors = floor_draws(draw_of(variant, 12, threads), variant, 5, threads=2)
        [numerical], [sampling] = floors["numerical"], floors["sampling"]
        assert (numerical.batch_size, numerical.threads) == (1, others)
        assert (sampling.batch_size, sampling.threads) == (12, threads)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("cogview4", []), ("sana", ["workload.images_per_prompt=2"])],
)
def test_floors_keep_the_batch_that_images_depend_on(
    variant_of: Tiny, name: str, overrides: list[str]
) -> None:
    """Prompts that fill up others would count as rounding, and images far apart as the same."""
    variant = variant_of(name, *overrides)
    assert drawing_batch([variant], None, judged=False) is None
    for threads, others in ((1, 2), (2, 1), (4, 2)):
        [draw] = floor_draws(draw_of(variant), variant, 5, threads)["numerical"]
        assert (draw.batch_size, draw.threads) == (1, others)


@pytest.mark.parametrize(
    ("overrides", "batch"),
    [
        ([[], ["precision=bf16"]], 12),
        ([["workload.size=128"], ["workload.size=128", "attention=math"]], 4),
        ([["workload.size=512"]], 1),
        ([["workload.batch_size=16"]], 16),
        ([[], ["compiler=inductor"]], None),
        ([[], ["precision=int8_sdnq"]], None),
        ([[], ["workload.batch_size=4"]], None),
        ([["model=emoji_dit"], ["model=emoji_dit", "caching=dbcache"]], None),
    ],
)
def test_the_batch_suits_all_variants(
    composer: Composers, overrides: list[list[str]], batch: int | None
) -> None:
    variants = [composer(chosen).variant(None) for chosen in overrides]
    assert drawing_batch(variants, None, judged=False) == batch
    assert drawing_batch(variants, 5, judged=True) == 5
    assert drawing_batch(variants, None, judged=True) is None
    for variant in variants:
        assert draw_of(variant, batch).batch_size == (
            batch or variant.workload.batch_size
        )
