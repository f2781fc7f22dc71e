"""Reference sets: made of a folder, saved, loaded again, and refused where they do not fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sdopt.errors import UsageError
from sdopt.quality.distances import fid, kid
from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first
from sdopt.quality.reference_sets import ReferenceSet, digest_of, reference_set
from tests.quality.conftest import noisy


def test_a_folder_is_a_reference_set(clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "drawings"
    folder.mkdir()
    for number, image in enumerate(drawings):
        Image.fromarray(image).save(folder / f"{number:02d}.png")
    found = reference_set(str(folder), clip)
    assert (found.name, found.n, found.features, found.weights) == ("drawings", 16, clip.name, clip.digest)
    assert found.digest == digest_of(drawings)
    assert found.values is not None
    torch.testing.assert_close(found.values, clip(channels_first(drawings)), rtol=1e-5, atol=1e-5)
    changed = drawings.copy()
    changed[5, 0, 0] = 0
    assert digest_of(changed) != found.digest


def test_a_saved_set_is_the_same_set(clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path) -> None:
    made = ReferenceSet.of_images("drawings", drawings, clip)
    x = clip(channels_first(noisy(drawings, 0.1)))
    made.save(tmp_path / "features.safetensors")
    made.save(tmp_path / "statistics.safetensors", statistics_only=True)
    full, short = (reference_set(str(tmp_path / f"{name}.safetensors"), clip) for name in ("features", "statistics"))
    assert full.digest == short.digest == made.digest
    assert full.n == short.n == 16
    assert full.name == "drawings"
    assert kid(full)(x) == kid(made)(x)
    assert fid(x, full) == fid(x, made) == pytest.approx(fid(x, short))
    with pytest.raises(UsageError, match="'drawings' holds a mean and a covariance only"):
        kid(short)
    short.save(tmp_path / "again.safetensors")
    assert fid(x, ReferenceSet.load(tmp_path / "again.safetensors", clip)) == fid(x, short)


def test_saved_sets_that_do_not_fit(clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path) -> None:
    made = ReferenceSet.of_images("drawings", drawings, clip)
    made.save(tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    facts = {"name": "a", "features": clip.name, "weights": clip.digest, "digest": "0", "n": "16"}
    cases = {
        "holds features effnet of the weights .*; this study needs clip": facts | {"features": "effnet"},
        r"of the weights 0…; this study needs": facts | {"weights": "0"},
        "is not a reference set": {"name": "a"},
    }
    for said, metadata in cases.items():
        save_file(tensors, tmp_path / "b.safetensors", metadata)
        with pytest.raises(UsageError, match=said):
            ReferenceSet.load(tmp_path / "b.safetensors", clip)
    save_file({"mean": made.mean}, tmp_path / "b.safetensors", facts)
    with pytest.raises(UsageError, match="is not a reference set"):
        ReferenceSet.load(tmp_path / "b.safetensors", clip)
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    for file in ("b.safetensors", "absent.safetensors"):
        with pytest.raises(UsageError, match=r"cannot be read as a safetensors file"):
            reference_set(str(tmp_path / file), clip)
