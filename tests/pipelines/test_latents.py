"""Initial noise from files: where images then begin, and what is said of files that do not fit."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sdopt.errors import UsageError
from sdopt.pipelines.prompts import read_latents
from sdopt.worker.draws import timed_draw
from tests.fixtures import Compose, Load

SHAPE = (8, 8, 8)
"""Of the packaged model's latents, at its own size."""
OWN = "workload.size=null"


def saved(folder: Path, latents: object, name: str = "latents.pt") -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file({"latents": latents}, path)
    else:
        torch.save(latents, path)
    return path


@pytest.mark.parametrize("name", ["latents.pt", "latents.safetensors"])
def test_one_latent_serves_all_images(tmp_path: Path, session: Load, name: str) -> None:
    latent = torch.randn(1, *SHAPE)
    path = saved(tmp_path, latent, name)
    made = session(OWN, f"workload.latents={path}", "workload.batch_size=2", "workload.prompt_count=3")
    for number in range(2):
        drawn = made._prompts_and_noise(number, timed_draw(made._variant))["latents"]
        torch.testing.assert_close(drawn, latent.expand(2, -1, -1, -1))


def test_each_image_has_its_own(tmp_path: Path, session: Load) -> None:
    """Images of a prompt stand together; the last batch of three prompts in twos is filled up with the first."""
    latents = torch.randn(7, *SHAPE)
    path = saved(tmp_path, latents)
    made = session(
        OWN,
        *(f"workload.latents={path}", "workload.images_per_prompt=2"),
        *("workload.prompt_count=3", "workload.batch_size=2"),
    )
    torch.testing.assert_close(made._prompts_and_noise(0, timed_draw(made._variant))["latents"], latents[[0, 1, 2, 3]])
    torch.testing.assert_close(made._prompts_and_noise(1, timed_draw(made._variant))["latents"], latents[[4, 5, 0, 1]])


def test_given_latents_make_the_image(tmp_path: Path, session: Load) -> None:
    noise = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0))
    drawn, given = session(OWN), session(OWN, f"workload.latents={saved(tmp_path, noise)}")
    images = [
        made._call(inputs=made._prompts_and_noise(0, timed_draw(made._variant)), output_type="pt").images
        for made in (drawn, given)
    ]
    torch.testing.assert_close(images[0], images[1])


@pytest.mark.parametrize(
    ("latents", "said"),
    [
        (torch.randn(1, 4, 128, 128), "holds latents of 4×128×128; this model and size need 8×8×8"),
        (torch.randn(2, *SHAPE), "holds 2 latents; give one for all images, or one for each of at least 3"),
        (torch.randn(*SHAPE), r"must be floats \(n, channels, height / 8, width / 8\), not torch\.float32 \(8, 8, 8\)"),
        (torch.zeros(1, *SHAPE, dtype=torch.int64), "must be floats"),
        (torch.zeros(0, *SHAPE), "must be floats"),
        (torch.full((1, *SHAPE), float("nan")), "some values are NaN or infinite"),
        (torch.full((1, *SHAPE), torch.inf), "some values are NaN or infinite"),
        ({"a": torch.zeros(1), "b": torch.zeros(1)}, "must hold one tensor, and holds 2 values"),
        ([1, 2], "must hold one tensor"),
        (Path("anything but a tensor"), r"cannot be read as tensors \("),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, variant: Compose, latents: object, said: str) -> None:
    path = saved(tmp_path, latents)
    with pytest.raises(UsageError, match=rf"workload\.latents={path}: {said}"):
        variant(f"workload.latents={path}", "workload.prompt_count=3")


@pytest.mark.parametrize("name", ["latents.pt", "latents.safetensors", "latents.npy"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    said = "give a .safetensors or a .pt file" if name.endswith("npy") else "cannot be read as tensors"
    with pytest.raises(UsageError, match=said):
        read_latents(str(tmp_path / name))
    for content in (b"", b"a", b"\x08" + b"\0" * 7 + b'{"a": 1}', b"PK\x03\x04" + b"\0" * 40, b"no tensors here"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=said):
            read_latents(str(tmp_path / name))


def test_the_size_of_the_workload_counts(tmp_path: Path, variant: Compose) -> None:
    path = saved(tmp_path, torch.randn(1, 8, 16, 16))
    assert variant(f"workload.latents={path}", "workload.size=128").workload.latents == str(path)


def test_a_seed_beside_given_latents_would_do_nothing(tmp_path: Path, variant: Compose) -> None:
    path = saved(tmp_path, torch.randn(1, *SHAPE))
    with pytest.raises(UsageError, match=r"workload\.seed=3: has no effect on noise that workload\.latents gives"):
        variant(f"workload.latents={path}", "workload.seed=3")


def test_a_task_that_starts_from_an_image_takes_none(tmp_path: Path, variant: Compose) -> None:
    path = saved(tmp_path, torch.randn(1, *SHAPE))
    Image.new("RGB", (64, 64)).save(tmp_path / "image.png")
    with pytest.raises(UsageError, match=r"workload\.latents=.*: task=img2img starts from its image"):
        variant(f"workload.latents={path}", "task=img2img", f"task.image={tmp_path}/image.png")
