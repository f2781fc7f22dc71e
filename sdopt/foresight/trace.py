"""Counts what one forward pass costs, without weights or a GPU: on the meta device, observed at each operator."""

import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_CONVOLUTION, _PRODUCT, _ATTENTION = "convolution", "product", "attention"

_VIEWS = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "expand",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "chunk",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "as_strided",
    "unbind",
    "empty",
    "empty_like",
    "new_empty",
)
"""Operators that start no kernel."""


@dataclass
class Costs:
    """What one pass costs: operations and bytes by class of operator, kernels, and the peak of its memory."""

    flop: dict[str, float] = field(default_factory=dict)
    """Operations (multiply and add count as two) of convolutions, matrix products and fused attention."""
    scores: float = 0.0
    """Operations of attention whose scores are written to memory, as without a fused kernel."""
    moved: float = 0.0
    """Numbers that kernels read and write, weights included; times the size of the type they are bytes."""
    between: float = 0.0
    """Part of `moved`: that of kernels that only move or map numbers, which a compiler may fuse."""
    kernels: int = 0
    peak: int = 0
    """Most bytes that were alive together, without parameters."""

    @property
    def convolutions(self) -> float:
        """Operations of convolutions."""
        return self.flop.get(_CONVOLUTION, 0.0)

    @property
    def products(self) -> float:
        """Operations of matrix products, those of attention without a fused kernel included."""
        return self.flop.get(_PRODUCT, 0.0)

    @property
    def attention(self) -> float:
        """Operations of fused attention."""
        return self.flop.get(_ATTENTION, 0.0)

    @property
    def total(self) -> float:
        """All operations."""
        return sum(self.flop.values())


def trace(function: Any, *inputs: Any, kept: Any = (), **more: Any) -> Costs:
    """Runs a function once on the meta device; returns what it costs.

    Args:
        function: a network, or a method of one, on the meta device.
        inputs: its arguments; tensors on the meta device.
        kept: further tensors that are alive meanwhile and count towards the peak.
        more: keyword arguments.
    """
    owner = getattr(function, "__self__", function)
    observer = _Observer(owner if isinstance(owner, torch.nn.Module) else None)
    for tensor in kept:
        observer.allocate(tensor)
    with torch.no_grad(), _FusedAttention(observer), observer:
        function(*inputs, **more)
    return observer.costs


class _Observer(TorchDispatchMode):
    """Counts each operator, and the bytes of what operators have made until it is freed."""

    def __init__(self, network: torch.nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = Costs()
        self._alive = 0
        # Views of parameters must not count as new storages.
        weights = [] if network is None else [*network.parameters(), *network.buffers()]
        self._seen = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        outputs = [each for each in _flat(made) if isinstance(each, torch.Tensor)]
        for tensor in outputs:
            self.allocate(tensor)
        if name not in _VIEWS:
            self._count(func, name, args, kwargs or {}, made, outputs)
        return made

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, made: Any, outputs: list[torch.Tensor]) -> None:
        inputs = [each for each in _flat([args, list(kwargs.values())]) if isinstance(each, torch.Tensor)]
        moved = float(sum(math.prod(tensor.shape) for tensor in (*inputs, *outputs)))
        self.costs.moved += moved
        self.costs.kernels += 1
        counter = flop_registry.get(func.overloadpacket)
        if counter is None:
            self.costs.between += moved
            return
        kind = _CONVOLUTION if "convolution" in name else _PRODUCT
        self.costs.flop[kind] = self.costs.flop.get(kind, 0.0) + counter(*args, **kwargs, out_val=made)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Counts one call of fused attention; returns its output."""
        made = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        rows = math.prod(query.shape[:-1])
        self.costs.flop[_ATTENTION] = self.costs.flop.get(_ATTENTION, 0.0) + 2.0 * rows * key.shape[-2] * (
            query.shape[-1] + value.shape[-1]
        )
        self.costs.moved += sum(math.prod(tensor.shape) for tensor in (query, key, value, made))
        self.costs.kernels += 1
        return made

    def allocate(self, tensor: torch.Tensor) -> None:
        """Counts the storage of a tensor from now until it is freed, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self._alive += size
        self.costs.peak = max(self.costs.peak, self._alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._alive -= size


class _FusedAttention(TorchFunctionMode):
    """Replaces PyTorch's fused attention, which the meta device would compute with all scores, by its output alone."""

    def __init__(self, observer: _Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            named = {name: value for name, value in (kwargs or {}).items() if name in ("query", "key", "value")}
            return self._observer.attend(*args[:3], **named)
        return func(*args, **(kwargs or {}))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _flat(each)]
    return [value]
