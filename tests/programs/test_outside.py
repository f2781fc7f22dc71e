"""Programs that commands hand out, run by Python alone in another folder: each saves the measured image."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.reference import LORAS
from tests.command import SMOKE, sdopt
from tests.programs.test_programs import SAME

pytestmark = pytest.mark.slow

WORK = [
    word
    for word in SMOKE
    if not word.startswith(("workload", "protocol.programs_s", "quality"))
]
WORK += [
    "workload.prompt_count=2",
    "workload.steps=6",
    "quality=none",
    "quality.prompt_count=2",
]

LORA = ["lora=fused", f"lora.path={LORAS}", "lora.weight_name=fxemoji.safetensors"]

WITHOUT_SDOPT = (
    "import runpy, sys; sys.modules['sdopt'] = None; runpy.run_path('program.py')"
)
"""Runs a program where sdopt cannot be imported."""


def image_of(
    program: str, folder: Path, command: Sequence[str] = ("program.py",)
) -> np.ndarray:
    """The image that a program saves, which Python alone runs in an empty folder: (height, width, 3)."""
    folder.mkdir()
    (folder / "program.py").write_text(program)
    ran = subprocess.run(
        [sys.executable, "-I", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return np.asarray(Image.open(folder / "image.png").convert("RGB"))


def measured_image(result: StudyResult, folder: Path, name: str) -> np.ndarray:
    image = result.variant(name).image(0, 0)
    assert image is not None
    return np.asarray(Image.open(folder / image.path).convert("RGB"))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The mean squared difference of two images, of values from 0 to 1."""
    return float(np.mean(np.square(one.astype(float) - other) / 255**2))


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (
            ["caching=deepcache", "caching.interval=2", "layout=channels_last"],
            ["program.py"],
        ),
        ([*LORA, "attention=fused_qkv", "layout=channels_last"], ["-c", WITHOUT_SDOPT]),
    ],
    ids=["deep cache and a layout", "options that diffusers has, without sdopt"],
)
def test_of_a_study(tmp_path: Path, options: list[str], command: list[str]) -> None:
    found = sdopt(tmp_path, "run", *WORK, *options)
    assert found.code == 0, found.shown
    shown = sdopt(tmp_path, "show", str(found.folder), "--json")
    assert shown.code == 0, shown.shown
    [candidate] = json.loads(shown.out)["studies"][0]["candidates"]
    saved = image_of(candidate["program"], tmp_path / "elsewhere", command)
    assert (
        distance(saved, measured_image(found.result, found.folder, candidate["name"]))
        <= SAME
    )
    # The red path: what was measured is not what the baseline draws.
    if "caching=deepcache" in options:
        assert (
            distance(saved, measured_image(found.result, found.folder, "baseline"))
            > SAME
        )


def test_of_optimize(tmp_path: Path) -> None:
    tried = [
        "search.groups=[caching,layout]",
        "search.races=0",
        "gate=none",
        "protocol.replicates=3",
    ]
    tried += [
        "search.options={caching: [none, deepcache], layout: [contiguous, channels_last]}"
    ]
    found = sdopt(tmp_path, "optimize", "emoji", *WORK, *tried)
    assert found.code in (0, 3), found.shown
    [folder] = (tmp_path / "outputs" / "searches").iterdir()
    record = json.loads((folder / "search.json").read_text())
    best = record["winner"] or record["undecided"]
    saved = image_of((folder / "optimized.py").read_text(), tmp_path / "elsewhere")
    final = folder / "final"
    assert distance(saved, measured_image(read_result(final), final, best)) <= SAME
