"""memory: keeps weights in host memory or on disk until they are used. These options exclude each other."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from sdopt.contract import MEMORY
from sdopt.hardware.device import Device
from sdopt.options import Context, Contract, Finding, Optimization, Proof, Stage, Trace
from sdopt.options.caching import (
    DeepCaching,
    FirstBlockCaching,
    PyramidAttention,
    TaylorSeer,
)
from sdopt.options.conflicts import (
    autocast_of,
    grad_mode_of,
    is_channels_last,
    upcasts_vae,
    weights_of,
)
from sdopt.options.dbcache import DualBlockCache
from sdopt.options.declarations import Excludes
from sdopt.options.lora import Hotswap
from sdopt.options.magcache import MagCache
from sdopt.options.memory import VaeTiling
from sdopt.options.quantization import TorchAo
from sdopt.pipelines.parts import (
    Pipeline,
    bytes_of,
    denoiser_of,
    device_of,
    hook_of,
    layers_with_weights,
    networks_of,
)
from sdopt.schema import UpTo10000
from sdopt.scratch import own_folder

if TYPE_CHECKING:
    import torch

_AUTOENCODER = ["quant_conv", "post_quant_conv", "encoder", "decoder"]
"""The blocks that diffusers' `AutoencoderKL` declares; an `AutoencoderTiny` has only the last two."""


class Offload(Optimization):
    """The base class of options that keep weights off the device until they are used; the arithmetic is unchanged."""

    stage = Stage.OFFLOAD
    loads_on_host = True
    claims = MEMORY
    excludes: ClassVar[tuple[Excludes, ...]] = (
        Excludes(
            "compiler",
            "its hooks would move weights inside compiled code: choose compiler=eager",
        ),
    )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        others = [
            axis
            for axis, option in ctx.chosen.items()
            if isinstance(option, Offload) and option != self
        ]
        return (
            [f"offloads the same weights as {', '.join(others)}: choose one of them"]
            if others
            else []
        )


class ModelOffload(Offload):
    """Keeps each network in host memory, and moves the whole network to the device while it is used.

    This is diffusers' `enable_model_cpu_offload`: the device holds one of text encoder, denoiser and VAE at a time.
    """

    diffusers_lines = ("pipe.enable_model_cpu_offload()",)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return super().conflicts(ctx) + _needs_a_gpu(ctx.device)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from accelerate.hooks import CpuOffload

        pipe.enable_model_cpu_offload(device=device_of(pipe))

        def proof(trace: Trace) -> Finding:
            networks = list(networks_of(pipe).values())
            hooked = sum(
                isinstance(getattr(network, "_hf_hook", None), CpuOffload)
                for network in networks
            )
            what = f"{hooked} of {len(networks)} networks offloaded"
            return _finding(
                pipe,
                trace,
                hooked == len(networks),
                what,
                {"networks": len(networks), "hooked": hooked},
            )

        return proof


class SequentialOffload(Offload):
    """Keeps all weights in host memory, and moves one layer at a time to the device.

    This is diffusers' `enable_sequential_cpu_offload`, which needs the least memory and is by far the slowest.
    """

    diffusers_lines = ("pipe.enable_sequential_cpu_offload()",)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx) + _needs_a_gpu(ctx.device) + _upcast(ctx)
        if (
            autocast_of(ctx)
            and weights_of(ctx) == "float32"
            and grad_mode_of(ctx) != "inference_mode"
        ):
            # Autocast caches the cast of each parameter until the call ends, and accelerate creates new parameters on
            # each load. Nothing is cached in inference mode: https://github.com/pytorch/pytorch/issues/158232
            copies = "autocast would keep a copy of a layer each time that it is loaded"
            reasons.append(
                f"{copies}: choose precision=fp16, bf16 or fp32, or grad_mode=inference_mode"
            )
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        pipe.enable_sequential_cpu_offload(device=device_of(pipe))

        def proof(trace: Trace) -> Finding:
            networks = networks_of(pipe).values()
            layers = [*chain.from_iterable(map(layers_with_weights, networks))]
            hooked = sum(
                _offloads(getattr(layer, "_hf_hook", None)) for layer in layers
            )
            what = f"{hooked} of {len(layers)} layers loaded one by one"
            return _finding(
                pipe,
                trace,
                hooked == len(layers) > 0,
                what,
                {"layers": len(layers), "hooked": hooked},
            )

        return proof


