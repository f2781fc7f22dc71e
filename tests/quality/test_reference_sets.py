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
from sdopt.quality.reference_sets import ReferenceSet, reference_set
from tests.quality.conftest import noisy


def test_a_folder_is_a_reference_set(clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "drawings"
    folder.mkdir()
    for number, image in enumerate(drawings):
        Image.fromarray(image).save(folder / f"{number:02d}.png")
    found = reference_set(str(folder), clip)
    assert (found.name, found.n, found.features, found.weights) == ("drawings", 16, clip.name, clip.digest)
    torch.testing.assert_close(found.values, clip(channels_first(drawings)), rtol=1e-5, atol=1e-5)


def test_a_saved_set_is_the_same_set(clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path) -> None:
    made = ReferenceSet.of_images("drawings", drawings, clip)
    x = clip(channels_first(noisy(drawings, 0.1)))
    made.save(tmp_path / "features.safetensors")
    full = reference_set(str(tmp_path / "features.safetensors"), clip)
    assert (full.n, full.name) == (16, "drawings")
    assert (kid(full)(x), fid(x, full)) == (kid(made)(x), fid(x, made))


def test_saved_sets_that_do_not_fit(clip: ClipFeatures, drawings: np.ndarray, tmp_path: Path) -> None:
    made = ReferenceSet.of_images("drawings", drawings, clip)
    made.save(tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    facts = {"name": "a", "features": clip.name, "weights": clip.digest}
    cases = {
        "holds features effnet of the weights .*; this study needs clip": facts | {"features": "effnet"},
        r"of the weights 0…; this study needs": facts | {"weights": "0"},
        "is not a reference set": {"name": "a"},
    }
    for said, metadata in cases.items():
        save_file(tensors, tmp_path / "b.safetensors", metadata)
        with pytest.raises(UsageError, match=said):
            ReferenceSet.load(tmp_path / "b.safetensors", clip)
    save_file({"mean": made.values}, tmp_path / "b.safetensors", facts)
    with pytest.raises(UsageError, match="is not a reference set"):
        ReferenceSet.load(tmp_path / "b.safetensors", clip)
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    for file in ("b.safetensors", "absent.safetensors"):
        with pytest.raises(UsageError, match=r"cannot be read as a safetensors file"):
            reference_set(str(tmp_path / file), clip)
