"""Timed calls and those that draw images are made alike, and their images are read within their time."""

import gc
import re
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sdopt.assembly import Assembly
from sdopt.config.composer import composer_of
from sdopt.pipelines.tasks import noise_in_float32
from sdopt.worker.draws import latents_file, timed_draw
from sdopt.worker.host import PipelineHost
from sdopt.worker.inputs import prompts_and_noise
from tests.fixtures import CPU, UNFREEZE, Load
from tests.options.hosts import image as image_of
from tests.records import known
from tests.trial.options import Call, ChangesNoise, OwnNoise, handle_calls

BATCHES = (
    "workload.prompt_count=5",
    "workload.batch_size=2",
    "workload.images_per_prompt=2",
)


@pytest.mark.slow
def test_a_program_draws_the_same_by_the_parts_of_a_call() -> None:
    """Programs compare a study with calls of their own, by these names."""
    words = [
        "precision=bf16",
        "caching=deepcache",
        "workload.steps=6",
        "memory=[precomputed_embeddings]",
        "workload.size=32",
        "workload.prompt_count=1",
    ]
    with composer_of(words, None) as composer:
        variant = composer.variant("own", words)
    assembly = Assembly.load(variant, "cpu")
    assembly.prepare_inputs(variant.prompts)
    given = prompts_and_noise(
        variant, assembly.pipe, "cpu", None, 0, timed_draw(variant)
    )
    call = {
        "num_inference_steps": 6,
        "guidance_scale": variant.guidance_scale,
        "output_type": "np",
    }
    with noise_in_float32(assembly.pipe), assembly.entered(), torch.no_grad():
        images = assembly.pipe(
            **call, **assembly.changed(given), **assembly.call_kwargs
        ).images
    host = PipelineHost(variant, CPU)
    host.prepare()
    assert np.array_equal(images, image_of(host))


class TestNoise:
    @pytest.mark.parametrize(
        ("overrides", "ignored"),
        [
            (["precision=bf16", "scheduler=lcm"], False),
            (["task=img2img", "task.strength=1", *BATCHES], False),
            (["workload.prompt_count=2"], True),
        ],
        ids=str,
    )
    def test_a_pipeline_that_draws_its_own_draws_the_same_unless_it_ignores_the_seed(
        self, session: Load, overrides: Sequence[str], ignored: bool
    ) -> None:
        loaded = session(*overrides)
        if ignored:
            OwnNoise().apply(loaded._pipe)
        own = loaded.time_stages().image
        middle = timed_draw(loaded._variant).calls // 2
        timed = known(loaded.time_once(number=middle).image)
        assert (own.prompt_index, own.image_index) == (
            timed.prompt_index,
            timed.image_index,
        )
        difference = np.abs(own.pixels.astype(int) - timed.pixels).max()
        assert difference > 10 if ignored else difference <= 1

    def test_what_is_given_must_stay(self, session: Load) -> None:
        loaded = session()
        ChangesNoise().apply(loaded._pipe)
        with pytest.raises(
            RuntimeError, match="modifies the caller's noise tensor in place"
        ):
            loaded.time_once()


