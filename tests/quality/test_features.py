"""Features by name: what they are, that they repeat, and what is said where they cannot be had."""

import importlib.util
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sdopt.errors import UsageError
from sdopt.quality.available import require_features
from sdopt.quality.features import ClipFeatures, feature_extractor, without_pickles
from sdopt.quality.images import batches, channels_first, image_files, read_images
from sdopt.quality.metrics import measured_metrics
from sdopt.schema import Model, Quality

effnet_installed = importlib.util.find_spec("efficientnet_lite_pytorch") is not None


def test_clip_features_are_the_projected_embeddings_of_the_model(
    clip: ClipFeatures, drawings: np.ndarray
) -> None:
    images = channels_first(drawings)
    with torch.no_grad():
        pooled = clip.model.vision_model(pixel_values=images / 127.5 - 1).pooler_output
        expected = clip.model.visual_projection(pooled)
    torch.testing.assert_close(clip(images), expected, rtol=1e-4, atol=1e-5)


def test_the_digest_is_that_of_the_weights(
    clip: ClipFeatures, clip_folder: Path
) -> None:
    again = feature_extractor(f"clip:{clip_folder}")
    assert again.digest == clip.digest
    del again.digest
    next(again.parameters()).data.view(-1)[0] += 1
    assert again.digest != clip.digest


@pytest.mark.skipif(not effnet_installed, reason="effnet is not installed")
def test_effnet_tells_what_is_in_a_photograph(drawings: np.ndarray) -> None:
    """That resizing, scaling and weights fit together shows in the classes: ImageNet's 652 is a military uniform."""
    from matplotlib.cbook import get_sample_data

    photograph = np.asarray(
        Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)).convert("RGB")
    )
    effnet = feature_extractor("effnet")
    found = effnet(channels_first(photograph[None]))
    assert found.shape == (1, 1280)
    assert effnet.model._fc(found).argmax() == 652  # type: ignore[union-attr, operator]
    shapes = [
        tuple(layer.shape[1:]) for layer in effnet.maps(channels_first(drawings[:1]))
    ]
    assert shapes == [
        (112 * 112, 16),
        (56 * 56, 24),
        (28 * 28, 40),
        (14 * 14, 112),
        (7 * 7, 320),
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "vgg",
            "unknown features 'vgg'; choose one of: emojiclip, effnet, inception, clip:<folder or hub id>",
        ),
        ("clip:", "unknown features 'clip:'; choose one of: emojiclip"),
        ("clip:/no/such/folder", "/no/such/folder is neither a folder nor a hub id"),
    ],
)
def test_features_that_do_not_exist(name: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        require_features(name)
    assert said in str(caught.value)


def test_a_hub_id_that_is_not_in_the_cache_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_features("clip:nobody/never-made-this")
    with pytest.raises(
        UsageError,
        match=r"features clip:nobody/never-made-this: nobody/never-made-this cannot be",
    ):
        feature_extractor("clip:nobody/never-made-this")


@pytest.mark.parametrize("file", ["preprocessor_config.json", "tokenizer.json"])
def test_a_folder_that_is_not_whole(
    clip_folder: Path, tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    (folder / file).unlink()
    with pytest.raises(UsageError, match=f"lacks {file}"):
        require_features(f"clip:{folder}")


def test_weights_that_are_missing_are_not_made_up(
    clip_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UsageError,
        match=r"is not a complete CLIPModel; it lacks visual_projection\.weight",
    ):
        feature_extractor(f"clip:{folder}")


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("effnet", "efficientnet_lite_pytorch"),
        ("inception", "torch_fidelity torchvision"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, packages: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"not installed; pip install {packages}"):
        require_features(name)


def test_images_come_back_from_files_as_they_were(
    drawings: np.ndarray, tmp_path: Path
) -> None:
    for number, image in enumerate(drawings[:5]):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    files = image_files(tmp_path)
    np.testing.assert_array_equal(read_images(files), drawings[:5])
    assert [len(batch) for batch in batches(files, 2)] == [2, 2, 1]
    Image.new("RGB", (32, 64)).save(tmp_path / "2.png")
    assert [batch.shape[:3] for batch in batches(files, 8)] == [
        (2, 64, 64),
        (1, 64, 32),
        (2, 64, 64),
    ]
    with pytest.raises(UsageError, match=r"2\.png: is 32×64, but 0\.png is 64×64"):
        read_images(files)
    (tmp_path / "0.png").write_bytes(b"not an image")
    with pytest.raises(UsageError, match=r"0\.png: cannot be read as an image"):
        read_images(files)
    (tmp_path / "empty").mkdir()
    cases = (
        ("empty", "holds no image"),
        ("absent", r"cannot be read \(No such file"),
        (300 * "x", r"cannot be read \(File name too"),
    )
    for folder, said in cases:
        with pytest.raises(UsageError, match=said):
            image_files(tmp_path / folder)


def test_libraries_that_would_unpickle_read_tensors_only(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "tensors.pt")
    torch.save(Path("anything but a tensor"), tmp_path / "object.pt")
    with without_pickles():
        assert (
            torch.load(tmp_path / "tensors.pt", weights_only=False)["weight"].sum() == 2
        )
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "object.pt", weights_only=False)
    assert torch.load(tmp_path / "object.pt", weights_only=False) == Path(
        "anything but a tensor"
    )


def test_dinov2_gives_its_class_token_and_all_metrics_over_it(
    drawings: np.ndarray, tmp_path: Path
) -> None:
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    model = Dinov2Model(Dinov2Config(**sizes)).eval()
    model.save_pretrained(tmp_path / "tiny-dino")
    size = {"height": 56, "width": 56}
    BitImageProcessorPil(size=size, do_center_crop=False).save_pretrained(
        tmp_path / "tiny-dino"
    )
    name = f"dinov2:{tmp_path / 'tiny-dino'}"
    extractor = feature_extractor(name)
    images = channels_first(drawings[:4])
    found = extractor(images)
    processor = BitImageProcessorPil.from_pretrained(tmp_path / "tiny-dino")
    pixels = processor(images=list(images), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        torch.testing.assert_close(
            found, model(pixel_values=pixels).last_hidden_state[:, 0]
        )
    assert [tuple(layer.shape) for layer in extractor.maps(images)] == [(4, 16, 32)] * 2
    metrics = {
        metric.name for metric in measured_metrics(Quality(features=[name]), Model())
    }
    assert {"fid_tiny_dino", "cmmd_tiny_dino", "perceptual_tiny_dino"} <= metrics
    assert not any(metric.startswith("clip_score") for metric in metrics)
    (tmp_path / "tiny-dino" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        feature_extractor(name)


def test_lpips_is_measured_where_its_weights_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names(lpips: bool | None) -> set[str]:
        return {
            metric.name
            for metric in measured_metrics(Quality(features=[], lpips=lpips), Model())
        }

    monkeypatch.setattr("sdopt.quality.metrics.require_lpips", lambda: None)
    assert "lpips_alex" in names(None)
    assert "lpips_alex" not in names(False)

    def missing() -> None:
        raise UsageError("its weights are missing")

    monkeypatch.setattr("sdopt.quality.metrics.require_lpips", missing)
    assert "lpips_alex" not in names(None)
    assert "lpips_alex" in names(True)
