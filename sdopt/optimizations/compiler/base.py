"""What compilers share: the modules of a pipeline that they take, what stands in for those, and common conflicts."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from sdopt.measure.compilation import compilation
from sdopt.measure.stages import DENOISER, TEXT_ENCODER, VAE_DECODER
from sdopt.measure.trace import StageTrace, Trace
from sdopt.optimizations.base import Context, Contract, Finding, Optimization, Stage
from sdopt.optimizations.conflicts import autocasts, records_autograd, upcasts_vae
from sdopt.pipelines.parts import STEPS, denoiser_name, text_encoders_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

STAGE_OF = {"text_encoder": TEXT_ENCODER, "denoiser": DENOISER, "decoder": VAE_DECODER}
"""What may be compiled, with the stage of a call in which it runs."""

_REGION = "Torch-Compiled Region"


TARGETS = {"choices": tuple(STAGE_OF)}
"""Metadata of a field that lists what is compiled."""


@dataclass(frozen=True)
class Compiler(Optimization):
    """The base class of what replaces modules by compiled ones."""

    stage: ClassVar[Stage] = Stage.COMPILE
    fixed_batch: ClassVar[bool] = True

    @property
    @override
    def claims(self) -> frozenset[str]:
        return frozenset({"latency"})

    @property
    @override
    def contract(self) -> Contract:
        return Contract.EQUIVALENT


def picks_kernels(ctx: Context, what: str) -> list[str]:
    """Returns the conflict, if any, of something that a choice of PyTorch's attention kernels does not reach."""
    backend = getattr(ctx.chosen.get("attention"), "backend", None)
    return [f"{what} picks its attention kernel itself: choose another than attention={backend}"] if backend else []


def exports(ctx: Context, what: str) -> list[str]:
    """Returns the conflicts of a graph that is taken out of the module with what such a graph does not see."""
    found = autocasts(ctx, what) + picks_kernels(ctx, what) + records_autograd(ctx, what)
    for axis, option in ctx.chosen.items():
        if option.stage is Stage.QUANTIZE:
            found.append(f"{what} holds weights of one type, and {axis} stores them in another than it computes in")
    return found


def leaves_pytorch(ctx: Context, what: str) -> list[str]:
    """Returns the conflicts of something that computes the denoiser outside of PyTorch, with copies of its weights."""
    found = exports(ctx, what)
    if getattr(ctx.chosen.get("precision"), "weights", None) == "bfloat16":
        found.append(f"{what} gets its inputs through NumPy, which has no bfloat16: choose precision=fp32")
    return found


def unfit_targets(ctx: Context, chosen: Sequence[str]) -> list[str]:
    """Returns why some targets cannot be compiled: there are none, or a text encoder that never runs."""
    if not chosen:
        return [f"compiler.targets=[]: name at least one of {', '.join(STAGE_OF)}"]
    if "text_encoder" in chosen and "memory.precomputed_embeddings" in ctx.chosen:
        return ["memory=precomputed_embeddings leaves no text encoder to compile: choose compiler.targets=[denoiser]"]
    return []


def unfit_for_graphs(ctx: Context, chosen: Sequence[str]) -> list[str]:
    """Returns why CUDA graphs of some targets would not be those of a call: autograd, or weights that move."""
    found = records_autograd(ctx, "a CUDA graph")
    if "decoder" in chosen and upcasts_vae(ctx):
        found.append(
            "this model's VAE is cast to float32 in each call and back, which moves its weights: choose "
            "compiler.targets=[text_encoder,denoiser], or precision=bf16"
        )
    return found


def places_of(pipe: "DiffusionPipeline", target: str) -> Iterator[tuple[Any, str]]:
    """Yields where the modules of a target sit, as owner and attribute: SDXL has two text encoders."""
    if target == "text_encoder":
        encoders = text_encoders_of(pipe)
        yield from ((pipe, name) for name in vars(pipe) if any(vars(pipe)[name] is encoder for encoder in encoders))
    elif target == "denoiser":
        yield pipe, denoiser_name(pipe)
    else:
        yield pipe.vae, "decoder"


Module = TypeVar("Module", bound=torch.nn.Module)


def replace_modules(
    pipe: "DiffusionPipeline", chosen: Iterable[str], make: Callable[[torch.nn.Module], Module]
) -> dict[str, list[Module]]:
    """Puts what `make` returns for each module of the targets in its place; returns it, by target."""
    made: dict[str, list[Module]] = {}
    for target in dict.fromkeys(chosen):
        for owner, name in list(places_of(pipe, target)):
            replacement = make(getattr(owner, name))
            setattr(owner, name, replacement)
            made.setdefault(target, []).append(replacement)
    return made


