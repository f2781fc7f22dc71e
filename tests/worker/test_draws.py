"""Which images are drawn together: several small ones, by all variants alike, unless an option fixed its batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdopt.config.composer import HydraComposer
from sdopt.worker.draws import draw_of, drawing_batch, floor_draws, timed_draw
from tests.fixtures import Load


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
    ],
)
def test_the_batch_suits_all_variants(
    composer: type[HydraComposer], overrides: list[list[str]], batch: int | None
) -> None:
    variants = [composer(chosen).variant(None) for chosen in overrides]
    assert drawing_batch(variants, None, judged=False) == batch
    assert drawing_batch(variants, 5, judged=True) == 5
    assert drawing_batch(variants, None, judged=True) is None
    for variant in variants:
        assert draw_of(variant, batch).batch_size == (batch or variant.workload.batch_size)


def test_the_numerical_floor_makes_the_change_from_the_timed_batch(composer: type[HydraComposer]) -> None:
    variant = composer([]).variant(None)
    floors = floor_draws(draw_of(variant, 12), variant, 5, threads=2)
    [numerical], [sampling] = floors["numerical"], floors["sampling"]
    assert (numerical.batch_size, numerical.threads) == (1, 1)
    assert (sampling.batch_size, sampling.threads) == (12, None)


def test_the_numerical_floor_has_the_threads_of_timed_calls_where_images_are_drawn_with_fewer(
    composer: type[HydraComposer],
) -> None:
    variant = composer([]).variant(None)
    floors = floor_draws(draw_of(variant, 12, threads=1), variant, 5, threads=2)
    assert [draw.threads for draws in floors.values() for draw in draws] == [1, 2]


def test_images_are_the_same_whether_drawn_together_or_one_by_one(session: Load, tmp_path: Path) -> None:
    """To within rounding: the noise of an image does not depend on its batch."""
    found = []
    for size in (1, 4):
        loaded = session("layout=channels_last", "workload.prompt_count=4")
        draw = replace(timed_draw(loaded._variant), batch_size=size)
        records = [record for batch in range(draw.calls) for record in loaded.generate(batch, draw, tmp_path).records]
        found.append(np.stack([np.asarray(Image.open(tmp_path / each.path), dtype=float) for each in records]))
    assert found[0].shape[0] == 4
    assert np.abs(found[0] - found[1]).max() <= 2
