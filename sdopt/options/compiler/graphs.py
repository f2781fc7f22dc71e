"""Modules that take the places of others: a graph for each input shape, or an engine. Imports PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from sdopt.measure.compilation import compilation, runs_eagerly
from sdopt.options.compiler.base import replace_modules
from sdopt.pipelines.parts import Pipeline


def replace_by_graphs(
    pipe: Pipeline, chosen: Iterable[str], make: Callable[[Tensors], Graph]
) -> dict[str, list[PerShape]]:
    """Replaces each module of the targets by a `PerShape`, of each kind of step its own; returns them by target."""
    return replace_modules(
        pipe, chosen, lambda module: PerShape(module, make), by_step=True
    )


class StandIn(torch.nn.Module):
    """Replaces a module: has the same attributes, and a different `forward`.

    `unwrapped` returns the original module, as for a module wrapped by `torch.compile`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)


class Tensors(torch.nn.Module):
    """A module as a function from tensors to tensors; the call's other arguments are constants.

    Attributes:
        inputs: the tensors among the arguments.
        key: everything that a graph of this call depends on, except the values of tensors.
    """

    def __init__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.module = module
        leaves, self._spec = tree_flatten((args, kwargs))
        self.inputs, self._arguments = _without_tensors(leaves)
        self._results: list[Any] = []
        self._result_spec: Any = None
        weight = next(module.parameters())
        self.key = (
            tuple(
                (tuple(tensor.shape), tensor.dtype, tensor.device)
                for tensor in self.inputs
            ),
            tuple(self._arguments),
            str(self._spec),
            (weight.dtype, weight.device, weight.data_ptr()),
            (
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled(weight.device.type),
            ),
        )

    @property
    def masks(self) -> list[torch.Tensor]:
        """The inputs that say of each token whether it counts, or of what kind it is."""
        return [
            tensor
            for tensor in self.inputs
            if tensor.ndim > 1 and not tensor.is_floating_point()
        ]

    @property
    def values(self) -> tuple[tuple[Any, ...], ...]:
        """The numbers of the masks."""
        return tuple(tuple(mask.flatten().tolist()) for mask in self.masks)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Calls the module with `tensors` in place of `inputs`; returns the tensors in its output."""
        from torch.utils._pytree import tree_unflatten

        args, kwargs = tree_unflatten(
            _with_tensors(self._arguments, tensors), self._spec
        )
        leaves, self._result_spec = tree_flatten(self.module(*args, **kwargs))
        results, self._results = _without_tensors(leaves)
        return tuple(results)

    def output(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Returns the output structure of the module's last call, filled with `tensors`."""
        return tree_unflatten(_with_tensors(self._results, tensors), self._result_spec)


_TENSOR = "a tensor"
"""Placeholder for a tensor."""


def _without_tensors(leaves: Iterable[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """Returns the tensors among `leaves`, and `leaves` with a placeholder for each tensor."""
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            leaf = _TENSOR  # noqa: PLW2901
        others.append(leaf)
    return tensors, others


def _with_tensors(leaves: Iterable[Any], tensors: Iterable[torch.Tensor]) -> list[Any]:
    in_order = iter(tensors)
    filled = []
    for leaf in leaves:
        filled.append(next(in_order) if leaf is _TENSOR else leaf)
    return filled


Graph = Callable[..., Sequence[torch.Tensor]]
"""A function from tensors to tensors, with the signature of `Tensors.forward`."""


class _Readings(TorchFunctionMode):
    """Notes in the block whether Python reads the value of a tensor, which a traced graph keeps for all later calls.

    Lumina 2 reads from its mask how long each text is.
    """

    seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen = self.seen or func in _READING
        return func(*args, **(kwargs or {}))


_READING = {
    *(torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy),
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__index__),
}


class PerShape(StandIn):
    """Replaces a module by one graph per input shape; a graph is built at the first call with its shape.

    Of a module that reads values of tensors in Python, there is a graph for each of these, too.

    Args:
        module: the module to replace.
        make: builds the graph of a call; must run the call once, so that the structure of the output is known.

    Attributes:
        graphs: the graphs, by `Tensors.key`, and by `Tensors.values` if these are read.
    """

    def __init__(
        self, module: torch.nn.Module, make: Callable[[Tensors], Graph]
    ) -> None:
        super().__init__(module)
        self._make = make
        self._reads: bool | None = None
        self.graphs: dict[Any, tuple[Tensors, Graph]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph for this call, and builds it first if it is missing."""
        if runs_eagerly():
            return self._orig_mod(*args, **kwargs)
        call = Tensors(self._orig_mod, args, kwargs)
        inputs = call.inputs
        if self._reads is None and call.masks:
            with _Readings() as readings:
                self._orig_mod(*args, **kwargs)
            self._reads = readings.seen
        key = (call.key, call.values) if self._reads else call.key
        if key not in self.graphs:
            with compilation():
                self.graphs[key] = call, self._make(call)
            call.inputs = []
        made, graph = self.graphs[key]
        return made.output(graph(*inputs))


class TensorRtEngine(StandIn):
    """Replaces a module by its TensorRT engine, which Torch-TensorRT rebuilds for each new shape."""

    def __init__(self, module: torch.nn.Module) -> None:
        import torch_tensorrt

        super().__init__(module)
        engine: Any = torch_tensorrt.MutableTorchTensorRTModule(
            module, use_explicit_typing=True
        )
        # The engine is a module; as a submodule it would list all weights twice.
        self.__dict__["_engine"] = engine
        self._shapes: set[Any] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the engine; counts the first call of each shape as a compilation."""
        tensors, _ = _without_tensors(tree_flatten((args, kwargs))[0])
        shape = tuple(tuple(tensor.shape) for tensor in tensors)
        if shape in self._shapes:
            return self._engine(*args, **kwargs)
        with compilation():
            result = self._engine(*args, **kwargs)
        self._shapes.add(shape)
        return result


def graphs_in(stand_ins: Iterable[PerShape]) -> int:
    """Returns the total number of graphs that were built."""
    return sum(len(stand_in.graphs) for stand_in in stand_ins)
