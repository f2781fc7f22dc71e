"""Images that are damaged or odd: exit code 2, with the file and the reason."""

import struct
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from sdopt.errors import UsageError
from sdopt.quality.images import batches, image_files
from sdopt.record.files import read_result
from sdopt.record.images import open_image, open_picture


@pytest.fixture(scope="module")
def png(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("image") / "a.png"
    Image.effect_noise((64, 64), 50).save(path)
    return path.read_bytes()


def test_images_that_cannot_be_read(tmp_path: Path, png: bytes) -> None:
    huge = png[:16] + struct.pack(">II", 2**30, 2**30) + png[24:]
    cases = {
        "truncated": png[:200],
        "header": png[:20],
        "text": b"a",
        "empty": b"",
        "huge": huge,
        "junk": png[:60] + b"x" * 99,
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"{name}: cannot be read as an image"):
            open_image(tmp_path / name)
    for missing in (tmp_path / "nowhere", tmp_path, Path("/dev/zero")):
        with pytest.raises(UsageError, match=r"no such file|not a file"):
            open_image(missing)


RAMP = (np.linspace(0, 1, 48)[None] * np.linspace(0.2, 1, 32)[:, None] * 65535).astype(
    np.uint16
)


def ramp() -> Image.Image:
    return Image.fromarray((RAMP / 257).round().astype(np.uint8))


def seen(image: Image.Image, file: Path, **options: Any) -> Image.Image:
    """Returns a picture that was saved, as it is read."""
    image.save(file, **options)
    return open_picture(file)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_upright(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.merge("RGB", [ramp()] * 3)
    found = seen(stored, tmp_path / "a.jpg", exif=exif, quality=100)
    shown = ImageOps.exif_transpose(Image.open(tmp_path / "a.jpg"))
    assert found.size == shown.size == ((48, 32) if orientation <= 4 else (32, 48))
    assert np.array_equal(np.asarray(found), np.asarray(shown))


def test_colours_are_those_of_the_profile(tmp_path: Path) -> None:
    """Telephones save in Display P3; here is a profile in which red and green have changed places."""
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    names = {
        b"rXYZ": b"tmp_",
        b"gXYZ": b"rXYZ",
        b"tmp_": b"gXYZ",
        "sRGB".encode("utf-16-be"): b"\0m\0i\0n\0e",
    }
    other = reduce(lambda profile, pair: profile.replace(*pair), names.items(), own)
    red = Image.new("RGB", (8, 8), (200, 30, 10))
    for profile, wanted in (
        (other, (30, 200, 10)),
        (own, (200, 30, 10)),
        (b"damaged", (200, 30, 10)),
    ):
        found = np.asarray(seen(red, tmp_path / "a.png", icc_profile=profile))[
            0, 0
        ].astype(int)
        assert np.abs(found - wanted).max() <= 2


def test_a_profile_of_linear_srgb_is_not_taken_for_srgb(tmp_path: Path) -> None:
    """Krita and GIMP keep 16 bits in it."""
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    name = "sRGB built-in".encode("utf-16-be")
    curve = own.index(b"para")
    straight = b"para" + bytes(8) + b"\0\1\0\0"
    linear = own[:curve] + straight + own[curve + len(straight) :]
    linear = linear.replace(name, "linear sRGB  ".encode("utf-16-be"))
    grey = Image.new("RGB", (8, 8), (55, 55, 55))
    found = np.asarray(seen(grey, tmp_path / "a.png", icc_profile=linear))
    assert found[0, 0] == pytest.approx((128, 128, 128), abs=2)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.jp2", "a.pgm"])
def test_16_bits_become_8(name: str, tmp_path: Path) -> None:
    if name.endswith("pgm"):
        (tmp_path / name).write_bytes(
            b"P5 48 32 65535\n" + RAMP.astype(">u2").tobytes()
        )
        found = open_picture(tmp_path / name)
    else:
        found = seen(Image.fromarray(RAMP), tmp_path / name)
    assert np.array_equal(np.asarray(found.convert("L")), np.asarray(ramp()))


def test_pictures_of_other_modes_are_as_a_viewer_shows_them(tmp_path: Path) -> None:
    colours = (
        Image.effect_mandelbrot((48, 32), (-2, -1, 1, 1), 50)
        .convert("RGB")
        .quantize(8)
        .convert("RGB")
    )
    opaque = colours.convert("RGBA")
    for number, image in enumerate(
        (
            colours,
            opaque,
            colours.quantize(8),
            colours.convert("L"),
            colours.convert("LA"),
        )
    ):
        found = seen(image, tmp_path / f"{number}.png")
        assert found.mode == "RGB"
        assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))
    found = seen(colours.convert("CMYK"), tmp_path / "a.tif")
    assert np.array_equal(np.asarray(found), np.asarray(colours))
    colours.save(
        tmp_path / "a.mpo", save_all=True, append_images=[colours.rotate(90)]
    )  # a camera's preview
    assert open_picture(tmp_path / "a.mpo").size == colours.size


def test_pictures_that_could_mean_several_things(tmp_path: Path) -> None:
    image = ramp()
    clear = image.convert("RGBA")
    clear.putalpha(200)
    two = {"save_all": True, "append_images": [image.rotate(90)]}
    cases: dict[str, tuple[Image.Image, dict[str, Any], str]] = {
        "alpha.png": (clear, {}, "transparent"),
        "alpha.webp": (clear, {}, "transparent"),
        "palette.png": (image.quantize(4), {"transparency": 0}, "transparent"),
        "key.png": (
            image.convert("RGB"),
            {"transparency": (255, 255, 255)},
            "transparent",
        ),
        "float.tif": (
            Image.fromarray((RAMP / 65535).astype(np.float32)),
            {},
            "does not say which is white",
        ),
        "integers.tif": (
            Image.fromarray(RAMP.astype(np.int32)),
            {},
            "does not say which is white",
        ),
        "frames.gif": (image, two, "holds 2 frames"),
        "frames.png": (image, two, "holds 2 frames"),
        "frames.webp": (image, two, "holds 2 frames"),
        "pages.tif": (image, two, "holds 2 frames"),
        "raw.tif": (image, {"tiffinfo": {254: 1}}, "begins with a preview"),
    }
    for name, (given, options, said) in cases.items():
        given.save(tmp_path / name, **options)
        with pytest.raises(UsageError, match=said) as caught:
            open_picture(tmp_path / name)
        assert caught.value.problems[0].startswith(f"{tmp_path / name}: ")


def test_a_folder_of_images_leaves_none_out(tmp_path: Path) -> None:
    for name in ("b.TIF", "a.png", "c.jfif"):
        ramp().save(tmp_path / name, "PNG" if name != "b.TIF" else "TIFF")
    (tmp_path / "._a.png").write_bytes(b"what macOS leaves")
    assert [path.name for path in image_files(tmp_path)] == ["a.png", "b.TIF", "c.jfif"]
    (tmp_path / "d.heic").write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(UsageError, match="cannot identify image file"):
        list(batches(image_files(tmp_path), 8))
    pointer = tmp_path / "e.png"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    for read in (open_picture, read_result):
        with pytest.raises(UsageError, match="git lfs pull"):
            read(pointer)
