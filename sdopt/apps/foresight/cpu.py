"""This machine's CPU as a card: rates that are measured here in two seconds take the place of a data sheet.

No fitted coefficient is needed, since the layers of which the networks mostly consist can be timed where they run: a
convolution of the denoiser, one of the decoder, a matrix product, attention, a copy, and a small operator. It shows
also how well a pass is told by its operations, bytes and kernels alone, without a published figure.
"""

import hashlib
import json
import math
import os
import platform
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sdopt.about import __version__
from sdopt.apps.foresight.latency import PARTS, Array, Costs
from sdopt.errors import counted
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.hardware.probe import default_threads, describe_cpu
from sdopt.measure.interference import InterferenceMeter, disturbance_of
from sdopt.record.files import write_cached
from sdopt.schema import Hardware, Rates, Sheet
from sdopt.scratch import cache_folder

ARCHITECTURE = "cpu"

HALF_WIDTH = math.log(1.3)
"""Half-width of the interval (log), wider than the largest error that was seen; see README.md."""

_SAMPLES = 5

_SAMPLING_S = 0.2
"""Least seconds of samples of a rate: of many short ones, some run between what else the machine does."""

_RESTRICTING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that restrict which instructions libraries use."""

_DENOISER, _DECODER = [(2, 320, 32), (2, 1280, 8)], [(1, 512, 64)]
"""Typical 3×3 convolutions: samples, channels, height and width."""

_PRODUCT_SHARE = 0.7
"""Of a large square product's rate, what the flat products of a transformer reach."""

_MODULE = 9
"""Python and PyTorch around an operator of a network, in times of a bare operator on a few numbers."""

_BYTES = 4
"""Of a number in float32."""


@dataclass(frozen=True)
class CpuRates:
    """What a CPU reaches in float32: FLOP/s, bytes/s, and operators/s. The highest of each is nearest to the truth."""

    denoiser: float
    decoder: float
    products: float
    attention: float
    copy: float
    operators: float

    def parts(self, denoiser: Costs, decoder: Costs, text_flop: float) -> Array:
        """Returns the seconds of each part of a call, in the order of `latency.Table.parts`; nothing is launched."""
        return np.array([
            *self._pass(denoiser, self.denoiser), *self._pass(decoder, self.decoder),
            text_flop / (self.products * _PRODUCT_SHARE), 0.0,
        ])  # fmt: skip

    def _pass(self, costs: Costs, convolutions: float) -> list[float]:
        seconds = _BYTES / self.copy
        return [
            costs.convolutions / convolutions,
            costs.products / (self.products * _PRODUCT_SHARE),
            costs.attention / self.attention,
            (costs.moved - costs.between) * seconds,
            costs.between * seconds,
            0.0,
            costs.kernels / self.operators,
            0.0,
        ]


def seconds_of(parts: Array, steps: int) -> float:
    """Returns the seconds of a call of some steps."""
    size = len(PARTS)
    return float(steps * parts[:size].sum() + parts[size:].sum())


@dataclass(frozen=True)
class Measured:
    """The rates of this machine, and in words what other work took while they were measured; "" if it took little."""

    rates: CpuRates
    disturbance: str = ""


