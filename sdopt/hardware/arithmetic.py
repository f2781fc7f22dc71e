"""PyTorch's switches for TensorFloat-32, and probes of what they do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows TF32 in float32 matrix products and convolutions, or forbids it in both, within the block."""
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
    matrix = torch.full((256, 256), _FACTOR, device=device)
    return _is_rounded(matrix @ torch.ones_like(matrix), terms=256)


def convolutions_are_rounded(device: torch.device) -> bool:
    """Returns whether a float32 convolution on the device, with the present settings, rounds its inputs to TF32."""
    images = torch.full((2, 256, 32, 32), _FACTOR, device=device)
    weights = torch.ones(256, 256, 3, 3, device=device)
    return _is_rounded(torch.conv2d(images, weights), terms=256 * 9)


def _is_rounded(sums: torch.Tensor, terms: int) -> bool:
    """Returns whether a sum of factors is nearer to that of rounded ones; algorithms differ in the last bits."""
    return bool(sums.flatten()[0].item() < terms * (1 + _FACTOR) / 2)
