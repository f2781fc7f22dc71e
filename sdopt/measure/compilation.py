"""Counts and times compilations in this process: by TorchDynamo, and by compilers outside TorchDynamo."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_own_s: list[float] = []
_packages: list[float | None] = []
"""Packages of compiled code: None if this process wrote it, else how long the process that wrote it had compiled."""
_kept: list[tuple[Path, float]] = []
"""The folder where Inductor keeps compiled code, if any, and how long earlier processes had compiled for it."""
_COST = "sdopt.json"


@contextmanager
def compilation() -> Iterator[None]:
    """Times the compilation of one graph outside TorchDynamo: a trace, a capture, an export, a conversion."""
    start = time.perf_counter()
    yield
    _own_s.append(time.perf_counter() - start)


def compiled_so_far() -> tuple[float, int]:
    """Returns the seconds that compilers took since the last `reset`, and the number of graphs that they made."""
    from torch._dynamo.utils import compile_times, counters

    times: dict[str, Any] = dict(
        zip(*compile_times(repr="csv", aggregate=True), strict=True)
    )
    by_dynamo = float(times.get("_compile.compile_inner", 0))
    return by_dynamo + sum(_own_s), int(counters["stats"]["unique_graphs"]) + len(
        _own_s
    )


def note_package(earlier_s: float | None) -> None:
    """Records a package on disk, from where later processes load it.

    `earlier_s` is for how long another process had compiled it; None if this one has.
    """
    _packages.append(earlier_s)


def packages_so_far() -> tuple[int, float]:
    """Returns since the last `reset` the number of packages written, and the compile time of packages loaded.

    A graph that Inductor wrote to a kept folder is a package, too.
    """
    written, read = kept_so_far()
    earlier_s = sum(cost for _, cost in _kept) if read else 0.0
    return _packages.count(None) + written, sum(filter(None, _packages)) + earlier_s


def keep_in(folder: Path) -> None:
    """Makes Inductor keep what it compiles in a folder, from where later processes load it.

    `torch.compiler.save_cache_artifacts` leaves out what a C++ compiler made, so that on a CPU the packaged model took
    46 s to its first image with it, 62 s without it.
    """
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    _kept.append((folder, compile_s_in(folder / _COST)))


def is_kept() -> bool:
    """Returns whether Inductor keeps what it compiles in a folder; see `keep_in`."""
    return bool(_kept)


def kept_so_far() -> tuple[int, int]:
    """Returns how many graphs Inductor wrote to a kept folder, and how many it read from there, since `reset`."""
    from torch._dynamo.utils import counters

    seen = counters["inductor"] if _kept else {}
    return seen.get("fxgraph_cache_miss", 0), seen.get("fxgraph_cache_hit", 0)


def note_cost() -> None:
    """Writes beside kept code how long compiling took altogether, if this process compiled some."""
    if kept_so_far()[0]:
        for folder, earlier_s in _kept:
            write_compile_s(folder / _COST, earlier_s + compiled_so_far()[0])


def compile_s_in(file: Path) -> float:
    """Returns the seconds of compiling that a file beside compiled code tells; 0 if they are not known."""
    try:
        return float(json.loads(file.read_text(encoding="utf-8"))["compile_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0  # no measurement fails for it


def write_compile_s(file: Path, seconds: float) -> None:
    """Writes what `compile_s_in` reads."""
    file.write_text(json.dumps({"compile_s": seconds}), encoding="utf-8")


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
    _kept.clear()
