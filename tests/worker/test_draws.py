"""Which images are drawn together: several small ones, by all variants alike, unless an option fixed its batch."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdopt.config.composer import HydraComposer
from sdopt.worker.draws import draw_of, drawing_batch, floor_draws
from tests.command import SMOKE, sdopt


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


def test_images_are_the_same_whether_drawn_together_or_one_by_one(tmp_path: Path) -> None:
    """To within rounding: the noise of an image does not depend on its batch."""
    found = []
    for batch in (1, 4):
        quality = ("quality=default", "quality.prompt_count=4", "quality.floor_prompts=2", "quality.cache=null")
        name = f"of_{batch}"
        finished = sdopt(
            tmp_path,
            *("run", *SMOKE, "workload.steps=1", "protocol.stage_calls=0", "layout=channels_last"),
            *(*quality, "quality.features=[]", f"quality.batch_size={batch}", f"hydra.run.dir={name}"),
        )
        assert finished.code == 0, finished.shown
        images = sorted((tmp_path / name / "images" / "00-baseline").glob("*.png"))
        found.append(np.stack([np.asarray(Image.open(path), dtype=float) for path in images]))
    assert found[0].shape[0] == 4
    assert np.abs(found[0] - found[1]).max() <= 2
