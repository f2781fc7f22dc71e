"""When requests arrive: traces at a mean rate of one a second, which are scaled to any rate."""

from pathlib import Path

import numpy as np

from sdopt.errors import UsageError

KINDS = ("poisson", "constant")


def unit_trace(arrivals: str, count: int, seed: int) -> np.ndarray:
    """Returns the times of `count` arrivals in seconds, ascending from 0, one a second on average.

    Args:
        arrivals: `poisson` (independent exponential gaps), `constant`, or a file with one time per line, in seconds and
            ascending, as a server has recorded them; its mean rate is scaled to one a second.
        count: how many arrivals.
        seed: of the gaps.

    Raises:
        UsageError: the file cannot be read, or has too few times, or times that do not ascend.
    """
    if arrivals == "poisson":
        gaps = np.random.default_rng(seed).exponential(1.0, count - 1)
        return np.concatenate([[0.0], np.cumsum(gaps)])
    if arrivals == "constant":
        return np.arange(count, dtype=float)
    path = Path(arrivals)
    try:
        times = np.array([float(line) for line in path.read_text(encoding="utf-8").split()])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"load.arrivals={arrivals}: {reason}; choose {' or '.join(KINDS)}, or a file of times in seconds"
        ) from error
    if len(times) < count or not np.isfinite(times).all() or (np.diff(times) < 0).any() or times[-1] <= times[0]:
        raise UsageError(f"load.arrivals={arrivals}: needs at least load.requests={count} times, in ascending order")
    times = times[:count] - times[0]
    return np.asarray(times * (count - 1) / times[-1])