@lru_cache(maxsize=8)
def measure_machine(threads: int) -> Measured:
    """Times typical layers on this CPU, two seconds in all, and keeps the rates for `known_machine`.

    Other work on the machine makes it look slower. So the highest rates that were ever measured count, and those that
    were measured beside other work are not kept.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    meter, begun = InterferenceMeter(os.getpid()), time.perf_counter()
    try:
        with torch.inference_mode():
            rates = _measure()
    finally:
        interference = meter.stop(time.perf_counter() - begun)
        torch.set_num_threads(before)
    disturbance = disturbance_of(interference)
    earlier = known_machine(threads)
    if earlier is not None:
        pairs = zip(astuple(rates), astuple(earlier), strict=True)
        rates = CpuRates(*map(max, pairs))
    if disturbance:
        return Measured(rates, "" if earlier else disturbance)
    content = json.dumps(asdict(rates)).encode()
    write_cached(_rates_file(threads, describe_cpu()), content)
    return Measured(rates)


def known_machine(
    threads: int, described: Mapping[str, Any] | None = None
) -> CpuRates | None:
    """Returns the rates that `measure_machine` kept; None where nothing measured this CPU with these versions.

    `described` is what `describe_cpu` returns, for a caller that has not imported PyTorch.
    """
    cpu = describe_cpu() if described is None else described
    try:
        rates = json.loads(_rates_file(threads, cpu).read_text(encoding="utf-8"))
        return CpuRates(**{name: float(rate) for name, rate in rates.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def machine_of(threads: int) -> Measured:
    """Returns the rates of this machine, measured now where they are not known."""
    known = known_machine(threads)
    return Measured(known) if known else measure_machine(threads)


def _rates_file(threads: int, cpu: Mapping[str, Any]) -> Path:
    """Returns the file of this machine's rates, by processor, threads, versions and what restricts instructions."""
    variables = [os.environ.get(name, "") for name in _RESTRICTING]
    key = [
        cpu,
        platform.node(),
        threads,
        version("torch"),
        __version__,
        variables,
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_folder() / "sdopt" / "rates" / f"{digest}.json"


def _measure() -> CpuRates:
    import torch

    square, tokens = torch.randn(1024, 1024), torch.randn(2, 8, 1024, 40)
    source, few = torch.ones(2**26, dtype=torch.uint8), torch.ones(16)
    target = torch.empty_like(source)
    rates = {
        shape: _fastest(partial(_convolution, *shape))
        for shape in (*_DENOISER, *_DECODER)
    }
    return CpuRates(
        math.prod(rates[shape] for shape in _DENOISER) ** (1 / len(_DENOISER)),
        rates[_DECODER[0]],
        _fastest(lambda: (2.0 * 1024**3, lambda: square @ square)),
        _fastest(
            lambda: (
                4.0 * 16 * 1024**2 * 40,
                lambda: torch.nn.functional.scaled_dot_product_attention(
                    tokens, tokens, tokens
                ),
            )
        ),
        _fastest(lambda: (2.0 * source.numel(), lambda: target.copy_(source))),
        _fastest(lambda: (50.0, lambda: [few.add(1.0) for _ in range(50)])) / _MODULE,
    )


def _convolution(
    samples: int, channels: int, side: int
) -> tuple[float, Callable[[], object]]:
    import torch

    layer = torch.nn.Conv2d(channels, channels, 3, padding=1)
    pixels = torch.randn(samples, channels, side, side)
    return 18.0 * samples * channels**2 * side**2, lambda: layer(pixels)


def _fastest(make: Callable[[], tuple[float, Callable[[], object]]]) -> float:
    """Returns the highest rate of some samples: what else runs on the machine only ever makes them slower."""
    work, run = make()
    run()
    samples: list[float] = []
    while len(samples) < _SAMPLES or sum(samples) < _SAMPLING_S:
        samples.append(timeit.timeit(run, number=1))
    return work / min(samples)


def threads_of(hardware: Hardware) -> int:
    """Returns how many CPU threads a worker has."""
    return hardware.threads or default_threads()


def sheet_of_cpu(hardware: Hardware) -> Sheet:
    """Returns this machine as a data sheet; its memory is the machine's."""
    threads = threads_of(hardware)
    rates = machine_of(threads).rates
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Sheet(
        name=f"this machine's CPU ({counted(threads, 'thread')})",
        device_names=[],
        memory_gib=memory,
        bandwidth_gb_s=rates.copy / 1e9,
        vector=Rates(fp32=rates.products / 1e12),
        architecture=ARCHITECTURE,
    )


def device_of(sheet: Sheet) -> Device:
    """Returns the device that a data sheet describes: a card, or this machine's CPU."""
    if sheet.architecture == ARCHITECTURE:
        return Device("cpu", name=sheet.name)
    return planned_device(sheet)
