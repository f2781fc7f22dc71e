"""A search measures how much images differ by chance where the gate needs that and no packaged calibration fits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdopt.gate.calibration import FOLDER, read_calibration
from sdopt.search.config import search_file
from sdopt.search.record import FINAL
from sdopt.search.studies import CALIBRATE, Studies


@pytest.mark.parametrize(
    ("given", "measured"),
    [
        ([], False),  # the packaged model at 25 steps
        (["workload.steps=4"], True),
        (["scheduler=euler"], True),
        (["workload.steps=4", "gate=none"], False),
        (["workload.steps=4", f"gate.calibration={FOLDER / 'emoji-25.json'}"], False),
    ],
)
def test_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], measured: bool
) -> None:
    asked: list[str] = []

    def measure(_self: Studies, stage: str, overrides: list[str], brief: bool) -> Any:
        asked.extend([stage, *overrides])
        return SimpleNamespace()

    monkeypatch.setattr(Studies, "_measured", measure)
    monkeypatch.setattr("sdopt.search.studies.calibration_of", lambda _: read_calibration(FOLDER / "emoji-25.json"))
    studies = Studies(given, search_file(), None, tmp_path)
    studies.calibrate(lambda _: None)
    assert (asked[:1] == [CALIBRATE]) is measured
    named = [word for word in studies.overrides(FINAL) if word.startswith("gate.calibration=")]
    assert (f"gate.calibration='{tmp_path / 'calibration.json'}'" in named) is measured
    if measured:
        assert {"quality.prompt_count=24", "quality.floor_prompts=24", "study.variants={baseline:[]}"} <= set(asked)
