"""Leaves out normalisations and activations of networks on the meta device, whose operations nobody counts."""

from collections.abc import Callable
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode

_UNCOUNTED = {
    functional.group_norm,
    functional.layer_norm,
    functional.rms_norm,
    functional.silu,
    functional.gelu,
}
"""PyTorch derives the shape of their outputs, which is that of their inputs, in Python: half of the time of a count."""


class WithoutNorms(TorchFunctionMode):
    """Returns the input of a normalisation or an activation in the place of its output."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func in _UNCOUNTED and args:
            return args[0]
        return func(*args, **(kwargs or {}))
