"""What came of one window of requests, and of several replicates of it."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sdopt.apps.traffic.generator import Sent
from sdopt.record.comparisons import Interval
from sdopt.statistics.ratios import MINIMUM_PROCESSES, LogRatio

NEEDED = {50: 1, 95: 59, 99: 459}
"""Requests below which a percentile is not given: with fewer, none of them need lie beyond it (at 95 % confidence for
the 95th, and at 99 %, as in MLPerf's early stopping, for the 99th)."""


_REFUSED = (429, 503)


@dataclass(frozen=True)
class Window:
    """The figures of one server at one rate."""

    rate: float
    """Requests a second, as scheduled."""
    requests: int
    achieved: float
    """Images a second, from the first scheduled time to the last image, or the last scheduled time if that is later."""
    attainment: float
    """Share of all requests that got their image within the limit; those that were refused or failed did not."""
    goodput: float
    """Images within the limit a second, over the time in which requests came: their rate times `attainment`."""
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    queue_s: float | None
    """Mean time in the queue; None where the server does not say."""
    compute_s: float | None
    batch: float | None
    """Mean number of images of a call, over calls."""
    rejected: int
    """Answers with 429 or 503."""
    errors: int
    """All other requests without an image."""
    lag_s: float
    """How late the latest 1 % of the requests were sent, at least."""
    void: bool
    """Whether they were sent too late to count."""
    disturbed: float | None = None
    """Share of the worker's processor time that other work took, by the kernel's counters; None without any."""
    image_j: float | None = None
    """Energy of the whole device for each image, in joules, idle time included; None where it is not counted."""
    link_s: float | None = None
    """Mean time to fetch an image behind a link, which latencies include; None where the answers have the images."""
    repeated: int = 0
    """Images that are the same as another one of the window, or of earlier ones."""
    sizes: list[str] = field(default_factory=list)
    """Sizes of the images, as in `512x768`, where their headers say it."""
    kinds: list[str] = field(default_factory=list)
    """Kinds of the images' files, as in `png`."""
    most_images: int = 1
    """Images of one answer at most; an answer counts as one image."""
    why: str = ""
    """Why the first of `errors` got no image; "" without any."""


def window_of(
    sent: Sequence[Sent],
    rate: float,
    limit_s: float,
    lag_limit_s: float,
    earlier: Set[int] = frozenset(),
) -> Window:
    """Returns the figures of a window. Latencies count from scheduled times, and include who got no image.

    `earlier` has the checksums of images that were sent before, and that no request asks for again.
    """
    latencies = np.array([each.latency_s for each in sent])
    served = [each for each in sent if math.isfinite(each.latency_s)]
    within = int((latencies <= limit_s).sum())
    # What is given up ends a minute later, and says nothing of how fast the others came.
    done_s = [each.done_s for each in served]
    last_s = max([sent[-1].scheduled_s, *done_s])
    span_s = max(last_s - sent[0].scheduled_s, 1e-9)
    lags_s = [each.sent_s - each.scheduled_s for each in sent]
    lag_s = float(np.quantile(lags_s, 0.99, method="higher"))
    rejected = sum(each.status in _REFUSED for each in sent)
    batches = [each.batch for each in served if each.batch]
    calls = sum(1 / batch for batch in batches)
    digests = [each.digest for each in served if each.digest is not None]
    new = {*digests} - earlier
    why = ""
    for each in sent:
        if each.status not in (200, *_REFUSED):
            why = each.failure
            break
    return Window(
        rate=rate,
        requests=len(sent),
        achieved=len(served) / span_s,
        attainment=within / len(sent),
        goodput=rate * within / len(sent),
        p50_s=percentile(latencies, 50),
        p95_s=percentile(latencies, 95),
        p99_s=percentile(latencies, 99),
        queue_s=_mean([each.queue_s for each in served]),
        compute_s=_mean([each.compute_s for each in served]),
        batch=len(batches) / calls if calls else None,
        rejected=rejected,
        errors=len(sent) - len(served) - rejected,
        lag_s=lag_s,
        void=lag_s > lag_limit_s,
        link_s=_mean([each.link_s for each in served]),
        repeated=len(digests) - len(new),
        sizes=sorted({each.size for each in served if each.size}),
        kinds=sorted({each.kind for each in served if each.kind}),
        most_images=max((each.images for each in served), default=1),
        why=why,
    )


def percentile(latencies: np.ndarray, percent: int) -> float | None:
    """Returns a percentile of latencies; None if there are too few, or if it falls on one that got no image."""
    if len(latencies) < NEEDED[percent]:
        return None
    found = float(np.quantile(latencies, percent / 100, method="higher"))
    return found if math.isfinite(found) else None


def early_stopping(late: int, attainment: float) -> int:
    """Returns of how many requests some may be late, for the share to be attained with 99 % confidence.

    So MLPerf decides whether a run that is not endless passes (`loadgen/early_stopping.cc`, without tolerance): if the
    share were just missed, so few of so many independent requests would be late in one run of a hundred.
    """
    from scipy.stats import nbinom  # takes a second

    return int(nbinom.ppf(0.99, late + 1, 1 - attainment)) + late + 1


def wanted_share(attainment: float, requests: int, stops_early: bool) -> float:
    """Returns the share of a window's requests that must be within the limit; above 1 if they are too few to say.

    With `stops_early`, the window must show it with 99 % confidence; see `early_stopping`.
    """
    if not stops_early:
        return attainment
    too_many = bisect_right(
        range(requests),
        requests,
        key=lambda late: early_stopping(late, attainment),
    )
    return 1 - (too_many - 1) / requests


def max_rate(
    windows: Sequence[Window],
    wanted: Callable[[int], float],
) -> tuple[float, str]:
    """Returns the highest rate at which enough of the requests are within the limit, by interpolation.

    `wanted` returns the share that is enough of a number of requests.

    Returns:
        The rate, and how it relates to the true one: `=`, `>` if even the highest rate attains it, `<` if the lowest
        does not.
    """
    ordered = []
    for window in windows:
        spare = window.attainment - wanted(window.requests)
        ordered.append((window.rate, spare))
    ordered.sort()
    lowest, spare = ordered[0]
    if spare < 0:
        return lowest, "<"
    for (below, spare), (above, lacking) in pairwise(ordered):
        if lacking < 0:
            share = spare / (spare - lacking)
            return below + share * (above - below), "="
    highest, _ = ordered[-1]
    return highest, ">"


_FURTHER, _STEP = 6, 1.3
"""Further rates, at most, until all bracket the highest one; and how many times the last one each is."""


def bracketing(
    windows: Sequence[Window],
    wanted: Callable[[int], float],
    send: Callable[[float], Window],
    slowest: float,
) -> list[Window]:
    """Sends further windows, ever faster or ever slower, until all bracket the highest rate of `max_rate`.

    The lowest rate that is tried is `slowest`.
    """
    further: list[Window] = []
    while len(further) < _FURTHER:
        rate, bound = max_rate([*windows, *further], wanted)
        beyond = rate * _STEP if bound == ">" else rate / _STEP
        if bound == "=" or beyond < slowest:
            break
        further.append(send(float(f"{beyond:.4g}")))
    return further


def interval_of(values: Sequence[float]) -> Interval:
    """Returns the geometric mean of positive figures, one of each replicate; with few of them without an interval."""
    logs = np.log(values)
    count = len(values)
    error = None
    if count >= MINIMUM_PROCESSES:
        error = float(logs.std(ddof=1)) / math.sqrt(count)
    ratio = LogRatio(float(logs.mean()), error, count - 1, count)
    return ratio.interval(0.95)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