def replace_by_graphs(
    pipe: "DiffusionPipeline", chosen: Iterable[str], make: "Callable[[Tensors], Graph]"
) -> "dict[str, list[PerShape]]":
    """Puts a `PerShape` in the place of each module of the targets; returns them, by target.

    A denoiser whose steps are of two kinds (`caching=deepcache`) keeps its place, and each kind has its own graphs:
    which of them a step is, is decided outside of both.
    """
    made: dict[str, list[PerShape]] = {}
    for target in dict.fromkeys(chosen):
        for place in list(places_of(pipe, target)):
            steps = vars(getattr(*place)).get(STEPS)
            for owner, name in [(steps, part) for part in getattr(steps, "parts", ())] or [place]:
                replacement = PerShape(getattr(owner, name), make)
                setattr(owner, name, replacement)
                made.setdefault(target, []).append(replacement)
    return made


def regions_in(stage: StageTrace) -> int:
    """Returns how many regions compiled by TorchDynamo ran in a stage of a call."""
    return sum(count for name, count in stage.operators.items() if name.startswith(_REGION))


def only_replays(stages: Iterable[StageTrace]) -> bool:
    """Returns whether every call of some stages replayed a CUDA graph, and none was captured anew.

    Where weights have moved, a graph is captured in each call, and then replayed once.
    """
    return all(stage.graph_launches >= stage.calls > 0 and not stage.graph_captures for stage in stages)


class StandIn(torch.nn.Module):
    """Stands in for a module: it has the same attributes, and a `forward` of its own.

    `unwrapped` finds the module behind it, as it finds one that `torch.compile` wrapped.
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
    """A module as a function of tensors to tensors: the other arguments of a call are constants of it.

    Args:
        module: whose call it is.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Attributes:
        inputs: the tensors among the arguments.
        key: what a graph of this call depends on, beside the values of its tensors.
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
            tuple((tuple(given.shape), given.dtype, given.device) for given in self.inputs),
            tuple(self._arguments),
            str(self._spec),
            (weight.dtype, weight.device, weight.data_ptr()),
            (torch.is_inference_mode_enabled(), torch.is_autocast_enabled(weight.device.type)),
        )

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Calls the module with `tensors` in the place of those that it was made with; returns the tensors it gives."""
        args, kwargs = tree_unflatten(_with_tensors(self._arguments, tensors), self._spec)
        leaves, self._result_spec = tree_flatten(self.module(*args, **kwargs))
        results, self._results = _without_tensors(leaves)
        return tuple(results)

    def output(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Returns what the module returned when it was last called, with `tensors` in the place of its own."""
        return tree_unflatten(_with_tensors(self._results, tensors), self._result_spec)


_TENSOR = "a tensor"
"""Stands where a tensor was."""


def _without_tensors(leaves: Iterable[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """Returns the tensors among leaves, and the leaves with a mark for each of them."""
    leaves = list(leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _with_tensors(leaves: Iterable[Any], tensors: Iterable[torch.Tensor]) -> list[Any]:
    given = iter(tensors)
    return [next(given) if leaf is _TENSOR else leaf for leaf in leaves]


Graph = Callable[..., Sequence[torch.Tensor]]
"""Takes tensors and returns tensors, as `Tensors.forward` does."""


class PerShape(StandIn):
    """Stands in for a module with one graph for each shape of inputs, made when that shape first comes.

    Args:
        module: what it stands in for.
        make: makes a graph of a call; it has to run the call once, so that the form of the output is known.

    Attributes:
        graphs: by the key of a call.
        runs: how often a graph ran.
    """

    def __init__(self, module: torch.nn.Module, make: Callable[[Tensors], Graph]) -> None:
        super().__init__(module)
        self._make = make
        self.graphs: dict[Any, tuple[Tensors, Graph]] = {}
        self.runs = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph of this call's shapes."""
        call = Tensors(self._orig_mod, args, kwargs)
        inputs = call.inputs
        if call.key not in self.graphs:
            with compilation():
                self.graphs[call.key] = call, self._make(call)
            call.inputs = []
        made, graph = self.graphs[call.key]
        self.runs += 1
        return made.output(graph(*inputs))


def graphs_in(stand_ins: Iterable[PerShape]) -> int:
    """Returns how many graphs were made."""
    return sum(len(stand_in.graphs) for stand_in in stand_ins)


@contextmanager
def tracing() -> Iterator[None]:
    """Ignores what PyTorch says of each trace: TorchScript is deprecated, and conditions on shapes become constants."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        yield


def ran_outside(trace: Trace, stand_ins: Iterable[PerShape]) -> Finding:
    """Judges whether the denoiser was computed by graphs outside of PyTorch: PyTorch then runs none of its products."""
    graphs = graphs_in(stand_ins)
    seen = trace.denoiser
    left = sum(seen.product_dtypes.values())
    facts = {"graphs": graphs, "calls": seen.calls, "products_by_pytorch": left}
    summary = f"{graphs} graph{'s' if graphs != 1 else ''} for {seen.calls} calls, {left} products by PyTorch"
    return Finding(graphs > 0 and seen.calls > 0 and not left, summary, facts)
