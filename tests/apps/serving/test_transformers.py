"""Serving diffusion transformers: images of one call are those that each request gets alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sdopt.apps.serving.config import Serving
from sdopt.apps.serving.engine import (
    Engine,
    EngineWork,
    refused_work,
    scale_by_image,
    unservable,
)
from sdopt.gate.trust import SMALLEST_ERROR
from sdopt.options import block_caches
from sdopt.variant import Variant
from sdopt.worker.guidance import scales_embedded
from sdopt.worker.host import PipelineHost
from sdopt.worker.process import Worker
from sdopt.worker.protocol import Asked
from tests.command import SMOKE
from tests.fixtures import CPU, Composers, Tiny
from tests.pipelines.tiny import tiny

PROMPTS = (
    "a red apple",
    "a green cat beside a much longer tale of a blue house at dawn, and a boat",
    "a car",
)

SLOW = (
    *("sd3", "qwen_image", "chroma", "pixart", "sana"),
    *("lumina2", "aura_flow", "flux2"),
)

SERVED = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW] + [
    "emoji_dit",
    "flux",
    "z_image",
]


class LocalWorker:
    """A worker in this process, whose pipeline is loaded once, and needs no calls to become warm."""

    alive = True
    pid = 1

    def __init__(self, variant: Variant) -> None:
        self.host = PipelineHost(variant, CPU)
        self.host.prepare()
        self.warm = False
        self.renders = 0

    def ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        if not self.warm:
            return SimpleNamespace(held_gib=0.0)
        self.renders += request is PipelineHost.render
        return request(self.host, *arguments)

    def stop(self) -> None:
        pass


class Served:
    """A warm engine, and requests that differ in prompt and seed."""

    def __init__(self, worker: LocalWorker) -> None:
        self.worker, variant = worker, worker.host._variant
        assert not unservable(variant, Serving(), CPU)
        self.engine = Engine(variant, Serving(), lambda: cast(Worker, worker))
        worker.warm = False
        self.engine.start()
        worker.warm = True
        self.requests = [Asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)]

    def work(self, scale: float | None = None, number: int = 0) -> EngineWork:
        variant = self.engine.variant
        return self.engine.work_of(
            self.requests[number],
            variant.workload.steps,
            variant.guidance_scale if scale is None else scale,
        )

    def alone(self, scales: Sequence[float | None]) -> list[np.ndarray]:
        images = []
        for number, scale in enumerate(scales):
            request, work = self.requests[number], self.work(scale, number)
            images.append(self.engine.render([request], [work]).pixels[0])
        return images

    def together(self, scales: Sequence[float | None]) -> np.ndarray:
        before = self.worker.renders
        images = self.engine.render(
            self.requests, [self.work(scale) for scale in scales]
        ).pixels
        assert self.worker.renders == before + 1
        return images


def worst(
    images: Sequence[np.ndarray] | np.ndarray, others: Sequence[np.ndarray] | np.ndarray
) -> float:
    """The largest mean squared difference of two images in 0…1."""
    differences = [
        np.mean((one / 255 - other / 255) ** 2)
        for one, other in zip(images, others, strict=True)
    ]
    return float(max(differences))


SIZES = "workload.batch_size=[1,4]"


@pytest.fixture(scope="module")
def workers() -> dict[tuple[str, ...], LocalWorker]:
    """What was loaded so far, by model and overrides."""
    return {}


@pytest.fixture
def served(
    composer: Composers, variant_of: Tiny, workers: dict[tuple[str, ...], LocalWorker]
) -> Callable[..., Served]:
    def variant(name: str, *overrides: str) -> Variant:
        if name == "emoji_dit":
            words = [*SMOKE, f"model={name}", "workload.steps=3", SIZES, *overrides]
            return composer(words).variant(None)
        return variant_of(name, SIZES, *overrides)

    def serve(*asked: str) -> Served:
        if asked not in workers:
            workers[asked] = LocalWorker(variant(*asked))
        return Served(workers[asked])

    return serve


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.walk(1)
def test_prompts_of_other_lengths_leave_an_image_as_it_is(
    served: Callable[..., Served], name: str
) -> None:
    server = served(name)
    same = [None] * len(PROMPTS)
    alone = server.alone(same)
    assert worst(server.together(same), alone) <= SMALLEST_ERROR
    assert worst(alone[1:], alone[:-1]) > 100 * SMALLEST_ERROR, "the requests differ"


@pytest.mark.walk(1)
def test_a_cache_looks_at_an_image_as_it_would_alone(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sequences of image and text, what fills up a shorter prompt changes, too, and counts for nothing."""
    sizes: list[np.ndarray] = []

    mean_size = block_caches._mean_size

    def noted(tensor: Any) -> Any:
        size = mean_size(tensor)
        sizes.append(size.numpy())
        return size

    monkeypatch.setattr(block_caches, "_mean_size", noted)
    # No step skips a block.
    server = served("z_image", "caching=first_block", "caching.threshold=1e-6")
    same = [None] * len(PROMPTS)
    changes = []
    for images in (server.alone, server.together):
        sizes.clear()
        images(same)
        changes.append(np.divide(sizes[::2], sizes[1::2]))
    alone, together = changes
    # By image, step and branch.
    assert alone.shape == (6, 2)
    together = together.reshape(2, 2, len(PROMPTS)).transpose(2, 0, 1)
    np.testing.assert_allclose(together, alone.reshape(3, 2, 2), rtol=1e-3)


