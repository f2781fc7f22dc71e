"""What trips a wire, and above all what does not."""

import numpy as np
import pytest
from matplotlib.cbook import get_sample_data
from PIL import Image, ImageDraw

from sdopt.quality.tripwires import tripped
from tests.quality.conftest import blurred, noisy


def wires(images: np.ndarray, **context: object) -> set[tuple[str, int | None]]:
    return {(wire, index) for wire, index, _ in tripped(images, **context)}  # type: ignore[arg-type]


def flat(colour: tuple[int, int, int]) -> np.ndarray:
    return np.full((64, 64, 3), colour, dtype=np.uint8)


@pytest.fixture(scope="module")
def photographs() -> np.ndarray:
    """Two halves of a photograph."""
    whole = Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)).convert(
        "RGB"
    )
    return np.stack(
        [np.asarray(whole.crop((left, 0, left + 256, 512))) for left in (0, 256)]
    )


def with_one(images: np.ndarray, index: int, image: np.ndarray) -> np.ndarray:
    changed = images.copy()
    changed[index] = image
    return changed


def white_on_white() -> np.ndarray:
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((6, 6, 58, 58), fill=(244, 244, 246))
    return np.asarray(image)


def night_sky() -> np.ndarray:
    image = Image.new("RGB", (64, 64), (8, 8, 20))
    ImageDraw.Draw(image).ellipse((40, 8, 52, 20), fill=(250, 250, 220))
    return np.asarray(image)


def test_honest_images_trip_nothing(
    drawings: np.ndarray, photographs: np.ndarray
) -> None:
    for images in (
        drawings,
        photographs,
        with_one(drawings, 3, white_on_white()),
        with_one(drawings, 5, night_sky()),
    ):
        assert not tripped(images)
    assert not tripped(
        drawings,
        latents=np.zeros((16, 4, 8, 8)),
        finite=[True] * 16,
        reference=drawings,
    )


def test_images_that_are_worse_or_other_ones_are_for_the_metrics_to_judge(
    drawings: np.ndarray,
) -> None:
    """Noise, blur, a little contrast, another drawing, one that moves, or stands on what is nearly white."""
    lighter = np.clip((drawings - 128.0) * 1.15 + 128, 0, 255).astype(np.uint8)
    greyer = [np.minimum(drawings, background) for background in (250, 252, 253, 254)]
    others = [
        noisy(drawings, 0.02),
        noisy(drawings, 0.05),
        blurred(drawings, 2),
        lighter,
        np.roll(drawings, 1, 0),
    ]
    for images in (*others, np.roll(drawings, 9, axis=(1, 2)), *greyer):
        assert not tripped(images, reference=drawings)
    for reference in greyer:
        assert not tripped(drawings, reference=reference)


@pytest.mark.parametrize("size", [32, 256])
def test_a_photograph_of_any_size_is_no_noise(
    photographs: np.ndarray, size: int
) -> None:
    small = np.stack(
        [
            np.asarray(Image.fromarray(image).resize((size, size)))
            for image in photographs
        ]
    )
    assert not tripped(small)


@pytest.mark.parametrize("colour", [(0, 0, 0), (12, 10, 14)])
def test_one_black_frame_among_many(
    drawings: np.ndarray, colour: tuple[int, int, int]
) -> None:
    assert wires(with_one(drawings, 5, flat(colour))) == {("black", 5)}


@pytest.mark.parametrize("colour", [(255, 255, 255), (200, 30, 90)])
def test_a_frame_of_one_colour(
    drawings: np.ndarray, colour: tuple[int, int, int]
) -> None:
    assert wires(with_one(drawings, 0, flat(colour))) == {("constant", 0)}
    rounded = flat(colour)
    rounded[::3, ::2] -= 1
    assert wires(with_one(drawings, 0, rounded)) == {("constant", 0)}


@pytest.mark.parametrize("sigma", [0.02, 0.5])
def test_noise_on_one_colour_is_caught_all_the_same(
    drawings: np.ndarray, sigma: float
) -> None:
    [(wire, index)] = wires(
        with_one(drawings, 7, noisy(flat((128, 100, 90))[None], sigma)[0])
    )
    assert wire in ("noise", "constant")
    assert index == 7


def blotches(size: int) -> np.ndarray:
    """As a decoder makes of latents that were never denoised: noise that is smooth over eight pixels."""
    noise = (
        np.random.default_rng(0)
        .integers(0, 256, (size // 8, size // 8, 3))
        .astype(np.uint8)
    )
    return np.asarray(
        Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC)
    )


def test_decoded_noise_shows_in_a_large_image(photographs: np.ndarray) -> None:
    large = np.stack(
        [np.asarray(Image.fromarray(image).resize((512, 512))) for image in photographs]
    )
    assert not tripped(large)
    assert wires(with_one(large, 1, blotches(512))) == {("noise", 1)}


def test_decoded_noise_shows_in_a_small_image_beside_the_reference(
    drawings: np.ndarray,
) -> None:
    shape = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(shape).ellipse((8, 8, 56, 56), fill=(240, 180, 40))
    reference = with_one(drawings, 4, np.asarray(shape))
    assert ("noise", 4) in wires(
        with_one(drawings, 4, blotches(64)), reference=reference
    )


def test_all_images_alike(drawings: np.ndarray) -> None:
    same = noisy(np.repeat(drawings[:1], 8, axis=0), 0.01)
    assert wires(same) == {("alike", None)}
    nearly = np.stack([np.maximum(drawings[0], image // 6) for image in drawings])
    assert wires(nearly, reference=drawings) == {("alike", None)}


def test_an_image_that_comes_twice(drawings: np.ndarray) -> None:
    twice = with_one(drawings, 9, drawings[4])
    assert wires(twice) == {("alike", 9)}
    draws = [("a prompt", index) for index in range(16)]
    draws[9] = draws[4]
    assert not tripped(twice, draws=draws)


def test_latents_and_pixels_that_are_not_finite(drawings: np.ndarray) -> None:
    latents = np.zeros((16, 4, 8, 8), dtype=np.float32)
    latents[3, 0, 0, 0] = np.nan
    latents[4, 1] = np.inf
    found = tripped(
        drawings, latents=latents, finite=[index != 11 for index in range(16)]
    )
    assert [(wire, index) for wire, index, _ in found] == [
        ("non_finite", index) for index in (3, 4, 11)
    ]
    assert "25.0% of the final latents" in found[1][2]


def test_clipping_is_relative_to_the_reference(drawings: np.ndarray) -> None:
    harsh = np.clip((drawings - 128.0) * 4 + 128, 0, 255).astype(np.uint8)
    found = wires(harsh, reference=drawings)
    assert ("clipping", None) in found
    assert {wire for wire, _ in found} == {"clipping"}
    assert not tripped(harsh, reference=harsh)
    assert not tripped(harsh)
    burnt = np.where(drawings[6] < 240, 0, 255).astype(np.uint8)
    assert wires(with_one(drawings, 6, burnt), reference=drawings) == {("clipping", 6)}
    black = drawings.copy()
    black[[6, 9]] = 0  # most of a mean over 16 images, and nothing about the other 14
    assert ("clipping", None) not in wires(black, reference=drawings)
