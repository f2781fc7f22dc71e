"""Counts and times compilations in this process: by TorchDynamo, and by compilers outside TorchDynamo."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_own_s: list[float] = []
_packages: list[float | None] = []
"""Packages of compiled code: None if this process wrote it, else how long the process that wrote it had compiled."""


@contextmanager
def compilation() -> Iterator[None]:
    """Times the compilation of one graph outside TorchDynamo: a trace, a capture, an export, a conversion."""
    start = time.perf_counter()
    yield
    _own_s.append(time.perf_counter() - start)


def compiled_so_far() -> tuple[float, int]:
    """Returns the seconds that compilers took since the last `reset`, and the number of graphs that they made."""
    from torch._dynamo.utils import compile_times, counters

    times: dict[str, Any] = dict(zip(*compile_times(repr="csv", aggregate=True), strict=True))
    by_dynamo = float(times.get("_compile.compile_inner", 0))
    return by_dynamo + sum(_own_s), int(counters["stats"]["unique_graphs"]) + len(_own_s)


def note_package(earlier_s: float | None) -> None:
    """Records a package on disk, from where later processes load it.

    Args:
        earlier_s: for how long another process had compiled it, if this one loaded it; None if this one compiled it.
    """
    _packages.append(earlier_s)


def packages_so_far() -> tuple[int, float]:
    """Returns since the last `reset` the number of packages written, and the compile time of packages loaded."""
    return _packages.count(None), sum(filter(None, _packages))


@contextmanager
def eagerly() -> Iterator[None]:
    """Runs what compilers replaced operator by operator, without compiling anything anew, to compare with it."""
    import torch

    before = _eager[0]
    _eager[0] = True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _eager[0] = before


def runs_eagerly() -> bool:
    """Returns whether graphs shall step aside for the modules that they were made from; see `eagerly`."""
    return _eager[0]


_eager = [False]


def reset() -> None:
    """Resets the counts. Dynamo's own times cannot be reset, and stay."""
    from torch._dynamo.utils import counters

    counters.clear()
    _own_s.clear()
    _packages.clear()
