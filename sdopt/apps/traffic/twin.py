"""When requests arrive, and the queue that they would make from a server's service times alone, without overhead."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sdopt.errors import UsageError
from sdopt.text_files import decoded

KINDS = ("poisson", "constant")


def unit_trace(arrivals: str, count: int, seed: int) -> np.ndarray:
    """Returns the times of `count` arrivals in seconds, ascending from 0, one a second on average.

    Args:
        arrivals: `poisson` (independent exponential gaps), `constant`, or a file with one time per line, in seconds and
            ascending, as a server has recorded them. The gaps are scaled to one second on average: what is said of a
            rate is then of requests that came at that rate, also where they are few.
        count: how many arrivals.
        seed: of the gaps.

    Raises:
        UsageError: the file cannot be read, or has too few times, or times that do not ascend.
    """
    if arrivals == "poisson":
        times = np.zeros(count)
        if count > 1:
            gaps = np.random.default_rng(seed).exponential(1.0, count - 1)
            times[1:] = np.cumsum(gaps / gaps.mean())
        return times
    if arrivals == "constant":
        return np.arange(count, dtype=float)
    path = Path(arrivals).expanduser()
    try:
        text = decoded(path.read_bytes())
        times = np.array(list(map(float, text.split())))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"load.arrivals={arrivals}: {reason}; choose {' or '.join(KINDS)}, or a file of times in seconds"
        ) from error
    ascending = np.isfinite(times).all() and (np.diff(times) >= 0).all()
    if len(times) < count or not ascending:
        raise UsageError(
            f"load.arrivals={arrivals}: needs at least load.requests={count} times, in ascending order"
        )
    times = times[:count] - times[0]
    if times[-1] == 0:
        reason = f"the first load.requests={count} times are the same; ask for more, or record fractions of seconds"
        raise UsageError(f"load.arrivals={arrivals}: {reason}")
    return np.asarray(times * (count - 1) / times[-1])


def batched(
    arrivals_s: Sequence[float] | np.ndarray,
    service_s: Callable[[int], float],
    largest: int,
    window_s: float = 0.0,
) -> np.ndarray:
    """Returns the latencies of a queue that serves in batches, as a server's batcher forms them.

    Args:
        arrivals_s: the times of the arrivals, ascending.
        service_s: returns the time of a call with a number of images.
        largest: images of one call at most.
        window_s: how long the oldest may wait for the batch to fill.
    """
    latencies = np.empty(len(arrivals_s))
    waiting: list[int] = []
    free_s = 0.0
    coming = 0

    def arrive(until_s: float) -> None:
        nonlocal coming
        while coming < len(arrivals_s) and arrivals_s[coming] <= until_s:
            waiting.append(coming)
            coming += 1

    while coming < len(arrivals_s) or waiting:
        if not waiting:
            arrive(max(free_s, arrivals_s[coming]))
        begin_s = max(free_s, arrivals_s[waiting[0]])
        arrive(begin_s)
        due_s = arrivals_s[waiting[0]] + window_s
        while len(waiting) < largest and begin_s < due_s:
            begin_s = due_s
            if coming < len(arrivals_s):
                begin_s = min(due_s, arrivals_s[coming])
            arrive(begin_s)
        batch = waiting[:largest]
        waiting = waiting[largest:]
        free_s = begin_s + service_s(len(batch))
        latencies[batch] = free_s - np.asarray(arrivals_s)[batch]
    return latencies


def highest_rate(
    attainment: Callable[[float], float],
    wanted: float,
    low: float,
    high: float,
) -> float:
    """Returns the highest rate between two at which a simulation attains the share wanted, by bisection to 1 %.

    It is `low` if even that is too high, and `high` if that is not.
    """
    if attainment(high) >= wanted:
        return high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        if attainment(middle) >= wanted:
            low = middle
        else:
            high = middle
    return low
