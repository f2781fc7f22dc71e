"""Whether a process that still becomes faster or slower is told from one whose calls only vary."""

import numpy as np
import pytest

from sdopt.report.notes import caveats_of
from sdopt.statistics.noise import unsettled
from sdopt.statistics.summary import summary_of
from tests.gate.test_judge import study, variant
from tests.records import retime

NOISE = 1 + 0.01 * np.random.default_rng(0).standard_normal(12)


@pytest.mark.parametrize(
    ("trend", "way"),
    [
        (np.ones(12), ""),
        (np.linspace(1.5, 1.0, 12), "faster, from 1.4"),
        (np.linspace(1.0, 1.5, 12), "slower, from 1.0"),
        (np.linspace(1.0, 1.0001, 12) / NOISE, ""),  # certain, and too small to count
        ([2.0, *[1.0] * 11], ""),  # one slow call is no trend
    ],
)
def test_a_trend_of_the_calls_of_one_process_is_named(trend: np.ndarray, way: str) -> None:
    candidate = variant("it")
    result = study(candidate)
    for each in result.variants:
        for measurement in each.measurements:
            retime(measurement.shapes[0], NOISE)
    retime(candidate.measurements[-1].shapes[0], np.array(trend) * NOISE)
    found = unsettled(result)
    assert bool(found) == bool(way)
    told = [note for note in caveats_of(summary_of(result)) if note.startswith("Never settled: ")]
    assert len(told) == len(found)
    if way:
        assert found[0].startswith(f"process {len(candidate.measurements)} of it: its calls still became {way}")
        assert "raise protocol.warmup" in told[0]