class TestTimedCall:
    def test_draws_the_batch_of_its_number(self, session: Load, tmp_path: Path) -> None:
        """The first, the second, one that is filled up from the start, and one that wraps around; each is kept once."""
        loaded = session(*BATCHES)
        draw = timed_draw(loaded._variant)
        records = [
            record
            for batch in range(draw.calls)
            for record in loaded.generate(batch, draw, tmp_path).records
        ]
        assert [(record.prompt_index, record.image_index) for record in records] == [
            *product(range(5), range(2))
        ]
        assert [record.seed for record in records] == [*range(10)]
        assert len([*tmp_path.glob("*.png")]) == 10
        assert len([*tmp_path.glob("*.safetensors")]) == 10
        for number, prompt, image in ((0, 0, 0), (1, 2, 1), (2, 0, 0), (5, 0, 1)):
            sampled = known(loaded.time_once(number=number).image)
            assert (sampled.prompt_index, sampled.image_index) == (prompt, image)
            drawn = np.asarray(Image.open(tmp_path / f"{prompt:04d}_{image:02d}.png"))
            assert np.array_equal(sampled.pixels, drawn)

    def test_draws_where_autograd_records(self, session: Load, tmp_path: Path) -> None:
        """The latents of a call are then part of a graph, which nothing may ask for numbers."""
        loaded = session("grad_mode=enabled", "workload.prompt_count=1")
        draw = timed_draw(loaded._variant)
        [record] = loaded.generate(0, draw, tmp_path).records
        [sampled] = loaded.time_once(every_image=True).images
        assert record.finite
        assert sampled.latents is not None
        drawn = load_file(latents_file(tmp_path / record.path))["latents"]
        assert np.array_equal(drawn.numpy(), sampled.latents)

    @pytest.mark.parametrize(
        "overrides",
        [[], ["memory=precomputed_embeddings", "task=img2img", "task.strength=1"]],
    )
    def test_looks_to_an_option_as_one_that_draws(
        self, session: Load, tmp_path: Path, overrides: list[str]
    ) -> None:
        loaded = session(*overrides)
        seen: list[dict[str, Any]] = []

        def look(call: Call, arguments: dict[str, Any]) -> Any:
            seen.append(arguments)
            return call(**arguments)

        handle_calls(loaded._pipe, look)
        loaded.time_once()
        loaded.generate(0, timed_draw(loaded._variant), tmp_path)
        timed, drawn = seen
        assert list(timed) == list(drawn)
        assert [type(value) for value in timed.values()] == [
            type(value) for value in drawn.values()
        ]
        assert timed["output_type"] == drawn["output_type"]
        assert timed["callback_on_step_end"] == drawn["callback_on_step_end"]

    def test_that_makes_other_images_than_asked_for_fails(
        self, session: Load, tmp_path: Path
    ) -> None:
        """An image that is missing would else be looked for at another place, and one of another size at none."""
        loaded = session(*BATCHES)
        cuts: dict[tuple[int, ...], Callable[[np.ndarray], np.ndarray]] = {
            (2, 32, 32, 3): lambda images: images[:2],
            (4, 16, 16, 3): lambda images: images[:, ::2, ::2],
            (5, 32, 32, 3): lambda images: np.concatenate([images, images[:1]]),
        }
        made = next(iter(cuts))

        def other(call: Call, arguments: dict[str, Any]) -> Any:
            output = call(**arguments)
            output.images = cuts[made](output.images)
            return output

        handle_calls(loaded._pipe, other)
        draw = timed_draw(loaded._variant)
        for made in cuts:
            said = re.escape(f"expected images of shape (4, 32, 32, 3), got {made}")
            for make in (
                loaded.time_once,
                loaded.time_stages,
                lambda: loaded.generate(0, draw, tmp_path),
            ):
                with pytest.raises(RuntimeError, match=said):
                    make()

    def test_takes_the_time_of_a_result_that_comes_late(self, session: Load) -> None:
        loaded = session()

        class Late:
            def __init__(self, images: np.ndarray) -> None:
                self.images = images

            def __array__(
                self, dtype: Any = None, copy: bool | None = None
            ) -> np.ndarray:
                time.sleep(0.3)
                return self.images.astype(dtype)

        def late(call: Call, arguments: dict[str, Any]) -> Any:
            output = call(**arguments)
            output.images = Late(output.images)
            return output

        handle_calls(loaded._pipe, late)
        assert loaded.time_once().seconds >= 0.3

    def test_collects_garbage_as_a_users_program_does(
        self, session: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Over all objects, within its time; the collection before the call looks at young ones alone."""
        monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
        loaded = session()
        loaded.time_once()
        generations: set[int] = set()
        gc.callbacks.append(
            note := lambda _phase, info: generations.add(info["generation"])
        )
        try:
            loaded.time_once()
        finally:
            gc.callbacks.remove(note)
        assert generations <= {0, 1}

        def look(call: Call, arguments: dict[str, Any]) -> Any:
            assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
            return call(**arguments)

        handle_calls(loaded._pipe, look)
        loaded.time_once()