NEGATIVES = ("", "a blurred picture with words and borders, in grey", "fog")

GUIDED = [pytest.param("qwen_image", marks=pytest.mark.slow), "z_image"]


@pytest.mark.parametrize("name", GUIDED)
@pytest.mark.walk(1)
def test_negative_prompts_of_other_lengths_leave_an_image_as_it_is(
    served: Callable[..., Served], name: str
) -> None:
    """Both branches are masked: by the prompts of a call, and by its negative prompts.

    Guidance is strong, because Qwen-Image sets back the norm of what it predicts: at its usual scale of 4 a negative
    prompt changes an image by 1e-5, a few levels of a byte, and at 30 by 3e-4. A batch changes it by 3e-9 at most.
    """
    server = served(name, "workload.guidance_scale=30")
    same = [None] * len(PROMPTS)
    without = server.alone(same)
    for number, negative in enumerate(NEGATIVES):
        request = replace(server.requests[number], negative=negative)
        server.requests[number] = request
    alone = server.alone(same)
    assert worst(server.together(same), alone) <= SMALLEST_ERROR
    for number, negative in enumerate(NEGATIVES):
        effect = worst(alone[number : number + 1], without[number : number + 1])
        assert (effect > 100 * SMALLEST_ERROR) == bool(negative), "they count"


@pytest.mark.parametrize("name", GUIDED)
def test_a_scale_of_its_own_is_that_of_a_server_with_it(
    served: Callable[..., Served], name: str
) -> None:
    others = [2.0] * len(PROMPTS)
    images = served(name).alone(others)
    same = served(name, "workload.guidance_scale=2").alone([None] * len(PROMPTS))
    assert worst(images, same) == 0


def test_each_image_has_the_scale_that_its_request_names(
    served: Callable[..., Served],
) -> None:
    server = served("flux")
    scales = [1.0, 9.0, None]
    alone = server.alone(scales)
    assert worst(server.together(scales), alone) <= SMALLEST_ERROR
    assert worst(server.together([9.0, 1.0, None]), alone) > 100 * SMALLEST_ERROR, (
        "the scales count"
    )
    assert (
        worst(server.together([None] * 3), server.alone([None] * 3)) <= SMALLEST_ERROR
    ), "a later call has its own"


def test_only_scales_that_are_embedded_share_a_call(
    served: Callable[..., Served], variant_of: Tiny
) -> None:
    """Guided by two branches, one number counts for all images of a call."""
    engine = served("flux").engine
    assert engine.together(EngineWork(3, 1.0, False), EngineWork(3, 2.0, False))
    assert not engine.together(EngineWork(3, 1.0, False), EngineWork(4, 1.0, False))
    engine.scale_by_image = scale_by_image(variant_of("flux", "compiler=inductor"))
    assert not engine.together(EngineWork(3, 1.0, False), EngineWork(3, 2.0, False))
    assert not scale_by_image(variant_of("sd3"))


@pytest.mark.parametrize(
    ("name", "own", "asked"),
    [("flux2", 1.0, 4.0), ("z_image", 0.0, -1.0), ("sd3", 1.0, 0.5)],
)
def test_a_scale_without_effect_is_refused(
    variant_of: Tiny, name: str, own: float, asked: float
) -> None:
    scale = [] if name == "flux2" else [f"workload.guidance_scale={own}"]
    variant = variant_of(name, *scale)
    serving = replace(Serving(), mixed=True)
    work = EngineWork(3, asked, False)
    refused = refused_work(variant, serving, CPU, work)
    assert "has no effect" in refused["guidance_scale"]
    work = EngineWork(4, own, False)
    assert refused_work(variant, serving, CPU, work) == {}


def test_prompts_without_a_mask_have_calls_of_their_own(
    served: Callable[..., Served],
) -> None:
    """CogView4 fills up prompts to the longest one of a call, which changes the images of all others."""
    server = served("cogview4")
    first, second, _ = (server.work(number=number) for number in range(3))
    assert first != second
    assert not server.engine.together(first, second)
    again = replace(server.requests[0], seed=1)
    assert server.engine.together(
        first, server.engine.work_of(again, 3, server.engine.variant.guidance_scale)
    )
    alone = server.alone([None] * len(PROMPTS))
    rendered = server.worker.ask(PipelineHost.render, server.requests, 3, {})
    assert worst(rendered.pixels, alone) > 100 * SMALLEST_ERROR


def test_a_denoiser_without_scales_is_no_silent_success() -> None:
    pipe = tiny("z_image")
    with (
        pytest.raises(RuntimeError, match="does not take a guidance scale"),
        scales_embedded(pipe.transformer, [1.0, 2.0]),
    ):
        pipe(["a", "b"], num_inference_steps=1, height=64, width=64, guidance_scale=0.0)
    with (
        pytest.raises(RuntimeError, match="was not called"),
        scales_embedded(pipe.transformer, [1.0]),
    ):
        pass
