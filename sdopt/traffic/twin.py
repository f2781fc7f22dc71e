"""Simulates the queue of a server from its service times alone: what it would do without overhead or disturbance."""

from collections.abc import Callable, Sequence

import numpy as np


def lindley(arrivals_s: np.ndarray, services_s: np.ndarray) -> np.ndarray:
    """Returns the latencies of a queue that serves one request at a time, in order (Lindley 1952).

    Args:
        arrivals_s: the times of the arrivals, ascending.
        services_s: the time that each takes to serve.
    """
    # A completion is the latest, over all earlier arrivals, of that arrival and all services from it on.
    total_s = np.cumsum(services_s)
    completed_s = total_s + np.maximum.accumulate(arrivals_s - np.concatenate([[0.0], total_s[:-1]]))
    return np.asarray(completed_s - arrivals_s)


def batched(
    arrivals_s: Sequence[float] | np.ndarray,
    service_s: Callable[[int], float],
    largest: int,
    window_s: float = 0.0,
    queue: int | None = None,
) -> np.ndarray:
    """Returns the latencies of a queue that serves in batches, as a server's batcher forms them.

    Args:
        arrivals_s: the times of the arrivals, ascending.
        service_s: returns the time of a call with a number of images.
        largest: images of one call at most.
        window_s: how long the oldest may wait for the batch to fill.
        queue: how many may wait; None for any number. The latency of one that is refused is infinite.
    """
    latencies = np.full(len(arrivals_s), np.inf)
    waiting: list[int] = []
    free_s, coming = 0.0, 0

    def arrive(until_s: float) -> None:
        nonlocal coming
        while coming < len(arrivals_s) and arrivals_s[coming] <= until_s:
            if queue is None or len(waiting) < queue:
                waiting.append(coming)
            coming += 1

    while coming < len(arrivals_s) or waiting:
        if not waiting:
            arrive(max(free_s, arrivals_s[coming]))
        begin_s = max(free_s, arrivals_s[waiting[0]])
        arrive(begin_s)
        due_s = arrivals_s[waiting[0]] + window_s
        while len(waiting) < largest and begin_s < due_s:
            begin_s = min(due_s, arrivals_s[coming] if coming < len(arrivals_s) else due_s)
            arrive(begin_s)
        batch, waiting = waiting[:largest], waiting[largest:]
        free_s = begin_s + service_s(len(batch))
        latencies[batch] = free_s - np.asarray(arrivals_s)[batch]
    return latencies


def highest_rate(attainment: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Returns the highest rate between two at which a simulation attains what is wanted, by bisection to 1 %.

    Args:
        attainment: returns the share of requests within the limit at a rate.
        wanted: the share that is wanted.
        low: a rate, in requests a second, that is returned if even it is too high.
        high: another, that is returned if it is not too high.
    """
    if attainment(high) >= wanted:
        return high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if attainment(middle) >= wanted else (low, middle)
    return low