@dataclass(frozen=True)
class GroupOffload(Offload):
    """Keeps weights off the device, and loads one group of layers at a time: diffusers' `enable_group_offload`.

    For a GPU, weights stay in host memory, and a CUDA stream loads the next group while the current one computes. For a
    CPU, weights stay on disk, so that host memory holds one group at a time.
    """

    excludes = (
        Excludes(
            "lora",
            "each load would restore the weights from before lora=hotswap: choose lora=loaded",
            (Hotswap,),
        ),
    )

    offload_type: Literal["leaf_level", "block_level"] = "leaf_level"
    """The group: a single layer, or `num_blocks_per_group` blocks of the denoiser."""
    num_blocks_per_group: UpTo10000 = 1
    """Number of blocks per group, for `block_level` without a stream."""
    use_stream: bool | None = None
    """Whether a separate CUDA stream prefetches the next group; null is true on a GPU."""
    wait_in: Literal["memory", "disk"] | None = None
    """Where the weights stay; null is host memory for a GPU, and disk (temporary files) for a CPU."""

    @override
    def contract_on(self, device: Device) -> Contract:
        # A GPU's allocator aligns what is moved there. In host memory, tensors of a file lie where its header ends, at
        # multiples of 8 bytes. Without AVX-512, products of a matrix and a vector, such as a 1×1 convolution of one
        # pixel, add up in another order where the matrix does not begin at a multiple of 16 bytes.
        return Contract.EXACT if device.is_cuda else Contract.EQUIVALENT

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx)
        waits, streams = self._plan(ctx.device.type)
        if not ctx.device.is_cuda and waits == "memory":
            reasons.append(
                "memory.group_offload.wait_in=memory: a CPU computes from host memory anyway; choose wait_in=disk"
            )
        if not ctx.device.is_cuda and streams:
            reasons.append("memory.group_offload.use_stream=true: needs a CUDA device")
        if self.num_blocks_per_group != 1 and (
            streams or self.offload_type != "block_level"
        ):
            reasons.append(
                f"memory.group_offload.num_blocks_per_group={self.num_blocks_per_group}: groups of several blocks need "
                "offload_type=block_level and use_stream=false"
            )
        # The stream prefetches in the order of the first call; a layer that is skipped later stays on the device.
        kinds = (
            VaeTiling,
            DeepCaching,
            DualBlockCache,
            FirstBlockCaching,
            MagCache,
            PyramidAttention,
            TaylorSeer,
        )
        others = (
            [axis for axis, option in ctx.chosen.items() if isinstance(option, kinds)]
            if streams
            else []
        )
        order = "a stream needs a fixed order of layers, which changes with"
        reasons += [
            f"{order} {axis}: set memory.group_offload.use_stream=false"
            for axis in others
        ]
        if (
            streams
            and self.offload_type == "block_level"
            and "memory.tiny_vae" in ctx.chosen
        ):
            # diffusers adds hooks that synchronize with a stream only to networks with layers outside of block lists.
            reasons.append(
                "memory.tiny_vae does not wait for a stream: set memory.group_offload.use_stream=false"
            )
        if waits == "disk" or streams:
            reasons += _upcast(ctx)
        if waits == "disk" and isinstance(ctx.chosen.get("precision"), TorchAo):
            reasons.append(
                "safetensors cannot store TorchAO's quantized weights: choose another precision"
            )
        if waits == "disk" and is_channels_last(ctx):
            reasons.append(
                "safetensors stores only contiguous weights: choose layout=contiguous"
            )
        return reasons

    @override
    def disk_bytes(self, ctx: Context, weights: Callable[[], int]) -> int:
        return weights() if self._plan(ctx.device.type)[0] == "disk" else 0

    def _plan(self, device: str) -> tuple[str, bool]:
        """Returns where weights stay (`memory` or `disk`) and whether a stream is used, for a type of device."""
        on_gpu = device == "cuda"
        waits = self.wait_in or ("memory" if on_gpu else "disk")
        return waits, on_gpu if self.use_stream is None else self.use_stream

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch
        from diffusers.hooks import apply_group_offloading

        device = device_of(pipe)
        waits, streams = self._plan(device.type)
        folder = None
        if waits == "disk":
            folder = Path(tempfile.mkdtemp(prefix="offload-", dir=own_folder()))
            weakref.finalize(
                denoiser_of(pipe), shutil.rmtree, folder, ignore_errors=True
            )
        groups: dict[str, list[int]] = {}
        brought = Counter[str]()
        for name, network in networks_of(pipe).items():
            if waits == "disk":
                _untie(network)
            apply_group_offloading(
                network,
                onload_device=device,
                offload_device=torch.device("cpu"),
                offload_type=self.offload_type,
                num_blocks_per_group=self.num_blocks_per_group
                if self.offload_type == "block_level"
                else None,
                use_stream=streams,
                # AutoencoderTiny does not declare its blocks, and hooks on a VAE itself never run, since only its
                # encoder and decoder are called.
                block_modules=_AUTOENCODER if name == "vae" else None,
                # Files are named after layers, whose names repeat between networks.
                offload_to_disk_path=None if folder is None else str(folder / name),
            )
            _keep_statistics(network)
            # Ids: a reference to a group would keep the weights of a removed text encoder alive.
            groups[name] = [id(group) for group in _groups(network)]
            _count_onloads(name, _groups(network), brought)

        def proof(trace: Trace) -> Finding:
            networks = networks_of(pipe)  # text encoders may have been removed since
            whole = all(
                groups[name] == list(map(id, _groups(network))) and brought[name]
                for name, network in networks.items()
            )
            number = sum(len(groups[name]) for name in networks)
            facts = {"groups": number, "brought": brought.total()}
            what = f"{number} groups of layers, loaded {brought.total()} times so far"
            if folder is None:
                return _finding(pipe, trace, whole, what, facts)
            stored = (
                sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
                / 2**30
            )
            needed = sum(map(bytes_of, networks.values())) / 2**30
            return Finding(
                whole and stored >= needed,
                f"{what}; {stored:.2f} GiB on disk",
                facts | {"on_disk_gib": stored},
            )

        return proof


