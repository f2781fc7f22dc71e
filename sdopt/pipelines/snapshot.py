"""Saves the state of a pipeline, so that `undo` can restore it after options changed it."""

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from sdopt.pipelines.parts import Pipeline, networks_of


def _kept(owner: Any) -> Callable[[], None]:
    """Saves the attributes of a module or scheduler: its methods, flags, hooks and layers. Returns what restores them.

    Tensors are excluded: replaced parameters must be freed, and the program may have moved buffers to another device.
    """
    kind, attributes = type(owner), dict(vars(owner))
    # The original dictionaries and sets are kept, because hook handles refer to them.
    contents = [
        (value, copy(value))
        for name, value in attributes.items()
        if type(value) in _CHANGING and name not in _TENSORS
    ]

    def restore() -> None:
        owner.__class__ = kind
        vars(owner).clear()
        vars(owner).update(attributes)
        for value, content in contents:
            value.clear()
            value.update(content)

    return restore


_CHANGING = (dict, OrderedDict, set)
"""Types of attributes that options change in place; diffusers replaces configurations, which are of another type."""

_TENSORS = ("_parameters", "_buffers")
"""Attributes of a module that hold its tensors. `Module.to` replaces buffers, and moves parameters in place."""


@dataclass(frozen=True)
class _Weight:
    """A parameter: where it belongs, marks of its values, and its order in memory."""

    module: torch.nn.Module
    name: str
    found: "weakref.ref[torch.nn.Parameter]"
    marks: tuple[Any, ...]
    strides: tuple[int, ...]
    trained: bool
    """Whether gradients are computed for it: a LoRA freezes all weights beside it."""

    @classmethod
    def all_of(cls, network: torch.nn.Module) -> "list[_Weight]":
        parameters = []
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    parameters.append((module, name, parameter))
        marks = _marks([parameter for _, _, parameter in parameters])
        return [
            cls(
                module,
                name,
                weakref.ref(parameter),
                mark,
                parameter.stride(),
                parameter.requires_grad,
            )
            for (module, name, parameter), mark in zip(parameters, marks, strict=True)
        ]

    def restore(self) -> None:
        parameter = self.found()
        assert parameter is not None, "it is not lost"
        self.module._parameters[self.name] = parameter
        if not parameter.is_inference():  # which gradients cannot be asked of any more
            parameter.requires_grad_(self.trained)
        if parameter.stride() != self.strides:
            parameter.data = torch.empty_strided(
                parameter.shape,
                self.strides,
                dtype=parameter.dtype,
                device=parameter.device,
            ).copy_(parameter.data)


@dataclass
class Snapshot:
    """The state of a pipeline, to be restored, and marks of its weights that show whether it can be.

    Parameters are only weakly referenced, so that an option that replaces them frees their memory.
    """

    cls: type
    parts: dict[str, Any]
    kept: list[Callable[[], None]]
    """Each restores the scheduler, or a module of one of the networks."""
    weights: dict[str, list[_Weight]]
    """The parameters of each network."""

    @classmethod
    def of(cls, pipe: Pipeline) -> "Snapshot":
        """Saves the state of a pipeline; reads all of its weights once."""
        networks = networks_of(pipe)
        modules = chain(*(network.modules() for network in networks.values()))
        weights = {name: _Weight.all_of(network) for name, network in networks.items()}
        return cls(
            type(pipe),
            dict(pipe.components),
            list(map(_kept, (pipe.scheduler, *modules))),
            weights,
        )

    @property
    def networks(self) -> set[int]:
        """Identities of the networks, which several pipelines may share."""
        return {id(self.parts[name]) for name in self.weights}

    def lost(self) -> list[str]:
        """Returns a line for each network whose weights have changed."""
        changed = []
        for name, weights in self.weights.items():
            alive = [
                parameter
                for weight in weights
                if (parameter := weight.found()) is not None
            ]
            if len(alive) < len(weights) or _marks(alive) != [
                weight.marks for weight in weights
            ]:
                changed.append(name)
        return [f"the weights of {name} were changed" for name in sorted(changed)]

    def restore(self, pipe: Pipeline) -> None:
        """Restores parts with their methods, flags, hooks, layers and memory formats; `lost` must have returned []."""
        pipe.__class__ = self.cls
        for name, part in self.parts.items():
            setattr(pipe, name, part)
        for restore in self.kept:
            restore()
        for weight in chain(*self.weights.values()):
            weight.restore()


def _marks(parameters: Sequence[torch.nn.Parameter]) -> list[tuple[Any, ...]]:
    """Returns marks of each parameter, which differ once it has changed; its order in memory makes no difference."""
    # A LoRA that is fused, or a type that is changed and changed back, leaves the number of changes in place as it was.
    hashes = defaultdict[torch.device, dict[int, torch.Tensor]](dict)
    for number, parameter in enumerate(parameters):
        plain = type(parameter.data) is torch.Tensor and parameter.device.type != "meta"
        if plain and parameter.dtype in _HASHED:
            hashes[parameter.device][number] = torch.hash_tensor(
                parameter.detach()
            ).view(torch.int64)
    contents: dict[int, int] = {}
    for by_number in hashes.values():
        # In one transfer, because each transfer from a card waits for all work that runs there.
        contents |= zip(
            by_number, torch.stack([*by_number.values()]).tolist(), strict=True
        )
    return [
        (weight.dtype, tuple(weight.shape), _changes(weight), contents.get(n, 0))
        for n, weight in enumerate(parameters)
    ]


def _changes(parameter: torch.nn.Parameter) -> int:
    """Returns how often a parameter was changed in place; 0 of one that was made in inference mode, and counts none."""
    try:
        return parameter._version
    except RuntimeError:
        return 0


_HASHED = (torch.float32, torch.float16, torch.bfloat16)
