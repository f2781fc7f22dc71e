"""Records what one call of a pipeline really ran: operators with their types, kernels, and each stage's state."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic_core import from_json

from sdopt.measure.garbage import no_garbage
from sdopt.measure.stages import DENOISER, STAGES, VAE_DECODER, observed
from sdopt.pipelines.parts import (
    STEPS,
    denoiser_of,
    hook_of,
    is_compiled,
    networks_of,
    unwrapped,
)
from sdopt.scratch import scratch_folder

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

_DTYPES = {
    "float": "float32",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "double": "float64",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "signed char": "int8",
}
_PRODUCTS = ("mm", "conv", "linear", "matmul")
_FUSED_OPERATORS = ("aten::_scaled_dot_product", "xformers")
_FUSED_KERNELS = ("flash_fwd", "FlashAttnFwd", "fmha_cutlass", "sdpa")
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_CAPTURE = "StreamBeginCapture"
_KERNEL_LAUNCHES = (*_GRAPH_LAUNCHES, "cudaLaunchKernel", "cuLaunchKernel")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_OPERATOR, _LAUNCH = "External id", "correlation"
_TOKENS = 3
"""Dimensions of a batch of tokens: samples, tokens, channels."""
_LABEL = "sdopt/"
_REGION = "Torch-Compiled Region"


@dataclass
class StageTrace:
    """One stage of the call: how often each operator ran, by name and by floating type of its first input."""

    calls: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    product_dtypes: Counter[str] = field(default_factory=Counter)
    """Floating types of the inputs of matrix products and convolutions."""
    grad_enabled: bool | None = None
    inference_mode: bool | None = None
    output_requires_grad: bool | None = None
    autocast_dtype: str | None = None
    cudnn_benchmark: bool | None = None

    idle: int = 0
    """Calls that an option answered without a run of the network."""
    batches: Counter[int] = field(default_factory=Counter)
    """Batch sizes of convolutions, each with its count; not seen in a replayed graph."""
    token_batches: Counter[int] = field(default_factory=Counter)
    """Batch sizes of linear layers over tokens, each with its count: a transformer may have no convolution."""
    ran: Counter[str] = field(default_factory=Counter)
    """How often each layer without sublayers ran, by its name in the model; not seen in compiled code."""
    convolutions: int = 0
    channels_last: int = 0
    """Number of convolutions, and how many of them had a channels-last output; not seen in compiled code."""
    graph_launches: int = 0
    """Number of CUDA graphs that were replayed."""
    graph_captures: int = 0
    """Number of CUDA graphs that were captured; a call in a warm process should capture none."""

    @property
    def samples(self) -> list[int]:
        """Batch sizes in which the network ran, the smallest first; [] where a graph hides them."""
        return sorted(self.batches or self.token_batches)

    @property
    def runs(self) -> int:
        """Number of calls that ran layers of the network."""
        return self.calls - self.idle

    def runs_within(self, layer: str) -> list[int]:
        """Returns how often each layer without sublayers ran that lies within a layer; [] in compiled code."""
        inside = f"{layer}."
        return [count for name, count in self.ran.items() if name.startswith(inside)]

    def runs_of(self, *endings: str) -> int:
        """Returns how often the layers ran whose names end so, all together."""
        return sum(count for name, count in self.ran.items() if name.endswith(endings))

    @property
    def compiled_regions(self) -> int:
        """Number of regions compiled by TorchDynamo that ran."""
        return sum(
            count for name, count in self.operators.items() if name.startswith(_REGION)
        )


@dataclass
class Trace:
    """A call of the pipeline as the profiler saw it."""

    stages: dict[str, StageTrace] = field(
        default_factory=lambda: {stage: StageTrace() for stage in STAGES}
    )
    kernels: Counter[str] = field(default_factory=Counter)
    """Device kernels that the denoiser launched, including those of replayed graphs; empty on a CPU."""
    complete: bool = True
    """Whether the profile has the work of each launch within the denoiser. With CUDA 12.6 to 13.0, CUPTI may lose some
    after a GPU was idle (https://github.com/pytorch/pytorch/issues/192021)."""
    denoiser_busy_s: float | None = None
    """Seconds for which the device worked in one call of the denoiser: overlapping work counts once. None on a CPU, and
    if the profile is not complete."""
    decoded: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes (n, 3, height, width) of the images that each call of the VAE's `decode` returned."""
    call: Callable[[], Any] | None = None
    """Makes the traced call again."""
    decoder_inputs: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes (n, channels, height, width) of the latents that each call of the VAE's decoder network took."""

    parameter_mib: dict[str, float] = field(default_factory=dict)
    """MiB of the parameters and buffers of all networks, by device and type."""

    def counts(self) -> dict[str, float]:
        """Returns the whole trace as counts by name, so that traces of two variants can be compared.

        Counts within a stage are per call of the stage, because variants are traced with different numbers of steps.
        """
        counted = {
            f"{kind} parameters, MiB": round(mib, 3)
            for kind, mib in self.parameter_mib.items()
        }
        for name, stage in self.stages.items():
            stage_counts = {
                **{f"{operator}": count for operator, count in stage.operators.items()},
                **{
                    f"products in {kind}": count
                    for kind, count in stage.product_dtypes.items()
                },
                **{
                    f"convolutions of {size} samples": count
                    for size, count in stage.batches.items()
                },
                **({} if stage.batches else _of_tokens(stage)),
                "convolutions that gave channels-last": stage.channels_last,
                "graph launches": stage.graph_launches,
            }
            counted |= {
                f"{name}: {what}": round(count / max(stage.calls, 1), 3)
                for what, count in stage_counts.items()
            }
            counted[f"{name}: in inference mode"] = float(bool(stage.inference_mode))
            counted[f"{name}: under autocast to {stage.autocast_dtype}"] = float(
                stage.calls > 0
            )
            if name != DENOISER:
                counted[f"{name}: calls"] = stage.calls
        kernels = self.kernels if self.complete else {}
        counted |= {
            f"kernel {name}": round(n / max(self.denoiser.calls, 1), 3)
            for name, n in kernels.items()
        }
        counted |= {
            f"decoder input {'×'.join(map(str, shape))}": 1.0
            for shape in self.decoder_inputs
        }
        return {name: count for name, count in counted.items() if count}

    def images(self) -> np.ndarray:
        """Makes the traced call again; returns its images, of shape (n, height, width, 3) in 0…255."""
        return np.stack([np.asarray(image) for image in self.call_again().images])

    def call_again(self) -> Any:
        """Makes the traced call again; returns what it returns."""
        assert self.call is not None
        return self.call()

    def is_compiled(self, denoiser: torch.nn.Module) -> bool:
        """Returns whether compiled code computed a denoiser, or blocks of it."""
        return self.denoiser.compiled_regions > 0 or is_compiled(denoiser)

    @property
    def attention_calls(self) -> int:
        """How often an attention layer of the denoiser ran; 0 in compiled code, where layers are not seen."""
        # The last module in every attention layer of diffusers, whatever computes the attention.
        return self.denoiser.runs_of(".to_out.1")

    @property
    def denoiser(self) -> StageTrace:
        """The denoiser's stage."""
        return self.stages[DENOISER]

    @property
    def graph_launches(self) -> int:
        """Number of CUDA graphs that were replayed within the denoiser."""
        return self.denoiser.graph_launches

    @property
    def fused_attention(self) -> dict[str, int]:
        """Counts of the denoiser's scaled-dot-product operators; if a graph hides them, of its fused kernels."""
        operators = {
            name.removeprefix("aten::"): count
            for name, count in sorted(self.denoiser.operators.items())
            if name.startswith(_FUSED_OPERATORS)
        }
        if operators:
            return operators
        fused = re.compile("|".join(map(re.escape, _FUSED_KERNELS)))
        return {name: n for name, n in self.kernels.items() if fused.search(name)}


def _of_tokens(stage: StageTrace) -> dict[str, int]:
    return {
        f"products of {size} samples": count
        for size, count in stage.token_batches.items()
    }


def trace_call(pipe: DiffusionPipeline, call: Callable[[], Any], cuda: bool) -> Trace:
    """Runs `call`, one of the pipeline with a few steps, under PyTorch's profiler; assigns each event to its stage."""
    import torch

    trace = Trace(call=call, parameter_mib=_parameters_of(pipe))
    regions: list[torch.profiler.record_function] = []

    def enter(stage: str) -> None:
        seen = trace.stages[stage]
        seen.calls += 1
        seen.grad_enabled = torch.is_grad_enabled()
        seen.inference_mode = torch.is_inference_mode_enabled()
        seen.cudnn_benchmark = torch.backends.cudnn.benchmark
        kind = "cuda" if cuda else "cpu"
        seen.autocast_dtype = (
            _name(torch.get_autocast_dtype(kind))
            if torch.is_autocast_enabled(kind)
            else None
        )
        region = torch.profiler.record_function(_LABEL + stage)
        region.__enter__()
        regions.append(region)

    def leave(stage: str, output: Any) -> None:
        regions.pop().__exit__(None, None, None)
        first = next(iter(output.values())) if isinstance(output, dict) else output[0]
        first = (
            first[0] if isinstance(first, list) else first
        )  # some transformers return a tensor for each sample
        if isinstance(first, torch.Tensor):
            trace.stages[stage].output_requires_grad = first.requires_grad
            if stage == VAE_DECODER:
                trace.decoded.append(tuple(first.shape))

    activities = [torch.profiler.ProfilerActivity.CPU] + (
        [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    )
    with (
        warnings.catch_warnings(),
        observed(pipe, enter, leave),
        _observed_layers(pipe, trace),
    ):
        # PyTorch 2.11 warns that it drops the events of earlier cycles; here is only one. `acc_events=True`, which
        # keeps them, also makes a Python object of each event, which took longer than the call.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with torch.profiler.profile(
            activities=activities, record_shapes=not _swaps_weights(pipe)
        ) as profile:
            call()
    trace.denoiser.idle = getattr(
        vars(unwrapped(denoiser_of(pipe))).get(STEPS), "idle", 0
    )
    with scratch_folder("trace") as folder:
        path = folder / "trace.json"
        profile.export_chrome_trace(str(path))
        # Garbage collection took most of the time, because a trace has many small objects.
        with no_garbage():
            _sort(from_json(path.read_bytes())["traceEvents"], trace)
    return trace


def _swaps_weights(pipe: DiffusionPipeline) -> bool:
    """Returns whether a call moves quantized weights between devices.

    PyTorch moves such a weight by `swap_tensors`, which fails while the profiler, recording shapes, refers to it.
    """
    moved = quantized = False
    for network in networks_of(pipe).values():
        for layer in network.modules():
            moved |= hasattr(layer, "_hf_hook")
            moved |= hook_of(layer, "group_offloading") is not None
        for weight in network.parameters():
            quantized |= hasattr(weight, "__tensor_flatten__")
    return moved and quantized


def _parameters_of(pipe: DiffusionPipeline) -> dict[str, float]:
    """Returns the MiB of the parameters and buffers of all networks, by device and type."""
    import torch

    sizes: dict[str, float] = {}
    for network in pipe.components.values():
        if isinstance(network, torch.nn.Module):
            for tensor in (*network.parameters(), *network.buffers()):
                kind = f"{tensor.device.type} {_name(tensor.dtype)}"
                sizes[kind] = (
                    sizes.get(kind, 0.0)
                    + tensor.numel() * tensor.element_size() / 2**20
                )
    return sizes


@contextmanager
def _observed_layers(pipe: DiffusionPipeline, trace: Trace) -> Iterator[None]:
    """Counts the denoiser's layers that run, and convolutions by layout, and records what the VAE's decoder takes.

    Not the layers of a compiled model, because hooks would recompile it. `vae.decode` may decode latents in pieces.
    """
    import torch

    denoiser, seen = denoiser_of(pipe), trace.denoiser

    def note(name: str, layer: torch.nn.Module, output: Any) -> None:
        seen.ran[name] += 1
        if (
            isinstance(layer, torch.nn.Conv2d)
            and output.shape[1] > 1
            and output.shape[2] > 1
        ):
            seen.convolutions += 1
            seen.channels_last += output.is_contiguous(
                memory_format=torch.channels_last
            )

    layers = (
        []
        if is_compiled(denoiser)
        else [named for named in denoiser.named_modules() if not [*named[1].children()]]
    )
    handles = [
        layer.register_forward_hook(
            lambda layer, _inputs, output, name=name: note(name, layer, output)
        )
        for name, layer in layers
    ]
    decoder_inputs = trace.decoder_inputs
    if pipe.vae is not None:
        decoder: torch.nn.Module = pipe.vae.decoder
        handles.append(
            decoder.register_forward_pre_hook(
                lambda _module, inputs: decoder_inputs.append(tuple(inputs[0].shape))
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sort(events: list[dict[str, Any]], trace: Trace) -> None:
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(_LABEL))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(_LABEL)
    )

    def stage_at(moment: float) -> str | None:
        return next(
            (stage for start, end, stage in spans if start <= moment < end), None
        )

    stages: dict[tuple[str, int], str | None] = {}
    awaited: set[int] = set()
    for event in events:
        if event.get("cat") == "cpu_op":
            stage = stage_at(event["ts"])
            stages[_OPERATOR, event["args"].get(_OPERATOR, -1)] = stage
            if stage is not None:
                _count_operator(event, trace.stages[stage])
        elif event.get("cat") in _LAUNCHES:
            stage = stage_at(event["ts"])
            stages[_LAUNCH, event["args"].get(_LAUNCH, -1)] = stage
            if stage is not None and event["name"].startswith(_GRAPH_LAUNCHES):
                trace.stages[stage].graph_launches += 1
            if stage is not None and _CAPTURE in event["name"]:
                trace.stages[stage].graph_captures += 1
            if stage == DENOISER and event["name"].startswith(_KERNEL_LAUNCHES):
                awaited.add(event["args"].get(_LAUNCH, -1))
    worked = {
        event["args"].get(_LAUNCH)
        for event in events
        if event.get("cat") in _DEVICE_WORK
    }
    trace.complete = awaited <= worked
    _count_device_work(events, stages, trace)


def _count_device_work(
    events: list[dict[str, Any]],
    stages: dict[tuple[str, int], str | None],
    trace: Trace,
) -> None:
    """Counts kernels, and the time that the device worked for the denoiser.

    Device work runs after its launch, so the launch gives its stage. CUDA gives both the same correlation id. Kineto's
    operator id does not link them: for a graph that no operator launched, Kineto writes CUDA's id in its place, which
    may equal the id of any operator (`ChromeTraceLogger::handleActivity` in output_json.cpp).
    """
    busy = []
    for event in events:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        numbers = [(kind, event["args"].get(kind, -2)) for kind in (_LAUNCH, _OPERATOR)]
        if (
            next((stages[number] for number in numbers if number in stages), DENOISER)
            == DENOISER
        ):
            busy.append((event["ts"], event["ts"] + event["dur"]))
            if event["cat"] == "kernel":
                trace.kernels[event["name"]] += 1
    if busy and trace.complete and trace.denoiser.calls:
        trace.denoiser_busy_s = _covered(busy) / 1e6 / trace.denoiser.calls


def _count_operator(event: dict[str, Any], seen: StageTrace) -> None:
    """Counts an operator, the type of a product's first input, and the batch of a convolution."""
    name, inputs = event["name"], event["args"]
    seen.operators[name] += 1
    types = [_DTYPES[kind] for kind in inputs.get("Input type", []) if kind in _DTYPES]
    if types and any(word in name for word in _PRODUCTS):
        seen.product_dtypes[types[0]] += 1
    # Shapes may be missing: sizes are symbols while a compiler traces, or shapes are not recorded.
    if name == "aten::convolution" and (sizes := inputs.get("Input Dims", [()])[0]):
        seen.batches[sizes[0]] += 1
    elif (
        name == "aten::linear"
        and len(sizes := inputs.get("Input Dims", [()])[0]) == _TOKENS
    ):
        seen.token_batches[sizes[0]] += 1


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals, given as start and end."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
