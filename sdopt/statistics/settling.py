"""Tests whether each process had reached a steady state when it was timed."""

from collections.abc import Iterator

import numpy as np
from scipy import stats

from sdopt.record.records import StudyResult

_LEVEL = 0.05


def unsettled(result: StudyResult) -> list[str]:
    """Returns a line for each process whose timed calls still became faster or slower at the main shape.

    Kendall's rank test of the times against their order, two-sided at 5 % over all processes of the study together
    (Bonferroni): with fewer than six rounds it has little power. A trend smaller than the smallest effect that counts
    (`gate.smallest_speedup`), from the first third of the calls to the last, is not named.
    """
    timed = [
        (variant.name, measurement.replicate + 1, np.array(measurement.shapes[0].deciding_s))
        for variant in result.variants
        if variant.status.timed
        for measurement in variant.measurements
        if len(measurement.shapes[0].deciding_s) > 2
    ]
    least = 1 + result.config.gate.smallest_speedup

    def lines() -> Iterator[str]:
        for name, process, times in timed:
            found = stats.kendalltau(np.arange(times.size), times)
            third = times.size // 3
            first, last = float(np.median(times[:third])), float(np.median(times[-third:]))
            if found.pvalue * len(timed) < _LEVEL and max(first, last) / min(first, last) >= least:
                way = "slower" if found.statistic > 0 else "faster"
                change = f"from {first:.3g} s to {last:.3g} s over {times.size} calls"
                yield f"process {process} of {name}: its calls still became {way}, {change}"

    return list(lines())
