"""patch: functions of a user's own file that change the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from sdopt.contract import LATENCY, MEMORY, NOTHING
from sdopt.errors import UsageError
from sdopt.options import Context, Contract, Finding, Optimization, Proof, Stage, Trace
from sdopt.pipelines.functions import absolute, defined, loaded
from sdopt.pipelines.parts import Pipeline
from sdopt.record.choices import PATCH
from sdopt.schema import OneOf

if TYPE_CHECKING:
    import torch

_CLAIMS = {
    "latency": LATENCY,
    "memory": MEMORY,
    "both": LATENCY | MEMORY,
    "nothing": NOTHING,
}


class NoPatch(Optimization):
    """Leaves the pipeline as it is."""

    stage = Stage.LAYOUT

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        return lambda trace: Finding(True, "no function of one's own")


@dataclass(frozen=True)
class Patch(Optimization):
    """Calls functions of the user's files with the pipeline; what they return instead of None is ignored.

    They are code: nothing but a command line, a preset or a program names them, never a result that is read.
    """

    stage = Stage.LAYOUT

    functions: list[str] = field(default_factory=list)
    """`file.py:function`, in the order in which they are called."""
    # Words, because YAML has neither enumerations nor sets: see `promised` and `claimed`.
    contract: Annotated[str, OneOf(Contract)] = "lossy"  # type: ignore[assignment]
    """What they promise about the images: `exact`, `equivalent` or `lossy`."""
    claims: Annotated[str, OneOf(_CLAIMS)] = "latency"  # type: ignore[assignment]
    """What they are for: `latency`, `memory`, `both` or `nothing`."""

    @override
    def promised(self) -> Contract:
        return Contract(self.contract)

    @override
    def claimed(self) -> frozenset[str]:
        return _CLAIMS[self.claims]

    @override
    def located(self) -> Patch:
        return replace(self, functions=list(map(absolute, self.functions)))

    @override
    def lacking(self, ctx: Context) -> list[str]:
        return (
            []
            if self.functions
            else ["patch=file.py:function names the functions to call"]
        )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons: list[str] = []
        for function in self.functions:
            try:
                defined(function, PATCH)
            except UsageError as error:
                reasons += error.problems
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        before = _state(pipe)
        for function in self.functions:
            loaded(function, PATCH)(pipe)
        after = _state(pipe)
        changed = sorted(
            name
            for name in before.keys() | after.keys()
            if before.get(name) != after.get(name)
        )

        def proof(trace: Trace) -> Finding:
            names = ", ".join(self.functions)
            if not changed:
                return Finding(
                    False,
                    f"{names} left the pipeline and PyTorch's settings as they were",
                )
            return Finding(
                True,
                f"{names} changed {len(changed)} parts, such as {changed[0]}",
                {"changed": len(changed)},
            )

        return proof


def _state(pipe: Any) -> dict[str, Any]:
    """Returns what a function may change, by name: parts, schedulers, modules with their weights, global settings."""
    import torch

    state: dict[str, Any] = {
        "float32 products": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        **{
            f"cuDNN's {name}": getattr(torch.backends.cudnn, name)
            for name in ("benchmark", "deterministic", "allow_tf32")
        },
        "the pipeline": (
            type(pipe),
            sorted((name, id(value)) for name, value in vars(pipe).items()),
        ),
    }
    for part, value in pipe.components.items():
        if not isinstance(value, torch.nn.Module):
            config = getattr(value, "config", None)
            members = getattr(value, "__dict__", {}).items()
            state[part] = (
                type(value),
                str(config) if config is not None else id(value),
                {name: _mark(member) for name, member in members},
            )
            continue
        for name, module in value.named_modules(prefix=part):
            members = {
                key: _mark(mine)
                for key, mine in vars(module).items()
                if key not in ("_parameters", "_buffers")
            }
            tensors = [
                (key, id(t), t.data_ptr(), t._version, _sum(t), t.stride(), t.dtype)
                for key, t in _tensors(module)
            ]
            state[name] = (type(module), members, tensors)
    return state


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ]


def _sum(tensor: torch.Tensor) -> str:
    """Returns the sum of a tensor's values, as text, where NaN equals itself; `.data` is changed without a version."""
    import torch

    try:
        return str(float(tensor.detach().sum(dtype=torch.float32)))
    except (
        RuntimeError,
        NotImplementedError,
    ):  # on the meta device, or of a type without sums
        return ""


def _mark(value: Any) -> Any:
    """Returns what tells a value from another: a plain one is itself, of a container its content counts."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        return id(value), [(key, id(one)) for key, one in value.items()]
    return id(value)
