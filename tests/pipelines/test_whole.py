"""Published transformers with random weights run whole on a CPU: minutes, and up to 16 GiB of memory each."""

import numpy as np
import psutil
import pytest

from sdopt.config.composer import HydraComposer
from sdopt.config.models import with_own_options
from sdopt.config.paths import options_of
from sdopt.worker.host import PipelineHost
from tests.command import SMOKE
from tests.fixtures import CPU

pytestmark = pytest.mark.slow

SIDE = 256

WORK = (f"workload.size={SIDE}", "workload.steps=2", "workload.prompts=[a red circle]")


@pytest.mark.parametrize(
    ("name", "parameters", "gib"),
    [("pixart_sigma", 610_856_096, 12), ("sd35_medium", 2_243_171_520, 17)],
)
def test_draw_an_image(
    composer: type[HydraComposer], name: str, parameters: int, gib: int
) -> None:
    available = psutil.virtual_memory().available / 2**30
    if available < gib:
        pytest.skip(f"{available:.0f} GiB of memory are free, and it takes {gib}")
    words = [*SMOKE, f"model={name}", "model.weights=random", *WORK]
    variant = composer(with_own_options(words, options_of("model"))).variant(None)
    assert variant.conflicts(CPU) == []
    host = PipelineHost(variant, CPU)
    host.prepare()
    transformer = host._pipe.transformer
    assert sum(weight.numel() for weight in transformer.parameters()) == parameters
    assert str(transformer.dtype) == "torch.bfloat16", (
        "the type that it is published for"
    )
    images = host._read_inputs(host._inputs[0], SIDE)[0]
    assert images.shape == (1, SIDE, SIDE, 3)
    assert np.isfinite(images).all()
    assert images.std() > 0.01, "an image of one colour"
