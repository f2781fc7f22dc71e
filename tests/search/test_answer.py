"""The notes of a search say no more than what its judged studies did."""

from types import SimpleNamespace
from typing import cast

import pytest

from sdopt.search.answer import _notes
from sdopt.search.run import Search
from tests.records import reconfigure
from tests.report.test_claims import measured


@pytest.mark.parametrize(
    ("latents", "said", "noise"),
    [
        (None, "other prompts, noise and processes", "other noise"),
        (
            "noise.safetensors",
            "other prompts and processes",
            "the noise of workload.latents",
        ),
    ],
)
def test_noise_is_other_unless_a_file_gives_it(
    latents: str | None, said: str, noise: str
) -> None:
    study = measured()
    reconfigure(study, "workload", latents=latents)
    trials, config = (
        SimpleNamespace(ended="", spoiled=[]),
        SimpleNamespace(objectives=[]),
    )
    search = cast(Search, SimpleNamespace(trials=trials, config=config))
    again, judged = _notes(search, [study, study])
    assert said in again
    assert f"each on {noise};" in judged