def _offloads(hook: Any) -> bool:
    """Returns whether an accelerate hook, or a hook in a sequence of hooks, offloads weights."""
    return any(_offloads(inner) for inner in getattr(hook, "hooks", ())) or bool(
        getattr(hook, "offload", False)
    )


def _needs_a_gpu(device: Device) -> list[str]:
    return [
        f"{reason}, where weights already are in host memory; memory=group_offload moves them to disk"
        for reason in device.needs_cuda("offloading to host memory")
    ]


def _upcast(ctx: Context) -> list[str]:
    """Returns the conflict, if any, with diffusers' cast of SDXL's VAE to float32, which misses offloaded weights."""
    if not upcasts_vae(ctx):
        return []
    reason = "diffusers casts this model's VAE to float32 in each call, which does not reach offloaded weights"
    return [f"{reason}: choose precision=fp16_vae_fp32, fp16_vae_fix or bf16"]


def _finding(
    pipe: Pipeline, trace: Trace, hooked: bool, what: str, facts: dict[str, Any]
) -> Finding:
    """Checks offloading to host memory: the call ran on the device, and no weights stay there between calls."""
    device = device_of(pipe)
    ran = pipe._execution_device.type == device.type and (
        device.type != "cuda" or bool(trace.kernels)
    )
    networks = networks_of(pipe).values()
    resting = sum(bytes_of(network, device.type) for network in networks)
    summary = (
        f"{what}; {resting / 2**30:.2f} GiB of weights on {device.type} between calls"
    )
    return Finding(
        hooked and ran and not resting,
        summary,
        facts | {"resting_on_device_gib": resting / 2**30},
    )


def _groups(network: torch.nn.Module) -> list[Any]:
    """Returns the distinct groups in which diffusers loads a network's layers."""
    hooks = [hook_of(layer, "group_offloading") for layer in network.modules()]
    return list(
        {id(hook.group): hook.group for hook in hooks if hook is not None}.values()
    )


def _untie(network: torch.nn.Module) -> None:
    """Gives each layer weights of its own where several share one, as T5's two layers of embeddings do.

    diffusers would write those of one layer to disk after it has taken away those of the other, which are the same.
    """
    import torch

    seen: set[int] = set()
    for layer in network.modules():
        for name, weight in list(layer.named_parameters(recurse=False)):
            if id(weight) in seen:
                parameter = torch.nn.Parameter(
                    weight.data.clone(), weight.requires_grad
                )
                setattr(layer, name, parameter)
            seen.add(id(weight))


def _keep_statistics(network: torch.nn.Module) -> None:
    """Keeps layers that hold no parameters on the device: FLUX.2 reads its VAE's statistics without running a layer."""
    from diffusers.hooks import HookRegistry

    for layer in network.modules():
        hook = hook_of(layer, "group_offloading")
        if (
            hook is None
            or any(True for _ in layer.parameters())
            or not any(True for _ in layer.buffers(recurse=False))
        ):
            continue
        hook.group.onload_()
        HookRegistry.check_if_exists_or_initialize(layer).remove_hook(
            "group_offloading", recurse=False
        )


def _count_onloads(name: str, groups: Iterable[Any], brought: Counter[str]) -> None:
    """Wraps each group's load function to count loads in `brought[name]`."""

    def counted(onload: Callable[[], None]) -> Callable[[], None]:
        def count_and_load() -> None:
            brought[name] += 1
            onload()

        return count_and_load

    for group in groups:
        group.onload_ = counted(group.onload_)
