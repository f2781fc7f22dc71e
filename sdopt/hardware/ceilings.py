"""What a device computes with PyTorch: its highest rates, of large products by type and of a copy; TensorFloat-32."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sdopt.errors import with_type
from sdopt.hardware.cards import BFLOAT16, FP8, INT8, TF32, has
from sdopt.hardware.device import Device

if TYPE_CHECKING:
    import torch

SAMPLES = 7
COPY = "copy"

_WARM_UP_S = 1.0
"""Time for which a GPU works before anything is timed, because it idles at a fraction of its clocks."""


@dataclass
class Ceiling:
    """One kind of work, with its raw samples in seconds; `size` is the side of the matrices, or bytes."""

    kind: str
    """A rate of the data sheets (`fp32`, `bf16`, …), or `copy`."""
    size: int
    work: float
    """The work of one sample: operations (multiply and add count as two), or bytes read and written."""
    samples_s: list[float] = field(default_factory=list)
    failure: str = ""
    """Why the rate could not be measured; then there are no samples."""

    @property
    def rate(self) -> float:
        """The rate of the median sample: TFLOP/s (TOP/s for int8), or GB/s for a copy; NaN without samples."""
        if not self.samples_s:
            return math.nan
        return (
            self.work
            / statistics.median(self.samples_s)
            / (1e9 if self.kind == COPY else 1e12)
        )

    @property
    def unit(self) -> str:
        """The unit of the rate."""
        return (
            "GB/s"
            if self.kind == COPY
            else "TOP/s"
            if self.kind == "int8"
            else "TFLOP/s"
        )


def measure_ceilings(device: Device) -> list[Ceiling]:
    """Measures every kind of work that the device can do, in some seconds; if one fails, the others still run.

    Call it in a process of its own, because it initialises the device and sets its precision.
    """
    import torch

    if device.is_cuda:
        torch.cuda.set_device(device.index)
    kinds = ["fp32", "tf32", "fp16", "bf16", "fp8", "int8"]
    possible = {
        "tf32": has(device, TF32),
        "bf16": has(device, BFLOAT16) or not device.is_cuda,
        "fp8": has(device, FP8),
        "int8": has(device, INT8) or not device.is_cuda,
    }
    measured = [_guarded(device, kind) for kind in kinds if possible.get(kind, True)]
    return [*measured, _guarded(device, COPY)]


def _guarded(device: Device, kind: str) -> Ceiling:
    try:
        return _copy(device) if kind == COPY else _product(device, kind)
    except (
        Exception
    ) as error:  # a library may lack this product for this card; the error is reported
        return Ceiling(
            kind,
            0,
            0.0,
            failure=with_type(error),
        )


def _product(device: Device, kind: str) -> Ceiling:
    """Measures products of square matrices, large enough to take a while or to fill a good part of the memory."""
    import torch

    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    enough_s, largest = (0.004, 16384) if device.is_cuda else (0.04, 4096)
    size = 256
    while True:
        multiply = _multiply(device, kind, size)
        multiply()
        took = min(
            _time(device, multiply) for _ in range(3)
        )  # other work on the device makes single calls longer
        if (
            took >= enough_s
            or size >= largest
            or 40 * (2 * size) ** 2 > device.memory_free_gib * 2**30
        ):
            break
        size *= 2
    return _sample(device, Ceiling(kind, size, 2.0 * size**3), multiply)


def _multiply(device: Device, kind: str, size: int) -> Callable[[], object]:
    """Returns a function that multiplies two matrices once. In 8 bits cuBLAS needs the second in column-major order."""
    import torch

    where = device.torch_name
    if kind == "int8":
        left, right = (
            torch.randint(-9, 9, (size, size), dtype=torch.int8, device=where)
            for _ in range(2)
        )
        return lambda: torch._int_mm(left, right.t())
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    left, right = (
        torch.randn(size, size, device=where).to(types.get(kind, torch.float32))
        for _ in range(2)
    )
    if kind == "fp8":
        one = torch.ones((), device=where)
        return lambda: torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
    return lambda: left @ right


def _copy(device: Device) -> Ceiling:
    import torch

    size = 2**30 if device.is_cuda else 2**28
    while 4 * size > device.memory_free_gib * 2**30:
        size //= 2
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_name)
    target = torch.empty_like(source)
    return _sample(
        device, Ceiling(COPY, size, 2.0 * size), lambda: target.copy_(source)
    )


def _sample(device: Device, ceiling: Ceiling, work: Callable[[], object]) -> Ceiling:
    """Warms up, and takes samples; each has enough repetitions to be timed well."""
    enough_s = 0.1 if device.is_cuda else 0.04
    begun, repeats = time.perf_counter(), 1

    def repeated() -> None:
        for _ in range(repeats):
            work()

    # On a GPU, until its clocks are up; times before that are too long.
    took = _time(device, work)
    while device.is_cuda and time.perf_counter() - begun < _WARM_UP_S:
        repeats = max(1, math.ceil(enough_s / took))
        took = _time(device, repeated) / repeats
    repeats = max(1, math.ceil(enough_s / took))
    ceiling.samples_s = [_time(device, repeated) / repeats for _ in range(SAMPLES)]
    return ceiling


def _time(device: Device, work: Callable[[], object]) -> float:
    import torch

    if device.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


# ---- TensorFloat-32 --------------------------------------------------------------------------------------------------


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows TF32 in float32 matrix products and convolutions, or forbids it in both, within the block."""
    import torch

    # The older switches: after the newer `fp32_precision` was set, Inductor's reading of these raises an error.
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


# Names of kernels do not tell whether they round: libraries name them differently on each generation. A factor of
# 1 + 2⁻¹² does: it needs 12 bits of mantissa, of which TF32 keeps 10, so a rounded factor acts as 1.
_FACTOR = 1 + 2**-12


def products_are_rounded(device: torch.device) -> bool:
    """Returns whether a float32 matrix product on the device, with the present settings, rounds its inputs to TF32."""
    import torch

    matrix = torch.full((256, 256), _FACTOR, device=device)
    return _is_rounded(matrix @ torch.ones_like(matrix), terms=256)


def convolutions_are_rounded(device: torch.device) -> bool:
    """Returns whether a float32 convolution on the device, with the present settings, rounds its inputs to TF32."""
    import torch

    images = torch.full((2, 256, 32, 32), _FACTOR, device=device)
    weights = torch.ones(256, 256, 3, 3, device=device)
    return _is_rounded(torch.conv2d(images, weights), terms=256 * 9)


def _is_rounded(sums: torch.Tensor, terms: int) -> bool:
    """Returns whether a sum of factors is nearer to that of rounded ones; algorithms differ in the last bits."""
    return bool(sums.flatten()[0].item() < terms * (1 + _FACTOR) / 2)
